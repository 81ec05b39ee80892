"""Rows and losses of small runs of distillation."""

from pathlib import Path
from typing import Any

from tests.methods.test_dpo import pair_rows
from tests.support.runs import numbers


def conversations(count: int) -> list[dict[str, Any]]:
    return [{"messages": row["prompt"] + row["chosen"]} for row in pair_rows(count)]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in numbers(run) if "loss" in line]
