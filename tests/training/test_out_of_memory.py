"""What a rank says when memory is refused to it."""

import re
import resource

import pytest
import torch

from surefoot.events import BatchDescribed, MemorySampled, Phase, PhaseBegan
from surefoot.findings import CATALOGUE
from surefoot.system import allocators
from surefoot.system.allocators import is_out_of_memory
from surefoot.training.out_of_memory import DeviceNow, MemoryWatch

GIB = 1 << 30
USUAL_FIX = CATALOGUE["SF209"].fix
REFUSED = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of ...")


def watch(*tokens: int, phase: Phase = "forward") -> MemoryWatch:
    found = MemoryWatch(3)
    for step, many in enumerate(tokens, 1):
        found.observe(BatchDescribed(3, step, many, many, 1, 0))
        found.observe(PhaseBegan(3, step, phase))
        if step == 1:
            found.observe(MemorySampled(3, 1, 7 * GIB, GIB, GIB, 2 * GIB, None))
    return found


def device(*, others: int = 0, unused: int = 0) -> DeviceNow:
    return DeviceNow(80 * GIB, GIB, (79 - others) * GIB, (79 - others - unused) * GIB)


def test_where_it_was_and_what_lies_there_is_told() -> None:
    finding = watch(100, 100, 120).finding(REFUSED, device())
    assert re.match("rank 3 .*GPU, .*forward .*step 3: .*2.50 GiB$", finding.cause)
    assert finding.evidence["frozen_gib"] == 7.0
    assert finding.evidence["in_tensors_gib"] == 79.0
    assert finding.fix == USUAL_FIX


def test_a_large_batch_is_named() -> None:
    finding = watch(100, 100, 900).finding(REFUSED, device())
    assert (finding.evidence["tokens_of_its_batch"], finding.evidence["usual_tokens"]) == (900, 100)
    assert re.search("900 tokens, .*100 ", finding.cause)
    assert "900" not in watch(900).finding(REFUSED, device()).cause


def test_others_and_pieces_are_named_with_their_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in allocators.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    shared = watch(100).finding(REFUSED, device(others=40))
    assert re.search("40.0 GiB .*outside PyTorch", shared.cause)
    assert shared.evidence["outside_gib"] == 40
    assert "outside" not in watch(100).finding(REFUSED, device(others=2)).cause
    assert re.match(f".*nvidia-smi.* {re.escape(USUAL_FIX)}$", shared.fix)
    pieces = watch(100).finding(REFUSED, device(unused=12))
    assert re.search("12.0 GiB .*unused", pieces.cause)
    assert pieces.evidence["kept_unused_gib"] == 12
    assert re.match(f".*PYTORCH_ALLOC_CONF=expandable_segments:True. {re.escape(USUAL_FIX)}$", pieces.fix)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert watch(100).finding(REFUSED, device(unused=12)).fix == USUAL_FIX
    assert "unused" not in watch(100).finding(REFUSED, device(unused=2)).cause  # 2 GiB in one piece would not do either
    in_rollout = watch(100, phase="rollout").finding(REFUSED, device())
    assert re.match(f".*rollout_batch_size.* {re.escape(USUAL_FIX)}$", in_rollout.fix)


def test_before_the_first_step_it_is_the_phase_that_is_named() -> None:
    started = MemoryWatch(0)
    started.observe(PhaseBegan(0, 0, "load"))
    finding = started.finding(REFUSED, None)
    assert (finding.evidence["phase"], finding.evidence["step"]) == ("load", 0)
    assert re.search("in load, .*first step", finding.cause)
    assert "free_gib" not in finding.evidence


def test_a_limit_of_the_address_space_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes.")
    assert "address space" not in watch(100).finding(refused, None).cause
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3 * GIB, 3 * GIB))
    finding = watch(100).finding(refused, None)
    assert re.search("64 bytes, .*3.0 GiB", finding.cause)
    assert re.match(f".*ulimit -v.* {re.escape(USUAL_FIX)}$", finding.fix)
    assert "ulimit" not in watch(100).finding(REFUSED, device()).fix


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call.",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error, NCCL version "
        "2.28.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    ],
)
def test_out_of_memory_is_known_in_the_words_of_every_library(text: str) -> None:
    error = RuntimeError(text)  # torch's AcceleratorError and DistBackendError are of this class
    assert is_out_of_memory(error)
    finding = watch(100).finding(error, device())
    assert (finding.code, finding.evidence["error"]) == ("SF209", text.splitlines()[0])


def test_only_what_the_allocators_say_is_that() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 50)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(REFUSED)
    of_another_allocator = "Allocation on device 5 would exceed allowed memory. (out of memory)"
    assert is_out_of_memory(torch.OutOfMemoryError(of_another_allocator))
    assert not is_out_of_memory(RuntimeError(of_another_allocator))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(MemoryError())
