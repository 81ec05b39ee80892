"""Requests to a server, many at a time, in daemon threads: a run that ends does not wait for them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

from surefoot.errors import SurefootError

MAX_CONCURRENT_REQUESTS = 256
"""Largest number of requests in flight; the server batches them as it can."""
T = TypeVar("T")


class RequestThreads(Generic[T]):
    """Threads that send requests, each of which is a call that returns the answer."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], T], Future[T]]] = SimpleQueue()
        """Requests that are not in flight yet."""

    def start(self, calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
        """Make the calls; return their answers, in order."""
        futures: list[Future[T]] = []
        for call in calls:
            futures.append(Future())
            self._waiting.put((call, futures[-1]))
        for _ in range(min(MAX_CONCURRENT_REQUESTS, len(calls))):
            Thread(target=self._run, daemon=True).start()
        return futures

    def cancel_waiting(self) -> None:
        """Cancel the requests that are not in flight yet."""
        try:
            while True:
                self._waiting.get_nowait()[1].cancel()
        except Empty:
            return

    def _run(self) -> None:
        while True:
            try:
                call, future = self._waiting.get_nowait()
            except Empty:
                return
            try:
                future.set_result(call())
            except SurefootError as error:
                future.set_exception(error)
            finally:
                if not future.done():  # the thread's own trace is printed; the waiting thread must not wait forever
                    future.set_exception(SurefootError("a request to the server failed with the error printed above"))
