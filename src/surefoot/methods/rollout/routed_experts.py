"""The experts that routers chose for the tokens of a completion, as text that fits into JSON: base64 of an .npy file.

Shape: integers [prompt + completion - 1, layers, K]. The last token is drawn, but no forward has read it. vLLM's
responses have the same form.
"""

import io
from base64 import b64decode, b64encode

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[np.int16]


def encode_experts(experts: Experts) -> str:
    """Return experts as text, with one byte per expert if that is enough."""
    is_small = bool(experts.size) and 0 <= experts.min() <= experts.max() < 256
    file = io.BytesIO()
    np.save(file, experts.astype(np.uint8) if is_small else experts, allow_pickle=False)
    return b64encode(file.getvalue()).decode()


def decode_experts(text: str) -> Experts:
    """Return the experts of a text. Raises: ValueError for a text of another form."""
    try:
        array = np.load(io.BytesIO(b64decode(text, validate=True)), allow_pickle=False)
    except (TypeError, EOFError, OSError) as error:
        raise ValueError(f"not an array: {type(error).__name__}: {error}") from error
    if array.ndim != 3 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"an array of {array.dtype} and shape {array.shape}, not of integers [tokens, layers, K]")
    experts: Experts = array.astype(np.int16)
    return experts
