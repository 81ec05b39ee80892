"""Completions from a server: what goes wrong with it ends in a finding. The server here only speaks like vLLM."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from surefoot.config import load_config
from surefoot.distributed.process_group import SINGLE_PROCESS
from surefoot.errors import ConfigError, StoppedOnFinding
from surefoot.events import Event
from surefoot.methods.grpo.method import drift_check
from surefoot.methods.rollout.engines import server as serving
from surefoot.methods.rollout.engines import vllm_sync
from surefoot.methods.rollout.engines.server import Server, ServerFailed, start_server
from surefoot.methods.rollout.engines.vllm import VllmEngine
from surefoot.methods.rollout.engines.vllm_client import CompletionClient
from surefoot.methods.rollout.engines.vllm_probe import AddNoise, PolicyProbe, Score
from surefoot.methods.rollout.engines.vllm_protocol import (
    Policy,
    RoutingLayers,
    ServedModel,
    build_call,
    parse_completion,
)
from surefoot.methods.rollout.engines.vllm_sync import AdapterSync, FullSync, Sync
from surefoot.methods.rollout.routed_experts import decode_experts, encode_experts
from surefoot.methods.rollout.setup import open_server, reserve_server_memory
from surefoot.methods.rollout.types import Request, Sampling
from surefoot.models.adapter_files import WEIGHTS
from surefoot.models.build import build_model
from surefoot.models.dtensor_blocks import gather_full
from surefoot.models.lora import LoraSettings

pytestmark = pytest.mark.slow

SERVER = Path(__file__).with_name("engine_server.py")
LORA = LoraSettings(rank=4, alpha=8.0, targets=("all",), seed=1)
SAMPLING = Sampling(5)
FINE = replace(SAMPLING, banned=frozenset({9}))


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    made: list[subprocess.Popen[bytes]] = []

    def start(fault: str = "none", probe: list[float] | None = None) -> Server:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {**os.environ, "PROBE_LOGPROBS": json.dumps(probe)}
        made.append(subprocess.Popen([sys.executable, str(SERVER), str(port), fault], env=environment))
        server = Server(f"http://127.0.0.1:{port}", made[-1])
        server.wait_until_ready(30, print)
        return server

    yield start
    for process in made:
        process.kill()
        process.wait()


def test_a_server_that_is_waited_for_is_named_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "NOTICE_EVERY_S", 0.6)
    heard: list[str] = []
    with pytest.raises(ServerFailed, match=r"http://127\.0\.0\.1:9 .*not ready .*\b2 s"):
        Server("http://127.0.0.1:9").wait_until_ready(2.0, heard.append)
    assert 1 <= len(heard) <= 4
    (said,) = set(heard)
    assert re.search(r"waiting .*http://127\.0\.0\.1:9, .*\b2 s$", said)


def test_what_a_server_that_is_gone_left_is_ended() -> None:
    """Its workers may hold the memory of GPUs."""
    command = ["sh", "-c", "sleep 60 & echo $!; exit 3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        left = int(process.stdout.readline())
        assert process.wait(5) == 3
        Server("http://127.0.0.1:9", process).end()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def engine(model_folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., VllmEngine]:
    built = build_model(model_folder("llama"), lora=LORA, device=torch.device("cpu"), dtype=torch.float32)

    def make(
        server: Server,
        *,
        sync: Sync | None = None,
        score: Score = lambda _, ids: [-1.0] * len(ids),
        sampling: Sampling = SAMPLING,
        routing: RoutingLayers | None = None,
        add_noise: AddNoise | None = None,
        sleeps: bool = False,
    ) -> VllmEngine:
        client = CompletionClient(server, ServedModel(1000, routing=routing), timeout_s=60.0)
        probe = PolicyProbe(client, score, Request([5, 6], (0,)), sampling, dtype=torch.float32, add_noise=add_noise)
        sync = sync or AdapterSync(server, built.model, LORA, tmp_path / "adapters")
        return VllmEngine(client, sync, probe, sleeps=sleeps)

    return make


def test_each_policy_has_an_adapter_of_its_own(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    ours = engine(serve())
    ours.publish(0)
    ours.publish(0)  # it is there already
    first = [path.name for path in (tmp_path / "adapters").iterdir()]
    ours.publish(3)
    assert first == ["policy-00000000"]
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["policy-00000003"]
    made = ours.submit([Request([1, 2], (0, number)) for number in range(20)], SAMPLING, 3)(inf)
    assert [(one.ids, one.policy_version, one.finish) for one in made] == [([7] * 5, 3, "length")] * 20


@pytest.mark.parametrize(("kind", "has_experts"), [("qwen2_moe", True), ("llama", False)])
def test_an_adapter_with_experts_is_announced_as_one(
    model_folder: Callable[[str], Path], tmp_path: Path, kind: str, has_experts: bool
) -> None:
    """vLLM reads the experts of a layer from one tensor only where the request says so."""
    requests: list[Mapping[str, Any]] = []

    class Recorder(Server):
        def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:  # noqa: ARG002
            requests.append(body)
            return {}

    built = build_model(model_folder(kind), lora=LORA, device=torch.device("cpu"), dtype=torch.float32)
    AdapterSync(Recorder("http://127.0.0.1:9"), built.model, LORA, tmp_path / "adapters").send("policy-00000000")
    assert [body.get("is_3d_lora_weight", False) for body in requests] == [has_experts]


def test_an_adapter_is_a_small_part_of_the_model(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine]
) -> None:
    ours = engine(serve())
    ours.publish(0)
    parameters = sum(p.numel() for p in ours._sync._model.parameters() if p.requires_grad)  # type: ignore[attr-defined]
    assert 4 * parameters < ours.bytes_sent < 4 * parameters + 10_000  # besides it, names and a config


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("late", "SF801", r"POST /v1/completions .* \d s\b"),
        ("trickles", "SF801", r"POST /v1/completions .* \d s\b"),
        ("dies", "SF801", "server .*status 3"),
        ("error", "SF801", "status 500: .*the engine is dead"),
        ("fewer", "SF806", "length .*4 of 5 tokens"),
        ("fewer_and_stop", "SF806", "4 tokens, .*token 7,"),
        ("other_version", "SF806", "policy-0, .*policy-00000000-"),
        ("no_logprobs", "SF806", "5 tokens .*4 logprobs"),
        ("no_json", "SF806", "a page of a proxy"),
        ("no_experts", "SF806", "experts .*--enable-return-routed-experts"),
        ("few_experts", "SF806", "experts .*3 tokens .*2 layers, .*6 .*2 layers"),
        ("odd_experts", "SF806", "array: TypeError"),
        ("other_experts", "SF806", "experts 9 to 9, .*4"),
        ("beyond", "SF806", "token 10000000, .*1000 "),
        ("negative", "SF806", "token -5,"),
        ("text_token", "SF806", "token '7',"),
        ("banned", "SF806", "token 9,"),
        ("nan", "SF806", "nan .*logprob"),
        ("text", "SF806", "'-1.0' .*logprob"),
        ("endless", "SF806", r"-1e\+300 .*logprob"),
        ("positive", "SF806", "0.5 .*logprob"),
    ],
)
def test_a_rollout_that_is_not_as_asked_for_is_a_finding(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine], fault: str, code: str, cause: str
) -> None:
    ours = engine(serve(fault), routing=RoutingLayers((0, 1), 2, 4) if fault.endswith("experts") else None)
    ours.publish(0)
    if fault in ("late", "trickles"):
        ours._client.timeout_s = 2.0
    began = time.monotonic()
    with pytest.raises(StoppedOnFinding, match=cause) as stopped:
        ours.submit([Request([1, 2], (0, number)) for number in range(4)], FINE, 0)(inf)
    assert stopped.value.finding.code == code
    assert stopped.value.finding.evidence["address"].startswith("http://127.0.0.1:")
    assert time.monotonic() - began < 30


def test_an_adapter_that_the_server_refuses_is_a_finding(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine]
) -> None:
    with pytest.raises(StoppedOnFinding, match="adapter policy-00000000 .*status 400: .*no room") as stopped:
        engine(serve("refuses_adapter")).publish(0)
    assert stopped.value.finding.code == "SF801"


def test_an_adapter_that_is_loaded_too_slowly_is_a_finding(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.methods.rollout.engines.vllm_sync.SYNC_TIMEOUT_S", 1.0)
    with pytest.raises(StoppedOnFinding, match=r"adapter policy-00000000 .*/v1/load_lora_adapter .*\b1 s\b") as stopped:
        engine(serve("late_sync")).publish(0)
    assert stopped.value.finding.code == "SF801"


@pytest.mark.long
def test_an_engine_that_is_over_begins_no_further_request(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine]
) -> None:
    ours = engine(serve("late"))
    ours.publish(0)
    began = time.monotonic()
    ours.submit([Request([1, 2], (0, number)) for number in range(300)], SAMPLING, 0)
    ours.end()
    assert ours._client.threads._waiting.empty()
    assert time.monotonic() - began < 10


def test_what_comes_too_late_is_left_out_on_request(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine]
) -> None:
    ours = engine(serve("late"))
    ours.publish(0)
    began = time.monotonic()
    assert ours.submit([Request([1, 2], (0, 0))], SAMPLING, 0)(0.5) is None
    assert time.monotonic() - began < 10


def test_a_rollout_whose_time_is_over_says_so(serve: Callable[..., Server], engine: Callable[..., VllmEngine]) -> None:
    ours = engine(serve())
    ours.publish(0)
    ours._client.timeout_s = 0.0
    with pytest.raises(StoppedOnFinding, match=r"\b0 s of rollout_timeout_s") as stopped:
        ours.submit([Request([1, 2], (0, 0))], SAMPLING, 0)(inf)
    assert stopped.value.finding.code == "SF801"


def test_a_server_that_an_earlier_run_left_asleep_is_woken(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine]
) -> None:
    server = serve()
    before = engine(server, sleeps=True)
    before.publish(0)
    before.submit([Request([1, 2], (0, 0))], SAMPLING, 0)(inf)
    engine(server, sleeps=True).publish(0)  # the first one was killed
    assert server.get("/is_sleeping", 5) == {"is_sleeping": False}
    before.submit([Request([1, 2], (0, 0))], SAMPLING, 0)(inf)
    before.end()
    assert server.get("/is_sleeping", 5) == {"is_sleeping": False}


def test_a_models_own_generation_settings_are_overruled() -> None:
    body = build_call(Request([1], (0,)), SAMPLING, "policy", ServedModel(64)).body
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    body = build_call(Request([1], (0,)), Sampling(4, top_p=0.9, top_k=20), "policy", ServedModel(64)).body
    assert (body["top_p"], body["top_k"]) == (0.9, 20)


def test_experts_of_layers_without_a_router_are_left_out() -> None:
    of_all = np.arange(3 * 4 * 2).reshape(3, 4, 2) % 5
    choice = {
        "token_ids": [7, 7],
        "logprobs": {"token_logprobs": [-1.0, -1.0]},
        "finish_reason": "stop",
        "routed_experts": encode_experts(of_all.astype(np.int16)),
    }
    answer = {"model": "policy", "choices": [choice]}
    sampling = replace(SAMPLING, ends=frozenset({7}))
    model = ServedModel(64, routing=RoutingLayers((1, 3), 4, 5))
    made = parse_completion(answer, Request([1, 2], (0,)), sampling, Policy("policy", 0), model)
    assert made.experts is not None
    assert np.array_equal(decode_experts(made.experts), of_all[:, [1, 3]])


def test_a_policy_that_never_arrives_ends_the_run() -> None:
    given = {"model": "m", "dataset": "d", "output_dir": "o", "method": "grpo", "reward_funcs": ["length"]}
    config = load_config(None, (), {**given, "rollout_engine": "vllm", "dtype": "float32", "device": "cpu"}).run
    near, far, late = ({"logprob_difference": one} for one in (0.015, 0.03, 5.0))
    look = drift_check(config)
    stale = {"logprob_difference": 0.5, "staleness": 2.0}
    for step, measured in enumerate((far, far, near, far, stale, {}, far)):
        look(step, measured)
    with pytest.raises(StoppedOnFinding, match="3 steps .*step 9") as stopped:
        look(9, far)
    assert (stopped.value.finding.code, stopped.value.is_agreed) == ("SF805", True)
    assert (stopped.value.finding.evidence["step"], stopped.value.finding.evidence["mean_difference"]) == (9, 0.03)
    local = drift_check(config.model_copy(update={"rollout_engine": "local"}))
    for step in range(5):
        local(step, late)


def test_a_request_that_was_not_taken_is_asked_again(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PAUSES_S", (0.01, 0.01))
    server = serve("busy_twice")
    ours = engine(server)
    ours.publish(0)
    (made,) = ours.submit([Request([1, 2], (0, 0))], SAMPLING, 0)(inf) or []
    assert made.ids
    monkeypatch.setattr(serving, "PAUSES_S", (0.01,))
    with pytest.raises(StoppedOnFinding, match="status 503") as stopped:
        ours.submit([Request([1, 2], (0, 1))], SAMPLING, 0)(inf)
    assert stopped.value.finding.code == "SF801"


def test_a_server_that_shares_memory_is_asleep_before_the_model_is_loaded(serve: Callable[..., Server]) -> None:
    server = serve()
    given = {"model": "m", "dataset": "d", "output_dir": "o", "method": "grpo", "reward_funcs": ["length"]}
    config = load_config(None, (), given).run
    heard: list[Event] = []
    reserve_server_memory(config.model_copy(update={"device": "cpu"}), server, SINGLE_PROCESS, heard.append)
    assert server.get("/is_sleeping", 5) == {"is_sleeping": False}
    reserve_server_memory(config.model_copy(update={"vllm_sleep": True}), server, SINGLE_PROCESS, heard.append)
    assert server.get("/is_sleeping", 5) == {"is_sleeping": True}
    assert heard == []
    gone = Server("http://127.0.0.1:9")
    late = config.model_copy(update={"device": "cuda", "vllm_start_timeout_s": 0.7})
    with pytest.raises(StoppedOnFinding, match=r"http://127\.0\.0\.1:9 .*\b1 s\b") as stopped:
        reserve_server_memory(late, gone, SINGLE_PROCESS, heard.append)
    assert stopped.value.finding.code == "SF801"
    reserve_server_memory(
        late.model_copy(update={"vllm_devices": "7"}), gone, SINGLE_PROCESS, heard.append
    )  # nothing is shared


def test_a_server_sleeps_between_rollouts(serve: Callable[..., Server], engine: Callable[..., VllmEngine]) -> None:
    server = serve()
    ours = engine(server, sleeps=True)
    for version in range(2):
        ours.publish(version)
        assert server.get("/is_sleeping", 5) == {"is_sleeping": False}
        ours.submit([Request([1, 2], (0, 0))], SAMPLING, version)(inf)
        assert server.get("/is_sleeping", 5) == {"is_sleeping": True}
    ours.publish(1)  # as for groups that are replaced: the policy is there, and awake
    assert server.get("/is_sleeping", 5) == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("no_sleep", "404.*--enable-sleep-mode"), ("sleepless", "is_sleeping: False")],
)
def test_a_server_that_does_not_sleep_is_a_finding(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine], fault: str, cause: str
) -> None:
    ours = engine(serve(fault), sleeps=True)

    def roll_out() -> None:
        ours.publish(0)
        ours.submit([Request([1, 2], (0, 0))], SAMPLING, 0)(inf)

    with pytest.raises(StoppedOnFinding, match=cause) as stopped:
        roll_out()
    assert stopped.value.finding.code == "SF801"


@pytest.mark.long
def test_full_fine_tuning_lets_the_server_read_the_whole_model(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(1000))

    server = serve()
    ours = engine(server, sync=FullSync(server, write, tmp_path / "weights", 60.0))
    for version in (0, 3):
        ours.publish(version)
        assert ours.bytes_sent == 1000
        said = server.get("/asked", 5)
        assert said["reload_weights"] == str(tmp_path / f"weights/policy-{version:08d}")
        assert said["caches"] == ["/reset_prefix_cache", "/reset_encoder_cache"]
        (made,) = ours.submit([Request([1, 2], (0, 0))], SAMPLING, version)(inf)
        assert made.policy_version == version
        assert not (tmp_path / "weights").exists()  # the server has them in its memory
    for fault, cause in (("no_reload", "404.*DEV_MODE"), ("keeps_cache", "success: false")):
        server = serve(fault)
        ours = engine(server, sync=FullSync(server, write, tmp_path / "weights", 60.0))
        with pytest.raises(StoppedOnFinding, match=f"weights policy-00000000: .*{cause}") as stopped:
            ours.publish(0)
        assert stopped.value.finding.code == "SF801"


def loses_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors.popitem()


def changes_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors[sorted(tensors)[0]][0, 0] += 1e-3


@pytest.mark.parametrize(
    ("break_it", "cause"),
    [
        (loses_one, "policy-00000000 is not whole"),
        (changes_one, r"1 of \d+ tensors .*policy-00000000 "),
    ],
)
def test_an_adapter_that_is_not_what_was_trained_is_a_finding(
    serve: Callable[..., Server],
    engine: Callable[..., VllmEngine],
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[dict[str, torch.Tensor]], None],
    cause: str,
) -> None:
    write = vllm_sync.write_adapter

    def write_and_break(folder: Path, *arguments: Any) -> None:
        write(folder, *arguments)
        tensors = load_file(folder / WEIGHTS)
        break_it(tensors)
        save_file(tensors, folder / WEIGHTS)

    monkeypatch.setattr(vllm_sync, "write_adapter", write_and_break)
    with pytest.raises(StoppedOnFinding, match=cause) as stopped:
        engine(serve()).publish(0)
    assert stopped.value.finding.code == "SF805"


@pytest.mark.long
@pytest.mark.parametrize("logprob", [-1.05, float("nan")])
def test_a_server_with_other_probabilities_is_a_finding(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine], logprob: float
) -> None:
    with pytest.raises(StoppedOnFinding, match="other probabilities") as stopped:
        engine(serve(), score=lambda _, ids: [logprob] * len(ids)).publish(0)
    assert stopped.value.finding.code == "SF805"
    engine(serve(probe=[-1.005] * 24)).publish(0)  # other kernels, other rounding


@pytest.mark.parametrize(
    ("fault", "enough", "cause"),
    [
        ("none", 0.1, None),
        (
            "ignores_adapters",
            0.1,
            "does not apply the adapter: .* by 1 ",
        ),
        ("none", 1e9, "noise of 16 .* by 0"),
    ],
)
def test_a_server_must_show_that_it_applies_adapters(
    serve: Callable[..., Server],
    engine: Callable[..., VllmEngine],
    tmp_path: Path,
    fault: str,
    enough: float,
    cause: str | None,
) -> None:
    """The first adapter of a run does nothing: a server that leaves it out gives the same numbers."""
    tried = [0.0]

    @contextmanager
    def noisy(noise: float) -> Iterator[None]:
        tried.append(noise)
        yield
        tried.append(0.0)

    def score(_: Request, ids: list[int]) -> list[float]:
        shows = tried[-1] > (enough if ids == [5, 6] else 10 * enough)  # of what the server draws only more does
        return [-2.0 if shows else -1.0] * len(ids)

    ours = engine(serve(fault), add_noise=noisy, score=score)
    if cause is not None:
        with pytest.raises(StoppedOnFinding, match=cause) as stopped:
            ours.publish(0)
        assert stopped.value.finding.code == "SF805"
        return
    ours.publish(0)
    assert max(tried) == 4.0, "the least noise that shows in both"
    count = len(tried)
    ours.publish(1)
    assert len(tried) == count, "once is enough"
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["policy-00000001"]


@pytest.mark.long
def test_a_server_that_tells_logprobs_of_what_is_left_is_a_finding(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine]
) -> None:
    cut = replace(SAMPLING, top_p=0.9)
    engine(serve(), sampling=cut).publish(0)
    with pytest.raises(StoppedOnFinding, match="--logprobs-mode raw_logprobs") as stopped:
        engine(serve(probe=[0.0] * 24), sampling=cut, score=lambda _, ids: [-0.001] * len(ids)).publish(0)
    assert stopped.value.finding.code == "SF805"
    engine(serve(probe=[0.0] * 24), score=lambda _, ids: [-0.001] * len(ids)).publish(0)  # it is sure, and all count


def test_a_policy_that_did_not_work_is_not_taken_for_published(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine]
) -> None:
    ours = engine(serve(probe=[-9.0] * 24))
    for _ in range(2):
        with pytest.raises(StoppedOnFinding) as stopped:
            ours.publish(0)
        assert stopped.value.finding.evidence["mean_difference"] > 1


def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text("#!/bin/sh\necho no such model >&2\nexit 7\n")
    script.chmod(0o755)
    server = start_server(str(script), tmp_path, [], dict(os.environ), tmp_path / "log", "run.yaml:9")
    with pytest.raises(ServerFailed, match="server .*status 7 "):
        server.wait_until_ready(30, print)
    assert "no such model" in server.evidence()["end_of_log"]
    with pytest.raises(ConfigError, match="vllm_command: /nowhere/vllm .*run.yaml:9"):
        start_server("/nowhere/vllm", tmp_path, [], {}, tmp_path / "log", "run.yaml:9")


def test_a_server_and_its_workers_end_with_the_run(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text("#!/bin/sh\nsleep 600 &\necho $! > " + str(tmp_path / "worker") + "\nsleep 600\n")
    script.chmod(0o755)
    server = start_server(str(script), tmp_path, [], dict(os.environ), tmp_path / "log", "run.yaml:9")
    deadline = time.monotonic() + 10
    while not (tmp_path / "worker").exists() or not (tmp_path / "worker").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    worker = psutil.Process(int((tmp_path / "worker").read_text()))
    server.end()
    assert server._process is not None
    assert server._process.poll() is not None
    psutil.wait_procs([worker], timeout=10)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_a_sync_gathers_what_is_trained_and_no_more(
    serve: Callable[..., Server], engine: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[int] = []

    def recorded(parameter: torch.Tensor) -> torch.Tensor:
        gathered.append(id(parameter))
        return gather_full(parameter)

    monkeypatch.setattr("surefoot.methods.rollout.engines.vllm_sync.gather_full", recorded)
    ours = engine(serve())
    ours.publish(0)
    trained = [id(one) for one in ours._sync._model.parameters() if one.requires_grad]  # type: ignore[attr-defined]
    assert sorted(gathered) == sorted(trained)


def test_each_rank_can_show_the_log_of_a_server_that_the_first_one_started(tmp_path: Path) -> None:
    class Second:
        def broadcast_from_rank0(self, _work: Any) -> str:
            return "http://127.0.0.1:9"

    given = {"model": "m", "dataset": "d", "output_dir": str(tmp_path), "method": "grpo", "reward_funcs": ["length"]}
    loaded = load_config(None, (), {**given, "rollout_engine": "vllm"})
    server = open_server(loaded, tmp_path, None, Second())  # type: ignore[arg-type]
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/vllm.log").write_text("Traceback: the engine is dead")
    assert server.evidence()["end_of_log"] == "Traceback: the engine is dead"
    theirs = load_config(None, (), {**given, "rollout_engine": "vllm", "vllm_server": "http://127.0.0.1:9"})
    assert "end_of_log" not in open_server(theirs, tmp_path, None, Second()).evidence()  # type: ignore[arg-type]
