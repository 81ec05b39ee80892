"""Training of reward models: of two answers to a question, the chosen one gets the higher reward.

Shape suffixes: P pairs.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.config import LoadedConfig, RunConfig
from surefoot.data.collate import MicroBatch
from surefoot.data.dataset import Dataset
from surefoot.data.row_formats import MARGIN
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.errors import ModelError
from surefoot.methods.answers import AnswerMethod, AnswerObjective
from surefoot.methods.base import BatchTotals, Objective
from surefoot.methods.reward.scores import AnswerScores
from surefoot.methods.reward.settings import RewardConfig
from surefoot.models.build import BuiltModel, meta_model

METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
"""Means over pairs, under the names that TRL has in its other trainers of pairs."""


@dataclass(frozen=True)
class RatedBatch(MicroBatch):
    """Pairs of answers with their margins."""

    margins: Tensor | None = None
    """float32 [P]: by how much the reward of the chosen answer should be above that of the rejected."""


class RewardObjective(AnswerObjective):
    """The loss of pairs under Bradley and Terry's model, averaged over the pairs of the step."""

    def __init__(self, built: BuiltModel, config: RewardConfig, ranks: World = SINGLE_PROCESS) -> None:
        """Check how the model computes its scores. Collective. Raises: ModelError."""
        super().__init__(built, ranks)
        self._centering = config.center_rewards_coefficient
        self._scores = AnswerScores(built.model)

    def measure(self, batch: MicroBatch) -> Tensor:
        """Return the reward of each answer. Shapes: [2 P]. Collective."""
        return self._scores(batch)

    def compare(self, values: Tensor, batch: MicroBatch, totals: BatchTotals | None) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's share of the loss, and the loss and METRICS of each pair; see `AnswerObjective`.

        Bradley-Terry with a margin (arXiv:2307.09288, eq. 2), and the centring of arXiv:2312.09244.
        """
        chosen, rejected = values.view(-1, 2).unbind(1)
        margins = batch.margins if isinstance(batch, RatedBatch) else None
        losses = -F.logsigmoid(chosen - rejected - (0 if margins is None else margins))
        losses = losses + self._centering * (chosen + rejected) ** 2
        columns = [losses, chosen, rejected, chosen - rejected, chosen > rejected]
        share = losses.sum() if totals is None else losses.sum() / (totals.sequences / 2)
        return share, torch.stack([column.detach().double() for column in columns], dim=1)

    def summarise(self, rows: Tensor) -> dict[str, float]:
        """Return `loss` and METRICS over all ranks. Collective: one sum of a few numbers."""
        sums = rows.sum(0).tolist() or [0.0] * (1 + len(METRICS))
        *totals, pairs = self.ranks.sum([*sums, len(rows)])
        return {name: total / pairs for name, total in zip(("loss", *METRICS), totals, strict=True)}


class Reward(AnswerMethod):
    """Training of a reward model."""

    @staticmethod
    def check_model(loaded: LoadedConfig, base: Path) -> None:
        """Raise ModelError if transformers has no reward model of this architecture. Reads no weights."""
        try:
            meta_model(base, has_score=True)
        except ModelError as error:
            raise ModelError(f"{str(error).removesuffix('.')} ({loaded.where('model')}).") from error

    @staticmethod
    def build_objective(built: BuiltModel, config: RunConfig, ranks: World) -> Objective:
        """Return the loss of pairs."""
        assert isinstance(config, RewardConfig)
        return RewardObjective(built, config, ranks)

    def read_rows(self, batch: MicroBatch, dataset: Dataset) -> MicroBatch:
        """Return the batch with the margins of its rows."""
        columns = [dataset.columns(*key) for key in batch.sample_keys]
        margins = [value if isinstance(value := row.get(MARGIN), float) else 0.0 for row in columns]
        return RatedBatch(**vars(batch), margins=torch.tensor(margins)) if any(margins) else batch
