"""A process that runs reward functions: `python -m surefoot.methods.grpo.reward_process`.

The first line on its standard input names the functions, each further line is a call; each gets a line in response.
Output that functions print goes to standard error. The process ends when its input does, or with the process that
started it. No torch.
"""

import asyncio
import difflib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from surefoot.methods.grpo.builtin_rewards import BUILT_IN
from surefoot.system.line_pipe import LinePipe
from surefoot.system.process import end_with_parent

Function = Callable[..., Any]
MOST_CHARACTERS = 2000
"""Largest length of an error's text, and of its trace."""


def load(name: str) -> Function:
    """Return a built-in, or a function of a Python file. Raises: any error of the file; ImportError; NoSuchFunction."""
    if name in BUILT_IN:
        return BUILT_IN[name].function
    file, _, function = name.rpartition(":")
    module = _import_module(Path(file))
    value: Function | None = getattr(module, function, None)
    if value is None:
        raise NoSuchFunction(_describe_missing(function, file, module))
    if not callable(value):
        raise NoSuchFunction(f"{function} of {file} is no function, but {type(value).__name__}")
    return value


class NoSuchFunction(Exception):
    """The file has no function of that name; the text says which it has."""


def _describe_missing(function: str, file: str, module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    close_names = difflib.get_close_matches(function, names, n=1)
    suggestion = f"; did you mean {close_names[0]}?" if close_names else ""
    return f"{file} has no function {function}; it has {', '.join(names) or 'none'}{suggestion}"


@cache
def _import_module(path: Path) -> ModuleType:
    """Import a file once, as a module that is also in `sys.modules`."""
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
    pipe = LinePipe(os.dup(0), os.dup(1))
    # A function that reads standard input gets the end of a file, and one that prints cannot break the protocol.
    with open(os.devnull) as null_device:
        os.dup2(null_device.fileno(), 0)
    os.dup2(2, 1)
    functions: list[Function] = []
    try:
        response = _load_all(json.loads(pipe.receive()), functions)
    except EOFError:
        return
    pipe.send(json.dumps(response).encode())
    if "error" not in response:
        pipe.answer_requests(lambda job: {"number": job["number"], **_run_job(functions, job)})


def _load_all(names: Sequence[str], functions: list[Function]) -> dict[str, str]:
    """Append the functions of these names to `functions`. Return the error of the first that cannot be loaded."""
    for name in names:
        try:
            functions.append(load(name))
        except NoSuchFunction as error:
            return {"error": str(error)}
        except BaseException as error:  # noqa: BLE001 - a file that somebody else wrote
            folder = Path(name.rpartition(":")[0]).resolve().parent
            return {"error": _format_location(error, folder) + _describe_error(error)["error"]}
    return {}


def _run_job(functions: list[Function], job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        rewards = functions[job["function"]](**job["arguments"])
        if inspect.isawaitable(rewards):
            rewards = _get_runner().run(_await_rewards(rewards))
        if not isinstance(rewards, Iterable) or isinstance(rewards, str | bytes | Mapping | Set):
            raise TypeError(f"it returned {type(rewards).__name__}, not a list with a number for each completion")
        return {"rewards": [None if value is None else _to_float(value) for value in rewards]}
    except Exception as error:  # noqa: BLE001 - a function that somebody else wrote
        return _describe_error(error)


@cache
def _get_runner() -> asyncio.Runner:
    """Return the runner that all calls share, because resources that functions hold open belong to its loop."""
    return asyncio.Runner()


async def _await_rewards(rewards: Awaitable[Any]) -> Any:
    return await rewards


def _to_float(value: Any) -> float:
    """Return a number of any library as a float. The caller reports NaN and infinity."""
    if isinstance(value, str | bytes):
        raise TypeError(f"it returned the text {value!r} as a reward")
    return float(value)


def _describe_error(error: BaseException) -> dict[str, str]:
    return {
        "error": f"{type(error).__name__}: {error}"[:MOST_CHARACTERS],
        "trace": "".join(traceback.format_exception(error))[-MOST_CHARACTERS:],
    }


def _format_location(error: BaseException, folder: Path) -> str:
    """Return `file:line: ` of a failed import: of the syntax error, or of the innermost statement under `folder`."""
    if isinstance(error, SyntaxError) and Path(error.filename or "").is_file():
        return f"{error.filename}:{error.lineno}: "
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve().is_relative_to(folder) and "site-packages" not in frame.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


if __name__ == "__main__":
    main()
