"""Generation with a model: for chat, inspection and exact-match evaluation. Not a serving engine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from surefoot.errors import InputError, ModelError, one_line
from surefoot.models.attention import own_implementation
from surefoot.models.decoder_layers import class_name
from surefoot.models.pretrained import BAD_CONFIG
from surefoot.models.resolve_model import longest_context
from surefoot.models.vision import attention
from surefoot.system.allocators import is_out_of_memory

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-3, 1e3
"""Bounds within which logits divided by the temperature stay finite and distinct in every precision."""


class _Streamer(TextStreamer):  # type: ignore[misc]
    """Gives the text of one answer to a function, word by word."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002
        self._on_text(text)


@contextmanager
def generating(model: PreTrainedModel) -> Iterator[None]:
    """Put the model in evaluation mode with ordinary cached attention, and restore it afterwards."""
    training = model.training
    model.eval()
    try:
        with attention(model, own_implementation(type(model), model.config)):
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
    on_text: Callable[[str], object] | None = None,
) -> list[str]:
    """Return the text that follows each prompt, without its end-of-turn token. Temperature 0 is greedy.

    `prompts`: token ids from `data.render.tokenize_prompts`. An answer ends where the model's context does. `on_text`
    is given the answer to a single prompt piece by piece, as it is written.
    Raises: InputError for impossible settings, or a prompt that leaves no room for an answer; ModelError for a model
    whose generation fails in transformers.
    """
    if max_new_tokens < 1 or not (temperature == 0 or LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE):
        raise InputError(
            f"max_new_tokens={max_new_tokens}, temperature={temperature}: need at least 1, and 0 (greedy) or "
            f"{LEAST_TEMPERATURE} to {MOST_TEMPERATURE:.0f}."
        )
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    largest = max((max(prompt) for prompt in prompts), default=0)
    if largest >= num_embeddings:
        raise InputError(
            f"the tokenizer gives the prompt the token {largest}, and the model has {num_embeddings}. They are not of "
            "the same release."
        )
    context = longest_context(model.config.get_text_config().to_dict())
    if context is not None:
        longest = max(map(len, prompts), default=0)
        if longest >= context:
            raise InputError(
                f"the prompt has {longest} tokens, and the model sees {context} with its answer. Shorten the prompt, "
                "or begin a new conversation."
            )
    ends = sorted(end_tokens(model, tokenizer))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ends), 0)
    answers = [""] * len(prompts)
    with generating(model), _reset_generation_config(model), torch.no_grad():
        for numbers in batches_of_one_length([len(prompt) for prompt in prompts], batch_size):
            batch = [prompts[number] for number in numbers]
            settings = GenerationConfig(
                max_new_tokens=min(max_new_tokens, context - len(batch[0])) if context is not None else max_new_tokens,
                do_sample=temperature > 0,
                temperature=temperature if temperature > 0 else None,
                pad_token_id=pad,
                eos_token_id=ends,
            )
            for number, answer in zip(
                numbers, _complete_batch(model, tokenizer, batch, settings, on_text), strict=True
            ):
                answers[number] = answer
    return answers


def batches_of_one_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return batches of positions of prompts of the same length.

    Padding changes the answers of models whose layers count it: recurrent ones, and those whose positions, windows or
    choices of keys depend on the length of the row.
    """
    by_length: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        by_length.setdefault(length, []).append(number)
    return [
        numbers[begin : begin + batch_size]
        for numbers in by_length.values()
        for begin in range(0, len(numbers), batch_size)
    ]


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
    on_text: Callable[[str], object] | None,
) -> list[str]:
    """Return the answers to prompts of the same length."""
    ids = torch.tensor(prompts, device=model.device)
    streamer = _Streamer(tokenizer, on_text) if on_text is not None else None
    try:
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=streamer
        )
    except BAD_CONFIG as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{class_name(model)} cannot generate in transformers: {one_line(error)}. Its "
            "weights can be used in another program."
        ) from error
    answers: list[str] = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    return answers
