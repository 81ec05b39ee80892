"""Models that give a sequence one number, its score: reward models, as transformers' classes have them.

Their head, a linear layer `score` without bias, is in place of the output layer of a language model. It is read at the
last token that is no padding, and computed in float32 here.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

HEAD = "score"
"""Name of the head in transformers' classes."""
WEIGHT = f"{HEAD}.weight"


def score_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return transformers' class with a score for a config; None if it has none."""
    scorer: type[PreTrainedModel] | None = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    return scorer


def with_exact_head(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass whose head is stored in float32, whatever the type of the other weights."""
    in_float32 = [*(cls._keep_in_fp32_modules_strict or ()), HEAD]
    return type(cls.__name__, (cls,), {"_keep_in_fp32_modules_strict": in_float32, "__module__": cls.__module__})


def is_scorer(content: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a reward model. `content`: its values."""
    names = content.get("architectures")
    return isinstance(names, list) and str(next(iter(names), "")).endswith("ForSequenceClassification")


def describe_scorer(content: dict[str, Any], config: PreTrainedConfig) -> None:
    """Change the values of a language model's config.json to those of the reward model that has `config`."""
    scorer = score_class(config)
    assert scorer is not None
    content |= {"architectures": [scorer.__name__], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    text = content.get("text_config")
    part = text if isinstance(text, dict) else content
    part["pad_token_id"] = config.get_text_config().pad_token_id


def head_of(model: PreTrainedModel) -> nn.Linear | None:
    """Return the head; None for a model without score."""
    head = getattr(model, HEAD, None)
    is_head = type(head) is nn.Linear and head.out_features == 1
    return head if is_head else None


def initial_weight(head: nn.Linear, std: float, seed: int) -> Tensor:
    """Return the head's initial weight, equal on every topology and device. Shapes: [1, H]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(head.weight.shape).normal_(0.0, std, generator=generator)


def compute_scores(states: Tensor, head: nn.Linear) -> Tensor:
    """Return the scores of the states of some tokens in float32, also under autocast. Shapes: [N, H] -> [N]."""
    with torch.autocast(states.device.type, enabled=False):
        return F.linear(states.float(), head.weight.float())[:, 0]


def token_outputs(model: PreTrainedModel, **inputs: object) -> Tensor:
    """Return the logits of every token, or its states if the model has a score. Shapes: [1, T, V or H]."""
    head = head_of(model)
    if head is None:
        logits: Tensor = model(**inputs).logits
        return logits
    return run_with_states(model, head, **inputs)[1]


def run_with_states(model: PreTrainedModel, head: nn.Linear, **inputs: object) -> tuple[Tensor, Tensor]:
    """Return the score of the model's own forward, and the states of all tokens. Shapes: [1, 1] and [1, T, H]."""
    states: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> Tensor:
        states.append(arguments[0])
        return arguments[0].to(head.weight.dtype)  # float32, which states may not be

    handle = head.register_forward_pre_hook(keep)
    try:
        score: Tensor = model(**inputs).logits
    finally:
        handle.remove()
    return score, states[0]
