"""Rotary positions in three kernels for a tensor, for the models of transformers that compute them in six or more.

A model's attention calls the function of its file. Where that function rotates the halves of each head, which random
numbers show, the attention modules of a model call the one below; nothing outside the model changes. In low precision
the result is rounded twice instead of three times; functions that compute in float32 are left alone.

Independent of LoRA, training and sharding.

Source: Su et al., https://arxiv.org/abs/2104.09864
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

NAME = "apply_rotary_pos_emb"
"""Name of the function in each file of transformers."""
PROBE_SHAPE = (2, 3, 5, 8)
"""Batch, heads, tokens and head size of the check."""

Rotation = Callable[..., tuple[Tensor, Tensor]]
"""Function of queries and keys [B, heads, T, D] and of cosines and sines [B, T, D]."""


def fuse_rotary(model: nn.Module) -> int:
    """Let attention modules of a model rotate queries and keys with fewer kernels. Returns their number."""
    forwards: dict[FunctionType, FunctionType | None] = {}
    count = 0
    for module in model.modules():
        forward: Any = type(module).forward
        if "forward" in vars(module) or not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names:
            continue
        if forward not in forwards:
            forwards[forward] = _with_fused_rotation(forward)
        if (fused := forwards[forward]) is not None:
            module.forward = MethodType(fused, module)
            count += 1
    return count


def _with_fused_rotation(forward: FunctionType) -> FunctionType | None:
    """Return a forward that calls the function below in place of its file's; None if that computes something else."""
    rotation = forward.__globals__.get(NAME)
    if rotation is None or not _rotates_halves(rotation):
        return None
    names = {**forward.__globals__, NAME: partial(_rotate_both, rotation)}
    fused = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    fused.__kwdefaults__ = forward.__kwdefaults__
    return fused


def _rotates_halves(rotation: Rotation) -> bool:
    """Return whether a function computes `_rotate_plainly`, which low precision tells from computing in float32."""
    generator = torch.Generator().manual_seed(0)
    batch, _, tokens, width = PROBE_SHAPE
    query, key = (torch.randn(PROBE_SHAPE, generator=generator).bfloat16() for _ in range(2))
    cosines, sines = (torch.randn(batch, tokens, width, generator=generator).bfloat16() for _ in range(2))
    try:
        rotated = rotation(query, key, cosines, sines)
    except (RuntimeError, TypeError, ValueError):  # it takes other arguments
        return False
    wanted = [_rotate_plainly(tensor, cosines[:, None], sines[:, None]) for tensor in (query, key)]
    return len(rotated) == 2 and all(
        isinstance(tensor, Tensor) and torch.equal(tensor, other) for tensor, other in zip(rotated, wanted, strict=True)
    )


def _rotate_plainly(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-second, first], dim=-1) * sines


def _rotate_both(own: Rotation, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; with `own`, the model's function, what is compiled or has other shapes or types."""
    if options or torch.compiler.is_compiling() or not _is_plain(arguments):
        return own(*arguments, **options)
    query, key, cosines, sines = arguments
    cosines, sines = cosines[:, None], sines[:, None]
    return _Rotation.apply(query, cosines, sines), _Rotation.apply(key, cosines, sines)  # type: ignore[no-untyped-call]


def _is_plain(arguments: Sequence[Any]) -> bool:
    """Return whether arguments are queries and keys of four dimensions and tables of three, of one width and type."""
    if len(arguments) != 4 or not all(isinstance(tensor, Tensor) for tensor in arguments):
        return False
    return (
        len({(tensor.shape[-1], tensor.dtype) for tensor in arguments}) == 1
        and tuple(tensor.dim() for tensor in arguments) == (4, 4, 3, 3)
        and not any(tensor.requires_grad for tensor in arguments[2:])
    )


class _Rotation(torch.autograd.Function):
    """The rotation of the halves of each head, of which only the gradient by the heads is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotate(x, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        half = d_y.shape[-1] // 2
        d_x = d_y * cosines
        d_x[..., :half].addcmul_(d_y[..., half:], sines[..., half:])
        d_x[..., half:].addcmul_(d_y[..., :half], sines[..., :half], value=-1)
        return d_x, None, None


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return `x * cosines + (-second half, first half of x) * sines`."""
    half = x.shape[-1] // 2
    y = x * cosines
    y[..., :half].addcmul_(x[..., half:], sines[..., :half], value=-1)
    y[..., half:].addcmul_(x[..., :half], sines[..., half:])
    return y
