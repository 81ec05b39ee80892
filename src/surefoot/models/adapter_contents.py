"""Contents of PEFT's adapters as changes of a model's weights, for merging and for generation.

Independent of what a run trains: `adapter.py` reads an adapter as the parameters of a run.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surefoot.errors import ModelError
from surefoot.models.adapter import get_tensor
from surefoot.models.adapter_files import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    WRAPPED,
    describe_targets,
    is_named,
    is_selected,
    join_shared,
    load_for_model,
    read_strength,
)
from surefoot.models.expert_layouts import GATED, Stack, expert_stacks
from surefoot.models.lora import LoraSettings, attachable_names
from surefoot.models.peft_layout import LENGTHS, PeftLayout, join_pair, order_stacks, split_targets
from surefoot.models.routing import router_weight_owners

STACKS = (*GATED, "down_proj")
"""Names of stacks of experts in most models."""


@dataclass(frozen=True)
class Pair:
    """A weight's low-rank pair. Shapes: a [r, in], b [out, r]; for a stack of experts a [E, r, in], b [E, out, r]."""

    a: Tensor
    b: Tensor
    is_transposed: bool = False
    """Whether the weight is stored as [in, out], a stack as [E, in, out]."""
    is_flat: bool = False
    """Whether a stack is stored as a matrix, one expert below the other."""
    scaling: float = 1.0
    magnitude: Tensor | None = None
    """Lengths [out] to which the rows of weight plus product are scaled (DoRA); None without."""

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @property
    def shape(self) -> torch.Size:
        """Shape of the adapted weight."""
        sides = (self.a.shape[-1], self.b.shape[-2]) if self.is_transposed else (self.b.shape[-2], self.a.shape[-1])
        shape = torch.Size((*self.a.shape[:-2], *sides))
        return torch.Size((shape[0] * shape[1], shape[2])) if self.is_flat else shape

    def multiply(self, expert: int | None) -> Tensor:
        """Return the scaled product in the weight's layout and float32, of one expert or of all."""
        a, b = (self.a, self.b) if expert is None else (self.a[expert], self.b[expert])
        product = self.scaling * (b.float() @ a.float())
        product = product.mT if self.is_transposed else product
        return product.flatten(0, 1) if self.is_flat and expert is None else product

    def scale_rows(self, total: Tensor) -> Tensor:
        """Return weight and product together with the lengths that the rows were trained to have, in float32."""
        if self.magnitude is None:
            return total
        lengths: Tensor = total.norm(dim=0 if self.is_transposed else 1)
        scale = self.magnitude.float() / lengths.clamp_min(torch.finfo(torch.float32).tiny)
        return total * (scale if self.is_transposed else scale[:, None])


@dataclass(frozen=True)
class AdapterContents:
    """Contents of an adapter by the names of the model's parameters."""

    folder: Path
    low_rank: dict[str, Pair]
    whole: dict[str, Tensor]
    """Parameters that were trained in full, and others that are stored in full."""
    joined: frozenset[str] = frozenset()
    """Names of parameters in full that two places of the model share, with the same values in the adapter for both."""

    def find_whole(self, name: str, ties: Mapping[str, str]) -> Tensor | None:
        """Return the values of a parameter that is stored in full, also by the other name of a shared one."""
        source = ties.get(name, name)
        return self.whole.get(source if source in self.joined else name)

    def as_parameters(self, model: PreTrainedModel) -> "AdapterParameters":
        """Return the adapter as LoRA of one rank of a model, which is read for its names and shapes alone."""
        self._check_fits(model)
        stacks, adaptable, routers = dict(expert_stacks(model)), attachable_names(model), router_weight_owners(model)
        pairs, updates = {}, {}
        for name, pair in self.low_rank.items():
            module = name if name in stacks else name.removesuffix(".weight")
            if module in adaptable:
                pairs[module] = pair
            elif pair.magnitude is not None:
                raise ModelError(
                    f"{self.folder}: {module} has a magnitude (use_dora), but LoRA does not adapt it here. PEFT's "
                    "merge_and_unload writes the adapter as a model."
                )
            else:
                updates[name] = pair.multiply(None)
        rank = max((pair.rank for pair in pairs.values()), default=1)
        scaling = next((pair.scaling for pair in pairs.values() if pair.scaling), 1.0)
        values = dict(self.whole)
        for name, pair in pairs.items():
            start = f"{name}_lora" if name in stacks else f"{name}.lora"
            missing = rank - pair.rank
            b = pair.b if pair.scaling == scaling else pair.b.float() * (pair.scaling / scaling)
            values[f"{start}_A"] = F.pad(pair.a, (0, 0, 0, missing))
            values[f"{start}_B"] = F.pad(b, (0, missing))
            if pair.magnitude is not None:
                values[f"{start}_magnitude"] = pair.magnitude
        modules, parameters = split_targets(model, pairs.keys() - stacks.keys(), pairs.keys() & stacks.keys())
        in_full = ["router"] if any(name.rpartition(".")[0] in routers for name in self.whole) else []
        targets = (*sorted(modules), *sorted(parameters), *in_full)
        has_magnitudes = any(pair.magnitude is not None for pair in pairs.values())
        settings = LoraSettings(rank, scaling * rank, dora=has_magnitudes, targets=targets)
        return AdapterParameters(self.folder, settings, values, updates, self.joined)

    def _check_fits(self, model: PreTrainedModel) -> None:
        """Raise ModelError unless a model has the weights that the adapter is for."""
        tensors: Iterable[tuple[str, Tensor]] = (*model.named_parameters(), *model.named_buffers())
        shapes = {name: tensor.shape for name, tensor in tensors}
        ties: dict[str, str] = model.all_tied_weights_keys
        parts = {name: pair.shape for name, pair in self.low_rank.items()}
        parts |= {name: weight.shape for name, weight in self.whole.items()}
        for name, part in parts.items():
            shape = shapes.get(ties.get(name, name))
            if shape != part:
                difference = f"has shape {tuple(shape)}" if shape is not None else "is not a part"
                raise ModelError(
                    f"{self.folder} has a part of shape {tuple(part)} for {name}, which {difference} of the model. Is "
                    f"{model.name_or_path} the base this adapter was trained on?"
                )


@dataclass(frozen=True)
class AdapterParameters:
    """An adapter as LoRA of one rank: smaller pairs have zeros beside them, those of another scaling another B."""

    folder: Path
    settings: LoraSettings
    values: dict[str, Tensor]
    """Values of parameters, by name."""
    updates: dict[str, Tensor]
    """Products that are added to weights which PEFT adapts and LoRA here cannot: those of routers and indexers."""
    joined: frozenset[str]
    """See `AdapterContents.joined`."""

    @torch.no_grad()
    def load_into(self, model: PreTrainedModel) -> None:
        """Load the adapter into a model that was built with its settings."""
        for name, value in self.values.items():
            weight = get_tensor(model, name)
            if name not in self.joined:
                refuse_shared(self.folder, model, name, value, weight)
            weight.copy_(value)
        for name, update in self.updates.items():
            weight = get_tensor(model, name)
            total = weight.float()
            weight.copy_(total + update.to(total))


def refuse_shared(folder: Path, model: PreTrainedModel, name: str, whole: Tensor, weight: Tensor) -> None:
    """Raise ModelError if an adapter holds a weight in full that has two places in the model, and has changed it.

    PEFT trains one of the two places apart from the other. Weights of which the files hold two versions are not shared.
    """
    ties: dict[str, str] = model.all_tied_weights_keys
    places = {place for tie in ties.items() if name in tie for place in tie}
    is_shared = len({id(get_tensor(model, place)) for place in places}) < len(places)
    if is_shared and not torch.equal(whole.to(weight), weight):
        raise ModelError(
            f"{folder} holds {name} in full, trained apart from the weight with which the model shares it, and cannot "
            "be read. PEFT opens it, and its merge_and_unload writes it as a model."
        )


def read_contents(folder: Path, model: PreTrainedModel) -> AdapterContents:
    """Read a PEFT adapter as weights of the base model, of which `model` gives names and layout, no values.

    Raises: ModelError if it is not a plain LoRA adapter.
    """
    config, stored = load_for_model(folder, PeftLayout(model))
    modules = dict(model.named_modules())
    stacks: dict[str, dict[str, Stack]] = {}
    for name, stack in expert_stacks(model):
        stacks.setdefault(name.rpartition(".")[0], {})[stack.leaf] = stack

    def find_leaves(module: str) -> Iterable[str]:
        """Return the stacks of a module, by the usual names if it is of another model."""
        return stacks.get(module, () if module in modules else STACKS)

    _check_modules_named(folder, config, stored, find_leaves)
    low_rank, full_weights = {}, {}
    magnitudes = {key.removesuffix(LENGTHS): stored.pop(key) for key in list(stored) if key.endswith(LENGTHS)}
    for key in stored:
        other = key.replace(".lora_A.", ".lora_B.") if ".lora_A." in key else key.replace(".lora_B.", ".lora_A.")
        if other not in stored:
            raise ModelError(
                f"{folder}: {PREFIX}{key} is one half of a pair; {PREFIX}{other} is not there. Nothing was written."
            )
    for name, a in stored.items():
        if name.endswith(".lora_A.weight"):
            owner, b = name.removesuffix(".lora_A.weight"), stored[name.replace(".lora_A.", ".lora_B.")]
            module = owner.replace(".base_layer", "")
            leaf = _find_stack(owner, find_leaves(module), config.get("target_parameters"))
            is_parameter = leaf is None and is_named(f"{module}.weight", config.get("target_parameters"))
            adapted = f"{module}.{leaf or 'weight'}" if leaf or is_parameter else module
            rank, scaling = read_strength(config, adapted)
            is_pair = a.dim() == b.dim() == 2 and min(*a.shape, *b.shape) > 0 and a.shape[0] == b.shape[1]
            if not is_pair or (a.shape[0] % rank if leaf else a.shape[0] != rank):
                raise ModelError(
                    f"{folder}: {PREFIX}{name} has shape {tuple(a.shape)} and its other half {tuple(b.shape)}, which "
                    f"are no pair of rank {rank}. Nothing was written."
                )
            if leaf is None:
                is_transposed = isinstance(modules.get(module), Conv1D)
                magnitude = magnitudes.pop(owner, None)
                low_rank[f"{owner}.weight"] = Pair(a, b, is_transposed, scaling=scaling, magnitude=magnitude)
            elif module not in stacks:  # of another model: the pair finds no weight
                low_rank[f"{module}.{leaf}"] = Pair(a, b, scaling=scaling)
            else:
                stack = stacks[module][leaf]
                is_flat = getattr(stack.owner, leaf).dim() == 2
                low_rank[f"{module}.{leaf}"] = Pair(
                    *join_pair(a, b, rank, stack), stack.is_transposed, is_flat, scaling
                )
        elif not name.endswith(".lora_B.weight"):
            full_weights[name.replace(WRAPPED, ".")] = a
    _check_magnitudes(folder, config, low_rank, magnitudes)
    return AdapterContents(folder, low_rank, full_weights, frozenset(join_shared(full_weights, model)))


def _check_magnitudes(
    folder: Path, config: Mapping[str, Any], pairs: Mapping[str, Pair], unpaired: Iterable[str]
) -> None:
    """Raise ModelError unless each pair has a magnitude, or none. `unpaired`: modules with a magnitude alone."""
    with_magnitude = {name for name, pair in pairs.items() if pair.magnitude is not None}
    has_magnitudes = bool(config.get("use_dora") or with_magnitude)
    reasons = [f"{module} has a magnitude and no pair" for module in unpaired]
    if has_magnitudes:
        reasons += [f"the pair of {name} has no magnitude (use_dora)" for name in sorted(pairs.keys() - with_magnitude)]
    if reasons:
        raise ModelError(f"{folder}: {reasons[0]}. Are the two files of the same adapter?")


def _find_stack(owner: str, leaves: Iterable[str], target_parameters: Iterable[str] | None) -> str | None:
    """Return the stack that the pair of a (nested) module in a file adapts; None if it adapts no stack."""
    module = owner.replace(".base_layer", "")
    adapted = order_stacks(leaf for leaf in leaves if is_named(f"{module}.{leaf}", target_parameters))
    depth = owner.count(".base_layer")
    return adapted[-1 - depth] if depth < len(adapted) else None


def _check_modules_named(
    folder: Path, config: Mapping[str, Any], stored: Iterable[str], find_leaves: Callable[[str], Iterable[str]]
) -> None:
    """Raise ModelError for a tensor of a module that the config does not name: PEFT would ignore it."""
    for key in stored:
        owner, is_pair, _ = key.rpartition(".lora_")
        module = owner.replace(".base_layer", "")
        parameters = [f"{module}.{leaf}" for leaf in (*find_leaves(module), "weight")]
        is_parameter = any(is_named(parameter, config.get("target_parameters")) for parameter in parameters)
        if is_pair and not is_parameter and not is_selected(module, config):
            raise ModelError(
                f"{folder}: {WEIGHTS} adapts {module}, which {CONFIG} leaves out ({describe_targets(config)}). "
                "Nothing was written. Are the two files of the same adapter?"
            )
