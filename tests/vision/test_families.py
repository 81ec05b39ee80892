"""Every vision-language family trains on what transformers' own processor and model make of its rows."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Kimi_K25Config,
    Llama4Config,
    PreTrainedConfig,
    PreTrainedModel,
)

import surefoot
from surefoot.data.collate import MicroBatch, collate
from surefoot.data.image_processor import Vision
from surefoot.methods.grpo.batch import Trajectory, collate_completions
from surefoot.methods.rollout.engines.local import LocalEngine
from surefoot.methods.rollout.types import Request, Sampling
from surefoot.methods.token_loss import TokenLogprobs, TokenLoss
from surefoot.models.build import build_model, trainable_parameters
from surefoot.models.frozen_parts import FrozenParts
from surefoot.models.vision import image_tokens, vision_names
from tests.support.data import write_jsonl
from tests.support.models import SIZES
from tests.support.vision import built, opened, picture_rows
from tests.support.vision_families import FAMILIES, ROPE, processed_by_transformers, text_config, text_of, write_family

pytestmark = pytest.mark.slow
REPRESENTATIVE = ("gemma4", "internvl", "mistral3", "qwen3_5_moe")
"""Families whose processors cut images in different ways, which `make test` trains."""
EACH_FAMILY = [
    pytest.param(kind, marks=() if kind in REPRESENTATIVE else pytest.mark.matrix) for kind in sorted(FAMILIES)
]

ROWS = 5


class Rows:
    """Rows with one image, two and none, prepared for the tiny model of a family."""

    def __init__(self, kind: str, base: Path, folder: Path) -> None:
        self.kind, self.base, self.folder = kind, base, folder
        self.rows = picture_rows(folder / "data")[:ROWS]
        path = write_jsonl(folder / "data" / "rows.jsonl", self.rows)
        self.settings: dict[str, Any] = {
            "model": str(base),
            "dataset": str(path),
            "output_dir": str(folder / "run"),
            "max_length": 512,
            "max_steps": 2,
            "device": "cpu",
            "report": False,
        }
        _, self.samples, self.reader = opened(self.settings)

    def inputs_of_transformers(self, number: int, model: PreTrainedModel) -> dict[str, Any]:
        """What transformers' processor makes of a row, with the labels."""
        sample, row = self.samples[number], self.rows[number]
        images = [self.folder / "data" / name for name in row["images"]]
        inputs = processed_by_transformers(self.kind, self.base, text_of(row["messages"], self.base), images)
        assert inputs["input_ids"][0].tolist() == sample.ids.tolist()
        trained = AutoTokenizer.from_pretrained(self.base).decode(sample.ids[sample.weights > 0])
        assert trained == row["messages"][-1]["content"] + "<|im_end|>"
        inputs["labels"] = torch.where(torch.from_numpy(sample.weights) > 0, inputs["input_ids"][0], -100)[None]
        return {name: value for name, value in inputs.items() if name in signature(model.forward).parameters}


@pytest.fixture(scope="module")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")
    return lambda kind: root / kind if (root / kind).exists() else write_family(kind, root / kind)


@pytest.fixture
def rows_of(family_folder: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[[str], Rows]]:
    contexts: list[Any] = []

    def rows(kind: str) -> Rows:
        contexts.append(FAMILIES[kind].stand_in())
        contexts[-1].__enter__()
        return Rows(kind, family_folder(kind), tmp_path)

    yield rows
    for context in contexts:
        context.__exit__(None, None, None)


def add_gradients_of_transformers(rows: Rows, model: PreTrainedModel) -> float:
    """Sum the losses of all trained tokens and their gradients, one row at a time; return the sum of losses."""
    total = 0.0
    for number in range(len(rows.samples)):
        inputs = rows.inputs_of_transformers(number, model)
        count = int((inputs["labels"][0, 1:] >= 0).sum())
        loss = model(**inputs).loss * count
        loss.backward()
        total += loss.item()
    return total


def assert_equal_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Each differs by at most 1e-4 of its norm; those that are zero but for rounding, by little of the largest."""
    assert found.keys() == expected.keys()
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        difference = float((found[name] - gradient).norm())
        assert difference <= 1e-4 * float(gradient.norm()) + 1e-7 * largest, name


def gradients_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}


@pytest.mark.parametrize("kind", EACH_FAMILY)
def test_a_pack_has_the_loss_and_the_gradients_of_its_rows_alone_in_transformers(
    kind: str, rows_of: Callable[[str], Rows]
) -> None:
    rows = rows_of(kind)
    assert [len(sample.images) for sample in rows.samples] == [1, 2, 0, 1, 2]
    theirs = AutoModelForImageTextToText.from_pretrained(rows.base, attn_implementation="eager")
    total = add_gradients_of_transformers(rows, theirs.eval())
    ours = build_model(
        rows.base, lora=None, device=torch.device("cpu"), dtype=torch.float32, frozen=FrozenParts(vision=False)
    ).model.eval()
    batch = collate(rows.samples, rows.reader)
    loss = TokenLoss(ours)(batch)
    assert loss.item() / batch.num_trained == pytest.approx(total / batch.num_trained, abs=1e-5)
    loss.backward()
    found = gradients_of(ours)
    assert_equal_gradients(found, gradients_of(theirs))
    assert vision_names(ours) & found.keys()


@pytest.mark.long
def test_a_decoder_of_a_family_with_fewer_attention_functions_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """InternVL has scaled dot products of torch, and its decoder may be gpt-oss, which has not."""
    decoder = text_config("gpt_oss", num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    monkeypatch.setitem(FAMILIES, "internvl", replace(FAMILIES["internvl"], text=decoder))
    rows = Rows("internvl", write_family("internvl", tmp_path / "base"), tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(rows.base, attn_implementation="eager").eval()
    total = add_gradients_of_transformers(rows, theirs)
    settings = {**rows.settings, "packing": True, "global_batch_size": 1, "max_steps": 1, "tuning": "full"}
    trained = sum(int((sample.weights[1:] > 0).sum()) for sample in rows.samples)
    result = surefoot.train(settings, screen=False)
    assert result.metrics[0]["loss"] == pytest.approx(total / trained, abs=1e-5)
    model, tokenizer = surefoot.load(result.artifact)
    question = [[{"role": "user", "content": "What is it?"}]]
    assert surefoot.complete(model, tokenizer, question, max_new_tokens=2)


@pytest.mark.parametrize("kind", EACH_FAMILY)
def test_lora_on_text_and_tower_has_the_gradients_of_the_merged_model(
    kind: str, rows_of: Callable[[str], Rows]
) -> None:
    rows = rows_of(kind)
    ours = built(rows.base, targets=("attention", "vision")).model
    theirs = AutoModelForImageTextToText.from_pretrained(rows.base, attn_implementation="eager").eval()
    pairs = {name.removesuffix(".lora_A") for name in trainable_parameters(ours) if name.endswith("lora_A")}
    beside_text = {name.rpartition(".")[0] for name in vision_names(ours)}
    assert pairs & beside_text
    assert pairs - beside_text
    scale = 2.0
    with torch.no_grad():
        for name in pairs:
            adapted = ours.get_submodule(name)
            theirs.get_submodule(name).weight += scale * adapted.lora_B @ adapted.lora_A
    add_gradients_of_transformers(rows, theirs)
    TokenLoss(ours)(collate(rows.samples, rows.reader)).backward()
    expected = {}
    for name in pairs:
        adapted, gradient = ours.get_submodule(name), theirs.get_submodule(name).weight.grad
        expected[f"{name}.lora_A"] = scale * adapted.lora_B.detach().T @ gradient
        expected[f"{name}.lora_B"] = scale * gradient @ adapted.lora_A.detach().T
    found = {name: parameter.grad for name, parameter in trainable_parameters(ours).items()}
    assert_equal_gradients(found, expected)


@pytest.mark.parametrize("kind", EACH_FAMILY)
def test_rows_without_images_give_every_part_a_gradient(kind: str, rows_of: Callable[[str], Rows]) -> None:
    """Ranks that share the tower reduce its gradients together, whatever rows they have."""
    rows = rows_of(kind)
    ours = built(rows.base, targets=("attention", "vision")).model
    batch = collate([sample for sample in rows.samples if not sample.images], rows.reader)
    assert batch.vision is not None
    assert batch.vision.is_blank
    TokenLoss(ours)(batch).backward()
    parameters = trainable_parameters(ours)
    assert all(parameter.grad is not None for parameter in parameters.values())
    beside_text = {name.rpartition(".")[0] for name in vision_names(ours)}
    seen = {name for name, parameter in parameters.items() if parameter.grad is not None and parameter.grad.any()}
    assert not {name.rpartition(".")[0] for name in seen} & beside_text


@pytest.mark.parametrize("kind", EACH_FAMILY)
def test_a_frozen_tower_stays_as_it_was(kind: str, rows_of: Callable[[str], Rows]) -> None:
    rows = rows_of(kind)
    run = surefoot.train({**rows.settings, "tuning": "full", "learning_rate": 1e-2}, screen=False)
    before, after = (
        AutoModelForImageTextToText.from_pretrained(folder).state_dict()
        for folder in (rows.base, run.run_folder / "model")
    )
    model = AutoModelForImageTextToText.from_pretrained(rows.base)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert before.keys() == after.keys()
    assert changed
    assert not changed & vision_names(model)


@pytest.mark.parametrize("kind", EACH_FAMILY)
def test_completions_have_the_logprobs_that_training_sees(kind: str, rows_of: Callable[[str], Rows]) -> None:
    rows = rows_of(kind)
    _, samples, reader = opened({**rows.settings, "method": "grpo", "reward_funcs": ["length"]})
    requests = [
        Request([int(token) for token in sample.ids], (3, number, index), sample.images, sample.place)
        for number, sample in enumerate(samples)
        for index in range(2)
    ]
    model = built(rows.base, targets=("attention", "vision")).model
    tokenizer, banned = AutoTokenizer.from_pretrained(rows.base), image_tokens(model)
    made = LocalEngine(model, tokenizer, reader=reader).generate(requests, Sampling(10, banned=banned), 0)
    trajectories = [
        Trajectory(request.prompt, one.ids, one.logprobs, 0.5, 1.0, request.place, request.images)
        for request, one in zip(requests, made, strict=True)
    ]
    for share in (True, False):
        batch = collate_completions(trajectories, share_prompts=share, reader=reader)
        found, _ = TokenLogprobs(model, 1.0)(batch)
        torch.testing.assert_close(found.detach(), batch.rollout_logprobs, rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", EACH_FAMILY)
def test_the_likeliest_tokens_are_those_that_transformers_generates(kind: str, rows_of: Callable[[str], Rows]) -> None:
    rows = rows_of(kind)
    tokenizer, model = AutoTokenizer.from_pretrained(rows.base), surefoot.load(rows.base)[0]
    requests = [Request(sample.ids.tolist(), (number,), sample.images) for number, sample in enumerate(rows.samples)]
    made = LocalEngine(model, tokenizer, reader=rows.reader).generate(requests, Sampling(8, top_k=1), 0)
    theirs = AutoModelForImageTextToText.from_pretrained(rows.base)
    for number, completion in enumerate(made):
        inputs = rows.inputs_of_transformers(number, theirs)
        del inputs["labels"]
        theirs.base_model.rope_deltas = None  # left there by the row before
        expected = theirs.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert completion.ids == expected[0, inputs["input_ids"].shape[1] :].tolist()


def llama4() -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
    text = {**SIZES, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "rope_parameters": ROPE}
    tower = {
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
        **{"vision_output_dim": 32, "image_size": 28, "patch_size": 7, "projector_input_dim": 32},
        "projector_output_dim": 32,
    }
    config = Llama4Config(text_config=text, vision_config=tower, image_token_index=40)
    return config, {"pixel_values": torch.randn(1, 3, 28, 28).bfloat16()}  # the type that its processor returns


def kimi_k25() -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    text = {**SIZES, **latent, "model_type": "deepseek_v3", "first_k_dense_replace": 2, "num_key_value_heads": 4}
    tower = {
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
        **{"patch_size": 7, "pos_emb_height": 8, "pos_emb_width": 8},
    }
    config = Kimi_K25Config(
        text_config=text, vision_config=tower, projection_hidden_size=32, image_token_id=40, video_token_id=41
    )
    return config, {"pixel_values": torch.randn(16, 3, 7, 7), "image_grid_thw": torch.tensor([[1, 4, 4]])}


@pytest.mark.parametrize("make", [llama4, kimi_k25])
def test_families_whose_processor_needs_torchvision_have_the_loss_and_the_gradients_of_their_own_forward(
    make: Callable[[], tuple[PreTrainedConfig, dict[str, torch.Tensor]]],
    tmp_path: Path,
) -> None:
    """The tensors are drawn, because the processor is not there; the image takes four tokens."""
    torch.manual_seed(3)
    config, tensors = make()
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ours = build_model(
        tmp_path, lora=None, device=torch.device("cpu"), dtype=torch.float32, frozen=FrozenParts(vision=False)
    ).model.eval()
    ids = torch.randint(3, 39, (1, 20))
    text_ids, ids[0, 4:8] = ids.clone(), 40
    for tokens, is_blank in ((ids, False), (text_ids, True)):
        for model in (theirs, ours):
            model.zero_grad()
        of_image = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
            if not is_blank
        }
        expected = theirs(input_ids=tokens, labels=tokens, **of_image).loss
        expected.backward()
        batch = MicroBatch(
            ids=tokens,
            position_ids=torch.arange(20)[None],
            lengths=[20],
            cu_seq_lens=torch.tensor([0, 20], dtype=torch.int32),
            target_positions=torch.arange(19),
            targets=tokens[0, 1:],
            weights=None,
            row_refs=(),
            answer_of=torch.zeros(19, dtype=torch.int64),
            vision=Vision(tensors, 1, is_blank=is_blank),
        )
        loss = TokenLoss(ours)(batch) / 19
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        assert_equal_gradients(gradients_of(ours), gradients_of(theirs))
        assert all(parameter.grad is not None for name, parameter in ours.named_parameters() if "vision" in name)


@pytest.mark.parametrize("kind", ["gemma4", "idefics3", "internvl", "llava_onevision"])
def test_an_adapter_of_text_and_tower_is_the_same_in_peft(kind: str, rows_of: Callable[[str], Rows]) -> None:
    rows = rows_of(kind)
    settings = {"target_modules": ["attention", "vision"], "lora_rank": 4, "learning_rate": 1e-2}
    folder = surefoot.train({**rows.settings, **settings}, screen=False).run_folder
    ours = surefoot.load(folder)[0].eval()
    theirs = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(rows.base), folder / "adapter"
    ).eval()
    plain = AutoModelForImageTextToText.from_pretrained(rows.base).eval()
    with torch.no_grad():
        inputs = rows.inputs_of_transformers(1, plain)
        expected, loss, before = (model(**inputs).loss.item() for model in (theirs, ours, plain))
    assert loss == pytest.approx(expected, abs=1e-5)
    assert abs(before - expected) > 1e-3
