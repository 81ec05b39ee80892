"""The vision tower of a model: its name, its attention function, and the decoder's inputs from images.

The tower includes the module that merges its patches into tokens. It is frozen unless it is targeted by name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from surefoot.errors import ModelError, one_line
from surefoot.models import image_waits
from surefoot.models.decoder_layers import class_name
from surefoot.models.image_attention import IMPLEMENTATION as SEGMENTS
from surefoot.models.image_attention import hands_over_segments
from surefoot.models.image_waits import GRID, grid_of_call
from surefoot.models.pretrained import BAD_CONFIG
from surefoot.system.allocators import is_out_of_memory

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Names under which models take a mask of the tokens that stand for images."""
OF_ONE_RELEASE = "Take config.json and the processor's files from one release of the model."
"""Advice where a tower and a processor do not fit each other."""


def vision_tower(model: PreTrainedModel) -> tuple[str, nn.Module] | None:
    """Return (name, module) of the tower; None for a model that reads text only."""
    tower = model.get_encoder(modality="image")
    if tower is model or tower is model.base_model:
        return None
    return next((name, module) for name, module in model.named_modules() if module is tower)


def tower_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the type of the weights of a model's vision tower."""
    weight: Tensor = next(model.get_encoder(modality="image").parameters())
    return weight.dtype


def vision_parts(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules beside the language model that make vectors of images, by name: tower and projector."""
    return {name: module for name, module in _parts_beside_text(model).items() if not _is_audio(name)}


def vision_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters that are no part of the language model: of the tower, its projector, others.

    Parts that read audio are among them: without audio they get no gradient, and could not be trained.
    """
    if vision_tower(model) is None:
        return set()
    owner = model.base_model
    names = {
        f"{name}.{leaf}" for name, part in _parts_beside_text(model).items() for leaf, _ in part.named_parameters()
    }
    own = {id(parameter) for _, parameter in owner.named_parameters(recurse=False)}
    return names | {name for name, parameter in model.named_parameters() if id(parameter) in own}


def audio_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters that read audio."""
    return {
        f"{name}.{leaf}"
        for name, part in _parts_beside_text(model).items()
        if _is_audio(name)
        for leaf, _ in part.named_parameters()
    }


def _parts_beside_text(model: PreTrainedModel) -> dict[str, nn.Module]:
    if vision_tower(model) is None:
        return {}
    owner, decoder, head = model.base_model, model.get_decoder(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    return {
        names[part]: part
        for part in owner.children()
        if part is not head and all(module is not decoder for module in part.modules())
    }


def _is_audio(name: str) -> bool:
    return any(word in name.rpartition(".")[2] for word in ("audio", "speech"))


def tower_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Return the blocks of the tower, its largest list of modules; empty for a model that reads text only."""
    tower = vision_tower(model)
    lists = [module for module in tower[1].modules() if isinstance(module, nn.ModuleList)] if tower is not None else []
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=nn.ModuleList())


def attention_of(config: PreTrainedConfig, implementation: str) -> str | dict[str, str]:
    """Return the setting for transformers that gives the decoder an attention function and the other parts theirs."""
    if "vision_config" not in config.sub_configs:
        return implementation
    names = {
        name: implementation if name == "text_config" else _tower_attention(config, getattr(config, name, None))
        for name in config.sub_configs
    }
    return {"": implementation, **names}


def _tower_attention(config: PreTrainedConfig, part: PreTrainedConfig | None) -> str:
    """Return the attention function of a part beside the decoder: its class, or that of the whole, says what it has."""
    if part is not None and part._attn_implementation == SEGMENTS:
        return SEGMENTS
    kind = next((kind for kind in (type(part), type(config)) if kind in MODEL_MAPPING), None)
    return "sdpa" if kind is None or MODEL_MAPPING[kind]._supports_sdpa else "eager"


def plug_in(model: PreTrainedModel) -> None:
    """Let a tower that computes its images as one row attend by `image_attention`, and the host not wait for it.

    After loading: transformers would look for a package of flash attention of that name.
    """
    tower = vision_tower(model)
    for module in tower[1].modules() if tower is not None else ():
        if isinstance(module, PreTrainedModel) and hands_over_segments(type(module)):
            module.config._attn_implementation = SEGMENTS
    if tower is not None:
        image_waits.plug_in(model, list(vision_parts(model).values()))


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
    model: PreTrainedModel, ids: Tensor, tensors: Mapping[str, Tensor], *, is_blank: bool
) -> dict[str, Any]:
    """Return the arguments of the decoder's forward for tokens and images.

    `tensors`: the arguments of the model's `get_image_features`, as its processor makes them.
    If the tokens contain no image (`is_blank`), zero times the tower's output is added to the tokens'
    embeddings. So the tower's parts get a gradient on every rank; and the first decoder layer's input has one on every
    rank, without which FSDP would sum its gradients at another time there, and the ranks would wait for ever.
    Shapes: ids [R, n].
    """
    features = _image_features(model, tensors)
    if not is_blank:
        return {"input_ids": ids, **_token_types(model, ids), "mm_encoder_outputs": {"image": features}}
    layers = [_image_vectors(model, features), *(getattr(features, "deepstack_features", None) or ())]
    nothing = torch.stack([part.float().sum() for layer in layers for part in layer]).sum() * 0.0
    embeddings = model.get_input_embeddings()(ids)
    return {"input_ids": None, "inputs_embeds": embeddings + nothing.to(embeddings.dtype)}


def _image_features(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tower's output. Pixels of a smaller type than its weights are widened: Llama 4's are in bfloat16."""
    dtype = tower_dtype(model)
    widened = {
        name: tensor.to(torch.promote_types(tensor.dtype, dtype)) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    if GRID in widened:
        widened[GRID] = grid_of_call(model, widened[GRID], widened["pixel_values"].device)
    return model.base_model.get_image_features(**widened, return_dict=True)


def _image_vectors(model: PreTrainedModel, features: Any) -> Any:
    """Return the vectors that take the places of image tokens: one tensor, or one for each image. Shapes: [..., H]."""
    if features.pooler_output is None:  # Llama 4 projects the tower's output in its forward
        return model.base_model.multi_modal_projector(features.last_hidden_state.flatten(0, -2))
    return features.pooler_output


def check_tower(model: PreTrainedModel, tensors: Mapping[str, Tensor], num_tokens: int) -> None:
    """Check that the vision tower makes a vector for each of the `num_tokens` tokens of one image.

    `tensors`: see `embed_images`. Raises: ModelError.
    """
    try:
        parts = _image_vectors(model, _image_features(model, tensors))
    except BAD_CONFIG as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{class_name(model)}: its vision tower cannot compute an image as its processor makes it: "
            f"{one_line(error)}. {OF_ONE_RELEASE}"
        ) from error
    vectors = sum(part.numel() for part in parts) // model.config.get_text_config().hidden_size
    if vectors != num_tokens:
        raise ModelError(
            f"{class_name(model)}: its processor writes {num_tokens} tokens for an image of which its vision tower "
            f"makes {vectors} vectors. {OF_ONE_RELEASE}"
        )


def _token_types(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Return the argument that says which tokens stand for images, for models whose forward takes it."""
    names = signature(type(model.base_model).forward).parameters
    return {name: (ids == model.config.image_token_id).int() for name in TOKEN_TYPES if name in names}


def image_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that stand for images, videos and sound, which no answer can contain."""
    ids = (getattr(model.config, name, None) for name in ("image_token_id", "video_token_id", "audio_token_id"))
    return frozenset(token for token in ids if token is not None)
