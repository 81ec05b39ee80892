"""`surefoot drill`: small runs on this machine with real faults, to verify that each fault is diagnosed.

Every run is an ordinary `surefoot train` of a tiny random model, with its supervisor. The fault strikes inside one of
its ranks (`diagnostics.fault_injection`) in a step that the seed selects.
"""

import json
import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from surefoot.config import load_config
from surefoot.diagnostics.fault_injection import FAULTS
from surefoot.diagnostics.monitor.observers import FAULT_VARIABLE
from surefoot.errors import ConfigError
from surefoot.system.process import PYTHON

TOGETHER = 3
"""Number of concurrent runs: a stalled run costs nothing."""
GIVE_UP_S = 150.0
END_WITHIN_S = 15.0
"""Seconds after the finding in which the run must end."""
CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "memory", "freezer")
LIMIT_BYTES = 2 << 30
"""Memory limit of a run that must exhaust it."""
Run = TypeVar("Run")
Result = TypeVar("Result")
WORDS = "one two three four five six seven eight nine ten".split()


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run with one fault."""

    kind: str
    seed: int
    rank: int
    step: int
    struck: bool
    expected: str
    found: str | None
    """Code of the first finding."""
    named_rank: int | None
    after_s: float | None
    """Seconds from the fault to the finding on disk."""
    status: int
    """Exit status of the run; negative for a signal."""
    cause: str
    """Cause in the finding; without a finding, the end of the run's output."""

    @property
    def is_named(self) -> bool:
        """Whether the expected code was found, with the right rank if the fault names one."""
        return self.found == self.expected and (not FAULTS[self.kind].names_rank or self.named_rank == self.rank)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_named": self.is_named}


def drill(kinds: Sequence[str] = (), *, seeds: int = 1, overrides: Sequence[str] = ()) -> Iterator[Outcome]:
    """Strike each kind of fault `seeds` times; yield each outcome as soon as it is ready.

    Without `kinds`: all that are possible here. `overrides`: settings of the runs, as `key=value`.
    Raises: ConfigError for a kind that does not exist or is impossible here, and for invalid settings.
    """
    unknown = [kind for kind in kinds if kind not in faults()]
    if unknown:
        raise ConfigError(f"no such fault: {', '.join(map(repr, unknown))}. There are: {', '.join(faults())}.")
    possible = [kind for kind in faults() if not FAULTS[kind].needs_limits or can_limit()]
    beyond = [kind for kind in kinds if kind not in possible]
    if beyond:
        raise ConfigError(
            f"{', '.join(beyond)}: no cgroup can be created on this machine. Run as root where version 1 is mounted."
        )
    chosen = kinds or possible
    with tempfile.TemporaryDirectory(prefix="surefoot-drill-") as name:
        settings = write_job(Path(name)) | {"nproc_per_node": 2}
        overridden = {text.partition("=")[0].lstrip("-") for text in overrides}
        values = {key: value for key, value in (settings | {"output_dir": name}).items() if key not in overridden}
        ranks = load_config(None, overrides, values).run.nproc_per_node  # invalid overrides are refused here
        runs = {
            (kind, seed): partial(strike, kind, settings, Path(name, f"{kind}-{seed}"), seed, overrides, ranks=ranks)
            for seed in range(seeds)
            for kind in chosen
        }
        with started(runs, alone=[(kind, seed) for kind, seed in runs if FAULTS[kind].is_alone]) as outcomes:
            for future in as_completed(outcomes.values()):
                yield future.result()


@contextmanager
def started(runs: Mapping[Run, Callable[[], Result]], alone: Collection[Run]) -> Iterator[dict[Run, Future[Result]]]:
    """Start runs concurrently and, after these, one by one those that must be `alone` on this machine.

    Runs that have not begun when the caller leaves are never started.
    """
    is_abandoned = threading.Event()
    with ThreadPoolExecutor(TOGETHER) as pool, ThreadPoolExecutor(1) as single_pool:
        together = {run: pool.submit(start) for run, start in runs.items() if run not in alone}

        def run_after_pool(start: Callable[[], Result]) -> Result:
            wait(together.values())
            if is_abandoned.is_set():
                raise CancelledError
            return start()

        outcomes = together | {
            run: single_pool.submit(run_after_pool, start) for run, start in runs.items() if run in alone
        }
        try:
            yield outcomes
        finally:  # on Ctrl-C, too
            is_abandoned.set()
            for future in outcomes.values():
                future.cancel()


def faults() -> list[str]:
    """Return the kinds of faults that must be found."""
    return [kind for kind, fault in FAULTS.items() if fault.code]


def write_job(folder: Path) -> dict[str, Any]:
    """Write a tiny random model, its tokenizer and its data; return the settings of a run that uses them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    texts = ["<|end|>", "<|user|>", "<|assistant|>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(texts)}, unk_token="<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
        "{% if add_generation_prompt %}<|assistant|> {% endif %}"
    )
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=len(texts), eos_token_id=0, pad_token_id=0, **shape, **experts))
    model.save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    rows = [
        [{"role": "user", "content": WORDS[n % 10]}, {"role": "assistant", "content": " ".join(WORDS[n % 7 :])}]
        for n in range(200)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return settings_of(folder / "model", folder / "rows.jsonl")


def settings_of(model: Path, data: Path) -> dict[str, Any]:
    """Return the settings of a drill's runs."""
    return {
        "model": str(model), "dataset": str(data), "max_length": 128, "learning_rate": 1e-4, "device": "cpu",
        "save_steps": 0, "global_batch_size": 4, "per_device_train_batch_size": 2, "report": False,
    }  # fmt: skip


def strike(
    kind: str, settings: dict[str, Any], folder: Path, seed: int, overrides: Sequence[str] = (), *, ranks: int = 2
) -> Outcome:
    """Run `ranks` ranks with one fault, on a rank and in a step that the seed selects; return the outcome."""
    fault = FAULTS[kind]
    draw = random.Random(f"{kind}-{seed}")
    rank, step = draw.randrange(ranks), draw.randrange(fault.first_step, fault.first_step + 8)
    folder.mkdir(parents=True)
    struck = folder / "struck"
    settings = {
        **settings,
        "output_dir": str(folder / "run"),
        "max_steps": 100_000,
        "save_steps": step if fault.phase == "save" else 0,
        "nproc_per_node": ranks,
        "on_stall": "stop",
        "stall_timeout_s": 1.0,
    }
    (folder / "run.json").write_text(json.dumps(settings))
    began = time.monotonic()
    with open(folder / "output", "w") as output, limited(kind) as inside:
        run = subprocess.Popen(
            [*inside, *PYTHON, "-m", "surefoot", "train", str(folder / "run.json"), *overrides],
            env={**os.environ, FAULT_VARIABLE: f"{kind}:{rank}:{step}:{struck}", "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        finding_s, has_terminated = None, False
        findings_path = folder / "run" / "findings.jsonl"
        while run.poll() is None and time.monotonic() - began < GIVE_UP_S:
            if finding_s is None and findings_path.is_file() and findings_path.stat().st_size:
                finding_s = time.time()
            # A leak does not end the run.
            if finding_s is not None and not has_terminated and time.time() - finding_s > END_WITHIN_S:
                run.terminate()
                has_terminated = True
            time.sleep(0.1)
        if run.poll() is None:  # not found: kill the launcher and all its descendants
            for process in psutil.Process(run.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            run.kill()
        status = run.wait(30)
    finding_s = finding_s or (time.time() if findings_path.is_file() else None)
    findings = [json.loads(line) for line in findings_path.read_text().splitlines()] if findings_path.is_file() else []
    first = findings[0] if findings else {"code": None, "evidence": {}, "cause": (folder / "output").read_text()[-500:]}
    return Outcome(
        kind=kind,
        seed=seed,
        rank=rank,
        step=step,
        struck=struck.exists(),
        expected=fault.code,
        found=first["code"],
        named_rank=first["evidence"].get("rank"),
        after_s=round(finding_s - float(struck.read_text()), 1) if finding_s and struck.exists() else None,
        status=status,
        cause=first["cause"],
    )


@contextmanager
def limited(kind: str) -> Iterator[list[str]]:
    """Yield the beginning of a command that runs in its own cgroups, if the fault needs them. Raises: OSError."""
    if not FAULTS[kind].needs_limits:
        yield []
        return
    cpu, memory, freezer = groups = [CGROUPS / name / f"surefoot-{os.getpid()}-{kind}" for name in CONTROLLERS]
    try:
        for group in groups:
            group.mkdir()
        (memory / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        yield ["sh", "-c", f'echo $$ > {cpu}/cgroup.procs; echo $$ > {memory}/cgroup.procs; exec "$@"', "sh"]
    finally:
        if freezer.is_dir():
            (freezer / "freezer.state").write_text("THAWED")  # processes that were killed while frozen die now
        for group in groups:
            _remove_cgroup(group)


def _remove_cgroup(group: Path) -> None:
    """Delete a cgroup; this takes a moment while its last process ends. A cgroup that remains is empty and harmless."""
    deadline = time.monotonic() + END_WITHIN_S
    while group.is_dir() and time.monotonic() < deadline:
        with suppress(OSError):
            group.rmdir()
        time.sleep(0.1)


def can_limit() -> bool:
    """Return whether cgroups can be created here: as root, where the controllers of version 1 are mounted."""
    return all(os.access(CGROUPS / name / "cgroup.procs", os.W_OK) for name in CONTROLLERS)
