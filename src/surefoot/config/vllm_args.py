"""What `vllm_args` say of the server that a run starts. Both spellings are read, and the last word counts."""

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
    "--config": "what it says could not be compared with the run. Give its arguments one by one",
}
"""Arguments that follow from the run, and why another value would break it."""
UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
"""Behind a number of tokens, as vLLM reads them."""
PIPELINE_PARALLEL = "--pipeline-parallel-size"
SMALLER = ("--quantization", "--cpu-offload-gb", "--load-format")
"""With which a server may hold less of a model than its files have."""
SHORT = {"-tp": TENSOR_PARALLEL, "-pp": PIPELINE_PARALLEL, "-q": "--quantization"}
USUAL_SHARE = 0.92
"""Of a GPU that vLLM 0.32 takes where it is not told."""


def value_of(arguments: Sequence[str], wanted: str) -> str | None:
    """Of an argument; None where it is not given."""
    found = None
    for one, after in pairwise([*arguments, ""]):
        name, _, value = one.partition("=")
        name = SHORT.get(name, name.replace("_", "-"))
        if name == wanted:
            found = value or after
    return found


def without(arguments: Sequence[str], unwanted: str) -> list[str]:
    """The others."""
    kept: list[str] = []
    is_value = False
    for one in arguments:
        name, has_value, _ = one.partition("=")
        is_unwanted = SHORT.get(name, name.replace("_", "-")) == unwanted
        if not is_unwanted and not is_value:
            kept.append(one)
        is_value = is_unwanted and not has_value
    return kept


def most_tokens(arguments: Sequence[str]) -> int | None:
    """Of a prompt with its completion; None where it is not given, or the server is to find it out.

    Raises: ValueError for what is no number of tokens.
    """
    given = value_of(arguments, MOST_TOKENS)
    if given is None or given in ("-1", "auto"):
        return None
    with_unit = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", given)
    return int(float(with_unit[1]) * UNITS[with_unit[2]]) if with_unit else int(given)


def memory_share(arguments: Sequence[str]) -> float:
    """What a server takes of each of its GPUs. Raises: ValueError for what is no share."""
    share = float(value_of(arguments, MEMORY_SHARE) or USUAL_SHARE)
    if not 0 < share <= 1:
        raise ValueError(f"{share} is not above 0 and up to 1")
    return share


def tensor_parallel(arguments: Sequence[str]) -> int:
    """Over how many GPUs it cuts each layer. Raises: ValueError for what is no number from 1 on."""
    return _size(arguments, TENSOR_PARALLEL)


def pipeline_parallel(arguments: Sequence[str]) -> int:
    """Over how many GPUs it spreads the layers. Raises: ValueError for what is no number from 1 on."""
    return _size(arguments, PIPELINE_PARALLEL)


def _size(arguments: Sequence[str], name: str) -> int:
    size = int(value_of(arguments, name) or 1)
    if size < 1:
        raise ValueError(f"{size} is no number from 1 on")
    return size
