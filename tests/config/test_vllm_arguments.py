"""How arguments of a server are read that a user writes in any of its spellings."""

import pytest

from surefoot.config import load_config
from surefoot.config.vllm_args import (
    MEMORY_SHARE,
    TENSOR_PARALLEL,
    USUAL_SHARE,
    memory_share,
    tensor_parallel,
    without,
)
from surefoot.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "share", "size"),
    [
        ([], USUAL_SHARE, 1),
        (["--gpu-memory-utilization", "0.5", "-tp", "4"], 0.5, 4),
        (["--gpu_memory_utilization=0.5", "--tensor-parallel-size=2"], 0.5, 2),
        (["--gpu-memory-utilization", "0.5", "--enforce-eager", "--gpu-memory-utilization=0.3"], 0.3, 1),
    ],
)
def test_both_spellings_are_read(arguments: list[str], share: float, size: int) -> None:
    assert (memory_share(arguments), tensor_parallel(arguments)) == (share, size)


def test_an_argument_is_taken_out_with_its_value() -> None:
    given = ["--enforce-eager", "-tp", "4", "--gpu_memory_utilization=0.5", "--max-num-seqs", "8"]
    assert without(given, TENSOR_PARALLEL) == ["--enforce-eager", "--gpu_memory_utilization=0.5", "--max-num-seqs", "8"]
    assert without(given, MEMORY_SHARE) == ["--enforce-eager", "-tp", "4", "--max-num-seqs", "8"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gpu-memory-utilization", "1.7"],
        ["--gpu-memory-utilization=abc"],
        ["--gpu-memory-utilization", "0"],
        ["--tensor-parallel-size", "0"],
        ["-tp", "two"],
        ["--max-model-len", "plenty"],
        ["--max_model_len=600"],
        ["--host", "0.0.0.0"],
        ["--logprobs-mode=raw_logprobs"],
        ["--served-model-name", "mine"],
        ["--max-lora-rank=4"],
        ["--no-enable-lora"],
        ["--config", "server.yaml"],
        ["--max-model-len", "0.5k"],
    ],
)
def test_nonsense_is_refused(arguments: list[str]) -> None:
    grpo = {"method": "grpo", "reward_funcs": ["length"], "rollout_engine": "vllm", "vllm_args": arguments}
    with pytest.raises(ConfigError, match=r"vllm_args: --"):
        load_config(None, (), {"model": "m", "dataset": "d.jsonl", "output_dir": "o", **grpo})


@pytest.mark.parametrize("most", ["1024", "-1", "auto", "16k", "25.6k", "1M"])
def test_a_context_with_room_is_the_users_to_set(most: str) -> None:
    lengths = {"max_prompt_length": 512, "max_completion_length": 512}
    grpo = {"method": "grpo", "reward_funcs": ["length"], "rollout_engine": "vllm", **lengths}
    given = {"model": "m", "dataset": "d.jsonl", "output_dir": "o", **grpo}
    assert load_config(None, (), given | {"vllm_args": ["--max-model-len", most]}).run.vllm_args
    with pytest.raises(ConfigError, match="vllm_args: --max-model-len 1023 .* 512 .* 512"):
        load_config(None, (), given | {"vllm_args": ["--max-model-len", "1023"]})
