"""How transformers' loader is made to read a checkpoint: tensor by tensor, each rank its part, to where it belongs."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import PreTrainedModel, core_model_loading, modeling_utils
from transformers.core_model_loading import Transpose

GLIBC_MOST_BYTES = 1 << 25
"""Where glibc's own tuning of the threshold for large allocations ends."""


def streamed(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A subclass whose weights are read tensor by tensor as they are placed, so that no more than one is held twice.

    transformers' own way maps the files into memory, which counts as every rank's, and reads ahead in threads without
    limit. With 4 ranks that share one machine that held 2.1 times the checkpoint's bytes; so it is 1.06 times.
    """

    def load(model: PreTrainedModel, state_dict: Any, files: list[str] | None, *rest: Any) -> Any:
        if files and all(file.endswith(".safetensors") for file in files):
            state_dict = _slices(files)
        with _one_tensor_at_a_time(), _layout_told_by_a_part():
            return cls._load_pretrained_model(model, state_dict, files, *rest)

    return type(cls.__name__, (cls,), {"_load_pretrained_model": staticmethod(load), "__module__": cls.__module__})


def computing_on(cls: type[PreTrainedModel], device: torch.device) -> type[PreTrainedModel]:
    """A subclass that takes `device` for its own, wherever its first parameter lies: inputs belong there."""
    return type(cls.__name__, (cls,), {"device": property(lambda _: device), "__module__": cls.__module__})


@contextmanager
def parts_stay_in_host_memory() -> Iterator[None]:
    """`DTensor.from_local`, with which transformers' loader places parts, would move them to their mesh's device."""
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
    """A part as a DTensor with the mesh, placements and whole shape of `reference`, wherever the part lies."""
    whole = TensorMeta(reference.shape, reference.stride(), local.dtype)
    spec = DTensorSpec(reference.device_mesh, reference.placements, tensor_meta=whole)
    return DTensor(local.contiguous(), spec, requires_grad=False)


@contextmanager
def _layout_told_by_a_part() -> Iterator[None]:
    """Stacks of experts are stored in two layouts, which transformers tells apart by the shape of the whole.

    What is read of a stack that is shared out is some of its experts, which then has neither shape; up to 5.23 it was
    turned over although it lay right. The two dimensions in question are those of one expert.
    """
    original = Transpose.convert

    def convert(self: Transpose, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        (found,) = input_dict.values()
        value = found[0] if isinstance(found, list) else found
        if self.check_dims and value.shape[1:] == kwargs["model"].get_parameter(kwargs["full_layer_name"]).shape[1:]:
            return {self.get_target_pattern(input_dict, kwargs["source_patterns"], kwargs["target_patterns"]): value}
        turned: dict[str, Tensor] = original(self, input_dict, **kwargs)
        return turned

    Transpose.convert = convert
    try:
        yield
    finally:
        Transpose.convert = original


def _slices(files: list[str]) -> dict[str, Any]:
    """Every tensor of safetensors files, unread; cutting one reads that part."""
    slices: dict[str, Any] = {}
    for file in files:
        pointer: Any = safe_open(file, framework="pt", backend="pread")
        names: list[str] = pointer.keys()
        slices |= {name: pointer.get_slice(name) for name in names}
    return slices


@contextmanager
def _one_tensor_at_a_time() -> Iterator[None]:
    """No threads that read ahead; and what is given back to the allocator is used again, or returned."""
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
    """Set thresholds of mallopt(3) where the C library is glibc; with another there is nothing to tune."""
    names = {"mmap_threshold_bytes": -3, "trim_threshold_bytes": -1}
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    for threshold, value in thresholds_bytes.items():
        libc.mallopt(names[threshold], value)
