"""Where a loss or a gradient that is not finite comes from: weights, or the first module and the row it shows in."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.data.collate import MicroBatch
from surefoot.findings import CATALOGUE, Finding
from surefoot.methods.base import TrainContext
from surefoot.models.dtensor_blocks import block_of
from surefoot.training.step import NotFinite

MOST_NAMES = 8
MOST_ROWS = 32
LARGE_WEIGHT = 1e4
"""No weight of a model that works is so large."""
PIECE = 1 << 24


def not_finite_finding(
    learner: TrainContext,
    error: NotFinite,
    batches: Sequence[MicroBatch],
    *,
    step: int,
    learning_rate: float,
    last_good: Path | None,
) -> Finding:
    """What is known of it, the same on all ranks. Collective: one more forward of the step's batches without dropout.

    `batches` are this rank's of the step.
    """
    ranks = learner.ranks
    learner.optimizer.zero_grad(set_to_none=True)  # the forward below needs memory, and they are of no more use
    with learner.phase("forward"):
        origin = _origin(learner, batches)
    said = ranks.gather(
        {
            "rows": [place for batch in batches for place in batch.places],
            "gradients": error.parameters,
            "weights": _not_finite_weights(learner.model),
            "module": origin.module if origin else None,
            "row": origin.row if origin else None,
            "is_here": error.is_here,
            "largest": _largest(learner.parameters),
        }
    )
    evidence: dict[str, Any] = {
        "step": step,
        error.what: str(error.value),
        "learning_rate": learning_rate,
        "rows": _shortened([place for one in said for place in one["rows"]], MOST_ROWS),
        "last_good_checkpoint": str(last_good) if last_good is not None else "none",
    }
    first = next((one for one in said if one["module"] is not None), None)
    weights = [name for one in said for name in one["weights"]]
    gradients = [name for one in said for name in one["gradients"]]
    where = ""
    largest = max(one["largest"] for one in said)
    evidence["largest_trained_weight"] = float(f"{largest:.3g}")
    if largest > LARGE_WEIGHT:
        where = f"; trained weights are as large as {largest:.1e}, so the steps before were too large"
    if weights:
        evidence["weights"] = _shortened(weights, MOST_NAMES)
        where += f"; {evidence['weights']} holds values that are not finite"
    if first is not None:
        evidence |= {"first_module": first["module"], "row": first["row"]}
        where += f"; in the forward it shows first in {first['module']}, in {first['row']}"
    if gradients:
        evidence["parameters"] = _shortened(gradients, MOST_NAMES)
    if ranks.size > 1:
        evidence["ranks"] = ", ".join(str(rank) for rank, one in enumerate(said) if one["is_here"])
    code = "SF401" if error.what == "loss" else "SF402"
    cause = f"the {error.what} of step {step} is {error.value}; the weights were not updated with it{where}"
    return Finding(code=code, cause=cause, evidence=evidence, fix=CATALOGUE[code].fix)


@dataclass(frozen=True)
class _Origin:
    """Where a forward first shows a value that is not finite."""

    module: str
    row: str
    """Its place in the data."""


def _origin(learner: TrainContext, batches: Sequence[MicroBatch]) -> _Origin | None:
    """Found by looking at what each module of the model gives; None where a forward is finite. Collective."""
    found: list[_Origin] = []
    current: list[MicroBatch] = []

    def given() -> Iterator[MicroBatch]:
        for batch in batches:
            current[:] = [batch]
            yield batch

    def look_at(name: str) -> Callable[..., None]:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if found or not isinstance(tensor, Tensor) or not tensor.is_floating_point() or current[0].is_dummy:
                return
            bad = ~torch.isfinite(tensor.detach())
            if bool(bad.any()):
                found.append(_Origin(name or type(_module).__name__, _row_of(bad, current[0])))

        return look

    hooks = [module.register_forward_hook(look_at(name)) for name, module in learner.model.named_modules()]
    try:
        with learner.forward_context():
            learner.objective.probe_forward(given())
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _row_of(bad: Tensor, batch: MicroBatch) -> str:
    """The place of the first row that a mask over a module's output marks."""
    num_tokens = sum(batch.lengths)
    dim = next((dim for dim, size in enumerate(bad.shape) if size == num_tokens), None)
    if dim is None:  # an output that is not per token
        return ", ".join(batch.places)
    token = int(bad.movedim(dim, 0).reshape(num_tokens, -1).any(1).nonzero()[0])
    ends = torch.tensor(batch.lengths).cumsum(0)
    return batch.places[int((ends <= token).sum())]


def _not_finite_weights(model: nn.Module) -> list[str]:
    """Names of parameters of which this rank holds a value that is not finite."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and not _is_finite(block_of(parameter.detach()).local)
    ]


def _largest(parameters: Mapping[str, nn.Parameter]) -> float:
    """The largest finite value of what is trained, of this rank's parts, without its sign."""
    largest = 0.0
    for parameter in parameters.values():
        for piece in block_of(parameter.detach()).local.reshape(-1).split(PIECE):
            if piece.numel():
                largest = max(largest, float(torch.nan_to_num(piece, 0.0, 0.0, 0.0).abs().max()))
    return largest


def _is_finite(tensor: Tensor) -> bool:
    """Looked at in pieces: whether each value is finite takes memory of its own."""
    return all(bool(torch.isfinite(piece).all()) for piece in tensor.reshape(-1).split(PIECE))


def _shortened(names: Sequence[str], most: int) -> str:
    """Each once, in order."""
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:most]) + (f" and {len(distinct) - most} more" if len(distinct) > most else "")
