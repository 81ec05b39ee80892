"""Saves against lost power: after a cut at any call, the newest checkpoint that a resume takes is whole."""

from pathlib import Path

from surefoot.training.checkpoint import checkpoint_folder, find_newest, list_checkpoints, step_of
from tests.support.checkpoints import save_steps
from tests.support.lost_power import Recorder, Tree, read_tree, write_tree


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
