"""Work that may hang for ever, a dead file system or driver being what it asks, for whoever does not."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class DeadlineExceeded(Exception):
    """Work has not come to its end in time. No TimeoutError: the work may raise that itself."""


class Deadline(threading.Thread, Generic[T]):
    """One piece of work, begun at once in a thread of its own. What hangs there keeps no process from its end."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._value: list[T] = []
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for; a panic of Rust is no Exception
            self._error = error

    def result(self, within_s: float) -> T:
        """What came of it. Raises: what the work raised, and DeadlineExceeded where it is not done by then."""
        self.join(within_s)
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:
            raise RuntimeError(f"{type(self._error).__name__}: {self._error}") from self._error
        if not self._value:
            raise DeadlineExceeded
        return self._value[0]
