"""The findings that were reported already. Standard library only."""

from collections.abc import Callable, Hashable, Iterable

from surefoot.findings import Finding


class ReportedFindings:
    """A filter that passes each finding once."""

    def __init__(self, key: Callable[[Finding], Hashable] = lambda finding: finding.code) -> None:
        """`key`: what two findings that count as the same one have in common."""
        self._key = key
        self._keys: set[Hashable] = set()
        self.codes: set[str] = set()

    def __contains__(self, finding: Finding) -> bool:
        return self._key(finding) in self._keys

    def add(self, findings: Iterable[Finding]) -> None:
        """Count findings as reported."""
        for finding in findings:
            self._keys.add(self._key(finding))
            self.codes.add(finding.code)

    def select_new(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings that were not reported yet, and count them as reported."""
        new = [finding for finding in findings if finding not in self]
        self.add(new)
        return new
