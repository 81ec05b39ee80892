"""The base of methods that train on the rows of the data in their order."""

from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np

from surefoot.config import RunConfig
from surefoot.data.collate import MicroBatch
from surefoot.data.dataset import Sample
from surefoot.data.sampler import Position, StepBatch
from surefoot.events import SamplesTrained
from surefoot.methods.base import Method, TrainContext

SAMPLES_SHOWN = 4
"""Number of samples of the first step that samples.jsonl and report.html show."""


class RowMethod(Method):
    """A method whose batches are rows of the data, which samples.jsonl shows as they are trained on."""

    def load(self, config: RunConfig, train_context: TrainContext) -> None:  # noqa: ARG002 - batches need no config
        """Receive the model."""
        self._train_context = train_context

    def batches(self, position: Position, step: int, epoch: float) -> tuple[StepBatch, list[MicroBatch]]:  # noqa: ARG002
        """Return samples in the order of the data; show some of the first step. Raises: DataError."""
        with self.context.phase("data_wait"):
            batch = self.context.data.batches(position)
        if step == 0 and self.context.ranks.is_first:
            keys = islice(chain.from_iterable(batch[0].sequences), SAMPLES_SHOWN)
            samples = (self.context.data.train.sample(*key) for key in keys)
            self.context.emit(SamplesTrained(1, tuple(self.describe_sample(sample) for sample in samples)))
        return batch

    def describe_sample(self, sample: Sample) -> dict[str, Any]:
        """Return a sample as JSON values, with its text in parts that are trained or not."""
        number = np.zeros(len(sample.ids), np.int64)  # of the question and the two answers of a pair
        if sample.parts is not None:
            number = np.repeat(np.arange(len(sample.parts)), sample.parts)
        kinds = zip((sample.weights > 0).tolist(), number.tolist(), strict=True)
        parts = [
            [self.context.tokenizer.decode([token for token, _ in tokens]), is_trained]
            for (is_trained, _), tokens in groupby(zip(sample.ids.tolist(), kinds, strict=True), key=itemgetter(1))
        ]
        return {"place": sample.place, "tokens": len(sample.ids), "parts": parts}
