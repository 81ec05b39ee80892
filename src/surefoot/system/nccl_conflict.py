"""An NCCL in LD_LIBRARY_PATH that would be loaded in place of torch's own."""

import importlib.util
import os
import struct
from pathlib import Path

USER = Path("lib", "libtorch_cuda.so")
"""In torch's folder: what loads NCCL."""
ELF64, LITTLE = 2, 1
PT_DYNAMIC, DT_NULL, DT_RPATH, DT_RUNPATH = 2, 0, 15, 29


def other_nccl() -> tuple[str, ...]:
    """Files of other NCCLs that are looked at before torch's own, in their order."""
    spec = importlib.util.find_spec("torch")
    folder = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec is not None else Path()
    if has_rpath(folder / USER):
        return ()
    folders = [Path(one) for one in os.environ.get("LD_LIBRARY_PATH", "").split(":") if one]
    others = [one for one in folders if not one.resolve().is_relative_to(folder.resolve().parent)]
    return tuple(str(one / "libnccl.so.2") for one in others if (one / "libnccl.so.2").is_file())


def has_rpath(library: Path) -> bool:
    """Whether a library says by DT_RPATH where the ones that it needs are: the loader looks there before it looks at
    LD_LIBRARY_PATH, and after it where it is DT_RUNPATH (ld.so(8)). False where it cannot be read.
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
                    return DT_RPATH in tags and DT_RUNPATH not in tags  # beside the second the first is not read
    except (OSError, struct.error):
        pass
    return False
