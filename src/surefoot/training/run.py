"""The composition root: from a config to a finished run. Reads as a list of what a run is made of."""

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

import surefoot
from surefoot.config import LoadedConfig, RunConfig, as_yaml
from surefoot.data.dataset import Dataset, load_dataset
from surefoot.data.loader import GlobalOrder, StepBatch, micro_batches
from surefoot.errors import CheckpointError, ConfigError, StoppedOnFinding, SurefootError
from surefoot.events import Event, Noted, Observer, RunEnded, RunStarted, StepEnded
from surefoot.findings import Finding
from surefoot.models.build import build_model, keep_freed_memory, load_tokenizer, trainable_parameters
from surefoot.models.sources import resolve_model
from surefoot.storage import write_json, write_text
from surefoot.training.artifacts import load_adapter, lora_settings, write_artifact
from surefoot.training.checkpoint import TrainState, load_checkpoint
from surefoot.training.folder import Resume, claim
from surefoot.training.loop import Job, StopSignal, fit, peak_memory_bytes
from surefoot.training.metrics import build_observers
from surefoot.training.optim import build_optimizer
from surefoot.training.sft import SftObjective


@dataclass(frozen=True)
class RunResult:
    """What a run did; the same as summary.json."""

    status: Literal["completed", "interrupted", "failed"]
    run_folder: Path
    steps: int
    train_loss: float | None
    """Mean of the steps' losses."""
    tokens_per_second: float | None
    """Over the steps of this process."""
    peak_memory_bytes: int
    examples: Mapping[str, int]
    artifact: Path | None
    """The adapter or model folder."""
    findings: list[Finding] = field(default_factory=list)
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As written to summary.json."""
        return {
            "status": self.status,
            "run_folder": str(self.run_folder),
            "steps": self.steps,
            "train_loss": self.train_loss,
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_bytes": self.peak_memory_bytes,
            "examples": dict(self.examples),
            "artifact": str(self.artifact) if self.artifact else None,
            "findings": [finding.as_dict() for finding in self.findings],
            "error": self.error,
        }


def train(loaded: LoadedConfig, observers: list[Observer] | None = None, *, screen: bool = True) -> RunResult:
    """Run the fine-tuning that a config describes; returns what it did.

    Raises: InputError (nothing was changed), StoppedOnFinding, StorageError; summary.json then says `failed`.
    """
    with StopSignal().watching() as stop, claim(loaded) as resume:
        run = _Run(loaded, observers or [], screen)
        try:
            return run.go(resume, stop)
        except KeyboardInterrupt:
            run.finish("interrupted", error="stopped before the first step or by a second signal")
            raise
        except StoppedOnFinding as error:
            run.add_findings([error.finding])
            run.finish("failed", error=str(error))
            raise
        except SurefootError as error:
            run.finish("failed", error=str(error))
            raise
        except Exception as error:
            run.finish("failed", error=f"{type(error).__name__}: {error}")
            raise


class _Run:
    """One run in its folder: its observers, its findings, and how it ends."""

    def __init__(self, loaded: LoadedConfig, observers: list[Observer], screen: bool) -> None:
        self._loaded = loaded
        self._config = loaded.run
        self._folder = loaded.run.run_folder
        own = build_observers(self._folder, self._config.logging_steps, list(self._config.report_to), screen=screen)
        self._observers = [*own, *observers]
        self._findings: list[Finding] = []
        self._device = torch.device("cpu")
        self._state = TrainState()
        self._speed_tokens = 0
        self._speed_time_s = 0.0
        self._examples: Mapping[str, int] = {"read": 0, "trained": 0, "truncated": 0, "skipped": 0}

    def emit(self, event: Event) -> None:
        if isinstance(event, StepEnded):
            self._speed_tokens += round(event.tokens_per_second * event.step_time_s)
            self._speed_time_s += event.step_time_s
        for observer in self._observers:
            observer.observe(event)

    def go(self, resume: Resume, stop: StopSignal) -> RunResult:
        """Assemble and train."""
        config, loaded = self._config, self._loaded
        for theirs, ours in loaded.renamed.items():
            self.emit(Noted(f"config: {theirs} is read as {ours}"))
        self.add_findings(resume.findings)
        self._device = _choose_device(loaded)
        if self._device.type == "cpu":
            keep_freed_memory()

        base = resolve_model(config.model, loaded.where("model"))
        tokenizer = load_tokenizer(base, config.chat_template)
        vocab_size = _vocab_size(base)
        dataset = self._load_data(config.dataset, tokenizer, vocab_size, "dataset")
        held_out = (
            self._load_data(config.eval_dataset, tokenizer, vocab_size, "eval_dataset") if config.eval_dataset else None
        )
        self._examples = dataset.counts.as_dict()
        order = GlobalOrder(
            dataset.lengths,
            sequences_per_step=config.sequences_per_step,
            seed=config.seed,
            shuffle=config.shuffle,
            pack_length=config.max_length if config.packing else None,
        )
        total_steps = config.max_steps or order.steps_in(config.num_train_epochs)

        lora = lora_settings(config)
        built = build_model(
            base,
            lora=lora,
            device=self._device,
            dtype=_choose_dtype(config, self._device),
            gradient_checkpointing=config.gradient_checkpointing,
            compile_layers=config.compile,
            trust_remote_code=config.trust_remote_code,
        )
        parameters = trainable_parameters(built.model)
        if config.init_adapter and lora is not None:
            load_adapter(Path(config.init_adapter), built.model, lora)
        optimizer = build_optimizer(parameters, config)
        self._state = TrainState(data_fingerprint=dataset.fingerprint())
        if resume.checkpoint is not None:
            self._resume(resume.checkpoint, parameters, optimizer, dataset)

        forward_context = _autocast(self._device) if built.autocast else contextlib.nullcontext
        with forward_context():
            objective = SftObjective(built, config.router_aux_loss_coef)
        job = Job(
            config=config,
            run_folder=self._folder,
            total_steps=total_steps,
            batches=_batches_of(order, dataset, config),
            eval_batches=_eval_batches_of(held_out, config) if held_out else None,
            objective=objective,
            optimizer=optimizer,
            parameters=parameters,
            device=self._device,
            forward_context=forward_context,
            emit=self._keep_state(self.emit),
            saved_config=config.model_dump(mode="json"),
        )
        write_text(self._folder / "run.yaml", as_yaml(config))
        write_json(self._folder / "environment.json", environment(self._device))
        self.emit(
            RunStarted(
                run_folder=self._folder,
                config=job.saved_config,
                total_steps=total_steps,
                first_step=self._state.step + 1,
                trainable_parameters=sum(p.numel() for p in parameters.values()),
                all_parameters=sum(p.numel() for p in built.model.parameters()),
                rows=self._examples,
            )
        )
        self._state, status = fit(job, self._state, stop)
        if status == "interrupted":
            return self.finish(status)
        target = self._folder / ("adapter" if lora else "model")
        return self.finish(status, artifact=write_artifact(target, built.model, tokenizer, lora, base))

    def _load_data(self, paths: str | list[str], tokenizer: Any, vocab_size: int, setting: str) -> Dataset:
        dataset = load_dataset(
            paths,
            tokenizer,
            max_length=self._config.max_length,
            truncation=self._config.truncation,
            vocab_size=vocab_size,
            where=self._loaded.where(setting),
        )
        if dataset.skipped_places:
            shown = ", ".join(dataset.skipped_places[:3])
            self.emit(Noted(f"{setting}: {len(dataset.skipped_places)} of {dataset.counts.read} rows skipped: {shown}"))
        return dataset

    def _resume(self, path: Path, parameters: Any, optimizer: torch.optim.Optimizer, dataset: Dataset) -> None:
        state = load_checkpoint(path, parameters, optimizer)
        if state.data_fingerprint != dataset.fingerprint():
            raise CheckpointError(
                f"{path} was trained on other data: the rows of {self._config.dataset} or how they are rendered have "
                f"changed since. Restore them, or start a new run in another output_dir "
                f"({self._loaded.where('dataset')})."
            )
        self._state = state
        self.emit(Noted(f"resuming after step {state.step} from {path}"))

    def _keep_state(self, emit: Callable[[Event], None]) -> Callable[[Event], None]:
        """Pass events on and remember how far the run came, for the summary of a run that fails."""

        def keep(event: Event) -> None:
            if isinstance(event, StepEnded):
                self._state = replace(
                    self._state,
                    step=event.step,
                    tokens=event.tokens,
                    trained_tokens=event.trained_tokens,
                    loss_sum=self._state.loss_sum + event.loss,
                )
            emit(event)

        return keep

    def add_findings(self, findings: list[Finding]) -> None:
        """Write findings down and show them."""
        for finding in findings:
            self._findings.append(finding)
            with open(self._folder / "findings.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(finding.as_dict()) + "\n")
            self.emit(Noted(finding.as_text()))

    def finish(
        self,
        status: Literal["completed", "interrupted", "failed"],
        *,
        artifact: Path | None = None,
        error: str | None = None,
    ) -> RunResult:
        """Write the summary and close the observers."""
        result = RunResult(
            status=status,
            run_folder=self._folder,
            steps=self._state.step,
            train_loss=self._state.loss_sum / self._state.step if self._state.step else None,
            tokens_per_second=self._speed_tokens / self._speed_time_s if self._speed_time_s else None,
            peak_memory_bytes=peak_memory_bytes(self._device),
            examples=self._examples,
            artifact=artifact,
            findings=self._findings,
            error=error,
        )
        write_json(self._folder / "summary.json", result.as_dict())
        self.emit(RunEnded(result.as_dict()))
        return result


def _batches_of(order: GlobalOrder, dataset: Dataset, config: RunConfig) -> Callable[[int], tuple[float, list[Any]]]:
    def batches(step: int) -> tuple[float, list[Any]]:
        batch = order.step(step)
        return batch.epoch, micro_batches(batch, dataset, config.per_device_train_batch_size)

    return batches


def _eval_batches_of(dataset: Dataset, config: RunConfig) -> Callable[[], list[Any]]:
    rows = StepBatch(0.0, [[index] for index in range(len(dataset.samples))])
    return lambda: micro_batches(rows, dataset, config.per_device_train_batch_size)


def _choose_device(loaded: LoadedConfig) -> torch.device:
    wanted = loaded.run.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device=cuda, but torch {torch.__version__} sees no CUDA device ({loaded.where('device')}).")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _choose_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def _autocast(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


def _vocab_size(base: Path) -> int:
    config = json.loads((base / "config.json").read_text("utf-8"))
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])


def environment(device: torch.device) -> dict[str, Any]:
    """What the run ran on and with."""
    return {
        "surefoot": surefoot.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
