"""What grows is told by counting objects twice: in processes that really keep more and more."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from surefoot.health.diagnose.memory import Owner, name_owner
from surefoot.health.objects import Census, read_census
from surefoot.health.witness import OBJECTS
from surefoot.health.witnesses import Witnesses

LEAKS = {
    "bytes": "class Cache:\n  pass\ncache = Cache(); cache.seen = []\ndef leak(): cache.seen.append(bytes(4 << 20))",
    "tensors": "import torch\nkept = {}\ndef leak(): kept[len(kept)] = torch.ones(1 << 20)",
    "arrays": "import numpy, collections\nkept = collections.deque()\ndef leak(): kept.append(numpy.ones(1 << 19))",
    "native": (
        "import ctypes\nmalloc = ctypes.CDLL(None).malloc; malloc.restype = ctypes.c_void_p\n"
        "def leak(): ctypes.memset(malloc(4 << 20), 1, 4 << 20)"
    ),
}
LOOP = """
import sys, time
from pathlib import Path
from surefoot.health.witness import Witness
witness = Witness(Path(sys.argv[1]), 0)
print('ready', flush=True)
for line in sys.stdin:
    for _ in range(25): leak()
    print('grown', flush=True)
"""


@contextmanager
def leaking(kind: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a witness, whose memory grows by 100 MiB with each line that it is sent."""
    (folder / "events").mkdir()
    command = [sys.executable, "-c", LEAKS[kind] + LOOP, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def count(folder: Path) -> Census:
    witnesses = Witnesses(folder)
    deadline = time.monotonic() + 30  # a machine under load answers late
    while time.monotonic() < deadline:
        answers = witnesses.answers(witnesses.ask(OBJECTS), [0])
        if answers:
            return read_census(answers[0])
    raise AssertionError("no answer")


def owner_of(kind: str, folder: Path) -> Owner:
    with leaking(kind, folder) as process:
        before = count(folder)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "grown\n"
        found = name_owner(before, count(folder))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("bytes", "it is bytes objects in a list of 25, Cache.seen"),
        ("tensors", "it is torch.Tensor objects in a dict of 25, __main__.kept"),
        ("arrays", "it is numpy.ndarray objects in a deque of 25, __main__.kept"),
        ("native", "no kind of Python's objects has grown by it: native code keeps it"),
    ],
)
def test_the_objects_that_grow_are_named_with_what_holds_them(kind: str, what: str, tmp_path: Path) -> None:
    assert owner_of(kind, tmp_path).what == what


def test_one_count_says_nothing() -> None:
    assert name_owner(None, Census(0, {"bytes": (1, 100)}, ())) is None
