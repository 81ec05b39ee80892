"""Counts of the inputs and outputs of another trainer's model, made on its device and read when a step ends."""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.findings import Finding
from surefoot.findings.reported import ReportedFindings

MOST_FORWARDS = 4096
"""Largest number of forwards counted per step: a training that failed sends no signal, and its model may be used on."""
MASKED = -100
MASKED_STEPS = 3
"""Number of consecutive steps without a trained token from which on it is not chance."""
ENDLESS_STEPS = 50
"""Number of steps without an answer's end token among the trained ones from which on it is a finding."""


@dataclass(frozen=True)
class BatchCounts:
    """Counts of one step of one rank."""

    tokens: int = 0
    rows: int = 0
    padding: int = 0
    trained: int | None = None
    """Number of labels that count; None if the model gets none."""
    ends: int = 0
    """Number of these labels that end an answer."""
    doubled: int = 0
    """Number of rows that begin with two beginning-of-sequence tokens."""
    not_finite: int = 0
    """Number of forwards whose loss is NaN or infinite."""


class BatchCounter:
    """Counter of training forwards, from its creation until `end`."""

    def __init__(self, model: nn.Module) -> None:
        config = getattr(model, "config", None)
        self._begins = _list_token_ids(getattr(config, "bos_token_id", None))
        self._ends: list[int] = []
        generation = getattr(model, "generation_config", None)
        if generation is not None:  # models that generate texts have one; other models' labels are not tokens
            ends = _list_token_ids(generation.eos_token_id)
            self._ends = ends or _list_token_ids(getattr(config, "eos_token_id", None))
        self._hook = model.register_forward_hook(self._count, with_kwargs=True)
        self._counts: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._tokens = self._rows = 0
        self._has_labels = self._has_others = False

    @property
    def has_end_tokens(self) -> bool:
        return bool(self._ends)

    def _count(self, _: nn.Module, __: tuple[Any, ...], inputs: Mapping[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            self._count_forward(inputs, output)
        except Exception:  # the model's inputs or outputs may be anything, and its training must go on
            self._hook.remove()
            logging.getLogger(__name__).warning("tokens of the batches are no longer counted", exc_info=True)

    def _count_forward(self, inputs: Mapping[str, Any], output: Any) -> None:
        ids = inputs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or len(self._counts) == MOST_FORWARDS:
            return
        if not torch.is_grad_enabled():
            self._has_others = True
            return
        self._tokens, self._rows = self._tokens + ids.numel(), self._rows + len(ids)
        zero = torch.zeros((), dtype=torch.int64, device=ids.device)
        labels, mask, loss = inputs.get("labels"), inputs.get("attention_mask"), _get_loss(output)
        padding = (mask == 0).sum() if isinstance(mask, Tensor) and mask.shape == ids.shape else zero
        trained = ends = zero
        if isinstance(labels, Tensor) and labels.dim() == 2:
            self._has_labels = True
            trained, ends = (labels != MASKED).sum(), _match_any(labels, self._ends).sum()
        is_begin = _match_any(ids[:, :2], self._begins)
        if isinstance(mask, Tensor) and mask.shape == ids.shape:  # padding on the left may be the same token
            is_begin &= mask[:, :2] != 0
        doubled = is_begin.all(dim=1).sum() if ids.shape[1] > 1 else zero
        not_finite = (~torch.isfinite(loss)).sum() if loss is not None else zero
        counts = torch.stack([count.to(ids.device) for count in (padding, trained, ends, doubled, not_finite)])
        copy = counts.to("cpu", non_blocking=True)
        event = torch.cuda.Event() if ids.is_cuda else None
        if event is not None:  # so that reading the numbers does not wait for the whole step
            event.record()
        self._counts.append((copy, event))

    def begin(self) -> None:
        """Begin a step, without the counts before it."""
        self._counts, self._tokens, self._rows, self._has_labels, self._has_others = [], 0, 0, False, False

    def take(self) -> BatchCounts:
        """Return the counts of the step that ends, without padding if it also generated, which takes unknown time."""
        for _, event in self._counts:
            if event is not None:
                event.synchronize()
        if not self._counts:
            return BatchCounts(self._tokens, self._rows)
        padding, trained, ends, doubled, not_finite = torch.stack([copy for copy, _ in self._counts]).sum(0).tolist()
        padding = 0 if self._has_others else padding
        return BatchCounts(
            self._tokens, self._rows, padding, trained if self._has_labels else None, ends, doubled, not_finite
        )

    def end(self) -> None:
        self._hook.remove()


class LabelChecker:
    """Reporter of problems with trained labels, each once, from the steps of one rank."""

    def __init__(self, has_end_tokens: bool) -> None:
        self._has_end_tokens = has_end_tokens
        self._newest: deque[BatchCounts] = deque(maxlen=MASKED_STEPS)
        self._steps = self._trained = self._ends = 0
        self._reported = ReportedFindings()

    def add(self, step: int, counted: BatchCounts) -> list[Finding]:
        """Return the new findings from this step and those before it."""
        if counted.trained is None:
            return []
        self._newest.append(counted)
        self._steps, self._trained = self._steps + 1, self._trained + counted.trained
        self._ends += counted.ends
        causes = {}
        if len(self._newest) == MASKED_STEPS and not any(counts.trained for counts in self._newest):
            causes["SF501"] = f"in {MASKED_STEPS} steps in a row no label counts: all are {MASKED}"
        if len(self._newest) == MASKED_STEPS and all(counts.doubled == counts.rows > 0 for counts in self._newest):
            causes["SF503"] = f"in {MASKED_STEPS} steps in a row every row begins with two beginning-of-sequence tokens"
        if self._has_end_tokens and self._steps >= ENDLESS_STEPS and self._trained and not self._ends:
            causes["SF510"] = f"of {self._trained} tokens that were trained in {self._steps} steps none ends an answer"
        findings = [Finding(code, cause, {"step": step}) for code, cause in causes.items()]
        return self._reported.select_new(findings)


def _list_token_ids(value: Any) -> list[int]:
    return [token for token in (value if isinstance(value, list | tuple) else [value]) if isinstance(token, int)]


def _match_any(ids: Tensor, tokens: list[int]) -> Tensor:
    is_match = torch.zeros_like(ids, dtype=torch.bool)
    for token in tokens:
        is_match |= ids == token
    return is_match


def _get_loss(output: Any) -> Tensor | None:
    """Return the loss in a model's output."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss.detach() if isinstance(loss, Tensor) else None
