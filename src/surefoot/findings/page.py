"""A page of the catalogue."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Page:
    """What is known of one failure mode, wherever it happens."""

    severity: Severity
    title: str
    evidence: str
    """How it is recognised."""
    fix: str
    cases: tuple[str, ...] = ()
    """Public reports of it on GitHub: `owner/repository#number`."""

    def as_text(self, code: str) -> str:
        """For a person."""
        links = "".join(f"\n  https://github.com/{case.replace('#', '/issues/')}" for case in self.cases)
        cases = f"\n\nSeen in:{links}" if links else ""
        return f"{code} {self.title} ({self.severity})\n\nHow we know: {self.evidence}\n\nWhat to do: {self.fix}{cases}"
