"""Runs of several ranks: models whose experts divide in many ways, and processes shared between the cases."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from tests.support.data import counting_rows, write_jsonl
from tests.support.models import SIZES, make_model
from tests.support.vision import KINDS, make_processor, make_vision_model, picture_rows, vision_tokenizer

WORKER = Path(__file__).with_name("worker.py")
Jobs = Mapping[str, dict[str, Any]]


@pytest.fixture(scope="session")
def parallel_model(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> Callable[[str], Path]:
    """kind -> a folder. `llama`, `mixtral` and `qwen2_moe` (8 experts); `few` has 6; `wide` has tensors of
    millions of elements; `one_expert` routes all to one; and those that read images.
    """
    root = tmp_path_factory.mktemp("parallel_models")

    def folder(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            own = vision_tokenizer() if kind in KINDS else tokenizer
            if kind in KINDS:
                model = make_vision_model(kind, own)
                make_processor(kind).save_pretrained(path)
            elif kind == "few":
                model = make_model("qwen2_moe", num_experts=6)
            elif kind == "wide":
                torch.manual_seed(7)
                wide = {**SIZES, "intermediate_size": 4096}
                model = MixtralForCausalLM(MixtralConfig(**wide, num_local_experts=8, num_experts_per_tok=2))
            elif kind == "one_expert":
                model = make_model("mixtral", num_experts=8, top_k=1)
                with torch.no_grad():
                    for layer in model.model.layers:
                        layer.mlp.gate.weight.zero_()  # all experts are equally good: the same one is always chosen
            else:
                model = make_model(kind, num_experts=8)
            model.save_pretrained(path)
            own.save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="session")
def picture_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few rows with pictures among rows of text, so that often only some ranks have one."""
    folder = tmp_path_factory.mktemp("picture_data")
    return write_jsonl(folder / "train.jsonl", [*picture_rows(folder), *counting_rows(28)])


@pytest.fixture(scope="session")
def parallel_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("parallel_data") / "train.jsonl", counting_rows(40))


@pytest.fixture(scope="session")
def run_on(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Sequence[dict[str, Any]]], None]:
    """Run jobs one after the other on so many ranks, in processes that are started once for all of them."""
    folder = tmp_path_factory.mktemp("jobs")

    def run(num_ranks: int, jobs: Sequence[dict[str, Any]]) -> None:
        file = folder / f"{len(list(folder.iterdir()))}.json"
        file.write_text(json.dumps(jobs))
        done = subprocess.run(
            [sys.executable, str(WORKER), str(file), str(num_ranks)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60 + 15 * num_ranks + 12 * len(jobs),
        )
        assert done.returncode == 0, f"{done.stderr[:6000]}\n...\n{done.stderr[-6000:]}"  # the cause comes first

    return run
