"""A time limit for work that may hang forever, such as a query of a dead file system or driver."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class DeadlineExceeded(Exception):
    """Work that is unfinished at its deadline. Not a TimeoutError: the work may raise that itself."""


class Deadline(threading.Thread, Generic[T]):
    """One piece of work, started at once in a daemon thread, so that a hang there does not keep the process alive."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._value: list[T] = []
        self._error: BaseException | None = None
        self.took_s = 0.0
        """Seconds that finished work took."""
        self.start()

    def run(self) -> None:
        began_s = time.monotonic()
        try:
            value = self._work()
            self.took_s = time.monotonic() - began_s
            self._value.append(value)
        except BaseException as error:  # noqa: BLE001 - raised again in `result`; a Rust panic is not an Exception
            self._error = error

    def result(self, within_s: float) -> T:
        """Return the value of the work. Raises: what the work raised; DeadlineExceeded if it is unfinished by then."""
        self.join(within_s)
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:
            raise RuntimeError(f"{type(self._error).__name__}: {self._error}") from self._error
        if not self._value:
            raise DeadlineExceeded
        return self._value[0]
