"""The drill, as a user starts it."""

import json
import subprocess
import sys
import threading
from concurrent.futures import wait
from functools import partial

import pytest

from surefoot.diagnostics.drill import TOGETHER, drill, started
from surefoot.errors import ConfigError
from tests.support.processes import surefoot


@pytest.mark.long
def test_a_drill_strikes_and_says_what_was_named() -> None:
    done = surefoot("drill", "--kinds=left", "--json")
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(outcome["kind"] for outcome in outcomes) == ["left"]
    for outcome in outcomes:
        assert (outcome["struck"], outcome["found"], outcome["is_named"]) == (True, "SF101", True)
        assert 0 <= outcome["after_s"] < 15


@pytest.mark.matrix
def test_a_fault_that_is_not_named_ends_the_drill_with_status_3() -> None:
    done = surefoot("drill", "--kinds", "killed", "max_steps=3")
    assert done.returncode == 3
    assert "MISSED" in done.stdout
    assert "0 of 1 " in done.stdout


@pytest.mark.long
def test_settings_that_make_no_run_are_no_fault_that_was_missed() -> None:
    done = surefoot("drill", "--kinds=killed", "bogus=1")
    assert done.returncode == 2
    assert "'bogus'" in done.stderr
    assert done.stdout == ""


def test_a_fault_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="nonsense.*: killed"):
        next(drill(["nonsense"]))
    with pytest.raises(ConfigError, match="device='tpu'"):
        next(drill(["killed"], overrides=["device=tpu"]))


@pytest.mark.long
def test_a_rank_outside_of_a_drill_imports_no_faults() -> None:
    code = (
        "import sys; import surefoot.launch.rank_process, surefoot.training.trainer; "
        "import surefoot.diagnostics.monitor.observers; "
        "print('surefoot.diagnostics.fault_injection' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_an_interrupted_drill_begins_no_more_of_its_faults() -> None:
    begun: list[int] = []
    at_work = threading.Event()

    def strike(number: int) -> None:
        begun.append(number)
        at_work.wait(30)

    runs = {number: partial(strike, number) for number in range(9)}

    def interrupt() -> None:
        with started(runs, alone=[7, 8]) as outcomes:
            assert not wait(outcomes.values(), timeout=0.2).done
            threading.Timer(0.2, at_work.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert sorted(begun) == list(range(TOGETHER))
