"""Values of `auto` in settings that depend on the model: memory by the planner, the learning rate by recipes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from surefoot.config import LoadedConfig
from surefoot.config.schema import AUTO
from surefoot.distributed.process_group import World
from surefoot.errors import ModelError
from surefoot.models.model_size import weights_of
from surefoot.planner.choose import choose_on_this_machine
from surefoot.training.learning_rate import choose_learning_rate
from surefoot.training.manifest import read_manifest

CHOSEN = ("gradient_checkpointing", "per_device_train_batch_size", "learning_rate")
"""Settings whose `auto` depends on the model."""


def choose_auto(
    loaded: LoadedConfig, base: Path, checkpoint: Path | None, ranks: World
) -> tuple[LoadedConfig, list[str]]:
    """Return the config without `auto` in settings that depend on the model, and lines on what was chosen.

    `base`: folder of the model; `checkpoint`: what the run resumes from, whose choices it keeps. Collective: rank 0
    chooses, by the memory of its device. Raises: ModelError on all ranks.
    """
    run = loaded.run
    ranks_here = ranks.count_local_ranks()

    def choose() -> dict[str, Any]:
        saved = read_manifest(checkpoint)["config"] if checkpoint is not None else {}
        auto_names = [name for name in CHOSEN if getattr(run, name) == AUTO]
        saved_choices = {name: saved[name] for name in auto_names if saved.get(name, AUTO) != AUTO}
        # Under torchrun the config need not say how many ranks there are.
        layout = {"nproc_per_node": ranks_here, "nnodes": -(-ranks.size // ranks_here)}
        planned, line = choose_on_this_machine(run.model_copy(update={**layout, **saved_choices}), base)
        values = {name: getattr(planned, name) for name in CHOSEN}
        lines = [line] if line is not None else []
        if values["learning_rate"] == AUTO:
            values["learning_rate"] = rate = _choose_rate(loaded, base)
            lines.append(f"auto: learning_rate: {rate:g}")
        return {"values": values, "lines": lines}

    chosen = ranks.broadcast_from_rank0(choose)
    return replace(loaded, run=run.model_copy(update=chosen["values"])), chosen["lines"]


def _choose_rate(loaded: LoadedConfig, base: Path) -> float:
    try:
        weights = weights_of(base)
    except ValueError as error:
        raise ModelError(f"{error} ({loaded.where('model')}).") from error
    return choose_learning_rate(loaded.run, weights.parameters if weights is not None else 0)
