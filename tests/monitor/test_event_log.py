"""What a run's rings say of it, on real runs."""

import json
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import surefoot
from surefoot import cli
from surefoot.diagnostics.monitor.event_log import KEPT_STARTS, Entry, Recorder, read_history
from surefoot.diagnostics.monitor.ring_buffer import HEADER, RECORD_BYTES
from surefoot.errors import InputError
from surefoot.events import PhaseBegan, PhaseEnded, RunEnded, RunStarted, StepEnded
from tests.support.processes import training_process

STEP = ["data_wait", "collectives", "forward", "backward", "collectives", "optimizer"]
"""In `backward` the device is waited for, before anything is communicated."""


def began(found: list[Entry], step: int) -> list[str]:
    return [entry.phase for entry in found if entry.kind == "phase began" and entry.step == step]


def test_a_run_says_what_it_did_in_order(settings: dict[str, Any]) -> None:
    result = surefoot.train({**settings, "save_steps": 2, "eval_fraction": 0.2}, screen=False)
    found = read_history(result.run_folder).entries
    assert all(earlier.time_s <= later.time_s for earlier, later in pairwise(found))
    open_phases: list[str] = []
    for entry in found:  # every phase that began ended, the inner ones first
        if entry.kind == "phase began":
            open_phases.append(entry.phase)
        elif entry.kind == "phase ended":
            assert open_phases.pop() == entry.phase
    assert open_phases == []
    assert set(began(found, 0)) == {"launch", "load", "tokenize"}
    in_order = [phase for phase, after in pairwise([*began(found, 1), ""]) if phase != after]
    assert in_order == STEP
    assert "save" in began(found, 2)
    assert "evaluate" in began(found, 4)
    assert began(found, 4)[-1] == "export"
    assert found[-1].kind == "run ended"

    lines = [json.loads(line) for line in (result.run_folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert {entry.step: entry.values["loss"] for entry in found if entry.kind == "step"} == losses
    batches = [entry.values for entry in found if entry.kind == "batch"]
    assert sum(batch["tokens"] for batch in batches) == [line["tokens"] for line in lines if "loss" in line][-1]


@pytest.mark.long
def test_a_run_that_was_killed_still_says_where_it_was(settings: dict[str, Any]) -> None:
    folder = Path(settings["output_dir"])
    config = folder.parent / "run.yaml"
    config.write_text(yaml.safe_dump({**settings, "max_steps": 5000, "save_steps": 0}))
    with subprocess.Popen(
        [sys.executable, "-m", "surefoot", "train", str(config)], stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 60
        while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text().splitlines()) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        training_process(process.pid).kill()
    found = read_history(folder).entries
    last = max(entry.step for entry in found)
    steps = len((folder / "metrics.jsonl").read_text().splitlines())
    assert steps <= last <= steps + 1
    assert found[-1].kind != "run ended"
    assert found[-1].time_s == pytest.approx(time.time(), abs=5)


def test_each_start_has_a_ring_of_its_own(settings: dict[str, Any], tmp_path: Path) -> None:
    result = surefoot.train(settings, screen=False)
    first = read_history(result.run_folder).entries
    with pytest.raises(InputError):
        surefoot.train({**settings, "dataset": str(tmp_path / "none.jsonl"), "learning_rate": 1.0}, screen=False)
    assert read_history(result.run_folder).entries == first
    surefoot.train({**settings, "overwrite_output_dir": True}, screen=False)
    both = read_history(result.run_folder).entries
    assert both[: len(first)] == first
    assert [entry.kind for entry in both].count("run ended") == 2
    for _ in range(KEPT_STARTS):
        surefoot.train(settings, screen=False)  # complete already
    assert len(list((result.run_folder / "events").glob("*.ring"))) == KEPT_STARTS


def test_a_run_goes_on_where_its_events_cannot_be_written(settings: dict[str, Any]) -> None:
    folder = Path(settings["output_dir"])
    folder.mkdir()
    (folder / "events").write_text("in the way")
    assert surefoot.train(settings, screen=False).status == "completed"


def test_a_ring_that_cannot_be_read_hides_no_other(settings: dict[str, Any]) -> None:
    folder = surefoot.train(settings, screen=False).run_folder
    whole = read_history(folder)
    (folder / "events" / "rank-00007-1.ring").write_bytes(b"")
    again = read_history(folder)
    assert again.entries == whole.entries
    assert len(again.unreadable) == 1
    assert "rank-00007" in again.unreadable[0]


def test_damaged_records_are_left_out_by_all_who_read_them(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = surefoot.train({**settings, "save_steps": 0}, screen=False).run_folder
    (ring,) = (folder / "events").glob("rank-*.ring")
    whole, sound = len(read_history(folder).entries), ring.read_bytes()
    for seed in range(5):
        draw, damaged = random.Random(seed), bytearray(sound)
        for at in draw.sample(range(HEADER.size, HEADER.size + whole * RECORD_BYTES), 3 * whole):
            damaged[at] = draw.randrange(256)
        ring.write_bytes(damaged)
        history = read_history(folder)
        assert 0 < len(history.entries) < whole
        assert "records are damaged" in history.unreadable[0]
        for verb in (["explain"], ["watch", "--once"], ["report"]):
            assert cli.main([*verb, str(folder)]) in (0, 3), capsys.readouterr().err


def test_memory_is_counted_by_owner(settings: dict[str, Any]) -> None:
    folder = surefoot.train(settings, screen=False).run_folder
    (sampled,) = [entry for entry in read_history(folder).entries if entry.kind == "memory"]
    model, _ = surefoot.load(folder)
    lora = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    base = sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    assert sampled.values["trained"] == sampled.values["gradients"] == 4 * lora
    assert sampled.values["optimizer"] >= 2 * 4 * lora
    assert sampled.values["frozen"] == pytest.approx(4 * base + buffers, rel=0.02)
    assert sampled.values["total"] > sampled.values["optimizer"]


def test_cores_that_are_waited_for_between_steps_are_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits:
        """A thread that has waited a second for each phase or step that ends, ten for an evaluation."""

        waited_s = 0.0

        def since_last_s(self) -> float:
            seconds, self.waited_s = self.waited_s, 0.0
            return seconds

    waits = Waits()
    monkeypatch.setattr("surefoot.diagnostics.monitor.event_log.RunQueueWait", lambda: waits)
    recorder = Recorder(tmp_path, 0)
    for step in (1, 2, 3):
        waits.waited_s += 1
        recorder.observe(StepEnded(step, 3, False, 0.0, 1.0, 1.0, 1e-3, 9, 9, 9.0, 0.1, 9))
        recorder.observe(PhaseBegan(0, step, "evaluate"))
        waits.waited_s += 10
        recorder.observe(PhaseEnded(0, step, "evaluate"))
    recorder.observe(RunEnded({}))
    found = [entry.values["in_line_s"] for entry in read_history(tmp_path).entries if entry.kind == "learning rate"]
    assert found == [1, 1, 1]


@pytest.mark.parametrize(("config", "offloads"), [({}, 0.0), ({"offload": None}, 0.0), ({"offload": "cpu"}, 1.0)])
def test_a_run_that_offloads_says_so(tmp_path: Path, config: dict[str, Any], offloads: float) -> None:
    recorder = Recorder(tmp_path, 0)
    recorder.observe(RunStarted(tmp_path, config, 5, 1, 1, 1))
    recorder.observe(RunEnded({}))
    first = read_history(tmp_path).entries[0]
    assert (first.kind, first.step, first.values["offloads"]) == ("run started", 1, offloads)
