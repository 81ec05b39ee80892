"""Collation of completions with advantages into micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.data.collate import MicroBatch, dummy_batch
from surefoot.data.image_processor import PixelReader
from surefoot.data.images import Image
from surefoot.distributed.parallel_dims import Layout
from surefoot.methods.rollout.routed_experts import decode_experts, encode_experts


@dataclass
class Trajectory:
    """A completion to be trained on, with the results that further steps on it reuse."""

    prompt: list[int]
    ids: list[int]
    rollout_logprobs: list[float]
    """Log-probability of each token in the engine."""
    advantage: float
    weight: float
    """Weight of each token in the loss of the step; 0 if the completion is masked."""
    place: str
    images: tuple[Image, ...] = ()
    old_logprobs: list[float] | None = None
    """Log-probabilities under the weights of the first step on it; None before that step, or with a single step."""
    reference_logprobs: list[float] | None = None
    """Log-probabilities under the model without its adapter, if `beta` needs them."""
    experts: str | None = None
    """Experts that training replays, if any: see `routed_experts`."""
    group: int = 0
    """Number of its group in the step."""
    reward: float | None = None
    """Its reward; None if it is masked."""


@dataclass(frozen=True)
class CompletionBatch(MicroBatch):
    """Completions of one forward. Shapes: N completion tokens, C completions; see `MicroBatch`.

    `targets` are all tokens of the completions, in order, `answer_of` [N] is the completion of each. `weights` [N] are
    final: the weighted losses of a step sum to its loss.
    """

    advantages: Tensor = field(kw_only=True)
    """float32 [N]."""
    rollout_logprobs: Tensor = field(kw_only=True)
    """float32 [N]."""
    token_at: Tensor = field(kw_only=True)
    """int64 [N]: index of each token in `ids`."""
    old_logprobs: Tensor | None = field(default=None, kw_only=True)
    """float32 [N]."""
    reference_logprobs: Tensor | None = field(default=None, kw_only=True)
    """float32 [N]."""
    experts: Tensor | None = field(default=None, kw_only=True)
    """int16 [T, layers, K]: experts that routers must choose for the tokens of `ids`; -1 where they may choose."""
    prompt_at: tuple[int, ...] = field(default=(), kw_only=True)
    """[C]: index in `ids` at which the prompt of each completion begins."""
    trajectories: tuple[Trajectory, ...] = field(default=(), kw_only=True)

    def keep_experts(self, chosen: Tensor) -> None:
        """Store the chosen experts for further steps on these completions. Shapes: int16 [T, layers, K]."""
        for number, (trajectory, begin) in enumerate(zip(self.trajectories, self.prompt_at, strict=True)):
            completion_experts = chosen[self.token_at[self.answer_of == number][:-1]]
            experts = torch.cat([chosen[begin : begin + len(trajectory.prompt)], completion_experts])
            trajectory.experts = encode_experts(experts.cpu().numpy())

    @property
    def num_trained(self) -> int:
        return sum(len(trajectory.ids) for trajectory in self.trajectories if trajectory.weight)


class _Sequence(NamedTuple):
    """A sequence of a batch: a prompt with its completion, or one of both."""

    trajectory: Trajectory
    """One of those that it belongs to."""
    ids: list[int]
    positions: Tensor
    prefix_of: int = -1
    """Index of the sequence that is its prefix: its prompt, if completions share one; else -1."""


def _lay_out(trajectories: Sequence[Trajectory], *, share_prompts: bool, reader: PixelReader | None) -> list[_Sequence]:
    sequences: list[_Sequence] = []
    for (prompt, images), group in groupby(trajectories, key=lambda trajectory: (trajectory.prompt, trajectory.images)):
        members = list(group)
        prompt_positions = torch.arange(len(prompt))
        if reader is not None:
            prompt_positions = reader.positions(np.array(prompt, np.int32), images, members[0].place)
        first_position = int(prompt_positions.max()) + 1
        prompt_index = len(sequences)
        for number, trajectory in enumerate(members):
            positions = torch.arange(first_position, first_position + len(trajectory.ids))
            positions = positions.expand(*prompt_positions.shape[:-1], -1)
            if share_prompts:
                if number == 0:
                    sequences.append(_Sequence(trajectory, prompt, prompt_positions))
                sequences.append(_Sequence(trajectory, trajectory.ids, positions, prompt_index))
            else:
                positions = torch.cat([prompt_positions, positions], dim=-1)
                sequences.append(_Sequence(trajectory, prompt + trajectory.ids, positions))
    return sequences


def collate_completions(
    trajectories: Sequence[Trajectory], *, share_prompts: bool, reader: PixelReader | None = None
) -> CompletionBatch:
    """Concatenate completions, each after its prompt; with `share_prompts`, neighbours share one copy of their prompt.

    `reader`: opens images; None for a model without vision. Raises: DataError for an image that cannot be read.
    """
    sequences = _lay_out(trajectories, share_prompts=share_prompts, reader=reader)
    ids = [token for sequence in sequences for token in sequence.ids]
    lengths = [len(sequence.ids) for sequence in sequences]
    begins = [0, *accumulate(lengths)]
    prompt_at: list[int] = []
    token_at: list[Tensor] = []
    target_positions: list[Tensor] = []
    for index, (trajectory, _, _, prefix) in enumerate(sequences):
        if share_prompts and prefix < 0:
            continue  # a prompt alone
        prompt_at.append(begins[prefix if share_prompts else index])
        end, last_of_prompt = begins[index + 1], prompt_at[-1] + len(trajectory.prompt) - 1
        begin = end - len(trajectory.ids)
        token_at.append(torch.arange(begin, end))
        # A completion's first token is predicted at the end of its prompt, each other token at the one before it.
        target_positions.append(torch.tensor([last_of_prompt, *range(begin, end - 1)]))
    images = [
        (sequence.trajectory.place, sequence.trajectory.images) for sequence in sequences if sequence.prefix_of < 0
    ]
    counts = torch.tensor([len(trajectory.ids) for trajectory in trajectories])

    def repeat_per_token(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)

    def concat_field(name: str) -> Tensor | None:
        lists = [getattr(trajectory, name) for trajectory in trajectories]
        return None if None in lists else torch.tensor([v for each in lists for v in each], dtype=torch.float32)

    rollout_logprobs = concat_field("rollout_logprobs")
    assert rollout_logprobs is not None
    return CompletionBatch(
        ids=torch.tensor(ids)[None],
        position_ids=torch.cat([sequence.positions for sequence in sequences], dim=-1).unsqueeze(-2),
        lengths=lengths,
        cu_seq_lens=torch.tensor(begins, dtype=torch.int32),
        target_positions=torch.cat(target_positions),
        targets=torch.tensor([token for trajectory in trajectories for token in trajectory.ids]),
        weights=repeat_per_token([trajectory.weight for trajectory in trajectories]),
        row_refs=tuple(sequence.trajectory.place for sequence in sequences),
        vision=reader.read(images) if reader is not None else None,
        prefix_of=tuple(sequence.prefix_of for sequence in sequences) if share_prompts else None,
        advantages=repeat_per_token([trajectory.advantage for trajectory in trajectories]),
        rollout_logprobs=rollout_logprobs,
        token_at=torch.cat(token_at),
        answer_of=torch.arange(len(trajectories)).repeat_interleave(counts),
        old_logprobs=concat_field("old_logprobs"),
        reference_logprobs=concat_field("reference_logprobs"),
        experts=_collate_experts(trajectories, prompt_at, token_at, len(ids)),
        prompt_at=tuple(prompt_at),
        trajectories=tuple(trajectories),
    )


def _collate_experts(
    trajectories: Sequence[Trajectory], prompt_at: Sequence[int], token_at: Sequence[Tensor], num_tokens: int
) -> Tensor | None:
    """Return the experts of each token of a batch: int16 [T, layers, K], -1 where none are recorded."""
    texts = [trajectory.experts for trajectory in trajectories if trajectory.experts is not None]
    if len(texts) < len(trajectories):
        return None
    experts: Tensor | None = None
    for trajectory, begin, indices, text in zip(trajectories, prompt_at, token_at, texts, strict=True):
        row_experts = torch.from_numpy(decode_experts(text))
        prompt_length = len(trajectory.prompt)
        if experts is None:
            experts = row_experts.new_full((num_tokens, *row_experts.shape[1:]), -1)
        experts[begin : begin + prompt_length] = row_experts[:prompt_length]
        completion_experts = row_experts[prompt_length:]
        experts[indices[: len(completion_experts)]] = completion_experts
    return experts


def rank_slice(count: int, layout: Layout) -> range:
    """Return the range of completions that this rank generates and trains on. Neighbours keep groups together."""
    rank, num_ranks = layout.data_rank, layout.data_size
    return range(count * rank // num_ranks, count * (rank + 1) // num_ranks)


def completion_batches(
    trajectories: Sequence[Trajectory],
    rows_each: int,
    *,
    share_prompts: bool,
    layout: Layout,
    is_first_use: bool = True,
    reader: PixelReader | None = None,
) -> Iterator[CompletionBatch]:
    """Yield this rank's part of a step in forwards of at most `rows_each` completions, as many on each rank.

    `is_first_use`: whether no step has trained on them yet.
    """
    most = -(-len(trajectories) // layout.data_size)
    local = [trajectories[index] for index in rank_slice(len(trajectories), layout)]
    for begin in range(0, most, rows_each):
        rows = local[begin : begin + rows_each]
        if rows:
            yield collate_completions(rows, share_prompts=share_prompts, reader=reader)
        else:
            yield _make_dummy_batch(is_first_use, reader)


def _make_dummy_batch(is_first_use: bool, reader: PixelReader | None) -> CompletionBatch:
    """Return a batch for a rank that has none left. Like others, it has stored logprobs unless this is the first use.

    A batch without them makes its rank compute them, and all ranks must take that forward together.
    """
    zero, zero_index = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    values: dict[str, Any] = {**vars(dummy_batch(reader)), "weights": zero}
    return CompletionBatch(
        **values,
        advantages=zero,
        rollout_logprobs=zero,
        token_at=zero_index,
        old_logprobs=None if is_first_use else zero,
        reference_logprobs=None if is_first_use else zero,
    )
