"""Reward functions that are models: `model:PATH`, a reward model of `method: reward` or of another program.

Each rank holds it whole, beside the model in training, and scores its own completions.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from surefoot.data.collate import collate
from surefoot.data.dataset import Sample
from surefoot.errors import ConfigError, ModelError
from surefoot.methods.grpo.rewards import RewardInputs, RewardResult, check_value
from surefoot.methods.grpo.settings import RewardItem
from surefoot.methods.reward.scores import AnswerScores
from surefoot.models.frozen_model import FrozenFiles, find_frozen, load_frozen, read_for_base
from surefoot.models.pretrained import load_config, load_tokenizer_of, meta_model
from surefoot.models.resolve_model import longest_context

FORWARD_TOKENS = 8192
"""Tokens of a forward, unless one completion with its prompt has more."""
ADVICE = "A reward model is what `method: reward` trains, or a model for sequence classification with one label."


def find_scorer(source: str) -> FrozenFiles:
    """Return the files of a reward model. Raises: ModelError for a model that gives no scores."""
    files = find_frozen(source)
    if not files.gives_scores:
        what = f"{files.base} is a language model, which gives no scores"
        if files.adapter is not None:
            what = f"{files.adapter} is an adapter of a language model"
        raise ModelError(f"{what}. {ADVICE}")
    return files


def check_scorer(item: RewardItem, where: str) -> None:
    """Check the files of a reward model, and fetch them if they are on a hub. Raises: ConfigError."""
    if item.args:
        raise ConfigError(f"reward_funcs: {item.func} takes no args, found {', '.join(item.args)} ({where}).")
    try:
        files = find_scorer(item.model)
        meta_model(files.base, has_score=True)
        if files.adapter is not None:
            read_for_base(files.adapter, files.base, has_score=True)
    except ModelError as error:
        raise ConfigError(f"reward_funcs: {item.func}: {str(error).removesuffix('.')} ({where}).") from error


class RewardModel:
    """A reward model in this process, which scores completions behind their prompts as its training read them."""

    def __init__(self, source: str, device: torch.device, dtype: torch.dtype) -> None:
        """Load the model. Raises: ModelError."""
        files = find_scorer(source)
        self._tokenizer = load_tokenizer_of(files.adapter, files.base)
        self._scores = AnswerScores(load_frozen(files.base, files.adapter, device=device, dtype=dtype, has_score=True))
        self._limit = longest_context(load_config(files.base).get_text_config().to_dict())
        self._device = device

    @torch.no_grad()
    def score(self, groups: Sequence[RewardInputs], waiting: Callable[[], None]) -> list[list[RewardResult]]:
        """Return the reward of each completion, as [group][completion]. `waiting`: called before each forward."""
        samples = [
            Sample(ids := self._tokenize(group.columns.get("prompt"), text), np.zeros(len(ids), np.float32), "")
            for group in groups
            for text in group.texts
        ]
        results = [RewardResult(None)] * len(samples)
        for numbers in self._batch(samples, results):
            waiting()
            scores = self._scores(collate([samples[number] for number in numbers]).to(self._device))
            for number, score in zip(numbers, scores.tolist(), strict=True):
                results[number] = check_value(score)
        rest = iter(results)
        return [[next(rest) for _ in group.texts] for group in groups]

    def _tokenize(self, prompt: Any, text: str) -> "np.typing.NDArray[np.int32]":
        """Return the tokens of a prompt, messages or a text, with a completion."""
        if isinstance(prompt, list):
            turns = [*prompt, {"role": "assistant", "content": text}]
            whole = str(self._tokenizer.apply_chat_template(turns, tokenize=False))
        else:
            whole = f"{prompt or ''}{text}{self._tokenizer.eos_token or ''}"
        ids: list[int] = self._tokenizer(whole, add_special_tokens=False)["input_ids"]
        return np.array(ids, np.int32)

    def _batch(self, samples: Sequence[Sample], results: list[RewardResult]) -> Iterator[list[int]]:
        """Yield the numbers of samples of one forward, the longest first; those that are too long fail in `results`."""
        batch: list[int] = []
        size = 0
        for number in sorted(range(len(samples)), key=lambda number: -len(samples[number].ids)):
            length = len(samples[number].ids)
            if self._limit is not None and length > self._limit:
                failure = (
                    f"prompt and completion have {length} tokens, and the reward model reads {self._limit} at most"
                )
                results[number] = RewardResult(None, failure)
                continue
            if batch and size + length > FORWARD_TOKENS:
                yield batch
                batch, size = [], 0
            batch.append(number)
            size += length
        if batch:
            yield batch
