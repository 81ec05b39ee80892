"""Shell scripts -> the simple commands in them, with the variables that were set before each. Nothing is run.

What quotes, arrays and `$(...)` hold is hidden from the rules that cut a script into commands: each character that
means something to a shell is moved to a code point of private use, and back when words are made.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from os.path import normpath

HIDDEN = "<>|&;#()'\"\\$` \t\r\n"
PRIVATE = 0xE000
UNSET = chr(PRIVATE + 0x100)
"""Stands for the `$` of what the script does not say: a variable that is not set in it, or the output of a program."""
ARRAY = chr(PRIVATE + 0x101)
ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
MOST_CHARACTERS = 1 << 16
"""Of a variable: some scripts double one again and again."""
DECLARING = frozenset({"export", "local", "declare", "readonly", "typeset"})
HEREDOC = re.compile(r"<<-?\s*([\"']?)(\w+)\1")
WRITTEN = re.compile(r"(?:(?<![0-9&])>>?\s*|\btee\s+(?:-a\s+)?)([\w./-]+)")
"""The file that a command writes to: `> NAME`, `tee NAME`."""
CONTINUED = re.compile(r"\\[ \t\r]*(?:\n|$)")
REDIRECTION = re.compile(r"(?:(?<!\S)\d+)?(?:<<<|&>>|&>|>>|>\||>&|<&|[<>])\s*[^\s;|&()<>]*")
SEPARATOR = re.compile(r"(\|\||&&|[;|&()\n])")
USE = re.compile(r"\$(?:\{(?P<name>\w+)(?::?[-=](?P<otherwise>[^}]*))?\}|(?P<plain>[A-Za-z_]\w*))")
"""`$NAME`, `${NAME}`, and `${NAME:-what it is otherwise}`."""
ALL_OF = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
"""The words of an array."""
ARITHMETIC = re.compile(r"\$\((?:expr\s+|\()\s*(\d{1,18})\s*\\?([-+*/])\s*(\d{1,18})\s*\)?\)")
CALCULATION = re.compile(rf"\${chr(PRIVATE + ord('('))}[\w{chr(PRIVATE)}-{chr(PRIVATE + 0x7F)}+*/-]*")
"""A substitution, hidden, whose variables are filled in."""
OPENING = frozenset({"if", "for", "while", "until", "case", "select"})
CLOSING = frozenset({"fi", "done", "esac"})
SHELLS = frozenset({"bash", "sh", "zsh"})
RUNS_TEXT = re.compile(r"-[a-z]*c")
"""What says that a shell is given a script as a word: -c, -lc, -exc."""
PREFIXES = frozenset({"then", "else", "elif", "do", "!", "time", "{", "}", "function", "if", "while", "until"})


@dataclass
class Command:
    """A simple command."""

    words: list[str]
    """`UNSET` stands in them where the script does not say what is there."""
    environment: dict[str, str]
    """Exported before, or written before the command."""
    uncertain: dict[str, str] = field(default_factory=dict)
    """Variables in it that are set in a branch or a loop, too -> the value that was taken."""


def commands(text: str, inherited: Mapping[str, str] | None = None) -> Iterator[Command]:
    """Those of a script, in their order; of `bash -c "..."` those in the quotes.

    `inherited`: variables of its environment. Raises: ValueError for quotes that do not end.
    """
    variables: dict[str, str | list[str]] = dict(inherited or {})
    exported: set[str] = set(variables)
    uncertain: set[str] = set()
    depth, follows = 0, ""
    for piece in SEPARATOR.split(REDIRECTION.sub(" ", _hide_what_is_held(text))):
        if SEPARATOR.fullmatch(piece):
            follows = piece
            continue
        used: set[str] = set()
        words = shlex.split(_filled_in(piece, variables, used))
        while words and (words[0] in PREFIXES or words[0] in OPENING | CLOSING):
            depth += (words[0] in OPENING) - (words[0] in CLOSING)
            words = words[1:] if words[0] in PREFIXES | CLOSING else []
        is_declared = bool(words) and words[0] in DECLARING
        is_exported = is_declared and words[0] == "export"
        own: dict[str, str | list[str]] = {}
        words = words[is_declared:]
        while words:
            word = words[0]
            match = ASSIGNMENT.match(word)
            if match is None and not is_declared:
                break
            words = words[1:]
            if match is not None:
                own[match[1]] = _checked(_assigned(match, variables))
            exported |= {match[1] if match is not None else word} if is_exported else set()
        if is_declared or not words:  # before a command they are the command's alone
            is_certain = depth == 0 and follows not in ("&&", "||")
            for name, value in own.items():
                uncertain = uncertain | {name} if not is_certain or used & uncertain else uncertain - {name}
                variables[name] = value if is_certain else variables.get(name, value)
        if words and not is_declared:
            known = {name: value for name, value in variables.items() if name in exported} | own
            command = Command(
                [_shown(word) for word in words],
                {name: value for name, value in known.items() if isinstance(value, str)},
                {name: str(variables[name]) for name in sorted(used & uncertain)},
            )
            inside = script_of(command.words)
            yield from [command] if inside is None else commands(inside, command.environment | _of_container(words))


def script_of(words: Sequence[str]) -> str | None:
    """What `bash -c` is given, also behind srun, docker run or nohup, or ssh; None where a command is none such."""
    if words and words[0] == "ssh" and " " in words[-1]:
        return words[-1].replace(UNSET, "$")
    for number, word in enumerate(words[:-2]):
        if word.rpartition("/")[2] in SHELLS:
            options = list(takewhile(lambda one: one.startswith("-"), words[number + 1 : -1]))
            if any(RUNS_TEXT.fullmatch(one) for one in options):
                return words[number + 1 + len(options)].replace(UNSET, "$")
    return None


def _of_container(words: Sequence[str]) -> dict[str, str]:
    """Variables that `docker run -e NAME=VALUE` sets."""
    if not {"docker", "podman"} & set(words[:2]):
        return {}
    given = [_bare(after) for one, after in pairwise(words) if one in ("-e", "--env")]
    given += [_bare(one.partition("=")[2]) for one in words if one.startswith("--env=")]
    return dict(one.split("=", 1) for one in given if "=" in one)


def documents(text: str) -> dict[str, str]:
    """Files that a script writes from here-documents (`cat > NAME <<END`, `tee NAME <<END`) -> their text."""
    found: dict[str, str] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines):
        document, target = HEREDOC.search(line), WRITTEN.search(line)
        if document is not None and target is not None:
            body = lines[number + 1 :]
            ends = [at for at, one in enumerate(body) if one.strip() == document[2]]
            body = body[: ends[0]] if ends else body
            if document[0].startswith("<<-"):  # for scripts that are indented with tabs
                body = [one.lstrip("\t") for one in body]
            name = normpath(target[1])
            is_added = target[0].startswith(">>") or "-a" in target[0].split()
            found[name] = (found.get(name, "") if is_added else "") + "\n".join(body) + "\n"
    return found


def _hide(text: str) -> str:
    return "".join(chr(PRIVATE + ord(one)) if one in HIDDEN else one for one in text)


def _shown(text: str) -> str:
    """`$` that are not hidden are of what could not be filled in."""
    return _bare(text.replace("$", UNSET))


def _bare(text: str) -> str:
    return "".join(chr(ord(one) - PRIVATE) if PRIVATE <= ord(one) < PRIVATE + 0x80 else one for one in text)


def _hide_what_is_held(text: str) -> str:
    """A script without comments and here-documents, with what quotes, arrays and substitutions hold hidden."""
    out: list[str] = []
    documents: list[str] = []
    at, quote = 0, ""
    while at < len(text):
        one, after = text[at], text[at + 1 : at + 2]
        taken = 1
        if quote == "'":
            out.append(one if one == "'" else _hide(one))
            quote = "" if one == "'" else quote
        elif one == "\\":
            continued = CONTINUED.match(text, at)
            taken = len(continued[0]) if continued else 2
            out.append(" " * (not quote) if continued else _hide(after) if not quote else _escaped(after))
        elif one == '"':
            quote = "" if quote else one
            out.append(one)
        elif (one == "$" and after == "(") or one == "`":
            end = _end_of_parentheses(text, at + 1) if one == "$" else text.find("`", at + 1) + 1 or len(text)
            taken = end - at
            inside = text[at + (one == "$") : end]
            # Its variables are filled in with those around it.
            out.append("$" + re.sub(_hide("$") + r"(?=[A-Za-z_{])", "$", _hide(inside)))
        elif quote:
            out.append(one if one == "$" else _hide(one))
        elif one == "'":
            quote = one
            out.append(one)
        elif one == "#" and (not out or out[-1][-1:] in " \t\n;|&("):
            end = text.find("\n", at)
            taken = (end if end >= 0 else len(text)) - at
        elif one == "#":
            out.append(_hide(one))
        elif one == "(" and out and out[-1].endswith("="):
            taken = _end_of_parentheses(text, at) - at
            out.append(ARRAY + _hide(text[at + 1 : at + taken - 1]))
        elif text.startswith("<<<", at):
            taken = 3
            out.append("<<<")
        elif one == "<" and (document := HEREDOC.match(text, at)):
            taken = len(document[0])
            documents.append(document[2])
        elif one == "\n" and documents:
            end = at + 1
            while documents and end < len(text):
                begin, end = end, text.find("\n", end) + 1 or len(text) + 1
                documents = documents[1:] if text[begin : end - 1].strip() == documents[0] else documents
            taken, documents = end - at, []
            out.append("\n")
        else:
            out.append(one)
        at += max(1, taken)
    return "".join(out)


def _escaped(one: str) -> str:
    """After a backslash in double quotes."""
    return _hide(one) if one in '"\\$`' else _hide("\\" + one)


def _end_of_parentheses(text: str, begin: int) -> int:
    """Behind the one that closes the one at `begin`."""
    depth, quote, at = 0, "", begin
    while at < len(text):
        one = text[at]
        if quote or one in "'\"":
            quote = "" if one == quote else quote or one
        elif one == "#" and text[at - 1] in " \t\n":  # a comment among the words of an array
            at = text.find("\n", at)
            if at < 0:
                break
        else:
            depth += (one == "(") - (one == ")")
            if depth == 0:
                return at + 1
        at += 1
    return len(text)


def _filled_in(piece: str, variables: dict[str, str | list[str]], used: set[str]) -> str:
    """A piece with the values of its variables; where nothing is known of one, it stays."""

    def words_of(use: "re.Match[str]") -> str:
        used.add(use[1])
        value = variables.get(use[1])
        if value is None:
            return use[0].replace('"', "")
        words = [value] if isinstance(value, str) else value
        return " ".join(map(_hide, words if use[0].startswith('"') else " ".join(words).split()))

    def value_of(use: "re.Match[str]") -> str:
        name, otherwise = use["name"] or use["plain"], use["otherwise"]
        value = variables.get(name)
        if isinstance(value, list):
            value = value[0] if value else ""
        used.add(name)
        if value is None or not (value or otherwise is None):
            return otherwise if otherwise is not None else use[0]
        is_quoted = use.string[: use.start()].count('"') % 2
        return _hide(value) if is_quoted else " ".join(map(_hide, value.split()))

    return CALCULATION.sub(_calculated, USE.sub(value_of, ALL_OF.sub(words_of, piece)))


def _calculated(substitution: "re.Match[str]") -> str:
    """The result of `$(expr ...)` or `$((...))`; other programs are not run."""
    text = _bare(substitution[0])
    found = ARITHMETIC.match(text)
    if found is None or (found[2] == "/" and not int(found[3])):
        return substitution[0]
    one, sign, other = int(found[1]), found[2], int(found[3])
    results = {"+": one + other, "-": one - other, "*": one * other, "/": one // (other or 1)}
    return f"{results[sign]}{_hide(text[found.end() :])}"


def _checked(value: "str | list[str]") -> "str | list[str]":
    """Raises: ValueError for a variable that has grown beyond what a script means."""
    if sum(map(len, value)) > MOST_CHARACTERS:
        raise ValueError(f"a variable of more than {MOST_CHARACTERS} characters")
    return value


def _assigned(match: "re.Match[str]", variables: dict[str, str | list[str]]) -> str | list[str]:
    name, is_added, value = match.groups()
    before = variables.get(name)
    if value.startswith(ARRAY):
        inside = _filled_in(_hide_what_is_held(_bare(value[1:])), variables, set())
        words = [_shown(word) for word in shlex.split(inside)]
        return [*before, *words] if is_added and isinstance(before, list) else words
    shown = _shown(value)
    return before + shown if is_added and isinstance(before, str) else shown
