"""Parsing of shell scripts into simple commands, with the variables set before each. Nothing is run.

The contents of quotes, arrays and `$(...)` are hidden from the rules that split a script into commands: each character
with a meaning to a shell is moved to a private-use code point, and moved back when words are made.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from os.path import normpath

SPECIAL_CHARACTERS = "<>|&;#()'\"\\$` \t\r\n"
PRIVATE_USE = 0xE000
UNSET = chr(PRIVATE_USE + 0x100)
"""Replacement for the `$` of a value the script does not give: an unset variable, or the output of a program."""
ARRAY = chr(PRIVATE_USE + 0x101)
ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
MAX_COMMAND_CHARACTERS = 1 << 18
MAX_VARIABLE_CHARACTERS = 1 << 16
"""Maximum length of a variable, because a script can double one repeatedly."""
DECLARATIONS = frozenset({"export", "local", "declare", "readonly", "typeset"})
HEREDOC = re.compile(r"<<-?\s*([\"']?)(\w+)\1")
OUTPUT_FILE = re.compile(r"(?:(?<![0-9&])>>?\s*|\btee\s+(?:-a\s+)?)([\w./-]+)")
"""Redirection to the file that a command writes: `> NAME`, `tee NAME`."""
LINE_CONTINUATION = re.compile(r"\\[ \t\r]*(?:\n|$)")
REDIRECTION = re.compile(r"(?:(?<!\S)\d+)?(?:<<<|&>>|&>|>>|>\||>&|<&|[<>])\s*[^\s;|&()<>]*")
SEPARATOR = re.compile(r"(\|\||&&|[;|&()\n])")
VARIABLE = re.compile(r"\$(?:\{(?P<name>\w+)(?::?[-=](?P<otherwise>[^}]{0,1000}))?\}|(?P<plain>[A-Za-z_]\w*))")
"""`$NAME`, `${NAME}` or `${NAME:-default}`."""
ARRAY_EXPANSION = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
"""`${NAME[@]}`: all words of an array."""
ARITHMETIC = re.compile(r"\$\((?:expr\s+|\()\s*(\d{1,18}(?:\s*\\?[-+*/]\s*\d{1,18}){1,8})\s*\)?\)")
"""A calculation with up to nine whole numbers."""
CALCULATION = re.compile(rf"\${chr(PRIVATE_USE + ord('('))}[\w{chr(PRIVATE_USE)}-{chr(PRIVATE_USE + 0x7F)}+*/-]*")
"""A hidden command substitution whose variables have been filled in."""
BLOCK_OPENERS = frozenset({"if", "for", "while", "until", "case", "select"})
BLOCK_CLOSERS = frozenset({"fi", "done", "esac"})
SHELLS = frozenset({"bash", "sh", "zsh"})
SCRIPT_FLAG = re.compile(r"-[a-z]*c")
"""Option of a shell whose next word is a script: -c, -lc, -exc."""
PREFIXES = frozenset({"then", "else", "elif", "do", "!", "time", "{", "}", "function", "if", "while", "until"})


@dataclass
class Command:
    """A simple command of a shell script."""

    words: list[str]
    """Words after expansion; `UNSET` marks the parts whose value the script does not give."""
    environment: dict[str, str]
    """Variables exported earlier or assigned in front of the command."""
    uncertain: dict[str, str] = field(default_factory=dict)
    """Variables in the command that a branch or a loop also sets -> the value used."""


def parse_commands(text: str, inherited: Mapping[str, str] | None = None) -> Iterator[Command]:
    """Yield the simple commands of a script in order; for `bash -c "..."`, those of the quoted script.

    `inherited`: environment variables. Raises: ValueError for quotes that do not end, or an overlong variable.
    """
    variables: dict[str, str | list[str]] = dict(inherited or {})
    exported: set[str] = set(variables)
    uncertain: set[str] = set()
    depth, separator = 0, ""
    for piece in SEPARATOR.split(REDIRECTION.sub(" ", _hide_quoted_text(text))):
        if SEPARATOR.fullmatch(piece):
            separator = piece
            continue
        used_names: set[str] = set()
        words = _split_words(_fill_in_variables(piece, variables, used_names))
        while words and (words[0] in PREFIXES or words[0] in BLOCK_OPENERS | BLOCK_CLOSERS):
            depth += (words[0] in BLOCK_OPENERS) - (words[0] in BLOCK_CLOSERS)
            words = words[1:] if words[0] in PREFIXES | BLOCK_CLOSERS else []
        is_declared = bool(words) and words[0] in DECLARATIONS
        is_exported = is_declared and words[0] == "export"
        assignments: dict[str, str | list[str]] = {}
        words = words[is_declared:]
        while words:
            word = words[0]
            match = ASSIGNMENT.match(word)
            if match is None and not is_declared:
                break
            words = words[1:]
            if match is not None:
                assignments[match[1]] = _check_length(_parse_assignment(match, variables))
            exported |= {match[1] if match is not None else word} if is_exported else set()
        if is_declared or not words:  # an assignment in front of a command applies to it alone
            is_certain = depth == 0 and separator not in ("&&", "||")
            for name, value in assignments.items():
                uncertain = uncertain | {name} if not is_certain or used_names & uncertain else uncertain - {name}
                variables[name] = value if is_certain else variables.get(name, value)
        if words and not is_declared:
            environment = {name: value for name, value in variables.items() if name in exported} | assignments
            command = Command(
                [_mark_unset(word) for word in words],
                {name: value for name, value in environment.items() if isinstance(value, str)},
                {name: str(variables[name]) for name in sorted(used_names & uncertain)},
            )
            script = extract_script(command.words)
            yield from (
                [command]
                if script is None
                else parse_commands(script, command.environment | _read_container_variables(words))
            )


def extract_script(words: Sequence[str]) -> str | None:
    """Return the script given to `bash -c` (also after srun, docker run or nohup) or ssh; None for other commands."""
    if words and words[0] == "ssh" and " " in words[-1]:
        return restore_dollars(words[-1])
    for index, word in enumerate(words[:-2]):
        if word.rpartition("/")[2] in SHELLS:
            options = list(takewhile(lambda option: option.startswith("-"), words[index + 1 : -1]))
            if any(SCRIPT_FLAG.fullmatch(option) for option in options):
                return restore_dollars(words[index + 1 + len(options)])
    return None


def restore_dollars(text: str) -> str:
    return text.replace(UNSET, "$")


def _read_container_variables(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that `docker run -e NAME=VALUE` sets."""
    if not {"docker", "podman"} & set(words[:2]):
        return {}
    assignments = [_unhide_text(following) for word, following in pairwise(words) if word in ("-e", "--env")]
    assignments += [_unhide_text(word.partition("=")[2]) for word in words if word.startswith("--env=")]
    return dict(word.split("=", 1) for word in assignments if "=" in word)


def extract_heredocs(text: str) -> dict[str, str]:
    """Return file name -> text of the here-documents that a script writes (`cat > NAME <<END`, `tee NAME <<END`)."""
    heredocs: dict[str, str] = {}
    lines = text.splitlines()
    for index, line in enumerate(lines):
        heredoc, output_file = HEREDOC.search(line), OUTPUT_FILE.search(line)
        if heredoc is not None and output_file is not None:
            body = lines[index + 1 :]
            ends = [end_index for end_index, body_line in enumerate(body) if body_line.strip() == heredoc[2]]
            body = body[: ends[0]] if ends else body
            if heredoc[0].startswith("<<-"):  # `<<-` strips leading tabs
                body = [body_line.lstrip("\t") for body_line in body]
            name = normpath(output_file[1])
            is_added = output_file[0].startswith(">>") or "-a" in output_file[0].split()
            heredocs[name] = (heredocs.get(name, "") if is_added else "") + "\n".join(body) + "\n"
    return heredocs


def _hide_text(text: str) -> str:
    return "".join(
        chr(PRIVATE_USE + ord(character)) if character in SPECIAL_CHARACTERS else character for character in text
    )


def _mark_unset(text: str) -> str:
    """Unhide text, and mark each `$` that could not be expanded (those are not hidden) with `UNSET`."""
    return _unhide_text(text.replace("$", UNSET))


def _unhide_text(text: str) -> str:
    return "".join(
        chr(ord(character) - PRIVATE_USE) if PRIVATE_USE <= ord(character) < PRIVATE_USE + 0x80 else character
        for character in text
    )


def _hide_quoted_text(text: str) -> str:
    """Return a script without comments and here-documents, with quotes, arrays and substitutions hidden."""
    pieces: list[str] = []
    delimiters: list[str] = []
    position, quote = 0, ""
    while position < len(text):
        character, following = text[position], text[position + 1 : position + 2]
        length = 1
        if quote == "'":
            pieces.append(character if character == "'" else _hide_text(character))
            quote = "" if character == "'" else quote
        elif character == "\\":
            continuation = LINE_CONTINUATION.match(text, position)
            length = len(continuation[0]) if continuation else 2
            pieces.append(
                " " * (not quote) if continuation else _hide_text(following) if not quote else _hide_escaped(following)
            )
        elif character == '"':
            quote = "" if quote else character
            pieces.append(character)
        elif (character == "$" and following == "(") or character == "`":
            end = (
                _find_closing_parenthesis(text, position + 1)
                if character == "$"
                else text.find("`", position + 1) + 1 or len(text)
            )
            length = end - position
            substitution = text[position + (character == "$") : end]
            # Variables inside stay visible, so that they are expanded with those around the substitution.
            pieces.append("$" + re.sub(_hide_text("$") + r"(?=[A-Za-z_{])", "$", _hide_text(substitution)))
        elif quote:
            pieces.append(character if character == "$" else _hide_text(character))
        elif character == "'":
            quote = character
            pieces.append(character)
        elif character == "#" and (not pieces or pieces[-1][-1:] in " \t\n;|&("):
            end = text.find("\n", position)
            length = (end if end >= 0 else len(text)) - position
        elif character == "#":
            pieces.append(_hide_text(character))
        elif character == "(" and pieces and pieces[-1].endswith("="):
            length = _find_closing_parenthesis(text, position) - position
            pieces.append(ARRAY + _hide_text(text[position + 1 : position + length - 1]))
        elif text.startswith("<<<", position):
            length = 3
            pieces.append("<<<")
        elif character == "<" and (heredoc := HEREDOC.match(text, position)):
            length = len(heredoc[0])
            delimiters.append(heredoc[2])
        elif character == "\n" and delimiters:
            end = position + 1
            while delimiters and end < len(text):
                begin, end = end, text.find("\n", end) + 1 or len(text) + 1
                delimiters = delimiters[1:] if text[begin : end - 1].strip() == delimiters[0] else delimiters
            length, delimiters = end - position, []
            pieces.append("\n")
        else:
            pieces.append(character)
        position += max(1, length)
    return "".join(pieces)


def _hide_escaped(character: str) -> str:
    """Hide a character that follows a backslash in double quotes."""
    return _hide_text(character) if character in '"\\$`' else _hide_text("\\" + character)


def _find_closing_parenthesis(text: str, begin: int) -> int:
    """Return the index after the parenthesis that closes the one at `begin`."""
    depth, quote, position = 0, "", begin
    while position < len(text):
        character = text[position]
        if quote or character in "'\"":
            quote = "" if character == quote else quote or character
        elif character == "#" and text[position - 1] in " \t\n":  # a comment among the words of an array
            position = text.find("\n", position)
            if position < 0:
                break
        else:
            depth += (character == "(") - (character == ")")
            if depth == 0:
                return position + 1
        position += 1
    return len(text)


def _fill_in_variables(piece: str, variables: dict[str, str | list[str]], used_names: set[str]) -> str:
    """Replace the variables in a piece by their values; leave unset ones. Adds the names to `used_names`."""

    def expand_array(match: "re.Match[str]") -> str:
        used_names.add(match[1])
        value = variables.get(match[1])
        if value is None:
            return match[0].replace('"', "")
        words = [value] if isinstance(value, str) else value
        return " ".join(map(_hide_text, words if match[0].startswith('"') else " ".join(words).split()))

    def expand_variable(match: "re.Match[str]") -> str:
        name, default = match["name"] or match["plain"], match["otherwise"]
        value = variables.get(name)
        if isinstance(value, list):
            value = value[0] if value else ""
        used_names.add(name)
        if value is None or not (value or default is None):
            return default if default is not None else match[0]
        is_quoted = match.string[: match.start()].count('"') % 2
        return _hide_text(value) if is_quoted else " ".join(map(_hide_text, value.split()))

    return CALCULATION.sub(
        _evaluate_arithmetic, VARIABLE.sub(expand_variable, ARRAY_EXPANSION.sub(expand_array, piece))
    )


def _evaluate_arithmetic(substitution: "re.Match[str]") -> str:
    """Return the result of `$(expr ...)` or `$((...))`; leave other substitutions, since nothing is run."""
    text = _unhide_text(substitution[0])
    match = ARITHMETIC.match(text)
    if match is None:
        return substitution[0]
    terms: list[tuple[int, int]] = []
    for operator, digits in re.findall(r"([-+*/]?)\s*(\d+)", match[1]):
        number = int(digits)
        if operator == "/" and not number:
            return substitution[0]
        if operator in ("*", "/"):
            sign, value = terms.pop()
            terms.append((sign, value * number if operator == "*" else value // number))
        else:
            terms.append((-1 if operator == "-" else 1, number))
    total = sum(sign * value for sign, value in terms)
    return f"{total}{_hide_text(text[match.end() :])}"


def _split_words(text: str) -> list[str]:
    """Return the words of a command. Raises: ValueError for an overlong one: shlex takes quadratic time."""
    if len(text) > MAX_COMMAND_CHARACTERS:
        raise ValueError(f"a command of more than {MAX_COMMAND_CHARACTERS} characters")
    return shlex.split(text)


def _check_length(value: "str | list[str]") -> "str | list[str]":
    """Return the value of a variable. Raises: ValueError if it is longer than MAX_VARIABLE_CHARACTERS."""
    if sum(map(len, value)) > MAX_VARIABLE_CHARACTERS:
        raise ValueError(f"a variable of more than {MAX_VARIABLE_CHARACTERS} characters")
    return value


def _parse_assignment(match: "re.Match[str]", variables: dict[str, str | list[str]]) -> str | list[str]:
    name, is_added, value = match.groups()
    previous = variables.get(name)
    if value.startswith(ARRAY):
        contents = _fill_in_variables(_hide_quoted_text(_unhide_text(value[1:])), variables, set())
        words = [_mark_unset(word) for word in _split_words(contents)]
        return [*previous, *words] if is_added and isinstance(previous, list) else words
    text = _mark_unset(value)
    return previous + text if is_added and isinstance(previous, str) else text
