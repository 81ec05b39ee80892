"""Differences between the config of a saved run and that of a run that would resume it."""

from collections.abc import Iterator, Mapping
from typing import Any

from surefoot.config.documents import shorten
from surefoot.config.schema import AUTO, MayDiffer, RunConfig
from surefoot.errors import ConfigError


def changed_fields(saved: Mapping[str, Any], run: RunConfig, *, allowed: MayDiffer = MayDiffer.ON_RESUME) -> list[str]:
    """Return each setting that differs from a saved config, unless it is `allowed` to: `seed: 42 -> 7`.

    Settings that are `auto` now will have a value of their own choice.

    Raises: ConfigError if the saved config is not a mapping.
    """
    if not isinstance(saved, Mapping):
        raise ConfigError(f"the saved config holds no settings by name, but {shorten(saved)}.")
    current = run.model_dump(mode="json")
    fields = type(run).model_fields
    free = {name for name, field in fields.items() if allowed in field.metadata}
    has_fixed_warmup = run.warmup_steps is not None or run.warmup_ratio == 0
    if allowed is MayDiffer.ON_RESUME and run.lr_scheduler_type == "constant" and has_fixed_warmup:
        free |= {"max_steps", "num_train_epochs"}  # the length of the run affects only its end
    # A version without a setting behaved as the default of that setting.
    before = {name: saved.get(name, field.default) for name, field in fields.items()}
    compared = [name for name in current if name not in free and current[name] != AUTO]
    changes = [change for name in compared for change in _list_differences(name, before[name], current[name])]
    global_batch, batch, accumulation = (
        size if isinstance(size := saved.get(name), int) else None
        for name in ("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    )
    each = global_batch or (batch or 1) * (accumulation or 1)
    if each != run.sequences_per_step:
        changes.append(
            f"sequences per step: {each} -> {run.sequences_per_step} (set global_batch_size: {each} to go on)"
        )
    return changes


def _list_differences(name: str, before: Any, now: Any) -> Iterator[str]:
    """Yield each difference between two values of a setting, at any depth: `dataset[0].path: a.jsonl -> b.jsonl`."""
    if before == now:
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _list_differences(f"{name}.{key}", before.get(key), now.get(key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for place, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _list_differences(f"{name}[{place}]", old, new)
    else:
        yield f"{name}: {shorten(before, quote=False)} -> {shorten(now, quote=False)}"
