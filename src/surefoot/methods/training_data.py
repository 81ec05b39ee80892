"""The data of a run, prepared before or beside training; for SFT, dealt out as micro-batches."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from surefoot.config import LoadedConfig
from surefoot.data.build_dataset import check_sources, held_out_side, open_dataset, open_images
from surefoot.data.checks import data_findings
from surefoot.data.collate import MicroBatch, all_batches, micro_batches
from surefoot.data.dataset import Dataset, progress_line
from surefoot.data.image_processor import PixelReader
from surefoot.data.inspect import DataReport, look
from surefoot.data.prepare_pool import Progress
from surefoot.data.sampler import GlobalOrder, Position, StepBatch
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.events import DataCounted, Event, FindingMade, Heartbeat, Notice
from surefoot.models.build import load_config, load_tokenizer
from surefoot.models.resolve_model import longest_context, resolve_model

MOST_LOOKED_AT = 256
"""Rows."""
SIGN_EVERY_S = 5.0
"""How often a long evaluation, or rollout, says that it goes on."""
Emit = Callable[[Event], None]
T = TypeVar("T")


class RunData:
    """The data of a run and the order in which it is seen."""

    def __init__(
        self,
        loaded: LoadedConfig,
        train: Dataset,
        held_out: Dataset | None,
        reader: PixelReader | None,
        emit: Emit,
        ranks: World,
    ) -> None:
        """`reader`: of images, where the model sees."""
        config = loaded.run
        self.reader = reader
        self._ranks = ranks
        self.train = train
        self.held_out = held_out
        self._config = config
        self._is_checked = False
        self._rows_each = config.per_device_train_batch_size
        self._emit = emit
        self.order = GlobalOrder(
            train,
            sequences_per_step=config.sequences_per_step // config.sequences_per_row,
            seed=config.seed,
            shuffle=config.shuffle,
            pack_length=config.max_length if config.packing else None,
        )

    def prepare(self, position: Position) -> None:
        """Prepare the data, from where training will begin: small files at once, others beside training.

        Raises: DataError for whatever in the data cannot be trained on.
        """
        if self.held_out is not None and self.held_out.preparation is not self.train.preparation:
            self.held_out.prepare()
        if self.train.preparation.is_small or self.train.preparation.is_complete:
            self.train.preparation.run()
            self._check()
            return
        windows = self.order.windows_from(position)
        # A file that can only be read from its beginning is read twice: for the first window, then for all the others.
        wanted = chain(*windows) if self.train.can_be_entered else sorted(windows[0])
        chunks = [self.train.chunks[number] for number in wanted]
        self.train.preparation.start([(ref.file, ref.index) for ref in chunks])
        self._count()

    def first_columns(self, position: Position) -> dict[str, object]:
        """The columns that rows of the chunk which is prepared first have; none where it gives no sample."""
        return _columns(self.train, self.order.windows_from(position)[0][0])

    def held_out_columns(self) -> dict[str, object]:
        """Those of held-out rows; none without any, or where they are held out of the files that are trained on."""
        is_apart = self.held_out is not None and self.held_out.preparation is not self.train.preparation
        return _columns(self.held_out, 0) if self.held_out is not None and is_apart else {}

    def _check(self) -> None:
        """Everything is prepared: refuse what cannot be trained on, wherever in the order it comes."""
        self.train.check()
        if self.held_out is not None:
            self.held_out.check()
        self._is_checked = True
        self._find()
        self._count()

    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None while they are not known and would take long to count."""
        if self._config.max_steps is not None:
            return self._config.max_steps
        if not self.train.preparation.is_complete or len(self.order.windows_from(Position())) > 1:
            return None
        if self._config.may_skip_rows:
            return None
        return self.order.steps_in(self._config.epochs) * self._config.steps_per_batch

    def finish(self) -> None:
        """Wait until everything is prepared, and check it. Raises: DataError."""
        if not self._is_checked:
            self.train.preparation.wait()
            self._check()

    def end(self) -> None:
        """Training is over: what is not prepared is left to a later run."""
        self.stop()
        if not self._is_checked:
            self._count()

    def stop(self) -> None:
        """End the workers that still prepare."""
        self.train.preparation.stop()

    def batches(self, position: Position) -> tuple[StepBatch, list[MicroBatch]]:
        """The step that begins at a position of the order, and its micro-batches.

        Raises: DataError for its rows, and for any other that preparing has come to: sooner rather than later.
        """

        def mine() -> tuple[StepBatch, list[MicroBatch]]:
            self.look()
            step = self.order.step(position)
            part = self._ranks.rank, self._ranks.size
            return step, list(micro_batches(step.rows, self.train, self._rows_each, *part, self.reader))

        return self._read(mine)

    def look(self) -> None:
        """Whether what is being prepared can be trained on, as far as it is. Raises: DataError, on this rank alone."""
        if not self._is_checked:
            self.train.preparation.raise_error()
            if self.train.preparation.is_complete:
                self._check()

    def _read(self, mine: Callable[[], T]) -> T:
        """This rank's batches. Where images are opened, one rank may find what the others do not: all hear of it."""
        return mine() if self.reader is None else self._ranks.run_or_raise_on_all(mine)

    def eval_batches(self) -> Iterator[MicroBatch]:
        """This rank's part of the held-out samples; as many batches on each rank. Collective where images are read."""
        assert self.held_out is not None
        batches = all_batches(self.held_out, self._rows_each, self._ranks.rank, self._ranks.size, self.reader)
        said_s, done = time.monotonic(), 0
        while batch := self._read(lambda: list(islice(batches, 1))):
            yield from batch
            done += 1
            if time.monotonic() - said_s > SIGN_EVERY_S:  # for the supervisor too: this is no standstill
                said_s = time.monotonic()
                self._emit(Heartbeat(f"evaluating: {done} batches"))

    def _find(self) -> None:
        for finding in data_findings(self.train.without_validation(), self.held_out):
            self._emit(FindingMade(finding))

    def _count(self) -> None:
        looked_at = self.train.without_validation()  # rows that no step has come to yet are counted, not refused
        counts = looked_at.counts()
        is_complete = self.train.preparation.is_complete
        self._emit(DataCounted(counts.as_dict(), is_complete))
        if counts.skipped:
            shown = "; ".join(f"{place}: {reason}" for place, reason in islice(looked_at.skipped(), 3))
            self._emit(Notice(f"{counts.skipped} of {counts.read} rows skipped: {shown}"))
        if counts.cut_inside:
            self._emit(
                Notice(f"{counts.cut_inside} of {counts.truncated} truncated rows lost a part of a trained turn")
            )


def _columns(dataset: Dataset, chunk: int) -> dict[str, object]:
    columns: dict[str, object] = {}
    for sample in dataset.usable(chunk).samples[:MOST_LOOKED_AT]:
        columns |= dataset.columns(chunk, int(sample))
    return columns


def describe(loaded: LoadedConfig, *, show: int, emit: Emit = lambda _: None) -> DataReport:
    """Return what `surefoot data` shows. Loads the tokenizer, not the model. Raises: SurefootError."""
    check_sources(loaded)  # before a model is fetched
    base = resolve_model(loaded.run.model, loaded.where("model"), weights=False)
    data = open_data(loaded, base, load_tokenizer(base, loaded.run.chat_template), emit)
    data.train.preparation.run()
    if data.held_out is not None:
        data.held_out.preparation.run()
    return look(data.train, data.held_out, show=show)


def open_data(
    loaded: LoadedConfig,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    emit: Emit,
    ranks: World = SINGLE_PROCESS,
    *,
    known: Mapping[str, str] | None = None,
) -> RunData:
    """The data a config names, found and its formats told. `known`: see `Dataset`. Raises: DataError."""
    model = load_config(base)
    vocab_size = int(model.get_text_config().vocab_size)
    reader, no_vision_reason = open_images(loaded, base, model, tokenizer)

    def report(progress: Progress | None) -> None:
        if threading.current_thread() is threading.main_thread():  # beside training, its own lines are enough
            emit(Heartbeat(progress_line(progress) if progress is not None else ""))

    def opened(setting: Literal["dataset", "eval_dataset"]) -> Dataset:
        waits = ranks.local_rank > 0
        return open_dataset(
            loaded,
            setting,
            tokenizer,
            vocab_size=vocab_size,
            reader=reader,
            no_vision_reason=no_vision_reason,
            context=longest_context(model.get_text_config().to_dict()),
            only_waits=waits,
            known=known if setting == "dataset" else None,
            on_progress=report,
        )

    train = opened("dataset")
    held_out = None
    if loaded.run.eval_dataset is not None:
        held_out = opened("eval_dataset")
    elif loaded.run.eval_fraction:
        held_out = held_out_side(train)
    return RunData(loaded, train, held_out, reader, emit, ranks)
