"""One tiny random model of each vision-language family with its processor, and what transformers makes of a row."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings

import torch
from PIL import Image
from transformers import (
    CONFIG_MAPPING,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

from tests.support.models import SIZES, make_tokenizer

WIDTH = SIZES["hidden_size"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {**ROPE, "mrope_section": [2, 1, 1]}
SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
SPECIAL_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image>",
    "video_token": "<video>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "audio_token": "<audio>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}
FURTHER_TOKENS = (
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|vision_start|>", "<|vision_end|>", "<|media_pad|>", "<|video|>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- 'PLACEHOLDER' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def text_config(kind: str, **more: Any) -> dict[str, Any]:
    """A language model of a kind, in the sizes of all."""
    sizes = {**SIZES, "max_position_embeddings": 2048, "head_dim": 8, "rope_parameters": ROPE}
    return {**sizes, "model_type": kind, **more}


@dataclass(frozen=True)
class Family:
    """How a family's tiny model and processor are made."""

    text: dict[str, Any]
    tower: dict[str, Any]
    placeholder: str = "<image>"
    """What its chat template writes for an image."""
    feature: str = "<image>"
    """Token that the vision tower fills."""
    config: dict[str, Any] = field(default_factory=dict)
    image_processor: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    base: str | None = None
    """Model type whose image processor it has, where transformers names none for its own."""
    stand_in: Callable[[], Any] = nullcontext
    """Context in which packages that its processor imports are there."""


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Mistral 3's processor imports a function from a file that needs torchvision; the file for Pillow has it, too."""
    prefix = "transformers.models.pixtral"
    if f"{prefix}.processing_pixtral" not in sys.modules:
        name = f"{prefix}.image_processing_pixtral"
        sys.modules[name] = import_module(f"{prefix}.image_processing_pil_pixtral")
        try:
            import_module(f"{prefix}.processing_pixtral")
        finally:
            del sys.modules[name]
    stock = sys.modules[f"{prefix}.processing_pixtral"].PixtralProcessor
    with (
        patch(f"{__name__}.processor_class_from_name", lambda _: stock),
        patch("surefoot.data.model_processor.processor_class_from_name", lambda _: stock),
    ):
        yield


def with_num2words() -> Any:
    """SmolVLM's processor refuses to be made without num2words, which only videos need."""
    return patch("transformers.models.smolvlm.processing_smolvlm.num2words", str)


TILES = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
GRIDS = {"patch_size": 14, "size": {"shortest_edge": 28 * 28, "longest_edge": 32 * 28 * 28}}
GLM_TOWER = {
    **{"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14},
    **{"out_hidden_size": WIDTH, "image_size": 56},
}
GLM_MOE = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "n_shared_experts": 1},
}
QWEN_TOWER = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": WIDTH}
QWEN3_ROPE = {**MROPE, "mrope_interleaved": True}
HYBRID = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "rope_parameters": {**QWEN3_ROPE, "partial_rotary_factor": 1},
    },
}
ALTERNATING = {
    **{"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
}
FAMILIES: dict[str, Family] = {
    "internvl": Family(
        text_config("qwen2"),
        {**SIGLIP, "image_size": [56, 56], "patch_size": [14, 14]},
        placeholder="<IMG_CONTEXT>",
        feature="<IMG_CONTEXT>",
        config={"image_seq_length": 4},
        image_processor={"size": {"height": 56, "width": 56}, "max_patches": 3},
        processor={"image_seq_length": 4},
    ),
    "llava_onevision": Family(
        text_config("qwen2"),
        {**SIGLIP, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14, "vision_use_head": False},
        config={"image_grid_pinpoints": [[56, 56], [56, 112], [112, 56]]},
        image_processor={
            "size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56]],
        },
        processor={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "idefics3": Family(
        text_config("llama"),
        {**SIGLIP, "image_size": 28, "patch_size": 7},
        config={"scale_factor": 2},
        image_processor=TILES,
        processor={"image_seq_len": 4},
    ),
    "smolvlm": Family(
        text_config("llama"),
        {**SIGLIP, "image_size": 28, "patch_size": 7},
        config={"scale_factor": 2},
        image_processor=TILES,
        processor={"image_seq_len": 4},
        stand_in=with_num2words,
    ),
    "mistral3": Family(
        text_config("mistral"),
        {**SIGLIP, "model_type": "pixtral", "head_dim": 16, "image_size": 112, "patch_size": 14},
        placeholder="[IMG]",
        feature="[IMG]",
        image_processor={"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
        processor={"patch_size": 14, "spatial_merge_size": 2},
        stand_in=without_torchvision,
    ),
    "gemma3": Family(
        text_config("gemma3_text", **ALTERNATING),
        {**SIGLIP, "image_size": 56, "patch_size": 14, "vision_use_head": False},
        placeholder="<start_of_image>",
        config={"mm_tokens_per_image": 4},
        image_processor={"size": {"height": 56, "width": 56}},
        processor={"image_seq_length": 4},
    ),
    "gemma4": Family(
        text_config(
            "gemma4_text", **ALTERNATING, global_head_dim=8, hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=400, use_bidirectional_attention="vision",
        ),
        {**SIGLIP, "head_dim": 16, "num_key_value_heads": 2, "patch_size": 8, "pooling_kernel_size": 2,
         "position_embedding_size": 64},
        config={"audio_config": None},
        image_processor={"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70},
    ),
    "glm4v": Family(
        text_config("glm4v_text", rope_parameters={**MROPE, "partial_rotary_factor": 1.0}),
        GLM_TOWER,
        placeholder="<|begin_of_image|><image><|end_of_image|>",
        image_processor=GRIDS,
    ),
    "glm46v": Family(
        text_config("glm4v_text", rope_parameters={**MROPE, "partial_rotary_factor": 1.0}),
        {**GLM_TOWER, "model_type": "glm4v_vision"},
        placeholder="<|begin_of_image|><image><|end_of_image|>",
        image_processor=GRIDS,
    ),
    "glm4v_moe": Family(
        text_config("glm4v_moe_text", rope_parameters={**MROPE, "partial_rotary_factor": 1.0}, **GLM_MOE),
        GLM_TOWER,
        placeholder="<|begin_of_image|><image><|end_of_image|>",
        image_processor=GRIDS,
        base="glm4v",
    ),
    "qwen2_vl": Family(
        text_config("qwen2_vl_text", rope_parameters=MROPE),
        {"depth": 3, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
        placeholder="<|vision_start|><image><|vision_end|>",
        image_processor={"patch_size": 14, "min_pixels": 28**2, "max_pixels": 16 * 28**2},
    ),
    "qwen3_5": Family(
        text_config("qwen3_5_text", **HYBRID),
        {**QWEN_TOWER, "patch_size": 16, "num_position_embeddings": 64},
        placeholder="<|vision_start|><image><|vision_end|>",
        image_processor={"patch_size": 16, "min_pixels": 32**2, "max_pixels": 16 * 32**2},
    ),
    "qwen3_5_moe": Family(
        text_config(
            "qwen3_5_moe_text", **HYBRID, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
        ),
        {**QWEN_TOWER, "patch_size": 16, "num_position_embeddings": 64},
        placeholder="<|vision_start|><image><|vision_end|>",
        image_processor={"patch_size": 16, "min_pixels": 32**2, "max_pixels": 16 * 32**2},
    ),
}  # fmt: skip


def family_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    plain = make_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
        extra_special_tokens={**SPECIAL_TOKENS, "image_token": family.feature},
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *FURTHER_TOKENS]})
    tokenizer.chat_template = TEMPLATE.replace("PLACEHOLDER", family.placeholder)
    return tokenizer


def write_family(kind: str, folder: Path) -> Path:
    """Write a tiny random model of a family, its tokenizer and its processor."""
    family = FAMILIES[kind]
    tokenizer = family_tokenizer(family)
    numbers = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image_token_id", family.feature), ("video_token_id", "<video>"), ("boi_token_id", "<start_of_image>"),
            ("eoi_token_id", "<end_of_image>"), ("audio_token_id", "<audio>"), ("boi_token_index", "<start_of_image>"),
            ("image_start_token_id", "<|begin_of_image|>"), ("vision_start_token_id", "<|vision_start|>"),
            ("vision_end_token_id", "<|vision_end|>"), ("image_end_token_id", "<|end_of_image|>"),
        )
    }  # fmt: skip
    config_class = CONFIG_MAPPING[kind]
    text = {**deepcopy(family.text), "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = config_class(text_config=text, vision_config=deepcopy(family.tower), **family.config)
    for name, number in numbers.items():
        if hasattr(config, name):
            setattr(config, name, number)
    torch.manual_seed(11)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # some start at zero or one, and would hide mistakes
            if parameter.dim() < 2 or "position" in name or not parameter.any():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with family.stand_in():
        _make_processor(kind, tokenizer).image_processor.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(family.processor))
    return folder


def _make_processor(kind: str, tokenizer: PreTrainedTokenizerFast, folder: Path | None = None) -> Any:
    """Make the processor of a family without its video and audio parts."""
    family = FAMILIES[kind]
    stock = processor_class_from_name(PROCESSOR_MAPPING_NAMES[kind])
    if folder is None:
        name = IMAGE_PROCESSOR_MAPPING_NAMES[family.base or kind]["pil"]
        cutter = getattr(sys.modules["transformers"], name)(**family.image_processor)
    else:
        cutter = AutoImageProcessor.from_pretrained(folder, backend="pil")
    others = [name for name in stock.get_attributes() if name not in ("image_processor", "tokenizer")]
    with patch.object(stock, "check_argument_for_proper_class", lambda *_: None):
        return stock(image_processor=cutter, tokenizer=tokenizer, **dict.fromkeys(others), **family.processor)


def processed_by_transformers(kind: str, folder: Path, text: str, images: list[Path]) -> dict[str, Any]:
    """Return what transformers' processor makes of a rendered conversation and its images."""
    with FAMILIES[kind].stand_in():
        processor = _make_processor(kind, AutoTokenizer.from_pretrained(folder), folder)
    pictures = [[Image.open(path).convert("RGB") for path in images]] if images else None
    with catch_warnings(action="ignore", category=DeprecationWarning):  # some processors give tensors to numpy
        batch = processor(images=pictures, text=[text], return_tensors="pt", return_mm_token_type_ids=True)
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def text_of(messages: list[dict[str, Any]], folder: Path) -> str:
    """Return the text that the chat template makes of a row."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    contents = []
    for message in messages:
        parts = message["content"].split("<image>")
        content: Any = message["content"]
        if len(parts) > 1:
            content = [x for part in parts for x in ({"type": "image"}, {"type": "text", "text": part})][1:]
        contents.append({**message, "content": content})
    return str(tokenizer.apply_chat_template(contents, tokenize=False))
