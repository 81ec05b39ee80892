"""Quantised checkpoints are trained, exported and opened as transformers reads them back."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surefoot.errors import ModelError
from surefoot.models.build import build_model
from surefoot.models.checkpoint_weights import CheckpointWeights
from surefoot.models.lora import LoraSettings
from surefoot.models.resolve_model import weight_files
from tests.support.quantised import RELEASES, WEIGHTS, edit_config, edit_tensors, read_by_transformers, release

CPU = torch.device("cpu")
LORA = LoraSettings(rank=2, alpha=4, targets=("attention",))
TRAINED = [name for name, about in RELEASES.items() if about.kind != "gpt_oss"]
PROGRAM = Path(__file__).with_name("quantised_ranks.py")
BROKEN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("released")

    def get(name: str) -> Path:
        if name.startswith("int"):
            pytest.importorskip("compressed_tensors")
        return root / name if (root / name).exists() else release(name, root / name)

    return get


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert wanted.keys() <= found.keys()
    for name, value in wanted.items():
        if value.is_floating_point() and "correction_bias" not in name:
            assert found[name].dtype == dtype, name
        assert torch.equal(found[name].to(value.dtype), value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", TRAINED)
def test_training_begins_with_the_weights_that_transformers_reads(
    name: str, dtype: torch.dtype, released: Callable[[str], Path]
) -> None:
    folder = released(name)
    wanted = read_by_transformers(name, folder, dtype).state_dict()
    adapted = build_model(folder, lora=LORA, device=CPU, dtype=dtype).model
    assert_equal(adapted.state_dict(), wanted, dtype)
    assert not getattr(adapted.config, "quantization_config", None)
    whole = read_by_transformers(name, folder, torch.float32).state_dict()
    assert_equal(build_model(folder, lora=None, device=CPU, dtype=dtype).model.state_dict(), whole, torch.float32)


@pytest.mark.parametrize("name", RELEASES)
def test_parts_equal_those_of_the_whole(name: str, released: Callable[[str], Path]) -> None:
    folder = released(name)
    stored = CheckpointWeights(folder, torch.float32)
    for weight in filter(lambda weight: weight.is_quantised, stored.weights.values()):
        whole, rows = stored.read(weight.name), weight.shape[0]
        assert list(whole.shape) == stored.slices[weight.name].get_shape() == list(weight.shape)
        for begin, end in ((0, rows), (0, 1), (rows // 3, rows // 2 + 1), (rows - 1, rows), (0, 0)):
            part = stored.slices[weight.name][begin:end]
            assert torch.equal(part, whole[begin:end]) and part.is_contiguous()
            assert part.untyped_storage().nbytes() == part.nbytes
        assert torch.equal(stored.slices[weight.name][1:rows, 3:17], whole[1:rows, 3:17])
    assert any(weight.is_quantised for weight in stored.weights.values())


def test_experts_of_gpt_oss_are_read_as_transformers_reads_them(released: Callable[[str], Path]) -> None:
    folder = released("mxfp4")
    wanted = read_by_transformers("mxfp4", folder, torch.bfloat16).state_dict()
    stored = CheckpointWeights(folder)
    assert stored.weights.keys() == wanted.keys()
    assert_equal({name: stored.read(name) for name in stored.weights}, wanted, torch.bfloat16)


def test_blocks_may_reach_over_the_edge_of_a_weight(released: Callable[[str], Path], tmp_path: Path) -> None:
    """576 rows in blocks of 128, as DeepSeek-V3 has them."""
    numbers, scales = torch.randn(72, 48).to(torch.float8_e4m3fn), torch.rand(5, 3)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["new.weight"], tensors["new.weight_scale_inv"] = numbers, scales

    folder = edit_tensors(released("fp8"), tmp_path / "model", change)
    edit_config(folder, quantization_config={**RELEASES["fp8"].settings, "weight_block_size": [16, 16]})
    with pytest.raises(ModelError, match="does not fit"):
        CheckpointWeights(folder)  # the others are in blocks of 32
    keep = {"new.weight": numbers, "new.weight_scale_inv": scales}
    save_file(keep, folder / WEIGHTS)
    factors = scales.repeat_interleave(16, 0)[:72].repeat_interleave(16, 1)[:, :48]
    stored = CheckpointWeights(folder, torch.float32)
    assert torch.equal(stored.read("new.weight"), numbers.float() * factors)
    assert torch.equal(stored.slices["new.weight"][33:71], (numbers.float() * factors)[33:71])


def test_scales_may_be_in_another_file_than_their_weights(released: Callable[[str], Path], tmp_path: Path) -> None:
    folder = released("fp8-experts")
    wanted = CheckpointWeights(folder)

    def split(tensors: dict[str, Tensor]) -> None:
        places = {name: f"{'scale' in name}.safetensors" for name in tensors}
        index = {"metadata": {"total_size": 0}, "weight_map": places}
        (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
        for file in set(places.values()):
            save_file({name: tensors[name] for name in tensors if places[name] == file}, tmp_path / "model" / file)

    copy = edit_tensors(folder, tmp_path / "model", split)
    (copy / WEIGHTS).unlink()
    assert len(weight_files(copy)) == 2
    found = build_model(copy, lora=LORA, device=CPU, dtype=torch.bfloat16).model.state_dict()
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], wanted.read("model.layers.0.mlp.up_proj.weight"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tuning", "zero_stage", "expert_parallel"),
    [
        ("fp8", "lora", 3, 1), ("fp8-tensor", "full", 3, 1), ("int4", "full", 3, 1), ("int8", "lora", 3, 1),
        ("fp8-experts", "lora", 3, 2), ("fp8-experts", "full", 3, 1), ("fp8-experts", "full", 2, 2),
    ],
)  # fmt: skip
def test_two_ranks_begin_with_the_weights_of_one(
    name: str, tuning: str, zero_stage: int, expert_parallel: int, released: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = released(name)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), tuning, str(zero_stage), str(expert_parallel),
         str(tmp_path / "out.safetensors")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    dtype = torch.bfloat16 if tuning == "lora" else torch.float32
    wanted = dict(read_by_transformers(name, folder, dtype).named_parameters())
    assert_equal(load_file(tmp_path / "out.safetensors"), wanted, dtype)
