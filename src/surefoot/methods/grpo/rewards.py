"""Calls reward functions in worker processes under a deadline. What fails masks its sample, with a reason."""

import importlib.util
import json
import math
import os
import queue
import select
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
from typing import Any

from surefoot.errors import ConfigError
from surefoot.methods.grpo.builtin_rewards import BUILT_IN, NEEDS, SETTINGS_OF, settings_problem
from surefoot.methods.grpo.settings import RewardItem
from surefoot.methods.grpo.worker_output import BoundedOutput
from surefoot.system.process import PYTHON, describe_end

START_DEADLINE_S = 120.0
"""For a worker to import the functions' files."""
KILLED_WITHIN_S = 10.0
END_NOTICE_S = 2.0
"""For a process that closed its files to be gone."""
SIGN_OF_LIFE_S = 5.0
"""Between two words to whoever waits for rewards."""
ANSWER_BYTES = 16 << 20
"""Size of the largest answer of a worker: about 25 bytes a completion, or the text of an error."""
ERROR_CHARACTERS = 5000
"""Length of the longest text of an error with its trace; a worker sends less."""
ODD_ANSWER = "its process answered something else: does the function fork, or write to open files?"
LARGEST = 1e12
"""Of a reward: the squares of much larger ones are no numbers any more."""
LONE_TRIES = 2
"""Deadlines spent on finding which completions of a late group are to blame; the rest of it is masked with them."""
LATE_GROUPS, MOST_LATE_GROUPS = 2, 8
"""One after the other, in which every call was late: from then on a group costs one deadline, and at last none."""


@dataclass(frozen=True)
class RewardInputs:
    """The completions of one prompt, as reward functions see them."""

    columns: Mapping[str, Any]
    """Of the prompt's row."""
    texts: Sequence[str]
    ids: Sequence[Sequence[int]]

    def arguments(self, chosen: Sequence[int]) -> dict[str, Any]:
        """Keyword arguments as in TRL: a list each, a value a completion. Chats get their answers as messages."""
        prompt = self.columns.get("prompt")
        texts = [self.texts[index] for index in chosen]
        is_chat = isinstance(prompt, list)
        return {
            **{name: [value] * len(chosen) for name, value in self.columns.items() if name != "prompt"},
            "prompts": [prompt] * len(chosen),
            "completions": [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts,
            "completion_ids": [list(self.ids[index]) for index in chosen],
        }


@dataclass(frozen=True)
class RewardResult:
    """What one function said of one completion."""

    reward: float | None
    """None: not a completion that it judges, or a failure."""
    failure: str | None = None


class _Late(Exception):
    """A worker did not answer in time."""


class _Failed(Exception):
    """A worker said that a call failed, or ended."""


class _Miscounted(Exception):
    """A function returned another number of rewards than it was given completions."""


class Rewards:
    """The reward functions of a run, in worker processes of their own."""

    def __init__(self, items: Sequence[RewardItem], *, num_workers: int, timeout_s: float, where: str) -> None:
        """Raises: ConfigError for a function that is not there, or a package that is missing."""
        self._items = items
        self._timeout_s = timeout_s
        self._where = where
        for item in items:
            check_reward(item, where)
        self._is_over = threading.Event()
        self._late_groups = [0] * len(items)
        """Of each function: groups in which it was late every time, since it last said something."""
        self._workers: queue.Queue[_Worker] = queue.Queue()
        self._all = [_Worker([item.func for item in items]) for _ in range(num_workers)]
        for worker in self._all:
            self._workers.put(worker)
        # For as long as the workers: each ends with the thread that started it.
        self._threads = ThreadPoolExecutor(num_workers, "rewards")
        try:
            self._threads.submit(self._all[0].start).result()
        except (_Late, _Failed) as error:
            self.end()
            raise ConfigError(f"reward_funcs cannot be loaded: {error} ({where}).") from error
        except BaseException:
            self.end()
            raise

    @property
    def names(self) -> list[str]:
        """Short names of the functions, each once."""
        names: list[str] = []
        for item in self._items:
            name = item.func.rpartition(":")[2]
            numbered = (f"{name}_{number}" for number in count(2))
            names.append(next(one for one in chain([name], numbered) if one not in names))
        return names

    def score(
        self, groups: Sequence[RewardInputs], waiting: Callable[[], None] = lambda: None
    ) -> list[list[list[RewardResult]]]:
        """[group][completion][function]. Never raises for what a function does. `waiting`: called now and then."""
        self._late_groups = [0] * len(self._items)
        jobs = [(group, number) for group in groups for number in range(len(self._items))]
        asked = [self._threads.submit(self._group, *job) for job in jobs]
        while wait(asked, SIGN_OF_LIFE_S).not_done:  # each call has its deadline
            waiting()
        done = [one.result() for one in asked]
        each = len(self._items)
        return [
            [list(of_one) for of_one in zip(*done[begin : begin + each], strict=True)]
            for begin in range(0, len(done), each)
        ]

    def end(self) -> None:
        """End the workers."""
        self._is_over.set()
        for worker in self._all:
            worker.end()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:  # no thread asks them any more
            worker.kill()

    def _group(self, group: RewardInputs, number: int) -> list[RewardResult]:
        """What a function says of a group.

        Where it fails, each completion is asked of alone, so that the culprits are known, and then the others together.

        One that miscounts is not asked again: a number for each call, instead of one for each completion, would pass
        for a completion's own.
        """
        everyone = range(len(group.texts))
        late_before = self._late_groups[number]
        if late_before >= MOST_LATE_GROUPS:
            why = f"not asked: all calls for {MOST_LATE_GROUPS} groups of this step took over {self._timeout_s:g} s"
            return [RewardResult(None, why)] * len(everyone)
        try:
            return self._call(group, number, everyone)
        except _Miscounted as error:
            return [RewardResult(None, str(error))] * len(everyone)
        except (_Late, _Failed) as error:
            is_hopeless = isinstance(error, _Late) and late_before >= LATE_GROUPS
            if len(everyone) == 1 or is_hopeless or self._is_over.is_set():
                self._late_groups[number] += isinstance(error, _Late)
                return [RewardResult(None, str(error))] * len(everyone)
            of_all = str(error)
        scored: list[RewardResult] = []
        late = 0
        for index in everyone:
            if self._is_over.is_set():
                scored.append(RewardResult(None, "the run is over"))
                continue
            if late == LONE_TRIES:
                scored.append(
                    RewardResult(None, f"not asked again: {late} of its group took over {self._timeout_s:g} s")
                )
                continue
            try:
                scored += self._call(group, number, [index])
            except (_Late, _Failed, _Miscounted) as error:
                late += isinstance(error, _Late)
                scored.append(RewardResult(None, str(error)))
        if late and not any(one.reward is not None for one in scored):
            self._late_groups[number] += 1
        # What a function says of a completion alone need not be what it would have said of it among the others.
        sound = [index for index in everyone if scored[index].failure is None]
        if len(sound) == len(everyone):
            return [RewardResult(None, f"{of_all}; of each alone it says something, which is not used")] * len(everyone)
        if len(sound) > 1 and not self._is_over.is_set():
            try:
                together = self._call(group, number, sound)
            except (_Late, _Failed, _Miscounted) as error:
                together = [RewardResult(None, f"{error}, without those on which it fails alone as well")] * len(sound)
            for index, one in zip(sound, together, strict=True):
                scored[index] = one
        return scored

    def _call(self, group: RewardInputs, number: int, chosen: Sequence[int]) -> list[RewardResult]:
        item = self._items[number]
        arguments = group.arguments(chosen)
        if item.func in BUILT_IN:  # a column of the same name is no setting of theirs
            arguments = {name: value for name, value in arguments.items() if name not in SETTINGS_OF[item.func]}
        worker = self._workers.get()
        try:
            rewards = worker.ask(number, {**arguments, **item.args}, self._timeout_s)
        finally:
            self._workers.put(worker)
        self._late_groups[number] = 0
        if len(rewards) != len(chosen):
            raise _Miscounted(f"it returned {len(rewards)} rewards for {len(chosen)} completions")
        return [_scored(reward) for reward in rewards]


def _scored(reward: float | None) -> RewardResult:
    if reward is not None and not math.isfinite(reward):
        return RewardResult(None, f"the reward is {reward}, which is no finite number")
    if reward is not None and abs(reward) > LARGEST:
        return RewardResult(None, f"the reward is {reward:g}, beyond {LARGEST:g}: too large to compare with others")
    return RewardResult(reward)


def check_reward(item: RewardItem, where: str) -> None:
    """Raises: ConfigError for a function, a setting or a package that is not there; the function is not loaded."""
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
    module, package = NEEDS.get(item.func, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise ConfigError(f"reward_funcs: {item.func} needs the package {package}: pip install {package} ({where}).")


class _Worker:
    """One worker process; started when it is first asked, and again after it was ended."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._process: subprocess.Popen[bytes] | None = None
        self._output = BoundedOutput()
        self._unread = bytearray()
        self._asked = 0
        self._is_over = False

    def start(self) -> None:
        """Raises: _Failed with what its functions' files raised."""
        self._unread.clear()
        self._asked = 0
        try:
            self._process = subprocess.Popen(
                [*PYTHON, "-m", "surefoot.methods.grpo.reward_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that what functions start can be ended with it
            )
        except OSError as error:  # no memory, or too many processes
            raise _Failed(f"its process could not be started: {error.strerror}") from error
        assert self._process.stderr is not None
        self._output.follow(self._process.stderr)
        if self._is_over:  # meanwhile
            self.kill()
        self._exchange(list(self._names), START_DEADLINE_S)

    def ask(self, function: int, arguments: Mapping[str, Any], timeout_s: float) -> list[float | None]:
        """What a function returns for each completion. Raises: _Late, after ending the process; _Failed."""
        if self._process is None:
            self.start()
        self._asked += 1
        job = {"number": self._asked, "function": function, "arguments": arguments}
        answer = self._exchange(job, timeout_s)
        rewards: Any = answer.get("rewards")
        is_list = isinstance(rewards, list) and all(isinstance(reward, float | None) for reward in rewards)
        if answer.get("number") != self._asked or not is_list:
            self.kill()
            raise _Failed(ODD_ANSWER)
        return list(rewards)

    def end(self) -> None:
        """From another thread, too: whoever waits for an answer gets none, and none is started any more."""
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
            with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel, and is left to it
                process.wait(KILLED_WITHIN_S)
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with suppress(BrokenPipeError):
                    stream.close()
            self._output.finish()

    def _exchange(self, said: Any, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        try:
            self._write(json.dumps(said, default=str, ensure_ascii=False).encode("utf-8", "replace") + b"\n", deadline)
            line = self._read_line(deadline)
        except TimeoutError:
            self.kill()
            raise _Late(f"it took over {timeout_s:g} s, and was ended") from None
        except (BrokenPipeError, EOFError):
            raise _Failed(f"its process {self._end()}") from None
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self.kill()
            raise _Failed(ODD_ANSWER)
        if "error" in answer:
            said = f"{answer['error']}\n{answer.get('trace', '')}".rstrip()[:ERROR_CHARACTERS]
            raise _Failed(said.encode("utf-8", "backslashreplace").decode())  # it may quote half a character
        return answer

    def _end(self) -> str:
        """How a process ended that answers no more; one that only closed its files is ended."""
        process = self._process
        if process is None:
            return "was ended with the run"
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_NOTICE_S)
        is_there = process.returncode is None
        self.kill()
        return "closed the file that answers go to, and was ended" if is_there else describe_end(process.returncode)

    def _write(self, content: bytes, deadline: float) -> None:
        if self._process is None:
            raise EOFError
        assert self._process.stdin is not None
        descriptor = self._process.stdin.fileno()
        os.set_blocking(descriptor, False)
        left = memoryview(content)
        while left:
            _wait_for(descriptor, select.POLLOUT, deadline)
            left = left[os.write(descriptor, left[:65536]) :]

    def _read_line(self, deadline: float) -> bytes:
        if self._process is None:
            raise EOFError
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        seen = 0
        while (end := self._unread.find(b"\n", seen)) < 0:
            seen = len(self._unread)
            _wait_for(descriptor, select.POLLIN, deadline)
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise EOFError
            self._unread += piece
            if len(self._unread) > ANSWER_BYTES:
                self.kill()
                raise _Failed(ODD_ANSWER)
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line


def _wait_for(descriptor: int, what: int, deadline: float) -> None:
    """Not by select, which takes no descriptor over 1023: a rank has more. Raises: TimeoutError."""
    poll = select.poll()
    poll.register(descriptor, what)
    if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        raise TimeoutError
