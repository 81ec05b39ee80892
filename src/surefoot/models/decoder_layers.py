"""A model's class, decoder and layers, whatever they are called."""

from torch import nn
from transformers import PreTrainedModel


def class_name(model: PreTrainedModel) -> str:
    """Return the name of a model's class in transformers, for messages: sharding makes a subclass of it."""
    return type(model).__name__.removeprefix("FSDP")


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model between its embeddings and its output layer, vision tower excluded."""
    decoder: nn.Module = model.get_decoder()
    whole: nn.Module = model.base_model
    # ModernBERT's decoder calls its output layer `decoder`.
    return whole if decoder in (model, model.get_output_embeddings()) else decoder


def body_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that computes the states of its output layer; the model itself if there is none."""
    whole: nn.Module = model.base_model
    decoder: nn.Module = model.get_decoder()
    return decoder if whole is model else whole


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of a decoder's layers (`layers`, `h`, `blocks`, ...): the longest of its outermost lists."""
    level: list[nn.Module] = [decoder_of(model)]
    while level:
        children = [child for module in level for child in module.children()]
        if lists := [child for child in children if isinstance(child, nn.ModuleList)]:
            return max(lists, key=len)
        level = children
    return nn.ModuleList()


def indexer_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the parts of sparse attention that choose which tokens a token attends to.

    A choice has no gradient, so nothing in them is trained by the loss of the model.
    """
    return [name for name, module in model.named_modules() if type(module).__name__.endswith("Indexer")]
