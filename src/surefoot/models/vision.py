"""The vision tower of a model: where it is, how its attention is computed, and what the decoder is given of images.

The tower includes what merges its patches into tokens. It is frozen unless it is asked for by name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

TOWER_ATTENTION = "sdpa"
"""transformers' own: images do not see each other in it, and no batch of text is packed."""


def vision_tower(model: PreTrainedModel) -> tuple[str, nn.Module] | None:
    """(name, module) of the tower; None for a model that reads text only."""
    tower = model.get_encoder(modality="image")
    if tower is model or tower is model.base_model:
        return None
    return next((name, module) for name, module in model.named_modules() if module is tower)


def vision_names(model: PreTrainedModel) -> set[str]:
    """The parameters of the tower, by name."""
    found = vision_tower(model)
    return {f"{found[0]}.{name}" for name, _ in found[1].named_parameters()} if found is not None else set()


def attention_of(config: PreTrainedConfig, implementation: str) -> str | dict[str, str]:
    """What transformers is asked for so that the decoder gets an attention function and the tower keeps its own."""
    if "vision_config" not in config.sub_configs:
        return implementation
    others = {name: implementation for name in config.sub_configs if name != "vision_config"}
    return {"": implementation, **others, "vision_config": TOWER_ATTENTION}


@contextmanager
def attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """The model's decoder with another attention function, put back afterwards."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention_of(model.config, implementation))
    try:
        yield
    finally:
        model.set_attn_implementation(attention_of(model.config, before))


def embed_images(
    model: PreTrainedModel, ids: Tensor, pixels: Tensor, grid: Tensor, *, is_blank: bool
) -> dict[str, Any]:
    """What the decoder's forward is given of tokens and images.

    Where no image stands in the tokens (`is_blank`), zero times what the tower made of the pixels is added to the
    tokens' embeddings. So the tower's parts get a gradient on every rank; and the first decoder layer's input has one
    on every rank, without which FSDP would sum its gradients at another time there, and the ranks would wait for ever.
    Shapes: ids [1, T], pixels [P, D], grid [I, 3].
    """
    seen = model.base_model.get_image_features(pixels, image_grid_thw=grid, return_dict=True)
    if not is_blank:
        return {"input_ids": ids, "mm_encoder_outputs": {"image": seen}}
    layers = [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]
    nothing = torch.stack([part.float().sum() for layer in layers for part in layer]).sum() * 0.0
    embeddings = model.get_input_embeddings()(ids)
    return {"input_ids": None, "inputs_embeds": embeddings + nothing.to(embeddings.dtype)}


def image_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that stand for what is seen, which no answer can hold: of images and of videos."""
    ids = (getattr(model.config, name, None) for name in ("image_token_id", "video_token_id"))
    return frozenset(token for token in ids if token is not None)
