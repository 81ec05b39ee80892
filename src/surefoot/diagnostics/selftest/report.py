"""Results of the ranks of a self-test, as plain values. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from surefoot.system.atomic_io import write_json


@dataclass
class Report:
    """Result of each stage, and where the test ended if it did not complete."""

    ranks: int
    backend: str
    said: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Stage -> rank -> its result, for stages that all ranks completed."""
    stopped_in: str = ""
    """Stage that not all ranks completed; empty if all did."""
    within_s: float = 0.0
    """Deadline of that stage in seconds."""
    errors: dict[int, str] = field(default_factory=dict)
    """Rank -> its error, for ranks that failed in that stage."""
    is_over: bool = False
    """Whether rank 0 has told the others that the test is over."""
    silent: list[int] = field(default_factory=list)
    """Ranks without a result at that deadline that had progressed least."""

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    def of(self, stage: str) -> Mapping[int, Any]:
        return self.said.get(stage, {})


def read_report(path: Path) -> Report:
    """Read a report. Raises: OSError if the file cannot be read."""
    payload = json.loads(path.read_text("utf-8"))
    results = {stage: {int(rank): value for rank, value in ranks.items()} for stage, ranks in payload["said"].items()}
    errors = {int(rank): text for rank, text in payload["errors"].items()}
    return Report(**{**payload, "said": results, "errors": errors})
