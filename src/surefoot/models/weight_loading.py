"""Changes to transformers' loader that read a checkpoint tensor by tensor, each rank its part, to its final device."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import PreTrainedModel, core_model_loading, modeling_utils
from transformers.core_model_loading import Transpose
from transformers.distributed.sharding_utils import DtensorShardOperation

from surefoot.models.checkpoint_weights import CheckpointWeights

GLIBC_MOST_BYTES = 1 << 25
"""Upper bound of glibc's own tuning of the threshold for large allocations."""


def streamed(cls: type[PreTrainedModel], folder: Path, dtype: torch.dtype) -> type[PreTrainedModel]:
    """Return a subclass whose weights are read tensor by tensor as they are placed, so that at most one is held twice.

    Quantised weights of `folder` are read back to `dtype`.

    transformers' own way maps the files into memory, which counts as every rank's, and reads ahead in threads without
    limit. With 4 ranks on one machine that held 2.1 times the checkpoint's bytes; this holds 1.06 times.
    """

    def load(model: PreTrainedModel, state_dict: Any, files: list[str] | None, *rest: Any) -> Any:
        if files and all(file.endswith(".safetensors") for file in files):
            state_dict = CheckpointWeights(folder, dtype).slices
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
