"""A process that runs reward functions: `python -m surefoot.rl.reward_worker`.

The first line on its standard input names the functions, each further one is a call; each gets a line in answer. What
functions print goes to standard error. It ends when its input does, or with the process that started it. No torch.
"""

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from surefoot.process_end import end_with_parent
from surefoot.rl.builtin_rewards import BUILT_IN

Function = Callable[..., Any]


def load(name: str) -> Function:
    """A built-in, or a function of a Python file. Raises: whatever the file raises; ImportError, AttributeError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    file, _, function = name.rpartition(":")
    path = Path(file)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"surefoot_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Function = getattr(module, function)
    return found


def main() -> None:
    """Answer calls until there are no more."""
    end_with_parent()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        functions: list[Function] = []
        about = json.loads(sys.stdin.readline() or "[]")
        try:
            functions = [load(name) for name in about]
        except BaseException as error:  # noqa: BLE001 - a file that somebody else wrote
            _answer(answers, _failure(error))
            return
        _answer(answers, {"ready": True})
        for line in sys.stdin:
            _answer(answers, _call(functions, json.loads(line)))


def _call(functions: list[Function], job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        rewards = functions[job["function"]](**job["arguments"])
        return {"rewards": [None if value is None else _number(value) for value in rewards]}
    except Exception as error:  # noqa: BLE001 - a function that somebody else wrote
        return _failure(error)


def _number(value: Any) -> float:
    """Numbers of any library; whatever else is not one is told as NaN by the one who asked."""
    return float(value)


def _failure(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}", "trace": "".join(traceback.format_exception(error))[-4000:]}


def _answer(answers: TextIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
