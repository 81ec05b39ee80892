"""A stream of decompressed bytes of a Zstandard file."""

import io
from pathlib import Path
from typing import Any

PIECE_BYTES = 1 << 10
"""Compressed bytes read at a time. They expand to at most 32 MiB: a block of 4 bytes can hold 128 KiB."""


class ZstandardFile(io.RawIOBase):
    """Decompressed bytes of a Zstandard file. Unlike the library's own reader, this class detects truncated files.

    Raises: EOFError for a file that ends within a frame.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        while not self._ready:
            content = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            content = content or self._file.read(PIECE_BYTES)
            if not content:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the compressed file ends before its data do. Was it copied whole?")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(content))
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
