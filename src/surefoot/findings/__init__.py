"""Findings: named causes with their evidence. Standard library only.

A code names one failure mode permanently. The catalogue is the only place that assigns codes: one file for each
family, by the first digit of the code.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from surefoot.findings import checkpoints, data, memory, numerics, preflight, rollouts, speed, stalls
from surefoot.findings.page import Page, Severity

__all__ = ["CATALOGUE", "Finding", "Page", "Severity"]

CATALOGUE: dict[str, Page] = {
    **stalls.PAGES,
    **memory.PAGES,
    **speed.PAGES,
    **numerics.PAGES,
    **data.PAGES,
    **checkpoints.PAGES,
    **preflight.PAGES,
    **rollouts.PAGES,
}

SHOWN_NAMES = {"ranks_gone": "gone (by rank number)"}
"""Names of evidence that a person would misread -> what they are shown as."""


@dataclass(frozen=True)
class Finding:
    """One named cause."""

    code: str
    cause: str
    evidence: dict[str, Any]
    """Recorded values that support the conclusion."""
    fix: str = ""
    """Advice; that of the catalogue's page unless another is given."""
    confidence: float = 1.0
    """From 0 to 1."""

    def __post_init__(self) -> None:
        if not self.fix:
            object.__setattr__(self, "fix", CATALOGUE[self.code].fix)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Finding":
        """Return the finding that `as_dict` wrote. Raises: ValueError for what is no finding of this version."""
        types = {"code": str, "cause": str, "evidence": dict, "fix": str, "confidence": int | float}
        if not all(isinstance(values.get(name), kind) for name, kind in types.items()):
            raise ValueError("no finding")
        if values["code"] not in CATALOGUE:
            raise ValueError(f"no finding that this version knows: {values['code']}")
        fields = {name: values[name] for name in types}
        return Finding(**{**fields, "confidence": float(values["confidence"])})

    @property
    def severity(self) -> Severity:
        return CATALOGUE[self.code].severity

    @property
    def title(self) -> str:
        return CATALOGUE[self.code].title

    def as_text(self) -> str:
        """Return the finding as text of several lines for a person."""
        evidence = [f"    {SHOWN_NAMES.get(name, name)}: {value}" for name, value in self.evidence.items()]
        evidence_lines = ["  evidence:", *evidence] if evidence else []
        return "\n".join([f"{self.code} {self.title}", f"  cause: {self.cause}", *evidence_lines, f"  fix: {self.fix}"])

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as written to `findings.jsonl`."""
        return {"severity": self.severity, "title": self.title, **asdict(self)}
