"""The composition root: from a config to a finished run. Reads as a list of what a run is made of."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.config import LoadedConfig, RunConfig, as_yaml
from surefoot.data.dataset import Dataset, load_dataset
from surefoot.data.loader import GlobalOrder, MicroBatch, micro_batches
from surefoot.errors import CheckpointError, StoppedOnFinding, SurefootError
from surefoot.events import Event, FindingMade, Noted, Observer, RunEnded, RunStarted
from surefoot.models.build import build_model, keep_freed_memory, load_config, load_tokenizer, trainable_parameters
from surefoot.models.sources import resolve_model
from surefoot.storage import write_json, write_text
from surefoot.training.artifacts import load_adapter, lora_settings, write_artifact
from surefoot.training.checkpoint import TrainState, load_checkpoint
from surefoot.training.folder import Resume, claim, delete_run
from surefoot.training.loop import Job, StopSignal, fit
from surefoot.training.metrics import build_observers
from surefoot.training.optim import build_optimizer
from surefoot.training.record import RunRecord, RunResult, Status, completed_earlier, environment
from surefoot.training.resolve import resolve
from surefoot.training.sft import SftObjective

Emit = Callable[[Event], None]


def train(loaded: LoadedConfig, observers: Sequence[Observer] = (), *, screen: bool = True) -> RunResult:
    """Run the fine-tuning that a config describes; returns what it did.

    Raises: InputError (nothing was changed), StoppedOnFinding, StorageError; summary.json then says `failed`.
    """
    loaded = resolve(loaded)
    config, folder = loaded.run, loaded.run.run_folder
    with StopSignal().watching() as stop, claim(loaded) as resume:
        record = RunRecord(folder)
        own = build_observers(folder, config.logging_steps, list(config.report_to), screen=screen)
        everyone = [record, *own, *observers]

        def emit(event: Event) -> None:
            for observer in everyone:
                observer.observe(event)

        def finish(status: Status, **details: object) -> RunResult:
            result = record.result(status, **details)  # type: ignore[arg-type]
            if record.has_started or not (folder / "summary.json").exists():  # keep what an earlier start achieved
                write_json(folder / "summary.json", result.as_dict())
            emit(RunEnded(result.as_dict()))
            return result

        try:
            assembled = _assemble(loaded, resume, emit)
            earlier = completed_earlier(folder, assembled.state.step, assembled.job.total_steps)
            if earlier is not None:
                emit(Noted(f"complete since an earlier start: {assembled.state.step} steps"))
                emit(RunEnded(earlier.as_dict()))
                return earlier
            state, status = fit(assembled.job, assembled.state, stop)
            train_loss = state.loss_sum / state.step if state.step else None
            artifact = assembled.write_artifact() if status == "completed" else None
            return finish(status, train_loss=train_loss, artifact=artifact)
        except KeyboardInterrupt:
            finish("interrupted", error="stopped before the first step, or by a second signal")
            raise
        except StoppedOnFinding as error:
            emit(FindingMade(error.finding))
            finish("failed", error=str(error))
            raise
        except Exception as error:
            finish(
                "failed", error=str(error) if isinstance(error, SurefootError) else f"{type(error).__name__}: {error}"
            )
            raise


@dataclass(frozen=True)
class _Assembled:
    """A run ready for its first step."""

    job: Job
    state: TrainState
    write_artifact: Callable[[], Path]


def _assemble(loaded: LoadedConfig, resume: Resume, emit: Emit) -> _Assembled:
    """Data, model, optimizer, state, in this order: what is cheap and most often wrong comes first."""
    config, folder = loaded.run, loaded.run.run_folder
    for theirs, ours in loaded.renamed.items():
        emit(Noted(f"config: {theirs} is read as {ours}"))
    for finding in resume.findings:
        emit(FindingMade(finding))
    device = torch.device(config.device)
    if device.type == "cpu":
        keep_freed_memory()

    base = resolve_model(config.model, loaded.where("model"))
    tokenizer = load_tokenizer(base, config.chat_template)
    dataset = _load_data(loaded, "dataset", base, tokenizer, emit)
    held_out = _load_data(loaded, "eval_dataset", base, tokenizer, emit) if config.eval_dataset else None
    order = _order_of(dataset, config)

    lora = lora_settings(config)
    built = build_model(
        base,
        lora=lora,
        device=device,
        dtype=getattr(torch, config.dtype),
        gradient_checkpointing=config.gradient_checkpointing,
        compile_layers=config.compile,
    )
    if config.init_adapter and lora is not None:
        load_adapter(Path(config.init_adapter), built.model, lora)
    parameters = trainable_parameters(built.model)
    optimizer = build_optimizer(parameters, config)
    state = TrainState(data_fingerprint=dataset.fingerprint())
    if resume.checkpoint is not None:
        state = _resumed(loaded, resume.checkpoint, parameters, optimizer, state.data_fingerprint)
        emit(Noted(f"resuming after step {state.step} from {resume.checkpoint}"))

    forward_context = _autocast(device) if built.autocast else contextlib.nullcontext
    with forward_context():
        objective = SftObjective(built, config.router_aux_loss_coef)
    job = Job(
        config=config,
        run_folder=folder,
        total_steps=config.max_steps or order.steps_in(config.epochs),
        batches=_batches_of(order, dataset, config),
        eval_batches=_all_batches_of(held_out, config) if held_out else None,
        objective=objective,
        optimizer=optimizer,
        parameters=parameters,
        device=device,
        forward_context=forward_context,
        emit=emit,
        saved_config=config.model_dump(mode="json"),
    )
    if config.overwrite_output_dir:
        delete_run(folder)
    write_text(folder / "run.yaml", as_yaml(config))
    write_json(folder / "environment.json", environment(device))
    emit(_started(job, state, built.model, dataset))
    target = folder / ("adapter" if lora else "model")
    return _Assembled(job, state, lambda: write_artifact(target, built.model, tokenizer, lora, base, config.model))


def _load_data(
    loaded: LoadedConfig, setting: str, base: Path, tokenizer: PreTrainedTokenizerBase, emit: Emit
) -> Dataset:
    dataset = load_dataset(
        getattr(loaded.run, setting),
        tokenizer,
        max_length=loaded.run.max_length,
        truncation=loaded.run.truncation,
        vocab_size=_vocab_size(base),
        where=loaded.where(setting),
    )
    if dataset.skipped_places:
        shown = ", ".join(dataset.skipped_places[:3])
        emit(Noted(f"{setting}: {len(dataset.skipped_places)} of {dataset.counts.read} rows skipped: {shown}"))
    return dataset


def _order_of(dataset: Dataset, config: RunConfig) -> GlobalOrder:
    return GlobalOrder(
        dataset.lengths,
        sequences_per_step=config.sequences_per_step,
        seed=config.seed,
        shuffle=config.shuffle,
        pack_length=config.max_length if config.packing else None,
    )


def _resumed(
    loaded: LoadedConfig,
    path: Path,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    data_fingerprint: str,
) -> TrainState:
    state = load_checkpoint(path, parameters, optimizer)
    if state.data_fingerprint != data_fingerprint:
        raise CheckpointError(
            f"{path} was trained on other data: the rows of {loaded.run.dataset} or how they are rendered have changed "
            f"since. Restore them, or start a new run in another output_dir ({loaded.where('dataset')})."
        )
    return state


def _started(job: Job, state: TrainState, model: PreTrainedModel, dataset: Dataset) -> RunStarted:
    return RunStarted(
        run_folder=job.run_folder,
        config=job.saved_config,
        total_steps=job.total_steps,
        first_step=state.step + 1,
        trainable_parameters=sum(p.numel() for p in job.parameters.values()),
        all_parameters=sum(p.numel() for p in model.parameters()),
        rows=dataset.counts.as_dict(),
    )


def _batches_of(
    order: GlobalOrder, dataset: Dataset, config: RunConfig
) -> Callable[[int], tuple[float, list[MicroBatch]]]:
    def batches(step: int) -> tuple[float, list[MicroBatch]]:
        batch = order.step(step)
        return batch.epoch, list(micro_batches(batch.rows, dataset, config.per_device_train_batch_size))

    return batches


def _all_batches_of(dataset: Dataset, config: RunConfig) -> Callable[[], Iterator[MicroBatch]]:
    rows = [[index] for index in range(len(dataset.samples))]
    return lambda: micro_batches(rows, dataset, config.per_device_train_batch_size)


def _autocast(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


def _vocab_size(base: Path) -> int:
    return int(load_config(base).get_text_config().vocab_size)
