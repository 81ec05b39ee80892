"""One page of the catalogue."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Page:
    """The catalogue's description of one failure mode."""

    title: str
    evidence: str
    """Signs by which it is recognised."""
    fix: str
    cases: tuple[str, ...] = ()
    """Public reports on GitHub: `owner/repository#number`."""
    severity: Severity = "warning"

    def as_text(self, code: str) -> str:
        """Return the page as text for a person."""
        links = "".join(f"\n  https://github.com/{case.replace('#', '/issues/')}" for case in self.cases)
        paragraphs = [
            f"{code} {self.title} ({self.severity})",
            f"How it is recognised: {self.evidence}",
            f"What to do: {self.fix}",
            *([f"Seen in:{links}"] if links else []),
        ]
        return "\n\n".join(paragraphs)
