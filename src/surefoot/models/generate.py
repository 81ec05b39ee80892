"""Generation with a model: for chat, inspection and exact-match evaluation. Not a serving engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from surefoot.errors import InputError
from surefoot.models.vision import attention


@contextmanager
def generating(model: PreTrainedModel) -> Iterator[None]:
    """Put the model in evaluation mode with ordinary cached attention, and restore it afterwards."""
    training = model.training
    model.eval()
    try:
        with attention(model, "sdpa"):
            yield
    finally:
        model.train(training)


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    batch_size: int = 16,
) -> list[str]:
    """Return the text that follows each prompt, without its end-of-turn token. Temperature 0 is greedy.

    `prompts`: token ids from `data.render.tokenize_prompts`. Raises: InputError for impossible settings.
    """
    if max_new_tokens < 1 or temperature < 0:
        raise InputError(
            f"max_new_tokens={max_new_tokens}, temperature={temperature}: need at least 1, and not below 0."
        )
    ends = sorted(end_tokens(model, tokenizer))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ends), 0)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature if temperature > 0 else None,
        pad_token_id=pad,
        eos_token_id=ends,
    )
    answers: list[str] = []
    with generating(model), _reset_generation_config(model), torch.no_grad():
        for begin in range(0, len(prompts), batch_size):
            answers += _complete_batch(model, tokenizer, prompts[begin : begin + batch_size], settings, int(pad))
    return answers


@contextmanager
def _reset_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Remove a model's own generation settings: transformers would use them for every setting that is not given."""
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that end an answer: the tokenizer's, and those of the model's generation settings."""
    own = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}


def _complete_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    settings: GenerationConfig,
    pad: int,
) -> list[str]:
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    answers: list[str] = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    return answers
