"""Runs of two ranks through the launcher: however one rank ends, all end with it, and the reason names it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import surefoot
from surefoot.config import load_config
from surefoot.distributed.elastic_launch import PASS_ON_EVERY_S, _forward_signals, kill_ranks
from surefoot.distributed.rank_notes import FOLDER, LEAVE_AFTER_S, RankFailure
from surefoot.distributed.rendezvous_secret import VARIABLE
from surefoot.errors import StoppedOnFinding
from surefoot.findings import Finding
from surefoot.launch.multi_rank import _raise_failure
from surefoot.training.checkpoint import find_newest, list_checkpoints
from surefoot.training.run_summary import FindingLog
from tests.support.data import counting_rows, write_jsonl
from tests.support.grpo import GRPO
from tests.support.processes import FAULTS
from tests.support.runs import settings_of

pytestmark = pytest.mark.slow


@pytest.fixture
def two_ranks(parallel_model: Callable[[str], Path], parallel_data: Path, tmp_path: Path) -> dict[str, Any]:
    return settings_of(
        parallel_model("llama"), parallel_data, tmp_path / "run", nproc_per_node=2, save_steps=2, report=False
    )


def start(settings: dict[str, Any], fault: str = "", **environment: str) -> "subprocess.Popen[str]":
    config = Path(settings["output_dir"]).parent / "run.json"
    config.write_text(json.dumps(settings))
    return subprocess.Popen(
        [sys.executable, "-m", "surefoot", "train", str(config)],
        env={
            **os.environ,
            "PYTHONPATH": str(FAULTS),
            "FAULT": fault and f"{fault}:{config.parent / 'struck'}",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_steps(settings: dict[str, Any], steps: int) -> None:
    metrics = Path(settings["output_dir"]) / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= steps):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children_of(process: int, name: str) -> list[int]:
    """Those of its children whose command names a module."""
    with suppress(FileNotFoundError):
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        return [int(child) for child in children if name in Path(f"/proc/{child}/cmdline").read_text()]
    return []


def launcher_of(supervisor: int) -> int:
    (launcher,) = children_of(supervisor, "surefoot.launch.run_process")
    return launcher


def ranks_of(supervisor: int) -> list[int]:
    return [
        rank
        for job in children_of(supervisor, "surefoot.launch.run_process")
        for rank in children_of(job, "surefoot.launch.rank_process")
    ]


def summary_of(settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(settings["output_dir"]) / "summary.json").read_text())
    return found


def test_a_rank_that_is_killed_ends_the_run_and_is_named(two_ranks: dict[str, Any]) -> None:
    settings = {**two_ranks, "max_steps": 5000}
    process = start(settings)
    wait_for_steps(settings, 5)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    number = Path(f"/proc/{ranks[1]}/environ").read_bytes().split(b"\0RANK=")[1][:1].decode()
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == 3
    assert stderr.count("SF101") == 1
    assert re.search(rf"cause: rank {number} .*SIGKILL", stderr)
    assert "Traceback" not in stderr
    assert summary_of(settings)["status"] == "failed"
    assert re.match(rf"rank {number} .*SIGKILL", summary_of(settings)["error"])
    (finding,) = summary_of(settings)["findings"]
    assert (finding["code"], finding["evidence"]["rank"]) == ("SF101", int(number))
    assert finding["evidence"]["last_step"] >= 5
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert find_newest(Path(settings["output_dir"]))[0] is not None


@pytest.mark.matrix
def test_a_rank_that_is_killed_while_it_sends_ends_the_run_too(two_ranks: dict[str, Any]) -> None:
    """Of a peer whose message is cut short gloo says nothing: elastic alone would wait for half a minute."""
    process = start(two_ranks, "1:cut:3@step")
    began = time.monotonic()
    while not (Path(two_ranks["output_dir"]).parent / "struck").exists():
        assert time.monotonic() - began < 180
        time.sleep(0.05)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - began < LEAVE_AFTER_S + 10
    assert process.returncode == 3, stderr
    assert stderr.count("SF101") == 1
    assert re.search("cause: rank 1 .*SIGKILL", stderr)
    assert summary_of(two_ranks)["status"] == "failed"


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_after_the_same_step(two_ranks: dict[str, Any]) -> None:
    settings = {**two_ranks, "max_steps": 5000}
    process = start(settings)
    wait_for_steps(settings, 5)
    os.kill(ranks_of(process.pid)[1], signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "interrupted" in stdout, stderr
    summary = summary_of(settings)
    assert summary["status"] == "interrupted"
    assert list_checkpoints(Path(settings["output_dir"]))[-1].name == f"step-{summary['steps']:08d}"


@pytest.mark.long
@pytest.mark.parametrize("fault", ["0:raise:5@step", pytest.param("1:SIGKILL:5@step", marks=pytest.mark.matrix)])
def test_a_run_starts_again_from_its_checkpoint_when_a_rank_died(
    two_ranks: dict[str, Any], tmp_path: Path, fault: str
) -> None:
    settings = {**two_ranks, "max_restarts": 1}
    process = start(settings, fault)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert (tmp_path / "struck").exists()
    assert re.search(r"resuming .*step 4\b", stderr)
    (finding,) = summary_of(settings)["findings"]
    rank = int(fault[0])
    assert re.search(rf"rank {rank}.*(broken on purpose|SIGKILL).*\b1 of 1\b", finding["cause"])
    assert finding["cause"] in stderr
    lines = [json.loads(line) for line in (Path(settings["output_dir"]) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert summary_of(settings)["status"] == "completed"


@pytest.mark.long
def test_an_exception_on_one_rank_ends_all_with_its_reason(two_ranks: dict[str, Any]) -> None:
    process = start(two_ranks, "1:raise:3@step")
    began = time.monotonic()
    _, stderr = process.communicate(timeout=120)
    assert time.monotonic() - began < 60
    assert process.returncode == 1
    assert "error: rank 1: ValueError: broken on purpose" in stderr
    assert summary_of(two_ranks)["error"] == "rank 1: ValueError: broken on purpose"
    assert summary_of(two_ranks)["steps"] == 2


@pytest.mark.long
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_a_rank_that_gets_no_more_memory_says_what_it_knows(two_ranks: dict[str, Any], rank: int) -> None:
    process = start(two_ranks, f"{rank}:allocate:3@step")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 3, stderr
    assert stderr.count("SF209") == 1
    summary = summary_of(two_ranks)
    (finding,) = summary["findings"]
    assert (finding["code"], finding["evidence"]["rank"], finding["evidence"]["step"]) == ("SF209", rank, 3)
    assert re.match(rf"rank {rank} .*\bthe host, in {finding['evidence']['phase']}\b", finding["cause"])
    assert finding["evidence"]["tokens_of_its_batch"] > 0
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert "SF209" in summary["error"]
    (noted,) = (Path(two_ranks["output_dir"]) / "findings.jsonl").read_text().splitlines()
    assert json.loads(noted)["cause"] == finding["cause"]


def test_a_finding_that_an_earlier_run_had_too_is_written_down_again(
    two_ranks: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(None, [], two_ranks).run
    folder = config.run_folder
    folder.mkdir()
    finding = Finding("SF209", "rank 1 got no more memory", {"rank": 1}, "Lower it.")
    failure = RankFailure(finding.as_text(), "StoppedOnFinding", finding=finding)

    def fail(began_s: float) -> list[dict[str, Any]]:
        with pytest.raises(StoppedOnFinding):
            _raise_failure(failure, FindingLog.of(config), began_s, [], screen=True)
        assert capsys.readouterr().err.count("SF209") == len((folder / "findings.jsonl").read_text().splitlines())
        return list(summary_of(two_ranks)["findings"])

    assert [made["code"] for made in fail(time.time() - 60)] == ["SF209"]
    (folder / "findings.jsonl").unlink()
    os.utime(folder / "summary.json", (1e9, 1e9))
    assert [made["code"] for made in fail(time.time() - 60)] == ["SF209"], "that summary was of an earlier run"
    (folder / "findings.jsonl").write_text("")
    assert [made["code"] for made in fail(time.time() - 60)] == ["SF209"], "rank 0 said it already"


@pytest.mark.long
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_with_one_finding(
    two_ranks: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A token whose embedding is broken comes in one row alone."""
    rows = counting_rows(12)
    rows[9]["messages"][0]["content"] += " ~"
    model = AutoModelForCausalLM.from_pretrained(two_ranks["model"])
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.encode("~")] = torch.nan
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    changes = {"model": str(tmp_path / "model"), "dataset": str(data), "global_batch_size": 4, "shuffle": False}
    settings = {**two_ranks, **changes}
    process = start(settings)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 3, stderr
    (finding,) = summary_of(settings)["findings"]
    assert finding["code"] == "SF401"
    assert finding["evidence"]["step"] == 3
    assert finding["evidence"]["ranks"] == "1"
    assert "rows.jsonl:10" in finding["evidence"]["rows"]
    assert finding["evidence"]["row"] == "rows.jsonl:10"
    assert finding["evidence"]["first_module"] == "model.embed_tokens"
    assert finding["evidence"]["weights"] == "model.embed_tokens.weight"
    assert stderr.count("SF401") == 1


@pytest.mark.long
@pytest.mark.parametrize("fault", [pytest.param("1:SIGKILL:4@save", marks=pytest.mark.matrix), "0:SIGKILL:5@save"])
def test_a_kill_during_a_save_leaves_the_checkpoint_before(two_ranks: dict[str, Any], fault: str) -> None:
    """Of rank 1 after its second save's last file, of rank 0 just before the manifest of the second save."""
    process = start(two_ranks, fault)
    process.communicate(timeout=120)
    assert process.returncode == (3 if "SIGKILL" in fault else 1)
    newest, findings = find_newest(Path(two_ranks["output_dir"]))
    assert newest is not None
    assert newest.name == "step-00000002"
    assert findings == []


@pytest.mark.matrix
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_an_artifact_that_cannot_be_written_ends_all_ranks(two_ranks: dict[str, Any], tuning: str) -> None:
    settings = {**two_ranks, "max_steps": 60, "tuning": tuning}
    process = start(settings)
    wait_for_steps(settings, 2)
    (Path(settings["output_dir"]) / ("model" if tuning == "full" else "adapter")).write_text("in the way")
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 1
    assert re.findall(r"^error: .*could not be written", stderr, re.M)
    assert "Traceback" not in stderr
    assert summary_of(settings)["status"] == "failed"
    assert summary_of(settings)["steps"] == 60


@pytest.mark.matrix
def test_a_config_that_can_be_read_only_once_reaches_all_ranks(two_ranks: dict[str, Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "train", "/dev/stdin", "max_steps=2", "--json"],
        input=json.dumps(two_ranks), capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2


@pytest.mark.matrix
def test_two_launched_runs_never_share_a_folder(two_ranks: dict[str, Any]) -> None:
    settings = {**two_ranks, "max_steps": 5000}
    first = start(settings)
    wait_for_steps(settings, 1)
    _, stderr = start(settings).communicate(timeout=60)
    assert re.search("output_dir=.* is in use", stderr)
    first.send_signal(signal.SIGINT)
    stdout, _ = first.communicate(timeout=60)
    assert "interrupted" in stdout
    assert summary_of(settings)["status"] == "interrupted"


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named_and_ends_the_run(two_ranks: dict[str, Any]) -> None:
    process = start(two_ranks, "1:sleep:1@meet", MEET_WITHIN_S="3")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 3, stderr
    said = re.findall(r"cause: rank 1 of 2 .*?\b(\d+) s\b", stderr)
    assert said == ["1", "3"], stderr  # while it waits, and at the end
    assert f"{socket.gethostname()}: 0" in stderr
    assert "Traceback" not in stderr
    assert not Path(two_ranks["output_dir"]).exists()


@pytest.mark.matrix
def test_ranks_that_find_nobody_at_the_address_say_so(
    two_ranks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.distributed.store.DEADLINE", timedelta(seconds=1))
    names = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(StoppedOnFinding) as told:
        surefoot.train(two_ranks, screen=False)
    assert re.match(f"rank 1 .*localhost:{names['MASTER_PORT']}", told.value.finding.cause)
    assert told.value.finding.evidence["error"]
    assert not Path(two_ranks["output_dir"]).exists()


@pytest.mark.matrix
def test_a_rollout_that_is_late_ends_all_ranks(two_ranks: dict[str, Any]) -> None:
    """With ZeRO 3 each token needs both of them, so they must leave their waves after the same one."""
    grpo = {**GRPO, "stop": None, "max_completion_length": 100, "global_batch_size": 12, "rollout_batch_size": 2}
    process = start({**two_ranks, **grpo, "zero_stage": 3, "rollout_timeout_s": 0.2})
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 3, stderr
    assert stderr.count("0.2 s of rollout_timeout_s") == 1
    assert "Traceback" not in stderr
    assert summary_of(two_ranks)["status"] == "failed"


def test_signals_go_to_ranks_of_the_last_attempt_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a rank that is gone may be another program's by now."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as other, subprocess.Popen(["sleep", "60"]) as rank:
        (tmp_path / "pid-0-0").write_text(str(other.pid))
        (tmp_path / "pid-0-1").write_text(str(rank.pid))
        kill_ranks()
        try:
            assert rank.wait(5) == -signal.SIGKILL
            assert other.poll() is None
        finally:
            other.kill()


COUNTS_SIGINT = """
import signal
received = []
signal.signal(signal.SIGINT, lambda *_: received.append(1))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
while signal.sigtimedwait([signal.SIGTERM], 60) is None: pass
print(len(received))
"""


def test_a_storm_of_signals_is_passed_on_a_few_times(tmp_path: Path) -> None:
    """Each passing on looks for the ranks: at a thousand a second the launcher would do nothing else."""
    with subprocess.Popen([sys.executable, "-c", COUNTS_SIGINT], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        (tmp_path / "pid-0-0").write_text(str(rank.pid))
        began_s = time.monotonic()
        with _forward_signals(str(tmp_path)) as passed:
            for _ in range(1000):
                os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)  # another signal is another wish
            at_most = 2 + (time.monotonic() - began_s) / PASS_ON_EVERY_S
        received = int(rank.communicate(timeout=10)[0])
    assert 1 <= received < at_most
    assert passed == ["SIGINT"] * (len(passed) - 1) + ["SIGTERM"]


@pytest.mark.long
def test_a_signal_while_ranks_are_starting_stops_them(two_ranks: dict[str, Any]) -> None:
    process = start({**two_ranks, "max_steps": 5000})
    deadline = time.monotonic() + 60
    while not ranks_of(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in stderr
    assert "step 10/" not in stderr


@pytest.mark.matrix
def test_ranks_of_a_launcher_that_is_killed_while_they_start_do_not_stay(two_ranks: dict[str, Any]) -> None:
    process = start({**two_ranks, "max_steps": 5000})
    deadline = time.monotonic() + 60
    while len(started := ranks_of(process.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(launcher_of(process.pid), signal.SIGKILL)
    process.communicate(timeout=30)  # its ranks hold the other ends of the pipes
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in started):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.matrix
def test_data_that_cannot_be_prepared_end_all_ranks(two_ranks: dict[str, Any], tmp_path: Path) -> None:
    """Beside training, and on rank 0 alone: the others wait for shards that will not come."""
    rows = [{**row, "n": n} for n, row in enumerate(counting_rows(70_000))]
    data = write_jsonl(tmp_path / "big.jsonl", [*rows, {"messages": []}])
    settings = {**two_ranks, "max_steps": 100_000, "dataset": str(data), "shuffle": False, "save_steps": 0}
    process = start(settings)
    _, stderr = process.communicate(timeout=400)  # 45 s on two quiet cores; with fewer rows no step is done before
    assert process.returncode == 2, stderr
    assert stderr.count("big.jsonl:70001: 'messages'") == 1
    assert summary_of(settings)["status"] == "failed"
    assert list_checkpoints(Path(settings["output_dir"])), "what was trained is kept"


def machine(settings: dict[str, Any], name: str, **changes: Any) -> "subprocess.Popen[str]":
    """One of the launchers of a run over several machines, each with a config of its own."""
    config = Path(settings["output_dir"]).parent / f"{name}.json"
    config.write_text(json.dumps({**settings, **changes}))
    return subprocess.Popen(
        [sys.executable, "-m", "surefoot", "train", str(config)],
        env={**os.environ, VARIABLE: "the secret of these machines"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.mark.matrix
def test_machines_with_different_configs_do_not_train_together(two_ranks: dict[str, Any], tmp_path: Path) -> None:
    settings = {**two_ranks, "nproc_per_node": 1, "nnodes": 2, "rdzv_endpoint": f"localhost:{free_port()}"}
    other = {"learning_rate": 2e-3, "output_dir": str(tmp_path / "elsewhere")}
    machines = [machine(settings, "first"), machine(settings, "second", **other)]
    ends = [(process.communicate(timeout=60)[1], process.returncode) for process in machines]
    for stderr, status in ends:
        assert status == 2
        assert re.search(r"error: rank 1: .*learning_rate: 0.00[12] -> 0.00[12]\b.*machines", stderr)
        assert "output_dir: " in stderr
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.matrix
def test_a_port_at_which_another_service_is_silent_is_named(two_ranks: dict[str, Any]) -> None:
    with socket.create_server(("localhost", 0)) as server:
        endpoint = f"localhost:{server.getsockname()[1]}"
        process = machine({**two_ranks, "nnodes": 2, "rdzv_endpoint": endpoint}, "alone")
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert re.search(f"rdzv_endpoint={endpoint}: .*not the rendezvous", stderr)


@pytest.mark.matrix
def test_launchers_leave_nothing_behind_and_clear_away_what_killed_ones_left(
    two_ranks: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    abandoned = folder / "surefoot-launch-abandoned"
    abandoned.mkdir(parents=True)
    (abandoned / "lock").touch()
    os.utime(abandoned / "lock", (0, 0))
    monkeypatch.setenv("TMPDIR", str(folder))
    process = start({**two_ranks, "max_steps": 1})
    assert process.communicate(timeout=60)
    assert process.returncode == 0
    assert [path.name for path in folder.iterdir() if "surefoot" in path.name or "elastic" in path.name] == []
