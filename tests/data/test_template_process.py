"""A template that wants all time or all memory ends with an error that names it, and its run has lost nothing."""

import copy
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from surefoot.data import template_process
from surefoot.data.conversation import BadRow, Conversation, Message
from surefoot.data.render import Renderer, answer_ends
from surefoot.data.renderer_source import RendererSource
from surefoot.data.template_process import IDLE_S
from surefoot.errors import DataError
from surefoot.system.compute_limits import cpu_time_limit, memory_limit
from tests.data.opening import prepared
from tests.support.data import counting_rows, write_jsonl
from tests.support.models import CHATML
from tests.support.processes import surefoot

ASKED = Conversation((Message("user", "a"), Message("assistant", "b")))
DOUBLES = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
HOSTILE = {
    "a long text": "{{ 'x' * 10**10 }}",
    "a text that is long at the last moment": "{% set n = messages | length * 10**10 %}{{ 'x' * n }}",
    "a text that doubles": DOUBLES.replace("START", "'x'"),
    "a list that doubles": DOUBLES.replace("START", "[1]"),
    "padding": "{{ 'x' | center(10**10) }}",
    "a format": "{{ '%1000000000d' % 1 }}{{ '%1000000000d' % 1 }}",
    "a batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one operation that goes on": "{{ 10 ** 10 ** (messages | length + 6) }}",
    "much text": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
}  # fmt: skip


def renderer(tokenizer: PreTrainedTokenizerFast, template: str) -> Renderer:
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    return Renderer(RendererSource.of(own, {}, parse_special_tokens=False))


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_is_refused_and_the_process_is_as_before(
    tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    source = renderer(tokenizer, HOSTILE[kind])
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    computed_s = time.process_time()
    with pytest.raises((DataError, BadRow), match="chat template"):
        source.render(ASKED)
    assert time.process_time() - computed_s < 2.0, "it is computed elsewhere"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest < 200_000, "KiB"
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)) == before
    assert renderer(tokenizer, CHATML).render(ASKED).text.endswith("b<|im_end|>\n"), "the next one is rendered"


def test_threads_render_at_the_same_time_and_nothing_stays(tokenizer: PreTrainedTokenizerFast) -> None:
    source = renderer(tokenizer, CHATML)
    texts: list[str] = []

    def render() -> None:
        for _ in range(20):
            texts.append(source.render(ASKED).text)

    threads = [threading.Thread(target=render) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(texts), len(set(texts))) == (80, 1)
    end_s = time.monotonic() + 30
    while any(child.ppid() == os.getpid() and child.name() == psutil.Process().name() for child in children()):
        assert time.monotonic() < end_s
        time.sleep(IDLE_S / 5)
    assert source.render(ASKED).text == texts[0], "the next rendering has a child of its own"


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.is_running()]


def test_a_limit_of_memory_is_taken_back() -> None:
    with pytest.raises(MemoryError), memory_limit(64 << 20):
        bytes(256 << 20)
    assert len(bytes(256 << 20)) == 256 << 20


def test_an_operation_that_lets_no_handler_run_ends_its_process() -> None:
    code = (
        "from surefoot.system.compute_limits import cpu_time_limit\n"
        "with cpu_time_limit(0.2):\n    sum(range(10 ** 12))\n"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], timeout=120)
    assert done.returncode == -signal.SIGVTALRM


class _LetsNothingOut:
    def __del__(self) -> None:
        compute(0.5)


def compute(seconds: float) -> None:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


def compute_on() -> None:
    _LetsNothingOut()
    compute(10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_deadline_that_passes_where_python_lets_nothing_out_comes_again() -> None:
    begin_s = time.process_time()
    with pytest.raises(TimeoutError), cpu_time_limit(0.2):
        compute_on()
    assert time.process_time() - begin_s < 5


@pytest.mark.long
@pytest.mark.parametrize("num_rows", [4, pytest.param(20_000, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("kind", ["a list that doubles", "one operation that goes on"])
def test_a_run_with_a_hostile_template_ends_with_status_2(
    settings: dict[str, Any], tmp_path: Path, kind: str, num_rows: int
) -> None:
    """Few rows are prepared in the run's own process, many in workers. The template is hostile to one row only."""
    rows = counting_rows(num_rows)
    rows[2]["messages"][0]["content"] = "now"
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    template = tmp_path / "hostile.jinja"
    template.write_text(f"{CHATML}{{% if messages[0].content == 'now' %}}{HOSTILE[kind]}{{% endif %}}")
    changes = {"dataset": str(data), "chat_template": str(template), "dataset_num_proc": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**settings, **changes}))
    done = surefoot("train", str(tmp_path / "run.yaml"), timeout_s=300)
    assert done.returncode == 2, done.stderr
    assert "rows.jsonl" in done.stderr
    assert "chat template" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_preparation_leaves_no_child(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    before = children()
    assert answer_ends(tokenizer)
    assert children() == before
    prepared(write_jsonl(tmp_path / "rows.jsonl", counting_rows(5)), tokenizer)
    assert children() == before


def test_a_child_that_ends_while_it_is_being_ended_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it is reaped between the look at it and the signal to it."""

    class LateReaper:
        def join(self, _seconds: float | None = None) -> None:
            pass

        def is_alive(self) -> bool:
            return True

    child = template_process._Child()
    os.kill(child._process, signal.SIGKILL)
    child._reaper.join(20)
    monkeypatch.setattr(child, "_reaper", LateReaper())
    assert child.end() == -signal.SIGKILL
