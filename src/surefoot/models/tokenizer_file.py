"""Check of an untrusted tokenizer.json, before the tokenizers library reads it."""

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from surefoot.config.documents import shorten
from surefoot.errors import ModelError
from surefoot.models.resolve_model import read_json_object

MOST_GROWTH = 100
"""Times that a tokenizer may lengthen a text before it cuts it into tokens. The usual ones keep its length."""
MOST_TOKEN_CHARACTERS = 10_000


def check_tokenizer_file(folder: Path) -> None:
    """Raise ModelError if the folder's tokenizer.json would fill the memory, or cut equal texts differently each time.

    Replacements that follow one another multiply: 40 that double a text make a terabyte of one letter.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    content = read_json_object(path)
    for excess in _list_excesses(content):
        raise ModelError(
            f"{path}: {excess}, which would fill the memory. Take the tokenizer.json of the model's release."
        )
    model = content.get("model")
    dropout = model.get("dropout") if isinstance(model, dict) else None
    if dropout:
        raise ModelError(
            f"{path}: dropout={shorten(dropout)} of its model cuts equal texts into other tokens each time, so no run "
            "could be repeated. Set it to null."
        )


def _list_excesses(content: dict[str, Any]) -> Iterator[str]:
    """Yield what a tokenizer.json has more of than any text needs."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth = prod(map(_growth_of, _list_steps(content.get(part))))
        if growth > MOST_GROWTH:
            yield f"its {part} makes a text {growth:.0e} times as long, more than {MOST_GROWTH}"
    post_processor, added = content.get("post_processor"), content.get("added_tokens")
    single = post_processor.get("single") if isinstance(post_processor, dict) else None
    if isinstance(single, list) and len(single) > MOST_GROWTH:
        yield f"its post_processor makes {len(single)} parts of each text, more than {MOST_GROWTH}"
    for token in added if isinstance(added, list) else []:
        name = token.get("content") if isinstance(token, dict) else None
        if isinstance(name, str) and len(name) > MOST_TOKEN_CHARACTERS:
            yield f"an added token has {len(name)} characters, more than {MOST_TOKEN_CHARACTERS}"


def _list_steps(content: Any) -> Iterator[dict[str, Any]]:
    """Yield every object inside a value of a JSON file."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _growth_of(step: dict[str, Any]) -> float:
    """Return how many times longer a step can make a text, at most."""
    if step.get("type") == "ByteLevel":
        return 2.0  # each byte that is no ASCII becomes two
    text, pattern = step.get("content"), step.get("pattern")
    if step.get("type") != "Replace" or not isinstance(text, str) or not isinstance(pattern, dict):
        return 1.0
    if isinstance(pattern.get("String"), str) and pattern["String"]:
        return max(1.0, len(text) / len(pattern["String"]))
    return float(len(text) + _may_be_empty(pattern.get("Regex"))) or 1.0


def _may_be_empty(pattern: Any) -> bool:
    """Return whether a regular expression may match nothing, between any two characters."""
    try:
        return re.match(pattern, "") is not None
    except (re.error, TypeError, RecursionError, OverflowError):
        return True
