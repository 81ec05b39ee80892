"""Rendering of chat templates under limits of time and memory, because a template is an untrusted program.

The limits apply to a process. Data workers do nothing else, so they render in their own process. Every other process
renders in a child, which is forked when needed and ends after `IDLE_S` without work. Requests and responses are JSON,
so a template that escapes from its sandbox reaches only the child.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from surefoot.data.conversation import BadRow
from surefoot.errors import DataError
from surefoot.system.compute_limits import STUCK_SIGNAL, cpu_time_limit, memory_limit
from surefoot.system.line_pipe import LinePipe
from surefoot.system.process import describe_end, end_with_parent

MAX_BYTES = 512 << 20
"""Limit of additional memory for one rendering, in bytes."""
MAX_REASON_CHARACTERS = 500
MAX_CHARACTERS = 32 << 20
"""Length limit of one rendered text."""
IDLE_S = 0.5
ENDING_S = 0.2
"""Time for a child to end."""
ANSWER_DEADLINE_S = 120.0
"""Wall-clock limit for a response. The limit on CPU time does not end a child that waits for a lock."""
ATTEMPTS = 3
RETRIED = (0, -signal.SIGKILL, -signal.SIGPIPE, -signal.SIGTERM)
"""Exit statuses not caused by the template: the child was idle, memory was short, or its forking thread ended."""


@dataclass(frozen=True)
class Rendering:
    """A call of a template."""

    template: str
    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    variables: dict[str, Any]
    add_generation_prompt: bool
    deadline_s: float


def render_here(call: Rendering) -> str:
    """Render in this process, which must do nothing else at the same time.

    Raises: DataError if the template cannot be used; BadRow if it refuses these messages.
    """
    try:
        with cpu_time_limit(call.deadline_s), memory_limit(MAX_BYTES):
            texts, _ = render_jinja_template(
                [list(call.messages)],
                tools=list(call.tools) or None,
                chat_template=call.template,
                add_generation_prompt=call.add_generation_prompt,
                **call.variables,
            )
    except TemplateSyntaxError as error:
        raise DataError(
            f"the chat template is not valid Jinja: line {error.lineno}: {_shorten_reason(error)}"
        ) from error
    except TimeoutError as error:
        raise took_too_long(call) from error
    except MemoryError:
        raise DataError(
            f"the chat template took over {MAX_BYTES >> 20} MiB of memory for one row. Give another one with "
            "chat_template"
        ) from None  # the traceback would hold what the template built
    except UndefinedError as error:
        raise BadRow(f"the chat template uses an undefined value: {_shorten_reason(error)}") from error
    except SecurityError as error:
        raise BadRow(
            f"the chat template does what transformers forbids templates: {_shorten_reason(error)} Give a version "
            "of it with chat_template that changes no list or object"
        ) from error
    except TemplateError as error:
        raise BadRow(f"the chat template refused the conversation: {_shorten_reason(error)}") from error
    except Exception as error:  # a template is an untrusted program
        raise BadRow(f"the chat template failed: {type(error).__name__}: {_shorten_reason(error)}") from error
    text = str(texts[0])
    if len(text) > MAX_CHARACTERS:
        raise DataError(
            f"the chat template wrote {len(text)} characters for one row, more than {MAX_CHARACTERS}. Give "
            "another one with chat_template"
        )
    return text


def _shorten_reason(error: Exception) -> str:
    """Return the message of a template's error, shortened, because a template can make it arbitrarily long."""
    return str(error)[:MAX_REASON_CHARACTERS]


def took_too_long(call: Rendering) -> DataError:
    """Return the error of a template that computes for too long."""
    return DataError(f"the chat template took over {call.deadline_s:.0f} s for one row: an endless loop?")


class _Child:
    """A forked process that renders requests, until it was idle for `IDLE_S`."""

    def __init__(self) -> None:
        requests, to_child = os.pipe()
        from_child, answers = os.pipe()
        with _silence_tokenizers():
            self._process = os.fork()
        if self._process == 0:
            _serve(requests, answers)
        os.close(requests)
        os.close(answers)
        self._pipe = LinePipe(from_child, to_child)
        self._status = 0
        self._reaper = threading.Thread(target=self._reap, name="template", daemon=True)
        self._reaper.start()

    def _reap(self) -> None:
        """Wait for the exit status, so that no zombie process remains."""
        self._status = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])

    def ask(self, request: bytes) -> bytes | None:
        """Return the response, or None if the child has ended. Raises: TimeoutError."""
        deadline = time.monotonic() + ANSWER_DEADLINE_S
        try:
            self._pipe.send(request, deadline)
            return self._pipe.receive(deadline)
        except (BrokenPipeError, EOFError):
            return None

    def end(self) -> int:
        """End the child if it has not ended; return its exit status, negative for a signal."""
        self._pipe.close()
        self._reaper.join(ENDING_S)
        if self._reaper.is_alive():
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(self._process, signal.SIGKILL)
            self._reaper.join()
        return self._status


class TemplateProcess:
    """A renderer of templates for this process: in itself if it is a worker, else in a child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._owner = os.getpid()
        self.is_worker = False
        """Whether this process does nothing but prepare data, in one thread."""

    def render(self, call: Rendering) -> str:
        """Return the rendered text. Raises: DataError, BadRow, see `render_here`."""
        if self.is_worker:
            return render_here(call)
        request = json.dumps(asdict(call), default=str).encode()
        with self._lock:
            answer = self._ask(request, call)
        kind, text = json.loads(answer)
        if kind == "text":
            return str(text)
        raise DataError(text) if kind == "DataError" else BadRow(text)

    def end(self) -> None:
        """End the child, if there is one. Call it when no rendering follows soon."""
        with self._lock:
            child, self._child = self._child, None
            if child is not None and self._owner == os.getpid():
                child.end()

    def _ask(self, request: bytes, call: Rendering) -> bytes:
        for _ in range(ATTEMPTS):
            if self._child is None or self._owner != os.getpid():  # a child of the process that forked this one
                self._child, self._owner = _Child(), os.getpid()
            child, answer, status = self._child, None, 0
            try:
                answer = child.ask(request)
            except TimeoutError:  # it was forked while another thread held a lock that it needs
                answer = None
            finally:
                if answer is None:
                    self._child = None
                    status = child.end()
            if answer is not None:
                return answer
            if status == -STUCK_SIGNAL:
                raise took_too_long(call)
            if status not in RETRIED:
                raise DataError(f"the process that rendered the chat template {describe_end(status)}. Give another one")
        raise DataError("the process that renders the chat template does not answer. Is memory short? Start again")


def _serve(requests: int, answers: int) -> NoReturn:
    """Answer requests in the child. It keeps no other resources of its parent, and never returns into its code."""
    try:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGPIPE, STUCK_SIGNAL):
            signal.signal(number, signal.SIG_DFL)
        end_with_parent()
        gc.freeze()  # garbage of the parent must not be finalised here
        for entry in Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd").iterdir():
            if int(entry.name) not in (requests, answers):
                with suppress(OSError):
                    os.close(int(entry.name))
        LinePipe(requests, answers).answer_requests(_answer, idle_s=IDLE_S)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - no code of the parent may run here
        os._exit(1)


def _answer(request: dict[str, Any]) -> list[str]:
    """Return (kind, text): the rendered text, or the name and the text of an error."""
    try:
        return ["text", render_here(Rendering(**request))]
    except (DataError, BadRow) as error:
        return [type(error).__name__, str(error)]


@contextmanager
def _silence_tokenizers() -> Iterator[None]:
    """Silence the tokenizers library, which warns of a fork after it has used threads. The child does not use it."""
    name = "TOKENIZERS_PARALLELISM"
    is_set = name in os.environ
    os.environ.setdefault(name, "true")
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(name, None)


TEMPLATE_PROCESS = TemplateProcess()
"""The only instance in this process."""
