"""Names in adapter files as PEFT reads them: which modules its targets mean, and how its tensors are spelled.

Targets. PEFT matches the ends of names with every module and parameter of the model, so an ending is written only where
it means adapted ones alone; else the full names are. In models with stacks of experts PEFT reads the names that single
experts had in transformers 4 (`down_proj`) as these stacks, in `target_modules` alone. Linear layers of such names are
therefore written as parameters (`mlp.down_proj.weight`), whose tensors are stored in the same way.

Tensors. While PEFT reads a file it renames LoRA tensors like those of the model's own checkpoint. Where that would
change the name of a module, the file has the name that is changed into it.
"""

from collections.abc import Collection, Iterable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from surefoot.models.experts import PROJECTIONS
from surefoot.models.lora import OF_MLPS, LoraTargets, tower_names

OF_EXPERTS = OF_MLPS | {"gate"}
"""Names that PEFT reads as stacks of experts or routers, in models that have them, where modules are named.
Source: _MOE_TARGET_MODULE_MAPPING in peft.utils.transformers_weight_conversion."""
LORA = ".lora_"
REFUSED = dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), ("out_proj",))
"""Linear layers that PEFT adapts in no way, by model type.
Source: _check_lora_target_modules_mamba in peft.tuners.tuners_utils."""


def split_targets(
    model: PreTrainedModel, linears: Collection[str], stacks: Collection[str]
) -> tuple[set[str], set[str]]:
    """Return PEFT's target_modules and target_parameters for adapted linear layers and stacks of experts."""
    own_names = [name for name, _ in model.named_parameters()]
    has_stacks = any(name.endswith(f".{PROJECTIONS[0]}") for name in own_names)
    weights = {f"{name}.weight": name for name in linears if has_stacks and name.rpartition(".")[2] in OF_EXPERTS}
    in_tower = tower_names(model)
    modules = set(linears) - set(weights.values())
    parameters = {*stacks, *weights}
    return (
        _shorten(modules, [name for name, _ in model.named_modules()], 1, in_tower),
        _shorten(parameters, own_names, 3, {name for name, linear in weights.items() if linear in in_tower}),
    )


def _shorten(adapted: Collection[str], names: Iterable[str], parts: int, in_full: Collection[str]) -> set[str]:
    """Return the last `parts` of each name where these mean only adapted ones among all `names`, else the full name.

    Names in `in_full` are always given in full, as `lora.find_targets` reads them.
    """

    def ending(name: str) -> str:
        return ".".join(name.split(".")[-parts:])

    unwanted = {ending(name) for name in names if name not in adapted}
    return {name if name in in_full or ending(name) in unwanted else ending(name) for name in adapted}


class FileNames:
    """The spelling of a model's names in adapter files."""

    def __init__(self, model: PreTrainedModel) -> None:
        has_renamings = get_checkpoint_conversion_mapping(model.config.model_type) is not None
        transforms = get_model_conversion_mapping(model) if has_renamings else []
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._back = [t.reverse_transform() for t in reversed(self._renamings)]

    def to_file(self, name: str) -> str:
        """Return the spelling of a name of the model."""
        if LORA not in name or apply_renamings(name, self._renamings) == name:
            return name
        spelled: str = apply_renamings(name, self._back)
        return spelled

    def from_file(self, spelled: str) -> str:
        """Return the name of the model that PEFT makes of a spelling, or the spelling itself if it makes none."""
        if LORA not in spelled:
            return spelled
        name: str = apply_renamings(spelled, self._renamings)
        return name if self.to_file(name) == spelled else spelled

    def can_spell(self, module: str) -> bool:
        """Return whether PEFT finds the pair of a module again."""
        name = f"{module}.lora_A.weight"
        return bool(apply_renamings(self.to_file(name), self._renamings) == name)


def unreadable_by_peft(model: PreTrainedModel, targets: LoraTargets) -> list[str]:
    """Return the adapted modules that PEFT has no way to adapt, so that it refuses their adapter."""
    names = FileNames(model)
    refused = {name for name in targets.linears if name.rpartition(".")[2] in REFUSED.get(model.config.model_type, ())}
    modules = [*targets.linears, *dict.fromkeys(name.rpartition(".")[0] for name in targets.experts)]
    return [name for name in modules if name in refused or not names.can_spell(name)]
