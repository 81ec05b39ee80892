"""Writer of the trained artifact, gathered from all ranks: an adapter in PEFT's or a model in Hugging Face's format."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.data.render import answer_ends
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.models.adapter import base_name, get_tensor, tensors_beside, write_adapter
from surefoot.models.build import trainable_parameters
from surefoot.models.dtensor_blocks import gather_full
from surefoot.models.export import in_layers, name_ends, stored_buffers, write_model
from surefoot.models.lora import LoraSettings
from surefoot.system.atomic_io import new_folder, write_text

CARD = "README.md"


def write_artifact(
    target: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: LoraSettings | None,
    base: Path,
    source: str,
    ranks: World = SINGLE_PROCESS,
    dtype: torch.dtype | None = None,
    card: str | None = None,
) -> Path:
    """Write the trained adapter (PEFT format), or without LoRA the full model (HF format, in `dtype` or the base's).

    `base` is the base model's folder, `source` its name in the config. Rank 0 writes the tensors that the ranks gather:
    it holds one parameter of an adapter, or one layer of a model. `card`: text of its README.md. Collective. Raises:
    StorageError.
    """
    parameters = trainable_parameters(model) if settings is not None else dict(model.named_parameters())
    others = tensors_beside(model, parameters) if settings is not None else stored_buffers(model)
    tensors: dict[str, Tensor] = {**parameters, **{name: get_tensor(model, name) for name in others}}
    names = list(tensors) if settings is not None else in_layers(tensors)
    shapes = {name: tensors[name].shape for name in names}
    values = ((name, gather_full(tensors[name])) for name in names)

    def write() -> None:
        try:
            if ranks.is_first:
                with new_folder(target) as folder:
                    if settings is not None:
                        write_adapter(folder, shapes, values, settings, base_name(source, base), model)
                    else:
                        write_model(folder, base, shapes, values, dtype)
                        name_ends(folder, answer_ends(tokenizer))
                    tokenizer.save_pretrained(folder)
                    if card is not None:
                        write_text(folder / CARD, card)
        finally:
            for _ in values:  # every rank takes part in gathering, also if rank 0 could not write
                pass

    ranks.run_or_raise_on_all(write, names_rank=False)
    return target
