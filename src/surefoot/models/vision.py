"""The vision tower of a model: its name, its attention function, and the decoder's inputs from images.

The tower includes the module that merges its patches into tokens. It is frozen unless it is targeted by name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

TOWER_ATTENTION = "sdpa"
"""Attention function of transformers in which images do not attend to each other, and no batch of text is packed."""


def vision_tower(model: PreTrainedModel) -> tuple[str, nn.Module] | None:
    """Return (name, module) of the tower; None for a model that reads text only."""
    tower = model.get_encoder(modality="image")
    if tower is model or tower is model.base_model:
        return None
    return next((name, module) for name, module in model.named_modules() if module is tower)


def vision_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters of the tower."""
    tower = vision_tower(model)
    return {f"{tower[0]}.{name}" for name, _ in tower[1].named_parameters()} if tower is not None else set()


def attention_of(config: PreTrainedConfig, implementation: str) -> str | dict[str, str]:
    """Return the setting for transformers that gives the decoder an attention function and the tower its own."""
    if "vision_config" not in config.sub_configs:
        return implementation
    others = {name: implementation for name in config.sub_configs if name != "vision_config"}
    return {"": implementation, **others, "vision_config": TOWER_ATTENTION}


@contextmanager
def attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Run the model's decoder with another attention function, and restore it afterwards."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention_of(model.config, implementation))
    try:
        yield
    finally:
        model.set_attn_implementation(attention_of(model.config, before))


def embed_images(
    model: PreTrainedModel, ids: Tensor, pixels: Tensor, grid: Tensor, *, is_blank: bool
) -> dict[str, Any]:
    """Return the arguments of the decoder's forward for tokens and images.

    If the tokens contain no image (`is_blank`), zero times the tower's output for the pixels is added to the tokens'
    embeddings. So the tower's parts get a gradient on every rank; and the first decoder layer's input has one on every
    rank, without which FSDP would sum its gradients at another time there, and the ranks would wait for ever.
    Shapes: ids [1, T], pixels [P, D], grid [I, 3].
    """
    features = model.base_model.get_image_features(pixels, image_grid_thw=grid, return_dict=True)
    if not is_blank:
        return {"input_ids": ids, "mm_encoder_outputs": {"image": features}}
    layers = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
    nothing = torch.stack([part.float().sum() for layer in layers for part in layer]).sum() * 0.0
    embeddings = model.get_input_embeddings()(ids)
    return {"input_ids": None, "inputs_embeds": embeddings + nothing.to(embeddings.dtype)}


def image_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that stand for images and videos, which no answer can contain."""
    ids = (getattr(model.config, name, None) for name in ("image_token_id", "video_token_id"))
    return frozenset(token for token in ids if token is not None)
