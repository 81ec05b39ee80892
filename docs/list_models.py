"""Write models.md in both languages from models.json: python docs/list_models.py [FOLDER]

FOLDER holds the results that the suite of `make test-models` has written; they replace models.json first.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
RESULTS = HERE / "models.json"

PAGES = {"models.md": "en", "zh-CN/models.md": "zh"}
"""Pages, and their language in models_words.yaml."""


def collect(folder: Path) -> list[dict[str, Any]]:
    """Return the results in a folder, in the order of their types."""
    rows = [json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")]
    return sorted(rows, key=lambda row: str(row["type"]))


def write_results(rows: Sequence[Mapping[str, Any]]) -> None:
    """Write models.json, a row on each line."""
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


def read_results() -> list[dict[str, Any]]:
    """Return the rows of models.json."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text("utf-8"))
    return rows


def render(rows: Sequence[Mapping[str, Any]], words: Mapping[str, str]) -> str:
    """Return a page in the language of its words."""
    counted = [row for row in rows if not row["reason"].startswith("encoder-decoder")]
    lines = [
        f"# {words['title']}",
        "",
        words["about"],
        "",
        words["counts"].format(trains=sum(row["trains"] for row in counted), all=len(counted)),
        "",
        words["columns"],
        "",
        words["header"],
        _rule(words["header"]),
        *(_line(row, words) for row in rows if row["trains"]),
        "",
        f"## {words['without']}",
        "",
        words["without_header"],
        _rule(words["without_header"]),
        *(f"| {row['type']} | {row['class']} | {row['reason']} |" for row in rows if not row["trains"]),
    ]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Return the pages by their file."""
    vocabulary = yaml.safe_load((HERE / "models_words.yaml").read_text("utf-8"))
    return {name: render(read_results(), vocabulary[language]) for name, language in PAGES.items()}


def _rule(header: str) -> str:
    return "|" + "---|" * (header.count("|") - 1)


def _line(row: Mapping[str, Any], words: Mapping[str, str]) -> str:
    def answer(value: bool | None) -> str:
        return "" if value is None else words["yes" if value else "no"]

    kind, _, layers = row["packing"].partition(": ")
    packing = words[kind] + (f": {layers}" if layers else "")
    others = (answer(row[name]) for name in ("expert_parallel", "images", "peft"))
    differences = (f"{row[name]:.0e}" for name in ("loss", "gradient"))
    cells = [row["type"], row["class"], answer(row["trains"]), answer(row["experts"]), packing, *others, *differences]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_results(collect(Path(sys.argv[1])))
    for name, page in pages().items():
        (HERE / name).write_text(page, encoding="utf-8")
