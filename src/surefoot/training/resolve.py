"""The one place where `auto` and absent settings get their values, before anything is compared, saved or loaded."""

from dataclasses import replace

import torch

from surefoot.config import LoadedConfig
from surefoot.errors import ConfigError


def resolve(loaded: LoadedConfig) -> LoadedConfig:
    """The config with its device, computing type and global batch size written out.

    Raises: ConfigError for a device that is not there.
    """
    run = loaded.run
    has_cuda = torch.cuda.is_available()
    if run.device == "cuda" and not has_cuda:
        raise ConfigError(f"device=cuda, but torch {torch.__version__} sees no CUDA device ({loaded.where('device')}).")
    device = run.device if run.device != "auto" else "cuda" if has_cuda else "cpu"
    dtype = run.dtype if run.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    values = {"device": device, "dtype": dtype, "global_batch_size": run.sequences_per_step}
    return replace(loaded, run=run.model_copy(update=values))
