"""Small random vision-language models, their processors, and pictures."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from surefoot.config import load_config
from surefoot.data.dataset import Sample
from surefoot.data.image_processor import PixelReader
from surefoot.data.model_processor import ModelProcessor, load_model_processor
from surefoot.methods.training_data import RunData, open_data
from surefoot.models.build import BuiltModel, build_model, load_tokenizer, trainable_parameters
from surefoot.models.lora import LoraSettings
from tests.support.models import SIZES, make_tokenizer

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
CONTROLS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""What Qwen's templates say of images."""
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220)}


def vision_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *CONTROLS]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_vision_model(kind: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    torch.manual_seed(11)
    ids = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    text: dict[str, Any] = {**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    tower: dict[str, Any] = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if kind == "qwen2_5_vl":
        text["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
        tower |= {
            "patch_size": 14,
            "out_hidden_size": 32,
            "window_size": 56,
            "fullatt_block_indexes": [2],
            "spatial_merge_size": 2,
        }
        config: Any = Qwen2_5_VLConfig(text_config=text, vision_config=tower, **ids)
        return Qwen2_5_VLForConditionalGeneration(config)
    text |= {"head_dim": 8, "rope_parameters": {**rope, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
    tower |= {
        "patch_size": 16,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 64,
    }
    if kind == "qwen3_vl":
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=tower, **ids))
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=tower, **ids))


def make_processor(kind: str = "qwen2_5_vl") -> Qwen2VLImageProcessorPil:
    side = 16 if kind.startswith("qwen3") else 14
    return Qwen2VLImageProcessorPil(patch_size=side, min_pixels=(2 * side) ** 2, max_pixels=16 * (2 * side) ** 2)


def image_processor(kind: str = "qwen2_5_vl") -> ModelProcessor:
    """The processor of a tiny model, as the program uses it."""
    tokenizer = vision_tokenizer()
    config = make_vision_model(kind, tokenizer).config
    with TemporaryDirectory() as folder:
        make_processor(kind).save_pretrained(folder)
        return load_model_processor(Path(folder), config, tokenizer)


def draw(path: Path, colour: str, count: int = 1, size: tuple[int, int] = (84, 56)) -> Path:
    """A white picture with some squares of a colour."""
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    for index in range(count):
        left = 6 + 24 * index
        pen.rectangle((left, 12, left + 16, 28), fill=COLOURS[colour])
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)
    return path


def picture_rows(folder: Path, count: int = 12) -> list[dict[str, Any]]:
    """Questions about pictures: one, two and none, of several sizes."""
    rows = []
    names = list(COLOURS)
    for i in range(count):
        colour = names[i % 3]
        draw(folder / f"{i}.png", colour, 1 + i % 3, size=(80 + 31 * (i % 2), 50 + 27 * (i % 3)))
        question = {0: "<image>What colour?", 1: "<image><image>What colour is the first?", 2: "Name a colour."}[i % 3]
        images = {0: [f"{i}.png"], 1: [f"{i}.png", f"{i - 1}.png"], 2: []}[i % 3]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": colour}]
        rows.append({"messages": messages, "images": images})
    return rows


TRAINED = {"targets": ("attention", "mlp"), "rank": 4, "alpha": 8.0}
Make = Callable[[str], Path]


def built(base: Path, **lora: Any) -> BuiltModel:
    settings: dict[str, Any] = {**TRAINED, **lora}
    model = build_model(base, lora=LoraSettings(**settings), device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # B is zero at first, and would hide what A does
        for parameter in trainable_parameters(model.model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.model.eval()
    return model


def opened(settings: dict[str, Any]) -> tuple[RunData, list[Sample], PixelReader]:
    base = Path(settings["model"])
    data = open_data(load_config(None, (), settings), base, load_tokenizer(base), lambda _: None)
    data.train.prepare()
    assert data.reader is not None
    return data, list(data.train), data.reader
