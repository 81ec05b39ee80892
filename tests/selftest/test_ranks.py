"""Self-tests with real processes: sound ones, and ones in which a rank is wrong, late, or gone."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.cli import main
from surefoot.config import load_config
from surefoot.diagnostics.selftest import collectives
from surefoot.diagnostics.selftest import launch as start
from surefoot.diagnostics.selftest.launch import check_dataloader
from surefoot.diagnostics.selftest.results import Report, checks_of, read_report
from surefoot.diagnostics.selftest.stages import stages_of
from surefoot.distributed import rank_notes
from tests.support.processes import surefoot

RANK = """
import json, os, socket, sys, time
from pathlib import Path
from surefoot.system.process import leave
from surefoot.diagnostics.selftest import collectives, stages
FAULT = sys.argv[2] if os.environ["RANK"] == "1" else ""
if FAULT == "another machine":
    socket.gethostname = lambda: "elsewhere"
    os.environ.update(LOCAL_RANK="0", NCCL_IB_TIMEOUT="22")
if FAULT == "damaged":
    told = collectives.values_of
    collectives.values_of = lambda who, *more: told(who, *more) + (who == 1)
if FAULT == "raises":
    collectives.exchange = lambda *_: 1 / 0
if FAULT == "hangs":
    collectives.exchange = lambda *_: time.sleep(600)
short = [stages.Stage(one.name, one.work, 4.0) for one in stages.stages_of(2, is_deep=True) if one.name != "bandwidth"]
if FAULT == "dies":
    collectives.exchange = lambda *_: os.abort()
task = stages.Task("cpu", None, None, sys.argv[1], is_deep=True)
leave(stages.try_out(task, short)[1])
"""


def together(path: Path, fault: str = "") -> tuple[Any, float]:
    """Two ranks, of which number 1 has a fault: what rank 0 wrote, and how long it took."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    began_s = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(path), fault], env={**common, "RANK": str(n), "LOCAL_RANK": str(n)}
        )
        for n in range(2)
    ]
    ends = [one.wait(timeout=120) for one in ranks]
    report = read_report(path)
    status = 3 if any(check.status == "failed" for check in checks_of(report)) else 0
    assert ends == [status, -signal.SIGABRT if fault == "dies" else status], "all ranks say how it ended"
    return report, time.monotonic() - began_s


@pytest.mark.long
def test_sound_ranks_go_through_all_stages(tmp_path: Path) -> None:
    report, _ = together(tmp_path / "report.json")
    assert (report.stopped_in, report.errors, report.silent) == ("", {}, [])
    assert list(report.by_stage) == "arrive machine clock reach join exchange collectives product storage".split()
    assert report.of("exchange") == {0: {"pairs": 1, "wrong": []}, 1: {"pairs": 1, "wrong": []}}
    assert report.of("collectives") == {0: {"wrong": {}}, 1: {"wrong": {}}}


@pytest.mark.long
def test_ranks_on_machines_that_differ(tmp_path: Path) -> None:
    report, _ = together(tmp_path / "report.json", "another machine")
    assert [said["host"] for said in report.of("machine").values()] == [socket.gethostname(), "elsewhere"]
    assert report.of("machine")[1]["environment"]["NCCL_IB_TIMEOUT"] == "22"
    (offset_s, error_s) = report.of("clock")[1]
    assert abs(offset_s) <= error_s < 1.0, "it is the same clock"
    assert report.of("reach") == {0: {}, 1: {}}, "each has connected to the other"


@pytest.mark.long
def test_damaged_numbers_are_told_by_those_who_get_them(tmp_path: Path) -> None:
    report, _ = together(tmp_path / "report.json", "damaged")
    assert report.of("exchange")[0]["wrong"] == [1]
    wrong = report.of("collectives")[0]["wrong"]
    assert set(wrong) == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast from rank 1"}
    assert re.findall(r"[\d.]+", wrong["broadcast from rank 1"]) == ["0", "10007", "132.0", "131.0"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "rank 1: ZeroDivisionError: division by zero, "),
        ("hangs", "rank 1 did not .* 4 s"),
        ("dies", r"rank 1 did not .* 4 s \(rank 0 .*: Runtime"),
    ],
)
def test_the_rank_that_keeps_the_others_is_named(tmp_path: Path, fault: str, said: str) -> None:
    report, took_s = together(tmp_path / "report.json", fault)
    (finding,) = [check.finding for check in checks_of(report) if check.finding is not None]
    assert (finding.code, finding.evidence["stage"]) == ("SF742", "exchange")
    assert re.match(said, finding.cause), finding.cause
    assert took_s < 60


@pytest.mark.long
def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    path = tmp_path / "report.json"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(path), ""], env={**common, "RANK": str(n), "LOCAL_RANK": str(n)}
        )
        for n in range(2)
    ]
    assert [one.wait(timeout=120) for one in ranks] == [3, 3]
    assert (read_report(path).stopped_in, read_report(path).silent) == ("arrive", [2])


@pytest.mark.long
def test_a_store_that_is_not_there_is_said_in_a_line(tmp_path: Path) -> None:
    lone = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    soon = "from datetime import timedelta; stages.CONNECT_WITHIN = timedelta(seconds=2)"
    code = RANK.replace("task =", f"{soon}; task =")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "report.json"), ""],
        env={**os.environ, **lone},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert re.search(r"ConfigError: rank 1: .* 127\.0\.0\.1:9, ", done.stderr), done.stderr


@pytest.fixture
def config(settings: dict[str, Any], tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(settings))
    return str(path)


@pytest.mark.long
def test_the_verb_starts_the_ranks_of_a_run(config: str) -> None:
    done = surefoot("doctor", config, "nproc_per_node=2", "--deep")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ok +ranks are alike +2 ranks on one machine ", done.stdout, re.M)
    assert "ok      collectives" in done.stdout
    speeds = next(line for line in done.stdout.splitlines() if "bus bandwidth" in line)
    for kind in ("all-reduce", "all-gather", "all-to-all"):
        figures = re.search(kind + r" 0.0625 MiB: ([\d.e+-]+), 1 MiB: ([\d.e+-]+), 16 MiB: ([\d.e+-]+)", speeds)
        assert figures is not None, speeds
        assert all(float(figure) > 0 for figure in figures.groups())
    assert re.search(r"^- +PCIe under load ", done.stdout, re.M)
    assert re.search(r"^\S+ +speed of output_dir +rank 0 .* MB/s ", done.stdout, re.M)
    assert "ok      loader alone" in done.stdout
    folder = Path(json.loads(Path(config).read_text())["output_dir"])
    assert not folder.exists(), "nothing is left behind"
    assert not list(folder.parent.glob(".surefoot-probe*"))


def test_a_device_that_is_not_there_is_a_line_of_the_report(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", config, "device=cuda", "--deep"]) == 3
    said = capsys.readouterr().out
    assert "FAILED  self-test" in said
    assert "ok      versions" in said


def test_a_pod_that_only_tells_how_many_ranks_there_are(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["doctor", config]) == 0
    assert "ranks are alike" not in capsys.readouterr().out


def test_one_rank_has_no_collectives_to_try() -> None:
    assert [stage.name for stage in stages_of(1, is_deep=True)] == "arrive machine clock reach product storage".split()
    assert [stage.name for stage in stages_of(8, is_deep=False)] == "arrive machine clock reach".split()


def test_the_gpu_of_a_rank_is_looked_at_while_it_computes(nvml_driver: dict[str, str]) -> None:
    code = (
        "import torch\nfrom surefoot.diagnostics.selftest.stages import _read_gpu\n"
        "print([_read_gpu(torch.device('cuda', n))['index'] for n in range(2)], _read_gpu(torch.device('cuda', 2)))"
    )
    environment = {**os.environ, **nvml_driver, "CUDA_VISIBLE_DEVICES": "1,0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[1, 0] None\n", done.stderr


def test_what_is_looked_at_meanwhile_is_seen_in_the_midst_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    began_s, looks = time.perf_counter(), []
    monkeypatch.setitem(collectives.PRODUCT_FOR_S, "cpu", 0.4)
    monkeypatch.setitem(collectives.PRODUCT, "cpu", (32, torch.float32))
    speed, seen = collectives.product(torch.device("cpu"), lambda: looks.append(time.perf_counter()) or "seen")
    assert (speed > 0, seen, len(looks)) == (True, "seen", 1)
    assert looks[0] - began_s > 0.2
    monkeypatch.setattr(collectives, "LOOKED_WITHIN_S", 0.1)
    assert collectives.product(torch.device("cpu"), lambda: time.sleep(5))[1] is None, "a driver that does not answer"


def test_data_that_cannot_be_read_are_a_finding(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"neither": 1}\n')
    check = check_dataloader(load_config(None, (), {**settings, "dataset": str(tmp_path / "rows.jsonl")}))
    assert check.finding is not None
    assert (check.status, check.finding.code) == ("warning", "SF736")
    assert "rows.jsonl" in check.text


def test_data_that_take_long_to_prepare_are_not_waited_for(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.diagnostics.selftest.launch.PREPARED_WITHIN_S", 0.01)
    row = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 200}]})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 60_000)
    check = check_dataloader(load_config(None, (), {**settings, "dataset": str(tmp_path / "rows.jsonl")}))
    assert (check.status, check.finding) == ("not applicable", None)
    assert " 0.01 s" in check.text


@pytest.mark.long
def test_under_a_launcher_one_report_names_the_rank_that_differs(config: str) -> None:
    command = (
        'if [ "$RANK" = 1 ]; then export NCCL_ALGO=Ring; fi; exec "$0" -m surefoot doctor "$@"'  # one of two machines
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", "bash", "-c", command,
         sys.executable, config, "nproc_per_node=2"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks are alike") == 1, "one report for all"
    assert re.search(r"NCCL_ALGO .*\bRing .*\brank 1\b.* rank 0\b", done.stdout)
    assert "SF730" in done.stdout
    assert "matrix product" not in done.stdout, "only --deep takes the devices"


@pytest.mark.long
@pytest.mark.parametrize("how", ["report", "status", "never said"])
def test_a_rank_that_is_stopped_is_killed_when_the_test_is_over(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "STAY_S", 0.5)
    monkeypatch.setenv(rank_notes.FOLDER, str(tmp_path))
    with subprocess.Popen(["sleep", "600"]) as late:
        late.send_signal(signal.SIGSTOP)
        (tmp_path / "pid-1-0").write_text(str(late.pid))
        report, status = tmp_path / "report.json", tmp_path / "status"
        Report(2, "gloo", is_over=how == "report").write(report)
        if how == "status":
            status.write_text("3")
        began_s = time.monotonic()
        start._end_late_ranks(report, status, 4.0 if how == "never said" else 600.0, threading.Event())
        assert late.wait(10) == -signal.SIGKILL
        assert (time.monotonic() - began_s > 3.5) == (how == "never said")


def test_ranks_of_a_test_that_ended_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank_notes.FOLDER, str(tmp_path))
    ended = threading.Event()
    ended.set()
    with subprocess.Popen(["sleep", "600"]) as other:
        (tmp_path / "pid-1-0").write_text(str(other.pid))
        start._end_late_ranks(tmp_path / "report.json", tmp_path / "status", 600.0, ended)
        assert other.poll() is None
        other.kill()


@pytest.mark.matrix
def test_machines_of_a_run_are_looked_at_together(config: str) -> None:
    """Two launchers on this machine stand for two machines; the endpoint is that of a run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "surefoot", "doctor", config, "nnodes=2", f"rdzv_endpoint=127.0.0.1:{port}"]
    both = [
        subprocess.Popen([*command, "--deep"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [one.communicate(timeout=180) for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    (report,) = [out for out, _ in said if out]
    assert re.search(r"^ok +ranks are alike +2 ranks on 2 machines ", report, re.M)
    assert re.search(r"^ok +machines reach each other ", report, re.M)
    assert "SF712" not in report, "each machine knows the endpoint"
    assert ["machine of rank 0 shows" in errors for out, errors in said if not out] == [True]


@pytest.mark.long
def test_a_machine_that_does_not_come_is_a_finding(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "JOIN_WITHIN_S", 3)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    loaded = load_config(config, ["nnodes=2", f"rdzv_endpoint=127.0.0.1:{port}"])
    checks, status = start.self_test(loaded, is_deep=False)
    assert checks is not None
    assert status == 3
    (finding,) = [check.finding for check in checks if check.finding is not None]
    assert finding.code == "SF742"
    assert "2 machines (nnodes)" in finding.cause
