"""Images on a GPU without a wait of the host: numbers that a model would read back from the device stay on the host.

The grid of an image, its patches along time, height and width, gives a vision tower its positions and its segments.
transformers computes them from the grid on the device, and reads it some ten times in each forward. Here the functions
that do so (`transformers.vision_utils`) get the grid's copy on the host, and only their results are sent.
"""

import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel, vision_utils

from surefoot.system.pinned_copy import send

GRID = "image_grid_thw"
"""Argument of a model that holds the patches of each image along time, height and width."""
HELPERS = {function for name, function in vars(vision_utils).items() if name.startswith("get_")}
"""Functions of transformers that read the numbers of their first argument: a grid, sizes, or segments made of them."""
READ_AS_NUMBERS = frozenset(
    {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm46v"}
)
"""Types of models whose `get_image_features` hands the grid to the tower and reads its numbers, and nothing else."""
WITH_IMAGES = ("self", "input_ids", "inputs_embeds", "image_features")
"""Arguments of a `get_placeholder_mask` that finds the places of images alone."""
_ON_HOST = WeakIdKeyDictionary()
"""Copy on the host of each grid, or segments made of one, that is on a device."""


def send_known(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor on `device` whose numbers the host knows. On the host, return the tensor itself."""
    sent = send(tensor, device)
    if sent is not tensor:
        _ON_HOST[sent] = tensor
    return sent


def plug_in(model: PreTrainedModel, parts: list[nn.Module]) -> None:
    """Let a model and its parts that make vectors of images compute without waits. Changes no number."""
    for part in parts:
        part.register_forward_pre_hook(_send_grid, with_kwargs=True)
        for module in part.modules():
            _plug_in_helpers(vars(sys.modules[type(module).__module__]))
    owner: Any = model.base_model
    find_places = getattr(type(owner), "get_placeholder_mask", None)
    arguments = dict(signature(find_places).parameters) if find_places is not None else {}
    if "image_features" in arguments and arguments["image_features"].default is None:
        owner.get_placeholder_mask = MethodType(_find_places, owner)
    elif tuple(arguments) == WITH_IMAGES and _finds_image_tokens(owner):
        owner.get_placeholder_mask = MethodType(_find_image_places, owner)
    decoder: Any = model.get_decoder()
    if hasattr(type(decoder), "_deepstack_process"):
        decoder._deepstack_process = _add_at_places


def grid_of_call(model: PreTrainedModel, grid: Tensor, device: torch.device) -> Tensor:
    """Return the grid as the model's `get_image_features` takes it, when its other arguments are on `device`."""
    return grid if model.config.model_type in READ_AS_NUMBERS else send_known(grid, device)


def _send_grid(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Send what a part of the model gets on the host to the device of its other arguments.

    With offload, the weights of a part are on the host until its forward begins.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    sent: tuple[Any, dict[str, Any]] = tree_map_only(Tensor, lambda tensor: send_known(tensor, device), (args, kwargs))
    return sent


def _plug_in_helpers(namespace: dict[str, Any]) -> None:
    """Let a file of transformers call functions that compute on the host."""
    for name, function in namespace.items():
        if isinstance(function, FunctionType) and function in HELPERS:
            namespace[name] = _computing_on_host(function)


def _computing_on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def compute(*args: Any, **options: Any) -> Any:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        on_host = _ON_HOST.get(first) if first is not None else None
        if first is None or on_host is None:
            return function(*args, **options)
        device = first.device
        results = function(on_host, *args[1:], **options)
        return tree_map_only(Tensor, lambda result: send_known(result, device), results)

    return compute


def _find_places(
    owner: Any,
    input_ids: Tensor | None,
    inputs_embeds: Tensor,
    image_features: Tensor | None = None,  # noqa: ARG001 - they are not compared with the places, which would wait
    video_features: Tensor | None = None,  # noqa: ARG001
    **options: Any,
) -> Any:
    """Return the masks of the places of images in a row: `get_placeholder_mask` without its check.

    `check_tower` compares places and vectors once, and the data have the places that the processor wrote.
    """
    return type(owner).get_placeholder_mask(owner, input_ids, inputs_embeds, **options)


def _finds_image_tokens(owner: Any) -> bool:
    """Return whether a model takes the tokens of one number for the places of images."""
    number = getattr(owner.config, "image_token_id", None)
    if number is None:
        return False
    ids, embeddings, features = torch.tensor([[number, number + 1]]), torch.zeros(1, 2, 4), torch.zeros(1, 1, 4)
    try:
        mask = type(owner).get_placeholder_mask(owner, ids, embeddings, features)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it takes other vectors
        return False
    return torch.equal(mask, _find_image_places(owner, ids, embeddings, features))


def _find_image_places(owner: Any, input_ids: Tensor | None, inputs_embeds: Tensor, image_features: Tensor) -> Tensor:
    """Return the mask of the places of images in a row, [R, n, 1]: `get_placeholder_mask` without its check.

    As in `_find_places`, for classes whose own function always compares the places with the vectors.
    """
    if input_ids is None:
        mask: Tensor = type(owner).get_placeholder_mask(owner, input_ids, inputs_embeds, image_features)
        return mask
    return input_ids.eq(owner.config.image_token_id).unsqueeze(-1).to(inputs_embeds.device)


def _add_at_places(hidden: Tensor, places: Tensor, vectors: Tensor) -> Tensor:
    """Add vectors to the tokens that stand for images. Shapes: hidden [R, n, H], places [R, n], vectors [I, H]."""
    added = torch.zeros_like(hidden).masked_scatter(places.unsqueeze(-1), vectors.to(hidden.dtype))
    return hidden + added
