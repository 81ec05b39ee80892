"""Composition root: from a config to a finished run. It reads as a list of the parts of a run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from surefoot.config import LoadedConfig, MayDiffer, RunConfig, as_yaml, changed_fields
from surefoot.config.resolve import device_type, resolve
from surefoot.data.build_dataset import check_sources
from surefoot.data.collate import MicroBatch
from surefoot.data.render import answer_ends
from surefoot.data.sampler import StepBatch
from surefoot.distributed.artifact import write_artifact
from surefoot.distributed.parallel_dims import Layout
from surefoot.distributed.process_group import World, gpu_of, init_distributed
from surefoot.errors import CheckpointError, ConfigError, ModelError, StoppedOnFinding, StorageError, SurefootError
from surefoot.events import Event, FindingMade, Notice, Observer, RunEnded, RunStarted
from surefoot.methods.base import Method, MethodContext, TrainContext
from surefoot.methods.registry import method_of
from surefoot.methods.training_data import RunData, open_data
from surefoot.models.build import load_tokenizer
from surefoot.models.generate import end_tokens
from surefoot.models.lora import experts_left_out, lora_settings
from surefoot.models.resolve_model import fingerprint, resolve_model
from surefoot.system.atomic_io import write_json, write_text
from surefoot.system.machine_snapshot import collect
from surefoot.system.process import launcher_number
from surefoot.system.rank_consistency import facts_of, ranks_differ
from surefoot.training.async_checkpoint import Saver
from surefoot.training.checkpoint import TrainState, load_checkpoint, read_state
from surefoot.training.expert_load import ExpertUse, trains_routers
from surefoot.training.expert_parallel import check_experts, choose_expert_parallel, describe_choice
from surefoot.training.loop import LoopContext, StopSignal, fit
from surefoot.training.metrics import build_observers
from surefoot.training.out_of_memory import DeviceNow, MemoryWatch, is_out_of_memory
from surefoot.training.phases import Phases
from surefoot.training.run_dir import Resume, check_shared, claim, delete_run, set_aside_after
from surefoot.training.run_metadata import environment
from surefoot.training.run_summary import FindingLog, RunRecord, RunResult, Status, completed_earlier, read_result
from surefoot.training.train_setup import build_learner, check_trained_routers, sharding_of

Emit = Callable[[Event], None]
ALL_LOGITS = (
    "this model scales or caps its logits itself, so those of all trained tokens of a micro-batch are held at once; "
    "a smaller per_device_train_batch_size holds fewer"
)
UNNAMED_ENDS = (
    "the chat template ends answers with {}, which generation_config.json of the model does not name: models that are "
    "written here will; whoever serves the adapter alone gives it as a stop token"
)
OTHER_REWARDS = "{}: changed since step {}; rewards from here on are of other functions"
EXPERTS_LEFT_OUT = "target_modules: {} mean linear layers, and the experts of this model are none: add `experts`"


def train(loaded: LoadedConfig, observers: Sequence[Observer] = (), *, screen: bool = True) -> RunResult:
    """Run the fine-tuning that a config describes, and return its result.

    The launcher's environment determines whether this process is all of the run or one rank. `observers` receive the
    events of this rank; losses, checkpoints and findings are the same on all.
    Raises: InputError (nothing was changed), StoppedOnFinding, StorageError; summary.json then has status `failed`.
    """

    def emit(event: Event) -> None:
        for observer in observers:
            observer.observe(event)

    with ExitStack() as held:
        with Phases(emit, launcher_number("RANK"))("launch"):
            ranks = held.enter_context(init_distributed(device_type(loaded), alone_too=loaded.run.offload is not None))
        return _train(resolve(loaded, ranks.size), observers, ranks, screen=screen)


def _train(loaded: LoadedConfig, observers: Sequence[Observer], ranks: World, *, screen: bool) -> RunResult:
    config, folder = loaded.run, loaded.run.run_folder
    _agree_on_config(loaded, ranks)
    with StopSignal().watching() as stop, _claim_on_rank0(loaded, ranks) as resume:
        record = RunRecord(folder, FindingLog.of(config))
        everyone = list(observers)
        if ranks.is_first:
            own = build_observers(folder, config.logging_steps, list(config.report_to), screen=screen)
            everyone = [record, *own, *observers]
        memory = MemoryWatch(ranks.rank)
        everyone.append(memory)

        def emit(event: Event) -> None:
            for observer in everyone:
                observer.observe(event)

        def finish(status: Status, **details: object) -> RunResult:
            result = record.result(status, **details)  # type: ignore[arg-type]
            before = None if record.has_started else read_result(folder)
            if before is not None and before.status == "failed":  # the result of an earlier start stays
                result = replace(before, error=result.error, findings=[*before.findings, *result.findings])
            if ranks.is_first and (before is None or before.status == "failed"):
                result.write()
            emit(RunEnded(result.as_dict()))
            return result

        def fail(status: Status, error: str) -> None:
            """Record how the run ended; if a full disk refuses that, the original error is still raised."""
            try:
                finish(status, error=error)
            except StorageError as refused:
                emit(Notice(str(refused)))

        def share_result(result: RunResult) -> RunResult:
            """Return rank 0's result on all ranks: the other ranks read the file that it wrote."""
            ranks.barrier()
            return result if ranks.is_first else read_result(folder) or result

        undo = ExitStack()
        try:
            opened = _open(loaded, resume, emit, ranks)
            done = opened.state.step, opened.state.epoch
            earlier = completed_earlier(folder, opened.state.step) if config.is_over(*done) else None
            if ranks.broadcast_from_rank0(lambda: earlier is not None):
                emit(Notice(f"complete since an earlier start: {opened.state.step} steps"))
                complete = earlier or record.result("completed")
                emit(RunEnded(complete.as_dict()))
                return share_result(complete)
            assembled = _assemble(loaded, opened, resume, emit, undo, ranks, lambda: stop.received is not None)
            state, status = fit(assembled.job, assembled.state, stop)
            assembled.data.end()
            train_loss = state.loss_sum / state.step if state.step else None
            with assembled.job.phases("export"):
                artifact = assembled.write_artifact() if status == "completed" else None
            return share_result(finish(status, train_loss=train_loss, artifact=artifact))
        except KeyboardInterrupt:
            fail("interrupted", "stopped before the first step, or by a second signal")
            raise
        except StoppedOnFinding as error:
            emit(FindingMade(error.finding))
            fail("failed", str(error))
            raise
        except Exception as error:
            if is_out_of_memory(error):
                finding = memory.finding(error, DeviceNow.read())
                emit(FindingMade(finding))
                fail("failed", finding.as_text())
                raise StoppedOnFinding(finding) from error
            fail("failed", str(error) if isinstance(error, SurefootError) else f"{type(error).__name__}: {error}")
            raise
        finally:
            undo.close()


def _agree_on_config(loaded: LoadedConfig, ranks: World) -> None:
    """Refuse, before anything is changed, machines with different configs, and sizes that do not divide.

    Collective. Raises: ConfigError on all ranks.
    """
    config = loaded.run
    requested = config.nproc_per_node * config.nnodes
    first = ranks.broadcast_from_rank0(lambda: config.model_dump(mode="json"))

    def check() -> None:
        differing = changed_fields(first, config, may_differ=MayDiffer.BETWEEN_RANKS)
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
class _AssembledRun:
    """A run ready for its first step."""

    job: LoopContext
    state: TrainState
    data: RunData
    write_artifact: Callable[[], Path]


@contextmanager
def _claim_on_rank0(loaded: LoadedConfig, ranks: World) -> Iterator[Resume]:
    """Claim the run folder on rank 0 for all ranks, and yield where to resume."""
    with ExitStack() as stack:
        local_resume = Resume(None, [])

        def claim_folder() -> dict[str, str | None]:
            nonlocal local_resume
            local_resume = stack.enter_context(claim(loaded))
            return {
                "checkpoint": str(local_resume.checkpoint) if local_resume.checkpoint is not None else None,
                "token": local_resume.token,
            }

        claimed = ranks.broadcast_from_rank0(claim_folder)
        ranks.run_or_raise_on_all(lambda: check_shared(loaded, claimed["token"]))
        checkpoint = claimed["checkpoint"]
        yield replace(local_resume, checkpoint=Path(checkpoint) if checkpoint is not None else None)


@dataclass(frozen=True)
class _OpenedRun:
    """State of a run before data are prepared and weights are read."""

    base: Path
    """Folder of the model."""
    tokenizer: PreTrainedTokenizerBase
    data: RunData
    state: TrainState


def _open(loaded: LoadedConfig, resume: Resume, emit: Emit, ranks: World) -> _OpenedRun:
    """Find model and data, and the step to resume from: cheap checks that fail most often come first."""
    config = loaded.run
    for alias, setting in loaded.renamed.items():
        emit(Notice(f"config: {alias} is read as {setting}"))
    for note in loaded.notes:
        emit(Notice(f"config: {note}"))
    for note in resume.notes:
        emit(Notice(note))
    for finding in resume.findings:
        emit(FindingMade(finding))

    phases = Phases(emit, ranks.rank)
    with phases("load"):
        ranks.local_rank0_first(lambda: check_sources(loaded))  # before a model is fetched
        base = ranks.local_rank0_first(lambda: resolve_model(config.model, loaded.where("model")))
        ranks.local_rank0_first(lambda: check_experts(loaded, base))
        ranks.local_rank0_first(lambda: method_of(config).check_model(loaded, base))
        ranks.local_rank0_first(lambda: check_trained_routers(loaded, ranks.size))
        tokenizer = ranks.run_or_raise_on_all(lambda: load_tokenizer(base, config.chat_template))
    saved_digests = ranks.run_or_raise_on_all(
        lambda: read_state(resume.checkpoint).data_seen if resume.checkpoint is not None else None
    )
    with phases("tokenize"):
        data = ranks.local_rank0_first(
            lambda: open_data(loaded, base, tokenizer, emit, ranks, shard_digests=saved_digests)
        )

    state = TrainState(
        data_fingerprint=data.train.fingerprint(), base_fingerprint=_agree_on_weights(loaded, base, ranks)
    )
    if resume.checkpoint is not None:
        path, begun = resume.checkpoint, state
        state = ranks.run_or_raise_on_all(lambda: _load_resumed_state(loaded, path, begun))
        if config.max_steps is not None and state.step > config.max_steps:
            raise ConfigError(
                f"max_steps={config.max_steps}, and the run in {config.run_folder} is at step {state.step} already. "
                "Raise it, choose another output_dir, or take a checkpoint with `surefoot export RUN FOLDER --step N` "
                f"({loaded.where('max_steps')})."
            )
    return _OpenedRun(base, tokenizer, data, state)


def _assemble(
    loaded: LoadedConfig,
    opened: _OpenedRun,
    resume: Resume,
    emit: Emit,
    undo: ExitStack,
    ranks: World,
    stop_requested: Callable[[], bool],
) -> _AssembledRun:
    """Assemble prepared data, model, optimizer and state.

    Resources that must be closed with the run, however it ends, are pushed on `undo`.
    """
    config, folder = loaded.run, loaded.run.run_folder
    base, data, state = opened.base, opened.data, opened.state
    device = gpu_of(ranks.rank, ranks.local_rank) if config.device == "cuda" else torch.device("cpu")
    phases = Phases(emit, ranks.rank)
    undo.callback(data.stop)
    context = MethodContext(loaded, base, opened.tokenizer, data, ranks, phases, emit, stop_requested)
    method = method_of(config)(context)
    undo.callback(method.end)
    method.start()
    with phases("tokenize"):
        ranks.local_rank0_first(lambda: data.prepare(state.position))
        ranks.local_rank0_first(lambda: method.check_data(state.position))
    code_files = _check_code_files(method, state, emit, ranks)
    method.connect()

    with phases("load"):
        config, measured, learner = _load_learner(config, opened, resume, phases, emit, ranks, device)
        method.load(config, learner)
    method.restore(state.pending)
    state = replace(state, pending=[])

    def batches(state: TrainState) -> tuple[StepBatch, list[MicroBatch]]:
        return method.batches(state.position, state.step, state.epoch)

    def as_saved(state: TrainState, wait_s: float) -> TrainState:
        pending = method.pending(state.position, state.step, wait_s)
        return replace(state, pending=pending, data_seen=dict(data.train.shard_digests), reward_files=code_files)

    job = LoopContext(
        config=config,
        run_folder=folder,
        total_steps=data.total_steps(),
        batches=batches,
        agrees_to_stop_before_batches=method.agrees_to_stop_before_batches,
        evaluate=method.evaluate if data.held_out is not None else None,
        before_evaluation=data.finish,
        as_saved=as_saved,
        learner=learner,
        phases=phases,
        emit=emit,
        check_step=method.check_step,
        saver=Saver(folder, config.model_dump(mode="json"), config.save_total_limit, ranks),
        expert_use=ExpertUse(
            ranks.rank,
            trains_routers=trains_routers(learner.model, learner.parameters),
            shared_out=int(config.expert_parallel_size),
        ),
    )
    undo.callback(job.saver.end)
    _describe_machines(config, resume, state.step, device, measured, emit, ranks)
    emit(_build_start_event(job, state))
    lora = lora_settings(config)
    target = folder / ("adapter" if lora else "model")
    return _AssembledRun(
        job,
        state,
        data,
        lambda: write_artifact(target, learner.model, opened.tokenizer, lora, base, config.model, ranks),
    )


def _check_code_files(method: Method, state: TrainState, emit: Emit, ranks: World) -> dict[str, str]:
    """Return the files of the user's code; report which have changed since a checkpoint. Collective."""
    now: dict[str, str] = ranks.broadcast_from_rank0(method.code_files)
    changed = [name for name, sha256 in state.reward_files.items() if now.get(name, sha256) != sha256]
    if changed:
        emit(Notice(OTHER_REWARDS.format(", ".join(changed), state.step)))
    return now


def _load_learner(
    config: RunConfig,
    opened: _OpenedRun,
    resume: Resume,
    phases: Phases,
    emit: Emit,
    ranks: World,
    device: torch.device,
) -> tuple[RunConfig, dict[int, float | None], TrainContext]:
    """Return the learner in its resumed state, with the config without `auto`, and the step times of each choice.

    Collective.
    """
    base, state = opened.base, opened.state
    config, measured = choose_expert_parallel(config, base, opened.data.batches, state.position, ranks, device)
    if measured:
        emit(Notice(describe_choice(config, measured)))
    learner = build_learner(config, base, ranks, device, sharding_of(config, ranks, device))
    learner = replace(learner, phase=phases)
    lora = lora_settings(config)
    if lora is not None and (left_out := experts_left_out(learner.model, lora.targets)):
        emit(Notice(EXPERTS_LEFT_OUT.format(", ".join(left_out))))
    tokenizer = opened.tokenizer
    if unnamed := answer_ends(tokenizer, config.template_variables) - end_tokens(learner.model, tokenizer):
        emit(Notice(UNNAMED_ENDS.format(", ".join(tokenizer.convert_ids_to_tokens(sorted(unnamed))))))
    if learner.objective.holds_all_logits:
        emit(Notice(ALL_LOGITS))
    if config.health and not config.compile:  # a hook would cut the graph of each layer in two
        phases.follow(getattr(learner.model.get_decoder(), "layers", ()))
    if resume.checkpoint is not None:
        path = resume.checkpoint
        ranks.run_or_raise_on_all(lambda: load_checkpoint(path, learner.parameters, learner.optimizer))
        emit(Notice(f"resuming after step {state.step} from {path}"))
    return config, measured, learner


def _describe_machines(
    config: RunConfig,
    resume: Resume,
    step: int,
    device: torch.device,
    measured: dict[int, float | None],
    emit: Emit,
    ranks: World,
) -> None:
    """Begin the run folder with its config and environment.json, and report where ranks differ. Collective."""
    about = {**environment(device), "ranks": ranks.size, "expert_parallel_size_s": measured}
    is_first_here = ranks.local_rank == 0
    machine = collect(config.run_folder if is_first_here else None, gpus=is_first_here).as_dict()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    facts = facts_of({**machine, "device": name})
    reports = ranks.gather({"host": machine["host"], "facts": facts, "machine": machine if is_first_here else None})
    machines = [report["machine"] for report in reports if report["machine"] is not None]
    about |= {"machine": machines[0], "other_machines": machines[1:]}
    left = ranks.broadcast_from_rank0(lambda: _begin_folder(config, about, resume.claimed_s, step))
    if left:
        emit(Notice(f"set aside in checkpoints/, since this run goes on from before: {', '.join(left)}"))
    differing = ranks_differ([report["facts"] for report in reports], [report["host"] for report in reports])
    if differing is not None:
        emit(FindingMade(differing))


def _begin_folder(config: RunConfig, about: dict[str, Any], claimed_s: float, step: int) -> list[str]:
    """Begin the run folder, and return the checkpoints of later steps, which are set aside."""
    if config.overwrite_output_dir:
        delete_run(config.run_folder, claimed_s)
    write_json(config.run_folder / "environment.json", about)  # first, since it marks the folder as a run's
    write_text(config.run_folder / "run.yaml", as_yaml(config))
    return set_aside_after(config.run_folder, step)


def _agree_on_weights(loaded: LoadedConfig, base: Path, ranks: World) -> str:
    """Return the fingerprint of the model's weights, the same on all machines. Collective. Raises: ModelError."""
    own = ranks.run_or_raise_on_all(lambda: fingerprint(base))
    first = ranks.broadcast_from_rank0(lambda: own)

    def check() -> None:
        if own != first:
            raise ModelError(
                f"model={loaded.run.model}: its weights on this machine ({base}) are not those that rank 0 reads. Give "
                f"all machines the same ({loaded.where('model')})."
            )

    ranks.run_or_raise_on_all(check)
    return own


def _load_resumed_state(loaded: LoadedConfig, path: Path, begun: TrainState) -> TrainState:
    """Return the state of a checkpoint; `begun`: the state of a run that would begin now."""
    state = read_state(path)
    is_beside = loaded.run.tuning == "lora" and state.base_fingerprint
    if is_beside and state.base_fingerprint != begun.base_fingerprint:
        raise CheckpointError(
            f"{path} was trained beside other weights: those of {loaded.run.model} have changed. Restore them, or "
            f"start a new run in another output_dir ({loaded.where('model')})."
        )
    if state.data_fingerprint != begun.data_fingerprint:
        files = ", ".join(item.path for item in loaded.run.dataset)
        raise CheckpointError(
            f"{path} was trained on other data: the rows of {files} or how they are rendered have changed "
            f"since. Restore them, or start a new run in another output_dir ({loaded.where('dataset')})."
        )
    return replace(state, base_fingerprint=begun.base_fingerprint)


def _build_start_event(job: LoopContext, state: TrainState) -> RunStarted:
    return RunStarted(
        run_folder=job.run_folder,
        config=job.config.model_dump(mode="json"),
        total_steps=job.total_steps,
        first_step=state.step + 1,
        trainable_parameters=sum(p.numel() for p in job.learner.parameters.values()),
        all_parameters=sum(p.numel() for p in job.learner.model.parameters()),
        evaluates_again=state.evaluation_is_due,
    )
