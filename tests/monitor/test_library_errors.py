"""Tests that errors of CUDA, NCCL and vLLM are read as causes: in a rank, in a server's log, and in any log."""

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import main
from surefoot.config import load_config
from surefoot.diagnostics.monitor.explain_log import explain_log
from surefoot.errors import StoppedOnFinding
from surefoot.findings.library_errors import ERRORS, find_library_error, find_library_errors
from surefoot.training import trainer

# One line of each known error, in the order of the table, as public reports show it.
LINES = (
    "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver",
    "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
    "RuntimeError: No CUDA GPUs are available",
    "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "torch.AcceleratorError: CUDA error: invalid device ordinal",
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda "
    "driver combination",
    "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env "
    "variable",
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.11 GiB",
    "torch.AcceleratorError: CUDA error: device-side assert triggered",
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use 'spawn'",
    "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has",
    "ImportError: /opt/lib/libtorch_cuda.so: undefined symbol: ncclCommWindowRegister",
    "ValueError: Free memory on device cuda:1 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 19.84 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    "ValueError: To serve at least one request with the models's max seq len (262144), (24.0 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (3.18 GiB). Based on the available memory",
    "Value error, User-specified max_model_len (65536) is greater than the derived max_model_len (max_position_embed",
    "ValueError: LoRA rank 64 is greater than max_lora_rank 16",
    "ValueError: Total number of attention heads (32) must be divisible by tensor parallel size (3).",
    "Value error, World size (2) is larger than the number of available GPUs (1) in this node.",
    "AssertionError: Expandable segments are not compatible with memory pool. Please track pytorch/pytorch#147851",
    "ValueError: Model architectures ['Qwen9ForCausalLM'] are not supported for now. Supported architectures: ",
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
    "misc/shmutils.cc:113 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-UbzKZ9 (size 9637888)",
    "bootstrap.cc:37 NCCL WARN Bootstrap : no socket interface found",
    "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
    "Call to ibv_modify_qp failed with error Connection timed out",
    "NET/IB : Got completion from peer 10.0.0.3<51004> with status=12 opcode=0 len=0 vendor err 129",
    "socketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host",
    "NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401",
    "NCCL WARN NCCL version mismatch: 2.26.2 and 2.27.3",
    "[c10d] The server socket has failed to listen on any local network address. port: 29500, code: -98, name: "
    "EADDRINUSE, message: address already in use",
    "RuntimeError: received 0 items of ancdata",
    "socketStartConnect: Connect to 10.1.0.7<47333> failed : Connection refused",
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=1) ran",
    "NCCL WARN socketProgress: Connection closed by remote peer node2<42830>",
    "  exitcode  : -9 (pid: 3710366)",
)


@pytest.mark.parametrize(
    ("number", "line"), list(enumerate(LINES)), ids=[error.pattern.pattern[:40] for error in ERRORS]
)
def test_known_line(number: int, line: str) -> None:
    """Each line is read by its own entry of the table, and by no other."""
    assert [order for order, error in enumerate(ERRORS) if error.as_finding(line)] == [number]


def test_numbers_of_an_error() -> None:
    error = find_library_errors([LINES[19]], "vllm.log")[0]
    assert error.code == "SF113"
    assert all(number in error.cause for number in ("262144", "24.0 GiB", "3.18 GiB"))
    assert error.evidence["line"] == "vllm.log:1"


def test_ordinary_lines() -> None:
    """Lines of healthy runs, and errors of other kinds, are no known errors."""
    lines = [
        "step 40/100 loss 1.234 lr 2e-5 grad_norm 0.7 | 12,345 tok/s",
        "NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
        "NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0",
        "ValueError: expected a list of 98 numbers",
        "INFO 11-20 10:00:00 GPU KV cache size: 262,144 tokens, Maximum concurrency 8.00x",
        "WARNING Your GPU does not have native support for FP4",
        "exitcode : 1 (pid: 1203)",
    ]
    assert find_library_errors(lines) == []


def test_consequences_stand_last(tmp_path: Path) -> None:
    """The loss of a connection comes first in the log, and last in the explanation. Exceptions are no consequences."""
    log = tmp_path / "train.log"
    log.write_text(f"\x1b[31m{LINES[39]}\x1b[0m\nstep 3\n{LINES[26]}\n{LINES[26]}\n", encoding="utf-8")
    explanation = explain_log(log)
    assert [finding.code for finding in explanation.findings] == ["SF113", "SF101"]
    assert [finding.evidence["line"] for finding in explanation.findings] == [f"{log}:3", f"{log}:1"]
    assert explanation.num_lines == 4
    assert find_library_error(LINES[39]) is None


def test_log_without_known_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(b"step 1\nKeyError: 'messages'\nbytes \xff\xfe\nTraceback (most recent call last):\n")
    assert main(["explain", str(log), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["findings"] == []
    assert answer["num_lines"] == 4
    assert answer["last_error"] == f"{log}:2: KeyError: 'messages'"


def test_error_of_a_step(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """An error of CUDA that names its cause ends the run with a finding, which its folder keeps."""
    loaded = load_config(None, (), settings)

    def fail(*_: Any) -> None:
        raise RuntimeError(LINES[13])

    monkeypatch.setattr(trainer, "fit", fail)
    with pytest.raises(StoppedOnFinding) as raised:
        trainer.train(loaded, screen=False)
    assert raised.value.finding.code == "SF113"
    assert raised.value.finding.evidence["error"] == LINES[13]
    summary = json.loads((loaded.run.run_folder / "summary.json").read_text("utf-8"))
    assert summary["status"] == "failed"
    assert [finding["code"] for finding in summary["findings"]] == ["SF113"]


def test_error_while_ranks_are_connected(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"NCCL error in: NCCLUtils.cpp:94\nncclInvalidUsage: invalid usage\nLast error:\n{LINES[26]}"
        )

    monkeypatch.setattr(trainer, "init_distributed", fail)
    with pytest.raises(StoppedOnFinding) as raised:
        trainer.train(load_config(None, (), settings), screen=False)
    assert raised.value.finding.evidence["error"] == LINES[26]


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """An error whose cause is not known, or that another rank caused, keeps its class and its traceback."""
    loaded = load_config(None, (), settings)
    for text in ("index 3 is out of bounds", LINES[39]):

        def fail(*_: Any, text: str = text) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(trainer, "fit", fail)
        with pytest.raises(RuntimeError, match="out of bounds|remote peer"):
            trainer.train(loaded, screen=False)
