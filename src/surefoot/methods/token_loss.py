"""The likelihood of the trained tokens, without ever holding logits for other tokens or for all of them at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from surefoot.data.collate import MicroBatch
from surefoot.distributed.fsdp import as_fsdp_forward, reshard
from surefoot.models.vision import embed_images, image_tokens

CHUNK_TOKENS = 512
"""Trained tokens whose logits exist at the same time."""


def vision_inputs(batch: MicroBatch, model: PreTrainedModel) -> dict[str, Any]:
    """`text_inputs` with what the vision tower makes of the images."""
    arguments, vision = text_inputs(batch), batch.vision
    if vision is None:
        return arguments
    return {**arguments, **embed_images(model, batch.ids, vision.pixels, vision.grid, is_blank=vision.is_blank)}


def text_inputs(batch: MicroBatch) -> dict[str, Any]:
    """What the decoder needs to see of a batch. The lengths travel to the attention function unread by the model."""
    continues = {} if batch.continues is None else {"continues": batch.continues}
    return {
        **continues,
        "input_ids": batch.ids,
        "position_ids": batch.position_ids,
        "attention_mask": None,
        "use_cache": False,
        "lengths": batch.lengths,
        "cu_seq_lens_q": batch.cu_seq_lens,
        "max_length_q": max(batch.lengths),
    }


@contextmanager
def eval_no_grad(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode without graph: dropout would tell two forwards apart."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def dummy_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """What the decoder needs for a look at what it gives."""
    count = min(8, model.config.get_text_config().vocab_size)
    ids = torch.arange(count, device=model.device)[None]
    ends = torch.tensor([0, count], dtype=torch.int32, device=model.device)
    return {"input_ids": ids, "lengths": [count], "cu_seq_lens_q": ends, "max_length_q": count, "use_cache": False}


def _plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """The output layer, where logits are just what it makes of the decoder's states. Collective.

    Some models scale or cap their logits on the way; for those the model's own forward is used, and the logits of all
    trained tokens of a micro-batch exist at once.
    """

    def head_is_plain() -> bool:
        """Seen on a few tokens."""
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:  # a subclass computes more than its weight and bias say (LoRA, for one)
            return False
        seen = dummy_inputs(model)
        with eval_no_grad(model):
            hidden = model.base_model(**seen).last_hidden_state
            logits = model(**seen).logits
            return torch.allclose(head(hidden).float(), logits.float(), rtol=1e-3, atol=1e-4)

    is_plain = as_fsdp_forward(model, head_is_plain)()
    reshard(model)  # weights may be loaded before the next forward
    return _head_of(model) if is_plain else None


def has_values(model: PreTrainedModel) -> bool:
    """Return whether the weights have values: those that the planner works with have shapes alone."""
    return not isinstance(next(model.parameters()), FakeTensor)


def _output_layer(model: PreTrainedModel) -> nn.Linear | None:
    """Return the output layer if logits are this layer of the decoder's states and nothing else; else None.

    Measured on a few tokens, or read from the config where the model has no values. Collective.
    """
    if has_values(model):
        return _plain_head(model)
    text = model.config.get_text_config()
    is_scaled = any(getattr(text, name, None) not in (None, 1, 1.0) for name in ("logit_scale", "logits_scaling"))
    is_capped = getattr(text, "final_logit_softcapping", None) is not None
    is_plain = type(model.get_output_embeddings()) is nn.Linear and not is_scaled and not is_capped
    return _head_of(model) if is_plain else None


def _head_of(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    return head


class TokenLoss:
    """Weighted sum of the negative log-likelihoods of a batch's trained tokens under a causal LM."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find out how the model makes its logits. Collective."""
        self._model = model
        self._run = as_fsdp_forward(model, self._nll)
        self._head = _output_layer(model)

    @property
    def holds_all_logits(self) -> bool:
        """See `Objective`."""
        return self._head is None

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Shapes: a scalar in float32, with its graph."""
        return self._run(batch)

    def _nll(self, batch: MicroBatch) -> Tensor:
        arguments = vision_inputs(batch, self._model)
        if self._head is None:
            logits = self._model(**arguments, logits_to_keep=batch.target_positions).logits[0]
            losses = F.cross_entropy(logits.float(), batch.targets, reduction="none")
            return losses.sum() if batch.weights is None else losses @ batch.weights
        hidden = self._model.base_model(**arguments).last_hidden_state[0]
        if batch.weights is None:
            return _nll_sum(hidden[batch.target_positions], self._head, batch.targets)
        # Few distinct weights exist, one a turn; each group takes the same path as unweighted tokens.
        groups = [(weight, batch.weights == weight) for weight in batch.weights.unique().tolist()]
        sums = [
            weight * _nll_sum(hidden[batch.target_positions[members]], self._head, batch.targets[members])
            for weight, members in groups
        ]
        return torch.stack(sums).sum()


class TokenLogprobs:
    """The log-probability of each trained token of a batch, and the entropy where it was predicted, in nats.

    They are those of the policy that answers: one that never says a token which stands for an image.
    """

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        """Logits are divided by `temperature`. Collective."""
        self._model = model
        self._never = torch.tensor(sorted(image_tokens(model)), dtype=torch.int64, device=model.device)
        self._temperature = temperature
        self._run = as_fsdp_forward(model, self._logprobs)
        self._head = _output_layer(model)

    @property
    def holds_all_logits(self) -> bool:
        """See `Objective`."""
        return self._head is None

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Shapes: float32 [N] with its graph, float32 [N] without."""
        return self._run(batch)

    def _logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        arguments = vision_inputs(batch, self._model)
        if self._head is None:
            logits = self._model(**arguments, logits_to_keep=batch.target_positions).logits[0]
            return self._of_logits(logits, batch.targets)
        hidden = self._model.base_model(**arguments).last_hidden_state[0][batch.target_positions]
        hidden, weight, bias = _as_computed(hidden, self._head)

        def of_part(part: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return self._of_logits(F.linear(part, weight, bias), targets)

        if len(hidden) <= CHUNK_TOKENS:
            return of_part(hidden, batch.targets)
        parts = zip(hidden.split(CHUNK_TOKENS), batch.targets.split(CHUNK_TOKENS), strict=True)
        found = [checkpoint(of_part, part, targets, use_reentrant=False) for part, targets in parts]
        logprobs, entropies = zip(*found, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _of_logits(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: [n, V], [n] -> [n], [n]."""
        logits = logits.float() / self._temperature
        if len(self._never):
            logits = logits.index_fill(-1, self._never, torch.finfo(logits.dtype).min)
        scores = torch.log_softmax(logits, dim=-1)
        with torch.no_grad():
            entropy = -(scores.exp() * scores).sum(-1)
        return scores.gather(1, targets[:, None])[:, 0], entropy


def _as_computed(hidden: Tensor, head: nn.Linear) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the output layer works on, in autocast's type: all parts of a batch then share one copy of its weight."""
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), head.weight.to(dtype), head.bias.to(dtype) if head.bias is not None else None


def _nll_sum(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """Shapes: hidden [N, H], targets [N] -> scalar."""
    hidden, weight, bias = _as_computed(hidden, head)
    # It sums in the type of its input, which bfloat16 is too coarse for; torch < 2.13 does not have it.
    if hidden.dtype == torch.float32 and hasattr(F, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=CHUNK_TOKENS)
        return F.linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, reduction="sum", options=options
        ).float()

    def chunk_nll(part: Tensor, part_targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(part, weight, bias).float(), part_targets, reduction="sum")

    parts = zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True)
    losses = [checkpoint(chunk_nll, part, wanted, use_reentrant=False) for part, wanted in parts]
    return torch.stack(losses).sum()
