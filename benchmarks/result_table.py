"""The table of a benchmark as a file: what was compared, on which machine and with which versions."""

import datetime
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("surefoot", "torch", "transformers", "peft", "trl")


def write_table(
    folder: Path, name: str, title: str, *, settings: str, notes: Sequence[str], columns: Sequence[str],
    rows: Iterable[str],
) -> None:  # fmt: skip
    """Print a table and write it to `<date>-<name>.md`; the first column, of what was measured, has no title.

    `settings`: of all sides, behind the machine's; `notes`: lines before the table.
    """
    today = datetime.date.today().isoformat()
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    text = "\n".join(
        [
            f"# {title}",
            "",
            f"{today}, {platform.machine()}, {os.cpu_count()} cores, float32, {settings}. {versions}.",
            *notes,
            "",
            f"| | {' | '.join(columns)} |",
            "|---" * (len(columns) + 1) + "|",
            *rows,
            "",
        ]
    )
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{today}-{name}.md").write_text(text, encoding="utf-8")
