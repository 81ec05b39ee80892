"""What this rank is doing, said as it begins and ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from surefoot.events import Event, Phase, PhaseBegan, PhaseEnded


class Phases:
    """`with phases("forward"):` emits the phase's beginning and end."""

    def __init__(self, emit: Callable[[Event], None], rank: int) -> None:
        self._emit, self._rank = emit, rank
        self.step = 0
        """The step that is being taken; kept by the loop."""

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        self._emit(PhaseBegan(self._rank, self.step, phase))
        try:
            yield
        finally:
            self._emit(PhaseEnded(self._rank, self.step, phase))
