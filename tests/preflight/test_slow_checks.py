"""Checks for who asks before a run starts: what it would go on from, and its chat template."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.config import load_config
from surefoot.diagnostics.preflight.check import Check
from surefoot.diagnostics.preflight.runner import as_launched, examine
from surefoot.errors import ConfigError
from tests.support.machines import LAPTOP


def asked(name: str, settings: dict[str, Any], **changes: Any) -> Check:
    loaded = load_config(None, (), {**settings, **changes})
    assert name not in {check.name for check in examine(LAPTOP, loaded)}, "a start does not wait for it"
    (check,) = [check for check in examine(LAPTOP, loaded, include_slow=True) if check.name == name]
    return check


def test_a_run_that_begins(settings: dict[str, Any]) -> None:
    check = asked("resume", settings)
    assert (check.status, settings["output_dir"] in check.text) == ("not applicable", True)
    for anew in ({"resume_from_checkpoint": False}, {"overwrite_output_dir": True}):
        check = asked("resume", settings, **anew)
        assert (check.status, "anew" in check.text) == ("not applicable", True)


def test_a_run_that_goes_on(settings: dict[str, Any]) -> None:
    settings = {**settings, "max_steps": 2, "save_steps": 1}
    result = surefoot.train(settings)
    newest = result.run_folder / "checkpoints" / "step-00000002"
    check = asked("resume", settings)
    assert (check.status, "step-00000002" in check.text) == ("ok", True)

    for changes in ({"learning_rate": 0.5}, {"learning_rate": 0.5, "resume_from_checkpoint": str(newest)}):
        check = asked("resume", settings, **changes)
        assert check.finding is not None
        assert check.finding.code == "SF739"
        (change,) = check.finding.evidence["changes"]
        assert change.startswith("learning_rate: ")
        assert change.endswith(" 0.5")
        assert change in check.text

    (newest / "state.json").rename(newest / "elsewhere")
    check = asked("resume", settings)
    assert (check.status, check.text.startswith(str(newest))) == ("warning", True)
    assert check.text.endswith("lacks state.json")
    named = {"resume_from_checkpoint": str(newest), "output_dir": str(result.run_folder.with_name("other"))}
    assert asked("resume", settings, **named).status == "failed"
    (newest / "elsewhere").rename(newest / "state.json")
    weights = newest / "model/rank-00000.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    check = asked("resume", settings)
    assert (check.status, check.text.startswith(str(newest))) == ("warning", True)
    assert check.text.endswith(f"part of model/{weights.name}")
    weights.write_bytes(whole)
    assert asked("resume", settings).status == "ok"
    for text in ("{", "{}", "[]", '{"files": 3, "config": {}}'):
        (newest / "manifest.json").write_text(text)
        assert "no manifest" in asked("resume", settings).text, text
    assert asked("resume", settings).status == "warning"
    shutil.rmtree(newest.with_name("step-00000001"))
    assert asked("resume", settings).status == "failed", "none is left to go on from"


@pytest.mark.parametrize(
    ("said", "named"),
    [(("x", "1"), "^WORLD_SIZE='x'"), (("1", "0"), "^LOCAL_WORLD_SIZE='0'"), (("", ""), "^WORLD_SIZE=''")],
)
def test_variables_of_a_launcher_that_are_no_numbers(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, said: tuple[str, str], named: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", said[0])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said[1])
    with pytest.raises(ConfigError, match=named):
        as_launched(load_config(None, (), settings))


def test_a_template_is_tried(settings: dict[str, Any], tmp_path: Path) -> None:
    check = asked("chat template", settings)
    assert (check.status, check.text.split("'")[1::2]) == ("ok", ["It is two.<|im_end|>"])

    hides = tmp_path / "hides.jinja"
    hides.write_text("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    check = asked("chat template", settings, chat_template=str(hides))
    assert check.finding is not None
    assert (check.status, check.finding.code) == ("warning", "SF740")

    folder = tmp_path / "model"
    shutil.copytree(settings["model"], folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    assert asked("chat template", settings, model=str(folder)).status == "not applicable"


def test_a_template_that_never_ends_is_stopped(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.data.template_source.RENDER_DEADLINE_S", 0.3)
    endless = tmp_path / "endless.jinja"
    endless.write_text("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    check = asked("chat template", settings, chat_template=str(endless))
    assert check.finding is not None
    assert (check.status, check.finding.code, "endless" in check.text) == ("warning", "SF740", True)


def test_a_tokenizer_that_is_missing_is_no_matter_of_templates(settings: dict[str, Any], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(Path(settings["model"], "config.json"), bare)
    (bare / "tokenizer.json").write_text("{")
    check = asked("chat template", settings, model=str(bare))
    assert check.finding is not None
    assert check.finding.code == "SF718"
    assert "\n" not in check.text
    (bare / "config.json").write_text("{}")
    assert asked("chat template", settings, model=str(bare)).status == "not applicable", "told by the check of the run"
    check = asked("chat template", settings, chat_template=str(tmp_path / "none.jinja"))
    assert check.finding is not None
    assert check.finding.code == "SF740"


LISTENS = """
import socket, time
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    time.sleep(600)
"""
OF_VLLM = {"method": "grpo", "reward_funcs": ["exact_match"], "rollout_engine": "vllm", "global_batch_size": 8}


@contextmanager
def listening(**environment: str) -> Iterator[str]:
    own = {**os.environ, **environment}
    with subprocess.Popen([sys.executable, "-c", LISTENS], env=own, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def test_a_server_that_runs_elsewhere_is_compared(settings: dict[str, Any]) -> None:
    grpo = {**settings, **OF_VLLM}
    takes_adapters = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with listening() as address:
        check = asked("rollout server's own", grpo, vllm_server=address)
        assert (check.status, check.finding and check.finding.code) == ("failed", "SF710")
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in check.text
    with listening(**takes_adapters, NCCL_IB_DISABLE="1", CUDA_VISIBLE_DEVICES="7") as address:
        check = asked("rollout server's own", grpo, vllm_server=address)
        assert check.status == "warning"
        assert "NCCL_IB_DISABLE=1 there" in check.text
        assert "CUDA_VISIBLE_DEVICES" not in check.text
    set_by_surefoot = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "SUREFOOT_ADDED_VARIABLES": "CUDA_DEVICE_ORDER"}
    with listening(**takes_adapters, **set_by_surefoot) as address:
        assert asked("rollout server's own", grpo, vllm_server=address).status == "ok"
    silent = asked("rollout server's own", grpo, vllm_server=address)
    assert (silent.status, silent.finding and silent.finding.code) == ("warning", "SF801")
    for said in (address.removeprefix("http://"), "Connection refused", "900 s"):
        assert said in silent.text


@pytest.mark.parametrize("reachable", [True, False])
def test_a_server_on_another_machine_is_reached(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    def connect(address: tuple[str, int], _within_s: float) -> socket.socket:
        assert address == ("10.255.255.1", 8000)
        if not reachable:
            raise TimeoutError("timed out")
        return socket.socket()

    monkeypatch.setattr("socket.create_connection", connect)
    check = asked("rollout server's own", {**settings, **OF_VLLM}, vllm_server="http://10.255.255.1:8000")
    assert check.status == ("not applicable" if reachable else "warning")
    assert ("`surefoot doctor`" if reachable else "timed out") in check.text


def test_segments_that_a_sleeping_server_cannot_have_are_told(settings: dict[str, Any]) -> None:
    own = {**LAPTOP.environment, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for sleeps in (False, True):
        loaded = load_config(None, (), {**settings, **OF_VLLM, "device": "auto", "vllm_sleep": sleeps})
        checks = examine(replace(LAPTOP, environment=own), loaded, include_slow=True)
        (check,) = [check for check in checks if check.name == "rollout server's own"]
        assert ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in check.text) == sleeps
        assert (check.finding.code if check.finding else None) == ("SF710" if sleeps else None)


def test_an_old_server_is_named_before_it_is_started(settings: dict[str, Any], tmp_path: Path) -> None:
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    grpo = {**settings, **OF_VLLM, "vllm_command": str(command)}
    check = asked("rollout server's own", grpo)
    assert (check.status, str(command) in check.text, "unknown" in check.text) == ("not applicable", True, True)
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    (packages / "vllm-0.9.2.dist-info").mkdir(parents=True)
    check = asked("rollout server's own", grpo)
    assert check.finding is not None
    assert (check.finding.code, "vLLM 0.9.2" in check.text) == ("SF709", True)
    (packages / "vllm-0.9.2.dist-info").rename(packages / "vllm-0.33.0.dist-info")
    check = asked("rollout server's own", grpo)
    assert (check.status, "vLLM 0.33.0" in check.text) == ("ok", True)


def test_a_warm_up_that_is_longer_than_the_run_is_told_of(settings: dict[str, Any]) -> None:
    check = asked("schedule", settings, max_steps=2, warmup_steps=100)
    assert check.finding is not None
    assert (check.status, check.finding.code) == ("warning", "SF720")
    assert (check.finding.evidence["warmup_steps"], check.finding.evidence["max_steps"]) == (100, 2)
    assert asked("schedule", settings, max_steps=100, warmup_steps=2).status == "ok"


def test_an_address_that_cannot_be_one_is_told_of(settings: dict[str, Any]) -> None:
    run = {"method": "grpo", "reward_funcs": ["length"], "num_generations": 2, "rollout_engine": "vllm"}
    check = asked("rollout server's own", settings, **run, vllm_server=f"http://{'a' * 70}.x:8000")
    assert check.finding is not None
    assert check.finding.code == "SF801"


def test_a_teacher_server_is_reached(settings: dict[str, Any]) -> None:
    distill = {**settings, "method": "distill", "teacher_top_k": 8}
    with listening() as address:
        check = asked("rollout server's own", distill, teacher_server=address)
        assert (check.status, address in check.text) == ("ok", True)
    silent = asked("rollout server's own", distill, teacher_server=address)
    assert (silent.status, silent.finding and silent.finding.code) == ("warning", "SF801")
    assert "the address in teacher_server" in silent.text
    assert "A run waits" not in silent.text
