"""Rows and files of data."""

import json
from pathlib import Path
from typing import Any


def counting_rows(count: int) -> list[dict[str, Any]]:
    """Conversations of varied lengths."""
    words = "one two three four five six seven eight nine ten".split()
    return [
        {
            "messages": [
                {"role": "user", "content": f"Count from {i % 7} in {1 + i % 9} steps"},
                {"role": "assistant", "content": " ".join(words[(i + k) % 10] for k in range(1 + i % 9))},
            ]
        }
        for i in range(count)
    ]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
