"""What a disk may hold after the power was cut: every call of a process is recorded, and then cut after.

POSIX promises little. Bytes of a file are safe once the file was synced, names in a folder once the folder was. Until
then each change of names may or may not have reached the disk, whatever came before or after it, and bytes may be
missing, cut short or zero. A rename is the only change of two names that happens at once.

The recorder compares the folder with what it knows before each call, so writers that do not go through Python, such as
safetensors, are seen as well; what they sync is not, which errs on the safe side.
"""

import builtins
import io
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BOUNDARIES = (
    "open mkdir rmdir unlink remove truncate ftruncate link symlink write close rename replace fsync fdatasync".split()
)
"""Functions of `os` after which the power may be cut."""
ROOT = 0
"""The number of the recorded folder itself."""

Name = tuple[int, str]
"""(folder, name in it)."""
Tree = dict[str, bytes | None]
"""Relative path -> content; None for a folder."""


@dataclass
class _Node:
    """A file or folder, whatever its name is."""

    is_folder: bool
    entries: dict[str, int] = field(default_factory=dict)
    content: bytes = b""


@dataclass(frozen=True)
class Event:
    """One change or sync."""

    names: Mapping[Name, int | None] = field(default_factory=dict)
    """What names stand for after it; None for one that is gone."""
    wrote: tuple[int, bytes] | None = None
    """(file, its content after it)."""
    synced: int | None = None
    mark: Any = None
    """Set by the test: what has been promised by now."""


class Recorder:
    """The changes below one folder, in order. What is there at first is taken to be safe."""

    def __init__(self, root: Path, ignored: Sequence[str] = ()) -> None:
        self.root = root
        self._ignored = frozenset(ignored)
        self._nodes: dict[int, _Node] = {ROOT: _Node(True)}
        self._lock = threading.RLock()
        self._is_busy = False
        self.events: list[Event] = []
        self.renamed: list[tuple[str, Tree]] = []
        """(new name, content) of each folder that was renamed."""
        self._notice()
        self.first, self.events = self.events, []

    @contextmanager
    def recording(self, exchange: tuple[Any, str] | None = None) -> Iterator["Recorder"]:
        """Record until the end of the block. `exchange`: (module, name) of a function that swaps two folders."""
        with pytest.MonkeyPatch.context() as patch:
            for name in BOUNDARIES:
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            opening = self._wrapped("open", builtins.open)
            patch.setattr(builtins, "open", opening)
            patch.setattr(io, "open", opening)
            if exchange is not None:
                patch.setattr(*exchange, self._wrapped("exchange", getattr(*exchange)))
            yield self
        with self._lock:
            self._notice()

    def mark(self, value: Any) -> None:
        """From here on, `value` holds."""
        with self._lock:
            self._notice()
            self.events.append(Event(mark=value))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                if self._is_busy:
                    return call(*arguments, **options)
                self._is_busy = True
                try:
                    self._notice()
                    synced = self._synced(arguments[0]) if name in ("fsync", "fdatasync") else None
                    ends = self._ends(arguments[:2]) if name in ("rename", "replace", "exchange") else None
                    result = call(*arguments, **options)
                    if synced is not None:
                        self.events.append(Event(synced=synced))
                    if ends is not None and result is not False:
                        self._rename(*ends, is_exchange=name == "exchange")
                    return result
                finally:
                    self._is_busy = False

        return wrapped

    def _number_of(self, path: Path) -> int | None:
        number: int | None = ROOT
        if not path.is_relative_to(self.root):
            return None
        for part in path.relative_to(self.root).parts:
            number = self._nodes[number].entries.get(part) if number is not None else None
        return number

    def _synced(self, descriptor: int) -> int | None:
        return self._number_of(Path(f"/proc/self/fd/{descriptor}").readlink())

    def _ends(self, paths: Sequence[Any]) -> tuple[Name, Name] | None:
        ends = [Path(os.fsdecode(path)).absolute() for path in paths]
        folders = [self._number_of(path.parent) for path in ends]
        if None in folders or any(path.name in self._ignored for path in ends):
            return None
        source, target = ((number, path.name) for number, path in zip(folders, ends, strict=True) if number is not None)
        return source, target

    def _rename(self, source: Name, target: Name, *, is_exchange: bool) -> None:
        moved = self._nodes[source[0]].entries[source[1]]
        there = self._nodes[target[0]].entries.get(target[1])
        if self._nodes[moved].is_folder:
            self.renamed.append((target[1], dict(self._below(moved, ""))))
        self._change({target: moved, source: there if is_exchange else None})

    def _below(self, folder: int, path: str) -> Iterator[tuple[str, bytes | None]]:
        for name, number in self._nodes[folder].entries.items():
            node = self._nodes[number]
            yield f"{path}{name}", None if node.is_folder else node.content
            yield from self._below(number, f"{path}{name}/")

    def _change(self, names: dict[Name, int | None]) -> None:
        for (folder, name), number in names.items():
            if number is None:
                self._nodes[folder].entries.pop(name, None)
            else:
                self._nodes[folder].entries[name] = number
        self.events.append(Event(names=names))

    def _notice(self, folder: int = ROOT, path: Path | None = None) -> None:
        """Record how the folder differs from what is known of it."""
        path = self.root if path is None else path
        known = self._nodes[folder].entries
        there = {entry.name: entry for entry in os.scandir(path) if entry.name not in self._ignored}
        for name in sorted(known.keys() | there.keys()):
            if name in known and name in there:
                is_other = self._nodes[known[name]].is_folder != there[name].is_dir(follow_symlinks=False)
            if name not in there or (name in known and is_other):
                self._forget(folder, name)
            if name not in there:
                continue
            if name not in known:
                self._nodes[number := len(self._nodes)] = _Node(there[name].is_dir(follow_symlinks=False))
                self._change({(folder, name): number})
            number = known[name]
            if self._nodes[number].is_folder:
                self._notice(number, path / name)
            else:
                content = _content(path / name)
                if content != self._nodes[number].content:
                    self._nodes[number].content = content
                    self.events.append(Event(wrote=(number, content)))

    def _forget(self, folder: int, name: str) -> None:
        """A name was removed, and with a folder all that was in it, the innermost first."""
        node = self._nodes[self._nodes[folder].entries[name]]
        for inner in sorted(node.entries):
            self._forget(self._nodes[folder].entries[name], inner)
        self._change({(folder, name): None})

    def disks(self, samples: int, seed: int = 0) -> "Iterator[tuple[Tree, list[Any]]]":
        """What the disk may hold after a cut at each event, each once, with the marks that were set before the cut.

        At each cut the extremes, and so many `samples` that are drawn from `seed`.
        """
        seen: set[int] = set()
        folders = frozenset(number for number, node in self._nodes.items() if node.is_folder)
        for cut in range(len(self.events) + 1):
            before = self.events[:cut]
            marks = [event.mark for event in before if event.mark is not None]
            history = _History([*self.first, *before], len(self.first), folders)
            for names, mode in history.outcomes(samples, random.Random(f"{seed} {cut}")):
                tree = history.tree(names, mode)
                key = hash((tuple(sorted(tree.items())), len(marks)))
                if key not in seen:
                    seen.add(key)
                    yield tree, marks


def _content(path: Path) -> bytes:
    try:
        with io.FileIO(path) as file:
            return file.readall()
    except FileNotFoundError:  # another process has just removed it
        return b""


Mode = Callable[[int], str]
"""File -> which of its bytes that were not synced are there: none, all, half, zeros."""
MODES = ("none", "all", "half", "zeros")


@dataclass(frozen=True)
class _History:
    """Everything that happened before a cut."""

    events: Sequence[Event]
    num_safe: int
    """The first events, which made what was there before."""
    folders: frozenset[int]

    def pending(self) -> list[int]:
        """The changes of names that no sync of their folders has followed."""
        last = {event.synced: number for number, event in enumerate(self.events) if event.synced is not None}
        return [
            number
            for number, event in enumerate(self.events)
            if number >= self.num_safe and any(last.get(folder, -1) < number for folder, _ in event.names)
        ]

    def outcomes(self, samples: int, draw: random.Random) -> Iterator[tuple[frozenset[int], Mode]]:
        """(changes of names that reached the disk, bytes that did)."""
        pending = self.pending()
        every = frozenset(pending)
        for mode in MODES:
            yield every, _always(mode)
            yield frozenset(), _always(mode)
        for index in range(len(pending)):
            mode = draw.choice(MODES)
            for names in (pending[index:], pending[:index], [pending[index]], every - {pending[index]}):
                yield frozenset(names), _always(mode)
        for _ in range(samples):
            yield frozenset(number for number in pending if draw.random() < 0.5), _any_of_all(draw.random())

    def tree(self, names: frozenset[int], mode: Mode) -> Tree:
        """The files and folders that can be reached."""
        pending = frozenset(self.pending()) - names
        entries: dict[int, dict[str, int]] = {}
        contents: dict[int, list[tuple[int, bytes]]] = {}
        synced: dict[int, int] = {}
        for number, event in enumerate(self.events):
            if event.wrote is not None:
                contents.setdefault(event.wrote[0], []).append((number, event.wrote[1]))
            if event.synced is not None:
                synced[event.synced] = number
            for (folder, name), child in event.names.items() if number not in pending else ():
                if child is None:
                    entries.setdefault(folder, {}).pop(name, None)
                else:
                    entries.setdefault(folder, {})[name] = child
        tree: Tree = {}

        def visit(folder: int, path: str, above: tuple[int, ...]) -> None:
            for name, child in entries.get(folder, {}).items():
                if child in self.folders and child not in above:
                    tree[f"{path}{name}"] = None
                    visit(child, f"{path}{name}/", (*above, child))
                elif child not in self.folders:
                    safe = synced.get(child, self.num_safe - 1)
                    tree[f"{path}{name}"] = _bytes(contents.get(child, []), safe, mode(child))

        visit(ROOT, "", (ROOT,))
        return tree


def _always(mode: str) -> Mode:
    return lambda _: mode


def _any_of_all(seed: float) -> Mode:
    return lambda file: random.Random(f"{seed} {file}").choice(MODES)


def _bytes(versions: Sequence[tuple[int, bytes]], synced: int, mode: str) -> bytes:
    """What a file holds of which the versions up to an event were synced."""
    kept = next((content for number, content in reversed(versions) if number <= synced), b"")
    if not versions or versions[-1][0] <= synced or mode == "none":
        return kept
    newest = versions[-1][1]
    return {"all": newest, "half": newest[: len(newest) // 2], "zeros": bytes(len(newest))}[mode]


def write_tree(tree: Tree, folder: Path) -> None:
    """Make a folder hold just this."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def read_tree(folder: Path) -> Tree:
    """What a folder holds."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }
