"""Reward functions that come with Surefoot. Each gets lists and returns a number a completion, or None for "not mine".

They run in worker processes under a deadline, so a pattern that never ends masks its sample and no more.
"""

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Completions = Sequence[Any]
ANSWER_COLUMNS = ("solution", "answer", "response", "ground_truth", "target")


def exact_match(completions: Completions, answer_column: str | None = None, **columns: Any) -> list[float | None]:
    """1 where a completion is the row's answer, white space around either aside; else 0. None without an answer."""
    pairs = zip(completions, _answers(columns, answer_column), strict=True)
    return [
        None if answer is None else float(text_of(completion).strip() == _written(answer))
        for completion, answer in pairs
    ]


def _written(answer: Any) -> str:
    """A whole number of a column of decimals, as the numbers of tables with gaps become, is written without a point."""
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer).strip()


def math_verify(completions: Completions, answer_column: str | None = None, **columns: Any) -> list[float | None]:
    """1 where a completion's formula or number equals the row's answer (package math-verify), else 0.

    None where the row has no answer, or one without a formula.
    """
    package = importlib.import_module("math_verify")

    def one(completion: str, answer: Any) -> float | None:
        if answer is None:
            return None
        answer = _written(answer)
        gold = package.parse(answer, parsing_timeout=None) or package.parse(f"${answer}$", parsing_timeout=None)
        if not gold:
            return None
        return float(package.verify(gold, package.parse(completion, parsing_timeout=None), timeout_seconds=None))

    pairs = zip(completions, _answers(columns, answer_column), strict=True)
    return [one(text_of(completion), answer) for completion, answer in pairs]


def regex(completions: Completions, pattern: str, **_: Any) -> list[float]:
    """1 where `pattern` is found in a completion (`.` matches line ends too; anchor it with ^ and $), else 0."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.search(text_of(completion)) is not None) for completion in completions]


def json_schema(completions: Completions, schema: Mapping[str, Any], **_: Any) -> list[float]:
    """1 where a completion is JSON that fits `schema` (package jsonschema), else 0."""
    validator = importlib.import_module("jsonschema").Draft202012Validator(schema)

    def fits(text: str) -> bool:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return bool(validator.is_valid(value))

    return [float(fits(text_of(completion))) for completion in completions]


def length(
    completions: Completions, completion_ids: Sequence[Sequence[int]], min: int = 1, max: int | None = None, **_: Any
) -> list[float]:
    """1 where a completion has from `min` to `max` tokens, its end included; else 0."""
    del completions
    return [float(min <= len(ids) and (max is None or len(ids) <= max)) for ids in completion_ids]


BUILT_IN: Mapping[str, Callable[..., Sequence[float | None]]] = {
    "exact_match": exact_match,
    "math_verify": math_verify,
    "regex": regex,
    "json_schema": json_schema,
    "length": length,
}
NEEDS: Mapping[str, tuple[str, str]] = {
    "math_verify": ("math_verify", "math-verify"),
    "json_schema": ("jsonschema", "jsonschema"),
}
"""Built-in -> (module, package) that it works with."""


SETTINGS_OF: Mapping[str, Mapping[str, type]] = {
    "exact_match": {"answer_column": str},
    "math_verify": {"answer_column": str},
    "regex": {"pattern": str},
    "json_schema": {"schema": dict},
    "length": {"min": int, "max": int},
}
"""Built-in -> its arguments that come from `args` alone, whatever columns a row has."""


def settings_problem(name: str, args: Mapping[str, Any]) -> str | None:
    """What is wrong with the `args` of a built-in."""
    known = SETTINGS_OF[name]
    needed = {"regex": "pattern", "json_schema": "schema"}.get(name)
    if needed is not None and needed not in args:
        return f"it needs args: {{{needed}: ...}}"
    for one, value in args.items():
        if one not in known:
            return f"args has '{one}', which it does not know; it knows {', '.join(known)}"
        if not isinstance(value, known[one]) or isinstance(value, bool):
            return f"args: {one} is {value!r}, and not of the type {known[one].__name__}"
    if name == "length" and args.get("max") is not None and args.get("min", 1) > args["max"]:
        return f"args: no completion has at least {args.get('min', 1)} and at most {args['max']} tokens"
    if name == "regex":
        try:
            re.compile(args["pattern"])
        except re.error as error:
            return f"the pattern {args['pattern']!r} is no regular expression: {error}"
    return _schema_problem(args["schema"]) if name == "json_schema" else None


def _schema_problem(schema: Mapping[str, Any]) -> str | None:
    if importlib.util.find_spec("jsonschema") is None:
        return None  # said elsewhere
    package = importlib.import_module("jsonschema")
    try:
        package.Draft202012Validator.check_schema(schema)
    except package.SchemaError as error:
        return f"the schema is none: {error.message}"
    return None


def text_of(completion: Any) -> str:
    """The words of a completion, which is a text, or messages where the prompt was."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _answers(columns: Mapping[str, Any], named: str | None) -> Sequence[Any]:
    found = _answer_column(columns, named)
    if found is None:
        raise KeyError(_no_answers(columns, named))
    return [None if _is_blank(answer) else answer for answer in columns[found]]


def _is_blank(answer: Any) -> bool:
    """Whether a row has no answer: tables write that as nothing, or as NaN."""
    return answer is None or answer != answer or (isinstance(answer, str) and not answer.strip())


def columns_problem(
    name: str, args: Mapping[str, Any], columns: Mapping[str, Any], which: str = "the rows"
) -> str | None:
    """What a built-in misses in rows that have these columns; `which` they are."""
    named = args.get("answer_column")
    if "answer_column" not in SETTINGS_OF[name] or _answer_column(columns, named) is not None:
        return None
    return _no_answers(columns, named, which)


def _answer_column(columns: Mapping[str, Any], named: str | None) -> str | None:
    return next((name for name in ((named,) if named else ANSWER_COLUMNS) if name in columns), None)


def _no_answers(columns: Mapping[str, Any], named: str | None, which: str = "the rows") -> str:
    wanted = f"column {named}" if named else f"column of {', '.join(ANSWER_COLUMNS)}"
    return f"{which} have no {wanted}; they have {', '.join(sorted(columns))}"
