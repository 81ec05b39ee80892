"""Checkpoints that are written beside training: what ranks tell each other of them."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.distributed.process_group import World
from surefoot.errors import StorageError
from surefoot.training import async_checkpoint
from surefoot.training.async_checkpoint import Saver
from surefoot.training.checkpoint import TrainState, list_checkpoints


@dataclass(frozen=True)
class InThreads(World):
    """Two ranks as threads of this process."""

    said: list[Any] = field(default_factory=list)
    barrier: Any = None

    def gather(self, value: Any) -> list[Any]:
        self.said[self.rank] = value
        self.barrier.wait(20)
        everyone = list(self.said)
        self.barrier.wait(20)
        return everyone


def on_two_ranks(work: Callable[[World], None]) -> list[str]:
    """What each of them raises, in words."""
    raised, said, barrier = ["", ""], [None, None], threading.Barrier(2)

    def run(rank: int) -> None:
        try:
            work(InThreads(rank, 2, rank, None, said, barrier))
        except StorageError as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return raised


def save(folder: Path, ranks: World, *, waits: bool = True) -> None:
    weight = nn.Parameter(torch.ones(3))
    ours = Saver(folder, {}, None, ranks)
    ours.save({"weight": weight}, torch.optim.AdamW([weight]), TrainState(step=1))
    if waits:
        ours.wait()
    ours.end()


def test_a_save_is_complete_where_all_ranks_have_written(tmp_path: Path) -> None:
    assert on_two_ranks(lambda ranks: save(tmp_path, ranks)) == ["", ""]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]


def test_a_rank_that_fails_waits_a_moment_for_what_the_others_are_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_part = async_checkpoint._write_part

    def slowly(temporary: Path, target: Path, blocks: Any, ranks: World) -> Any:
        time.sleep(float(ranks.rank))
        return write_part(temporary, target, blocks, ranks)

    monkeypatch.setattr(async_checkpoint, "_write_part", slowly)
    on_two_ranks(lambda ranks: save(tmp_path, ranks, waits=False))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]


def test_a_rank_that_cannot_even_say_that_its_disk_is_full_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_note = async_checkpoint._leave_note

    def full(path: Path, note: Any) -> None:
        if path.stem == "rank-00001":
            raise OSError(28, "No space left on device")
        leave_note(path, note)

    monkeypatch.setattr(async_checkpoint, "_leave_note", full)
    raised = on_two_ranks(lambda ranks: save(tmp_path, ranks))
    assert raised[0] == raised[1]
    assert raised[0].startswith("rank 1: ")
    assert "No space left on device" in raised[0]
    assert list_checkpoints(tmp_path) == []


def test_a_rank_is_through_with_its_note_before_rank_0_can_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 takes the notes away as soon as all are there."""
    folder = tmp_path / "notes"
    folder.mkdir()
    replace, seen = os.replace, []

    def replace_and_take_away(source: Path, target: Path) -> None:
        replace(source, target)
        seen.append(json.loads(Path(target).read_text()))
        shutil.rmtree(folder)

    monkeypatch.setattr(os, "replace", replace_and_take_away)
    async_checkpoint._leave_note(folder / "rank-00001.json", {"files": {}})
    assert seen == [{"files": {}}]
