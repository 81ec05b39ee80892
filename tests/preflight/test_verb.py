"""`surefoot doctor`, and what `surefoot train` asks of it before it starts."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.cli import main
from surefoot.config import load_config
from surefoot.diagnostics.doctor import check_start
from surefoot.diagnostics.preflight.runner import as_launched, not_looked_at
from surefoot.findings import CATALOGUE
from tests.support.machines import LAPTOP
from tests.support.processes import surefoot as surefoot_command


@pytest.fixture
def config(settings: dict[str, Any], tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(settings))
    return str(path)


def test_a_sound_machine_is_shown_line_by_line(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "ok      versions" in capsys.readouterr().out
    assert main(["doctor", config, "nproc_per_node=2"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^ok +devices +2 ranks .*CPU$", said, re.M)
    assert re.search(r"^ok +host memory +.* 0\.0 GiB ", said, re.M)
    assert not Path(json.loads(Path(config).read_text())["output_dir"]).exists()


def test_what_is_wrong_comes_with_its_fix_and_status_3(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    assert main(["doctor", config]) == 0, "one rank needs no network"
    capsys.readouterr()
    assert main(["doctor", config, "nproc_per_node=2"]) == 3
    said = capsys.readouterr().out
    assert "FAILED  interfaces" in said
    assert f"SF705 {CATALOGUE['SF705'].title}\n" in said
    assert f"fix: {CATALOGUE['SF705'].fix}\n" in said
    assert main(["doctor", config, "nproc_per_node=2", "--json"]) == 3
    checks = json.loads(capsys.readouterr().out)["checks"]
    (failed,) = [check for check in checks if check["status"] == "failed"]
    assert failed["finding"]["code"] == "SF705"


def test_what_was_not_looked_at_is_said(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that answers no more cannot be had here: who asks it waits."""
    answers = threading.Event()
    monkeypatch.setattr("surefoot.diagnostics.preflight.memory.weights_of", lambda _: answers.wait(60))
    monkeypatch.setattr("surefoot.diagnostics.preflight.runner.WITHIN_S", 0.5)
    main(["doctor", config])
    said = capsys.readouterr().out
    assert not check_start(as_launched(load_config(config)))
    answers.set()
    assert re.search(r"^- +model +.* 0\.5 s$", said, re.M)
    for name in ("chat template", "the run itself", "first rows"):
        assert re.search(rf"^- +{name} +{not_looked_at(name).text}$", said, re.M), said
    assert re.search(r"^doctor: model: .* 0\.5 s$", capsys.readouterr().err, re.M)


@pytest.mark.long
def test_train_does_not_start_what_cannot_work(config: str) -> None:
    broken = {"GLOO_SOCKET_IFNAME": "ib7"}
    refused = surefoot_command("train", config, "nproc_per_node=2", env=broken)
    assert refused.returncode == 3
    assert refused.stderr.count("SF705") == 1
    assert "preflight=false" in refused.stderr.rstrip().splitlines()[-1]
    folder = Path(json.loads(Path(config).read_text())["output_dir"])
    assert not folder.exists()
    started = surefoot_command("train", config, "nproc_per_node=2", "preflight=false", "max_steps=1", env=broken)
    assert started.returncode not in (0, 3), "what is refused does not work"


def test_cards_that_say_nothing_are_told_of_before_a_run(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check of them would pass for one that does not apply."""
    machine = replace(LAPTOP, unknown={"cards": "no answer within 8.0 s"})
    monkeypatch.setattr("surefoot.diagnostics.doctor.snapshot_for", lambda _: machine)
    for device, is_told in (("auto", True), ("cpu", False)):
        assert not check_start(load_config(config, [f"device={device}"]))
        said = re.search(r"^doctor: .*\(cards\): .* 8\.0 s$", capsys.readouterr().err, re.M)
        assert (said is not None) == is_told


def test_a_folder_that_is_not_there_is_no_matter_of_the_machine(config: str) -> None:
    refused = surefoot_command("train", config, "model=./nowhere")
    assert refused.returncode == 2
    assert f"model={Path('nowhere').absolute()}: " in refused.stderr
    assert "preflight" not in refused.stderr


@pytest.mark.long
def test_ranks_of_torchrun_are_not_started_either(config: str) -> None:
    """One rank, as which the config alone would be read, needs no network."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    broken = {**os.environ, "GLOO_SOCKET_IFNAME": "ib7", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*torchrun, "-m", "surefoot", "train", config], env=broken, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, "torchrun's own"
    assert done.stderr.count(f"SF705 {CATALOGUE['SF705'].title}") == 1, done.stderr
    assert "preflight=false" in done.stderr
    assert not Path(json.loads(Path(config).read_text())["output_dir"]).exists()


def test_ranks_of_a_launcher_count_as_the_launcher_says(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    launched = as_launched(load_config(config, ["rdzv_endpoint=node0:29500", "nnodes=2"])).run
    assert (launched.nproc_per_node, launched.nnodes, launched.rdzv_endpoint) == (4, 2, None)


def test_warnings_are_said_and_stop_nothing(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAMES", "lo")
    assert not check_start(load_config(config))
    said = capsys.readouterr().err
    assert re.fullmatch(r"doctor: SF710 environment variables: NCCL_SOCKET_IFNAMES .*\n", said)


@pytest.mark.long
def test_a_run_knows_its_machine_and_what_changed_since(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = surefoot.train(settings, screen=False, max_steps=1).run_folder
    two = {**settings, "nproc_per_node": 2, "output_dir": f"{settings['output_dir']}2", "report": False}
    for folder in (run, surefoot.train(two, screen=False, max_steps=1).run_folder):
        assert main(["doctor", "--against", str(folder)]) == 0
        *_, title, changes = capsys.readouterr().out.splitlines()
        assert (str(folder) in title, changes) == (True, "nothing")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert main(["doctor", "--against", str(run)]) == 0
    assert re.search(r"\nenvironment\.NCCL_DEBUG: .* -> WARN\n$", capsys.readouterr().out)


def test_a_model_folder_that_is_not_there_is_not_fetched(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", config, "model=/none/llama"]) == 3
    assert re.search(r"^FAILED +model +/none/llama: ", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("path", ["nowhere", "run.yaml"])
def test_against_what_is_no_run(config: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    against = Path(config).with_name(path)
    assert main(["doctor", "--against", str(against)]) == 2
    assert f"--against: {against} " in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_model_that_was_fetched_before_is_looked_at(config: str, tmp_path: Path, is_whole: bool) -> None:
    given = json.loads(Path(config).read_text())
    kept = tmp_path / "hub/models--some--model"
    shutil.copytree(given["model"], kept / "snapshots/1a2b")
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text("1a2b")
    if not is_whole:  # the rest is fetched when the run starts
        (kept / "snapshots/1a2b/model.safetensors").unlink()
    Path(config).write_text(json.dumps({**given, "model": "some/model", "max_length": 10**6}))
    done = surefoot_command("doctor", config, "--json", env={"HF_HUB_CACHE": str(tmp_path / "hub")})
    assert done.returncode == 0, done.stderr
    said = {check["name"]: (check["status"], check["text"]) for check in json.loads(done.stdout)["checks"]}
    if is_whole:
        assert said["model"][0] == "ok"
        assert said["chat template"][0] == "ok"
        assert said["context"][0] == "warning"
    else:
        assert said["model"][0] == "not applicable"
        assert said["model"][1].startswith("some/model is not here yet")
        assert said["host memory"][0] == "not applicable"
