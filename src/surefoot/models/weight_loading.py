"""Loading of a model's weights by transformers' loader, changed to read them tensor by tensor, each rank its part."""

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import PreTrainedConfig, PreTrainedModel, core_model_loading, modeling_utils
from transformers.core_model_loading import Transpose
from transformers.distributed import DistributedConfig
from transformers.distributed.sharding_utils import DtensorShardOperation

from surefoot.errors import ModelError
from surefoot.models import attention, score_head, vision
from surefoot.models.checkpoint_weights import CheckpointWeights, check_single_experts
from surefoot.models.lora import is_lora
from surefoot.models.pretrained import load_config, meta_model, model_class, quiet_transformers, weight_errors
from surefoot.models.quantization.base import FLOAT, WeightFormat
from surefoot.models.quantization.released import find_quantization
from surefoot.models.quantization.store_on_load import StoreOnLoad

ADVICE_ON_WEIGHTS = {
    "missing": "Filling them with random values would train a broken model; use a complete checkpoint.",
    "of another shape": "config.json does not belong to these weights, or a file is damaged.",
    "unknown": "Without them the model would compute something else. Does config.json belong to these weights?",
}
"""Advice on weights that do not fit a model, by the kind of problem."""
FAILED_CONVERSION = "automatic conversion of the weights"
"""Part of transformers' message for tensors that it could not join, which it names in its log alone."""
GLIBC_MOST_BYTES = 1 << 25
"""Upper bound of glibc's own tuning of the threshold for large allocations."""


def check_weights_fill(folder: Path, *, has_score: bool = False) -> None:
    """Raise ModelError for files that are not exactly the weights of config.json's model. Reads headers only.

    With `has_score` they may be those of the language model.

    A folder may also hold an adapter, which transformers would load, too.
    """
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} holds an adapter (adapter_config.json) beside a model's config.json, and transformers would "
            "load both as one. Give the folder of the base model, and the adapter as init_adapter or --adapter."
        )
    meta_model(folder, has_score=has_score)  # names what is wrong with the config alone
    config = load_config(folder, has_score=has_score)
    cls = model_class(folder, config, has_score=has_score)
    load_weights(cls, folder, config, torch.bfloat16, torch.device("meta"))


def load_weights(
    cls: type[PreTrainedModel],
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    weight_format: WeightFormat = FLOAT,
    *,
    is_sharded: bool = False,
) -> PreTrainedModel:
    """Return a model with the weights of a folder, in full or as this rank's part of it.

    On the meta device nothing but the headers of the files is read.
    Raises: ModelError for weights that do not fill the model exactly.
    """
    options: dict[str, Any] = {"device_map": {"": device}} if device.type != "cpu" else {}
    if is_sharded:  # transformers does not read its values: our subclass lays the model out
        options["distributed_config"] = DistributedConfig()
    if weight_format is not FLOAT:
        options["quantization_config"] = StoreOnLoad(weight_format)
    with quiet_transformers(), weight_errors(folder), leave_what_was_read():
        # One GPU reads ahead in threads: that is faster, and its host memory holds only tensors in transit.
        is_streamed = (
            device.type in ("cpu", "meta") or is_sharded or find_quantization(folder / "config.json") is not None
        )
        try:
            model, info = (_streamed(cls, folder, dtype, device) if is_streamed else cls).from_pretrained(
                str(folder),
                config=config,
                dtype=dtype,
                attn_implementation=vision.attention_of(config, attention.implementation_for(cls, config)),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                local_files_only=True,
                **options,
            )
        except RuntimeError as error:
            if FAILED_CONVERSION in str(error):
                check_single_experts(CheckpointWeights(folder).weights)
            raise
    missing, unknown = set(info["missing_keys"]), set(info["unexpected_keys"])
    if score_head.head_of(model) is not None and score_head.WEIGHT in missing:  # the files are of the language model
        missing.remove(score_head.WEIGHT)
        unknown -= output_layer_names(folder)
    problems = {
        "missing": sorted(name for name in missing if not is_lora(name)),
        "of another shape": [
            f"{name} ({tuple(stored)} in the files, {tuple(own)} by config.json"
            f"{', in the part of this rank' if is_sharded else ''})"
            for name, stored, own in sorted(info["mismatched_keys"])
        ],
        "unknown": [name for name in sorted(unknown) if not _predicts_further_tokens(name, config)],
    }
    if any(".experts" in name for name in (*problems["missing"], *problems["of another shape"])):
        check_single_experts(CheckpointWeights(folder).weights)
    for kind, names in problems.items():
        if names:
            raise ModelError(
                f"{folder}: {len(names)} weights are {kind} for {cls.__name__}: {', '.join(names[:3])}. "
                f"{ADVICE_ON_WEIGHTS[kind]}"
            )
    if weight_format is not FLOAT:
        model.hf_quantizer.remove_quantization_config(model)  # a model that is written has its own types
    return model


def output_layer_names(folder: Path) -> set[str]:
    """Return the names of the parameters of the output layer of a folder's language model."""
    model = meta_model(folder)
    output_layer = model.get_output_embeddings()
    own = set(output_layer.parameters()) if output_layer is not None else set()
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter in own}


def _predicts_further_tokens(name: str, config: PreTrainedConfig) -> bool:
    """Return whether a weight is of the layers behind the decoder's last that config.json declares to predict tokens.

    transformers builds none of them, and ignores those of some releases by their numbers.
    """
    text, number = config.get_text_config(), re.search(r"\blayers\.(\d+)\.", name)
    declared = getattr(text, "num_nextn_predict_layers", None)
    if number is None or not isinstance(declared, int):
        return False
    return 0 <= int(number[1]) - int(text.num_hidden_layers) < declared


def _streamed(
    cls: type[PreTrainedModel], folder: Path, dtype: torch.dtype, device: torch.device
) -> type[PreTrainedModel]:
    """Return a subclass whose weights are read tensor by tensor as they are placed, so that at most one is held twice.

    Quantised weights of `folder` are read back to `dtype`. For the meta device nothing is read.

    transformers' own way maps the files into memory, which counts as every rank's, and reads ahead in threads without
    limit. With 4 ranks on one machine that held 2.1 times the checkpoint's bytes; this holds 1.06 times.
    """

    def load(model: PreTrainedModel, state_dict: Any, files: list[str] | None, *rest: Any) -> Any:
        if files and all(file.endswith(".safetensors") for file in files):
            weights = CheckpointWeights(folder, dtype)
            state_dict = weights.slices if device.type != "meta" else weights.slices_without_values()
        with _load_one_tensor_at_a_time(), _detect_layout_from_part(), _convert_whole_tensors():
            return cls._load_pretrained_model(model, state_dict, files, *rest)

    return type(cls.__name__, (cls,), {"_load_pretrained_model": staticmethod(load), "__module__": cls.__module__})


def computing_on(cls: type[PreTrainedModel], device: torch.device) -> type[PreTrainedModel]:
    """Return a subclass with `device` as its device, wherever its first parameter is: inputs belong there."""
    return type(cls.__name__, (cls,), {"device": property(lambda _: device), "__module__": cls.__module__})


@contextmanager
def parts_stay_in_host_memory() -> Iterator[None]:
    """Keep parts in host memory; `DTensor.from_local` in transformers' loader would move them to the mesh's device."""
    names = [(module, "_dtensor_from_local_like") for module in (core_model_loading, modeling_utils)]
    originals = [getattr(module, name) for module, name in names]
    try:
        for module, name in names:
            setattr(module, name, laid_out_like)
        yield
    finally:
        for (module, name), original in zip(names, originals, strict=True):
            setattr(module, name, original)


def laid_out_like(local: Tensor, reference: DTensor) -> DTensor:
    """Return a part as a DTensor with the mesh, placements and full shape of `reference`, on the part's device."""
    full_meta = TensorMeta(reference.shape, reference.stride(), local.dtype)
    spec = DTensorSpec(reference.device_mesh, reference.placements, tensor_meta=full_meta)
    return DTensor(local.contiguous(), spec, requires_grad=False)


@contextmanager
def _detect_layout_from_part() -> Iterator[None]:
    """Detect the layout of stacks of experts from a part; transformers detects it from the shape of the full stack.

    The part of an expert-parallel stack holds some of its experts, so it has neither of the two shapes; transformers
    up to 5.23 transposed it although its layout was right. The two dimensions in question are those of one expert.
    """
    original = Transpose.convert

    def convert(self: Transpose, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        (tensors,) = input_dict.values()
        value = tensors[0] if isinstance(tensors, list) else tensors
        if self.check_dims and value.shape[1:] == kwargs["model"].get_parameter(kwargs["full_layer_name"]).shape[1:]:
            return {self.get_target_pattern(input_dict, kwargs["source_patterns"], kwargs["target_patterns"]): value}
        turned: dict[str, Tensor] = original(self, input_dict, **kwargs)
        return turned

    Transpose.convert = convert
    try:
        yield
    finally:
        Transpose.convert = original


@contextmanager
def _convert_whole_tensors() -> Iterator[None]:
    """Let conversions join, split and permute whole tensors, and cut their results into each rank's part.

    transformers up to 5.23 cuts the tensors of the checkpoint first. Three convolutions that become one along their
    first dimension, or a fused weight that becomes several, would have their rows in another order on several ranks.
    Stacks of experts are cut first, as before: their conversions change the dimensions of one expert.
    """
    cut, place = DtensorShardOperation.shard_tensor, core_model_loading.set_param_for_module

    def read(
        self: DtensorShardOperation, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None
    ) -> Any:
        shape = source.shape if isinstance(source, Tensor) else source.get_shape()
        is_one_of_several = tensor_idx is not None and len(shape) == self.param_ndim - 1
        is_stack = len(shape) > 2 and shape[0] == self._axis0_size
        if tensor_idx is None or is_one_of_several or is_stack:
            return cut(self, source, tensor_idx, device, dtype)
        return source[...].to(device=device, dtype=dtype)

    def set_part(model: PreTrainedModel, target_name: str, param_value: Tensor, *rest: Any) -> None:
        owner, _, leaf = target_name.rpartition(".")
        reference = getattr(model.get_submodule(owner), leaf, None)
        is_part = isinstance(reference, DTensor) and reference.to_local().shape != reference.shape
        if isinstance(reference, DTensor) and is_part and param_value.shape == reference.shape:
            param_value = cut(
                DtensorShardOperation(reference), param_value, None, param_value.device, param_value.dtype
            )
        place(model, target_name, param_value, *rest)

    DtensorShardOperation.shard_tensor = read
    core_model_loading.set_param_for_module = set_part
    try:
        yield
    finally:
        DtensorShardOperation.shard_tensor = cut
        core_model_loading.set_param_for_module = place


@contextmanager
def leave_what_was_read() -> Iterator[None]:
    """Initialise no module whose parameters were all read, unless it has buffers, which may be computed there.

    transformers up to 5.23 runs every initialiser and keeps it from writing. Hy-V4's fails on a part of a parameter.
    """
    original = PreTrainedModel._initialize_weights

    def initialise(self: PreTrainedModel, module: nn.Module, is_custom_code: bool = False) -> None:
        original(self, module, is_custom_code or next(module.buffers(), None) is None)

    PreTrainedModel._initialize_weights = initialise
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = original


@contextmanager
def _load_one_tensor_at_a_time() -> Iterator[None]:
    """Disable reading ahead in threads, and reuse or return memory that is freed."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    _tune_allocator(mmap_threshold_bytes=1 << 22, trim_threshold_bytes=1 << 22)
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
        _tune_allocator(mmap_threshold_bytes=GLIBC_MOST_BYTES)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for the next step instead of returning it and faulting every page in again.

    Training on the CPU allocates the same large activations each step; this saved 5-10 % of the time where measured.
    """
    _tune_allocator(mmap_threshold_bytes=1 << 30, trim_threshold_bytes=1 << 30)


def _tune_allocator(**thresholds_bytes: int) -> None:
    """Set thresholds of mallopt(3) if the C library is glibc; with another there is nothing to tune."""
    names = {"mmap_threshold_bytes": -3, "trim_threshold_bytes": -1}
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    for threshold, value in thresholds_bytes.items():
        libc.mallopt(names[threshold], value)
