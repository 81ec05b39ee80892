"""Inputs that no careful user would write: YAML, JSON, rows and damaged files."""

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from surefoot.config import known_fields

FIELDS = sorted(known_fields())
ODD_NUMBERS = (-1, 0, 1, 7, 2**31, 2**63, 10**30, -(10**400), 1.5, -0.0, math.nan, math.inf, 1e308)
ODD_TEXTS = (
    "", " ", "\0", "\ud800", "😀", "a\nb", "../x", "/dev/null", "/proc/self/mem", "~nosuchuser/x", "x" * 300, "{{", "'",
)  # fmt: skip
LITERALS = (*ODD_NUMBERS[:7], *ODD_NUMBERS[8:], True, False, None, *ODD_TEXTS)

SCALARS = (
    "2024-13-45", "2024-01-01", "0x_", "0o9", "1_0", "9" * 5000, "1e400", ".nan", "-.inf", "null", "yes", "~", "-x",
    "- x", "!!int abc", "!!float []", "!!binary x", "!!set {a}", "!!omap [a]", "!!timestamp x", "!unknown x",
    "!!python/object:os.system x", '"\\0"', '"\\ud83d\\ude00"', '"\\ud800"', '"\\x00"', "'open", '"open', "[1, 2",
    "{a: 1, a: 2}", "{[a]: 1}", "*missing", "&a [*a]", "<<: 7", "? x", "|\n    text", ">\n  text", "%TAG", "@x", "`x`",
    "# x", "[" * 500 + "]" * 500, "{a: " * 300 + "1" + "}" * 300, "x" * 300, "~nosuchuser/x", "/dev/null", "../../x",
    "''", "\t", "\u0000", "\u2028", "😀",
)  # fmt: skip
"""Texts behind `key:` that YAML, pydantic or the file system stumble over."""
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
LINES = (
    "---",
    "...",
    "- x",
    "\tx: 1",
    "x",
    ": 1",
    "? [a]",
    "<<: *b",
    "unknown: 1",
    "model: again",
    "\ufeff",
    BOMB,
    "é: 1",
)

odd_json = st.recursive(
    st.one_of(st.sampled_from(LITERALS), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["role", "content", "a", "", "\0"]), inner, max_size=3),
    ),
    max_leaves=5,
)


def is_light(value: object) -> bool:
    """Tell whether a setting of this value cannot make a valid run long or large."""
    return not isinstance(value, int | float) or isinstance(value, bool) or not 1 < value < math.inf


yaml_changes = st.lists(
    st.tuples(
        st.sampled_from(FIELDS),
        st.one_of(st.sampled_from(SCALARS), odd_json.filter(is_light).map(lambda value: json.dumps(value))),
    ),
    min_size=1,
    max_size=2,
)


@st.composite
def yaml_files(draw: st.DrawFn, valid: dict[str, Any]) -> tuple[bytes, str]:
    """A valid config of a run with some of its values, its lines or its bytes replaced, and the verb to try."""
    lines = {key: f"{key}: {json.dumps(value)}" for key, value in valid.items()}
    for key, scalar in draw(yaml_changes):
        lines[key] = f"{key}: {scalar}"
    shuffled = list(lines.values())
    if draw(st.integers(0, 3)) == 0:
        shuffled.insert(draw(st.integers(0, len(shuffled))), draw(st.sampled_from(LINES)))
    text = "\n".join(shuffled).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        text += draw(st.binary(min_size=1, max_size=4))
    return text, draw(st.sampled_from(["data", "data", "data", "train"]))


@dataclass(frozen=True)
class Change:
    """A change of one place of a JSON value."""

    seed: int
    """Chooses the place: as often one near the root as one far from it."""
    kind: str
    value: Any

    def apply(self, content: Any) -> Any:
        """Return the content with the change."""
        choice = random.Random(self.seed)
        while isinstance(content, dict | list) and content:
            key = choice.choice(list(content) if isinstance(content, dict) else range(len(content)))
            child = content[key]
            if isinstance(child, dict | list) and child and choice.random() < 0.7:
                content = {**content} if isinstance(content, dict) else [*content]
                content[key] = self._within(child, choice)
                return content
            return self._at(content, key)
        return self.value

    def _within(self, child: Any, choice: random.Random) -> Any:
        return Change(choice.randrange(2**32), self.kind, self.value).apply(child)

    def _at(self, content: Any, key: Any) -> Any:
        changed = {**content} if isinstance(content, dict) else [*content]
        if self.kind == "drop":
            del changed[key]
        elif self.kind == "wrap":
            changed[key] = [changed[key]]
        elif self.kind == "rename" and isinstance(changed, dict):
            changed[str(self.value)[:300]] = changed.pop(key)
        else:
            changed[key] = self.value
        return changed


changes = st.builds(
    Change, st.integers(0, 2**32 - 1), st.sampled_from(["drop", "wrap", "rename", "set", "set", "set"]), odd_json
)

VALID_ROWS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s", "tools": "[]"},
    {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]},
    {"query": "a", "response": "b", "images": []},
    {"prompt": "a", "completion": "b"},
    {"text": "a"},
)


@st.composite
def row_files(draw: st.DrawFn) -> tuple[bytes, str]:
    """The lines of a .jsonl file: rows of one format, some of them odd; and a value of `on_bad_row`."""
    valid = draw(st.sampled_from(VALID_ROWS))
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        row: Any = valid
        for change in draw(st.lists(changes, max_size=2)):
            row = change.apply(row)
        lines.append(json.dumps(row).encode())
    if draw(st.integers(0, 4)) == 0:
        lines.insert(
            0, draw(st.sampled_from([b"{", b"\xff", b"[" * 100_000, b"null", b"\0", b'{"text": "a"} x', b'"\\ud800"']))
        )
    return b"\n".join(lines), draw(st.sampled_from(["error", "skip"]))


@dataclass(frozen=True)
class Damage:
    """A change of one file of a folder."""

    file: str
    kind: str
    place: float
    """Where in the file, from 0 to 1."""
    change: Change

    def apply(self, folder: Path) -> None:
        """Damage the file; one that is missing stays so."""
        path = folder / self.file
        if path.is_file():
            DAMAGES[self.kind](self, path)

    def _remove(self, path: Path) -> None:
        path.unlink()

    def _truncate(self, path: Path) -> None:
        path.write_bytes(path.read_bytes()[: int(self.place * path.stat().st_size)])

    def _flip(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        if content:
            content[int(self.place * (len(content) - 1))] ^= 1 << (self.change.seed % 8)
        path.write_bytes(content)

    def _become_folder(self, path: Path) -> None:
        path.unlink()
        path.mkdir()

    def _become_link(self, path: Path) -> None:
        path.unlink()
        path.symlink_to("/dev/zero" if self.place < 0.5 else path.name)

    def _change(self, path: Path) -> None:
        if path.suffix not in (".json", ".yaml"):
            self._flip(path)
            return
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError):  # another damage was here before
            return
        path.write_text(json.dumps(self.change.apply(content)))

    def _nest(self, path: Path) -> None:
        path.write_text('{"a":' * 100_000)


DAMAGES: dict[str, Callable[[Damage, Path], None]] = {
    "remove": Damage._remove,
    "truncate": Damage._truncate,
    "flip": Damage._flip,
    "folder": Damage._become_folder,
    "link": Damage._become_link,
    "change": Damage._change,
    "nest": Damage._nest,
}
KINDS = (*DAMAGES, *["change"] * 12)


def damages(folder: Path) -> st.SearchStrategy[list[Damage]]:
    """One or two damages of the files of a folder, most of them changes of JSON."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    structured = [name for name in files if name.endswith(".json")]
    names = st.sampled_from([*files, *structured * 3])
    damage = st.builds(Damage, names, st.sampled_from(KINDS), st.floats(0, 1), changes)
    return st.lists(damage, min_size=1, max_size=2)


def copy_damaged(source: Path, target: Path, applied: list[Damage]) -> Path:
    """Copy a folder and damage the copy."""
    shutil.copytree(source, target)
    for damage in applied:
        damage.apply(target)
    return target
