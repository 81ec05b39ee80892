"""Notices about the model of a run, in a line each."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.config import RunConfig
from surefoot.data.render import answer_ends
from surefoot.data.turn_ends import WAITS_FOR_TOOL
from surefoot.methods.base import TrainContext
from surefoot.models.adapter_files import CONFIG
from surefoot.models.build import meta_model
from surefoot.models.experts import describe_missing_kernel
from surefoot.models.generate import end_tokens
from surefoot.models.lora import experts_left_out, lora_settings
from surefoot.models.peft_layout import UNMERGEABLE, UNREADABLE_BY_PEFT, find_unmergeable, find_unreadable
from surefoot.models.quantization.released import find_quantization
from surefoot.models.resolve_model import read_json_object

EXPERTS_LEFT_OUT = "target_modules: {} mean linear layers, and the experts of this model are none: add `experts`"
ALL_LOGITS = (
    "the logits of this model are more than its output layer on hidden states (they are scaled or capped, or the layer "
    "has LoRA), so those of all trained tokens of a micro-batch are held at once; "
    "a smaller per_device_train_batch_size holds fewer"
)
UNNAMED_ENDS = (
    "the chat template ends answers with {}, which generation_config.json of the model does not name: models that are "
    "written here will; whoever serves the adapter alone gives it as a stop token"
)


OTHER_BASE = (
    "init_adapter was trained on {}, and this run's model is {}: an adapter fits the weights that it was trained beside"
)
LOW_RANK_FOR_MUON = (
    "optim: muon makes the singular values of LoRA's matrices equal, of which there are {0} each: with lora_rank: {0} "
    "that is little more than a step of one length. A rank of 16 or more, or full fine-tuning, makes use of it"
)
LEAST_RANK_FOR_MUON = 8
NO_SWITCH = "enable_thinking: the chat template does not read it, so it changes nothing"


def describe_model(
    train_context: TrainContext, config: RunConfig, base: Path, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Yield the notices about a model that was built from the folder `base`."""
    lora = lora_settings(config)
    if config.init_adapter is not None and (other := _find_other_base(Path(config.init_adapter), config.model, base)):
        yield OTHER_BASE.format(other, config.model)
    if quantization := find_quantization(base / "config.json"):
        dtype = config.dtype if lora is not None else "float32"
        yield quantization.describe_reading(dtype, config.quantization)
    if how := train_context.isolation.describe():
        yield how
    if slow := describe_missing_kernel(train_context.model, train_context.device, getattr(torch, config.dtype)):
        yield slow
    if lora is not None and config.optim == "muon" and lora.rank < LEAST_RANK_FOR_MUON:
        yield LOW_RANK_FOR_MUON.format(lora.rank)
    if lora is not None and (left_out := experts_left_out(train_context.model, lora.targets)):
        yield EXPERTS_LEFT_OUT.format(", ".join(left_out))
    if lora is not None:
        yield from _describe_adapter(meta_model(base, has_score=config.has_score), lora.targets)
    ends = answer_ends(tokenizer, config.template_variables)
    unnamed = ends - end_tokens(train_context.model, tokenizer) if train_context.model.can_generate() else frozenset()
    names = tokenizer.convert_ids_to_tokens(sorted(unnamed))
    if written := [name for name in names if name != WAITS_FOR_TOOL or name in str(tokenizer.chat_template)]:
        yield UNNAMED_ENDS.format(", ".join(written))
    if config.enable_thinking is not None and "enable_thinking" not in str(tokenizer.chat_template):
        yield NO_SWITCH
    if train_context.objective.holds_all_logits:
        yield ALL_LOGITS


def _find_other_base(adapter: Path, model: str, base: Path) -> str | None:
    """Return the model that an adapter was trained on, if it has another name than that of the run."""
    trained_on = read_json_object(adapter / CONFIG).get("base_model_name_or_path")
    if not isinstance(trained_on, str) or not trained_on:
        return None
    names = {Path(name).name for name in (model, str(base))}
    return trained_on if Path(trained_on).name not in names else None


def _describe_adapter(model: PreTrainedModel, targets: Sequence[str]) -> Iterator[str]:
    if unreadable := find_unreadable(model, targets):
        yield UNREADABLE_BY_PEFT.format(unreadable[0], len(unreadable))
    if tied := find_unmergeable(model, targets):
        yield UNMERGEABLE.format(*tied[0])
