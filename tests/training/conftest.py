"""A small run of GRPO, and what it writes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from surefoot.errors import StoppedOnFinding
from surefoot.rl.engines.local import LocalEngine
from surefoot.rl.engines.server import Server
from surefoot.rl.rollout import Wait
from surefoot.training import rollouts, run
from tests.conftest import write_jsonl

VOWELS = {"func": "regex", "args": {"pattern": "[aeiou]"}}


def prompt_rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": [{"role": "user", "content": f"Count to {number}"}], "answer": str(number), "tag": [number]}
        for number in range(count)
    ]


@pytest.fixture
def grpo(model_folder: Callable[[str], Path], tmp_path: Path) -> dict[str, Any]:
    """A small run whose rewards have spread."""
    return {
        "model": str(model_folder("llama")),
        "method": "grpo",
        "dataset": str(write_jsonl(tmp_path / "prompts.jsonl", prompt_rows(12))),
        "output_dir": str(tmp_path / "run"),
        "reward_funcs": [VOWELS],
        "num_generations": 4,
        "global_batch_size": 8,
        "per_device_train_batch_size": 3,
        "max_completion_length": 6,
        "max_length": 64,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lora_rank": 4,
        "device": "cpu",
        "report": False,
    }


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text("utf-8").splitlines()]


def reward_file(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(f"import time\n\ndef mine(completions, **columns):\n{body}\n")
    return f"{folder}/mine.py:mine"


class EagerEngine(LocalEngine):
    """Makes completions when it is asked, like a server: by the weights as they are then."""

    versions: ClassVar[list[int]] = []
    """Of the policies that it was asked for."""
    ends: ClassVar[list[frozenset[int]]] = []

    def ask(self, *arguments: Any) -> Wait:
        self.versions.append(arguments[2])
        self.ends.append(arguments[1].ends)
        made = self.generate(*arguments)
        return lambda _seconds: made


def broken() -> StoppedOnFinding:
    return Server("http://127.0.0.1:9").stopped("SF801", "a completion is missing")


@pytest.fixture
def ahead(grpo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def settings(engine: type[LocalEngine] = EagerEngine, **changes: Any) -> dict[str, Any]:
        monkeypatch.setattr(run, "open_server", lambda *_: Server("http://127.0.0.1:9"))
        monkeypatch.setattr(rollouts, "_vllm", lambda _, learner, tokenizer, *__: engine(learner.model, tokenizer))
        return {**grpo, "rollout_engine": "vllm", "max_staleness": 1, **changes}

    return settings
