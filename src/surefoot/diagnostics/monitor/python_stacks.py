"""A parser of the Python stacks that faulthandler writes. Pure."""

import re
from dataclasses import dataclass

THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$", re.M)
FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.M)
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


@dataclass(frozen=True)
class Frame:
    """One call in a stack."""

    file: str
    line: int
    function: str

    @property
    def is_of_library(self) -> bool:
        return any(part in self.file for part in LIBRARIES)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def main_thread(stacks: str) -> list[Frame]:
    """Return the frames of the main thread, innermost first. faulthandler writes the oldest thread last."""
    last = THREAD.split(stacks)[-1] if stacks else ""
    return [Frame(match["file"], int(match["line"]), match["function"]) for match in FRAME.finditer(last)]


def where(stacks: str) -> str:
    """Return the place of the main thread in the program: its innermost frame outside libraries."""
    frames = main_thread(stacks)
    if not frames:
        return "at a line that is not known (no stack)"
    return f"at {next((frame for frame in frames if not frame.is_of_library), frames[0])}"
