"""Choice of the modules that an imported run trains: LoRA's targets, the vision tower, and routers."""

from surefoot.errors import ConfigError
from surefoot.migrate.field_map import as_list, parse_number
from surefoot.migrate.imported_run import ImportedRun
from surefoot.migrate.lint import MOE_NAME

LORA_SETTINGS = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "use_rslora")


def choose_trained_modules(imported: ImportedRun) -> None:
    """Decide whether the vision tower is trained, and leave out LoRA settings in full training."""
    is_full = imported.get_value("tuning") == "full"
    freeze_tower = imported.settings.pop("freeze_vision_tower", None)
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


def note_routers(imported: ImportedRun) -> None:
    """Record that `all` linear layers of a Mixture-of-Experts include the routers in some peers."""
    name = str(imported.get_value("model", ""))
    targets = as_list(imported.get_value("target_modules", ""))
    if (
        imported.get_value("tuning") == "lora"
        and MOE_NAME.search(name)
        and "all" in targets
        and "router" not in targets
    ):
        imported.left_out["routers, among all linear layers"] = (
            f"with transformers 4, where routers are linear layers, {imported.program} adapts them too. To do the "
            "same, set target_modules: [all, router]"
        )


def leave_out_expert_dropout(imported: ImportedRun) -> None:
    """Leave out LoRA dropout if experts are adapted: as in PEFT, LoRA on stacked experts has no dropout."""
    targets = as_list(imported.get_value("target_modules", "all"))
    is_moe = MOE_NAME.search(str(imported.get_value("model", "")))
    if is_moe and imported.get_value("lora_dropout") and {"all", "experts"} & {str(target) for target in targets}:
        imported.leave_out("lora_dropout", "LoRA on experts has no dropout: they are computed as one grouped product")
