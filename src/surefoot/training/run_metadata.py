"""Metadata of a run's hardware and software: environment.json."""

import os
import platform
import time
from importlib.metadata import version
from typing import Any

import torch
import transformers


def environment(device: torch.device) -> dict[str, Any]:
    """Return the hardware and software that the run uses."""
    return {
        "surefoot": version("surefoot"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
