"""Quantised checkpoints are trained, exported and opened as transformers reads them back."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surefoot.errors import ModelError
from surefoot.models.build import build_model
from surefoot.models.checkpoint_weights import CheckpointWeights
from surefoot.models.lora import LoraSettings
from surefoot.models.model_size import weights_of
from surefoot.models.resolve_model import weight_files
from tests.support.processes import run_program
from tests.support.quantised import (
    RELEASES,
    WEIGHTS,
    edit_config,
    edit_tensors,
    read_by_transformers,
    split_scales,
)

CPU = torch.device("cpu")
LORA = LoraSettings(rank=2, alpha=4, targets=("attention",))
TRAINED = [name for name, about in RELEASES.items() if about.kind != "gpt_oss"]
PROGRAM = Path(__file__).with_name("loaded_ranks.py")
BROKEN = "model.layers.1.mlp.down_proj.weight"


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert wanted.keys() <= found.keys()
    for name, value in wanted.items():
        if value.is_floating_point() and "correction_bias" not in name:
            assert found[name].dtype == dtype, name
        assert torch.equal(found[name].to(value.dtype), value), name


@pytest.mark.parametrize("has_scales", [True, False])
@pytest.mark.parametrize("name", RELEASES)
def test_quantised_weights_without_their_settings_are_named(
    name: str, has_scales: bool, released: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(released(name), tmp_path / "copy")
    if not has_scales:
        for path in folder.glob("*.safetensors"):
            save_file({key: value for key, value in load_file(path).items() if "_scale" not in key}, path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantization_config"):
        build_model(folder, lora=LORA, device=CPU, dtype=torch.float32)
    with pytest.raises(ModelError, match="quantization_config"):  # the doctor's checks
        weights_of(folder)


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
            assert torch.equal(part, whole[begin:end])
            assert part.is_contiguous()
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
    copy = split_scales(folder, tmp_path / "model")
    assert len(weight_files(copy)) == 2
    found = build_model(copy, lora=LORA, device=CPU, dtype=torch.bfloat16).model.state_dict()
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], wanted.read("model.layers.0.mlp.up_proj.weight"))


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: value})


def as_bfloat16(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name].to(torch.bfloat16)})


def drop_column(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()})


def set_first(name: str, value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[name].view(-1)[:1].fill_(value)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("fp8", drop(f"{BROKEN}_scale_inv"), "scales .* are missing"),
        ("fp8", drop(BROKEN), "no tensor holds the numbers"),
        ("fp8", put(f"{BROKEN}_scale_inv", torch.ones(2, 2)), r"shape \[2, 2\], which does not fit"),
        ("fp8", put(f"{BROKEN}_scale_inv", torch.ones(())), "does not fit"),
        ("fp8", put(f"{BROKEN}_scale_inv", torch.ones(3, 2)), "does not fit"),
        ("fp8", set_first(f"{BROKEN}_scale_inv", torch.nan), "1 of its 6 scales are not finite"),
        ("fp8", set_first(f"{BROKEN}_scale_inv", torch.inf), "1 of its 6 scales are not finite"),
        ("fp8", set_first(f"{BROKEN}_scale_inv", 0), "a scale is 0"),
        ("fp8", as_bfloat16(BROKEN), "stored as BF16, which is not quantised"),
        ("fp8-tensor", put(f"{BROKEN}_scale_inv", torch.ones(2, 2)), "does not fit"),
        ("fp8-tensor", put(f"{BROKEN}_scale_inv", torch.tensor(torch.nan)), "not finite"),
        ("int4", drop(f"{BROKEN}_scale"), "scales .* are missing"),
        ("int4", drop(f"{BROKEN}_shape"), "weight_shape"),
        ("int4", put(f"{BROKEN}_shape", torch.tensor([-1, 5])), "two sizes"),
        ("int4", put(f"{BROKEN}_scale", torch.ones(64, 1, dtype=torch.bfloat16)), "does not fit"),
        ("int4", drop_column(f"{BROKEN}_packed"), "4 bits for each of"),
        ("int4", set_first(f"{BROKEN}_scale", torch.nan), "not finite"),
        ("int4", set_first(f"{BROKEN}_scale", 0), "a scale is 0"),
        ("int8", put(f"{BROKEN}_scale", torch.ones(32, 1, dtype=torch.bfloat16)), "does not fit"),
        ("int8", drop(f"{BROKEN}_scale"), "scales .* are missing"),
        ("int8", put(f"{BROKEN}_zero_point", torch.zeros(32, 1, dtype=torch.int8)), r"zero_point has shape \[32, 1\]"),
        ("int4", put(f"{BROKEN}_g_idx", torch.arange(64).flip(0).int() // 16), "the order of their activations"),
    ],
)
def test_broken_scales_are_refused_with_their_tensor_and_file(
    name: str,
    change: Callable[[dict[str, Tensor]], object],
    named: str,
    released: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = edit_tensors(released(name), tmp_path / "model", change)
    with pytest.raises(ModelError, match=named) as refused:
        build_model(folder, lora=LORA, device=CPU, dtype=torch.bfloat16)
    assert f"{folder / WEIGHTS}: {BROKEN.removesuffix('.weight')}" in str(refused.value)


def test_broken_blocks_of_experts_are_refused(released: Callable[[str], Path], tmp_path: Path) -> None:
    stack = "model.layers.0.mlp.experts.down_proj"
    changes = {
        "missing": drop(f"{stack}_scales"),
        "does not fit": put(f"{stack}_scales", torch.zeros(4, 64, 2, dtype=torch.uint8)),
        "dimensions": put(f"{stack}_blocks", torch.zeros(4, 64, 48, dtype=torch.uint8)),
        "not finite": set_first(f"{stack}_scales", 255),
    }
    for number, (named, change) in enumerate(changes.items()):
        folder = edit_tensors(released("mxfp4"), tmp_path / str(number), change)
        with pytest.raises(ModelError, match=named) as refused:
            CheckpointWeights(folder).read(stack)
        assert f"{folder / WEIGHTS}: {stack}_" in str(refused.value)


def test_a_block_of_zeros_may_have_the_scale_zero(released: Callable[[str], Path], tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{BROKEN}_scale_inv"][0, 0] = 0
        tensors[BROKEN][:32, :32] = 0

    def change_row(tensors: dict[str, Tensor]) -> None:
        tensors[f"{BROKEN}_scale"][0] = 0
        tensors[BROKEN][0] = 0

    folder = edit_tensors(released("fp8"), tmp_path / "fp8", change)
    assert CheckpointWeights(folder).read(BROKEN)[:32, :32].count_nonzero() == 0
    folder = edit_tensors(released("int8"), tmp_path / "int8", change_row)
    assert CheckpointWeights(folder).read(BROKEN)[0].count_nonzero() == 0


@pytest.mark.parametrize(
    ("stored", "args", "grid"),
    [
        ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}, (96, 4)),
        ("pack-quantized", {"num_bits": 3, "type": "int", "strategy": "channel"}, (96, 1)),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 32]}, (2, 2)),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, (1,)),
        ("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}, (96, 2)),
        ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, (96, 2)),
        (
            "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            (96, 4),
        ),
    ],
)  # fmt: skip
def test_rows_of_every_scheme_equal_those_of_the_package(
    stored: str, args: dict[str, object], grid: tuple[int, ...], released: Callable[[str], Path], tmp_path: Path
) -> None:
    """Zero points are packed by column, and blocks hold several rows."""
    folder = edit_tensors(released("int4"), tmp_path / "model", lambda _: None)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    is_packed = stored == "pack-quantized"
    settings = {"targets": ["Linear"], "weights": {**args, "symmetric": not is_packed}}
    state = {"weight": torch.randn(96, 64), "weight_scale": torch.rand(grid) / 4 + 0.05}
    if stored.startswith("mxfp"):  # its scales are powers of two
        state["weight_scale"] = state["weight_scale"].log2().round().exp2()
    if stored.startswith("nvfp4"):
        state["weight_scale"], state["weight_global_scale"] = state["weight_scale"] * 300, torch.tensor([300.0])
    if is_packed:
        state["weight_zero_point"] = torch.randint(-3, 3, grid, dtype=torch.int8)
    compressor, scheme = BaseCompressor.get_value_from_registry(stored), QuantizationScheme(**settings)
    tensors = compressor.compress(state, scheme)
    save_file({f"new.{name}": value.contiguous() for name, value in tensors.items()}, folder / WEIGHTS)
    about = {**RELEASES["int4"].settings, "format": stored, "config_groups": {"g": settings}}
    edit_config(folder, quantization_config=about)
    wanted, found = compressor.decompress(tensors, scheme)["weight"], CheckpointWeights(folder, torch.float32)
    for begin, end in ((0, 96), (0, 48), (48, 96), (37, 53), (95, 96)):
        assert torch.equal(found.slices["new.weight"][begin:end], wanted[begin:end].float()), (begin, end)


@pytest.mark.parametrize("block", [[0, 32], [32], "32", [32, True], 128])
def test_a_block_size_that_is_none_is_refused(block: object, released: Callable[[str], Path], tmp_path: Path) -> None:
    folder = edit_tensors(released("fp8"), tmp_path / "model", lambda _: None)
    edit_config(folder, quantization_config={**RELEASES["fp8"].settings, "weight_block_size": block})
    with pytest.raises(ModelError, match=r"config\.json: weight_block_size="):
        CheckpointWeights(folder)


ACTORDER = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "group"}


@pytest.mark.parametrize(
    "changes",
    [
        {"config_groups": {}}, {"config_groups": None}, {"config_groups": {"g": 5}}, {"format": "no-format"},
        {"format": None}, {"config_groups": {"g": {"targets": ["Linear"], "weights": ACTORDER}}},
        {"transform_config": {"config_groups": {"u": {}}}}, {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {"config_groups": {"g": {"targets": ["re:no"], "weights": None}}},
    ],
)  # fmt: skip
def test_odd_settings_of_compressed_tensors_are_refused(
    changes: dict[str, object], released: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = edit_tensors(released("int4"), tmp_path / "model", lambda _: None)
    edit_config(folder, quantization_config={**RELEASES["int4"].settings, **changes})
    with pytest.raises(ModelError, match=r"config\.json"):
        CheckpointWeights(folder)


def test_zero_points_are_checked_as_scales_are(released: Callable[[str], Path], tmp_path: Path) -> None:
    """Weights that are not symmetric have a zero point for each scale, as they are or packed."""
    settings = {**RELEASES["int4"].settings}
    groups = {name: {**group, "weights": {**group["weights"], "symmetric": False}}
              for name, group in settings["config_groups"].items()}  # fmt: skip

    def cut(tensors: dict[str, Tensor], rows: int, columns: int) -> None:
        for name in [name for name in tensors if name.endswith("_scale")]:
            zeros = torch.zeros(tensors[name].shape[0] * 4 // 32, tensors[name].shape[1], dtype=torch.int32)
            tensors[name.replace("_scale", "_zero_point")] = zeros
        whole = tensors.pop(f"{BROKEN}_zero_point")
        if rows:
            tensors[f"{BROKEN}_zero_point"] = whole[:rows, :columns].contiguous()

    rows, columns = load_file(released("int4") / WEIGHTS)[f"{BROKEN}_scale"].shape
    packed = rows * 4 // 32
    for number, (shape, reason) in enumerate(
        (((0, 0), "are missing"), ((packed, columns - 1), "beside it"), ((packed - 1, columns), "beside it"))
    ):
        folder = edit_tensors(released("int4"), tmp_path / str(number), partial(cut, rows=shape[0], columns=shape[1]))
        edit_config(folder, quantization_config={**settings, "config_groups": groups})
        with pytest.raises(ModelError, match=f"{BROKEN}.*{reason}"):
            CheckpointWeights(folder)
    folder = edit_tensors(released("int4"), tmp_path / "whole", partial(cut, rows=packed, columns=columns))
    edit_config(folder, quantization_config={**settings, "config_groups": groups})
    assert CheckpointWeights(folder).read(BROKEN).isfinite().all()


def test_each_group_of_compressed_tensors_has_its_own_scheme(released: Callable[[str], Path], tmp_path: Path) -> None:
    whole, packed = released("int8"), released("int4")
    other = load_file(packed / WEIGHTS)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".mlp." in name]:
            del tensors[name]
        tensors |= {name: value for name, value in other.items() if ".mlp." in name}

    folder = edit_tensors(whole, tmp_path / "model", change)
    groups = {
        "linear": {**RELEASES["int8"].settings["config_groups"]["group_0"], "format": "int-quantized"},
        "mlp": {
            **RELEASES["int4"].settings["config_groups"]["group_0"], "targets": ["re:.*mlp.*"],
            "format": "pack-quantized",
        },
    }  # fmt: skip
    edit_config(
        folder, quantization_config={**RELEASES["int8"].settings, "format": "mixed-precision", "config_groups": groups}
    )
    stored = CheckpointWeights(folder)
    for name in stored.weights:
        assert torch.equal(stored.read(name), CheckpointWeights(packed if ".mlp." in name else whole).read(name))


def test_a_missing_package_is_named(released: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = released("int4")
    monkeypatch.setattr("surefoot.models.quantization.released.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install 'surefoot\[quantized\]'"):
        CheckpointWeights(folder)


def test_fp8_scales_have_several_names_and_those_of_activations_are_left_out(
    released: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = released("fp8-tensor")
    wanted = CheckpointWeights(folder)
    for number, other_name in enumerate((".weight_scale", ".scale", ".qscale_weight")):

        def change(tensors: dict[str, Tensor], ending: str = other_name) -> None:
            for name in [name for name in tensors if name.endswith("_scale_inv")]:
                tensors[name.replace(".weight_scale_inv", ending)] = tensors.pop(name).reshape(1)
                tensors[name.replace(".weight_scale_inv", ".activation_scale")] = torch.ones(())
                tensors[name.replace(".weight_scale_inv", ".input_scale")] = torch.ones(())

        found = CheckpointWeights(edit_tensors(folder, tmp_path / str(number), change))
        assert found.weights.keys() == wanted.weights.keys()
        assert all(torch.equal(found.read(name), wanted.read(name)) for name in wanted.weights)


def test_microscaled_numbers_have_exponents_as_scales(released: Callable[[str], Path], tmp_path: Path) -> None:
    """DeepSeek-V4 stores its experts so: FP4 in pairs, and a power of two for 32 of them."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = torch.randint(-128, 128, (64, 48), dtype=torch.int8)
    bytes_of = torch.randint(120, 130, (64, 3), dtype=torch.uint8)
    for scales in (bytes_of, bytes_of.view(torch.float8_e8m0fnu), bytes_of.float().sub(127).exp2()):
        folder = tmp_path / str(scales.dtype)
        edit_tensors(released("fp8"), folder, lambda _: None)
        save_file({"new.weight": codes, "new.weight_scale_inv": scales}, folder / WEIGHTS)
        stored = CheckpointWeights(folder, torch.float32)
        wanted = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
        assert torch.equal(stored.read("new.weight"), wanted)
        assert torch.equal(stored.slices["new.weight"][5:9], wanted[5:9])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tuning", "zero_stage", "expert_parallel"),
    [
        ("int4", "full", 3, 1),
        ("fp8-experts", "lora", 3, 2),
        pytest.param("fp8", "lora", 3, 1, marks=pytest.mark.matrix),
        pytest.param("fp8-tensor", "full", 3, 1, marks=pytest.mark.matrix),
        pytest.param("int8", "lora", 3, 1, marks=pytest.mark.matrix),
        pytest.param("fp8-experts", "full", 3, 1, marks=pytest.mark.matrix),
        pytest.param("fp8-experts", "full", 2, 2, marks=pytest.mark.matrix),
    ],
)
def test_two_ranks_begin_with_the_weights_of_one(
    name: str, tuning: str, zero_stage: int, expert_parallel: int, released: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = released(name)
    run_program(PROGRAM, folder, tuning, zero_stage, expert_parallel, tmp_path / "out.safetensors")
    dtype = torch.bfloat16 if tuning == "lora" else torch.float32
    wanted = dict(read_by_transformers(name, folder, dtype).named_parameters())
    assert_equal(load_file(tmp_path / "out.safetensors"), wanted, dtype)
