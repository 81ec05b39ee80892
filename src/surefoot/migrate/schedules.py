"""Learning-rate schedules of other programs, by transformers' names and Megatron's."""

from collections.abc import Mapping
from typing import Any, get_args

from surefoot.config.aliases import ALIASES
from surefoot.config.methods import known_fields
from surefoot.migrate.parsed_run import ParsedRun
from surefoot.migrate.peer_tables import DEFAULTS
from surefoot.migrate.values import parse_number

PEER_SCHEDULES = {
    "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd",
    "inverse-square-root": "inverse_sqrt", "WSD": "wsd",
}  # fmt: skip
"""Schedule of transformers -> Surefoot's; those that are not here have the same name, or none."""
KWARGS_OF_SCHEDULES = {"cosine_with_restarts": {"num_cycles": "lr_cycles"}, "polynomial": {"power": "lr_power"}}
"""Schedule of transformers -> its parameters -> the settings of the same meaning."""
SUPPORTED_SCHEDULES = get_args(known_fields()["lr_scheduler_type"].annotation)


def map_schedule(run: ParsedRun, value: Any) -> dict[str, Any] | None:
    """Return the settings of a schedule; None for one that does not exist here."""
    schedule = PEER_SCHEDULES.get(str(value), value)
    if schedule == "inverse_sqrt" and not has_warmup(run):
        schedule = "constant"  # see `note_schedule`
    return {"lr_scheduler_type": schedule} if schedule in SUPPORTED_SCHEDULES else None


def map_schedule_kwargs(run: ParsedRun, kwargs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of a schedule's parameters; None if one of them has no counterpart."""
    if kwargs is not None and find_peer_schedule(run) == "warmup_stable_decay":
        return _map_stable_decay(run, kwargs)
    if kwargs is not None and kwargs.keys() == {"min_lr_rate"}:
        return {"min_lr_ratio": kwargs["min_lr_rate"]}
    if kwargs is not None and kwargs.keys() == {"min_lr"}:
        default = DEFAULTS[run.program].get("learning_rate", known_fields()["learning_rate"].default)
        min_lr, max_lr = parse_number(kwargs["min_lr"]), parse_number(run.settings.get("learning_rate", default))
        is_numeric = isinstance(min_lr, int | float) and isinstance(max_lr, int | float) and max_lr > 0
        return {"min_lr_ratio": float(f"{min_lr / max_lr:.6g}")} if is_numeric else None
    if not kwargs or (find_peer_schedule(run) == "cosine" and kwargs == {"num_cycles": 0.5}):
        return {} if kwargs is not None else None
    names = KWARGS_OF_SCHEDULES.get(str(find_peer_schedule(run)), {})
    return (
        {names[key]: parse_number(option) for key, option in kwargs.items()} if kwargs.keys() <= names.keys() else None
    )


def has_warmup(run: ParsedRun) -> bool:
    """Return whether a run has a warm-up."""
    names = ("warmup_steps", "warmup_ratio", "lr_warmup_iters", "lr_warmup_fraction")
    return any(parse_number(run.settings.get(name) or 0) for name in names)


def note_schedule(run: ParsedRun, name: str, value: Any) -> str | None:
    """Return what a schedule that is carried lacks; None if it lacks nothing."""
    is_schedule = ALIASES.get(name, name) == "lr_scheduler_type" or name == "lr_decay_style"
    if is_schedule and PEER_SCHEDULES.get(str(value), value) == "inverse_sqrt" and not has_warmup(run):
        return "without a warm-up it falls over the first 10,000 steps, which a constant learning rate stands for"
    return None


def find_peer_schedule(run: ParsedRun) -> str | None:
    """Return the learning-rate schedule that a run sets, under its name in transformers."""
    names = [name for name in run.settings if ALIASES.get(name, name) == "lr_scheduler_type"]
    return str(run.settings[names[-1]]) if names else None


def _map_stable_decay(run: ParsedRun, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Map the parameters of transformers' `warmup_stable_decay`, which decays along a cosine unless they say linear."""
    decay_steps, all_steps = parse_number(kwargs.get("num_decay_steps")), parse_number(run.settings.get("max_steps"))
    are_known = kwargs.keys() <= {"num_decay_steps", "decay_type", "min_lr_ratio"}
    if not (are_known and isinstance(decay_steps, int) and isinstance(all_steps, int) and 0 < decay_steps <= all_steps):
        return None
    if kwargs.get("decay_type") != "linear":
        return None
    return {"decay_ratio": float(f"{decay_steps / all_steps:.6g}"), "min_lr_ratio": kwargs.get("min_lr_ratio", 0.0)}
