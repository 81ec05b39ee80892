"""The teacher in the processes that train: its files, which are checked early, and its distribution for a batch."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from math import inf
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from surefoot.config import LoadedConfig
from surefoot.data.collate import MicroBatch
from surefoot.distributed.fsdp import Sharding, reshard
from surefoot.errors import ConfigError, ModelError
from surefoot.methods.base import TrainContext
from surefoot.methods.distill.divergence import AllTokens
from surefoot.methods.distill.settings import DistillConfig
from surefoot.methods.output_layer import ChunkedLogits
from surefoot.methods.token_loss import TokenLoss
from surefoot.models.frozen_model import FrozenFiles, find_frozen, load_frozen, read_for_base
from surefoot.models.lora import disable_adapter
from surefoot.models.pretrained import load_config, load_tokenizer, load_tokenizer_of, meta_model
from surefoot.models.resolve_model import longest_context

OF_IMAGES = ("patch_size", "spatial_merge_size", "temporal_patch_size", "image_size")
"""Settings of a vision tower by which an image becomes tokens."""


class LocalTeacher:
    """A model in this process, or the trained model without its adapter."""

    def __init__(
        self,
        predict: Callable[[MicroBatch], ChunkedLogits],
        config: DistillConfig,
        *,
        model: torch.nn.Module | None = None,
        is_base_of: torch.nn.Module | None = None,
    ) -> None:
        """`model`: a model of its own. `is_base_of`: the trained model, without whose adapter it is the teacher."""
        self._predict = predict
        self._model = model
        self._config = config
        self._trained = is_base_of

    def __call__(self, batch: MicroBatch) -> AllTokens:
        """Return the distribution at the trained tokens of a batch. Collective."""
        with disable_adapter(self._trained) if self._trained is not None else nullcontext():
            return AllTokens(self._predict(batch), self._config.teacher_top_k, self._config.teacher_top_k_tail)

    def free(self) -> None:
        """Free gathered weights of a model of its own, once what it gave for a batch is used."""
        if self._model is not None:
            reshard(self._model)


def load_teacher(config: DistillConfig, train_context: TrainContext, sharding: Sharding | None) -> LocalTeacher:
    """Load the teacher that the config names. Collective. Raises: ModelError on this rank."""
    assert config.teacher_model is not None
    files = find_frozen(config.teacher_model)
    dtype = getattr(torch, config.dtype)
    model = load_frozen(files.base, files.adapter, device=train_context.device, dtype=dtype, sharding=sharding)
    return LocalTeacher(TokenLoss(model).predict, config, model=model)


def check_teacher(loaded: LoadedConfig, base: Path, config: DistillConfig) -> None:
    """Check that a teacher's files are whole and fit the student in `base`; fetch them. Raises: ConfigError."""
    assert config.teacher_model is not None
    where = loaded.where("teacher_model")
    try:
        files = find_frozen(config.teacher_model)
        if files.gives_scores:
            raise ModelError("it is a reward model, which gives scores and no distribution of tokens")
        meta_model(files.base)
        if files.adapter is not None:
            read_for_base(files.adapter, files.base)
        problems = [
            *_compare_images(base, files.base),
            *_compare_tokens(base, files),
            *_check_context(base, files.base, config),
        ]
    except ModelError as error:
        raise ConfigError(f"teacher_model={config.teacher_model}: {str(error).removesuffix('.')} ({where}).") from error
    if problems:
        raise ConfigError(f"teacher_model={config.teacher_model}: {problems[0]} ({where}).")


def _check_context(student: Path, teacher: Path, config: DistillConfig) -> Iterator[str]:
    """Yield why a teacher cannot read the longest samples that the student reads; packs may be longer."""
    own, context = (longest_context(load_config(base).get_text_config().to_dict()) for base in (student, teacher))
    longest = min(config.max_row_tokens + config.max_added_tokens, own or inf)
    if context is not None and longest > context:
        added = f" and max_completion_length={config.max_added_tokens}" if config.max_added_tokens else ""
        yield (
            f"it can see {context} tokens, and {config.row_limit_setting}={config.max_row_tokens}{added} allow samples "
            f"of {longest}. Lower them"
        )


def _compare_images(student: Path, teacher: Path) -> Iterator[str]:
    """Yield why a teacher cannot read the images of a student."""
    own, other = load_config(student), load_config(teacher)
    tower, other_tower = getattr(own, "vision_config", None), getattr(other, "vision_config", None)
    if tower is None:
        return
    if own.model_type != other.model_type:
        yield (
            f"it is a {other.model_type} and the student a {own.model_type}, so images and positions are given to them "
            "in different ways. Choose a teacher of the same type"
        )
        return
    for name in OF_IMAGES:
        values = getattr(tower, name, None), getattr(other_tower, name, None)
        if values[0] != values[1]:
            yield f"its vision tower has {name}={values[1]} and the student's {values[0]}, so images have other tokens"


def _compare_tokens(student: Path, files: FrozenFiles) -> Iterator[str]:
    """Yield why a teacher's distribution is over other tokens than a student's."""
    tokenizer, other = load_tokenizer(student), load_tokenizer_of(files.adapter, files.base)
    own, others = _tokens_by_id(tokenizer), _tokens_by_id(other)
    differing = [number for number in sorted(own.keys() & others.keys()) if own[number] != others[number]]
    if differing or not own.keys() & others.keys():
        example = ""
        if differing:
            number = differing[0]
            example = f": token {number} is {own[number]!r:.40} in the student's and {others[number]!r:.40} in its own"
        yield (
            f"its vocabulary is another one; {len(differing)} of {len(own)} tokens differ{example}. A distribution "
            "over other tokens cannot be compared: choose a teacher with the student's tokenizer"
        )
        return
    size = int(load_config(files.base).get_text_config().vocab_size)
    if max(own) >= size:
        yield (
            f"it has embeddings for {size} tokens, and the student's tokenizer gives numbers up to {max(own)}. Choose "
            "a teacher with the student's tokenizer"
        )


def _tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}
