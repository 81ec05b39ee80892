"""Reward functions in real worker processes: what they return, and every way in which they fail."""

import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from surefoot.errors import ConfigError
from surefoot.methods.grpo.builtin_rewards import columns_problem
from surefoot.methods.grpo.rewards import ODD_ANSWER, RewardInputs, RewardResult, Rewards, _WorkerFailure
from surefoot.methods.grpo.settings import RewardItem

FUNCTIONS = """
import os, time

def count(completions, ids_wanted=None, **_):
    return [float(len(one)) for one in completions]

def by_column(completions, answer, **_):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]

def of_chat(completions, prompts, **_):
    assert prompts[0][0]["role"] == "user"
    return [float(len(one[0]["content"])) for one in completions]

def hangs_on_bad(completions, **_):
    if "bad" in completions:
        time.sleep(600)
    return [1.0] * len(completions)

def raises_on_bad(completions, **_):
    return [1 / (one != "bad") for one in completions]

def nan_on_bad(completions, **_):
    return [float("nan") if one == "bad" else None if one == "other" else 1 for one in completions]

def too_few(completions, **_):
    return [1.0] * (len(completions) - 1)

answer = 42

def huge_on_bad(completions, **_):
    return [-1e200 if one == "bad" else 1.0 for one in completions]

def text_on_bad(completions, **_):
    return ["1" if one == "bad" else 1.0 for one in completions]

async def asynchronous(completions, **_):
    return [float(len(one)) for one in completions]

def quotes(completions, **_):
    raise ValueError("\\ud800")

def scalar(completions, **_):
    return 1.0

def unordered(completions, **_):
    return {1.0, 2.0, 3.0}

def one_a_call(completions, **_):
    return [1.0]

def dies_on_bad(completions, **_):
    if "bad" in completions:
        os.kill(os.getpid(), 9)
    return [1.0] * len(completions)

def fails_on_groups(completions, **_):
    return [1 / (len(completions) == 1)]

def share_of_longest(completions, **_):
    assert "bad" not in completions
    return [len(one) / max(map(len, completions)) for one in completions]

def fails_but_alone(completions, **_):
    assert len(completions) == 1 and completions != ["bad"]
    return [1.0]

def slow(completions, **_):
    time.sleep(600)

def talks(completions, **_):
    print("not a line of the protocol", flush=True)
    return [1.0] * len(completions)
"""
TEXTS = ["good", "bad", "other"]


@pytest.fixture
def rewards(tmp_path: Path) -> Iterator[Callable[..., Rewards]]:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    made: list[Rewards] = []

    def start(*names: str | RewardItem, timeout_s: float = 20.0) -> Rewards:
        items = [
            name if isinstance(name, RewardItem) else RewardItem(func=f"{tmp_path}/mine.py:{name}") for name in names
        ]
        made.append(Rewards(items, num_workers=1, timeout_s=timeout_s, where="run.yaml:7"))
        return made[-1]

    yield start
    for one in made:
        one.end()


def asked(texts: list[str] = TEXTS, **columns: Any) -> RewardInputs:
    return RewardInputs({"prompt": "q", **columns}, texts, [[1] * len(text) for text in texts])


def values(scored: list[list[RewardResult]]) -> list[list[float | None]]:
    return [[one.reward for one in of_one] for of_one in scored]


def test_functions_get_lists_and_the_columns_of_the_row(rewards: Callable[..., Rewards]) -> None:
    ours = rewards("count", "by_column")
    assert ours.names == ["count", "by_column"]
    first, second = ours.score([asked(answer="bad"), asked(["x"], answer="x")])
    assert values(first) == [[4.0, 0.0], [3.0, 1.0], [5.0, 0.0]]
    assert values(second) == [[1.0, 1.0]]


def test_a_chat_gets_messages(rewards: Callable[..., Rewards]) -> None:
    chat = RewardInputs({"prompt": [{"role": "user", "content": "q"}]}, ["four"], [[1]])
    assert values(rewards("of_chat").score([chat])[0]) == [[4.0]]


def test_what_a_function_prints_is_no_answer(rewards: Callable[..., Rewards]) -> None:
    assert values(rewards("talks").score([asked(["x"])])[0]) == [[1.0]]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hangs_on_bad", r"it took over 1 s\b"),
        ("raises_on_bad", "ZeroDivisionError: division by zero"),
        ("nan_on_bad", "the reward is nan,"),
        ("huge_on_bad", r"the reward is -1e\+200, .*1e\+12"),
        ("text_on_bad", "TypeError: .*'1'"),
        ("dies_on_bad", r"its process .*\(SIGKILL\)"),
    ],
)
def test_only_the_completion_on_which_a_function_fails_has_no_reward(
    rewards: Callable[..., Rewards], name: str, reason: str
) -> None:
    (scored,) = rewards(name, timeout_s=1.0).score([asked()])
    good, bad, other = (of_one[0] for of_one in scored)
    assert good == RewardResult(1.0)
    assert other == RewardResult(None if name == "nan_on_bad" else 1.0)  # None is "not mine", which is no failure
    assert bad.reward is None
    assert bad.failure is not None
    assert re.match(reason, bad.failure)


def test_a_failure_of_a_group_is_no_reward_for_what_is_said_of_each_alone(rewards: Callable[..., Rewards]) -> None:
    """A function that ranks the completions of a group says something else of one alone."""
    (scored,) = rewards("fails_on_groups").score([asked()])
    assert values(scored) == [[None]] * 3
    assert all("division by zero" in (of_one[0].failure or "") for of_one in scored)


def test_those_on_which_a_function_does_not_fail_are_compared_with_each_other(rewards: Callable[..., Rewards]) -> None:
    (scored,) = rewards("share_of_longest").score([asked(["a", "aa", "aaaa", "bad"])])
    assert values(scored) == [[0.25], [0.5], [1.0], [None]]
    (scored,) = rewards("fails_but_alone").score([asked(["a", "aa", "bad"])])
    assert values(scored) == [[None]] * 3
    assert "fails alone" in (scored[0][0].failure or "")


def test_each_function_has_a_name_of_its_own(tmp_path: Path) -> None:
    for file, function in (("a", "f"), ("b", "f_2"), ("c", "f")):
        (tmp_path / f"{file}.py").write_text(
            f"def {function}(completions, **_):\n    return [0.0] * len(completions)\n"
        )
    items = [RewardItem(func=f"{tmp_path}/{one}") for one in ("a.py:f", "b.py:f_2", "c.py:f", "a.py:f")]
    ours = Rewards(items, num_workers=1, timeout_s=20, where="run.yaml:7")
    assert ours.names == ["f", "f_2", "f_3", "f_4"]
    ours.end()


def test_whoever_waits_hears_that_rewards_are_waited_for(
    rewards: Callable[..., Rewards], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.methods.grpo.rewards.HEARTBEAT_EVERY_S", 0.1)
    heard: list[float] = []
    rewards("hangs_on_bad", timeout_s=0.5).score([asked(["bad"])], waiting=lambda: heard.append(time.monotonic()))
    assert len(heard) >= 3


def test_an_end_does_not_wait_for_functions(rewards: Callable[..., Rewards]) -> None:
    ours = rewards("slow")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(ours.score([asked()])), daemon=True)
    thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    ours.end()
    thread.join(10)
    assert time.monotonic() - began < 5
    assert not thread.is_alive()
    assert values(found[0]) == [[None]] * 3


def test_a_failure_shows_where_it_is(rewards: Callable[..., Rewards]) -> None:
    (scored,) = rewards("raises_on_bad").score([asked(["bad"])])
    assert scored[0][0].failure is not None
    assert "mine.py" in scored[0][0].failure
    assert "in raises_on_bad" in scored[0][0].failure


@pytest.mark.parametrize(("name", "returned"), [("too_few", 2), ("one_a_call", 1)])
def test_a_wrong_count_is_no_reward_for_anyone(rewards: Callable[..., Rewards], name: str, returned: int) -> None:
    """Nor for a completion alone, where a function that returns one number for each call would seem right."""
    (scored,) = rewards(name).score([asked()])
    assert [of_one[0].reward for of_one in scored] == [None] * 3
    assert all(re.search(rf"\b{returned} rewards .*3 completions$", of_one[0].failure or "") for of_one in scored)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("scalar", "returned float"), ("unordered", "returned set")],
)
def test_what_is_no_list_of_numbers_is_told(rewards: Callable[..., Rewards], name: str, reason: str) -> None:
    (scored,) = rewards(name).score([asked()])
    assert all(reason in (of_one[0].failure or "") for of_one in scored)


def test_a_group_in_which_all_hang_is_given_up_after_a_few_deadlines(rewards: Callable[..., Rewards]) -> None:
    ours = rewards("hangs_on_bad", timeout_s=0.5)
    began = time.monotonic()
    (scored,) = ours.score([asked(["bad"] * 6)])
    assert time.monotonic() - began < 10
    failures = [of_one[0].failure or "" for of_one in scored]
    assert all("over 0.5 s" in failure for failure in failures)
    assert sum("not called again" in failure for failure in failures) == 4
    assert values(ours.score([asked(["good"])])[0]) == [[1.0]]  # the worker is there again


@pytest.mark.long
def test_a_function_that_always_hangs_is_not_waited_for_in_each_group(rewards: Callable[..., Rewards]) -> None:
    ours = rewards("hangs_on_bad", timeout_s=0.5)
    scored = ours.score([asked(["bad"] * 3) for _ in range(10)])
    failures = [[of_one[0].failure or "" for of_one in of_group] for of_group in scored]
    assert all("over 0.5 s" in failure for of_group in failures for failure in of_group)
    given_up = [all(failure.startswith("not called:") for failure in of_group) for of_group in failures]
    assert given_up == [False] * 8 + [True] * 2
    asked_alone = [any("not called again" in failure for failure in of_group) for of_group in failures]
    assert asked_alone == [True] * 2 + [False] * 8
    good, bad = ours.score([asked(["good"] * 2), asked(["bad"] * 2)])  # in the next step it is asked again
    assert values(good) == [[1.0]] * 2
    assert not any((of_one[0].failure or "").startswith("not called:") for of_one in bad)


@pytest.mark.long
def test_a_function_that_hangs_at_first_is_asked_on(rewards: Callable[..., Rewards]) -> None:
    """What a step learns does not depend on which groups a rank has."""
    scored = rewards("hangs_on_bad", timeout_s=0.5).score([asked(["bad"] * 2)] * 3 + [asked(["good"] * 2)])
    assert values(scored[-1]) == [[1.0]] * 2


@pytest.mark.long
def test_a_function_that_hangs_now_and_then_is_asked_on(rewards: Callable[..., Rewards]) -> None:
    hanging, sound = asked(["bad"] * 2), asked(["good"] * 2)
    scored = rewards("hangs_on_bad", timeout_s=0.5).score([hanging, sound, hanging, sound, hanging, sound])
    assert [values(of_group) for of_group in scored[1::2]] == [[[1.0]] * 2] * 3
    assert not any((of_one[0].failure or "").startswith("not called:") for of_group in scored for of_one in of_group)


def test_a_failure_may_quote_half_a_character(rewards: Callable[..., Rewards]) -> None:
    (scored,) = rewards("quotes").score([asked()])
    assert all("ValueError: \\ud800" in (of_one[0].failure or "") for of_one in scored)


def test_workers_end_with_the_run_even_when_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    child = os.fork()
    if child == 0:
        ours = Rewards([RewardItem(func=f"{tmp_path}/mine.py:count")], num_workers=1, timeout_s=9.0, where="run.yaml:7")
        process = ours._workers[0]._process
        assert process is not None
        (tmp_path / "worker").write_text(str(process.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    worker = int((tmp_path / "worker").read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the worker outlived its run")


@pytest.mark.parametrize(
    ("func", "reason"),
    [
        ("exact", r"'exact' .*\(exact_match, .*file.py:function \(run.yaml:7\)"),
        ("/nowhere/mine.py:f", r"/nowhere/mine.py .*exist \(run.yaml:7\)"),
        ("{folder}/mine.py:not a name", r"mine.py:not a name' .*\(run.yaml:7\)"),
        ("{folder}/mine.py:absent", r"mine.py .*absent; .*\(run.yaml:7\)"),
        ("{folder}/mine.py:cuont", r"\bcount\? \(run.yaml:7\)"),
        ("{folder}/mine.py:answer", r"answer of .*mine.py .*\bint \(run.yaml:7\)"),
        ("{folder}/broken.py:f", r": \S*/broken.py:1: SyntaxError: .* \(run.yaml:7\)\.$"),
        ("{folder}/parses.py:f", r": \S*/parses.py:1: JSONDecodeError: [^\n]* \(run.yaml:7\)\.$"),
        ("{folder}/lacks.py:f", r": \S*/lacks.py:2: ModuleNotFoundError: [^\n]* \(run.yaml:7\)\.$"),
    ],
)
def test_a_function_that_is_not_there_is_refused_at_the_start(tmp_path: Path, func: str, reason: str) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "parses.py").write_text("__import__('json').loads('{')\n")
    (tmp_path / "lacks.py").write_text("import os\nimport no_such_package\ndef f(**_):\n    return []\n")
    item = RewardItem(func=func.replace("{folder}", str(tmp_path)))
    with pytest.raises(ConfigError, match=reason):
        Rewards([item], num_workers=1, timeout_s=5.0, where="run.yaml:7")


def item(func: str, **args: Any) -> RewardItem:
    return RewardItem(func=func, args=args)


@pytest.mark.parametrize(
    ("reward", "texts", "columns", "expected"),
    [
        (item("exact_match"), [" 42\n", "42.", ""], {"answer": 42}, [1, 0, 0]),
        (item("exact_match", answer_column="right"), ["a", "b"], {"answer": "a", "right": "b"}, [0, 1]),
        (item("exact_match", answer_column="max"), ["a", "b"], {"max": "b"}, [0, 1]),
        (item("exact_match"), ["", "a"], {"answer": ""}, [None, None]),
        (item("exact_match"), ["nan", "a"], {"answer": float("nan")}, [None, None]),
        (item("regex", pattern=r"\A<a>.*</a>\Z"), ["<a>x\ny</a>", "x<a></a>"], {}, [1, 0]),
        (item("length", min=2, max=4), ["x", "xx", "xxxx", "xxxxx"], {}, [0, 1, 1, 0]),
    ],
)
def test_built_in_rewards(
    rewards: Callable[..., Rewards], reward: RewardItem, texts: list[str], columns: Any, expected: list[float | None]
) -> None:
    (scored,) = rewards(reward).score([asked(texts, **columns)])
    assert [of_one[0].reward for of_one in scored] == expected


def test_a_json_schema(rewards: Callable[..., Rewards]) -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    (scored,) = rewards(item("json_schema", schema=schema)).score([asked(['{"n": 3}', '{"n": "3"}', "{", "[1]"])])
    assert [of_one[0].reward for of_one in scored] == [1, 0, 0, 0]


def test_formulas_are_equal_whatever_their_form(rewards: Callable[..., Rewards]) -> None:
    texts = [r"so it is $\frac{1}{2}$", "0.5", "the answer is 0.6"]
    (scored,) = rewards(item("math_verify")).score([asked(texts, solution=r"$\frac{1}{2}$")])
    assert [of_one[0].reward for of_one in scored] == [1, 1, 0]


def test_an_endless_pattern_masks_its_sample_and_no_more(rewards: Callable[..., Rewards]) -> None:
    (scored,) = rewards(item("regex", pattern=r"(x+x+)+y"), timeout_s=1.0).score([asked(["xxy", "x" * 60])])
    assert scored[0][0] == RewardResult(1.0)
    assert "over 1 s" in (scored[1][0].failure or "")


def test_rows_without_the_answer_are_named(rewards: Callable[..., Rewards]) -> None:
    (scored,) = rewards(item("exact_match")).score([asked(["x"])])
    assert "solution, answer" in (scored[0][0].failure or "")


def test_workers_live_from_call_to_call(tmp_path: Path) -> None:
    """A worker ends with the thread that started it, so that must not be one of a single call."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    ours = Rewards([RewardItem(func=f"{tmp_path}/mine.py:count")], num_workers=3, timeout_s=20, where="run.yaml:7")
    try:
        ours.score([asked()] * 6)
        processes = {worker._process.pid for worker in ours._workers if worker._process is not None}
        for _ in range(4):
            assert all(values(one) == [[4.0], [3.0], [5.0]] for one in ours.score([asked()] * 6))
        assert processes <= {worker._process.pid for worker in ours._workers if worker._process is not None}
    finally:
        ours.end()


ODD = """
from __future__ import annotations
import os, subprocess, sys
from dataclasses import dataclass

@dataclass
class Rule:
    text: str

def scribbles(completions, **_):
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b"neither JSON\\n")
        except OSError:
            pass
    return [1.0] * len(completions)

def reads(completions, **_):
    return [float(not sys.stdin.read() and not subprocess.run(["cat"], capture_output=True).stdout)] * len(completions)

def leaves_a_child(completions, **_):
    child = subprocess.Popen(["sleep", "777"])
    open(__file__ + ".child", "w").write(str(child.pid))
    return [Rule("x").text == "x"] * len(completions)

def closes(completions, **_):
    os.closerange(3, 20)
    return [1.0] * len(completions)

def text(completions, **_):
    return "1" * len(completions)
"""


def odd(tmp_path: Path, name: str) -> RewardItem:
    (tmp_path / "odd.py").write_text(ODD)
    return RewardItem(func=f"{tmp_path}/odd.py:{name}")


def test_a_function_that_writes_into_the_answers_is_named(rewards: Callable[..., Rewards], tmp_path: Path) -> None:
    ours = rewards(odd(tmp_path, "scribbles"))
    (scored,) = ours.score([asked()])
    assert all(ODD_ANSWER in (of_one[0].failure or "") for of_one in scored)


def test_a_function_that_closes_the_answers_is_named(rewards: Callable[..., Rewards], tmp_path: Path) -> None:
    began = time.monotonic()
    (scored,) = rewards(odd(tmp_path, "closes"), timeout_s=30.0).score([asked(["x"])])
    assert scored[0][0].reward is None
    assert scored[0][0].failure is not None
    assert time.monotonic() - began < 20


def test_a_function_that_reads_gets_nothing(rewards: Callable[..., Rewards], tmp_path: Path) -> None:
    assert values(rewards(odd(tmp_path, "reads"), timeout_s=10.0).score([asked(["x"])])[0]) == [[1.0]]


def test_a_text_is_no_list_of_rewards(rewards: Callable[..., Rewards], tmp_path: Path) -> None:
    (scored,) = rewards(odd(tmp_path, "text")).score([asked(["x"])])
    assert "returned str" in (scored[0][0].failure or "")


def test_what_a_function_started_ends_with_it(rewards: Callable[..., Rewards], tmp_path: Path) -> None:
    ours = rewards(odd(tmp_path, "leaves_a_child"))
    assert values(ours.score([asked(["x"])])[0]) == [[1.0]]
    child = psutil.Process(int((tmp_path / "odd.py.child").read_text()))
    ours.end()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.long
def test_large_texts_travel_in_time(rewards: Callable[..., Rewards]) -> None:
    large = "é" * 3_000_000
    began = time.monotonic()
    assert values(rewards("count").score([asked([large] * 4)])[0]) == [[3e6]] * 4
    assert time.monotonic() - began < 15  # it was minutes


def test_a_row_without_an_answer_is_not_judged(rewards: Callable[..., Rewards]) -> None:
    for built_in in ("exact_match", "math_verify"):
        ours = rewards(item(built_in))
        assert values(ours.score([asked(["4", "None"], answer=None)])[0]) == [[None], [None]]
        assert values(ours.score([asked(["4", "4.5"], answer=4.0)])[0]) == [[1.0], [0.0]]


def test_asynchronous_functions_are_waited_for(rewards: Callable[..., Rewards]) -> None:
    assert values(rewards("asynchronous").score([asked(["a", "bc"])])[0]) == [[1.0], [2.0]]


def test_a_worker_that_starts_while_the_run_ends_is_ended(rewards: Callable[..., Rewards]) -> None:
    worker = rewards("slow")._workers[0]
    worker.kill()
    worker.end()
    with pytest.raises(_WorkerFailure, match="was ended with the run"):
        worker.start()
    assert worker._process is None


def test_a_column_with_answers_is_looked_for_in_a_row() -> None:
    assert columns_problem("exact_match", {}, {"prompt": "1 + 1", "answer": 2}) is None
    assert columns_problem("math_verify", {"answer_column": "right"}, {"right": 2}) is None
    assert columns_problem("length", {}, {"prompt": "1 + 1"}) is None
    said = columns_problem("exact_match", {"answer_column": "right"}, {"prompt": "1 + 1", "answer": 2})
    assert said is not None
    assert re.search("no column right; .*answer, prompt$", said)
    said = columns_problem("math_verify", {}, {"prompt": "1 + 1"})
    assert said is not None
    assert "no column of solution, answer, " in said


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (item("regex"), r"regex: .*\{pattern: ...\} \(run.yaml:7\)"),
        (item("regex", pattern="("), r"pattern '\(' "),
        (item("regex", pattern=7), "pattern is 7, .*str"),
        (item("length", most=3), "'most', .*min, max"),
        (item("length", min="a"), "min is 'a', .*int"),
        (item("length", min=5, max=2), "at least 5 .*at most 2 "),
        (item("exact_match", pattern="x"), "'pattern', .*answer_column"),
        (item("json_schema", schema={"type": "nonsense"}), "schema .*'nonsense'"),
    ],
)
def test_settings_of_built_ins_are_checked_at_the_start(reward: RewardItem, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Rewards([reward], num_workers=1, timeout_s=5.0, where="run.yaml:7")


def test_a_column_is_no_setting_of_a_built_in(rewards: Callable[..., Rewards]) -> None:
    (scored,) = rewards(item("length", max=2)).score([asked(["x", "xxx"], max=[10], min="y")])
    assert [of_one[0].reward for of_one in scored] == [1, 0]


def test_a_process_with_many_open_files_has_rewards_too(rewards: Callable[..., Rewards]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"no more than {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert values(rewards("count").score([asked(["x"])])[0]) == [[1.0]]
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_may_import_what_lies_in_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project, elsewhere):
        folder.mkdir()
    (project / "common_of_project.py").write_text("VALUE = 3.0")
    (project / "json.py").write_text("raise SystemExit")
    (elsewhere / "mine.py").write_text(
        "from common_of_project import VALUE\ndef mine(completions, **_):\n    return [VALUE for _ in completions]\n"
    )
    monkeypatch.chdir(project)
    item = RewardItem(func=f"{elsewhere / 'mine.py'}:mine")
    project_rewards = Rewards([item], num_workers=1, timeout_s=20, where="run.yaml:7")
    (scored,) = project_rewards.score([asked(["a", "b"])])
    assert values(scored) == [[3.0], [3.0]]
    project_rewards.end()
