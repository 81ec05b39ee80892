"""Which NCCL the loader takes: torch's own, or one in LD_LIBRARY_PATH."""

import struct
from pathlib import Path

import pytest
import torch

from surefoot.system import nccl_conflict
from surefoot.system.nccl_conflict import has_rpath, other_nccl

RPATH, RUNPATH, NEEDED = 15, 29, 1


def library(*tags: int) -> bytes:
    """The least of an ELF file: a header, one program header, and a dynamic section of these tags."""
    dynamic = b"".join(struct.pack("<qQ", tag, 1) for tag in (*tags, 0))
    head = (
        b"\x7fELF"
        + bytes([2, 1, 1])
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    )
    program = struct.pack("<IIQQQQQQ", 2, 4, 120, 0, 0, len(dynamic), len(dynamic), 8)
    return head + program + dynamic


@pytest.mark.parametrize(
    ("content", "is_rpath"),
    [
        (library(NEEDED, RPATH), True),
        (library(NEEDED, RUNPATH), False),
        (library(NEEDED, RPATH, RUNPATH), False),
        (library(NEEDED), False),
        (library(NEEDED, RPATH)[:100], False),
        (b"no library", False),
        (b"", False),
    ],
)
def test_who_says_where_libraries_are(tmp_path: Path, content: bytes, is_rpath: bool) -> None:
    (tmp_path / "lib.so").write_bytes(content)
    assert has_rpath(tmp_path / "lib.so") is is_rpath
    assert not has_rpath(tmp_path / "none.so")


@pytest.mark.parametrize(("content", "is_found"), [(library(RUNPATH), True), (library(RPATH), False), (b"", True)])
def test_another_nccl_is_found_where_it_would_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, is_found: bool
) -> None:
    (tmp_path / "libtorch_cuda.so").write_bytes(content)
    (tmp_path / "libnccl.so.2").write_bytes(b"")
    monkeypatch.setattr(nccl_conflict, "USER", tmp_path / "libtorch_cuda.so")
    own = Path(torch.__file__).parents[1] / "nvidia/nccl/lib"
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{own}::/none:{tmp_path}")
    assert other_nccl() == ((str(tmp_path / "libnccl.so.2"),) if is_found else ())
