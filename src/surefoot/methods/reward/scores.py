"""The score of each answer of a batch under a reward model."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surefoot.data.collate import MicroBatch
from surefoot.distributed.fsdp import as_fsdp_forward, reshard
from surefoot.errors import ModelError
from surefoot.methods.token_loss import dummy_inputs, eval_no_grad, has_values, vision_inputs
from surefoot.models.decoder_layers import body_of, class_name
from surefoot.models.score_head import compute_scores, head_of, run_with_states

SCORE_TOLERANCE = 5e-2
"""Largest difference from the model's own score, as a share of it or of the size that a score usually has: the model
computes it in bfloat16 under autocast."""


class AnswerScores:
    """The score of each answer of a batch, read at its last token that is no padding."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Check that the model computes its own scores in this way. Collective. Raises: ModelError."""
        head = head_of(model)
        assert head is not None, "a model without score"
        self._model, self._head = model, head
        self._padding: int | None = model.config.get_text_config().pad_token_id
        self._run = as_fsdp_forward(model, self._compute_scores)
        if has_values(model):
            as_fsdp_forward(model, self._check_head)()
            reshard(model)  # weights may be loaded before the next forward

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Return the scores. Shapes: float32 [answers], with their graph. Collective."""
        return self._run(batch)

    def _check_head(self) -> None:
        """Compare with the score of the model's own forward on a few tokens."""
        inputs = dummy_inputs(self._model)
        ids = inputs["input_ids"]
        with eval_no_grad(self._model):
            own, _ = run_with_states(self._model, self._head, **inputs)
            states = body_of(self._model)(**inputs).last_hidden_state[0]
            state = states[find_last_tokens(ids[0], [ids.shape[1]], (-1,), self._padding)]
            expected, score = own.flatten().float(), compute_scores(state, self._head)
            usual = state.float().norm() * self._head.weight.float().norm() / state.shape[1] ** 0.5
        # Equal also where values are not finite: the first step reports those and their origin.
        tolerance = SCORE_TOLERANCE * float(usual.nan_to_num(1.0, 1.0))
        if not torch.allclose(score, expected, rtol=SCORE_TOLERANCE, atol=tolerance, equal_nan=True):
            raise ModelError(
                f"transformers' {class_name(self._model)} computes scores otherwise than by its head on the last "
                f"token: {score.tolist()} here, {expected.tolist()} there. It is not trained as a reward model."
            )

    def _compute_scores(self, batch: MicroBatch) -> Tensor:
        states = body_of(self._model)(**vision_inputs(batch, self._model)).last_hidden_state[0]
        prefix_of = batch.prefix_of or (-1,) * len(batch.lengths)
        places = find_last_tokens(batch.ids[0], batch.lengths, prefix_of, self._padding)
        return compute_scores(states[places], self._head)


def find_last_tokens(ids: Tensor, lengths: Sequence[int], prefix_of: Sequence[int], padding: int | None) -> Tensor:
    """Return the place of the last token that is no padding in each sequence of a row, prefixes left out.

    An answer that is padding alone has it in its prefix; without a prefix it is the first token, as in transformers.
    Shapes: ids [T] -> int64 [answers].
    """
    index = torch.arange(len(ids), device=ids.device)
    last = (index if padding is None else torch.where(ids == padding, -1, index)).cummax(0).values
    ends = list(accumulate(lengths))
    answers = [number for number in range(len(ends)) if number not in prefix_of]
    begins = torch.tensor([ends[number] - lengths[number] for number in answers], device=ids.device)
    places = last[torch.tensor([ends[number] - 1 for number in answers], device=ids.device)]
    before = [prefix_of[number] for number in answers]
    if max(before, default=-1) < 0:
        return torch.maximum(places, begins)
    return torch.where(
        places >= begins, places, last[torch.tensor([ends[each] - 1 for each in before], device=ids.device)]
    )
