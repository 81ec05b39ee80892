"""Micro-batches of completions to train on, from completions with advantages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.data.collate import MicroBatch, dummy_batch
from surefoot.data.image_processor import PixelReader
from surefoot.data.images import Image, image_of
from surefoot.methods.grpo.routed_experts import as_text, from_text


@dataclass
class Trajectory:
    """A completion to be trained on. What training finds out of it is kept for further steps on it."""

    prompt: list[int]
    ids: list[int]
    rollout_logprobs: list[float]
    """What the engine gave each token."""
    advantage: float
    weight: float
    """Of each token in the loss of the step; 0 where the completion is masked."""
    place: str
    images: tuple[Image, ...] = ()
    old_logprobs: list[float] | None = None
    """Under the weights of the first step on it; None while that has not come, or where there is one step alone."""
    reference_logprobs: list[float] | None = None
    """Under the model without its adapter, where they are wanted."""
    experts: str | None = None
    """Those that training uses again, where it does: see `chosen_experts`."""


@dataclass(frozen=True)
class PolicyBatch(MicroBatch):
    """Completions of one forward. Shapes: N completion tokens, C completions; see `MicroBatch`.

    `targets` are all tokens of the completions, in order. `weights` [N] are final: a step's sum to what its loss is.
    """

    advantages: Tensor = field(kw_only=True)
    """float32 [N]."""
    rollout_logprobs: Tensor = field(kw_only=True)
    """float32 [N]."""
    token_at: Tensor = field(kw_only=True)
    """int64 [N]: where the tokens stand in `ids`."""
    completion: Tensor = field(kw_only=True)
    """int64 [N]: number of a token's completion in this batch."""
    old_logprobs: Tensor | None = field(default=None, kw_only=True)
    """float32 [N]."""
    reference_logprobs: Tensor | None = field(default=None, kw_only=True)
    """float32 [N]."""
    experts: Tensor | None = field(default=None, kw_only=True)
    """int16 [T, layers, K]: those that routers are to choose for the tokens of `ids`; -1 where they may choose."""
    prompt_at: tuple[int, ...] = field(default=(), kw_only=True)
    """[C]: where the prompt of each completion begins in `ids`."""
    trajectories: tuple[Trajectory, ...] = field(default=(), kw_only=True)

    def keep_experts(self, chosen: Tensor) -> None:
        """Let further steps on these completions use the experts that were chosen now. Shapes: int16 [T, layers, K]."""
        for number, (one, first) in enumerate(zip(self.trajectories, self.prompt_at, strict=True)):
            of_completion = chosen[self.token_at[self.completion == number][:-1]]
            found = torch.cat([chosen[first : first + len(one.prompt)], of_completion])
            one.experts = as_text(found.cpu().numpy())

    @property
    def num_tokens(self) -> int:
        """Prompts count for each of their completions, however often they are computed."""
        return sum(len(one.prompt) + len(one.ids) for one in self.trajectories)

    @property
    def num_sequences(self) -> int:
        return len(self.trajectories)

    @property
    def num_trained(self) -> int:
        return sum(len(one.ids) for one in self.trajectories if one.weight)


def trajectory_of(values: Mapping[str, Any]) -> Trajectory:
    """A trajectory that was written as JSON."""
    return Trajectory(**{**values, "images": tuple(image_of(image) for image in values["images"])})


def collate_policy(
    trajectories: Sequence[Trajectory], *, share_prompts: bool, reader: PixelReader | None = None
) -> PolicyBatch:
    """Lay completions end to end, each behind its prompt; `share_prompts`: one prompt for those that follow it.

    `reader`: of the images of a model that sees. Raises: DataError for one that cannot be read.
    """
    ids: list[int] = []
    positions: list[Tensor] = []
    lengths: list[int] = []
    continues: list[int] = []
    target_positions: list[Tensor] = []
    token_at: list[Tensor] = []
    prompt_at: list[int] = []
    places: list[str] = []
    seen: list[tuple[str, Sequence[Image]]] = []
    for (prompt, images), group in groupby(trajectories, key=lambda one: (one.prompt, one.images)):
        last_of_prompt = -1
        of_prompt = torch.arange(len(prompt))
        if reader is not None:
            of_prompt = reader.places(np.array(prompt, np.int32), images)
        next_position = int(of_prompt.max()) + 1
        for one in group:
            of_completion = torch.arange(next_position, next_position + len(one.ids)).expand(*of_prompt.shape[:-1], -1)
            if last_of_prompt < 0 or not share_prompts:
                last_of_prompt = len(ids) + len(prompt) - 1
                segment = prompt if share_prompts else prompt + one.ids
                ids += segment
                positions += [of_prompt] if share_prompts else [of_prompt, of_completion]
                seen.append((one.place, images))
                continues.append(-1)
                lengths.append(len(segment))
                places.append(one.place)
                owner = len(lengths) - 1
            prompt_at.append(last_of_prompt + 1 - len(prompt))
            begin = last_of_prompt + 1
            if share_prompts:
                begin = len(ids)
                ids += one.ids
                positions.append(of_completion)
                continues.append(owner)
                lengths.append(len(one.ids))
                places.append(one.place)
            # A completion's first token is predicted at the end of its prompt, each other one at the token before it.
            token_at.append(torch.arange(begin, begin + len(one.ids)))
            target_positions.append(torch.tensor([last_of_prompt, *range(begin, begin + len(one.ids) - 1)]))
    counts = torch.tensor([len(one.ids) for one in trajectories])

    def each_token(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)

    def joined(name: str) -> Tensor | None:
        lists = [getattr(one, name) for one in trajectories]
        return None if None in lists else torch.tensor([v for each in lists for v in each], dtype=torch.float32)

    rollout = joined("rollout_logprobs")
    assert rollout is not None
    return PolicyBatch(
        ids=torch.tensor(ids)[None],
        position_ids=torch.cat(positions, dim=-1).unsqueeze(-2),
        lengths=lengths,
        cu_seq_lens=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        target_positions=torch.cat(target_positions),
        targets=torch.tensor([token for one in trajectories for token in one.ids]),
        weights=each_token([one.weight for one in trajectories]),
        places=tuple(places),
        vision=reader.read(seen) if reader is not None else None,
        continues=tuple(continues) if share_prompts else None,
        advantages=each_token([one.advantage for one in trajectories]),
        rollout_logprobs=rollout,
        token_at=torch.cat(token_at),
        completion=torch.arange(len(trajectories)).repeat_interleave(counts),
        old_logprobs=joined("old_logprobs"),
        reference_logprobs=joined("reference_logprobs"),
        experts=_experts(trajectories, prompt_at, token_at, len(ids)),
        prompt_at=tuple(prompt_at),
        trajectories=tuple(trajectories),
    )


def _experts(
    trajectories: Sequence[Trajectory], prompt_at: Sequence[int], token_at: Sequence[Tensor], tokens: int
) -> Tensor | None:
    """The experts of each token of a batch: int16 [T, layers, K], -1 where none are known."""
    texts = [one.experts for one in trajectories if one.experts is not None]
    if len(texts) < len(trajectories):
        return None
    found: Tensor | None = None
    for one, first, places, text in zip(trajectories, prompt_at, token_at, texts, strict=True):
        of_one = torch.from_numpy(from_text(text))
        if found is None:
            found = of_one.new_full((tokens, *of_one.shape[1:]), -1)
        found[first : first + len(one.prompt)] = of_one[: len(one.prompt)]
        of_completion = of_one[len(one.prompt) :]
        found[places[: len(of_completion)]] = of_completion
    return found


def rank_slice(count: int, rank: int, num_ranks: int) -> range:
    """The completions that a rank generates and trains on: neighbours, so that groups stay together."""
    return range(count * rank // num_ranks, count * (rank + 1) // num_ranks)


def policy_batches(
    trajectories: Sequence[Trajectory],
    rows_each: int,
    *,
    share_prompts: bool,
    is_first_use: bool = True,
    rank: int = 0,
    num_ranks: int = 1,
    reader: PixelReader | None = None,
) -> Iterator[PolicyBatch]:
    """This rank's part of a step in forwards of at most `rows_each` completions, as many on each rank.

    `is_first_use`: no step has trained on them yet.
    """
    most = max(len(rank_slice(len(trajectories), other, num_ranks)) for other in range(num_ranks))
    mine = [trajectories[index] for index in rank_slice(len(trajectories), rank, num_ranks)]
    for begin in range(0, most, rows_each):
        rows = mine[begin : begin + rows_each]
        if rows:
            yield collate_policy(rows, share_prompts=share_prompts, reader=reader)
        else:
            yield _filler(is_first_use, reader)


def _filler(is_first_use: bool, reader: PixelReader | None) -> PolicyBatch:
    """Stands in beside other ranks' batches; like theirs, it gets no logprobs that stay but at the first use."""
    nothing, first = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    values: dict[str, Any] = {**vars(dummy_batch(reader)), "weights": nothing}
    return PolicyBatch(
        **values,
        advantages=nothing,
        rollout_logprobs=nothing,
        token_at=first,
        completion=first,
        old_logprobs=None if is_first_use else nothing,
        reference_logprobs=None if is_first_use else nothing,
    )
