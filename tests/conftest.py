"""Small real models, a real tokenizer and small data, made once per session."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # a forgotten download fails at once
os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported; without a GPU only its interpreter runs
os.environ["SUREFOOT_SUPERVISED"] = "by no one"  # one more process for each run would double the time of many tests

import hypothesis
import pytest
from transformers import (
    PreTrainedTokenizerFast,
)

from surefoot import cli
from surefoot.config import load_config
from surefoot.launch.run_verb import run_verb, train_and_print
from surefoot.system.atomic_io import cache_folder
from tests.support.data import counting_rows, write_jsonl
from tests.support.models import make_model, make_tokenizer
from tests.support.quantised import release

hypothesis.settings.register_profile("suite", derandomize=True)
hypothesis.settings.load_profile("suite")  # the same examples in every run of the suite; `make fuzz` draws others


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a verb in this process, which has loaded torch; `train` as the process that its supervisor starts."""

    def run(*arguments: str) -> Any:
        if arguments[0] == "train":
            status = run_verb(lambda: train_and_print(load_config(arguments[1], arguments[2:]), as_json=False))
        else:
            status = cli.main(arguments)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, said.out, said.err)

    return run


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models as they are released: in a quantised format (`tests.support.quantised.RELEASES`)."""
    root = tmp_path_factory.mktemp("released")

    def get(name: str) -> Path:
        if name.startswith("int"):
            pytest.importorskip("compressed_tensors")
        return root / name if (root / name).exists() else release(name, root / name)

    return get


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of their own for the tests' data; models that were fetched stay where they are."""
    folder, models = tmp_path_factory.mktemp("cache"), cache_folder() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to(models.resolve())
    before = os.environ.get("SUREFOOT_CACHE")
    os.environ["SUREFOOT_CACHE"] = str(folder)
    yield folder
    os.environ.pop("SUREFOOT_CACHE")
    if before is not None:
        os.environ["SUREFOOT_CACHE"] = before


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Callable[[str], Path]:
    """kind -> a folder with a tiny random model of that kind and a tokenizer."""
    root = tmp_path_factory.mktemp("models")

    def folder(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            make_model(kind).save_pretrained(path)
            tokenizer.save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "train.jsonl", counting_rows(40))


@pytest.fixture
def settings(model_folder: Callable[[str], Path], data_file: Path, tmp_path: Path) -> dict[str, Any]:
    """A complete small run on the CPU."""
    return {
        "model": str(model_folder("qwen2_moe")),
        "dataset": str(data_file),
        "output_dir": str(tmp_path / "run"),
        "max_length": 128,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lora_rank": 4,
        "device": "cpu",
        "report": False,
    }


@pytest.fixture(scope="session")
def nvml_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which NVIDIA's bindings find a library that answers like NVML of two cards."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True, timeout=60)
    return {"LD_LIBRARY_PATH": str(folder)}
