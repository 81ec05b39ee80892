"""A process that runs reward functions: `python -m surefoot.methods.grpo.reward_process`.

The first line on its standard input names the functions, each further one is a call; each gets a line in answer. What
functions print goes to standard error. It ends when its input does, or with the process that started it. No torch.
"""

import asyncio
import difflib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from surefoot.methods.grpo.builtin_rewards import BUILT_IN
from surefoot.system.process import end_with_parent

Function = Callable[..., Any]
MOST_CHARACTERS = 2000
"""Of an error's text, and of its trace."""


def load(name: str) -> Function:
    """A built-in, or a function of a Python file. Raises: whatever the file raises; ImportError; NoSuchFunction."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    file, _, function = name.rpartition(":")
    module = _module(Path(file))
    found: Function | None = getattr(module, function, None)
    if found is None:
        raise NoSuchFunction(_absent(function, file, module))
    if not callable(found):
        raise NoSuchFunction(f"{function} of {file} is no function, but {type(found).__name__}")
    return found


class NoSuchFunction(Exception):
    """The file has no function of that name; the text says which it has."""


def _absent(function: str, file: str, module: ModuleType) -> str:
    own = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    near = difflib.get_close_matches(function, own, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{file} has no function {function}; it has {', '.join(own) or 'none'}{meant}"


@cache
def _module(path: Path) -> ModuleType:
    """A file, imported once as a module that others can find under its name."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"surefoot_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Answer calls until there are no more."""
    end_with_parent()
    sys.path.append(str(Path.cwd()))  # last, so that modules of the user's project hide no library
    with os.fdopen(os.dup(0), encoding="utf-8") as jobs, os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        # A function that reads gets the end of a file, and what it prints is no answer.
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        functions: list[Function] = []
        about = json.loads(jobs.readline() or "[]")
        name = ""
        try:
            for name in about:
                functions.append(load(name))
        except NoSuchFunction as error:
            _answer(answers, {"error": str(error), "trace": ""})
            return
        except BaseException as error:  # noqa: BLE001 - a file that somebody else wrote
            _answer(answers, {"error": _where(error, _folder(name)) + str(_failure(error)["error"]), "trace": ""})
            return
        _answer(answers, {"ready": True})
        for line in jobs:
            job = json.loads(line)
            _answer(answers, {"number": job["number"], **_call(functions, job)})


def _call(functions: list[Function], job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        rewards = functions[job["function"]](**job["arguments"])
        if inspect.isawaitable(rewards):
            rewards = _runner().run(_awaited(rewards))
        if not isinstance(rewards, Iterable) or isinstance(rewards, str | bytes | Mapping | Set):
            raise TypeError(f"it returned {type(rewards).__name__}, not a list with a number for each completion")
        return {"rewards": [None if value is None else _number(value) for value in rewards]}
    except Exception as error:  # noqa: BLE001 - a function that somebody else wrote
        return _failure(error)


@cache
def _runner() -> asyncio.Runner:
    """One for all calls: what functions keep open belongs to its loop."""
    return asyncio.Runner()


async def _awaited(rewards: Awaitable[Any]) -> Any:
    return await rewards


def _number(value: Any) -> float:
    """Numbers of any library; whatever else is not one is told as NaN by the one who asked."""
    if isinstance(value, str | bytes):
        raise TypeError(f"it returned the text {value!r} as a reward")
    return float(value)


def _failure(error: BaseException) -> dict[str, Any]:
    return {
        "error": f"{type(error).__name__}: {error}"[:MOST_CHARACTERS],
        "trace": "".join(traceback.format_exception(error))[-MOST_CHARACTERS:],
    }


def _folder(name: str) -> Path:
    """Of a function's file."""
    return Path(name.rpartition(":")[0]).resolve().parent


def _where(error: BaseException, folder: Path) -> str:
    """`file:line: ` of what failed to load: where its text is wrong, or the innermost statement under `folder`."""
    if isinstance(error, SyntaxError) and Path(error.filename or "").is_file():
        return f"{error.filename}:{error.lineno}: "
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve().is_relative_to(folder) and "site-packages" not in frame.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def _answer(answers: TextIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
