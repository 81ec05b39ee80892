"""Values of `auto` and absent settings, set in this one place before anything is compared, saved or loaded."""

import os
from dataclasses import replace
from typing import Literal

import torch

from surefoot.config import LoadedConfig
from surefoot.errors import ConfigError, one_line
from surefoot.system.nvml import list_names


def device_type(loaded: LoadedConfig) -> Literal["cpu", "cuda"]:
    """Return the device type that a config trains on.

    Raises: ConfigError for a missing device, and for GPUs that torch cannot use and the config does not mention.
    """
    run = loaded.run
    has_cuda = torch.cuda.is_available()
    if run.device == "cuda" and not has_cuda:
        raise ConfigError(f"device=cuda, but torch {torch.__version__} sees no CUDA device ({loaded.where('device')}).")
    if run.device != "auto":
        return run.device
    if not has_cuda and (names := list_names()):
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(
            f"device: auto would train on the CPU, although this machine has {len(names)} x {names[0]}. torch "
            f"{torch.__version__} cannot use them{f' with CUDA_VISIBLE_DEVICES={named}' if named else ''}: "
            f"{_cuda_problem()}. Mend that (`surefoot doctor` compares torch and driver), or set device: cpu "
            f"({loaded.where('device')})."
        )
    return "cuda" if has_cuda else "cpu"


def _cuda_problem() -> str:
    """Return why torch cannot use the GPUs of this machine."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # an AssertionError: built without CUDA
        return one_line(error)
    return "it finds none"


def resolve(loaded: LoadedConfig, num_ranks: int) -> LoadedConfig:
    """Return the config with explicit device, computing type and global batch size, for a run of `num_ranks` ranks.

    Raises: ConfigError for a missing device, or a step that would split the sequences of one row.
    """
    run = loaded.run
    device = device_type(loaded)
    has_bfloat16 = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    dtype = run.dtype if run.dtype != "auto" else "bfloat16" if has_bfloat16 else "float32"
    size = run.global_batch_size or run.sequences_per_step * num_ranks
    setting = run.sequences_per_row_setting
    if setting is not None and size % run.sequences_per_row:
        raise ConfigError(
            f"a step has {size} sequences (per_device_train_batch_size x gradient_accumulation_steps x ranks), which "
            f"is not a multiple of {setting}={run.sequences_per_row}. Set global_batch_size "
            f"({loaded.where(setting, 'per_device_train_batch_size')})."
        )
    values = {"device": device, "dtype": dtype, "global_batch_size": size, "gradient_accumulation_steps": None}
    return replace(loaded, run=run.model_copy(update=values))
