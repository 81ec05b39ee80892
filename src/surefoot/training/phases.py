"""Phases of this rank, emitted as they begin and end."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from surefoot.events import Emit, LayerEntered, Phase, PhaseBegan, PhaseEnded


class Phases:
    """Emitter of a phase's beginning and end: `with phases("forward"):`."""

    def __init__(self, emit: Emit, rank: int) -> None:
        self._emit, self._rank = emit, rank
        self.step = 0
        """Current step; set by the loop."""

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        self._emit(PhaseBegan(self._rank, self.step, phase))
        try:
            yield
        finally:
            self._emit(PhaseEnded(self._rank, self.step, phase))

    def follow(self, layers: Iterable[nn.Module]) -> None:
        """Emit the decoder layer that this rank enters, only with gradients enabled: rollouts call layers too often.

        The hooks change nothing. They run before the hooks that gather a layer's weights.
        """
        for number, layer in enumerate(layers):
            enter = partial(self._emit, LayerEntered(self._rank, number))
            layer.register_forward_pre_hook(partial(_enter_forward, enter), prepend=True)
            layer.register_forward_hook(partial(_enter_backward, enter))


def _enter_forward(enter: Callable[[], None], *_: object) -> None:
    if torch.is_grad_enabled():
        enter()


def _enter_backward(enter: Callable[[], None], _layer: nn.Module, _inputs: object, output: object) -> None:
    """Begin the backward of a layer when the gradient of its output, or of its first output, is available."""
    first = output[0] if isinstance(output, tuple) and output else output
    if isinstance(first, Tensor) and first.requires_grad:
        first.register_hook(lambda _: enter())
