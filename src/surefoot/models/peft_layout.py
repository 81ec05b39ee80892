"""Adapter files as PEFT reads them: which modules the targets mean, and how the tensors are named and laid out.

Targets. PEFT matches the ends of names with every module and parameter of the model, so an ending is written only where
it means adapted ones alone; else the full names are. In models with stacks of experts PEFT reads the names that single
experts had in transformers 4 (`down_proj`) as these stacks, in `target_modules` alone. Linear layers of such names are
therefore written as parameters (`mlp.down_proj.weight`), whose tensors are stored in the same way.

Tensors. A linear layer's pair is stored unchanged. A stack of experts is two matrices, lora_A [E * r, in] with the
expert as the slow index and lora_B [out, r * E] with the expert as the fast index; the model has [E, r, in] and
[E, out, r]. If several stacks of a module are adapted, PEFT nests them: `base_layer` holds all but the last. It takes a
stack for [E, out, in] unless the module says `is_transposed`, so the two sides of other transposed stacks are swapped.

Names. While PEFT reads a file it renames LoRA tensors like those of the model's own checkpoint. Where that would change
the name of a module, the file has the name that is changed into it.
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from surefoot.models.expert_layouts import Stack, expert_stacks
from surefoot.models.lora import GROUPS, OF_MLPS, find_targets, is_lora, tower_names
from surefoot.models.lora_linear import MAGNITUDE

OF_EXPERTS = OF_MLPS | {"gate"}
"""Names that PEFT reads as stacks of experts or routers, in models that have them, where modules are named.
Source: _MOE_TARGET_MODULE_MAPPING in peft.utils.transformers_weight_conversion."""
REFUSED = dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), ("out_proj",))
"""Linear layers that PEFT adapts in no way, by model type.
Source: _check_lora_target_modules_mamba in peft.tuners.tuners_utils."""
UNREADABLE_BY_PEFT = (
    "PEFT cannot adapt {} (one of {} such targets): it will refuse this run's adapter or leave them out. Surefoot "
    "reads it (init_adapter, chat), and `surefoot export --merge` writes a model that transformers opens"
)
"""Notice of a run whose adapter PEFT cannot represent: the first of the targets, and their number."""
UNMERGEABLE = (
    "{} and {} are one weight, which the adapter changes differently in the two places: `surefoot export --merge` "
    "cannot write that as one weight. PEFT and Surefoot (init_adapter, chat, serve) open the adapter"
)
"""Notice of a run whose adapter cannot be merged, with the two names of the first weight that is shared."""
LORA = ".lora_"
"""Part of the keys of low-rank pairs."""
LENGTHS = ".lora_magnitude_vector"
"""End of the key of a layer's magnitude (DoRA)."""
OUTERMOST = "down_proj"
"""The stack whose wrapper is outside those of the module's other stacks: modules define it last."""


def split_targets(
    model: PreTrainedModel, linears: Collection[str], stacks: Collection[str]
) -> tuple[set[str], set[str]]:
    """Return PEFT's target_modules and target_parameters for adapted linear layers and stacks of experts."""
    has_stacks = any(True for _ in expert_stacks(model))
    weights = {f"{name}.weight": name for name in linears if has_stacks and name.rpartition(".")[2] in OF_EXPERTS}
    in_tower = tower_names(model)
    modules = set(linears) - set(weights.values())
    return (
        _shorten(modules, [name for name, _ in model.named_modules()], 1, in_tower),
        _shorten(
            {*stacks, *weights},
            [name for name, _ in model.named_parameters()],
            3,
            {name for name, linear in weights.items() if linear in in_tower},
        ),
    )


def _shorten(adapted: Collection[str], names: Iterable[str], parts: int, in_full: Collection[str]) -> set[str]:
    """Return the last `parts` of each name where these mean only adapted ones among all `names`, else the full name.

    A name of a group of targets (`linear`, of Moshi's `q_proj.linear`) is never written. Names in `in_full` are always
    given in full, as `lora.find_targets` reads them.
    """

    def ending(name: str) -> str:
        return ".".join(name.split(".")[-parts:])

    unwanted = {*GROUPS, *(ending(name) for name in names if name not in adapted)}
    return {name if name in in_full or ending(name) in unwanted else ending(name) for name in adapted}


def order_stacks(leaves: Iterable[str]) -> list[str]:
    """Return the names of a module's adapted stacks from the innermost wrapper to the outermost."""
    return sorted(leaves, key=lambda leaf: (leaf == OUTERMOST, leaf))


def is_swapped(stack: Stack) -> bool:
    """Return whether PEFT takes the inputs of a stack for its outputs."""
    return stack.is_transposed != bool(getattr(stack.owner, "is_transposed", False))


def join_pair(a: Tensor, b: Tensor, rank: int, stack: Stack) -> tuple[Tensor, Tensor]:
    """Return the pair of a stack, [E, r, in] and [E, out, r], from a file's matrices."""
    in_a, in_b = a.view(-1, rank, a.shape[1]), b.view(b.shape[0], rank, -1).permute(2, 0, 1)
    return (in_b.mT, in_a.mT) if is_swapped(stack) else (in_a, in_b)


class PeftLayout:
    """Names and layouts of a model's trained parameters in adapter files."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._stacks = dict(expert_stacks(model))
        has_renamings = get_checkpoint_conversion_mapping(model.config.model_type) is not None
        transforms = get_model_conversion_mapping(model) if has_renamings else []
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._back = [t.reverse_transform() for t in reversed(self._renamings)]

    def convert_to_file(self, name: str, value: Tensor, trained: Iterable[str]) -> tuple[str, Tensor]:
        """Return a parameter's key, not yet spelled, and its value in a file.

        `trained`: all trained parameters, for the nesting.
        """
        owner, _, leaf = name.rpartition(".")
        if not is_lora(name):
            return name, value
        if leaf == MAGNITUDE:
            return f"{owner}{LENGTHS}", value
        part = leaf[-1]
        if leaf in ("lora_A", "lora_B"):
            return f"{owner}.lora_{part}.weight", value
        stack = leaf.removesuffix(f"_lora_{part}")
        adapted = [other.rpartition(".")[2] for other in trained if other.rpartition(".")[0] == owner]
        order = order_stacks(leaf.removesuffix("_lora_A") for leaf in adapted if leaf.endswith("_lora_A"))
        wrappers = ".base_layer" * (len(order) - 1 - order.index(stack))
        if is_swapped(self._stacks[f"{owner}.{stack}"]):
            part, value = "B" if part == "A" else "A", value.mT
        key = f"{owner}{wrappers}.lora_{part}.weight"
        if part == "A":
            return key, value.reshape(-1, value.shape[-1])  # [E, r, in] -> [E * r, in]
        return key, value.permute(1, 2, 0).reshape(value.shape[1], -1)  # [E, out, r] -> [out, r * E]

    def convert_from_file(self, name: str, value: Tensor, shape: torch.Size) -> Tensor:
        """Return the value of a parameter of this name and shape from its value in a file."""
        owner, _, leaf = name.rpartition(".")
        if not leaf.endswith(("_lora_A", "_lora_B")):
            return value.reshape(shape).float()
        part, swapped = leaf[-1], is_swapped(self._stacks[f"{owner}.{leaf[:-7]}"])
        num_experts, rows, columns = (shape[0], shape[2], shape[1]) if swapped else shape
        if (part == "A") != swapped:
            as_model = value.reshape(num_experts, rows, columns)
        else:
            as_model = value.reshape(rows, columns, num_experts).permute(2, 0, 1)
        return (as_model.mT if swapped else as_model).contiguous().float()

    def spell(self, key: str) -> str:
        """Return the spelling of a key in files; the key itself if PEFT finds it again in no spelling."""
        if LORA not in key or apply_renamings(key, self._renamings) == key:
            return key
        spelled: str = apply_renamings(key, self._back)
        return spelled if apply_renamings(spelled, self._renamings) == key else key

    def read_key(self, spelled: str) -> str:
        """Return the key that PEFT makes of a spelling, or the spelling itself if it makes none."""
        if LORA not in spelled:
            return spelled
        key: str = apply_renamings(spelled, self._renamings)
        return key if self.spell(key) == spelled else spelled

    def can_represent(self, module: str) -> bool:
        """Return whether PEFT finds the pair of a module again."""
        key = f"{module}.lora_A.weight"
        return bool(apply_renamings(self.spell(key), self._renamings) == key)


def find_unreadable(model: PreTrainedModel, targets: Iterable[str]) -> list[str]:
    """Return the targets in a model that PEFT has no way to adapt, so that it refuses their adapter."""
    layout, stacks, adapted = PeftLayout(model), dict(expert_stacks(model)), find_targets(model, targets)
    refused = {name for name in adapted.linears if name.rpartition(".")[2] in REFUSED.get(model.config.model_type, ())}
    # PEFT takes a matrix for one layer.
    refused |= {name for name in adapted.experts if getattr(stacks[name].owner, stacks[name].leaf).dim() != 3}
    modules = {name: name for name in adapted.linears} | {name: name.rpartition(".")[0] for name in adapted.experts}
    if not modules:  # an adapter without LoRA
        return adapted.routers
    return [name for name, module in modules.items() if name in refused or not layout.can_represent(module)]


def find_unmergeable(model: PreTrainedModel, targets: Iterable[str]) -> list[tuple[str, str]]:
    """Return the weights of targets that are those of another layer too, each with its name in that layer."""
    ties: dict[str, str] = model.all_tied_weights_keys
    weights = [f"{name}.weight" for name in find_targets(model, targets).linears]
    return [(name, ties[name]) for name in weights if name in ties]
