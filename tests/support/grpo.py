"""Settings and parts of small GRPO runs."""

import json
from pathlib import Path
from typing import Any, ClassVar

from surefoot.errors import StoppedOnFinding
from surefoot.methods.rollout.engines.local import LocalEngine
from surefoot.methods.rollout.engines.server import Server
from surefoot.methods.rollout.types import Wait

VOWELS = {"func": "regex", "args": {"pattern": "[aeiou]"}}


def prompt_rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": [{"role": "user", "content": f"Count to {number}"}], "answer": str(number), "tag": [number]}
        for number in range(count)
    ]


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

    def submit(self, *arguments: Any) -> Wait:
        self.versions.append(arguments[2])
        self.ends.append(arguments[1].ends)
        made = self.generate(*arguments)
        return lambda _seconds: made


def broken() -> StoppedOnFinding:
    return Server("http://127.0.0.1:9").stopped("SF801", "a completion is missing")


GRPO: dict[str, Any] = {
    "method": "grpo",
    "reward_funcs": [
        {"func": "regex", "args": {"pattern": "[aeiou]"}},
        {"func": "regex", "args": {"pattern": "[0-9]"}},
        {"func": f"{Path(__file__).with_name('rewards.py')}:longest"},  # ranks share groups
    ],
    "num_generations": 3,
    "global_batch_size": 9,
    "max_completion_length": 9,
    "stop": ["a", "e", "1", "7"],  # ranks are through with their completions at different times
}
