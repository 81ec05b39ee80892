"""What `watch`, `explain` and `report` show of the folder of a run."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group

from surefoot.config import as_yaml, load_config
from surefoot.diagnostics.monitor import watch as watching
from surefoot.diagnostics.monitor.event_log import KINDS, PHASES
from surefoot.diagnostics.monitor.explain import Explanation, explain
from surefoot.diagnostics.monitor.ring_buffer import RingWriter
from surefoot.diagnostics.monitor.watch import watch
from surefoot.diagnostics.report.html import write_report
from surefoot.errors import ConfigError
from surefoot.findings import Finding
from surefoot.training.run_summary import METRICS, RunRecord


def write_findings(folder: Path, *times_s: float) -> None:
    findings = [{"time_s": time_s, **Finding("SF302", f"cause {time_s}", {}).as_dict()} for time_s in times_s]
    (folder / "findings.jsonl").write_text("".join(json.dumps(finding) + "\n" for finding in findings))


@pytest.mark.parametrize(("times_s", "line"), [((1.0,), "1 finding of"), ((1.0, 2.0), "2 findings of"), ((), None)])
def test_findings_of_earlier_starts_are_counted_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], times_s: tuple[float, ...], line: str | None
) -> None:
    now_s = time.time()
    ring = RingWriter(tmp_path / "events" / "rank-00000-1.ring", 0)
    ring.write(now_s, KINDS.index("phase began"), PHASES.index("forward"), 7, (0.0,) * 5)
    ring.close()
    write_findings(tmp_path, *times_s, now_s + 1)
    watch(tmp_path, once=True)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"cause {now_s + 1}" in shown
    assert shown.count("cause: ") == 1
    assert ("surefoot explain" in shown) == (line is not None)
    assert line is None or line in shown


@pytest.mark.parametrize("length", [{"max_steps": 200}, {"num_train_epochs": 2.0}])
def test_the_losses_and_what_is_left_are_shown(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str], length: dict[str, Any]
) -> None:
    config = load_config(None, [], {**settings, "max_steps": None, **length}).run
    folder = config.run_folder
    folder.mkdir()
    (folder / "run.yaml").write_text(as_yaml(config))
    lines = [
        {"step": step, "epoch": step / 100, "loss": 10.0 - step / 10, "grad_norm": 1.0, "tokens_per_second": 1.0,
         "step_time_s": 2.0}
        for step in range(1, 51)
    ]  # fmt: skip
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    ring = RingWriter(folder / "events" / "rank-00000-1.ring", 0)
    ring.write(time.time(), KINDS.index("phase began"), PHASES.index("forward"), 51, (0.0,) * 5)
    ring.close()
    watch(folder, once=True)
    shown = capsys.readouterr().out
    assert "step 50/200, 5:00 left: loss 5.0000" in shown
    (sparkline,) = re.findall("loss ([▁-█]+)$", shown, re.MULTILINE)
    assert len(sparkline) == 40
    assert list(sparkline) == sorted(sparkline, reverse=True)
    assert (sparkline[0], sparkline[-1]) == ("█", "▁")


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_run_without_health_is_a_run_of_which_nothing_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_ended: bool
) -> None:
    (tmp_path / "run.yaml").write_text("model: a/b\nhealth: false\n")
    (tmp_path / METRICS).write_text('{"step": 1, "loss": 1.0}\n')
    if has_ended:
        RunRecord(tmp_path).result("completed").write()
        (missing,) = explain(tmp_path).missing
        assert "health: false" in missing
        watch(tmp_path)
        assert "health: false" in capsys.readouterr().out
        assert write_report(tmp_path).is_file()
        return
    for verb in (explain, watch, write_report):
        with pytest.raises(ConfigError, match="health: false"):
            verb(tmp_path)


@pytest.mark.parametrize("text", ["health: true\n", "- a\n", "a: [\n", ""])
def test_a_folder_without_events_and_summary_is_no_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match="no run"):
        explain(tmp_path)


def test_a_file_or_pipe_gets_each_state_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not only the last one: `surefoot watch RUN > FILE` shows the run while it goes on."""
    states = iter(["running", "running", "completed"])

    def read(folder: Path) -> tuple[Explanation, Group]:
        status = next(states)
        return Explanation(folder, status, [], [], []), Group(f"it is {status}")

    monkeypatch.setattr(watching, "_read_view", read)
    monkeypatch.setattr(watching, "PLAIN_EVERY_S", 0.0)
    watch(tmp_path)
    assert capsys.readouterr().out.split("\n")[:3] == ["it is running", "it is running", "it is completed"]
