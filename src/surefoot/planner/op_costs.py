"""Costs of one op of a trace: FLOPs of matrix products, bytes that other ops move."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

aten = torch.ops.aten
ATTEND = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTEND_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
ATTENTION_OPS = (ATTEND, ATTEND_BACKWARD)
RESERVING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""Ops that neither read nor write the memory that they return."""
PICKING = {aten.embedding, aten.index, aten.index_select, aten.gather}
"""Ops that read as much of a table as they return."""
OVERWRITING = {aten.copy_, aten.fill_, aten.zero_}
"""Ops that do not read what they write."""


def count_flops(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Count the FLOPs of a matrix product or an attention; causal attention computes half of the products."""
    if func is ATTEND:
        is_causal = len(args) > 4 and args[4]  # args omit defaults
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])) // (2 if is_causal else 1))
    if func is ATTEND_BACKWARD:  # five matrix products; the forward has two
        is_causal = args[7]
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[1:4])) * 5 // (4 if is_causal else 2))
    return int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=output))


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an op's arguments or results: a tensor, or lists of them; torch's own walk takes longer."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in list_tensors(part)]


def count_moved_bytes(func: Any, args: Any, output: Any) -> int:
    """Count the bytes that an op reads and writes."""
    written = sum(tensor.nbytes for tensor in list_tensors(output))
    if not written or func.overloadpacket in RESERVING:  # no output tensor: a query, such as of a device
        return 0
    read = sum(tensor.nbytes for tensor in list_tensors(args))
    if func.overloadpacket in OVERWRITING:
        return read
    return written + (min(read, written) if func.overloadpacket in PICKING else read)
