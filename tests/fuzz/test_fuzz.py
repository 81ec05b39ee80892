"""Whatever is given to the program, it ends with status 0, 2 or 3, soon, without a traceback, and touches no other run.

`make test` tries the same examples each time; `make fuzz` tries random ones for SUREFOOT_FUZZ_S seconds and prints the
seed of a failure, which SUREFOOT_FUZZ_SEED repeats.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from surefoot import cli
from surefoot.launch.run_verb import run_verb
from tests.fuzz.strategies import Damage, copy_damaged, damages, row_files, yaml_files
from tests.support.data import counting_rows, write_jsonl
from tests.support.processes import surefoot

pytestmark = [pytest.mark.fuzz, pytest.mark.filterwarnings("ignore")]

MOST_S = 60
"""A verb that takes longer on one example waits for something, or goes on for ever."""
MOST_MEMORY_BYTES = 6 << 30
TARGETS = 5
FUZZ_S = float(os.environ.get("SUREFOOT_FUZZ_S", 0))
FIXED_SEED = os.environ.get("SUREFOOT_FUZZ_SEED")
PINS = (
    "max_steps=1",
    "health=false",
    "preflight=false",
    "device=cpu",
    "nproc_per_node=1",
    "dataset_num_proc=0",
    "report=false",
)

Example = TypeVar("Example")


class TooSlow(BaseException):
    """An example took longer than its bound; no handler of the program takes it for an error of its own."""


@dataclass(frozen=True)
class World:
    """Real files, made once: a run that nobody may touch, and what examples are damaged copies of."""

    root: Path
    model: Path
    data: Path
    sentinel: Path
    """The folder of a finished run with two checkpoints and its adapter."""
    settings: dict[str, Any]

    def config(self, folder: Path, **changes: Any) -> str:
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump({**self.settings, "output_dir": str(folder / "run"), **changes}))
        return str(path)


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory() -> Iterator[None]:
    """Let an example that reads without end fail with MemoryError, before the machine runs out of memory."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text()
    in_use = int(status.partition("VmData:")[2].split()[0]) << 10  # stacks of threads that other tests have left, too
    resource.setrlimit(resource.RLIMIT_DATA, (in_use + MOST_MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.fixture(scope="module")
def world(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("fuzz")
    data, model, sentinel = (
        write_jsonl(root / "data.jsonl", counting_rows(12)),
        model_folder("llama"),
        root / "sentinel",
    )
    values = {"model": str(model), "dataset": str(data), "max_length": 128, "lora_rank": 4, "save_steps": 1}
    world = World(root, model, data, sentinel, values)
    assert call("train", world.config(root, output_dir=str(sentinel)), *PINS, "max_steps=2") == 0
    return world


def digest(folder: Path) -> str:
    """Return a hash of the names and contents of all files of a folder."""
    hashed = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        hashed.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()


def call(*arguments: str) -> int:
    """Run a verb in this process and return its status. What escapes is what a real process would print and die of."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooSlow(f"{' '.join(arguments)}: longer than {MOST_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    errors = io.StringIO()
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                status = cli.main(arguments)
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert "Traceback" not in errors.getvalue(), errors.getvalue()
    assert "trust_remote_code" not in errors.getvalue(), errors.getvalue()
    assert status in (0, 2, 3), f"{' '.join(arguments)}: status {status}: {errors.getvalue()[-2000:]}"
    return status


def try_examples(
    world: World, examples: st.SearchStrategy[Example], count: int, check: Callable[[Path, Example], object]
) -> None:
    """Check `count` fixed examples, or random ones for a share of SUREFOOT_FUZZ_S, each in a folder of its own."""
    untouched = digest(world.sentinel)

    def check_one(example: Example) -> None:
        with tempfile.TemporaryDirectory(dir=world.root) as name, contextlib.chdir(name):
            check(Path(name), example)
        assert digest(world.sentinel) == untouched, "another run was touched"

    end = time.monotonic() + FUZZ_S / TARGETS
    is_random = FUZZ_S > 0 or FIXED_SEED is not None
    while True:
        number = int(FIXED_SEED) if FIXED_SEED is not None else random.randrange(2**32)
        limits = settings(
            max_examples=count,
            derandomize=not is_random,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        test = limits(given(examples)(check_one))
        try:
            (seed(number)(test) if is_random else test)()
        except BaseException as error:
            if is_random:
                error.add_note(f"SUREFOOT_FUZZ_SEED={number}")
            raise
        if not is_random or FIXED_SEED is not None or time.monotonic() > end:
            return


@pytest.mark.long
def test_configs(world: World) -> None:
    def check(folder: Path, example: tuple[bytes, str]) -> None:
        text, verb = example
        (folder / "run.yaml").write_bytes(text)
        call(verb, "run.yaml", *PINS)

    try_examples(world, yaml_files({**world.settings, "output_dir": "run"}), 100, check)


@pytest.mark.long
def test_rows(world: World) -> None:
    def check(folder: Path, example: tuple[bytes, str]) -> None:
        text, handling = example
        (folder / "rows.jsonl").write_bytes(text)
        call("data", world.config(folder, dataset="rows.jsonl", on_bad_row=handling), *PINS)

    try_examples(world, row_files(), 100, check)


@pytest.mark.long
def test_checkpoints(world: World) -> None:
    def check(folder: Path, applied: list[Damage]) -> None:
        run = copy_damaged(world.sentinel, folder / "run", applied)
        call("export", str(run), str(folder / "adapter"), "--step", "2")
        call("explain", str(run))
        call("train", world.config(folder, output_dir=str(run)), *PINS, "max_steps=3")

    try_examples(world, damages(world.sentinel), 40, check)


@pytest.mark.matrix
def test_model_folders(world: World) -> None:
    def check(folder: Path, applied: list[Damage]) -> None:
        model = copy_damaged(world.model, folder / "model", applied)
        call("upcycle", str(model), str(folder / "moe"))
        call("chat", str(model), "--prompt", "x", "--max-new-tokens", "2")
        call("train", world.config(folder, model=str(model)), *PINS)
        call("doctor", world.config(folder, model=str(model)), *PINS)

    try_examples(world, damages(world.model), 30, check)


@pytest.mark.matrix
def test_adapters(world: World) -> None:
    source = world.sentinel / "adapter"

    def check(folder: Path, applied: list[Damage]) -> None:
        adapter = copy_damaged(source, folder / "adapter", applied)
        call("export", str(adapter), str(folder / "merged"), "--merge")
        call("chat", str(world.model), "--adapter", str(adapter), "--prompt", "x", "--max-new-tokens", "2")
        call("train", world.config(folder, init_adapter=str(adapter)), *PINS)

    try_examples(world, damages(source), 30, check)


def test_what_escapes_in_process_is_a_traceback_of_a_real_process() -> None:
    with pytest.raises(ZeroDivisionError):
        run_verb(lambda: 1 // 0)
    code = "import sys; from surefoot.launch.run_verb import run_verb; sys.exit(run_verb(lambda: 1 // 0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.fixture
def broken_model(world: World, tmp_path: Path) -> Path:
    model = copy_damaged(world.model, tmp_path / "model", [])
    about = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**about, "hidden_size": "x"}))
    return model


@pytest.mark.long
def test_real_processes_end_as_calls_do(world: World, broken_model: Path, tmp_path: Path) -> None:
    examples = (
        ("data", world.config(tmp_path, seed="x")),
        ("train", world.config(tmp_path, model=str(broken_model)), *PINS),
    )
    for arguments in examples:
        done = surefoot(*arguments)
        assert "Traceback" not in done.stderr
        assert done.returncode == call(*arguments) == 2
