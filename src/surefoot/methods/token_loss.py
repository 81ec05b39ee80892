"""The likelihood of the trained tokens, computed without logits of other tokens or of all tokens at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from surefoot.data.collate import MicroBatch
from surefoot.distributed.fsdp import as_fsdp_forward, reshard
from surefoot.methods.output_layer import (
    ChunkedLogits,
    ChunkLoss,
    HeadInputs,
    StoredLogits,
    score_logits,
    sum_nll,
    sum_of_logits,
    sum_over_chunks,
    token_logprobs,
)
from surefoot.models.decoder_layers import body_of
from surefoot.models.sample_layout import ARGUMENT, SampleLayout
from surefoot.models.vision import embed_images, image_tokens


def vision_inputs(batch: MicroBatch, model: PreTrainedModel) -> dict[str, Any]:
    """Return `text_inputs` with the vision tower's embeddings of the images."""
    arguments, vision = text_inputs(batch), batch.vision
    if vision is None:
        return arguments
    return {**arguments, **embed_images(model, batch.ids, vision.tensors, is_blank=vision.is_blank)}


def text_inputs(batch: MicroBatch) -> dict[str, Any]:
    """Return the decoder's inputs for a batch."""
    return {
        "input_ids": batch.ids,
        "position_ids": batch.position_ids,
        "attention_mask": None,
        "use_cache": False,
        ARGUMENT: SampleLayout(batch.lengths, batch.cu_seq_lens, batch.prefix_of),
    }


@contextmanager
def eval_no_grad(model: PreTrainedModel) -> Iterator[None]:
    """Switch to evaluation mode without graph, because dropout would make two forwards differ."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def dummy_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Return decoder inputs of a few tokens, to probe its outputs."""
    count = min(8, model.config.get_text_config().vocab_size)
    ids = torch.arange(count, device=model.device)[None]
    return {"input_ids": ids, "use_cache": False, ARGUMENT: SampleLayout.of([count], model.device)}


PROBED_LOGIT = 100.0
"""Size of the largest logit with which it is found out what a model does to its logits: beyond any cap."""


def _probe_output_layer(model: PreTrainedModel) -> nn.Linear | None:
    """Return the output layer if logits are its output on the decoder's states and nothing else; else None. Collective.

    Some models also scale or cap their logits. For those the model's own forward is used, and the logits of all
    trained tokens of a micro-batch exist at once.
    """

    def is_head_plain() -> bool:
        """Compare the logits of a few tokens."""
        head = model.get_output_embeddings()
        # A subclass of a linear layer computes more than its weight and bias say (LoRA, for one).
        if body_of(model) is model or type(head) is not nn.Linear:
            return False
        if model.base_model is model:  # Llama 4 has no decoder without its head
            return False
        inputs = dummy_inputs(model)
        with eval_no_grad(model):
            hidden = body_of(model)(**inputs).last_hidden_state
            own = F.linear(*HeadInputs.of(hidden, head))
            # Those of a model at its beginning are so small that a cap would hardly change them.
            scale = PROBED_LOGIT / float(own.abs().max().nan_to_num(1.0).clamp(min=1e-6))
            handle = head.register_forward_hook(lambda _module, _inputs, logits: logits * scale)
            try:
                logits = model(**inputs).logits
            finally:
                handle.remove()
            # Equal also where values are not finite: the first step reports those and their origin.
            return torch.allclose((own * scale).float(), logits.float(), rtol=1e-3, atol=1e-4 * scale, equal_nan=True)

    is_plain = as_fsdp_forward(model, is_head_plain)()
    reshard(model)  # weights may be loaded before the next forward
    return _get_head(model) if is_plain else None


def sum_answers(values: Tensor, batch: MicroBatch, num_answers: int) -> Tensor:
    """Return the sum over the tokens of each answer (`answer_of`). Shapes: [N] -> [num_answers].

    Adding by index would not be deterministic on a GPU.
    """
    is_of = batch.answer_of == torch.arange(num_answers, device=values.device)[:, None]
    return torch.where(is_of, values, 0).sum(1)


def has_values(model: PreTrainedModel) -> bool:
    """Return whether the weights have values: the planner's models have shapes alone."""
    return not isinstance(next(model.parameters()), FakeTensor)


def _find_output_layer(model: PreTrainedModel) -> nn.Linear | None:
    """Return the output layer if logits are its output on the decoder's states and nothing else; else None.

    Measured on a few tokens, or read from the config if the model has no values. Collective.
    """
    if has_values(model):
        return _probe_output_layer(model)
    text = model.config.get_text_config()
    is_scaled = any(getattr(text, name, None) not in (None, 1, 1.0) for name in ("logit_scale", "logits_scaling"))
    is_capped = getattr(text, "final_logit_softcapping", None) is not None
    has_decoder = model.base_model is not model
    is_plain = has_decoder and type(model.get_output_embeddings()) is nn.Linear and not is_scaled and not is_capped
    return _get_head(model) if is_plain else None


def _get_head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    return head


def _trained_logits(model: PreTrainedModel, arguments: dict[str, Any], batch: MicroBatch) -> Tensor:
    """Return the logits from which the trained tokens are predicted. Shapes: [N, V]."""
    logits: Tensor = model(**arguments, logits_to_keep=batch.target_positions).logits[0]
    keeps_all = len(logits) == batch.ids.shape[1] != len(batch.targets)  # some models take no such argument
    return logits[batch.target_positions] if keeps_all else logits


class TokenLoss:
    """The loss of a batch's trained tokens under a causal LM: the weighted negative log-likelihood, or another one."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Detect how the model computes its logits. Collective."""
        self._model = model
        self._run = as_fsdp_forward(model, self._compute)
        self._run_without_graph = as_fsdp_forward(model, self._predict)
        self._head = _find_output_layer(model)

    @property
    def holds_all_logits(self) -> bool:
        """See `Objective`."""
        return self._head is None

    def __call__(self, batch: MicroBatch, loss: ChunkLoss | None = None) -> Tensor:
        """Return the sum of the weighted negative log-likelihoods, or of `loss`. Shapes: a scalar with its graph."""
        return self._run(batch, loss)

    def predict(self, batch: MicroBatch) -> ChunkedLogits:
        """Return the logits from which the trained tokens are predicted, without graph and dropout. Collective.

        They read the output layer, which must not be resharded before they are used.
        """
        with eval_no_grad(self._model):
            return self._run_without_graph(batch)

    def _predict(self, batch: MicroBatch) -> ChunkedLogits:
        arguments = vision_inputs(batch, self._model)
        if self._head is None:
            return StoredLogits(_trained_logits(self._model, arguments, batch))
        hidden = body_of(self._model)(**arguments).last_hidden_state[0]
        return HeadInputs.of(hidden[batch.target_positions], self._head)

    def _compute(self, batch: MicroBatch, loss: ChunkLoss | None) -> Tensor:
        arguments = vision_inputs(batch, self._model)
        if self._head is None:
            logits = _trained_logits(self._model, arguments, batch)
            if loss is not None:
                return sum_of_logits(logits, loss)
            losses = F.cross_entropy(logits.float(), batch.targets, reduction="none")
            # No product of vectors, which autocast would compute in bfloat16.
            return (losses if batch.weights is None else losses * batch.weights).sum()
        hidden = body_of(self._model)(**arguments).last_hidden_state[0][batch.target_positions]
        if loss is not None:
            return sum_over_chunks(hidden, self._head, loss)
        return sum_nll(hidden, self._head, batch.targets, batch.weights)


class TokenLogprobs:
    """The log-probability of each trained token of a batch, and the entropy where it was predicted, in nats.

    With `is_drawn`, the distribution is the one that completions are drawn from: it excludes tokens that stand for an
    image.
    """

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0, *, is_drawn: bool = True) -> None:
        """Detect how the model computes its logits, which are divided by `temperature`. Collective."""
        self._model = model
        banned = sorted(image_tokens(model)) if is_drawn else []
        self._banned = torch.tensor(banned, dtype=torch.int64, device=model.device)
        self._temperature = temperature
        self._run = as_fsdp_forward(model, self._compute_logprobs)
        self._head = _find_output_layer(model)

    @property
    def holds_all_logits(self) -> bool:
        """See `Objective`."""
        return self._head is None

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies. Shapes: float32 [N] with its graph, float32 [N] without."""
        return self._run(batch)

    def _compute_logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        arguments = vision_inputs(batch, self._model)
        if self._head is None:
            logits = _trained_logits(self._model, arguments, batch)
            return score_logits(logits, batch.targets, banned=self._banned, temperature=self._temperature)
        hidden = body_of(self._model)(**arguments).last_hidden_state[0][batch.target_positions]
        return token_logprobs(hidden, self._head, batch.targets, banned=self._banned, temperature=self._temperature)
