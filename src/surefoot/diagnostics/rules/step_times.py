"""The time of a rank's steps by phase, collected from its events, and shares of it over the newest steps. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

WARMUP_STEPS = 5
"""Number of first steps without information: compilers and caches warm up."""
WINDOW_STEPS = 20
WINDOW_S = 20.0
"""Fewest steps, and shortest duration, of a window."""
KEPT_STEPS = 2000
MOST_OF = 0.8
"""Share of a window's steps that must be slow: occasional slowness is no finding."""


@dataclass(frozen=True)
class StepTimes:
    """The split of one rank's time in one step, in seconds."""

    step: int
    took_s: float
    by_phase: Mapping[str, float]
    garbage_s: float
    tokens: float
    """Number of tokens in this rank's part of the batch, including padding."""
    padding: float
    in_line_s: float
    """Seconds in which the training thread was ready and waited for a core."""


@dataclass(frozen=True)
class Window:
    """Consecutive steps of one rank."""

    steps: Sequence[StepTimes]

    @property
    def took_s(self) -> float:
        return sum(step.took_s for step in self.steps)

    @property
    def step_s(self) -> float:
        """Median duration of a step."""
        return median(step.took_s for step in self.steps)

    @property
    def garbage_s(self) -> float:
        return sum(step.garbage_s for step in self.steps)

    @property
    def core_wait_share(self) -> float:
        """Share of the time in which the rank was ready and waited for a core."""
        return sum(step.in_line_s for step in self.steps) / self.took_s if self.took_s > 0 else 0.0

    def phase_s(self, phase: str) -> float:
        """Return the seconds spent in a phase."""
        return sum(step.by_phase.get(phase, 0.0) for step in self.steps)

    def share(self, *phases: str) -> float:
        """Return the share of some phases in the time."""
        return sum(self.phase_s(phase) for phase in phases) / self.took_s

    def has_regular_share(self, phase: str, share: float) -> bool:
        """Return whether most steps spend this share of their time in a phase, rather than a few of them much more."""
        slow = sum(step.by_phase.get(phase, 0.0) >= share * step.took_s for step in self.steps)
        return slow >= MOST_OF * len(self.steps)

    def as_evidence(self, **values: object) -> dict[str, object]:
        """Return the evidence of a finding about these steps, with some values of that finding."""
        shares = sorted(((self.share(name), name) for name in self.steps[-1].by_phase), reverse=True)
        return {
            "steps": f"{self.steps[0].step} to {self.steps[-1].step}",
            "step_time_s": round(self.step_s, 3),
            **values,
            "time_by_phase": ", ".join(f"{name} {share:.0%}" for share, name in shares[:5] if share >= 0.01),
        }


@dataclass
class RankTimes:
    """The steps of one start of one rank, collected from its events."""

    warmup_steps: int = WARMUP_STEPS
    """Number of first steps that are omitted."""
    steps: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    _open: list[tuple[str, float]] = field(default_factory=list)
    _by_phase: dict[str, float] = field(default_factory=dict)
    _tokens: float = 0.0
    _padding: float = 0.0
    _in_line_s: float = 0.0
    _num_steps: int = 0

    def add(self, kind: str, phase: str, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Add one event. Call it in the order of events."""
        if kind == "phase began":
            self._open.append((phase, time_s))
        elif kind == "phase ended" and self._open:
            name, began_s = self._open.pop()
            if not self._open:  # a nested phase counts for the outer one
                self._by_phase[name] = self._by_phase.get(name, 0.0) + time_s - began_s
        elif kind == "batch":
            self._tokens, self._padding = values["tokens"], values.get("padding", 0.0)
        elif kind == "learning rate":  # this event comes before its step
            self._in_line_s = values.get("in_line_s", 0.0)
        elif kind == "step":
            self._num_steps += 1
            if self._num_steps > self.warmup_steps:
                self.steps.append(
                    StepTimes(
                        step,
                        took_s=values["step_time_s"],
                        by_phase=dict(self._by_phase),
                        garbage_s=values["garbage_s"],
                        tokens=self._tokens,
                        padding=self._padding,
                        in_line_s=self._in_line_s,
                    )
                )
            self._by_phase.clear()

    @property
    def newest(self) -> Window:
        """The newest steps, even if they are too few for a finding."""
        return Window(list(self.steps)[-WINDOW_STEPS:])

    @property
    def window(self) -> Window | None:
        """The newest steps that together are long enough for a finding; None if there are too few."""
        took_s, window = 0.0, []
        for step in reversed(self.steps):
            window.append(step)
            took_s += step.took_s
            if len(window) >= WINDOW_STEPS and took_s >= WINDOW_S:
                return Window(window[::-1])
        return None
