"""Errors that say that memory is exhausted, in the words of every allocator. Imports no torch."""

import re

HOST_ALLOCATOR_ERROR = "DefaultCPUAllocator: can't allocate memory"
EXHAUSTED = re.compile(
    r"(?:CUDA|HIP|XPU|MPS backend) out of memory|(?:CUDA|HIP) error: out of memory|Cuda failure.*out of memory"
    r"|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED|" + re.escape(HOST_ALLOCATOR_ERROR)
)
"""Texts of torch's allocators, of CUDA itself (AcceleratorError), of NCCL, of CUDA's libraries, and of the host."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device's memory, or that of the host, is exhausted. Other errors have the same classes."""
    return isinstance(error, RuntimeError) and EXHAUSTED.search(str(error)) is not None
