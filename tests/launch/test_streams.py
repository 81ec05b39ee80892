"""A closed or unread standard output or error changes no exit status; a full one does. Real processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow

REDIRECTIONS = (">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full", "| head -c1 >/dev/null")


def status_of(command: str, redirection: str, cwd: Path) -> int:
    """The exit status of `surefoot COMMAND` with a redirection."""
    told = cwd / "status"
    subprocess.run(
        ["bash", "-c", f"{sys.executable} -m surefoot {command} {redirection}; echo ${{PIPESTATUS[0]}} >{told}"],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=300,
        check=True,
    )
    return int(told.read_text())


@pytest.mark.long
@pytest.mark.parametrize("redirection", REDIRECTIONS)
@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("settings", 0),
        ("settings --json", 0),
        ("explain", 0),
        ("explain SF104", 0),
        ("explain SF999", 2),
        ("--help", 0),
        ("--version", 0),
        ("train", 2),
        ("train nothing.yaml", 2),
        ("plan nothing.yaml --json", 2),
        ("import -- swift sft --model m --dataset d.jsonl", 0),
    ],
)
def test_light_verbs_end_as_ever(tmp_path: Path, command: str, status: int, redirection: str) -> None:
    has_lost_its_result = redirection == ">/dev/full" and status == 0
    assert status_of(command, redirection, tmp_path) == (1 if has_lost_its_result else status)


@pytest.mark.parametrize("command", ["settings", "explain SF104", "--version"])
def test_a_full_disk_at_the_standard_output_is_reported(command: str) -> None:
    line = f"{sys.executable} -m surefoot {command} > /dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard output could not be written: No space left on device.")


@pytest.mark.matrix
def test_runs_end_as_ever_and_keep_what_they_made(tmp_path: Path, settings: dict[str, Any]) -> None:
    for number, redirection in enumerate([">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full", "| head -c1"]):
        run = tmp_path / f"run-{number}"
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**settings, "max_steps": 2, "output_dir": str(run)}))
        json = "--json" if number % 2 else ""
        status = 1 if "full" in redirection else 0
        assert status_of(f"train run.yaml {json}", redirection, tmp_path) == status, redirection
        assert (run / "adapter" / "adapter_model.safetensors").stat().st_size > 0
        assert (run / "summary.json").read_text().startswith("{"), "nothing that was printed went into a file"
    for command in (
        f"chat {run} --prompt Count --max-new-tokens 2",
        f"explain {run}",
        "data run.yaml",
        "plan run.yaml",
    ):
        assert status_of(command, ">&- 2>&-", tmp_path) == 0, command
        assert status_of(command, ">/dev/full", tmp_path) == 1, command


@pytest.mark.long
def test_two_ranks_end_as_ever_where_nobody_reads(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**settings, "nproc_per_node": 2, "max_steps": 2}))
    assert status_of("train run.yaml", "<&- >&- 2>&-", tmp_path) == 0
    assert (Path(settings["output_dir"]) / "adapter" / "adapter_model.safetensors").stat().st_size > 0


@pytest.mark.long
def test_a_reader_that_is_slow_to_read_a_pipe_that_must_not_block_changes_no_status() -> None:
    program = """
import os, subprocess, sys, time
reading, writing = os.pipe()
os.set_blocking(writing, False)
verb = subprocess.Popen([sys.executable, "-m", "surefoot", "settings", "--json"], stdout=writing, stderr=writing)
os.close(writing)
time.sleep(2)
size = 0
while piece := os.read(reading, 1 << 16):
    size += len(piece)
print(verb.wait(), size)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    whole = subprocess.run([sys.executable, "-m", "surefoot", "settings", "--json"], capture_output=True, check=True)
    assert done.stdout.split() == ["0", str(len(whole.stdout))]
