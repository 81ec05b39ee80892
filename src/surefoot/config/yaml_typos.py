"""Finder of the usual typos in YAML: the line that is wrong, why, and the corrected line.

A correction counts only if the file is then valid, or invalid from a later line on.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SEARCHED_LINES = 10
"""Number of lines up to the one at which the reader failed that are searched."""
MOST_CHARACTERS = 1 << 13
"""Length of the longest text that is searched: it is read again for each correction."""
KEY = r"^(\s*(?:- +)?[\w.-]+)"
TYPOS = (
    (r"^( *)\t+(\s*)", r"\1  \2", "a tab is no indentation. Use spaces"),
    (r"^\s*\t\s*", "{above}", "a tab is no indentation. Use spaces, as in the line above"),
    (rf"{KEY}\s*:\s*\t\s*", r"\1: ", "a tab follows the colon. Use a space"),
    (rf"{KEY}\s*\uff1a\s*", r"\1: ", "the full-width colon `\uff1a` ends no key. Use `:` and a space"),
    (rf"{KEY}:\s*[^\S \t]\s*", r"\1: ", "a no-break or full-width space follows the colon. Use a normal space"),
    (rf"{KEY}:(?=\S)", r"\1: ", "no space follows the colon"),
    (
        r"^ *(?! )",
        "{above}",
        "the line is indented differently. Use the same indentation as the line above, none on the first",
    ),
    (r"^(.*?)\uff5b(.*)\uff5d(.*)$", r"\1{\2}\3", "full-width braces are none to YAML. Use `{` and `}`"),
    (rf"{KEY}: +([^'\"].*: .*?) *$", r"\1: '\2'", "a value holds `: `. Put it in quotes"),
)
"""(pattern, replacement, problem) of each typo; `{above}` is the indentation of the line above."""


@dataclass(frozen=True)
class Typo:
    """A typo and its correction."""

    line: int
    """Line number, from 1."""
    problem: str
    corrected: str


def find_typo(text: str, find_failure: Callable[[str], float]) -> Typo | None:
    """Return the first typo whose correction helps; None if there is none.

    `find_failure` returns the line, from 1, from which on a text is invalid: 0 for no mapping, infinity if valid.
    """
    if len(text) > MOST_CHARACTERS:
        return None
    lines, failed_line = text.split("\n"), find_failure(text)
    end = int(min(failed_line or SEARCHED_LINES, len(lines)))
    for index in range(max(0, end - SEARCHED_LINES), end):
        for problem, corrected in _list_corrections(lines, index):
            if find_failure("\n".join([*lines[:index], corrected, *lines[index + 1 :]])) > failed_line:
                return Typo(index + 1, problem, corrected)
    return None


def _list_corrections(lines: list[str], index: int) -> Iterator[tuple[str, str]]:
    """Yield (problem, corrected line) of each typo that a line may hold."""
    line = lines[index].rstrip()
    above = next((before for before in reversed(lines[:index]) if before.strip()), "")
    indentation = above[: len(above) - len(above.lstrip())]
    for pattern, replacement, problem in TYPOS:
        corrected = re.sub(pattern, replacement.replace("{above}", indentation), line, count=1)
        if corrected != line:
            yield problem, corrected
