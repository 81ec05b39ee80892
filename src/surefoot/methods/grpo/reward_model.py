"""Reward functions that are models: `model:PATH`, a reward model of `method: reward` or of another program.

Each rank holds it whole, beside the model in training, and scores its own completions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surefoot.data.collate import collate
from surefoot.data.dataset import Sample
from surefoot.errors import ConfigError, ModelError
from surefoot.methods.grpo.rewards import RewardInputs, RewardResult, check_value
from surefoot.methods.grpo.settings import RewardItem
from surefoot.methods.reward.scores import AnswerScores
from surefoot.models.adapter_files import CONFIG, find_base, gives_scores
from surefoot.models.frozen_model import load_frozen, read_for_base
from surefoot.models.pretrained import load_config, load_tokenizer_of, meta_model
from surefoot.models.resolve_model import (
    local_path,
    longest_context,
    read_json_object,
    resolve_model,
)
from surefoot.models.score_head import is_scorer

FORWARD_TOKENS = 8192
"""Tokens of a forward, unless one completion with its prompt has more."""
ADVICE = "A reward model is what `method: reward` trains, or a model for sequence classification with one label."


@dataclass(frozen=True)
class ScorerFiles:
    """The files of a reward model."""

    base: Path
    adapter: Path | None
    """Folder of the adapter that makes a reward model of `base`; None if that is one."""


def find_scorer(source: str) -> ScorerFiles:
    """Return the files of a reward model: of a run folder, of an adapter, which names its base, or of a model.

    Raises: ModelError for a model that gives no scores.
    """
    folder = local_path(source)
    if (folder / "run.yaml").is_file():
        artifacts = [folder / name for name in ("adapter", "model") if (folder / name).is_dir()]
        if not artifacts:
            raise ModelError(f"{folder} is the folder of a run that has not ended: there is no reward model in it yet.")
        folder = artifacts[0]
    if (folder / CONFIG).is_file() and not (folder / "config.json").is_file():
        if not gives_scores(folder):
            raise ModelError(f"{folder} is an adapter of a language model. {ADVICE}")
        return ScorerFiles(resolve_model(find_base(folder), str(folder / CONFIG)), folder)
    base_folder = resolve_model(str(folder) if folder.is_dir() else source, source)
    if not is_scorer(read_json_object(base_folder / "config.json")):
        raise ModelError(f"{base_folder} is a language model, which gives no scores. {ADVICE}")
    return ScorerFiles(base_folder, None)


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
