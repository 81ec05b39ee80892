"""Built-in reward functions. Each gets lists and returns a number per completion, or None where it does not apply.

They run in worker processes under a deadline, so a pattern that never ends masks its own sample only.
"""

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Completions = Sequence[Any]
ANSWER_COLUMNS = ("solution", "answer", "response", "ground_truth", "target")


def exact_match(completions: Completions, answer_column: str | None = None, **columns: Any) -> list[float | None]:
    """Return 1 for a completion equal to the row's answer, ignoring white space around both; else 0.

    The reward is None without an answer.
    """
    pairs = zip(completions, _get_answers(columns, answer_column), strict=True)
    return [
        None if answer is None else float(text_of(completion).strip() == _format_answer(answer))
        for completion, answer in pairs
    ]


def _format_answer(answer: Any) -> str:
    """Return an answer as text. Whole numbers lose the point that a column of a table with gaps gives them."""
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer).strip()


def math_verify(completions: Completions, answer_column: str | None = None, **columns: Any) -> list[float | None]:
    """Return 1 for a completion whose formula or number equals the row's answer (package math-verify), else 0.

    The reward is None if the row has no answer, or an answer without a formula.
    """
    package = importlib.import_module("math_verify")

    def verify_row(completion: str, answer: Any) -> float | None:
        if answer is None:
            return None
        answer = _format_answer(answer)
        gold = package.parse(answer, parsing_timeout=None) or package.parse(f"${answer}$", parsing_timeout=None)
        if not gold:
            return None
        return float(package.verify(gold, package.parse(completion, parsing_timeout=None), timeout_seconds=None))

    pairs = zip(completions, _get_answers(columns, answer_column), strict=True)
    return [verify_row(text_of(completion), answer) for completion, answer in pairs]


def regex(completions: Completions, pattern: str, **_: Any) -> list[float]:
    """Return 1 for a completion that contains `pattern` (`.` matches line ends too; anchor it with ^ and $), else 0."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.search(text_of(completion)) is not None) for completion in completions]


def json_schema(completions: Completions, schema: Mapping[str, Any], **_: Any) -> list[float]:
    """Return 1 for a completion that is JSON and fits `schema` (package jsonschema), else 0."""
    validator = importlib.import_module("jsonschema").Draft202012Validator(schema)

    def is_valid(text: str) -> bool:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return bool(validator.is_valid(value))

    return [float(is_valid(text_of(completion))) for completion in completions]


def length(
    completions: Completions, completion_ids: Sequence[Sequence[int]], min: int = 1, max: int | None = None, **_: Any
) -> list[float]:
    """Return 1 for a completion with `min` to `max` tokens, its end token included; else 0."""
    del completions
    return [float(min <= len(ids) and (max is None or len(ids) <= max)) for ids in completion_ids]


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward function, and what it needs."""

    function: Callable[..., Sequence[float | None]]
    settings: Mapping[str, type]
    """Arguments that come from `args` alone, whatever columns a row has."""
    required: str | None = None
    """Setting without a default."""
    module: str | None = None
    """Module that it imports."""


BUILT_IN: Mapping[str, BuiltIn] = {
    "exact_match": BuiltIn(exact_match, {"answer_column": str}),
    "math_verify": BuiltIn(math_verify, {"answer_column": str}, module="math_verify"),
    "regex": BuiltIn(regex, {"pattern": str}, required="pattern"),
    "json_schema": BuiltIn(json_schema, {"schema": dict}, required="schema", module="jsonschema"),
    "length": BuiltIn(length, {"min": int, "max": int}),
}


def settings_problem(name: str, args: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the `args` of a built-in, or None."""
    types, required = BUILT_IN[name].settings, BUILT_IN[name].required
    if required is not None and required not in args:
        return f"it needs args: {{{required}: ...}}"
    for key, value in args.items():
        if key not in types:
            return f"args has the key '{key}', which is unknown; it takes {', '.join(types)}"
        if not isinstance(value, types[key]) or isinstance(value, bool):
            return f"args: {key} is {value!r}, which is not of type {types[key].__name__}"
    if name == "length" and args.get("max") is not None and args.get("min", 1) > args["max"]:
        return f"args: no completion has at least {args.get('min', 1)} and at most {args['max']} tokens"
    if name == "regex":
        try:
            re.compile(args["pattern"])
        except re.error as error:
            return f"the pattern {args['pattern']!r} is not a regular expression: {error}"
    return _find_schema_problem(args["schema"]) if name == "json_schema" else None


def _find_schema_problem(schema: Mapping[str, Any]) -> str | None:
    if importlib.util.find_spec("jsonschema") is None:
        return None  # `check_reward` reports the missing package
    package = importlib.import_module("jsonschema")
    try:
        package.Draft202012Validator.check_schema(schema)
    except package.SchemaError as error:
        return f"the schema is invalid: {error.message}"
    return None


def text_of(completion: Any) -> str:
    """Return the text of a completion, which is a string, or a list of messages if the prompt was."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _get_answers(columns: Mapping[str, Any], answer_column: str | None) -> Sequence[Any]:
    column = _find_answer_column(columns, answer_column)
    if column is None:
        raise KeyError(_describe_missing_answers(columns, answer_column))
    return [None if _is_blank(answer) else answer for answer in columns[column]]


def _is_blank(answer: Any) -> bool:
    """Return whether a row has no answer: tables write None, NaN or an empty text."""
    return answer is None or answer != answer or (isinstance(answer, str) and not answer.strip())


def columns_problem(
    name: str, args: Mapping[str, Any], columns: Mapping[str, Any], which: str = "the rows"
) -> str | None:
    """Return what a built-in lacks in rows with these columns, or None. `which`: name of the rows in the message."""
    answer_column = args.get("answer_column")
    if "answer_column" not in BUILT_IN[name].settings or _find_answer_column(columns, answer_column) is not None:
        return None
    return _describe_missing_answers(columns, answer_column, which)


def _find_answer_column(columns: Mapping[str, Any], answer_column: str | None) -> str | None:
    candidates = (answer_column,) if answer_column else ANSWER_COLUMNS
    return next((name for name in candidates if name in columns), None)


def _describe_missing_answers(columns: Mapping[str, Any], answer_column: str | None, which: str = "the rows") -> str:
    expected = f"column {answer_column}" if answer_column else f"column of {', '.join(ANSWER_COLUMNS)}"
    return f"{which} have no {expected}; they have {', '.join(sorted(columns))}"
