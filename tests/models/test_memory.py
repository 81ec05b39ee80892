"""What up-cycling and loading hold in memory, measured in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

MEASURE = r"""
import json, re, sys
from pathlib import Path
import torch
from surefoot.models.build import build_model
from surefoot.models.lora import LoraSettings
from surefoot.models.upcycle import upcycle

def resident(name):
    return int(re.search(name + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def begin():
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    return resident("VmRSS")

dense, target = sys.argv[1:]
before = begin()
upcycle(dense, target, num_experts=8)
upcycled = resident("VmHWM") - before
before = begin()
model = build_model(Path(target), lora=LoraSettings(rank=2, alpha=4, targets=("experts",)),
                    device=torch.device("cpu"), dtype=torch.float32).model
held = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps({"upcycle": upcycled, "load": resident("VmHWM") - before, "held": held}))
"""


@pytest.mark.slow
def test_upcycling_and_fusing_experts_hold_one_layer_extra_at_most(tmp_path: Path) -> None:
    layers = 8
    config = LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=2048, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "dense"), str(tmp_path / "moe")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    bytes_of = json.loads(done.stdout)
    a_layer = bytes_of["held"] / layers
    assert bytes_of["upcycle"] < 2 * a_layer  # the layer that is written, and what it is made of
    assert bytes_of["load"] < bytes_of["held"] + a_layer
