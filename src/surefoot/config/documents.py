"""Reader of YAML and JSON files that users write, as values with their lines. Every problem is a ConfigError.

PyYAML lets the errors of Python's constructors through (`seed: 2024-13-45`), and follows brackets and aliases as deep
and as often as a file asks for. This module is the only place that reads such text.
"""

import datetime
import json
import re
import unicodedata
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import yaml
from yaml.error import Mark, MarkedYAMLError
from yaml.reader import ReaderError

from surefoot.config.yaml_typos import find_typo
from surefoot.errors import ConfigError
from surefoot.system.encodings import describe_encoding

MOST_BYTES = 1 << 20
"""Size of the largest file that is read as a config, a script or a chat template."""
MOST_DEPTH = 50
MOST_VALUES = 20_000
"""Largest number of values in a file. A value behind an alias counts at each of its uses."""
MOST_BITS = 63
"""Number of bits of the largest integer; larger ones fit no tensor."""
CHINESE_COMMAS = re.compile("[\uff0c\u3001]\\s*")
FULL_WIDTH_COLON = re.compile("\uff1a\\s*")
CHINESE_BRACKETS = re.compile("[\uff5b\uff3b\u3010].*[\uff5d\uff3d\u3011]", re.DOTALL)
CHINESE_COMMENT = re.compile("\\s\uff03")
QUOTED_OTHERWISE = re.compile("[\u2018\u201c\u300c](.*)[\u2019\u201d\u300d]", re.DOTALL)
"""A text in typographic or Chinese quotes, which are part of the text to YAML."""
NO_TEXT = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?|true|false|null", re.IGNORECASE)
"""Number or word that is no text to YAML."""
SHOWN_CHARACTERS = 80
YAML_1_1_NUMBER = re.compile(r"[-+]?(0[0-7_]+$|[0-9_]+:)")
"""Octal numbers that begin with 0, and base-60 numbers such as times: few who write them mean them."""

Result = TypeVar("Result")


class _Refused(MarkedYAMLError):
    """Valid YAML whose value cannot be used."""

    def __init__(self, problem: str, mark: Mark) -> None:
        super().__init__(problem=problem, problem_mark=mark)


class _Invalid(_Refused):
    """A document that is no mapping, perhaps because of a typo."""


class _Date(_Refused):
    """A text that YAML takes for a date."""


class _Loader(yaml.SafeLoader):
    """A loader that bounds depth and size, joins surrogate pairs, and reports the place of every refused value."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_composed = 0
        self._num_values: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node. Raises: _Refused for one that is too deep, or expands to too many values."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._depth += 1
        self._num_composed += 1
        if self._num_composed > MOST_VALUES:
            raise _Refused(f"more than {MOST_VALUES} values", mark)
        if self._depth > MOST_DEPTH:
            raise _Refused(f"more than {MOST_DEPTH} values inside each other", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and node not in self._num_values:
            self._num_values[node] = 1 + sum(self._num_values.get(child, 1) for child in _get_child_nodes(node))
            if self._num_values[node] > MOST_VALUES:
                raise _Refused(f"more than {MOST_VALUES} values, each alias counted at every use", mark)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Compose a text, and join surrogate pairs (as JSON writers escape an emoji) to the character they encode.

        Raises: _Refused for quotes, brackets, comments and numbers in characters that are part of a text to YAML.
        """
        node = super().compose_scalar_node(anchor)
        node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        if node.style is None and not node.value.isascii():
            if quoted := QUOTED_OTHERWISE.fullmatch(node.value):
                text = json.dumps(shorten(quoted[1], quote=False), ensure_ascii=False)
                raise _Refused(
                    f"the quotes in {shorten(node.value, quote=False)} are part of the text to YAML. Write `{text}`",
                    node.start_mark,
                )
            if CHINESE_BRACKETS.fullmatch(node.value):
                text = shorten(_as_ascii(node.value), quote=False)
                raise _Refused(f"full-width brackets are part of the text to YAML. Write `{text}`", node.start_mark)
            if CHINESE_COMMENT.search(node.value):
                text = shorten(CHINESE_COMMENT.sub(" #", node.value), quote=False)
                raise _Refused(f"a full-width `\uff03` begins no comment. Write `{text}`", node.start_mark)
            if NO_TEXT.fullmatch(number := _as_ascii(node.value)):
                raise _Refused(f"{node.value} has full-width characters. Write `{number}`", node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value. Raises: _Refused for any exception of Python's constructors."""
        if node in self.recursive_objects:
            raise _Refused("an alias refers to a value that contains it. Write the value out", node.start_mark)
        try:
            value = super().construct_object(node, deep=deep)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            raise _Refused(
                f"{_describe_node(node)} is no {kind}. Put it in quotes if it is a text", node.start_mark
            ) from error
        if isinstance(value, datetime.date):
            raise _Date(f"{node.value} is a date to YAML. Put it in quotes", node.start_mark)
        is_number = isinstance(value, int | float) and isinstance(node, yaml.ScalarNode)
        if is_number and YAML_1_1_NUMBER.match(node.value):
            raise _Refused(
                f"{shorten(node.value, quote=False)} is {shorten(value)} to YAML. Write that, or put a text in quotes",
                node.start_mark,
            )
        return value

    def construct_sequence(self, node: yaml.Node, deep: bool = False) -> list[Any]:
        """Construct a list. Raises: _Refused for items in brackets that Chinese commas separate."""
        for item in node.value if isinstance(node, yaml.SequenceNode) and node.flow_style else ():
            if isinstance(item, yaml.ScalarNode) and item.style is None and CHINESE_COMMAS.search(item.value):
                items = shorten(_as_ascii(CHINESE_COMMAS.sub(", ", item.value)), quote=False)
                raise _Refused(
                    f"the Chinese comma in {shorten(item.value)} separates no items. Write `[{items}]`, or put a "
                    "text in quotes",
                    item.start_mark,
                )
        values: list[Any] = super().construct_sequence(node, deep=deep)  # type: ignore[arg-type]
        return values

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping. Raises: _Refused for a duplicate key, and for one that a full-width colon ends."""
        keys: set[tuple[str, str]] = set()
        for key, item in node.value if isinstance(node, yaml.MappingNode) else ():
            is_alone = isinstance(key, yaml.ScalarNode) and isinstance(item, yaml.ScalarNode) and not item.value
            if is_alone and FULL_WIDTH_COLON.search(key.value):
                pairs = CHINESE_COMMAS.sub(", ", FULL_WIDTH_COLON.sub(": ", key.value))
                raise _Refused(
                    f"the full-width colon `\uff1a` ends no key. Write `{shorten(_as_ascii(pairs), quote=False)}`",
                    key.start_mark,
                )
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if name in keys:
                raise _Refused(f"the key {shorten(key.value)} is set twice. Keep one", key.start_mark)
            if name is not None and key.tag != "tag:yaml.org,2002:merge":
                keys.add(name)
        values: dict[Any, Any] = super().construct_mapping(node, deep=deep)  # type: ignore[arg-type]
        return values


def _as_ascii(text: str) -> str:
    """Return a text with ASCII in the place of full-width characters and of Chinese brackets and full stops."""
    return unicodedata.normalize("NFKC", text.translate(str.maketrans("\u3010\u3011\u3002", "[].")))


def _get_node_kind(node: yaml.Node) -> str:
    return type(node).__name__.removesuffix("Node").lower()


def _describe_node(node: yaml.Node) -> str:
    return shorten(node.value) if isinstance(node, yaml.ScalarNode) else f"this {_get_node_kind(node)}"


def _get_child_nodes(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def read_text(path: Path, shown: str = "") -> str:
    """Return the text of a file or pipe that a user names; `shown`: its name in messages.

    Raises: ConfigError if it cannot be read, is not UTF-8 text, or is larger than `MOST_BYTES`.
    """
    shown = shown or shorten(str(path), quote=False)
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{shown} is larger than {MOST_BYTES >> 20} MiB, so it is no file of this kind.")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{shown}: no such file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{shown} is a folder. Give a file.") from None
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{shown}:{line}: not UTF-8: byte 0x{error.object[error.start]:02x}. {describe_encoding(error.object)}."
        ) from error
    except ValueError as error:  # a name with a NUL
        raise ConfigError(f"{shown}: cannot be read: {error}.") from error


def read_entries(text: str, name: str) -> list[tuple[str, Any, str]]:
    """Return (key, value, `name:line`) of each entry of a YAML mapping. Raises: ConfigError."""

    def read(loader: _Loader) -> list[tuple[str, Any, str]]:
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{name} is empty. It needs at least model, dataset and output_dir.")
        if not isinstance(node, yaml.MappingNode):
            raise _Invalid(f"expected `key: value` lines, found {_describe_node(node)}", node.start_mark)
        entries = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _Refused(f"a {_get_node_kind(key)} is no name of a setting", key.start_mark)
            place = f"{name}:{key.start_mark.line + 1}"
            entries.append((key.value, loader.construct_object(value, deep=True), place))
        return entries

    return _load_document(text, name, read)


def parse_yaml(text: str, name: str) -> Any:
    """Return the value of a YAML text; `name` is the prefix of places in messages. Raises: ConfigError."""
    value = _load_document(text, name, _construct_document)
    check_value(value, name, name)
    return value


def parse_override(text: str, place: str) -> Any:
    """Return the value of a `key=value` override; invalid YAML is a text. Raises: ConfigError, see `_Refused`."""
    try:
        return _construct_document(_Loader(text))
    except _Date:  # the shell removes quotes
        return text
    except _Refused as error:
        raise ConfigError(f"{error.problem} ({place}).") from error
    except yaml.YAMLError:
        return text
    except (ValueError, OverflowError) as error:  # an escape beyond Unicode
        raise ConfigError(f"{shorten(text)} holds what is no text: {error} ({place}).") from error


def parse_json(text: str, name: str, place: str = "") -> Any:
    """Return the value of a JSON text; `name` is its file, `place` the setting that names it. Raises: ConfigError."""
    after = f" ({place})" if place else ""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}:{error.lineno}: not valid JSON: {error.msg}{after}.") from error
    except RecursionError:
        raise ConfigError(f"{name}: more than {MOST_DEPTH} values inside each other{after}.") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"{name}: an integer in it has too many digits{after}.") from error
    check_value(value, name, place or name)
    return value


def _construct_document(loader: _Loader) -> Any:
    node = loader.get_single_node()
    return None if node is None else loader.construct_object(node, deep=True)


def _load_document(text: str, name: str, read: Callable[[_Loader], Result]) -> Result:
    loader = None
    try:
        loader = _Loader(text)
        return read(loader)
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: not valid YAML: {error.reason}.") from error
    except MarkedYAMLError as error:
        may_be_typo = isinstance(error, _Invalid) or not isinstance(error, _Refused)
        typo = find_typo(text, _find_failure) if may_be_typo else None
        if typo is not None:
            corrected = shorten(typo.corrected, quote=False)
            raise ConfigError(f"{name}:{typo.line}: {typo.problem}. Write `{corrected}`.") from error
        mark = _find_place(error)
        place = f"{name}:{mark.line + 1}" if mark else name
        kind = "" if isinstance(error, _Refused) else "not valid YAML: "
        raise ConfigError(f"{place}: {kind}{error.problem}.") from error
    except (
        ValueError,
        OverflowError,
    ) as error:  # of the scanner: an escape beyond Unicode, a long integer
        line = loader.get_mark().line + 1 if loader is not None else 1
        raise ConfigError(f"{name}:{line}: not valid YAML: {error}.") from error


def _find_place(error: MarkedYAMLError) -> Mark | None:
    """Return where the text or the brackets begin that an error is about; else where it was noticed."""
    begins = (error.context or "").startswith(("while scanning", "while parsing a flow"))
    return error.context_mark if begins and error.context_mark else error.problem_mark


def _find_failure(text: str) -> float:
    """Return the line, from 1, from which on a text is invalid: 0 if it is no mapping, infinity if it is valid."""
    try:
        is_mapping = isinstance(_Loader(text).get_single_node(), yaml.MappingNode)
        return inf if is_mapping else 0
    except MarkedYAMLError as error:
        return error.problem_mark.line + 1 if error.problem_mark else 0
    except (yaml.YAMLError, ValueError, OverflowError):  # no typo of ours
        return 0


def check_value(value: Any, name: str, place: str, depth: int = 1) -> None:
    """Raise ConfigError if a value holds something that file names, JSON or tensors cannot hold."""
    reason = ""
    if isinstance(value, str):
        if "\0" in value:
            reason = "it holds a NUL character"
        elif any("\ud800" <= character <= "\udfff" for character in value):
            reason = "it holds half of a surrogate pair, which is no character"
    elif isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            reason = f"an integer of {value.bit_length()} bits; {MOST_BITS} is the most"
    elif isinstance(value, dict | list | tuple | set):
        if depth > MOST_DEPTH:
            reason = f"more than {MOST_DEPTH} values inside each other"
        else:
            for part in [*value, *value.values()] if isinstance(value, dict) else value:
                check_value(part, name, place, depth + 1)
    if reason:
        shown = f" ({shorten(value)})" if isinstance(value, str) else ""
        raise ConfigError(f"{shorten(name, quote=False)}{shown}: {reason} ({place}).")


def shorten(value: Any, *, quote: bool = True) -> str:
    """Return a value for display in messages: quoted if it is a text, and cut in the middle if it is long."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    text = value if isinstance(value, str) and not quote else repr(value)
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]}[...]{text[-half:]}"
