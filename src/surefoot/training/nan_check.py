"""Origin of a loss or a gradient that is not finite: weights, or the first module and row in which it appears."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.data.collate import MicroBatch
from surefoot.findings import Finding
from surefoot.methods.base import TrainContext
from surefoot.models.attention import has_packed_attention
from surefoot.models.dtensor_blocks import block_of
from surefoot.models.vision import attention
from surefoot.training.step import CHECKED, NotFinite, list_not_finite

MOST_NAMES = 8
MOST_ROWS = 32
LARGE_WEIGHT = 1e4
"""Size of weights above which a model does not work."""
MOST_PLAIN_TOKENS = 8192
"""Longest row that is computed again by plain attention, whose memory grows with the square of the row."""
BEFORE_UPDATES = "No weight has been updated yet, so the learning rate is not the cause. "


def not_finite_finding(
    train_context: TrainContext,
    error: NotFinite,
    batches: Sequence[MicroBatch],
    *,
    step: int,
    learning_rate: float,
    last_good: Path | None,
) -> Finding:
    """Build the finding, the same on all ranks. Collective: one more forward of the step's batches without dropout.

    In the first step, before any update, a second one with plain attention tells whether a kernel is the cause.
    `batches` are this rank's of the step.
    """
    ranks = train_context.ranks
    train_context.optimizer.zero_grad(set_to_none=True)  # frees memory for the forward below
    with train_context.phase("forward"):
        origin = _find_origin(train_context, batches)
    parameters = train_context.model.named_parameters()
    weights = ((name, parameter.detach()) for name, parameter in parameters if parameter.is_floating_point())
    reports = ranks.gather(
        {
            "rows": [place for batch in batches for place in batch.row_refs],
            "gradients": error.parameters,
            "weights": list_not_finite(weights),
            "module": origin.module if origin else None,
            "row": origin.row if origin else None,
            "is_here": error.is_here,
            "largest": _find_largest_weight(train_context.parameters),
            "longest": max((sum(batch.lengths) for batch in batches), default=0),
        }
    )
    evidence: dict[str, Any] = {
        "step": step,
        error.what: str(error.value),
        "learning_rate": learning_rate,
        "rows": _join_names([place for report in reports for place in report["rows"]], MOST_ROWS),
        "last_good_checkpoint": str(last_good) if last_good is not None else "none",
    }
    first = next((report for report in reports if report["module"] is not None), None)
    damaged_weights = [name for report in reports for name in report["weights"]]
    gradients = [name for report in reports for name in report["gradients"]]
    where = ""
    largest = max(report["largest"] for report in reports)
    evidence["largest_trained_weight"] = float(f"{largest:.3g}")
    if largest > LARGE_WEIGHT:
        why = "so the steps before were too large" if step > 1 else "and no step has changed them yet"
        where = f"; trained weights are as large as {largest:.1e}, {why}"
    if damaged_weights:
        evidence["weights"] = _join_names(damaged_weights, MOST_NAMES)
        where += f"; {evidence['weights']} holds values that are not finite"
    if first is not None:
        evidence |= {"first_module": first["module"], "row": first["row"]}
        where += f"; in the forward it shows first in {first['module']}, in {first['row']}"
    if gradients:
        evidence["parameters"] = _join_names(gradients, MOST_NAMES)
    if ranks.size > 1:
        evidence["ranks"] = ", ".join(str(rank) for rank, report in enumerate(reports) if report["is_here"])
    code = "SF401" if error.what == "loss" else "SF402"
    cause = f"the {error.what} of step {step} is {error.value}; the weights were not updated with it{where}"
    if step > 1:
        return Finding(code, cause, evidence)
    other_type = "" if _computes_in_float32(train_context) else " With dtype: float32 fewer numbers overflow."
    if damaged_weights:
        fix = f"They are those of the model's files: fetch them again.{other_type}"
        return Finding(code, cause, evidence, BEFORE_UPDATES + fix)
    fix = f"Look at the rows that are named, and at the weights of the model.{other_type}"
    is_short = max(report["longest"] for report in reports) <= MOST_PLAIN_TOKENS
    if first is not None and is_short and has_packed_attention(train_context.model):
        with attention(train_context.model, "eager"), train_context.phase("forward"):
            plain = _find_origin(train_context, batches)
        origins = [origin for origin in ranks.gather(plain.module if plain is not None else None) if origin is not None]
        evidence["with_plain_attention"] = f"not finite in {origins[0]}" if origins else "finite"
        if not origins:
            fix = (
                "With transformers' plain attention the same rows are finite, so the attention kernel is the cause: "
                "take another version of torch, and report it with this evidence."
            )
    return Finding(code, cause, evidence, BEFORE_UPDATES + fix)


def _computes_in_float32(train_context: TrainContext) -> bool:
    with train_context.forward_context():
        is_mixed = torch.is_autocast_enabled(train_context.device.type)
    return train_context.model.dtype == torch.float32 and not is_mixed


@dataclass(frozen=True)
class _Origin:
    """Module and row in which a forward first has a value that is not finite."""

    module: str
    row: str
    """Place of the row in the data."""


def _find_origin(train_context: TrainContext, batches: Sequence[MicroBatch]) -> _Origin | None:
    """Find the origin by checking each module's output; None if a forward is finite. Collective."""
    origins: list[_Origin] = []
    current: list[MicroBatch] = []

    def yield_batches() -> Iterator[MicroBatch]:
        for batch in batches:
            current[:] = [batch]
            yield batch

    def make_hook(name: str) -> Callable[..., None]:
        def check_module_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if origins or not isinstance(tensor, Tensor) or not tensor.is_floating_point() or current[0].is_dummy:
                return
            bad = ~torch.isfinite(tensor.detach())
            if bool(bad.any()):
                origins.append(_Origin(name or type(_module).__name__, _find_row(bad, current[0])))

        return check_module_output

    hooks = [module.register_forward_hook(make_hook(name)) for name, module in train_context.model.named_modules()]
    try:
        with train_context.forward_context():
            train_context.objective.probe_forward(yield_batches())
    finally:
        for hook in hooks:
            hook.remove()
    return origins[0] if origins else None


def _find_row(bad: Tensor, batch: MicroBatch) -> str:
    """Return the place of the first row that a mask over a module's output marks."""
    num_tokens = sum(batch.lengths)
    dim = next((dim for dim, size in enumerate(bad.shape) if size == num_tokens), None)
    if dim is None:  # an output that is not per token
        return ", ".join(batch.row_refs)
    token = int(bad.movedim(dim, 0).reshape(num_tokens, -1).any(1).nonzero()[0])
    ends = torch.tensor(batch.lengths).cumsum(0)
    return batch.row_refs[int((ends <= token).sum())]


def _find_largest_weight(parameters: Mapping[str, nn.Parameter]) -> float:
    """Return the largest finite absolute value of the trained weights, of this rank's parts."""
    largest = 0.0
    for parameter in parameters.values():
        for piece in block_of(parameter.detach()).local.reshape(-1).split(CHECKED):
            if piece.numel():
                largest = max(largest, float(torch.nan_to_num(piece, 0.0, 0.0, 0.0).abs().max()))
    return largest


def _join_names(names: Sequence[str], most: int) -> str:
    """Join the distinct names in order, and cut the list after `most` names."""
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:most]) + (f" and {len(distinct) - most} more" if len(distinct) > most else "")
