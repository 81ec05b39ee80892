"""Rules for numbers that go wrong while they are finite: a loss that rises or never moves, collapsed routers. Pure.

All ranks report the same losses and expert counts, so one rank is enough.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from statistics import median

from surefoot.findings import Finding

BEFORE_STEPS = 30
"""Number of calm steps before a jump."""
AFTER_STEPS = 5
"""Number of steps after it whose losses must all exceed those before."""
JUMP_TIMES, JUMP = 1.5, 0.5
"""Factor, and nats, by which their median must exceed the median before."""
GRADIENT_TIMES = 3.0
"""Multiple of the usual gradient norm at the jump from which gradients are its cause."""
RISE_STEPS, RISE_BLOCK, RISE_TIMES = 200, 10, 5.0
"""Number of steps over which gradients must grow, steps per block, and factor of the growth."""
NOISE_TIMES = 3.0
EARLY_STEPS, EARLY_IN_A_ROW = 30, 3
"""Number of first steps in which a loss may rise above that of the first, and of losses in a row that must."""
EARLY_TIMES, EARLY_RISE = 1.5, 1.0
"""Factor, and nats, by which each of them must exceed the first loss."""
LEAST_FIRST_LOSS = 0.05
"""Smallest first loss that is compared; an objective of GRPO begins near 0 and means something else."""
BEYOND_UNIFORM = 13.0
"""Loss in nats above that of equal probabilities for 440,000 tokens, which is more than any vocabulary has."""
ZERO_STEPS, LEAST_LOSS = 5, 1e-3
"""Number of steps in a row whose gradients are exactly zero, and the smallest loss that should have some."""
SAME_STEPS, SAME_WITHIN = 50, 1e-7
"""Number of first steps whose losses are all equal, and their relative differences that are rounding."""
RISING_EVALUATIONS, OVERFIT_TIMES = 3, 1.1
"""Number of evaluations in a row whose losses rise, and the factor by which the last exceeds the lowest."""
COLLAPSED = 0.9
"""Fraction of the way from an even spread to every token choosing the same experts."""
MOST_EVEN = 0.5
"""Largest share of experts per token that is judged: with more, every expert is popular."""
LEAST_ROWS = 256
"""Fewest rows per expert under even use: with fewer, an expert without rows means nothing."""


@dataclass(frozen=True)
class _Step:
    step: int
    loss: float
    grad_norm: float
    learning_rate: float


@dataclass(frozen=True)
class _Evaluation:
    step: int
    loss: float
    training_loss: float
    """Median loss of the steps since the evaluation before."""


@dataclass
class Numbers:
    """The losses and the use of experts of a run, collected from the events of one rank."""

    _steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=BEFORE_STEPS + AFTER_STEPS))
    _learning_rate: float = math.nan
    _long_window: deque[_Step] = field(default_factory=lambda: deque(maxlen=RISE_STEPS))
    _first_steps: list[_Step] = field(default_factory=list)
    _evaluations: list[_Evaluation] = field(default_factory=list)
    _losses_between: list[float] = field(default_factory=list)
    """Losses of training since the last evaluation."""
    _findings: dict[str, Finding] = field(default_factory=dict)

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Add one event. Call it in the order of events."""
        if kind == "learning rate":
            self._learning_rate = values["learning_rate"]
        elif kind == "step" and isfinite(values["loss"]) and isfinite(values["grad_norm"]):
            # Values that are not finite mean: not logged.
            current = _Step(step, values["loss"], values["grad_norm"], self._learning_rate)
            self._steps.append(current)
            self._long_window.append(current)
            self._add_finding(_find_jump(self._steps))
            self._add_finding(_find_rise_with_rate(self._long_window))
            self._add_finding(_find_zero_gradients(self._steps))
            self._losses_between.append(current.loss)
            if len(self._first_steps) < SAME_STEPS:
                self._first_steps.append(current)
                self._add_finding(_find_early_rise(self._first_steps))
                self._add_finding(_find_same_losses(self._first_steps))
        elif kind == "evaluated" and values.get("is_loss") and self._losses_between and isfinite(values["measured"]):
            self._evaluations.append(_Evaluation(step, values["measured"], median(self._losses_between)))
            self._losses_between = []
            self._add_finding(_find_overfitting(self._evaluations))
        elif kind == "experts":
            self._add_finding(_find_collapse(step, values))
            self._add_finding(_find_unused_experts(step, values))

    def findings(self) -> list[Finding]:
        """Return the first finding of each kind."""
        return list(self._findings.values())

    def _add_finding(self, finding: Finding | None) -> None:
        if finding is not None:
            self._findings.setdefault(finding.code, finding)


def _find_jump(steps: Sequence[_Step]) -> Finding | None:
    recent = list(steps)
    before, after = recent[:-AFTER_STEPS], recent[-AFTER_STEPS:]
    if len(before) < BEFORE_STEPS or not all(step.loss > max(earlier.loss for earlier in before) for step in after):
        return None
    usual, now = median(step.loss for step in before), median(step.loss for step in after)
    if now < max(JUMP_TIMES * usual, usual + JUMP):
        return None
    usual_norm = median(step.grad_norm for step in before)
    at_jump = max(step.grad_norm for step in (*before[-2:], *after[:2]))
    if at_jump < GRADIENT_TIMES * usual_norm:  # harder data may be the cause, which is no fault
        return None
    return Finding(
        "SF403",
        f"the loss has jumped from {usual:.3f} to {now:.3f} at step {after[0].step} and stays there; gradients were "
        f"{at_jump / max(usual_norm, 1e-30):.0f} times as large as usual then",
        {
            "step": after[0].step,
            "loss_before": round(usual, 4),
            "loss_after": ", ".join(f"{step.loss:.3f}" for step in after),
            "grad_norm_before": round(usual_norm, 4),
            "grad_norm_at_the_jump": round(at_jump, 4),
        },
        confidence=0.8,
    )


def _find_early_rise(steps: Sequence[_Step]) -> Finding | None:
    """Return a finding if the loss has risen above that of the first step, before it is known what is usual."""
    first, recent = steps[0], steps[-EARLY_IN_A_ROW:]
    if len(steps) > EARLY_STEPS or not LEAST_FIRST_LOSS < first.loss < BEYOND_UNIFORM:
        return None
    most = max(EARLY_TIMES * first.loss, first.loss + EARLY_RISE)
    largest_norm = max(step.grad_norm for step in steps[1:]) if len(steps) > 1 else 0.0
    has_risen = len(steps) > EARLY_IN_A_ROW and all(step.loss > most for step in recent)
    has_risen &= largest_norm >= GRADIENT_TIMES * first.grad_norm  # else harder rows may be the cause
    if not has_risen and not (recent[-1].loss > BEYOND_UNIFORM and recent[-1].loss > most):
        return None
    worst = max(steps, key=lambda step: step.loss)
    return Finding(
        "SF407",
        f"the loss has risen from {first.loss:.3f} in step {first.step} to {worst.loss:.3f} in step {worst.step}: the "
        f"first updates have made the model worse (learning rate {recent[-1].learning_rate:.1e}, gradient norm "
        f"{first.grad_norm:.3g} -> {largest_norm:.3g})",
        {
            "step": recent[-1].step,
            "loss": " -> ".join(f"{step.loss:.3f}" for step in (first, *recent)),
            "grad_norm": " -> ".join(f"{step.grad_norm:.3g}" for step in (first, *recent)),
            "learning_rate": recent[-1].learning_rate,
        },
        confidence=0.9,
    )


def _find_zero_gradients(steps: Sequence[_Step]) -> Finding | None:
    recent = list(steps)[-ZERO_STEPS:]
    if len(recent) < ZERO_STEPS or any(step.grad_norm != 0 or step.loss < LEAST_LOSS for step in recent):
        return None
    return Finding(
        "SF408",
        f"gradients have been exactly zero since step {recent[0].step}, at a loss of {recent[-1].loss:.3f}: nothing is "
        "trained any more",
        {"step": recent[-1].step, "loss": ", ".join(f"{step.loss:.3f}" for step in recent), "grad_norm": 0.0},
        confidence=0.95,
    )


def _find_same_losses(steps: Sequence[_Step]) -> Finding | None:
    first = steps[0]
    is_same = all(abs(step.loss - first.loss) <= SAME_WITHIN * abs(first.loss) for step in steps)
    if len(steps) < SAME_STEPS or first.loss < LEAST_LOSS or not is_same:
        return None
    return Finding(
        "SF409",
        f"the loss is {first.loss:.6f} in each of the {len(steps)} steps since step {first.step}: the updates change "
        f"nothing (learning rate {steps[-1].learning_rate:.1e}, gradient norm {steps[-1].grad_norm:.3g})",
        {
            "step": steps[-1].step,
            "loss": first.loss,
            "learning_rate": steps[-1].learning_rate,
            "grad_norm": steps[-1].grad_norm,
        },
        confidence=0.9,
    )


def _find_overfitting(evaluations: Sequence[_Evaluation]) -> Finding | None:
    """Return a finding if the loss on held-out rows rises while that of training falls."""
    best = min(evaluations, key=lambda each: each.loss)
    rising = evaluations[-RISING_EVALUATIONS - 1 :]
    rises = all(later.loss > earlier.loss for earlier, later in pairwise(rising))
    last = evaluations[-1]
    falls = last.training_loss < best.training_loss
    if len(rising) <= RISING_EVALUATIONS or not rises or not falls or last.loss < OVERFIT_TIMES * best.loss:
        return None
    return Finding(
        "SF410",
        f"the loss on held-out rows has risen from {best.loss:.3f} after step {best.step} to {last.loss:.3f} after step"
        f" {last.step}, while that of training fell from {best.training_loss:.3f} to {last.training_loss:.3f}",
        {
            "step": last.step,
            "best_step": best.step,
            "eval_loss": " -> ".join(f"{each.loss:.3f}" for each in rising),
            "training_loss": " -> ".join(f"{each.training_loss:.3f}" for each in rising),
        },
        confidence=0.9,
    )


def _find_rise_with_rate(steps: Sequence[_Step]) -> Finding | None:
    """Return a finding if gradients have grown ever since the learning rate began to rise, while the loss rises."""
    recent = list(steps)
    if len(recent) < 3 * RISE_BLOCK or not isfinite(recent[0].learning_rate):
        return None
    blocks = [recent[first : first + RISE_BLOCK] for first in range(len(recent) % RISE_BLOCK, len(recent), RISE_BLOCK)]
    norms = [median(step.grad_norm for step in block) for block in blocks]
    losses = [median(step.loss for step in block) for block in blocks]
    low = min(range(len(norms)), key=lambda number: norms[number])
    rising = norms[low:]
    if len(rising) < 3 or any(later <= earlier for earlier, later in pairwise(rising)):
        return None
    before, now = blocks[low][0].learning_rate, blocks[-1][-1].learning_rate
    noise = max(_measure_spread(blocks[low]), _measure_spread(blocks[-1]))
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
        confidence=0.7,
    )


def _measure_spread(block: Sequence[_Step]) -> float:
    """Return the median distance of a loss from the median of its block."""
    middle = median(step.loss for step in block)
    return median(abs(step.loss - middle) for step in block)


def _find_collapse(step: int, values: Mapping[str, float]) -> Finding | None:
    share, even = values["share"], values["even_share"]
    if values["rows"] < LEAST_ROWS or even > MOST_EVEN or share - even < COLLAPSED * (1 - even):
        return None
    return Finding(
        "SF404",
        f"in MoE layer {values['layer']:.0f} nearly every token chooses the same experts: as many as one chooses got "
        f"{share:.0%} of all rows up to step {step}, where {even:.0%} would be even",
        {"step": step, "layer": round(values["layer"]), "share": round(share, 3), "even_share": round(even, 3)},
    )


def _find_unused_experts(step: int, values: Mapping[str, float]) -> Finding | None:
    if not values["silent"] or values["rows"] < LEAST_ROWS:
        return None
    return Finding(
        "SF405",
        f"{values['silent']:.0f} experts that were used before got no token in the steps up to {step}, in which each "
        f"would have got {values['rows']:.0f} if all were used evenly",
        {"step": step, "experts_without_a_token": round(values["silent"]), "rows_if_even": round(values["rows"])},
    )
