"""Findings: named causes with their evidence. Standard library only.

A code names one failure mode for ever. The catalogue below is the single place where codes are given out.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "error"]

CATALOGUE: dict[str, tuple[Severity, str]] = {
    "SF401": ("error", "the loss is not finite"),
    "SF402": ("error", "a gradient is not finite"),
    "SF501": ("error", "no token of any sample is trained"),
    "SF502": ("warning", "two end-of-turn tokens"),
    "SF503": ("warning", "two beginning-of-sequence tokens"),
    "SF504": ("warning", "the answer stands in the prompt"),
    "SF505": ("error", "the tokenizer does not belong to the model"),
    "SF506": ("warning", "many rows are truncated"),
    "SF507": ("warning", "held-out samples are also trained on"),
    "SF508": ("info", "texts of the data look like special tokens"),
    "SF509": ("warning", "reasoning is not shown by the chat template"),
    "SF601": ("warning", "a damaged checkpoint was passed over"),
}


@dataclass(frozen=True)
class Finding:
    """One named cause.

    `evidence` holds the recorded values the conclusion rests on, `confidence` is 0 to 1, `fix` is what to do.
    """

    code: str
    cause: str
    evidence: dict[str, Any]
    fix: str
    confidence: float = 1.0

    @property
    def severity(self) -> Severity:
        return CATALOGUE[self.code][0]

    @property
    def title(self) -> str:
        return CATALOGUE[self.code][1]

    def as_text(self) -> str:
        """The finding as a person reads it, over several lines."""
        evidence = "\n".join(f"    {name}: {value}" for name, value in self.evidence.items())
        return f"{self.code} {self.title}\n  cause: {self.cause}\n  evidence:\n{evidence}\n  fix: {self.fix}"

    def as_dict(self) -> dict[str, Any]:
        """The finding as written to `findings.jsonl`."""
        return {"severity": self.severity, "title": self.title, **asdict(self)}
