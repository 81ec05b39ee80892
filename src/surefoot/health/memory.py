"""How much memory this process has of its own."""

import os
from contextlib import suppress


class OwnMemory:
    """Reads /proc/self/statm, in microseconds; without it nothing is known, and every answer is 0."""

    def __init__(self) -> None:
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def anonymous_bytes(self) -> int:
        """Resident and of no file: what allocations make grow, and the page cache does not."""
        if self._file is None:
            return 0
        _, resident, of_files, *_ = os.pread(self._file, 128, 0).split()
        return (int(resident) - int(of_files)) * self._page_bytes

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)
