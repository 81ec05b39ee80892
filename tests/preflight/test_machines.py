"""Snapshots that `surefoot doctor --json` recorded on machines which were broken for real, in one way each.

Few files could be opened (ulimit -n), a disk was full (a small tmpfs), one core was left (taskset), variables were
misspelt. Names and addresses were replaced.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import load_config
from surefoot.diagnostics.preflight.runner import examine
from surefoot.system.machine import read_snapshot

MACHINES = Path(__file__).parent / "machines"
RANKS = {"nproc_per_node": 2, "device": "cpu"}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("few-files", {"SF703": "warning"}),
        ("full-disk", {"SF711": "failed"}),
        ("one-core", {"SF714": "warning"}),
        ("variables", {"SF705": "failed", "SF710": "warning"}),
    ],
)
def test_what_is_wrong_with_a_machine_that_was_recorded_is_named(
    settings: dict[str, Any], name: str, found: dict[str, str]
) -> None:
    loaded = load_config(None, (), {**settings, **RANKS})
    checks = examine(read_snapshot(MACHINES / f"{name}.json"), loaded)
    assert {one.finding.code: one.status for one in checks if one.finding is not None} == found


def test_every_recording_has_a_case() -> None:
    marks = test_what_is_wrong_with_a_machine_that_was_recorded_is_named.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == {path.stem for path in MACHINES.glob("*.json")}
    assert all(set(json.loads(path.read_text())) == {"machine"} for path in MACHINES.glob("*.json"))
