"""What a GPU's kernels can compute is chosen right, and given to them as they take it; without a GPU, by a stand-in."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.config import load_config
from surefoot.config.resolve import resolve
from surefoot.models import attention, build, experts, grouped_gemm, triton_grouped_gemm, varlen_attention
from surefoot.models.attention_math import AttentionTerms, attend
from surefoot.models.sample_layout import SampleLayout, samples_are
from surefoot.models.sample_masks import SampleMask
from tests.models.architectures import tiny_model
from tests.support.cuda_branches import flash_attention_2, multiply, multiply_pairs

LENGTHS = [9, 1, 14]
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "widths", "kernel"),
    [
        ((9, 0), (2048, 1408), "torch"),
        ((10, 0), (2048, 1408), "torch"),
        ((8, 0), (2048, 1408), "triton"),
        ((8, 9), (2048, 1408), "triton"),
        ((12, 0), (2048, 1408), "triton"),
        ((9, 0), (2048, 36), "triton"),
        ((7, 5), (2048, 1408), None),
    ],
)
def test_grouped_products_have_one_kernel_on_every_gpu_with_bfloat16(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], widths: tuple[int, ...], kernel: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(grouped_gemm, "find_triton_failure", lambda _: None)
    assert grouped_gemm.select_kernel(CUDA, torch.bfloat16, widths) == kernel
    assert grouped_gemm.select_kernel(CUDA, torch.float32, widths) is None
    assert grouped_gemm.select_kernel(torch.device("cpu"), torch.bfloat16, widths) is None


@pytest.mark.parametrize(("capability", "has_notice"), [((8, 0), True), ((9, 0), False), ((7, 5), False)])
def test_where_triton_does_not_run_groups_are_multiplied_one_by_one_and_the_run_says_so(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_notice: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for module in (grouped_gemm, experts):
        monkeypatch.setattr(module, "find_triton_failure", lambda _: "RuntimeError: Failed to find C compiler.")
    assert grouped_gemm.select_kernel(CUDA, torch.bfloat16, (64, 64)) == (None if capability[0] < 9 else "torch")
    model = tiny_model("qwen3_moe")
    notice = experts.describe_missing_kernel(model, CUDA, torch.bfloat16)
    assert (notice is not None and "Failed to find C compiler" in notice) == has_notice
    assert experts.describe_missing_kernel(model, CUDA, torch.float32) is None


def test_triton_is_tried_before_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    find = grouped_gemm.find_triton_failure.__wrapped__  # without its cache
    device = torch.device("cpu")

    def refuse(*_: object) -> Tensor:
        raise RuntimeError("Failed to find C compiler.")

    def fill_up(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(triton_grouped_gemm, "multiply", multiply)
    monkeypatch.setattr(triton_grouped_gemm, "multiply_pairs", multiply_pairs)
    assert find(device) is None
    monkeypatch.setattr(triton_grouped_gemm, "multiply", lambda *_: torch.zeros(1))
    assert "sum up to 64.0, not 72" in find(device)
    monkeypatch.setattr(triton_grouped_gemm, "multiply", refuse)
    assert find(device) == "RuntimeError: Failed to find C compiler."
    monkeypatch.setattr(triton_grouped_gemm, "multiply", fill_up)
    with pytest.raises(torch.OutOfMemoryError):
        find(device)


@pytest.mark.parametrize("shares_heads", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (36, 36), (192, 128), (24, 40), (5, 3)])
def test_heads_of_any_size_are_given_to_the_kernel_as_it_takes_them(
    monkeypatch: pytest.MonkeyPatch, size: int, value_size: int, window: int | None, shares_heads: bool
) -> None:
    monkeypatch.setattr(varlen_attention, "varlen_attn", flash_attention_2)
    monkeypatch.setattr(attention, "has_kernel", lambda *_: True)
    monkeypatch.setattr(varlen_attention, "SHARES_HEADS", shares_heads)
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    query, key, value = (
        torch.randn(1, heads, tokens, width) for heads, width in ((4, size), (2, size), (2, value_size))
    )
    samples = SampleLayout.of(LENGTHS)
    with samples_are(samples):
        found, _ = attention.packed_attention(nn.Module(), query, key, value, SampleMask(window=window))
    mask = SampleMask(window=window)
    wanted = [
        attend(query[:, :, span], key[:, :, span], value[:, :, span], mask.allowed(length, CPU), AttentionTerms())
        for span, length in zip(samples.spans, LENGTHS, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(wanted, dim=2).transpose(1, 2), atol=1e-5, rtol=1e-4)


CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 4])
def test_completions_read_their_prompt_in_one_kernel(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    torch.manual_seed(0)
    lengths, prefixes = [5, 3, 6, 4, 2, 7], (-1, 0, 0, -1, 3, -1)
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    samples = SampleLayout(lengths, ends, prefix_of=prefixes)
    states = [torch.randn(1, heads, sum(lengths), 16, requires_grad=True) for heads in (4, 2, 2)]
    mask, upstream = SampleMask(window=window), torch.randn(1, sum(lengths), 4, 16)
    found = []
    for kernel in (False, True):
        monkeypatch.setattr(varlen_attention, "varlen_attn", flash_attention_2)
        monkeypatch.setattr(attention, "has_kernel", lambda *_, kernel=kernel: kernel)
        with samples_are(samples):
            out, _ = attention.packed_attention(nn.Module(), *states, mask)
        found.append([out, *torch.autograd.grad(out, states, upstream)])
    for plain, by_kernel in zip(*found, strict=True):
        torch.testing.assert_close(by_kernel, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("aligns", [True, False])
def test_a_kernel_is_tried_before_it_reads_shared_prompts(monkeypatch: pytest.MonkeyPatch, aligns: bool) -> None:
    def align_at_the_beginning(*arguments: Any, **options: Any) -> Tensor:
        query, key, value, ends, _, longest, _ = arguments
        shown = int(ends[-1])
        return flash_attention_2(query, key[:shown], value[:shown], ends, ends, longest, longest, **options)

    monkeypatch.setattr(varlen_attention, "varlen_attn", flash_attention_2 if aligns else align_at_the_beginning)
    assert varlen_attention.aligns_ends.__wrapped__(CPU) == aligns


@pytest.mark.parametrize(
    ("capability", "size", "dtype", "has_kernel"),
    [
        ((9, 0), 128, torch.bfloat16, True),
        ((8, 0), 256, torch.float16, True),
        ((9, 0), 512, torch.bfloat16, False),
        ((9, 0), 128, torch.float32, False),
        ((7, 5), 128, torch.float16, False),
    ],
)
def test_attention_of_sizes_and_devices_without_a_kernel_is_computed_sample_by_sample(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], size: int, dtype: torch.dtype, has_kernel: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    heads = torch.empty(1, 2, 3, size, dtype=dtype)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    assert varlen_attention.has_kernel(heads, heads) == has_kernel


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_runs_compute_in_bfloat16_where_a_gpu_has_it(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], capability: tuple[int, int], dtype: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    loaded = load_config(None, [], {**settings, "device": "auto", "dtype": "auto"})
    assert resolve(loaded, 1).run.dtype == dtype
    asked = load_config(None, [], {**settings, "device": "auto", "dtype": "bfloat16"})
    assert resolve(asked, 1).run.dtype == "bfloat16"


def test_attention_of_cudnn_is_left_out() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        build._choose_gpu_kernels(nn.Linear(2, 2))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(
    ("variables", "is_refused"),
    [({}, True), ({"CUDA_VISIBLE_DEVICES": "7"}, True), ({"CUDA_VISIBLE_DEVICES": ""}, False)],
    ids=["all", "none of them", "hidden"],
)
def test_a_run_that_leaves_the_device_open_does_not_ignore_gpus(
    nvml_driver: dict[str, str], settings: dict[str, Any], variables: dict[str, str], is_refused: bool
) -> None:
    code = (
        "import json, sys; from surefoot.config import load_config; from surefoot.config.resolve import device_type\n"
        "print(device_type(load_config(None, [], {**json.loads(sys.argv[1]), 'device': 'auto'})))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(settings)], env={**environment, **nvml_driver, **variables},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if is_refused:
        error = done.stderr.splitlines()[-1]
        assert error.startswith("surefoot.errors.ConfigError: device: auto "), done.stderr
        assert re.search(r" 2 x NVIDIA H100 80GB HBM3\..* device: cpu \(", error)
        assert ("CUDA_VISIBLE_DEVICES=7" in error) == bool(variables)
    else:
        assert done.stdout == "cpu\n", done.stderr
