"""`surefoot explain LOG`: the causes that the log of any trainer or server names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.findings import Finding
from surefoot.findings.library_errors import SHOWN_CHARS, find_library_errors

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RAISED = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Interrupt)\b: \S")
"""Last line of a Python traceback."""


@dataclass(frozen=True)
class LogExplanation:
    """The diagnosis of a log."""

    log: Path
    num_lines: int
    findings: list[Finding]
    last_error: str
    """Place and text of the last Python error; empty if there is none."""

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "log": str(self.log), "findings": [finding.as_dict() for finding in self.findings]}

    def as_text(self) -> str:
        """Return the explanation as text for a person."""
        lines = [f"{self.log}: {self.num_lines} lines", *(finding.as_text() for finding in self.findings)]
        if not self.findings:
            lines.append("no error whose cause is known")
            lines += [f"the last error is at {self.last_error}"] * bool(self.last_error)
        return "\n".join(lines)


def explain_log(path: Path) -> LogExplanation:
    """Read a log and return what its errors say. Bytes that are no UTF-8 are replaced."""
    last_error, num_lines = "", 0

    def lines() -> Iterator[str]:
        nonlocal last_error, num_lines
        with open(path, encoding="utf-8", errors="replace") as file:
            for num_lines, line in enumerate(file, 1):
                clean = COLOUR.sub("", line)
                if RAISED.search(clean):
                    last_error = f"{path}:{num_lines}: {clean.strip()[:SHOWN_CHARS]}"
                yield clean

    findings = find_library_errors(lines(), str(path))
    return LogExplanation(path, num_lines, findings, last_error)
