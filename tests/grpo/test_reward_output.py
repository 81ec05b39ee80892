"""What reward functions print, and what they write into the answers: bounded, and never in the way."""

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot.methods.grpo.rewards import ODD_ANSWER, RewardInputs, RewardResult, Rewards
from surefoot.methods.grpo.settings import RewardItem
from surefoot.methods.grpo.worker_output import MOST_BYTES

FUNCTIONS = """
import os, subprocess, sys, time

def floods(descriptor, num_bytes=1 << 30):
    piece = b"a line that nobody reads" * 2730 + b"\\n"
    for _ in range(num_bytes // len(piece)):
        os.write(descriptor, piece)

def floods_stderr(completions, **_):
    floods(2)
    return [1.0] * len(completions)

def floods_stdout(completions, **_):
    floods(1)
    return [1.0] * len(completions)

def floods_and_hangs(completions, **_):
    floods(2, MOST)
    time.sleep(600)

def floods_the_answers(completions, **_):
    for descriptor in range(3, 20):
        try:
            while True:
                os.write(descriptor, b"1" * 65536)
        except OSError:
            pass

def answers(completions, **_):
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, ANSWER)
        except OSError:
            pass
    time.sleep(600)

def prints(completions, **_):
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr)
    return [1.0] * len(completions)

def leaves_a_child(completions, **_):
    subprocess.Popen(["sleep", "7"], start_new_session=True)
    return [1.0] * len(completions)

def dies(completions, **_):
    os.write(2, b"last words\\n")
    os._exit(3)
"""
GROUP = RewardInputs({"prompt": "q"}, ["x", "y"], [[1], [1]])
Start = Callable[..., Rewards]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Rewards] = []

    def rewards(name: str, *, timeout_s: float = 60.0, answer: bytes = b"") -> Rewards:
        text = FUNCTIONS.replace("MOST", str(MOST_BYTES)).replace("ANSWER", repr(answer))
        (tmp_path / "functions.py").write_text(text)
        item = RewardItem(func=f"{tmp_path}/functions.py:{name}")
        running.append(Rewards([item], num_workers=1, timeout_s=timeout_s, where="run.yaml:7"))
        return running[-1]

    yield rewards
    for one in running:
        one.end()


def printed(capfd: pytest.CaptureFixture[str], rewards: Rewards) -> str:
    rewards.end()  # waits for the last output
    return capfd.readouterr().err


@pytest.mark.parametrize("name", ["floods_stderr", "floods_stdout"])
def test_a_function_that_prints_a_gigabyte_is_cut_off_and_goes_on(
    name: str, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    rewards = start(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        assert rewards.score([GROUP]) == [[[RewardResult(1.0)]] * 2]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    output = printed(capfd, rewards)
    assert MOST_BYTES < len(output) < MOST_BYTES + 1000
    assert output.count("left out") == 1
    assert output.endswith("]\n")


@pytest.mark.long
def test_workers_that_are_started_again_share_one_bound(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    rewards = start("floods_and_hangs", timeout_s=1.0)
    for _ in range(2):
        rewards.score([GROUP])
    output = printed(capfd, rewards)
    assert len(output) < MOST_BYTES + 1000
    assert output.count("left out") == 1


def test_what_a_function_prints_is_passed_on(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    rewards = start("prints")
    rewards.score([GROUP])
    assert sorted(printed(capfd, rewards).splitlines()) == ["to stderr", "to stdout"]


def test_the_last_output_of_a_worker_that_dies_is_passed_on(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    rewards = start("dies")
    ((scored, _),) = rewards.score([GROUP])
    assert "status 3" in (scored[0].failure or "")
    assert "last words" in capfd.readouterr().err


def test_a_process_that_keeps_the_output_open_is_not_waited_for(start: Start) -> None:
    rewards = start("leaves_a_child")
    assert rewards.score([GROUP]) == [[[RewardResult(1.0)]] * 2]
    began = time.monotonic()
    rewards.end()
    assert time.monotonic() - began < 5


def test_endless_answers_are_not_collected(start: Start) -> None:
    rewards = start("floods_the_answers")
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    (scored,) = rewards.score([GROUP])
    assert all(ODD_ANSWER in (of_one[0].failure or "") for of_one in scored)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    assert time.monotonic() - began < 50


@pytest.mark.parametrize(
    "answer",
    [
        b"[" * 100_000 + b"\n",
        b'{"number": 1, "rewards": ["1.0", "2.0"]}\n',
        b'{"number": 1, "rewards": [' + b"9" * 4000 + b", 1.0]}\n",
        b'{"number": 1, "rewards": [[1.0], {}]}\n',
        b'{"number": 1, "rewards": null}\n',
        b"\xff\xfe\n",
        b"cos\nsystem\n(S'touch /tmp/unpickled'\ntR.",
    ],
)
def test_an_answer_that_a_function_forges_is_a_failure(answer: bytes, start: Start) -> None:
    (scored,) = start("answers", timeout_s=20.0, answer=answer).score([GROUP])
    assert all(ODD_ANSWER in (of_one[0].failure or "") for of_one in scored)


def test_an_error_that_a_function_forges_is_cut(start: Start) -> None:
    answer = b'{"error": "' + b"x" * 50_000 + b'"}\n'
    rewards = start("answers", timeout_s=20.0, answer=answer)
    ((scored,),) = rewards.score([RewardInputs({"prompt": "q"}, ["x"], [[1]])])
    assert 1000 < len(scored[0].failure or "") < 10_000


def test_rewards_are_given_where_standard_error_is_closed(tmp_path: Path) -> None:
    text = FUNCTIONS.replace("MOST", str(MOST_BYTES)).replace("ANSWER", "b''")
    (tmp_path / "functions.py").write_text(text)
    probe = (
        "from surefoot.methods.grpo.settings import RewardItem\n"
        "from surefoot.methods.grpo.rewards import RewardInputs, Rewards\n"
        f"item = RewardItem(func={str(tmp_path / 'functions.py') + ':prints'!r})\n"
        "rewards = Rewards([item], num_workers=1, timeout_s=60.0, where='x')\n"
        "print(rewards.score([RewardInputs({'prompt': 'q'}, ['x'], [[1]])])[0][0][0].reward)\n"
        "rewards.end()\n"
    )
    (tmp_path / "probe.py").write_text(probe)
    command = ["sh", "-c", 'exec "$0" "$1" 2>&-', sys.executable, str(tmp_path / "probe.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("1.0\n", 0)
