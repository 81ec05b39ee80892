"""Selective checkpointing: a layer that is recomputed takes what its experts returned from its first forward.

The products of the experts are most of the arithmetic of a Mixture-of-Experts, and their backward needs little memory
beside that of the whole layer. So it is saved as without checkpointing, and their outputs are kept for what follows.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]
"""Contexts of the first forward of a layer and of its recomputation, for `torch.utils.checkpoint`."""

_layer: "_Forward | None" = None
"""The forward in progress of a layer that keeps what its experts return; None outside such layers."""


def compute_or_take(compute: Callable[[], Tensor]) -> Tensor:
    """Return the outputs of experts: computed, or in a recomputation those of the first forward."""
    return compute() if _layer is None else _layer.run(compute)


class KeptExperts:
    """A `context_fn` for `torch.utils.checkpoint` that keeps the outputs of experts, beside what another one does."""

    def __init__(self, beside: Callable[[], Contexts]) -> None:
        self._beside = beside

    def __call__(self) -> Contexts:
        """Return the contexts of one layer."""
        outputs: list[Tensor] = []
        first, recomputation = self._beside()
        return _Forward(first, outputs), _Recomputation(recomputation, outputs)


class _Forward:
    """The context of a layer's first forward."""

    def __init__(self, beside: AbstractContextManager[object], outputs: list[Tensor]) -> None:
        self._beside, self._outputs = beside, outputs
        self._before: _Forward | None = None

    def __enter__(self) -> None:
        global _layer
        self._beside.__enter__()
        self._before, _layer = _layer, self

    def __exit__(self, *error: object) -> None:
        global _layer
        _layer = self._before
        self._beside.__exit__(*error)  # type: ignore[arg-type]

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        """Compute the outputs of experts and keep them, with what their backward needs."""
        # The hooks of the checkpoint would drop that, and have it computed again.
        with saved_tensors_hooks(_keep_as_it_is, _keep_as_it_is):
            output = compute()
        self._outputs.append(output.detach().requires_grad_(output.requires_grad))
        return output


class _Recomputation(_Forward):
    """The context of its recomputation, which calls the experts in the same order."""

    def __enter__(self) -> None:
        super().__enter__()
        self._remaining = iter(self._outputs)

    def run(self, compute: Callable[[], Tensor]) -> Tensor:  # noqa: ARG002 - nothing is computed again
        """Return the next outputs that were kept."""
        return next(self._remaining)


def _keep_as_it_is(tensor: Tensor) -> Tensor:
    return tensor
