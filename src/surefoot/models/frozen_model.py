"""Models that are run and not trained: a whole model, or a base with an adapter in PEFT's format."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from surefoot.models.adapter_contents import AdapterParameters, read_contents
from surefoot.models.build import build_model
from surefoot.models.pretrained import meta_model


def load_frozen(
    base: Path,
    adapter: Path | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    for_packed_rows: bool = True,
    has_score: bool = False,
) -> PreTrainedModel:
    """Load a model in evaluation mode, stored in `dtype`. `has_score`: whether it is a reward model.

    Raises: ModelError for files that do not belong together.
    """
    parameters = read_for_base(adapter, base, has_score=has_score) if adapter is not None else None
    model = build_model(
        base,
        lora=parameters.settings if parameters is not None else None,
        device=device,
        dtype=dtype,
        for_packed_rows=for_packed_rows,
        has_score=has_score,
        is_trained=False,
    ).model
    if parameters is not None:
        parameters.load_into(model)
    model.eval()
    return model


def read_for_base(adapter: Path, base: Path, *, has_score: bool = False) -> AdapterParameters:
    """Read an adapter as LoRA of its base, of which no weights are read. Raises: ModelError if they do not fit."""
    whole = meta_model(base, has_score=has_score)
    return read_contents(adapter, whole).as_parameters(whole)
