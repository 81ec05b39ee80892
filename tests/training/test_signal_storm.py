"""Many stop signals while a run saves and ends: it saves, and ends as it does after one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefoot.training.checkpoint import list_checkpoints
from tests.support.processes import command_lines

STORM_EVERY_S = 0.0005


def stop_with(settings: dict[str, Any], numbers: Sequence[int]) -> tuple[int, str]:
    """Start a run, stop it with the first signal, send all of them from its last save to its end.

    Returns the exit status, and what the run said.
    """
    folder = Path(settings["output_dir"])
    config = folder.with_suffix(".yaml")
    config.write_text(yaml.safe_dump({**settings, "max_steps": 100_000, "save_steps": 0}))
    environment = {name: value for name, value in os.environ.items() if name != "SUREFOOT_SUPERVISED"}
    command = [sys.executable, "-m", "surefoot", "train", str(config)]
    end_s = time.monotonic() + 240
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        try:
            metrics, saves = folder / "metrics.jsonl", folder / "checkpoints"
            while not (metrics.is_file() and metrics.read_bytes().count(b"\n") >= 2):
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < end_s
                time.sleep(0.01)
            process.send_signal(numbers[0])
            while not (saves.is_dir() and any(saves.iterdir())) and process.poll() is None:
                assert time.monotonic() < end_s
                time.sleep(STORM_EVERY_S)
            sent = 0
            while process.poll() is None:
                assert time.monotonic() < end_s, f"after {sent} signals: {running_below(process.pid)}"
                process.send_signal(numbers[sent % len(numbers)])
                sent += 1
                time.sleep(STORM_EVERY_S)
            assert sent > 10
            return process.returncode, process.communicate(timeout=60)[1]
        finally:
            process.kill()


def running_below(pid: int) -> list[str]:
    """Return what runs below a process, and what each does: a run that does not end is told by it."""
    return [f"{process.pid} {process.status()} {line}" for process, line in command_lines(pid).items()]


@pytest.mark.long
@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([signal.SIGTERM], marks=pytest.mark.matrix),
        pytest.param([signal.SIGINT], marks=pytest.mark.matrix),
        [signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
    ],
)
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_a_storm_of_signals_within_the_last_save_ends_a_run_as_one_does(
    settings: dict[str, Any], num_ranks: int, numbers: Sequence[int]
) -> None:
    status, said = stop_with({**settings, "nproc_per_node": num_ranks, "report": True}, numbers)
    folder = Path(settings["output_dir"])
    (checkpoint,) = list_checkpoints(folder)
    assert not [path for path in (folder / "checkpoints").iterdir() if path != checkpoint]
    assert "Traceback" not in said
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert status == 1, "which is what one signal gives"
