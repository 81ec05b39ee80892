"""Makes docs/coverage.md from docs/causes.yaml and the catalogue of findings: python docs/coverage.py"""

from collections import Counter
from pathlib import Path

import yaml

from surefoot.findings import CATALOGUE

HERE = Path(__file__).parent
WORDS = {
    "named": "a finding or an error names the cause",
    "prevented": "the cause cannot arise in Surefoot's own runs",
    "located": "the stall or failure is found with its rank, line or file; the cause behind it is not named",
    "missing": "nothing yet",
}


def coverage() -> str:
    """The page."""
    causes = yaml.safe_load((HERE / "causes.yaml").read_text("utf-8"))
    counts = Counter(cause["how"] for cause in causes)
    handled = counts["named"] + counts["prevented"]
    lines = [
        "# Known failures and what Surefoot does about them",
        "",
        "Made by `python docs/coverage.py`; edit `docs/causes.yaml` and the catalogue in `src/surefoot/findings/`.",
        "",
        f"Of {len(causes)} causes of public reports, {handled} ({handled / len(causes):.0%}) are named or prevented. "
        "What Surefoot's own runs cannot do may still happen to a trainer that its callback watches.",
        "",
        *(f"- {how} ({counts[how]}): {what}" for how, what in WORDS.items()),
        "",
        "| case | cause | | by | shown by |",
        "|---|---|---|---|---|",
    ]
    for cause in causes:
        repository, number = cause["case"].split("#")
        codes = [f"{code} {CATALOGUE[code].title}" for code in cause.get("codes", ())]
        by = "; ".join([*codes, *([cause["why"]] if "why" in cause else [])])
        link = f"[{cause['case']}](https://github.com/{repository}/issues/{number})"
        lines.append(f"| {link} | {cause['cause']} | {cause['how']} | {by} | {cause.get('test', '')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "coverage.md").write_text(coverage(), encoding="utf-8")
