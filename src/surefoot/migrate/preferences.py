"""Mapping of the peers' settings of preference optimisation to those of `method: dpo`, `kto`, `orpo` and `reward`.

A setting that would change what is learned and has no counterpart is refused, since nothing else tells the user.
"""

from types import EllipsisType
from typing import Any, get_args

from surefoot.methods.dpo.settings import LOSS_TYPES, REFERENCE_FREE, SMOOTHED
from surefoot.methods.kto.settings import KtoConfig
from surefoot.migrate.parsed_run import ParsedRun
from surefoot.migrate.values import as_list, is_null, parse_number

METHODS = ("dpo", "kto", "orpo", "reward")
"""Methods whose settings are mapped here."""
LOSSES = {
    "dpo": LOSS_TYPES,
    "kto": get_args(KtoConfig.model_fields["loss_type"].annotation),
    "orpo": ("orpo",),
    "reward": (),
}
"""Method -> the losses that it has."""
NAMES = {
    "pref_beta": "beta", "rl_beta": "beta", "dpo_beta": "beta", "orpo_alpha": "beta", "rpo_alpha": "sft_weight",
    "pref_ftx": "sft_weight", "cpo_alpha": "sft_weight", "dpo_label_smoothing": "label_smoothing",
    "kto_chosen_weight": "desirable_weight",
    "kto_desirable_weight": "desirable_weight", "kto_rejected_weight": "undesirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
}  # fmt: skip
"""Peer setting -> the setting with the same meaning."""
LOSS_SETTINGS = ("loss_type", "pref_loss", "dpo_loss_type")
LOSS_WEIGHTS = ("loss_weights", "dpo_loss_weights")
CPO_LOSSES = {"sigmoid": "cpo", "simpo": "simpo"}
"""Loss of TRL's CPO trainer -> the same of method dpo."""
SFT_LOSS = "sft"
"""TRL's name of the chosen answers' likelihood in a list of losses."""
NO_EFFECT = frozenset(
    "precompute_ref_batch_size ref_model_init_kwargs model_adapter_name disable_dropout "
    "padding_value label_pad_token_id dataset_num_proc f_alpha_divergence_coef ref_model_quantization_bit".split()
)
"""Settings that change how the result is computed and not the result."""
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "f_divergence_type": (("reverse_kl",), "reverse_kl, the only divergence of method dpo"),
    "use_weighting": ((False,), "false: pairs are not weighted by their likelihood"),
    "dpo_use_weighting": ((False,), "false: pairs are not weighted by their likelihood"),
    "sync_ref_model": ((False,), "false: the reference stays the model that training begins with"),
    "reference_free": ((False,), "false: loss_type simpo and cpo need no reference"),
    "pref_bco_weight": ((0, 0.0), "0: give bco_pair as one of several losses"),
}
"""Setting -> (values that mean what Surefoot does, what is expected instead of others)."""
LIMITS = ("max_prompt_length", "max_completion_length", "max_target_length")
"""Settings of older versions that limit one part of a pair."""
REFERENCE_MODELS = ("ref_model", "ref_model_name_or_path")
"""Settings for a reference that is another model."""
ADAPTERS = ("adapters", "adapter_name_or_path", "lora_model_dir")
"""Settings for an adapter to start from."""
REFERENCE_ADAPTERS = ("ref_adapters", "ref_model_adapters")
"""Settings for the adapter of the reference."""
TRUNCATION = {"keep_start": "right", "keep_end": "left"}

OF_HEADS: dict[str, tuple[Any, ...]] = {
    "lora_task_type": ("SEQ_CLS",),
    "task_type": ("seq_cls", "SEQ_CLS"),
    "num_labels": (1, "1"),
    "lora_modules_to_save": ("score", ["score"]),
    "modules_to_save": ("score", ["score"]),
}
"""Setting of a reward model -> the values that say what Surefoot always does: the head is trained in full."""

Mapped = dict[str, Any] | None | EllipsisType


def map_preferences(run: ParsedRun, name: str, value: Any) -> Mapped:
    """Return the settings for one peer setting, None if there is none, or `...` if it is of no such method.

    Raises: ConfigError for a value that would change what is learned.
    """
    if run.method not in METHODS:
        return ...
    if name in LOSS_SETTINGS and value is not None:
        if run.program == "LLaMA-Factory" and run.method == "kto":
            return {}  # its loss of pairs, which KTO does not use
        return _map_losses(run, name, value)
    if name in LOSS_WEIGHTS and any(setting in run.settings for setting in LOSS_SETTINGS):
        return {}  # carried with the losses
    if name in NO_EFFECT:
        return {}
    if name == "train_sampling_strategy" and value in ("sequential", "random"):
        return {"shuffle": value == "random"}
    if name == "dpo_norm_loss":  # of axolotl
        return {"loss_type": "sigmoid_norm"} if value else {}
    if run.method == "reward" and name in OF_HEADS:
        others = [module for module in as_list(value) if module != "score"]
        if name.endswith("modules_to_save") and others:
            return {"modules_to_save": others}
        if value not in OF_HEADS[name]:
            raise run.make_value_error(name, value, f"{OF_HEADS[name][0]}: a reward model has one score")
        return {}
    if name in LIMITS:
        return None
    if name == "truncation_mode" and value in TRUNCATION:
        return {"truncation": TRUNCATION[value]}
    if name in REFUSED:
        accepted, expected = REFUSED[name]
        if not is_null(value) and parse_number(value) not in accepted:
            raise run.make_value_error(name, value, expected)
        return {}
    if name in REFERENCE_MODELS:
        model = run.settings.get("model_name_or_path", run.settings.get("model", run.settings.get("base_model")))
        if not is_null(value) and value != model:
            raise run.make_value_error(name, value, "none: the reference is the model that training begins with")
        return {}
    if name in (*REFERENCE_ADAPTERS, *ADAPTERS) and not is_null(value) and _has_reference(run):
        start = [run.settings.get(adapter) for adapter in ADAPTERS if adapter in run.settings]
        reference = [run.settings.get(adapter) for adapter in REFERENCE_ADAPTERS if adapter in run.settings]
        if start != reference:
            raise run.make_value_error(
                name, value, "the same adapter to start from and as the reference, which is where training begins"
            )
        return {} if name in REFERENCE_ADAPTERS else ...
    surefoot_name = NAMES.get(name, name)
    if name == "cpo_alpha" and not set(_losses_of(run)) & set(CPO_LOSSES.values()):
        return {}  # the peers' trainers of other losses do not read it
    if name == "center_rewards_coefficient":
        return {} if is_null(value) else {name: parse_number(value)}
    if surefoot_name == "sft_weight" and run.method != "dpo":
        if not is_null(value) and parse_number(value):
            raise run.make_value_error(name, value, f"0: method {run.method} adds no such loss")
        return {}
    if surefoot_name in ("desirable_weight", "undesirable_weight") and run.program == "axolotl" and not value:
        return {}  # axolotl reads 0 as its default
    if surefoot_name == "label_smoothing" and run.method != "dpo":
        if parse_number(value):
            raise run.make_value_error(name, value, f"0: method {run.method} has no such setting")
        return {}
    if surefoot_name == "label_smoothing" and parse_number(value) and not SMOOTHED.keys() & set(_losses_of(run)):
        raise run.make_value_error(name, value, f"0, or one of the losses {' and '.join(SMOOTHED)}, which use it")
    if name in NAMES:
        return {} if is_null(value) else {surefoot_name: parse_number(value)}
    return ...


def map_cpo(run: ParsedRun) -> dict[str, Any]:
    """Make a run of CPO or SimPO, without a reference, one of DPO; return the settings that the peer takes by default.

    Raises: ConfigError for a loss that DPO has only with a reference.
    """
    loss, *others = _losses_of(run) or ["simpo" if run.method == "simpo" else "sigmoid"]
    if others or loss not in CPO_LOSSES:
        raise run.make_value_error("loss_type", ", ".join([loss, *others]), f"one of {', '.join(CPO_LOSSES)}")
    for name in (*LOSS_SETTINGS, "rpo_alpha", "pref_ftx"):  # the trainer does not read the last two
        run.settings.pop(name, None)
    is_swift = run.program == "ms-swift"
    defaults = {"beta": 2.0 if is_swift and run.method == "simpo" else 0.1, "sft_weight": 1.0}
    if loss == "simpo":
        defaults["simpo_gamma"] = 1.0 if is_swift else 0.5
    run.method, run.settings["loss_type"] = "dpo", CPO_LOSSES[loss]
    written = {NAMES.get(name, name) for name, value in run.settings.items() if not is_null(value)}
    return {name: value for name, value in defaults.items() if name not in written}


def _has_reference(run: ParsedRun) -> bool:
    """Return whether a loss of the run compares with a reference."""
    return run.method not in ("orpo", "reward") and not REFERENCE_FREE.issuperset(_losses_of(run) or ["sigmoid"])


def _losses_of(run: ParsedRun) -> list[str]:
    value: Any = next((run.settings[name] for name in LOSS_SETTINGS if name in run.settings), [])
    return [loss.strip() for item in as_list(value or []) for loss in str(item).strip("[]").split(",")]


def _map_losses(run: ParsedRun, name: str, value: Any) -> dict[str, Any]:
    losses = _losses_of(run)
    for loss in losses:
        if loss not in (*LOSSES[run.method], *([SFT_LOSS] if run.method == "dpo" else [])):
            raise run.make_value_error(name, value, f"losses of method {run.method}: {', '.join(LOSSES[run.method])}")
    if run.method == "orpo":
        return {}
    written = next((run.settings[weights] for weights in LOSS_WEIGHTS if weights in run.settings), None)
    weights = [1.0] * len(losses) if written is None else [parse_number(item) for item in as_list(written)]
    if len(weights) != len(losses):
        raise run.make_value_error("loss_weights", written, f"a number for each of the {len(losses)} losses")
    settings: dict[str, Any] = {}
    if SFT_LOSS in losses:
        settings["sft_weight"] = weights.pop(losses.index(SFT_LOSS))
        losses.remove(SFT_LOSS)
    if not losses:
        raise run.make_value_error(name, value, "a loss of pairs: with sft alone it is a run of method sft")
    settings["loss_type"] = losses if len(losses) > 1 else losses[0]
    return settings | ({"loss_weights": weights} if weights != [1.0] * len(weights) else {})
