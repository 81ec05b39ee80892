"""A layer that is recomputed takes the rows of its experts, or their outputs, from its first forward.

The order of rows and their weights are small, and sorting launches as many kernels as a gated layer. The products of
the experts are most of the arithmetic of a Mixture-of-Experts, and their backward needs little memory beside that of
the whole layer. So selective checkpointing saves it as without checkpointing, and keeps the outputs of experts for what
follows.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]
"""Contexts of the first forward of a layer and of its recomputation, for `torch.utils.checkpoint`."""
Rows = TypeVar("Rows")

_layer: "_Forward | None" = None
"""The forward in progress of a layer under gradient checkpointing; None outside such layers."""


def compute_or_take(compute: Callable[[], Tensor]) -> Tensor:
    """Return the outputs of experts: computed, or in a selective recomputation those of the first forward."""
    return compute() if _layer is None else _layer.compute(compute)


def sort_or_take(sort: Callable[[], Rows]) -> Rows:
    """Return the rows of experts in their order: sorted, or in a recomputation those of the first forward."""
    return sort() if _layer is None else _layer.sort(sort)


class KeptExperts:
    """A `context_fn` for `torch.utils.checkpoint` that keeps what experts need, beside what another one does."""

    def __init__(self, beside: Callable[[], Contexts], *, keeps_outputs: bool) -> None:
        """`keeps_outputs`: whether checkpointing is selective."""
        self._beside, self._keeps_outputs = beside, keeps_outputs

    def __call__(self) -> Contexts:
        """Return the contexts of one layer."""
        results: list[Any] = []
        first, recomputation = self._beside()
        return _Forward(first, results, self._keeps_outputs), _Recomputation(
            recomputation, results, self._keeps_outputs
        )


class _Forward:
    """The context of a layer's first forward."""

    def __init__(self, beside: AbstractContextManager[object], results: list[Any], keeps_outputs: bool) -> None:
        self._beside, self._results, self._keeps_outputs = beside, results, keeps_outputs
        self._before: _Forward | None = None

    def __enter__(self) -> None:
        global _layer
        self._beside.__enter__()
        self._before, _layer = _layer, self

    def __exit__(self, *error: object) -> None:
        global _layer
        _layer = self._before
        self._beside.__exit__(*error)  # type: ignore[arg-type]

    def compute(self, compute: Callable[[], Tensor]) -> Tensor:
        """Compute the outputs of experts; selectively keep them, with what their backward needs."""
        if not self._keeps_outputs:
            return compute()
        # The hooks of the checkpoint would drop that, and have it computed again.
        with saved_tensors_hooks(_keep_as_it_is, _keep_as_it_is):
            output = compute()
        self._results.append(output.detach().requires_grad_(output.requires_grad))
        return output

    def sort(self, sort: Callable[[], Rows]) -> Rows:
        """Sort the rows of experts, and keep them where they are wanted again."""
        rows = sort()
        if not self._keeps_outputs:
            self._results.append(rows)
        return rows


class _Recomputation(_Forward):
    """The context of its recomputation, which calls the experts in the same order."""

    def __enter__(self) -> None:
        super().__enter__()
        self._remaining = iter(self._results)

    def compute(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the next outputs that were kept, or compute them."""
        return next(self._remaining) if self._keeps_outputs else compute()

    def sort(self, sort: Callable[[], Rows]) -> Rows:  # noqa: ARG002 - nothing is sorted again
        """Return the next rows that were kept."""
        rows: Rows = next(self._remaining)
        return rows


def _keep_as_it_is(tensor: Tensor) -> Tensor:
    return tensor
