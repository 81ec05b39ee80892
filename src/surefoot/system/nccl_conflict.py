"""Detection of an NCCL in LD_LIBRARY_PATH that would be loaded instead of torch's own."""

import importlib.util
import os
import struct
from pathlib import Path

USER = Path("lib", "libtorch_cuda.so")
"""Library in torch's folder that loads NCCL."""
ELF64, LITTLE = 2, 1
PT_DYNAMIC, DT_NULL, DT_RPATH, DT_RUNPATH = 2, 0, 15, 29


def other_nccl() -> tuple[str, ...]:
    """Return the NCCL libraries that the loader tries before torch's own, in its order."""
    spec = importlib.util.find_spec("torch")
    folder = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec is not None else Path()
    if has_rpath(folder / USER):
        return ()
    search_path = [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
    others = [path for path in search_path if not path.resolve().is_relative_to(folder.resolve().parent)]
    return tuple(str(path / "libnccl.so.2") for path in others if (path / "libnccl.so.2").is_file())


def has_rpath(library: Path) -> bool:
    """Return whether a library names the folders of its dependencies by DT_RPATH; False if it cannot be read.

    The loader searches DT_RPATH before LD_LIBRARY_PATH, and DT_RUNPATH after it (ld.so(8)).
    """
    try:
        with library.open("rb") as file:
            head = file.read(64)
            if head[:4] != b"\x7fELF" or (head[4], head[5]) != (ELF64, LITTLE):
                return False
            (headers,) = struct.unpack_from("<Q", head, 32)
            size, count = struct.unpack_from("<HH", head, 54)
            for number in range(count):
                file.seek(headers + number * size)
                kind, _, offset, _, _, length = struct.unpack("<IIQQQQ", file.read(40))
                if kind == PT_DYNAMIC:
                    file.seek(offset)
                    tags = [tag for tag, _ in struct.iter_unpack("<qQ", file.read(length - length % 16))]
                    tags = tags[: tags.index(DT_NULL)] if DT_NULL in tags else tags
                    return DT_RPATH in tags and DT_RUNPATH not in tags  # DT_RUNPATH disables DT_RPATH
    except (OSError, struct.error):
        pass
    return False
