"""Choice of the modules that an imported run trains: LoRA's targets, the vision tower, and routers."""

import re

from surefoot.errors import ConfigError
from surefoot.migrate.imported_run import ImportedRun
from surefoot.migrate.model_kind import has_vision_tower, is_moe
from surefoot.migrate.values import as_list, parse_number

LORA_SETTINGS = (
    "lora_rank", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "layers_to_transform",
    "modules_to_save",
)  # fmt: skip
TRAIN_TOWERS = frozenset({"TRL", "axolotl"})
"""Programs that train the vision tower of a model unless told otherwise, in full and as part of all linear layers."""

FREEZING = (
    "freeze_parameters", "freeze_parameters_ratio", "freeze_parameters_regex", "trainable_parameters",
    "trainable_parameters_regex",
)  # fmt: skip
"""Settings of ms-swift for a part of the weights, which it reads in full training alone."""
WHOLE_NAME = re.compile(r"[\w.]*[^\W\d]\.?", re.ASCII)
"""Beginning of parameter names that is the name of a module: one that ends with a number begins others, too."""
EXPERTS = re.compile(r"\bexperts\b")
"""Experts in a target: `shared_experts` are linear layers."""


def choose_trained_modules(imported: ImportedRun) -> None:
    """Decide whether the vision tower is trained, and leave out LoRA settings in full training."""
    is_full, program = imported.get_value("tuning") == "full", imported.program
    if is_full:
        _freeze_parts(imported)
    freeze_tower = imported.settings.pop("freeze_vision_tower", None)
    has_tower = has_vision_tower(imported.source, str(imported.get_value("model", "")))
    trains_all = is_full or "all" in as_list(imported.get_value("target_modules", "all"))
    if freeze_tower is None and has_tower and trains_all and program in TRAIN_TOWERS:
        freeze_tower = (False, f"default of {program}")
    for name in ("freeze_llm", "freeze_language_model"):
        if parse_number(imported.source.settings.get(name)) is True:
            _train_vision_tower_only(
                imported, name, is_full=is_full, trains_tower=freeze_tower is not None and not freeze_tower[0]
            )
            return
    if freeze_tower is not None and is_full:
        imported.settings["freeze_vision_tower"] = freeze_tower
    elif freeze_tower is not None and not freeze_tower[0]:  # with LoRA, peers adapt an unfrozen tower
        imported.settings["target_modules"] = (
            [*as_list(imported.get_value("target_modules", "all")), "vision"],
            freeze_tower[1],
        )
    for name in LORA_SETTINGS if is_full else ():
        value, origin = imported.settings.pop(name, (None, "default of nobody"))
        if not origin.startswith("default of"):
            imported.left_out[f"{name} = {value}"] = "full training uses no LoRA"


def _freeze_parts(imported: ImportedRun) -> None:
    """Carry what full training leaves unchanged. Raises: ConfigError for what is named in another way than here."""
    for name in FREEZING:
        value = imported.source.settings.get(name)
        for key in [key for key in imported.left_out if key.startswith(f"{name} = ")]:
            del imported.left_out[key]
        if not value or parse_number(value) == 0:
            continue
        where, beginnings = imported.source.locations.get(name, imported.source.program), as_list(value)
        if name != "freeze_parameters" or not all(WHOLE_NAME.fullmatch(str(each)) for each in beginnings):
            raise ConfigError(
                f"{name}={value!r} ({where}): here freeze_layers and freeze_modules name what full fine-tuning leaves "
                "unchanged, by numbers of layers and names of modules. Drop it there, and set these in the result."
            )
        imported.settings["freeze_modules"] = ([str(each).rstrip(".") for each in beginnings], f"{name} of {where}")


def _train_vision_tower_only(imported: ImportedRun, name: str, *, is_full: bool, trains_tower: bool) -> None:
    """Set LoRA to adapt the vision tower only.

    Raises: ConfigError for full training, or if what the run trains is not the tower.
    """
    where = imported.source.locations.get(name, imported.source.program)
    if is_full or not trains_tower:
        raise ConfigError(
            f"{name}=True ({where}): this run trains only the vision tower or the projector. Full training here "
            "always trains the language model. To adapt the tower alone, set tuning: lora and target_modules: [vision]."
        )
    imported.settings["target_modules"] = (["vision"], f"{name} of {where}")


def choose_linear_targets(imported: ImportedRun) -> None:
    """Adapt neither experts nor routers as part of `all` linear layers, as peers with transformers 5 do."""
    targets = [str(target) for target in as_list(imported.get_value("target_modules", ""))]
    takes_experts = imported.source.uses_megatron  # which has them as linear layers
    if imported.get_value("tuning") != "lora" or "all" not in targets or takes_experts or not _is_moe(imported):
        return
    chosen = ["linear" if target == "all" else target for target in targets]
    origin = imported.settings["target_modules"][1]
    imported.settings["target_modules"] = (chosen[0] if len(chosen) == 1 else chosen, origin)
    if any(EXPERTS.search(target) for target in chosen):  # named beside them
        return
    imported.left_out["experts, among all linear layers"] = (
        f"with transformers 5 experts and routers are no linear layers, and {imported.program} adapts neither. With "
        "transformers 4 it adapts both: set target_modules: [all, router] for that"
    )


def leave_out_expert_dropout(imported: ImportedRun) -> None:
    """Leave out LoRA dropout if experts are adapted: as in PEFT, LoRA on stacked experts has no dropout."""
    targets = as_list(imported.get_value("target_modules", "all"))
    has_experts = any(EXPERTS.search(str(target)) for target in targets) or ("all" in targets and _is_moe(imported))
    if imported.get_value("lora_dropout") and has_experts:
        imported.leave_out("lora_dropout", "LoRA on experts has no dropout: they are computed as one grouped product")


def _is_moe(imported: ImportedRun) -> bool:
    return is_moe(imported.source, str(imported.get_value("model", "")))
