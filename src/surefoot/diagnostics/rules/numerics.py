"""Numbers that go wrong while they are still finite: a loss that jumps, routers that collapse. Pure.

What ranks say of losses and experts is the same on all of them, so one rank is enough.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from statistics import median

from surefoot.diagnostics.monitor.event_log import Entry, newest_starts
from surefoot.findings import CATALOGUE, Finding

BEFORE_STEPS = 30
"""So many steps must have been calm before a jump."""
AFTER_STEPS = 5
"""So many must lie above all of them."""
JUMP_TIMES, JUMP = 1.5, 0.5
"""How much higher, as a factor and in nats, half of them must lie."""
GRADIENT_TIMES = 3.0
"""Gradients so much larger than usual, when the loss jumped, are its cause."""
RISE_STEPS, RISE_BLOCK, RISE_TIMES = 200, 10, 5.0
"""Over how many steps, in blocks of how many, gradients must grow, and how many times."""
NOISE_TIMES = 3.0
COLLAPSED = 0.9
"""Of the way from an even spread to every token choosing the same experts."""
MOST_EVEN = 0.5
"""Where a token chooses more than half of the experts, every one of them is popular."""
LEAST_ROWS = 256
"""Rows an expert would have got if all were used evenly; without so many, one that got none means nothing."""


@dataclass(frozen=True)
class _Step:
    step: int
    loss: float
    grad_norm: float
    learning_rate: float


@dataclass
class Numbers:
    """The losses and the use of experts of a run, gathered from what one of its ranks says."""

    _steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=BEFORE_STEPS + AFTER_STEPS))
    _learning_rate: float = math.nan
    _all: deque[_Step] = field(default_factory=lambda: deque(maxlen=RISE_STEPS))
    _found: dict[str, Finding] = field(default_factory=dict)

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """What happened, in its order."""
        if kind == "learning rate":
            self._learning_rate = values["learning_rate"]
        elif kind == "step" and isfinite(values["loss"]) and isfinite(values["grad_norm"]):  # others were not logged
            one = _Step(step, values["loss"], values["grad_norm"], self._learning_rate)
            self._steps.append(one)
            self._all.append(one)
            self._keep(_jump(self._steps))
            self._keep(_rises_with_the_rate(self._all))
        elif kind == "experts":
            self._keep(_collapse(step, values))
            self._keep(_silent(step, values))

    def findings(self) -> list[Finding]:
        """What was found, the first of each kind."""
        return list(self._found.values())

    def _keep(self, finding: Finding | None) -> None:
        if finding is not None:
            self._found.setdefault(finding.code, finding)


def find_numerics_in(entries: Sequence[Entry]) -> list[Finding]:
    """From a whole history; of the newest start of one rank."""
    newest = newest_starts(entries)
    first = min((entry.rank for entry in newest), default=0)
    numbers = Numbers()
    for entry in newest:
        if entry.rank == first:
            numbers.add(entry.kind, entry.step, entry.values)
    return numbers.findings()


def _jump(steps: Sequence[_Step]) -> Finding | None:
    known = list(steps)
    before, after = known[:-AFTER_STEPS], known[-AFTER_STEPS:]
    if len(before) < BEFORE_STEPS or not all(one.loss > max(b.loss for b in before) for one in after):
        return None
    usual, now = median(one.loss for one in before), median(one.loss for one in after)
    if now < max(JUMP_TIMES * usual, usual + JUMP):
        return None
    usual_norm = median(one.grad_norm for one in before)
    at_jump = max(one.grad_norm for one in (*before[-2:], *after[:2]))
    if at_jump < GRADIENT_TIMES * usual_norm:  # other data may be harder, and that is no fault
        return None
    return Finding(
        "SF403",
        f"the loss has jumped from {usual:.3f} to {now:.3f} at step {after[0].step} and stays there; gradients were "
        f"{at_jump / max(usual_norm, 1e-30):.0f} times as large as usual when it did",
        {
            "step": after[0].step,
            "loss_before": round(usual, 4),
            "loss_after": ", ".join(f"{one.loss:.3f}" for one in after),
            "grad_norm_before": round(usual_norm, 4),
            "grad_norm_at_the_jump": round(at_jump, 4),
        },
        CATALOGUE["SF403"].fix,
        confidence=0.8,
    )


def _rises_with_the_rate(steps: Sequence[_Step]) -> Finding | None:
    """Gradients that have grown ever since the learning rate rises, while the loss rises."""
    known = list(steps)
    if len(known) < 3 * RISE_BLOCK or not isfinite(known[0].learning_rate):
        return None
    blocks = [known[first : first + RISE_BLOCK] for first in range(len(known) % RISE_BLOCK, len(known), RISE_BLOCK)]
    norms = [median(one.grad_norm for one in block) for block in blocks]
    losses = [median(one.loss for one in block) for block in blocks]
    low = min(range(len(norms)), key=lambda number: norms[number])
    rising = norms[low:]
    if len(rising) < 3 or any(later <= earlier for earlier, later in pairwise(rising)):
        return None
    before, now = blocks[low][0].learning_rate, blocks[-1][-1].learning_rate
    noise = max(_spread(blocks[low]), _spread(blocks[-1]))
    is_worse = losses[-1] > losses[low] + NOISE_TIMES * noise
    if norms[-1] < RISE_TIMES * norms[low] or not is_worse or not now > before:
        return None
    return Finding(
        "SF406",
        f"gradients are {norms[-1] / max(norms[low], 1e-30):.0f} times as large as in step {blocks[low][0].step}, "
        f"while the learning rate has risen from {before:.1e} to {now:.1e} and the loss has risen",
        {
            "step": blocks[-1][-1].step,
            "grad_norm": " -> ".join(f"{norm:.3g}" for norm in rising),
            "loss": " -> ".join(f"{loss:.3f}" for loss in losses[low:]),
            "learning_rate": f"{before:.2e} -> {now:.2e}",
        },
        CATALOGUE["SF406"].fix,
        confidence=0.7,
    )


def _spread(block: Sequence[_Step]) -> float:
    """How far a loss lies from the middle of its block, as a rule."""
    middle = median(one.loss for one in block)
    return median(abs(one.loss - middle) for one in block)


def _collapse(step: int, values: Mapping[str, float]) -> Finding | None:
    share, even = values["share"], values["even_share"]
    if values["rows"] < LEAST_ROWS or even > MOST_EVEN or share - even < COLLAPSED * (1 - even):
        return None
    return Finding(
        "SF404",
        f"in MoE layer {values['layer']:.0f} nearly every token chooses the same experts: as many as one chooses got "
        f"{share:.0%} of all rows up to step {step}, where {even:.0%} would be even",
        {"step": step, "layer": round(values["layer"]), "share": round(share, 3), "even_share": round(even, 3)},
        CATALOGUE["SF404"].fix,
    )


def _silent(step: int, values: Mapping[str, float]) -> Finding | None:
    if not values["silent"] or values["rows"] < LEAST_ROWS:
        return None
    return Finding(
        "SF405",
        f"{values['silent']:.0f} experts that were used before got no token in the steps up to {step}, in which each "
        f"would have got {values['rows']:.0f} if all were used evenly",
        {"step": step, "experts_without_a_token": round(values["silent"]), "rows_if_even": round(values["rows"])},
        CATALOGUE["SF405"].fix,
    )
