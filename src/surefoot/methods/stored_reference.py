"""Log-probabilities of answers under the model that training begins with, computed once and kept in the cache.

    <cache>/references/<key>.safetensors     logps float32 [S, 2], NaN where no run has needed it yet

Needed where the reference is not the model without its adapter. It is never in memory beside the model in training.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from surefoot.data.collate import MicroBatch
from surefoot.data.dataset import Dataset, SampleKey
from surefoot.distributed.process_group import World, sum_over_ranks
from surefoot.system.atomic_io import cache_folder, write_bytes

VERSION = 1
"""Version in every key: raised when the same input gives other numbers."""
TENSOR = "logps"
SAMPLES_AT_A_TIME = 4096
"""Number of samples after which what is computed is written."""


@dataclass(frozen=True)
class StoredReference:
    """Two log-probabilities for each sample of a dataset, see `PreferenceObjective.score`."""

    logps: Tensor
    """float32 [S, 2], on the CPU; NaN where they are not needed."""
    begins: Sequence[int]
    """Number of the first sample of each chunk."""

    def of(self, keys: Iterable[SampleKey]) -> Tensor:
        """Return the log-probabilities of some samples. Shapes: [K, 2]."""
        return self.logps[self.rows_of(keys)]

    def rows_of(self, keys: Iterable[SampleKey]) -> list[int]:
        """Return the rows of some samples in `logps`."""
        return [self.begins[chunk] + sample for chunk, sample in keys]


@dataclass(frozen=True)
class ReferenceScorer:
    """Completes the stored reference of a dataset with the model that training begins with."""

    batches: Callable[[Iterable[SampleKey]], Iterable[MicroBatch]]
    """Yields this rank's part of some samples, as many batches on each rank."""
    ranks: World
    device: torch.device
    score: Callable[[MicroBatch], Tensor]
    """Returns two log-probabilities of each sample of a batch, [samples, 2], without graph. Collective."""
    identity: Mapping[str, Any]
    """Values that the numbers depend on besides the data, in JSON."""
    announce: Callable[[int], None]
    """Called with the number of samples to compute before the first of them."""

    def complete(self, dataset: Dataset, keys: Sequence[SampleKey]) -> StoredReference:
        """Return the reference of some samples, and keep it for further runs. Collective."""
        begins = [0, *accumulate(len(dataset.shard(number)) for number in range(len(dataset.chunks)))]
        path = self._path(dataset)
        stored = torch.zeros(begins[-1], 2)
        if self.ranks.is_first:
            stored = _read(path, stored.shape)
        reference = StoredReference(self._sum(stored), begins)
        is_missing = reference.of(keys).isnan().any(1).tolist()
        missing = [key for key, is_absent in zip(keys, is_missing, strict=True) if is_absent]
        if not missing:
            return reference
        self.announce(len(missing))

        def write() -> None:
            if self.ranks.is_first:
                write_bytes(path, save({TENSOR: reference.logps}))

        # Written piece by piece, so that a run that is stopped meanwhile has not computed in vain.
        for begin in range(0, len(missing), SAMPLES_AT_A_TIME):
            part = missing[begin : begin + SAMPLES_AT_A_TIME]
            computed = torch.zeros_like(stored)
            for batch in self.batches(part):
                logps = self.score(batch.to(self.device))
                if not batch.is_dummy:
                    computed[reference.rows_of(batch.sample_keys)] = logps.cpu()
            rows = reference.rows_of(part)
            reference.logps[rows] = self._sum(computed)[rows]
            self.ranks.run_or_raise_on_all(write, names_rank=False)
        return reference

    def _path(self, dataset: Dataset) -> Path:
        options = dataset.options
        parts = {
            **self.identity,
            "version": VERSION,
            "data": dataset.fingerprint(),
            "max_length": options.max_length,
            "truncation": options.truncation,
            "train_on": options.train_on,
            "side": [options.side, options.eval_fraction],
            "device": self.device.type,
        }
        if dataset.renderer_source.images is not None:  # which may change beside the rows
            parts["images"] = [dataset.shard(number).digest for number in range(len(dataset.chunks))]
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return cache_folder() / "references" / f"{key[:32]}.safetensors"

    def _sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks. Collective."""
        return sum_over_ranks(tensor.to(self.device), self.ranks).cpu()


def _read(path: Path, shape: torch.Size) -> Tensor:
    """Return what a file holds, or NaN without one that can be read."""
    if path.exists():
        try:
            stored: Tensor = load_file(path)[TENSOR]
        except (SafetensorError, KeyError, OSError):
            stored = torch.zeros(0)
        if stored.shape == shape:
            return stored
    return torch.full(shape, torch.nan)
