"""What up-cycling and loading hold in memory, measured in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.quantised import release

pytestmark = pytest.mark.long

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


@pytest.mark.matrix
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


BESIDE_BYTES = 12 << 20
"""Upper bound of what building a model of a few modules takes besides its weights."""
QUANTISED = r"""
import gc, json, re, sys
from pathlib import Path
import torch
from surefoot.models.build import build_model
from surefoot.models.checkpoint_weights import CheckpointWeights
from surefoot.models.lora import LoraSettings

def resident(name):
    return int(re.search(name + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def load(folder):
    lora = LoraSettings(rank=2, alpha=4, targets=("attention",))
    options = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "for_packed_rows": False}  # forwards take more
    model = build_model(folder, lora=lora, **options).model
    return list(model.parameters())

def read(folder):
    stored = CheckpointWeights(folder)
    return [stored.read(name) for name, weight in stored.weights.items() if weight.is_quantised]

run = {"load": load, "read": read}[sys.argv[2]]
run(Path(sys.argv[1]))  # the allocator keeps some of what it has for the second time
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
held = run(Path(sys.argv[1]))
sizes = [tensor.nbytes for tensor in held]
print(json.dumps({"peak": resident("VmHWM") - before, "held": sum(sizes), "largest": max(sizes)}))
"""


@pytest.mark.parametrize(
    ("name", "sizes", "how"),
    [
        pytest.param(
            "fp8",
            {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 1},
            "load",
            marks=pytest.mark.matrix,
        ),
        ("fp8-experts", {"hidden_size": 1024, "moe_intermediate_size": 4608}, "load"),
        pytest.param(
            "int4",
            {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 1},
            "load",
            marks=pytest.mark.matrix,
        ),
        ("mxfp4", {"hidden_size": 1024, "intermediate_size": 1024}, "read"),
    ],
)
def test_reading_quantised_weights_holds_one_tensor_extra_at_most(
    name: str, sizes: dict[str, int], how: str, tmp_path: Path
) -> None:
    """Each expert is above 4 MiB, so that its memory is returned when it is freed: smaller ones fragment the heap."""
    if name.startswith("int"):
        pytest.importorskip("compressed_tensors")
    folder = release(name, tmp_path / "model", **sizes)
    done = subprocess.run(
        [sys.executable, "-c", QUANTISED, str(folder), how],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["largest"] > BESIDE_BYTES
    assert found["peak"] < found["held"] + found["largest"] + BESIDE_BYTES
