"""Mapping of the peers' settings of distillation to those of `method: distill`.

A setting that would change what is learned and has no counterpart is refused, since nothing else tells the user.
"""

from types import EllipsisType
from typing import Any

from surefoot.config.aliases import ALIASES, FLAG_ALIASES
from surefoot.methods.distill.settings import OF_ROLLOUTS
from surefoot.migrate.parsed_run import ParsedRun
from surefoot.migrate.values import is_null, parse_number

PEER_METHODS = ("gkd", "distillation")
"""Methods of peers that are `distill` here."""
DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("ms-swift", "gkd"): {"beta": 0.5, "lmbda": 0.5, "temperature": 0.9, "max_completion_length": 512},
    ("TRL", "gkd"): {
        "beta": 0.5, "lmbda": 0.5, "temperature": 0.9, "divergence_temperature": 1.0, "max_completion_length": 128,
        "train_on": "last_assistant",
    },
    ("TRL", "distillation"): {
        "beta": 1.0, "lmbda": 1.0, "max_completion_length": 512, "learning_rate": 1e-6, "truncation": "error",
    },
}  # fmt: skip
"""Program and its method -> its further defaults. GKD of TRL 1.16 uses the temperature in sampling, not in the loss."""
TEACHERS = ("teacher_model", "teacher_model_name_or_path")
SERVERS = ("teacher_model_server", "teacher_model_server_url")
NO_EFFECT = frozenset("teacher_model_init_kwargs teacher_model_type disable_dropout dataset_kwargs".split())
"""Settings that change how the result is computed and not the result; peers turn dropout off by default."""

Mapped = dict[str, Any] | None | EllipsisType


def map_distillation(run: ParsedRun, name: str, value: Any) -> Mapped:
    """Return the settings for one peer setting, None if there is none, or `...` if it is of no such method.

    Raises: ConfigError for a value that would change what is learned.
    """
    if run.method != "distill":
        return ...
    if name in NO_EFFECT:
        return {}
    if name == "seq_kd":
        if parse_number(value):
            expected = (
                "false: write the teacher's texts first (surefoot serve, vLLM), and train on them with method sft"
            )
            raise run.make_value_error(name, value, expected)
        return {}
    if name in SERVERS:
        if not is_null(value) and str(value).lstrip()[:1] in ("[", "{"):
            raise run.make_value_error(name, value, "one address: a run has one teacher")
        return {} if is_null(value) else {"teacher_server": str(value)}
    if name in TEACHERS:
        is_served = any(not is_null(run.settings.get(server)) for server in SERVERS)
        return {} if is_null(value) or is_served else {"teacher_model": value}
    if name == "teacher_adapters" and not is_null(value):
        raise run.make_value_error(name, value, "none: give the folder of the adapter as teacher_model")
    if name == "gkd_logits_topk":  # both distributions are normalised over these tokens
        return {} if is_null(value) else {"teacher_top_k": parse_number(value), "teacher_top_k_tail": False}
    if name == "loss_top_k":
        return {"teacher_top_k": parse_number(value)} if parse_number(value) else {}
    if name == "loss_add_tail":
        return {} if value in (True, None) else {"teacher_top_k_tail": False}
    if name == "teacher_model_revision" and not is_null(value):
        raise run.make_value_error(name, value, "none: name the folder of that revision as teacher_model")
    if name == "sft_alpha":
        return {"sft_weight": parse_number(value)} if parse_number(value) else {}
    number = parse_number(value)
    if name in ("beta", "lmbda") and not (isinstance(number, int | float) and 0 <= number <= 1):
        raise run.make_value_error(name, value, "a number from 0 to 1")
    surefoot_name = FLAG_ALIASES[name][0] if name in FLAG_ALIASES else ALIASES.get(name, name)
    is_of_rollouts = surefoot_name in OF_ROLLOUTS or surefoot_name == "max_completion_length"
    return {} if is_of_rollouts and not generates(run) else ...


def generates(run: ParsedRun) -> bool:
    """Return whether some steps of a run train on the student's completions."""
    return bool(_share_of_completions(run))


def needs_prompt_limit(run: ParsedRun) -> bool:
    """Return whether the rows of a run are prompts, which a limit of their own applies to."""
    return bool(_share_of_completions(run) == 1)


def _share_of_completions(run: ParsedRun) -> Any:
    default = DEFAULTS.get((run.program, run.peer_method), {}).get("lmbda", 0.0)
    return parse_number(run.settings.get("lmbda", default))


def defaults_of(run: ParsedRun) -> dict[str, Any]:
    """Return the peer's further defaults for distillation."""
    values = DEFAULTS.get((run.program, run.peer_method), {})
    return {name: value for name, value in values.items() if name != "max_completion_length" or generates(run)}
