"""The samples of the row that a model computes at the moment.

A caller gives the model a `SampleLayout` as the keyword argument `samples`. It is taken from the arguments before the
model sees them, and kept here until the forward ends: not every layer would be handed it, and not every model accepts
arguments that it does not know. A recomputation under gradient checkpointing has the samples of its first forward.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils

from surefoot.models.decoder_layers import body_of
from surefoot.models.vision import vision_parts
from surefoot.system.pinned_copy import send

ARGUMENT = "samples"
POSITION_TABLE = re.compile(r"(wpe|pos\w*_embed\w*|embed_pos\w*)$", re.ASCII)
"""Names of tables of positions: wpe, position_embeddings, positions_embed, embed_positions."""
TABLE_BUFFERS = ("attn.embed_positions", "pos_encoding")
"""Endings of the names of tables of positions that are not trained (GPT-J, CTRL)."""


@dataclass(frozen=True)
class SampleLayout:
    """Samples that follow each other in one row of tokens."""

    lengths: list[int]
    ends: Tensor
    """0 and the end of each sample, on the model's device: int32 [samples + 1]."""
    prefix_of: tuple[int, ...] | None = None
    """Index of the earlier sample that each one continues, or -1; None if none continues another."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device | str = "cpu") -> "SampleLayout":
        """Return the layout of samples of these lengths."""
        return cls(lengths, torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the row."""
        return sum(self.lengths)

    @property
    def sample_of_token(self) -> Tensor:
        """The number of each token's sample: int32 [1, T]."""
        numbers = torch.arange(len(self.lengths), dtype=torch.int32, device=self.ends.device)
        return numbers.repeat_interleave(self.ends.diff(), output_size=self.num_tokens)[None]

    @property
    def spans(self) -> list[slice]:
        """The tokens of each sample in the row."""
        return [slice(begin, end) for begin, end in pairwise([0, *accumulate(self.lengths)])]

    def repeat_prefixes(self, states: Tensor) -> Tensor:
        """Return what each sample reads of the row's states: its own tokens, after those of the sample it continues.

        Shapes: [1, heads, T, D] -> [1, heads, T + repeated tokens, D].
        """
        parts = states.split(self.lengths, dim=2)
        return torch.cat([parts[number] for read in self._samples_read for number in read], dim=2)

    @cached_property
    def lengths_read(self) -> list[int]:
        """Number of tokens that each sample reads."""
        return [sum(self.lengths[number] for number in read) for read in self._samples_read]

    @cached_property
    def ends_read(self) -> Tensor:
        """0 and the end of each sample in `repeat_prefixes`, on the model's device: int32 [samples + 1]."""
        return send(torch.tensor([0, *self.lengths_read]).cumsum(0, dtype=torch.int32), self.ends.device)

    @property
    def _samples_read(self) -> list[tuple[int, ...]]:
        prefixes = self.prefix_of or (-1,) * len(self.lengths)
        return [(prefix, own) if prefix >= 0 else (own,) for own, prefix in enumerate(prefixes)]

    @property
    def spans_read(self) -> list[list[slice]]:
        """The tokens that each sample reads: its own, after those of the sample that it continues."""
        spans = self.spans
        return [[spans[number] for number in read] for read in self._samples_read]


_current: SampleLayout | None = None


def current_layout() -> SampleLayout | None:
    """Return the samples of the forward in progress; None if there is none, or it has ordinary rows (generation)."""
    return _current


@contextmanager
def samples_are(layout: SampleLayout | None) -> Iterator[None]:
    """Set the samples of the forward in progress inside the block."""
    global _current
    before, _current = _current, layout
    try:
        yield
    finally:
        _current = before


class KeptLayout:
    """A context with the samples of the moment at which it was created. It can be entered any number of times."""

    def __init__(self) -> None:
        self._kept = _current
        self._before: list[SampleLayout | None] = []

    def __enter__(self) -> None:
        global _current
        self._before.append(_current)
        _current = self._kept

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._before.pop()


def keep_layout_on_recompute() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return a `context_fn` for `torch.utils.checkpoint` that recomputes with the samples of the first forward."""
    return nullcontext(), KeptLayout()


@dataclass
class SampleArguments:
    """How a model's forwards are told about samples, besides `current_layout`."""

    first_position: int
    """Number that is added to positions."""
    tells_kernels: bool = False
    """Whether the model gets `cu_seq_lens_q` and `seq_idx`, which kernels of recurrent layers take."""
    gives_token_types: bool = False
    """Whether the model gets a type of 0 for each token: its own default is no longer than its longest sample."""

    def added(self, samples: SampleLayout, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that are added or changed in a forward of the decoder."""
        added: dict[str, Any] = {}
        if self.first_position and kwargs.get("position_ids") is not None:
            added["position_ids"] = kwargs["position_ids"] + self.first_position
        if self.gives_token_types and kwargs.get("token_type_ids") is None:
            added["token_type_ids"] = torch.zeros(1, samples.num_tokens, dtype=torch.int64, device=samples.ends.device)
        if self.tells_kernels:
            added |= {"cu_seq_lens_q": samples.ends, "seq_idx": samples.sample_of_token}
        return added


def accept_samples(model: PreTrainedModel) -> SampleArguments:
    """Let a model and its decoder accept the argument `samples`; how they are told can be changed afterwards."""
    has_token_types = any("token_type_ids" in module._buffers for module in model.modules())
    arguments = SampleArguments(_first_position(model), gives_token_types=has_token_types)
    body = body_of(model)
    for module in {model, body}:
        _follow(module, arguments if module is body else None)
    return arguments


def _first_position(model: PreTrainedModel) -> int:
    """Return the number of a sample's first position: 0, or in some models that after the padding token's number."""
    numbering = (module for module in model.modules() if hasattr(module, "create_position_ids_from_input_ids"))
    return next((int(module.padding_idx) + 1 for module in numbering), 0)


def num_positions(model: PreTrainedModel) -> int | None:
    """Return how many positions a model has in a table of its decoder; None if it computes them, as with RoPE.

    The model needs no storage.
    """
    towers = tuple(f"{name}." for name in vision_parts(model))
    sizes = [
        module.num_embeddings - getattr(module, "offset", 0) - _first_position(model)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and POSITION_TABLE.search(name) and not name.startswith(towers)
    ]
    sizes += [len(table) for name, table in model.named_buffers() if name.endswith(TABLE_BUFFERS)]
    return min(sizes, default=None)


_find_samples: Callable[[Tensor], Tensor | None] = masking_utils.find_packed_sequence_indices


def _number_samples(position_ids: Tensor) -> Tensor | None:
    """Return the number of each token's sample to transformers, which would find them by its positions.

    It would wait for the device to see whether there are several, in every forward. Shapes: [1, T] -> [1, T].
    """
    if _current is None or position_ids.shape != (1, _current.num_tokens):
        return _find_samples(position_ids)
    return _current.sample_of_token


masking_utils.find_packed_sequence_indices = _number_samples


def _follow(module: nn.Module, arguments: SampleArguments | None) -> None:
    outer: list[SampleLayout | None] = []

    def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        global _current
        outer.append(_current)
        _current = kwargs.get(ARGUMENT, _current)
        kwargs = {name: value for name, value in kwargs.items() if name != ARGUMENT}
        if arguments is not None and _current is not None:
            kwargs |= arguments.added(_current, kwargs)
        return args, kwargs

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        global _current
        _current = outer.pop()

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end, always_call=True)
