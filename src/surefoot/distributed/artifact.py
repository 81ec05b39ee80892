"""Writer of the trained artifact, gathered from all ranks: an adapter in PEFT's or a model in Hugging Face's format."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.data.render import answer_ends
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.models.adapter import get_tensor, tensors_beside, write_adapter
from surefoot.models.build import trainable_parameters
from surefoot.models.dtensor_blocks import gather_full
from surefoot.models.export import in_layers, name_ends, stored_buffers, write_model
from surefoot.models.lora import LoraSettings
from surefoot.models.score_head import head_of
from surefoot.system.atomic_io import new_folder, write_text

CARD = "README.md"

Values = Iterator[tuple[str, Tensor]]
"""Names and full values of the tensors, gathered one by one."""


def write_trained_adapter(
    target: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: LoraSettings,
    base: str,
    ranks: World = SINGLE_PROCESS,
    card: str | None = None,
) -> Path:
    """Write the trained adapter in PEFT's format. Return its folder.

    `base`: name or folder of its base model. Rank 0 holds one parameter at a time. `card`: text of its README.md.
    Collective. Raises: StorageError.
    """
    tensors = dict[str, Tensor](trainable_parameters(model))
    tensors |= {name: get_tensor(model, name) for name in tensors_beside(model, tensors)}

    def write(folder: Path, shapes: Mapping[str, torch.Size], values: Values) -> None:
        write_adapter(folder, shapes, values, settings, base, model)

    return _write_folder(target, tokenizer, tensors, write, ranks, card)


def write_trained_model(
    target: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    base: Path,
    ranks: World = SINGLE_PROCESS,
    dtype: torch.dtype | None = None,
    card: str | None = None,
) -> Path:
    """Write the full model in Hugging Face's format, in `dtype` or in its base's type. Return its folder.

    `base`: folder of the base model. Rank 0 holds one layer at a time. `card`: text of its README.md. Collective.
    Raises: StorageError.
    """
    tensors = dict[str, Tensor](model.named_parameters())
    tensors |= {name: get_tensor(model, name) for name in stored_buffers(model)}

    def write(folder: Path, shapes: Mapping[str, torch.Size], values: Values) -> None:
        has_score = head_of(model) is not None
        write_model(folder, base, shapes, values, dtype, has_score=has_score)
        if not has_score:
            name_ends(folder, answer_ends(tokenizer))

    return _write_folder(target, tokenizer, {name: tensors[name] for name in in_layers(tensors)}, write, ranks, card)


def _write_folder(
    target: Path,
    tokenizer: PreTrainedTokenizerBase,
    tensors: Mapping[str, Tensor],
    write_weights: Callable[[Path, Mapping[str, torch.Size], Values], None],
    ranks: World,
    card: str | None,
) -> Path:
    """Write weights, tokenizer and card on rank 0. All ranks gather the tensors, in their order."""
    values = ((name, gather_full(tensor)) for name, tensor in tensors.items())

    def write() -> None:
        try:
            if ranks.is_first:
                with new_folder(target) as folder:
                    write_weights(folder, {name: tensor.shape for name, tensor in tensors.items()}, values)
                    tokenizer.save_pretrained(folder)
                    if card is not None:
                        write_text(folder / CARD, card)
        finally:
            for _ in values:  # every rank takes part in gathering, also if rank 0 could not write
                pass

    ranks.run_or_raise_on_all(write, names_rank=False)
    return target
