"""LoRA modules of Surefoot. Base parameters keep their names; `lora_A` and `lora_B` are added beside them.

They are created before the model is sharded (on the meta device), so a LoRA parameter gets its base's placement; its
initial value depends on (seed, parameter name) alone, never on rank or topology.

Independent of files: `adapter.py` translates to PEFT's format.

Source: Hu et al., https://arxiv.org/abs/2106.09685; rank-stabilised scaling: Kalajdzievski, https://arxiv.org/abs/2312.03732
"""

import difflib
import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from surefoot.config import RunConfig
from surefoot.errors import ModelError
from surefoot.models.dtensor_blocks import block_of
from surefoot.models.experts import is_fused_experts, stack_shape, stacks_of
from surefoot.models.quantization.base import FLOAT, FrozenLinear, WeightFormat, format_of, keep_stored, stored_weight
from surefoot.models.routing import router_names
from surefoot.models.vision import vision_tower

GROUPS = ("attention", "mlp", "experts", "router", "all", "vision")
OF_MLPS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names of linear layers in dense MLPs and shared experts, and in some models in experts."""


@dataclass(frozen=True)
class LoraSettings:
    """Settings of LoRA: targets, rank and scaling, and the format of the weights beside it."""

    rank: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False
    targets: tuple[str, ...] = ("attention", "experts")
    seed: int = 0
    weight_format: WeightFormat = FLOAT
    """How the frozen weights of the decoder's linear layers and experts are stored."""

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def lora_settings(config: RunConfig) -> LoraSettings | None:
    """Return the LoRA settings of a config; None for full fine-tuning."""
    if config.tuning == "full":
        return None
    targets = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules
    return LoraSettings(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        rslora=config.use_rslora,
        targets=tuple(targets),
        seed=config.seed,
    )


@dataclass(frozen=True)
class LoraTargets:
    """Modules and parameters of a model that the target groups and names matched."""

    linears: list[str] = field(default_factory=list)
    """Names of linear modules."""
    experts: list[str] = field(default_factory=list)
    """Names of fused expert parameters (`model.layers.0.mlp.experts.gate_up_proj`)."""
    routers: list[str] = field(default_factory=list)
    """Names of router modules, whose small weights are trained in full."""


def _create_parameter(*shape: int) -> nn.Parameter:
    """Return a parameter to train, in float32 regardless of the type of its base."""
    return nn.Parameter(torch.empty(shape, dtype=torch.float32))


class LoraLinear(FrozenLinear):
    """A linear layer with `lora_A [r, in]` and `lora_B [out, r]` beside its weight."""

    lora_A: nn.Parameter  # noqa: N815 - PEFT's names
    lora_B: nn.Parameter  # noqa: N815
    lora_scaling: float
    lora_dropout: float

    @staticmethod
    def adopt(linear: nn.Linear, settings: LoraSettings) -> None:
        """Give an existing linear layer its low-rank pair, in place, so that no name changes."""
        linear.__class__ = LoraLinear
        assert isinstance(linear, LoraLinear)
        linear.lora_A = _create_parameter(settings.rank, linear.in_features)
        linear.lora_B = _create_parameter(linear.out_features, settings.rank)
        linear.lora_scaling = settings.scaling
        linear.lora_dropout = settings.dropout

    def forward(self, input: Tensor) -> Tensor:
        a, b = self.lora_A.to(input.dtype), self.lora_B.to(input.dtype)
        if self.lora_dropout and self.training:
            low = F.linear(F.dropout(input, self.lora_dropout), a)
            return super().forward(input) + self.lora_scaling * F.linear(low, b)
        stored = stored_weight(self, "weight")
        return _LoraLinear.apply(input, self.bias, a, b, self.lora_scaling, format_of(self), *stored)  # type: ignore[no-any-return,no-untyped-call]


class _LoraLinear(torch.autograd.Function):
    """y = x W^T + b + s (x A^T) B^T with W and b frozen: one pass over y forward, and only dx, dA, dB backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
        weight_format: WeightFormat,
        *stored: Tensor,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        low = rows @ a.t()
        y = weight_format.linear(rows, stored, bias)
        y.addmm_(low, b.t(), alpha=scaling)
        ctx.save_for_backward(rows, low, a, b, *stored)
        ctx.scaling, ctx.shape, ctx.weight_format = scaling, x.shape, weight_format
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, a, b, *stored = ctx.saved_tensors
        d_rows = d_y.reshape(-1, d_y.shape[-1])
        d_low = d_rows @ b
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = ctx.weight_format.linear_dx(d_rows, stored).addmm_(d_low, a, alpha=ctx.scaling).view(ctx.shape)
        d_a = (d_low.t() @ rows).mul_(ctx.scaling)
        d_b = (low.t() @ d_rows).mul_(ctx.scaling).t()  # thin products are faster with their short side as rows
        return d_x, None, d_a, d_b, None, None, *(None for _ in stored)


def find_targets(model: PreTrainedModel, targets: Iterable[str]) -> LoraTargets:
    """Resolve groups (attention, mlp, experts, router, all, vision) and names to modules and parameters of `model`.

    A name matches a linear module or an expert parameter whose full name equals it or ends with `.name`. Modules of a
    vision tower are matched by full name only, because some have the same names as modules of the decoder.
    Raises: ModelError for a target that matches nothing, with the nearest names.
    """
    groups = _collect_groups(model)
    expert_parameters = set(groups["experts"])
    linears = adaptable_names(model) - expert_parameters
    chosen: set[str] = set()
    for target in targets:
        if target in groups:
            matches = set(groups[target])
        else:
            in_tower = set(groups["vision"])
            matches = {
                n
                for n in linears | expert_parameters
                if n == target or (n.endswith(f".{target}") and n not in in_tower)
            }
            if (
                "experts" not in target
            ):  # `down_proj` means the linear layers; expert stacks are named `experts.down_proj`
                matches -= expert_parameters
        if not matches:
            raise ModelError(
                _describe_missing_target(target, groups, linears | expert_parameters, type(model).__name__)
            )
        chosen |= matches
    order = [name for name, _ in model.named_modules()]
    return LoraTargets(
        linears=[name for name in order if name in chosen & linears],
        experts=[name for name, _ in model.named_parameters() if name in chosen & expert_parameters],
        routers=[name for name in order if name in chosen & set(groups["router"])],
    )


def experts_left_out(model: PreTrainedModel, targets: Iterable[str]) -> list[str]:
    """Return the targets that include experts in other models, if no experts of this model are adapted.

    In models whose experts are single linear layers `down_proj` names them; here they are stacks, named `experts`.
    """
    experts = [module for module in model.modules() if is_fused_experts(module)]
    if not experts or any(
        parameter.requires_grad for module in experts for parameter in module.parameters(recurse=False)
    ):
        return []
    return [target for target in targets if target in OF_MLPS]


def tower_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the linear modules of the model's vision tower."""
    return set(_collect_groups(model)["vision"])


def adaptable_names(model: PreTrainedModel) -> set[str]:
    """Return the names of every linear module and every fused expert parameter of a model."""
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return linears | set(_collect_groups(model)["experts"])


def _collect_groups(model: PreTrainedModel) -> dict[str, list[str]]:
    routers = router_names(model)
    attention, mlp = [], []
    tower = vision_tower(model)
    in_tower = (
        [f"{tower[0]}.{name}" for name, module in tower[1].named_modules() if isinstance(module, nn.Linear)]
        if tower is not None
        else []
    )
    for name, module in model.named_modules():
        if name in in_tower:
            continue
        if isinstance(module, nn.Linear) and ".layers." in f".{name}" and name not in routers:
            parents = name.split(".")[:-1]
            if any("attn" in part or "attention" in part for part in parents):
                attention.append(name)
            elif any("mlp" in part or "feed_forward" in part for part in parents) and module.out_features > 1:
                mlp.append(name)  # a gate with one output (Qwen2-MoE's shared_expert_gate) is too small to adapt
    expert_parameters = [f"{name}.{stack}" for name, module in model.named_modules() for stack in stacks_of(module)]
    return {
        "attention": attention,
        "mlp": mlp,
        "experts": expert_parameters,
        "router": routers,
        "all": attention + mlp + expert_parameters,
        "vision": in_tower,
    }


def _describe_missing_target(target: str, groups: dict[str, list[str]], names: set[str], model_name: str) -> str:
    if target in GROUPS:
        present = [group for group, members in groups.items() if members]
        return (
            f"target_modules: the group '{target}' is empty in {model_name}. Groups with members: {', '.join(present)}."
        )
    endings = {".".join(name.split(".")[-2:]) for name in names} | {name.split(".")[-1] for name in names}
    near = difflib.get_close_matches(target, [*GROUPS, *sorted(endings)], n=5, cutoff=0.4)
    leaf_names = sorted({name.split(".")[-1] for name in names})
    return (
        f"target_modules: '{target}' matches nothing in {model_name}. Nearest: {', '.join(near) or 'none'}. "
        f"Linear modules and expert stacks: {', '.join(leaf_names)}. Groups: {', '.join(GROUPS)}."
    )


def checked_targets(model: PreTrainedModel, settings: LoraSettings) -> LoraTargets:
    """Return the targets of these settings in a model. Raises: ModelError for an invalid or unsupported target."""
    targets = find_targets(model, settings.targets)
    if settings.dropout and targets.experts:
        raise ModelError(
            f"lora_dropout={settings.dropout} with {len(targets.experts)} expert stacks among the targets: dropout "
            "cannot be applied inside the grouped expert product, and PEFT refuses it too. Set lora_dropout: 0, or "
            "name targets without experts, such as [attention, mlp]."
        )
    return targets


def attach(model: PreTrainedModel, settings: LoraSettings) -> LoraTargets:
    """Create the LoRA parameters (uninitialised, on the current device) and return what was adapted."""
    targets = checked_targets(model, settings)
    for name in targets.linears:
        module = model.get_submodule(name)
        if type(module) is not nn.Linear:
            raise ModelError(
                f"target_modules: {name} is a {type(module).__name__}, not a plain linear layer; leave it out."
            )
        LoraLinear.adopt(module, settings)
    for name in targets.experts:
        owner, _, projection = name.rpartition(".")
        module = model.get_submodule(owner)
        num_experts, out_features, in_features = stack_shape(module, projection)
        setattr(module, f"{projection}_lora_A", _create_parameter(num_experts, settings.rank, in_features))
        setattr(module, f"{projection}_lora_B", _create_parameter(num_experts, out_features, settings.rank))
        module.lora_scaling = settings.scaling
    if settings.weight_format is not FLOAT:
        store_frozen_weights(model, settings.weight_format)
    return targets


def store_frozen_weights(model: PreTrainedModel, weight_format: WeightFormat) -> None:
    """Store in a format what the group `all` names: the decoder's linear layers and experts, adapted or not."""
    targets = find_targets(model, ["all"])
    weights = [(name, "weight") for name in targets.linears]
    weights += [(owner, leaf) for owner, _, leaf in (name.rpartition(".") for name in targets.experts)]
    for owner, leaf in weights:
        keep_stored(model.get_submodule(owner), leaf, weight_format)


def is_lora(name: str) -> bool:
    """Return whether a parameter of this name was created by `attach`."""
    return name.endswith(("lora_A", "lora_B"))


def initial_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return the full initial value of a LoRA parameter in float32: uniform (Kaiming, a = sqrt 5) for A, zeros for B.

    Drawn on the CPU from a generator seeded by (seed, name), so every topology and device gets the same numbers.
    """
    if name.endswith("lora_B"):
        return torch.zeros(shape)
    number = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
    bound = 1 / math.sqrt(shape[-1])  # kaiming_uniform_(a=sqrt 5) over fan_in
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(number))


@contextmanager
def disable_adapter(model: nn.Module) -> Iterator[None]:
    """Run the model without its LoRA parameters; they stay attached."""
    scalings = {module: module.lora_scaling for module in model.modules() if hasattr(module, "lora_scaling")}
    try:
        for module in scalings:
            module.lora_scaling = 0.0  # type: ignore[assignment]
        yield
    finally:
        for module, scaling in scalings.items():
            module.lora_scaling = scaling


@contextmanager
def perturbed_lora(model: nn.Module, noise: float) -> Iterator[None]:
    """Run the model with normal noise of this deviation in its LoRA parameters, equal on ranks that hold copies."""
    parts = {name: block_of(parameter).local for name, parameter in model.named_parameters() if is_lora(name)}
    before = {name: part.clone() for name, part in parts.items()}
    try:
        for name, part in parts.items():
            drawn = torch.randn(part.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            part.add_(drawn.to(part), alpha=noise)
        yield
    finally:
        for name, part in parts.items():
            part.copy_(before[name])
