"""What grows is told by counting objects twice: in processes that really keep more and more."""

import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.diagnostics.monitor.evidence_client import WITHIN_S, EvidenceClient
from surefoot.diagnostics.monitor.evidence_server import OBJECTS
from surefoot.diagnostics.monitor.leaks import LeakDetector
from surefoot.diagnostics.monitor.object_census import Census, read_census
from surefoot.diagnostics.rules.memory import MemoryTrend, Owner, name_owner
from tests.support.histories import history

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
from surefoot.diagnostics.monitor.evidence_server import EvidenceServer
server = EvidenceServer(Path(sys.argv[1]), 0)
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
    client = EvidenceClient(folder)
    deadline = time.monotonic() + 30  # a machine under load answers late
    while time.monotonic() < deadline:
        answers = client.wait(client.request(OBJECTS), [0])
        if answers:
            return read_census(answers[0])
    raise AssertionError("no answer")


def leak(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "grown\n"


def owner_of(kind: str, folder: Path) -> Owner:
    with leaking(kind, folder) as process:
        before = count(folder)
        leak(process)
        found = name_owner(before, count(folder))
    assert found is not None
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("bytes", r" bytes .* list of 25, Cache\.seen$"),
        ("tensors", r" torch\.Tensor .* dict of 25, __main__\.kept$"),
        ("arrays", r" numpy\.ndarray .* deque of 25, __main__\.kept$"),
        ("native", "native code"),
    ],
)
def test_the_objects_that_grow_are_named_with_what_holds_them(kind: str, what: str, tmp_path: Path) -> None:
    said = owner_of(kind, tmp_path).description
    assert re.search(what, said), said


class Deaf(EvidenceClient):
    """Does not hear the first answers."""

    def __init__(self, folder: Path, missed: int) -> None:
        super().__init__(folder)
        self._missed = missed

    def wait(self, request: str, ranks: Collection[int]) -> dict[int, Any]:
        self._missed -= 1
        return {} if self._missed >= 0 else super().wait(request, ranks)


@pytest.mark.parametrize("missed", [0, 1, 100])
def test_a_rank_that_does_not_answer_is_asked_again(
    missed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WITHIN_S, OBJECTS, 30.0)
    trend = MemoryTrend(0)
    for entry in history(lambda *_: 1.0):
        trend.add(entry.kind, entry.phase, entry.step, entry.values["anonymous_bytes"])
    with leaking("bytes", tmp_path) as process:
        rank: Any = SimpleNamespace(process=process.pid, memory=trend, has_ended=False)
        leaks = LeakDetector(Deaf(tmp_path, missed), {0: rank}, 1)
        found = []
        for _ in range(5):
            found.append(leaks.find())
            leak(process)
    # At the first look it is suspected, and sure at once; what it has then is compared with what it has at the next.
    named_at = min(1 + missed, 3)
    assert [len(findings) for findings in found] == [int(look == named_at) for look in range(5)]
    (finding,) = found[named_at]
    owner = f" list of {25 * named_at}, Cache.seen"
    assert (owner in finding.cause) == (missed < 100)


def test_only_the_ranks_that_are_asked_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WITHIN_S, OBJECTS, 1.0)
    client = EvidenceClient(tmp_path)
    with leaking("bytes", tmp_path):
        count(tmp_path)  # it is there
        assert client.wait(client.request(OBJECTS, [1, 10]), [0]) == {}
        assert not (tmp_path / "events" / "rank-00000.objects.json").read_text().count("objects 1")


def test_one_count_says_nothing() -> None:
    assert name_owner(None, Census(0, {"bytes": (1, 100)}, ())) is None
