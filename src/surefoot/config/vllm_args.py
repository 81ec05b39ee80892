"""Values in `vllm_args` for the server that a run starts. Both spellings are read, and the last occurrence counts."""

import re
from collections.abc import Sequence
from itertools import pairwise

MEMORY_SHARE, TENSOR_PARALLEL = "--gpu-memory-utilization", "--tensor-parallel-size"
MOST_TOKENS = "--max-model-len"
OF_THE_RUN = {
    "--host": "the server listens on this machine alone",
    "--port": "the run takes a free one",
    "--api-key": "the run sends none to a server of its own",
    "--served-model-name": "the run asks for the model by its own name",
    "--logprobs-mode": "it follows from temperature, top_p and top_k",
    "--generation-config": "completions are drawn as the run's settings say, not as the model's folder does",
    "--max-lora-rank": "it follows from lora_rank",
    "--max-loras": "the newest adapter is there before the one before it goes",
    "--no-enable-lora": "adapters are what the server is sent",
    "--uds": "the run reaches the server over a port",
    "--config": "its contents could not be compared with the run's settings. Give its arguments one by one",
}
"""Arguments that follow from the run -> why another value would break it."""
UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
"""Suffixes of a number of tokens, as vLLM reads them."""
PIPELINE_PARALLEL = "--pipeline-parallel-size"
SMALLER = ("--quantization", "--cpu-offload-gb", "--load-format")
"""Arguments with which a server may hold less of a model than its files contain."""
SHORT = {"-tp": TENSOR_PARALLEL, "-pp": PIPELINE_PARALLEL, "-q": "--quantization"}
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that --max-lora-rank accepts."""
USUAL_SHARE = 0.92
"""Default share of a GPU's memory that vLLM 0.32 takes."""


def allowed_lora_rank(rank: int) -> int:
    """Return the smallest value of --max-lora-rank that holds an adapter's rank; the rank itself beyond all of them."""
    return next((allowed for allowed in LORA_RANKS if allowed >= rank), rank)


def value_of(arguments: Sequence[str], wanted_name: str) -> str | None:
    """Return the value of an argument; None if it is not given."""
    last_value = None
    for argument, next_argument in pairwise([*arguments, ""]):
        name, _, value = argument.partition("=")
        name = SHORT.get(name, name.replace("_", "-"))
        if name == wanted_name:
            last_value = value or next_argument
    return last_value


def without(arguments: Sequence[str], unwanted: str) -> list[str]:
    """Return the arguments without `unwanted` and its value."""
    remaining: list[str] = []
    is_value = False
    for argument in arguments:
        name, has_value, _ = argument.partition("=")
        is_unwanted = SHORT.get(name, name.replace("_", "-")) == unwanted
        if not is_unwanted and not is_value:
            remaining.append(argument)
        is_value = is_unwanted and not has_value
    return remaining


def most_tokens(arguments: Sequence[str]) -> int | None:
    """Return the token limit of a prompt with its completion; None if it is not given, or the server determines it.

    Raises: ValueError for text that is not a number of tokens.
    """
    value = value_of(arguments, MOST_TOKENS)
    if value is None or value in ("-1", "auto"):
        return None
    with_unit = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", value)
    return int(float(with_unit[1]) * UNITS[with_unit[2]]) if with_unit else int(value)


def memory_share(arguments: Sequence[str]) -> float:
    """Return the share of each GPU's memory that a server takes. Raises: ValueError for a value that is not a share."""
    share = float(value_of(arguments, MEMORY_SHARE) or USUAL_SHARE)
    if not 0 < share <= 1:
        raise ValueError(f"{share} is not above 0 and up to 1")
    return share


def tensor_parallel(arguments: Sequence[str]) -> int:
    """Return the number of GPUs that each layer is split over. Raises: ValueError for a number below 1."""
    return _read_size(arguments, TENSOR_PARALLEL)


def pipeline_parallel(arguments: Sequence[str]) -> int:
    """Return the number of GPUs that the layers are spread over. Raises: ValueError for a number below 1."""
    return _read_size(arguments, PIPELINE_PARALLEL)


def _read_size(arguments: Sequence[str], name: str) -> int:
    size = int(value_of(arguments, name) or 1)
    if size < 1:
        raise ValueError(f"{size} is no number from 1 on")
    return size
