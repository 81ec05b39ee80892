"""Allocators of memory: their setting in the environment, and the errors with which they refuse. Imports no torch."""

import os
import re

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of torch's allocator on GPUs."""
EXPANDABLE = "expandable_segments:True"
"""The setting with which its segments grow, so that free memory does not end up in pieces."""
HOST_ALLOCATOR_ERROR = "DefaultCPUAllocator: can't allocate memory"
EXHAUSTED = re.compile(
    r"(?:CUDA|HIP) (?:driver )?error: out of memory|Triton Error \[CUDA\]: out of memory|Cuda failure.*out of memory"
    r"|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED|" + re.escape(HOST_ALLOCATOR_ERROR)
)
"""Texts of CUDA itself (AcceleratorError), of Triton, of NCCL, of CUDA's libraries, and of torch on the host."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device's memory, or that of the host, is exhausted. Other errors have the same classes."""
    names = {kind.__name__ for kind in type(error).__mro__}  # torch's class for devices is OutOfMemoryError
    return "OutOfMemoryError" in names or ("RuntimeError" in names and EXHAUSTED.search(str(error)) is not None)


def allocator_settings() -> str:
    """Return the settings of torch's allocator on GPUs in the environment; empty if there are none."""
    return next((value for name in VARIABLES if (value := os.environ.get(name))), "")
