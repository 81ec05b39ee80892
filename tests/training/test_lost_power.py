"""Saves against lost power: after a cut at any call, the newest checkpoint that a resume takes is whole."""

import random
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import load_config
from surefoot.config.resolve import resolve
from surefoot.events import CheckpointSaved, Event
from surefoot.system import atomic_io
from surefoot.training.checkpoint import checkpoint_folder, find_newest, list_checkpoints, step_of
from surefoot.training.run_dir import claim
from surefoot.training.trainer import train
from tests.support.checkpoints import save_steps
from tests.support.lost_power import Recorder, Tree, read_tree, write_tree

pytestmark = pytest.mark.long


def test_the_newest_checkpoint_is_whole_after_a_cut_at_any_call_of_a_save(tmp_path: Path) -> None:
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    recorder = Recorder(disk)
    wanted: dict[int, Tree] = {}

    def promise(step: int) -> None:
        wanted[step] = read_tree(checkpoint_folder(disk / "run", step))
        recorder.mark(step)

    with recorder.recording():
        save_steps(disk / "run", range(1, 5), 1, promise)
    assert len(recorder.events) > 100
    num_disks = 0
    for tree, promised in recorder.disks(samples=20):
        write_tree(tree, copy)
        newest, _ = find_newest(copy / "run")
        step = step_of(newest) if newest is not None else 0
        assert step >= max(promised, default=0), sorted(tree)
        assert newest is None or read_tree(newest) == wanted[step]
        assert all(read_tree(path) == wanted[step_of(path)] for path in list_checkpoints(copy / "run"))
        num_disks += 1
    assert num_disks > 500


@pytest.mark.parametrize("share", [0.08, pytest.param(1.0, marks=pytest.mark.matrix)])
def test_a_whole_run_outlives_lost_power_at_any_call(settings: dict[str, Any], tmp_path: Path, share: float) -> None:
    """Two starts: the second passes over a damaged checkpoint, and puts its adapter in the place of the first one's.

    `share` of the possible disks are tried, drawn from a fixed seed: a resume of each takes a while.
    """
    draw = random.Random(1)
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    settings = {**settings, "lr_scheduler_type": "constant", "save_steps": 1, "save_total_limit": 2, "health": False}
    run, adapters, summaries = disk / "run", [], []
    recorder = Recorder(disk, ignored=("events", ".lock"))

    class Promises:
        def observe(self, event: Event) -> None:
            if isinstance(event, CheckpointSaved):
                recorder.mark(("saved", event.step))

    with recorder.recording(exchange=(atomic_io, "exchange_folders")):
        for number, max_steps in enumerate((3, 5)):
            loaded = load_config(None, (), {**settings, "output_dir": str(run), "max_steps": max_steps})
            result = train(loaded, [Promises()], screen=False)
            assert (result.status, result.steps) == ("completed", max_steps)
            adapters.append(read_tree(run / "adapter"))
            summaries.append((run / "summary.json").read_bytes())
            recorder.mark(("ended", number))
            if number == 0:
                recorder.mark(("damaged", 3))
                (checkpoint_folder(run, 3) / "state.json").write_bytes(b"{")
    num_disks = 0
    for tree, promised in recorder.disks(samples=3):
        if draw.random() >= share:
            continue
        write_tree(tree, copy)
        folder = copy / "run"
        ends = [value for kind, value in promised if kind == "ended"]
        is_damaged = ("damaged", 3) in promised
        saved = max((step for kind, step in promised if kind == "saved" and not (is_damaged and step == 3)), default=0)
        loaded = load_config(None, (), {**settings, "output_dir": str(folder), "max_steps": 5})
        with claim(resolve(loaded, 1)) as resume:
            step = step_of(resume.checkpoint) if resume.checkpoint is not None else 0
            assert step >= saved
            if resume.checkpoint is not None:
                assert (resume.checkpoint.name, read_tree(resume.checkpoint)) in recorder.renamed
            assert is_damaged or resume.findings == []
        if ends:
            assert read_tree(folder / "adapter") in adapters[ends[-1] :]
            assert (folder / "summary.json").read_bytes() in summaries[ends[-1] :]
        num_disks += 1
    assert num_disks > 2000 * share
