"""Composition root: from a config to a finished run. It reads as a list of the parts of a run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from surefoot.config import LoadedConfig, MayDiffer, RunConfig, as_yaml, changed_fields
from surefoot.config.resolve import device_type, resolve
from surefoot.data.build_dataset import check_sources
from surefoot.data.image_workers import count_workers
from surefoot.distributed.artifact import write_trained_adapter, write_trained_model
from surefoot.distributed.parallel_dims import Layout
from surefoot.distributed.process_group import World, gpu_of, init_distributed
from surefoot.errors import ConfigError, ModelError
from surefoot.events import Emit, Event, FindingMade, Notice, Observer, RunEnded, RunStarted
from surefoot.methods.base import Method, MethodContext, TrainContext
from surefoot.methods.registry import method_of
from surefoot.methods.training_data import RunData, open_data
from surefoot.models.adapter import base_name
from surefoot.models.build import load_tokenizer
from surefoot.models.decoder_layers import decoder_layers
from surefoot.models.lora import format_of_frozen, lora_settings
from surefoot.models.pretrained import is_image_text_model
from surefoot.models.quantization.base import FLOAT, count_weights
from surefoot.models.resolve_model import fingerprint, resolve_model
from surefoot.models.vision import tower_dtype
from surefoot.system.atomic_io import write_json, write_text
from surefoot.system.process import StopSignal, launcher_number
from surefoot.training.async_checkpoint import Saver
from surefoot.training.auto_settings import choose_auto
from surefoot.training.checkpoint import TrainState, check_resumable, load_checkpoint, read_state
from surefoot.training.expert_load import ExpertLoadCounter, trains_routers
from surefoot.training.expert_parallel import check_experts, choose_expert_parallel, describe_choice
from surefoot.training.failures import reading_causes, recording_failure
from surefoot.training.hub_upload import check_upload, upload_artifact
from surefoot.training.loop import LoopContext, fit
from surefoot.training.metrics import build_observers
from surefoot.training.model_card import make_card
from surefoot.training.model_notices import describe_model
from surefoot.training.out_of_memory import MemoryWatch
from surefoot.training.phases import Phases
from surefoot.training.run_dir import ENVIRONMENT, Resume, claim_on_rank0, delete_run, set_aside_after
from surefoot.training.run_metadata import describe_machines, environment
from surefoot.training.run_summary import FindingLog, RunRecord, RunResult, Status, completed_earlier, read_result
from surefoot.training.train_setup import (
    build_train_context,
    check_images,
    check_packages,
    check_router_biases,
    check_targets,
    sharding_of,
)

OTHER_FILES = "{}: changed since step {}; from here on the run uses what is there now"


@dataclass(frozen=True)
class _Run:
    """The parts of a run that exist from its start to its end, on this rank."""

    loaded: LoadedConfig
    resume: Resume
    ranks: World
    emit: Emit
    phases: Phases


def train(loaded: LoadedConfig, observers: Sequence[Observer] = (), *, screen: bool = True) -> RunResult:
    """Run the fine-tuning that a config describes, and return its result.

    The launcher's environment determines whether this process is all of the run or one rank. `observers` receive the
    events of this rank; losses, checkpoints and findings are the same on all.
    Raises: InputError (nothing was changed), StoppedOnFinding, StorageError; summary.json then has status `failed`.
    """
    with ExitStack() as process_group:
        with Phases(_emit_to(observers), launcher_number("RANK"))("launch"), reading_causes():
            ranks = process_group.enter_context(
                init_distributed(device_type(loaded), alone_too=loaded.run.offload is not None)
            )
        result = _train(resolve(loaded, ranks.size), observers, ranks, screen=screen)
    if ranks.is_first and loaded.run.push_to_hub is not None:
        # The others leave: an upload may take longer than they wait for each other.
        with Phases(_emit_to(observers), ranks.rank)("export"):
            upload_artifact(result, loaded.run.push_to_hub, loaded.where("push_to_hub"))
    return result


def _emit_to(observers: Sequence[Observer]) -> Emit:
    """Return a function that gives an event to each observer."""

    def emit(event: Event) -> None:
        for observer in observers:
            observer.observe(event)

    return emit


def _train(loaded: LoadedConfig, observers: Sequence[Observer], ranks: World, *, screen: bool) -> RunResult:
    config, folder = loaded.run, loaded.run.run_folder
    _agree_on_config(loaded, ranks)
    with StopSignal().watching() as stop, claim_on_rank0(loaded, ranks) as resume, ExitStack() as cleanup:
        record, memory = RunRecord(folder, FindingLog.of(config)), MemoryWatch(ranks.rank)
        first: list[Observer] = []
        if ranks.is_first:
            first = [record, *build_observers(config, screen=screen)]
        emit = _emit_to([*first, *observers, memory])
        run = _Run(loaded, resume, ranks, emit, Phases(emit, ranks.rank))
        with recording_failure(partial(_finish, run, record), emit, memory):
            base = _check_model(run)
            run = replace(run, loaded=_choose_auto(run, base))
            opened = _open(run, base)
            state = opened.state
            earlier = completed_earlier(folder, state.step) if config.is_over(state.step, state.epoch) else None
            if ranks.broadcast_from_rank0(lambda: earlier is not None):
                steps = f"{state.step} step{'s' * (state.step != 1)}"
                emit(Notice(f"complete since an earlier start: {steps}"))
                complete = earlier or record.result("completed")
                emit(RunEnded(complete.as_dict()))
                return _share_result(run, complete)
            assembled = _assemble(run, opened, cleanup, lambda: stop.received is not None)
            state, status = fit(assembled.loop, assembled.state, stop)
            opened.data.end()
            train_loss = state.loss_sum / state.step if state.step else None
            with run.phases("export"):
                summary = record.result(status, train_loss=train_loss).as_dict()
                card = _make_card(assembled.loop, summary) if ranks.is_first else None
                artifact = assembled.write_artifact(card) if status == "completed" else None
            return _share_result(run, _finish(run, record, status, train_loss=train_loss, artifact=artifact))


def _make_card(loop: LoopContext, summary: Mapping[str, Any]) -> str:
    has_images = is_image_text_model(loop.train_context.model.config)
    return make_card(loop.config.model_dump(mode="json"), summary, has_images=has_images)


def _finish(run: _Run, record: RunRecord, status: Status, **details: Any) -> RunResult:
    """Write how the run ended, and emit it."""
    result = record.finish(record.result(status, **details), is_writer=run.ranks.is_first)
    run.emit(RunEnded(result.as_dict()))
    return result


def _share_result(run: _Run, result: RunResult) -> RunResult:
    """Return rank 0's result on all ranks: the other ranks read the file that it wrote. Collective."""
    run.ranks.barrier()
    return result if run.ranks.is_first else read_result(run.loaded.run.run_folder) or result


def _agree_on_config(loaded: LoadedConfig, ranks: World) -> None:
    """Refuse, before anything is changed, machines with different configs, and sizes that do not divide.

    Collective. Raises: ConfigError on all ranks.
    """
    config = loaded.run
    requested = config.nproc_per_node * config.nnodes
    first = ranks.broadcast_from_rank0(lambda: config.model_dump(mode="json"))

    def check() -> None:
        differing = changed_fields(first, config, allowed=MayDiffer.BETWEEN_RANKS)
        if differing:
            raise ConfigError(
                f"the config of this rank is not that of rank 0: {'; '.join(differing)}. One run has one config: give "
                "all machines the same file and the same overrides."
            )
        if requested not in (1, ranks.size):
            raise ConfigError(
                f"nproc_per_node={config.nproc_per_node} x nnodes={config.nnodes} asks for {requested} ranks, but the "
                f"launcher (WORLD_SIZE) started {ranks.size}. Make them agree, or leave them out "
                f"({loaded.where('nproc_per_node')})."
            )
        Layout.of(config, ranks.size, loaded.where)

    ranks.run_or_raise_on_all(check)


@dataclass(frozen=True)
class _OpenedRun:
    """State of a run before data are prepared and weights are read."""

    base: Path
    """Folder of the model."""
    tokenizer: PreTrainedTokenizerBase
    data: RunData
    state: TrainState


@dataclass(frozen=True)
class _AssembledRun:
    """A run ready for its first step."""

    loop: LoopContext
    state: TrainState
    write_artifact: Callable[[str | None], Path]


def _check_model(run: _Run) -> Path:
    """Return the folder of the model, checked against the config. Cheap checks that fail most often come first."""
    loaded, ranks = run.loaded, run.ranks
    renamed = (f"config: {alias} is read as {setting}" for alias, setting in loaded.renamed.items())
    for text in (*renamed, *(f"config: {note}" for note in loaded.notes), *run.resume.notes):
        run.emit(Notice(text))
    for finding in run.resume.findings:
        run.emit(FindingMade(finding))

    with run.phases("load"):
        ranks.local_rank0_first(lambda: check_sources(loaded))  # before a model is fetched
        ranks.local_rank0_first(lambda: check_upload(loaded))
        ranks.local_rank0_first(lambda: check_packages(loaded))
        base = ranks.local_rank0_first(lambda: resolve_model(loaded.run.model, loaded.where("model")))
        ranks.local_rank0_first(lambda: check_experts(loaded, base))
        ranks.local_rank0_first(lambda: method_of(loaded.run).check_model(loaded, base))
        ranks.local_rank0_first(lambda: check_router_biases(loaded, base))
        ranks.local_rank0_first(lambda: check_targets(loaded, base))
    return base


def _choose_auto(run: _Run, base: Path) -> LoadedConfig:
    """Return the config without `auto` in what depends on the model, and report what was chosen. Collective."""
    with run.phases("load"):
        chosen, lines = choose_auto(run.loaded, base, run.resume.checkpoint, run.ranks)
    for line in lines:
        run.emit(Notice(line))
    return chosen


def _open(run: _Run, base: Path) -> _OpenedRun:
    """Open the data, and find the step to resume from."""
    loaded, config, ranks, checkpoint = run.loaded, run.loaded.run, run.ranks, run.resume.checkpoint
    with run.phases("load"):
        tokenizer = ranks.run_or_raise_on_all(lambda: load_tokenizer(base, config.chat_template))
    saved = ranks.run_or_raise_on_all(lambda: read_state(checkpoint) if checkpoint is not None else None)
    digests = saved.data_seen if saved is not None else None
    with run.phases("tokenize"):
        data = ranks.local_rank0_first(
            lambda: open_data(loaded, base, tokenizer, run.emit, ranks, shard_digests=digests)
        )
    base_fingerprint = _agree_on_weights(loaded, base, ranks)
    state = TrainState(data_fingerprint=data.train.fingerprint(), base_fingerprint=base_fingerprint)
    if saved is not None and checkpoint is not None:
        ranks.run_or_raise_on_all(lambda: check_resumable(loaded, checkpoint, saved, state))
        state = replace(saved, base_fingerprint=base_fingerprint)
    return _OpenedRun(base, tokenizer, data, state)


def _assemble(run: _Run, opened: _OpenedRun, cleanup: ExitStack, stop_requested: Callable[[], bool]) -> _AssembledRun:
    """Assemble prepared data, model, optimizer and state.

    Resources that must be closed with the run, however it ends, are pushed on `cleanup`.
    """
    loaded, ranks, phases = run.loaded, run.ranks, run.phases
    base, data, state = opened.base, opened.data, opened.state
    device = gpu_of(ranks.rank, ranks.local_rank) if loaded.run.device == "cuda" else torch.device("cpu")
    cleanup.callback(data.stop)
    weights = state.base_fingerprint
    context = MethodContext(loaded, base, opened.tokenizer, data, weights, ranks, phases, run.emit, stop_requested)
    method = method_of(loaded.run)(context)
    cleanup.callback(method.end)
    method.start()
    with phases("tokenize"):
        ranks.local_rank0_first(lambda: data.prepare(state.position))
        ranks.local_rank0_first(lambda: method.check_data(state.position))
    code_files = _check_code_files(run, method, state)
    method.connect()

    with phases("load"):
        config, step_times_s, train_context = _load_train_context(run, opened, method, device)
        method.load(config, train_context)
    method.restore(state.pending)
    state = replace(state, pending=[])
    loop = _build_loop_context(run, config, train_context, data, method, code_files)
    cleanup.callback(loop.saver.end)
    _begin_run_folder(run, config, state.step, device, step_times_s)
    run.emit(_build_start_event(loop, state))

    def write(card: str | None) -> Path:
        lora, model, tokenizer = lora_settings(config), train_context.model, opened.tokenizer
        if lora is None:
            return write_trained_model(config.run_folder / "model", model, tokenizer, base, ranks, card=card)
        name = base_name(config.model, base)
        return write_trained_adapter(config.run_folder / "adapter", model, tokenizer, lora, name, ranks, card)

    return _AssembledRun(loop, state, write)


def _build_loop_context(
    run: _Run, config: RunConfig, train_context: TrainContext, data: RunData, method: Method, code_files: dict[str, str]
) -> LoopContext:
    """Return what the loop works with. `code_files`: SHA-256 of the files of the user's code."""

    return LoopContext(
        config=config,
        method=method,
        data=data,
        total_steps=data.total_steps(),
        train_context=train_context,
        phases=run.phases,
        emit=run.emit,
        saver=Saver(config.run_folder, config.model_dump(mode="json"), config.save_total_limit, run.ranks),
        expert_load_counter=ExpertLoadCounter(
            run.ranks.rank,
            trains_routers=trains_routers(train_context.model, train_context.parameters),
            expert_parallel_size=int(config.expert_parallel_size),
        ),
        code_files=code_files,
    )


def _check_code_files(run: _Run, method: Method, state: TrainState) -> dict[str, str]:
    """Return the files of the user's code and the models beside; report which have changed. Collective."""
    now: dict[str, str] = run.ranks.broadcast_from_rank0(method.code_files)
    changed = [name for name, sha256 in state.reward_files.items() if now.get(name, sha256) != sha256]
    if changed:
        run.emit(Notice(OTHER_FILES.format(", ".join(changed), state.step)))
    return now


def _load_train_context(
    run: _Run, opened: _OpenedRun, method: Method, device: torch.device
) -> tuple[RunConfig, dict[int, float | None], TrainContext]:
    """Return the config without `auto`, the seconds of a step with each choice, and the model with its optimizer.

    They are resumed. Collective.
    """
    base, tokenizer, ranks, checkpoint = opened.base, opened.tokenizer, run.ranks, run.resume.checkpoint
    config, step_times_s = choose_expert_parallel(
        run.loaded.run, base, opened.data.batches, opened.state.position, ranks, device
    )
    if step_times_s:
        run.emit(Notice(describe_choice(config, step_times_s)))
    train_context = build_train_context(config, base, ranks, device, sharding_of(config, ranks, device))
    reader = opened.data.reader
    if reader is not None:
        check_images(train_context, reader, run.loaded.where("model"))
        num_workers = count_workers(config.dataloader_num_workers, device, ranks.count_ranks_on_own_cores())
        reader.use_workers(base, tower_dtype(train_context.model), num_workers)
    train_context = replace(train_context, phase=run.phases)
    for text in describe_model(train_context, config, base, tokenizer):
        run.emit(Notice(text))
    if config.health and not config.compile:  # a hook would cut the graph of each layer in two
        run.phases.follow(decoder_layers(train_context.model))
    method.use_start(config, train_context)
    if checkpoint is not None:
        ranks.run_or_raise_on_all(
            lambda: load_checkpoint(checkpoint, train_context.parameters, train_context.optimizer, train_context.biases)
        )
        run.emit(Notice(f"resuming after step {opened.state.step} from {checkpoint}"))
    return config, step_times_s, train_context


def _begin_run_folder(
    run: _Run, config: RunConfig, step: int, device: torch.device, step_times_s: dict[int, float | None]
) -> None:
    """Write the config and environment.json, and report where ranks differ. Collective."""
    about = {**environment(device), "ranks": run.ranks.size, "expert_parallel_size_s": step_times_s}
    machines, differing = describe_machines(config.run_folder, device, run.ranks)

    def begin() -> list[str]:
        if config.overwrite_output_dir:
            delete_run(config.run_folder, run.resume.claimed_s)
        # First, because it marks the folder as that of a run.
        write_json(config.run_folder / ENVIRONMENT, {**about, **machines})
        write_text(config.run_folder / "run.yaml", as_yaml(config))
        return set_aside_after(config.run_folder, step)

    left = run.ranks.broadcast_from_rank0(begin)
    if left:
        run.emit(Notice(f"set aside in checkpoints/, because this run resumes from an earlier step: {', '.join(left)}"))
    if differing is not None:
        run.emit(FindingMade(differing))


def _agree_on_weights(loaded: LoadedConfig, base: Path, ranks: World) -> str:
    """Return the fingerprint of the model's weights as they are held, the same on all machines.

    That of the files, and with quantised weights that of how they are stored. Collective. Raises: ModelError.
    """
    stored_as = format_of_frozen(loaded.run)

    def compute() -> str:
        return fingerprint(base) if stored_as is FLOAT else f"{fingerprint(base)} {stored_as.fingerprint}"

    own = ranks.run_or_raise_on_all(compute)
    first = ranks.broadcast_from_rank0(lambda: own)

    def check() -> None:
        if own != first and own.split()[0] == first.split()[0]:
            raise ModelError(
                f"quantization={loaded.run.quantization}: this machine stores the same weights as other bytes than "
                f"that of rank 0. Install one version of bitsandbytes on all machines ({loaded.where('quantization')})."
            )
        if own != first:
            raise ModelError(
                f"model={loaded.run.model}: its weights on this machine ({base}) are not those that rank 0 reads. Give "
                f"all machines the same ({loaded.where('model')})."
            )

    ranks.run_or_raise_on_all(check)
    return own


def _build_start_event(loop: LoopContext, state: TrainState) -> RunStarted:
    return RunStarted(
        run_folder=loop.config.run_folder,
        config=loop.config.model_dump(mode="json"),
        total_steps=loop.total_steps,
        first_step=state.step + 1,
        trainable_parameters=sum(p.numel() for p in loop.train_context.parameters.values()),
        all_parameters=sum(count_weights(loop.train_context.model).values()),
        evaluates_again=state.evaluation_is_due,
    )
