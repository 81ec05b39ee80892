"""Calls of reward functions in worker processes, under a deadline. A failure masks its sample, with a reason."""

import importlib.util
import json
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Protocol

from surefoot.errors import ConfigError
from surefoot.methods.grpo.builtin_rewards import BUILT_IN, settings_problem
from surefoot.methods.grpo.settings import RewardItem
from surefoot.methods.grpo.worker_output import BoundedOutput
from surefoot.system.line_pipe import LinePipe
from surefoot.system.process import PYTHON, describe_end

START_DEADLINE_S = 120.0
"""Seconds that a worker has to import the functions' files."""
KILLED_WITHIN_S = 10.0
END_NOTICE_S = 2.0
"""Seconds that a process has to end after it closed its files."""
HEARTBEAT_EVERY_S = 5.0
"""Seconds between two heartbeats while rewards are computed."""
ANSWER_BYTES = 16 << 20
"""Largest size of a worker's response: about 25 bytes per completion, or the text of an error."""
ERROR_CHARACTERS = 5000
"""Largest length of an error's text with its trace; a worker sends less."""
ODD_ANSWER = "its process answered something else: does the function fork, or write to open files?"
NO_FUNCTION = "length"
"""A built-in that workers load in the place of a reward model."""
MAX_REWARD = 1e12
"""Largest magnitude of a reward: the squares of much larger ones would overflow."""
MAX_LATE_SINGLE_CALLS = 2
"""Number of completions of a late group that may be late alone; after them the rest of the group is masked."""
LATE_GROUPS_UNTIL_ONE_CALL, LATE_GROUPS_UNTIL_NO_CALL = 2, 8
"""Numbers of late groups in a row from which a function is called once per group, and not at all."""


@dataclass(frozen=True)
class RewardInputs:
    """The completions of one prompt, as reward functions receive them."""

    columns: Mapping[str, Any]
    """Columns of the prompt's row."""
    texts: Sequence[str]
    ids: Sequence[Sequence[int]]

    def arguments(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return keyword arguments as in TRL: lists with a value per completion. Chats get completions as messages."""
        prompt = self.columns.get("prompt")
        texts = [self.texts[index] for index in indices]
        is_chat = isinstance(prompt, list)
        return {
            **{name: [value] * len(indices) for name, value in self.columns.items() if name != "prompt"},
            "prompts": [prompt] * len(indices),
            "completions": [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts,
            "completion_ids": [list(self.ids[index]) for index in indices],
        }


@dataclass(frozen=True)
class RewardResult:
    """The result of one function for one completion."""

    reward: float | None
    """None if the function does not score this completion, or failed."""
    failure: str | None = None


class Scorer(Protocol):
    """A reward function that runs in this process."""

    def score(self, groups: Sequence[RewardInputs], waiting: Callable[[], None]) -> list[list[RewardResult]]:
        """Return the value of each completion, as [group][completion]. `waiting`: called often."""


class _CallFailed(Exception):
    """A call of a function gave no rewards; the text says why."""


class _WorkerTimeout(_CallFailed):
    """A worker did not respond in time."""


class _WorkerFailure(_CallFailed):
    """A call failed, or its worker ended."""


class _WrongRewardCount(_CallFailed):
    """A function returned a wrong number of rewards."""


class Rewards:
    """The reward functions of a run, in worker processes of their own."""

    def __init__(self, items: Sequence[RewardItem], *, num_workers: int, timeout_s: float, where: str) -> None:
        """Start the first worker. Raises: ConfigError for a missing function or package."""
        self._items = items
        self._timeout_s = timeout_s
        for item in items:
            check_reward(item, where)
        self._is_over = threading.Event()
        self._late_groups = [0] * len(items)
        """Number of groups in which each function was late in every call, since it last returned."""
        self._models: dict[int, Scorer] = {}
        """Reward models by their number among the items, once they are loaded."""
        self._idle_workers: queue.Queue[_Worker] = queue.Queue()
        # Reward models have a stand-in there, so that all have the same numbers.
        functions = [item.func if not item.model else NO_FUNCTION for item in items]
        self._workers = [_Worker(functions) for _ in range(num_workers)]
        for worker in self._workers:
            self._idle_workers.put(worker)
        # The threads live as long as the workers: a worker ends with the thread that started it.
        self._threads = ThreadPoolExecutor(num_workers, "rewards")
        try:
            self._threads.submit(self._workers[0].start).result()
        except _CallFailed as error:
            self.end()
            raise ConfigError(f"reward_funcs cannot be loaded: {error} ({where}).") from error
        except BaseException:
            self.end()
            raise

    @property
    def names(self) -> list[str]:
        """Short names of the functions, made unique."""
        names: list[str] = []
        for item in self._items:
            name = Path(item.model).name if item.model else item.func.rpartition(":")[2]
            numbered = (f"{name}_{number}" for number in count(2))
            names.append(next(candidate for candidate in chain([name], numbered) if candidate not in names))
        return names

    def score(
        self, groups: Sequence[RewardInputs], waiting: Callable[[], None] = lambda: None
    ) -> list[list[list[RewardResult]]]:
        """Return results as [group][completion][function]. Errors of functions are results, and are not raised.

        `waiting`: called every `HEARTBEAT_EVERY_S` seconds.
        """
        self._late_groups = [0] * len(self._items)
        functions = [number for number in range(len(self._items)) if number not in self._models]
        futures = {
            (index, number): self._threads.submit(self._score_group, group, number)
            for index, group in enumerate(groups)
            for number in functions
        }
        of_models = {number: model.score(groups, waiting) for number, model in self._models.items()}
        while wait(futures.values(), HEARTBEAT_EVERY_S).not_done:  # each call has its deadline
            waiting()

        def results_of(index: int, number: int) -> list[RewardResult]:
            return of_models[number][index] if number in of_models else futures[index, number].result()

        return [
            [list(row) for row in zip(*(results_of(index, number) for number in range(len(self._items))), strict=True)]
            for index in range(len(groups))
        ]

    def add_model(self, number: int, model: "Scorer") -> None:
        """Let a reward model give the values of an item."""
        self._models[number] = model

    def end(self) -> None:
        """End the workers."""
        self._is_over.set()
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:  # no thread uses them any more
            worker.kill()

    def _score_group(self, group: RewardInputs, number: int) -> list[RewardResult]:
        """Return a function's results for a group.

        If the function fails, it is called with each completion alone, to find those on which it fails, and then with
        the others together. A function that returns a wrong number of rewards is not called again: one that returns a
        number per call instead of one per completion would pass with a single completion.
        """
        indices = range(len(group.texts))
        late_before = self._late_groups[number]

        def fail_all(why: object) -> list[RewardResult]:
            return [RewardResult(None, str(why))] * len(indices)

        if late_before >= LATE_GROUPS_UNTIL_NO_CALL:
            groups = f"{LATE_GROUPS_UNTIL_NO_CALL} groups of this step"
            return fail_all(f"not called: all calls for {groups} took over {self._timeout_s:g} s")
        try:
            return self._call_function(group, number, indices)
        except _WrongRewardCount as error:
            return fail_all(error)
        except _CallFailed as error:
            is_late = isinstance(error, _WorkerTimeout)
            is_hopeless = is_late and late_before >= LATE_GROUPS_UNTIL_ONE_CALL
            if len(indices) == 1 or is_hopeless or self._is_over.is_set():
                self._late_groups[number] += is_late
                return fail_all(error)
            group_error = error
        results = self._score_each_alone(group, number)
        # A function may score a completion differently alone than among the others, so it scores these together again.
        succeeded = [index for index in indices if results[index].failure is None]
        if len(succeeded) == len(indices):
            return fail_all(f"{group_error}; its rewards for each completion alone are not used")
        if len(succeeded) > 1 and not self._is_over.is_set():
            try:
                joint_results = self._call_function(group, number, succeeded)
            except _CallFailed as error:
                failure = f"{error}, also without those on which it fails alone"
                joint_results = [RewardResult(None, failure)] * len(succeeded)
            for index, result in zip(succeeded, joint_results, strict=True):
                results[index] = result
        return results

    def _score_each_alone(self, group: RewardInputs, number: int) -> list[RewardResult]:
        """Return a function's results for each completion of a group alone; after some late ones, the rest fails."""
        results: list[RewardResult] = []
        late = 0
        for index in range(len(group.texts)):
            try:
                if self._is_over.is_set():
                    raise _CallFailed("the run is over")
                if late == MAX_LATE_SINGLE_CALLS:
                    raise _CallFailed(f"not called again: {late} of its group took over {self._timeout_s:g} s")
                results += self._call_function(group, number, [index])
            except _CallFailed as error:
                late += isinstance(error, _WorkerTimeout)
                results.append(RewardResult(None, str(error)))
        if late and not any(result.reward is not None for result in results):
            self._late_groups[number] += 1
        return results

    def _call_function(self, group: RewardInputs, number: int, indices: Sequence[int]) -> list[RewardResult]:
        item = self._items[number]
        arguments = group.arguments(indices)
        if item.func in BUILT_IN:  # a column with the name of a setting must not replace it
            arguments = {name: value for name, value in arguments.items() if name not in BUILT_IN[item.func].settings}
        worker = self._idle_workers.get()
        try:
            rewards = worker.call(number, {**arguments, **item.args}, self._timeout_s)
        finally:
            self._idle_workers.put(worker)
        self._late_groups[number] = 0
        if len(rewards) != len(indices):
            raise _WrongRewardCount(f"it returned {len(rewards)} rewards for {len(indices)} completions")
        return [check_value(reward) for reward in rewards]


def check_value(reward: float | None) -> RewardResult:
    """Return the reward as a result; a failure if it is not finite or too large."""
    if reward is not None and not math.isfinite(reward):
        return RewardResult(None, f"the reward is {reward}, which is not a finite number")
    if reward is not None and abs(reward) > MAX_REWARD:
        return RewardResult(None, f"the reward is {reward:g}, beyond {MAX_REWARD:g}: too large to compare with others")
    return RewardResult(reward)


def check_reward(item: RewardItem, where: str) -> None:
    """Raise ConfigError for a missing function or package, or a wrong setting. The function is not loaded."""
    if item.model:  # see `check_scorer`
        return
    file, colon, function = item.func.rpartition(":")
    if colon and file.endswith(".py"):
        if not Path(file).is_file():
            raise ConfigError(f"reward_funcs: {file} does not exist ({where}).")
        if not function.isidentifier():
            raise ConfigError(f"reward_funcs: '{item.func}' does not end with the name of a function ({where}).")
        return
    if item.func not in BUILT_IN:
        raise ConfigError(
            f"reward_funcs: '{item.func}' is neither a built-in ({', '.join(BUILT_IN)}) nor of the form "
            f"file.py:function ({where})."
        )
    problem = settings_problem(item.func, item.args)
    if problem:
        raise ConfigError(f"reward_funcs: {item.func}: {problem} ({where}).")
    module = BUILT_IN[item.func].module
    if module is not None and importlib.util.find_spec(module) is None:
        package = module.replace("_", "-")
        raise ConfigError(f"reward_funcs: {item.func} needs the package {package}: pip install {package} ({where}).")


class _Worker:
    """One worker process; started at its first call, and again at the next call after it was ended."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._process: subprocess.Popen[bytes] | None = None
        self._output = BoundedOutput()
        self._num_calls = 0
        self._is_over = False

    def start(self) -> None:
        """Start the process. Raises: _WorkerFailure with the error of its functions' files."""
        self._num_calls = 0
        try:
            self._process = subprocess.Popen(
                [*PYTHON, "-m", "surefoot.methods.grpo.reward_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that processes started by functions can be ended with it
            )
        except OSError as error:  # no memory, or too many processes
            raise _WorkerFailure(f"its process could not be started: {error.strerror}") from error
        self._pipe = LinePipe.to_process(self._process, max_line_bytes=ANSWER_BYTES)
        assert self._process.stderr is not None
        self._output.follow(self._process.stderr)
        if self._is_over:  # `end` was called in the meantime
            self.kill()
        self._send_request(list(self._names), START_DEADLINE_S)

    def call(self, function: int, arguments: Mapping[str, Any], timeout_s: float) -> list[float | None]:
        """Return a function's value for each completion.

        Raises: _WorkerTimeout, after ending the process; _WorkerFailure.
        """
        if self._process is None:
            self.start()
        self._num_calls += 1
        job = {"number": self._num_calls, "function": function, "arguments": arguments}
        response = self._send_request(job, timeout_s)
        rewards: Any = response.get("rewards")
        is_list = isinstance(rewards, list) and all(isinstance(reward, float | None) for reward in rewards)
        if response.get("number") != self._num_calls or not is_list:
            self.kill()
            raise _WorkerFailure(ODD_ANSWER)
        return list(rewards)

    def end(self) -> None:
        """End the process and start none again. Callable from any thread; a waiting call fails."""
        self._is_over = True
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel, which nothing can end
                process.wait(KILLED_WITHIN_S)
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with suppress(BrokenPipeError):
                    stream.close()
            self._output.finish()

    def _send_request(self, payload: Any, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        request = json.dumps(payload, default=str, ensure_ascii=False).encode("utf-8", "replace")
        try:
            if self._process is None:
                raise EOFError
            self._pipe.send(request, deadline)
            response = json.loads(self._pipe.receive(deadline))
        except TimeoutError:
            self.kill()
            raise _WorkerTimeout(f"it took over {timeout_s:g} s, and was ended") from None
        except (BrokenPipeError, EOFError):
            raise _WorkerFailure(f"its process {self._describe_process_end()}") from None
        except (ValueError, RecursionError):
            response = None
        if not isinstance(response, dict):
            self.kill()
            raise _WorkerFailure(ODD_ANSWER)
        if "error" in response:
            message = f"{response['error']}\n{response.get('trace', '')}".rstrip()[:ERROR_CHARACTERS]
            raise _WorkerFailure(message.encode("utf-8", "backslashreplace").decode())  # it may quote half a character
        return response

    def _describe_process_end(self) -> str:
        """Return how the process ended that closed its pipe. If it still runs, end it."""
        process = self._process
        if process is None:
            return "was ended with the run"
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_NOTICE_S)
        is_running = process.returncode is None
        self.kill()
        return "closed the file that answers go to, and was ended" if is_running else describe_end(process.returncode)
