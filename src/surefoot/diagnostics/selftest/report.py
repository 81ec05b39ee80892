"""What the ranks of a self-test said, as plain values. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from surefoot.system.atomic_io import write_json


@dataclass
class Report:
    """What came of each stage, and where the test ended if it did not go through."""

    ranks: int
    backend: str
    said: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Stage -> rank -> what it found, of stages that all ranks went through."""
    stopped_in: str = ""
    """The stage that not all ranks went through; empty where all did."""
    within_s: float = 0.0
    """Its deadline."""
    errors: dict[int, str] = field(default_factory=dict)
    """What the ranks said that failed in it."""
    is_over: bool = False
    """Whether rank 0 has said so to the others."""
    silent: list[int] = field(default_factory=list)
    """The ranks that said nothing until its deadline."""

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    def of(self, stage: str) -> Mapping[int, Any]:
        return self.said.get(stage, {})


def read_report(path: Path) -> Report:
    """Raises: OSError where there is none."""
    told = json.loads(path.read_text("utf-8"))
    said = {stage: {int(rank): value for rank, value in ranks.items()} for stage, ranks in told["said"].items()}
    errors = {int(rank): text for rank, text in told["errors"].items()}
    return Report(**{**told, "said": said, "errors": errors})
