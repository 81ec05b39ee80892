"""The data of a run, prepared before or during training, and their micro-batches in the order of the rows."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from surefoot.config import LoadedConfig
from surefoot.data.build_dataset import ModelInputs, check_sources, held_out_side, open_dataset, open_images
from surefoot.data.checks import data_findings
from surefoot.data.collate import MicroBatch, micro_batches, unpacked_batches
from surefoot.data.dataset import Dataset, Sample, SampleKey
from surefoot.data.image_processor import PixelReader
from surefoot.data.inspect import DataReport, report_on
from surefoot.data.prepare_pool import Progress
from surefoot.data.sampler import GlobalOrder, Position, StepBatch
from surefoot.distributed.parallel_dims import Layout
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.events import DataCounted, Emit, FindingMade, Heartbeat, Notice
from surefoot.models.build import load_config, load_tokenizer, meta_model
from surefoot.models.resolve_model import longest_context, resolve_model
from surefoot.models.sample_layout import num_positions

MAX_INSPECTED_ROWS = 256
"""Number of rows of a chunk whose columns are collected."""
HEARTBEAT_EVERY_S = 5.0
"""Seconds between two heartbeats of a long evaluation or rollout."""
T = TypeVar("T")


class RunData:
    """The data of a run and the order in which it is trained on."""

    def __init__(
        self,
        loaded: LoadedConfig,
        train: Dataset,
        held_out: Dataset | None,
        reader: PixelReader | None,
        emit: Emit,
        ranks: World,
    ) -> None:
        """Create the order of the data. `reader`: opens images; None for a model without vision."""
        config = loaded.run
        self.reader = reader
        self.shares_questions = False
        """Whether the question of a pair stands in its batch once, for both answers."""
        self._ranks = ranks
        self.layout = Layout.of(config, ranks.size, rank=ranks.rank)
        self.train = train
        self.held_out = held_out
        self._config = config
        self._is_checked = False
        self._rows_each = config.rows_at_a_time
        self._emit = emit
        self.order = GlobalOrder(
            train,
            sequences_per_step=config.sequences_per_step // config.sequences_per_row,
            seed=config.seed,
            shuffle=config.shuffle,
            pack_length=config.pack_length,
        )

    def prepare(self, position: Position) -> None:
        """Prepare the data from the position where training begins: small files at once, others during training.

        Raises: DataError for rows that cannot be trained on.
        """
        if self.held_out is not None and self.held_out.preparation is not self.train.preparation:
            self.held_out.prepare()
        if self.train.preparation.is_small or self.train.preparation.is_complete:
            self.train.preparation.run()
            self._check_all_rows()
            return
        windows = self.order.windows_from(position)
        # A file that can only be read from its beginning is read twice: for the first window, then for all the others.
        chunk_numbers = chain(*windows) if self.train.can_be_entered else sorted(windows[0])
        chunks = [self.train.chunks[number] for number in chunk_numbers]
        self.train.preparation.start([(ref.file, ref.index) for ref in chunks])
        self._emit_counts()

    def first_columns(self, position: Position) -> dict[str, object]:
        """Return the columns of rows of the chunk that is prepared first; empty if it has no sample."""
        return _collect_columns(self.train, self.order.windows_from(position)[0][0])

    def first_samples(self, position: Position) -> list[Sample]:
        """Return samples of the chunk that is prepared first."""
        chunk = self.order.windows_from(position)[0][0]
        numbers = self.train.chunk_samples(chunk).samples[:MAX_INSPECTED_ROWS]
        return [self.train.sample(chunk, int(number)) for number in numbers]

    def held_out_columns(self) -> dict[str, object]:
        """Return the columns of held-out rows; empty without any, or if they are split from the training files."""
        is_separate = self.held_out is not None and self.held_out.preparation is not self.train.preparation
        return _collect_columns(self.held_out, 0) if self.held_out is not None and is_separate else {}

    def _check_all_rows(self) -> None:
        """Raise DataError for rows that cannot be trained on, anywhere in the order, once all rows are prepared."""
        self.train.check()
        if self.held_out is not None:
            self.held_out.check()
        self._is_checked = True
        self._emit_findings()
        self._emit_counts()

    def total_steps(self) -> int | None:
        """Return the number of optimizer steps of the whole run; None while it would take long to count them."""
        if self._config.max_steps is not None:
            return self._config.max_steps
        if not self.train.preparation.is_complete or len(self.order.windows_from(Position())) > 1:
            return None
        if self._config.may_skip_rows:
            return None
        return self.order.steps_in(self._config.epochs) * self._config.steps_per_batch

    def visited_samples(self) -> list[SampleKey]:
        """Return the samples that the whole run trains on, in file order. Everything is prepared."""
        every = list(self.train.sample_keys())
        visited: set[SampleKey] = set()
        position, step, epoch = Position(), 0, 0.0
        while len(visited) < len(every) and not self._config.is_over(step, epoch):
            batch = self.order.step(position)
            visited.update(chain.from_iterable(batch.sequences))
            position, step, epoch = batch.next_position, step + 1, batch.epoch
        return [key for key in every if key in visited]

    def finish(self) -> None:
        """Wait until everything is prepared, and check it. Raises: DataError."""
        if not self._is_checked:
            self.train.preparation.wait()
            self._check_all_rows()

    def end(self) -> None:
        """Stop preparing because training is over. A later run prepares the rest."""
        self.stop()
        if not self._is_checked:
            self._emit_counts()

    def stop(self) -> None:
        """Stop the workers that still prepare, and those that read images."""
        self.train.preparation.stop()
        if self.reader is not None:
            self.reader.end_workers()

    def batches(self, position: Position) -> tuple[StepBatch, list[MicroBatch]]:
        """Return the step that begins at a position of the order, and this rank's micro-batches.

        Raises: DataError for its rows, and for any other row that is prepared by then, to report it early.
        """

        def read_step() -> tuple[StepBatch, list[MicroBatch]]:
            self.check_prepared()
            step = self.order.step(position)
            self._read_ahead(step)
            batches = list(micro_batches(step.sequences, self.train, **self._collation))
            self._read_ahead_of_next(step)
            return step, batches

        return self._read_batches(read_step)

    @property
    def _collation(self) -> dict[str, Any]:
        """Arguments of `micro_batches` besides the rows."""
        return {
            "rows_each": self._rows_each,
            "rank": self.layout.data_rank,
            "num_ranks": self.layout.data_size,
            "reader": self.reader,
            "shares_questions": self.shares_questions,
        }

    def _read_ahead_of_next(self, step: StepBatch) -> None:
        """Let the workers begin with the images of the next step, if there is one and its rows are prepared already."""
        is_last = self._config.is_over(0, step.epoch)
        if self.reader is not None and self.reader.has_workers and self.train.preparation.is_complete and not is_last:
            self._read_ahead(self.order.step(step.next_position))

    def _read_ahead(self, step: StepBatch) -> None:
        """Let the workers begin with the images of this rank's part of a step. Those of a pair are read by part."""
        if self.reader is not None and self.reader.has_workers and not self._config.row.is_pair:
            rows = step.sequences[self.layout.data_rank :: self.layout.data_size]
            self.reader.read_ahead(self.train.sample(*key).images for row in rows for key in row)

    def check_prepared(self) -> None:
        """Check the rows prepared so far. Raises: DataError, on this rank alone."""
        if not self._is_checked:
            self.train.preparation.raise_error()
            if self.train.preparation.is_complete:
                self._check_all_rows()

    def _read_batches(self, read: Callable[[], T]) -> T:
        """Return this rank's batches. If images are opened, an error of one rank is raised on all of them."""
        return read() if self.reader is None else self._ranks.run_or_raise_on_all(read)

    def eval_batches(self) -> Iterator[MicroBatch]:
        """Yield this rank's part of the held-out samples, as many batches on each rank. Collective with images."""
        assert self.held_out is not None
        return self.batches_of(self.held_out, self.held_out.sample_keys(), "evaluating")

    def batches_of(self, dataset: Dataset, keys: Iterable[SampleKey], purpose: str) -> Iterator[MicroBatch]:
        """Yield this rank's part of some samples, as many batches on each rank. Collective with images."""
        batches = unpacked_batches(keys, dataset, **self._collation)
        last_heartbeat_s, num_batches = time.monotonic(), 0
        while batch := self._read_batches(lambda: list(islice(batches, 1))):
            yield from batch
            num_batches += 1
            if time.monotonic() - last_heartbeat_s > HEARTBEAT_EVERY_S:  # the supervisor must not see a stall
                last_heartbeat_s = time.monotonic()
                self._emit(Heartbeat(f"{purpose}: {num_batches} batches"))

    def _emit_findings(self) -> None:
        for finding in data_findings(self.train.without_validation(), self.held_out):
            self._emit(FindingMade(finding))

    def _emit_counts(self) -> None:
        dataset = self.train.without_validation()  # bad rows that no step has reached yet are counted, not refused
        counts = dataset.counts()
        is_complete = self.train.preparation.is_complete
        held_out = None
        if self._config.eval_fraction and self.held_out is not None and is_complete:
            evaluated = self.held_out.without_validation().counts()
            held_out = evaluated.trained + evaluated.truncated
        self._emit(DataCounted(counts.as_dict(), is_complete, held_out))
        if counts.skipped:
            examples = "; ".join(f"{place}: {reason}" for place, reason in islice(dataset.skipped(), 3))
            self._emit(Notice(f"{counts.skipped} of {counts.read} rows skipped: {examples}"))
        if counts.cut_inside:
            self._emit(
                Notice(f"{counts.cut_inside} of {counts.truncated} truncated rows lost a part of a trained turn")
            )


def _collect_columns(dataset: Dataset, chunk: int) -> dict[str, object]:
    columns: dict[str, object] = {}
    for sample in dataset.chunk_samples(chunk).samples[:MAX_INSPECTED_ROWS]:
        columns |= dataset.columns(chunk, int(sample))
    return columns


def describe(loaded: LoadedConfig, *, show: int, emit: Emit = lambda _: None) -> DataReport:
    """Return the report of `surefoot data`. Loads the tokenizer, not the model. Raises: SurefootError."""
    check_sources(loaded)  # before the model is downloaded
    base = resolve_model(loaded.run.model, loaded.where("model"), weights=False)
    data = open_data(loaded, base, load_tokenizer(base, loaded.run.chat_template), emit)
    data.train.preparation.run()
    if data.held_out is not None:
        data.held_out.preparation.run()
    return report_on(data.train, data.held_out, show=show)


def open_data(
    loaded: LoadedConfig,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    emit: Emit,
    ranks: World = SINGLE_PROCESS,
    *,
    shard_digests: Mapping[str, str] | None = None,
) -> RunData:
    """Open the data that a config names and detect its formats. `shard_digests`: see `Dataset`. Raises: DataError."""
    model = load_config(base)
    text_config = model.get_text_config()
    context = longest_context(text_config.to_dict())
    # A model with RoPE has no table; building it, even without storage, takes a second where there are many layers.
    table = None if getattr(text_config, "rope_parameters", None) else num_positions(meta_model(base))
    inputs = ModelInputs(
        tokenizer,
        int(text_config.vocab_size),
        min((size for size in (context, table) if size is not None), default=None),
        table,
        *open_images(loaded, base, model, tokenizer),
    )

    def report(progress: Progress | None) -> None:
        if threading.current_thread() is threading.main_thread():  # during training, the lines of steps are enough
            emit(Heartbeat(progress.as_text() if progress is not None else ""))

    def open_setting(setting: Literal["dataset", "eval_dataset"]) -> Dataset:
        return open_dataset(
            loaded,
            setting,
            inputs,
            only_waits=ranks.local_rank > 0,
            shard_digests=shard_digests if setting == "dataset" else None,
            on_progress=report,
        )

    train = open_setting("dataset")
    held_out = None
    if loaded.run.eval_dataset is not None:
        held_out = open_setting("eval_dataset")
    elif loaded.run.eval_fraction:
        held_out = held_out_side(train)
    return RunData(loaded, train, held_out, inputs.reader, emit, ranks)
