"""What a plan says of a vision tower is what real tensors take."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from surefoot.config import DatasetItem, RunConfig
from surefoot.data.collate import MicroBatch
from surefoot.data.image_processor import Vision
from surefoot.data.model_processor import GRID
from surefoot.errors import ModelError
from surefoot.methods.base import BatchTotals
from surefoot.methods.sft.method import Sft, SftObjective
from surefoot.methods.sft.settings import SftConfig
from surefoot.models.build import build_model, build_without_storage
from surefoot.models.lora import LoraSettings
from surefoot.planner import trace
from surefoot.planner.devices import get_device
from surefoot.planner.forecast import forecast
from surefoot.planner.live_tensors import LiveTensors
from surefoot.planner.sizes import check_fields
from surefoot.planner.trace import ATTEND, ATTENTION, Trace, make_shaped_batch, trace_step
from surefoot.planner.vision_tower import ImageBatch, add_images, fit_images
from tests.support.vision import KINDS

pytestmark = pytest.mark.slow

Folders = Callable[[str], Path]
LENGTH, IMAGES = 80, ImageBatch(count=2, tokens_each=16, patches_each=64)
TRAINED = 24
SFT = SftConfig(model="m", dataset=[DatasetItem(path="d")], output_dir="o")


def lora(*targets: str) -> LoraSettings:
    return LoraSettings(4, 8, targets=targets)


def traced(folder: Path, settings: LoraSettings, *, is_checkpointed: bool, sees: bool = True) -> Trace:
    with FakeTensorMode():
        built = build_without_storage(
            folder,
            lora=settings,
            dtype=torch.float32,
            gradient_checkpointing=is_checkpointed,
            packed_attention=ATTENTION,
        )
        batch = make_shaped_batch([LENGTH], TRAINED, add_images(built, IMAGES) if sees else None)
        return trace_step(built, batch, Sft.planned_loss(SFT)(built, batch), is_on_gpu=False, is_accumulated=False)


def real(model: Any) -> MicroBatch:
    """One sample with two images of 4 by 4 cells each."""
    vision = model.config.vision_config
    ids = torch.randint(5, 40, (1, LENGTH))
    ids[0, 2:18] = ids[0, 30:46] = model.config.image_token_id
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return MicroBatch(
        ids=ids,
        position_ids=torch.arange(LENGTH).expand(3, 1, LENGTH),
        lengths=[LENGTH],
        cu_seq_lens=torch.tensor([0, LENGTH], dtype=torch.int32),
        target_positions=torch.arange(LENGTH - TRAINED - 1, LENGTH - 1),
        targets=torch.randint(5, 40, (TRAINED,)),
        weights=None,
        row_refs=(),
        answer_of=torch.zeros(TRAINED, dtype=torch.int64),
        vision=Vision({"pixel_values": torch.randn(128, values), GRID: torch.tensor([[1, 8, 8], [1, 8, 8]])}, 2),
    )


@pytest.mark.long
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("targets", [("attention",), ("attention", "vision")], ids=["frozen tower", "trained tower"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_the_peak_is_that_of_real_tensors(
    kind: str, targets: tuple[str, ...], is_checkpointed: bool, vision_folder: Folders
) -> None:
    told = traced(vision_folder(kind), lora(*targets), is_checkpointed=is_checkpointed)
    built = build_model(
        vision_folder(kind), lora=lora(*targets), device=torch.device("cpu"), dtype=torch.float32,
        gradient_checkpointing=is_checkpointed,
    )  # fmt: skip
    objective, batch = SftObjective(built, 0.0), real(built.model)
    assert batch.vision is not None
    known = [*built.model.parameters(), *built.model.buffers(), batch.ids, batch.position_ids, batch.target_positions]
    live = LiveTensors(known)
    for parameter in built.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(live.keep_gradient)
    with live:
        batch = MicroBatch(
            **{
                **vars(batch),
                "vision": replace(
                    batch.vision,
                    tensors={**batch.vision.tensors, "pixel_values": batch.vision.tensors["pixel_values"].clone()},
                ),
            }
        )
        objective.loss(batch, BatchTotals(LENGTH, TRAINED, float(TRAINED))).total.backward()
    seen = (*live.forward_moments(), *live.backward_moments())
    assert told.peak == pytest.approx(max(moment[0] for moment in seen), rel=0.06)
    assert told.flops == pytest.approx(live.flops, rel=0.02)
    blind = traced(vision_folder(kind), lora("attention"), is_checkpointed=is_checkpointed, sees=False)
    assert told.peak > blind.peak + 40_000, "the tower takes something"


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_tower_keeps_nothing_for_a_backward(kind: str, vision_folder: Folders) -> None:
    """With checkpointing, transformers makes the outputs of all input embeddings need gradients."""
    folder = vision_folder(kind)
    plain, checkpointed = (
        traced(folder, lora("attention"), is_checkpointed=is_checkpointed) for is_checkpointed in (False, True)
    )
    assert checkpointed.saved_by_kind["vision"] == plain.saved_by_kind["vision"]
    built = build_model(
        folder, lora=lora("attention"), device=torch.device("cpu"), dtype=torch.float32, gradient_checkpointing=True
    )
    needs_gradient = []
    built.model.base_model.visual.register_forward_hook(
        lambda _module, _inputs, output: needs_gradient.append(output.pooler_output.requires_grad)
    )
    SftObjective(built, 0.0).loss(real(built.model), BatchTotals(LENGTH, TRAINED, float(TRAINED))).total.backward()
    assert needs_gradient == [False]


@pytest.mark.parametrize("targets", [("attention",), ("attention", "vision")], ids=["frozen tower", "trained tower"])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_blocks_of_a_tower_are_traced_as_if_each_ran(
    kind: str, targets: tuple[str, ...], vision_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((vision_folder(kind) / "config.json").read_text())
    config["vision_config"]["depth"] = 6
    (tmp_path / "config.json").write_text(json.dumps(config))
    runs = []
    blocks = trace.tower_blocks

    def counted_blocks(model: Any) -> Any:
        for block in blocks(model):
            block.register_forward_pre_hook(lambda *_: runs.append("block"))
            block.norm1.register_forward_pre_hook(lambda *_: runs.append("inside"))
        return blocks(model)

    monkeypatch.setattr(trace, "tower_blocks", counted_blocks)
    once = traced(tmp_path, lora(*targets), is_checkpointed=False)
    assert runs.count("block") > 6
    if targets == ("attention",):
        assert runs.count("inside") <= runs.count("block") / 2, "blocks with windows and without"
    monkeypatch.setattr(trace, "tower_blocks", lambda _model: [])
    assert traced(tmp_path, lora(*targets), is_checkpointed=False) == once


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_is_taken_to_be_full_of_the_largest_images(kind: str, vision_folder: Folders) -> None:
    def run(**more: Any) -> RunConfig:
        return SftConfig(model="m", dataset=[DatasetItem(path="d")], output_dir="o", **more)

    folder = vision_folder(kind)
    cell = 32 if kind.startswith("qwen3") else 28
    assert fit_images(run(), folder, 2, 80) == ImageBatch(8, 16, 64), "as the processor says"
    assert fit_images(run(max_pixels=9 * cell**2), folder, 1, 80) in (ImageBatch(7, 9, 36), ImageBatch(8, 8, 32))
    assert fit_images(run(max_pixels=10**8), folder, 1, 80) == ImageBatch(1, 64, 256)
    assert fit_images(run(), folder, 1, 5) == ImageBatch(1, 1, 4)


@pytest.mark.parametrize("is_causal", [False, True])
def test_products_of_attention_are_counted(is_causal: bool) -> None:
    query = torch.randn(2, 3, 8, 4, requires_grad=True)
    live = LiveTensors([query])
    with live:
        out = ATTEND(query, query, query, 0.0, is_causal)[0]
        forward = live.flops
        out.sum().backward()
    product = 2 * (2 * 3) * (8 * 8) * 4
    assert forward == 2 * product / (1 + is_causal)
    assert live.flops - forward == 5 * product / (1 + is_causal)


def test_a_model_that_reads_text_sees_nothing(model_folder: Folders) -> None:
    run = SftConfig(model="m", dataset=[DatasetItem(path="d")], output_dir="o")
    assert fit_images(run, model_folder("llama"), 1, 80) is None


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_forecast_counts_the_tower(kind: str, vision_folder: Folders) -> None:
    def peak(**more: Any) -> Any:
        config = SftConfig(
            model="m", dataset=[DatasetItem(path="d")], output_dir="o", max_length=800, lora_rank=4, **more
        )
        return forecast(config, vision_folder(kind), get_device("a100"))

    frozen, trained = peak(), peak(target_modules=["attention", "vision"])
    assert (frozen.images.count, frozen.images.tokens_each) == (196, 16)
    assert trained.device_peak[1] > frozen.device_peak[1] + (1 << 20)
    assert trained.phases["step"].device["activations: vision"] > frozen.phases["step"].device["activations: vision"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config: config.pop("vision_config"), "no vision_config"),
        (lambda config: config["vision_config"].update(patch_size=0), "patch_size=0 .*vision_config"),
    ],
)
def test_a_tower_that_config_json_does_not_describe(
    vision_folder: Folders, tmp_path: Path, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    config = json.loads((vision_folder("qwen2_5_vl") / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said):
        check_fields(tmp_path)
