"""Small real models, a real tokenizer and small data, made once per session."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # a forgotten download fails at once
os.environ["SUREFOOT_SUPERVISED"] = "by no one"  # one more process for each run would double the time of many tests

import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from surefoot.storage import cache_folder

VOCAB_SIZE = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen1.5's ChatML with its default system prompt."""


def make_model(kind: str, num_experts: int = 6, top_k: int = 2) -> PreTrainedModel:
    torch.manual_seed(7)
    moe = {**MOE, "num_experts": num_experts, "num_experts_per_tok": top_k}
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=num_experts, num_experts_per_tok=top_k))
    if kind == "qwen2_moe":
        return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **moe, shared_expert_intermediate_size=40))
    if kind == "qwen3_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **moe, head_dim=8))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES))
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["system user assistant You are a helpful assistant. Count one two three four."], trainer
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHATML
    return fast


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of their own for the tests' data; models that were fetched stay where they are."""
    folder, models = tmp_path_factory.mktemp("cache"), cache_folder() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to(models.resolve())
    before = os.environ.get("SUREFOOT_CACHE")
    os.environ["SUREFOOT_CACHE"] = str(folder)
    yield folder
    os.environ.pop("SUREFOOT_CACHE")
    if before is not None:
        os.environ["SUREFOOT_CACHE"] = before


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Callable[[str], Path]:
    """kind -> a folder with a tiny random model of that kind and a tokenizer."""
    root = tmp_path_factory.mktemp("models")

    def folder(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            make_model(kind).save_pretrained(path)
            tokenizer.save_pretrained(path)
        return path

    return folder


def training_process(supervisor: int) -> psutil.Process:
    """The process that trains, or starts the ranks, of `surefoot train`."""
    (job,) = psutil.Process(supervisor).children()
    return job


def counting_rows(count: int) -> list[dict[str, Any]]:
    """Conversations of varied lengths."""
    words = "one two three four five six seven eight nine ten".split()
    return [
        {
            "messages": [
                {"role": "user", "content": f"Count from {i % 7} in {1 + i % 9} steps"},
                {"role": "assistant", "content": " ".join(words[(i + k) % 10] for k in range(1 + i % 9))},
            ]
        }
        for i in range(count)
    ]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "train.jsonl", counting_rows(40))


@pytest.fixture
def settings(model_folder: Callable[[str], Path], data_file: Path, tmp_path: Path) -> dict[str, Any]:
    """A complete small run on the CPU."""
    return {
        "model": str(model_folder("qwen2_moe")),
        "dataset": str(data_file),
        "output_dir": str(tmp_path / "run"),
        "max_length": 128,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lora_rank": 4,
        "device": "cpu",
        "report": False,
    }


def surefoot(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None, timeout_s: float = 120
) -> Any:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "surefoot", *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture(scope="session")
def nvml_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which NVIDIA's bindings find a library that answers like NVML of two cards."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True, timeout=60)
    return {"LD_LIBRARY_PATH": str(folder)}
