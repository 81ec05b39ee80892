"""Optimizers, by the names of `optim`. Each works on sharded parameters as on whole ones.

State is made of tensors that are sharded as their parameter, or are whole on each rank, so that checkpoints can save
and load it on any topology. AdamW and SGD are torch's. The others are written here because their libraries do not take
sharded tensors, or not stacks of experts.

Sources: Lion https://arxiv.org/abs/2302.06675; Adafactor https://arxiv.org/abs/1804.04235; Muon
https://kellerjordan.github.io/posts/muon/ and https://arxiv.org/abs/2502.16982; eight bits
https://arxiv.org/abs/2110.02861.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from surefoot.config import RunConfig
from surefoot.models.dtensor_blocks import LocalShard, block_of
from surefoot.models.lora import IN_LAYER
from surefoot.models.quantization.bitsandbytes_ops import operators

Groups = list[dict[str, Any]]
MOMENTS = ("exp_avg", "exp_avg_sq")
MUON_MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
NEWTON_SCHULZ_STEPS = 5
RMS_OF_ADAMW = 0.2
"""Usual root mean square of AdamW's updates, which Muon's are scaled to, so that both take the same learning rates."""
LARGEST_BLOCK, SMALLEST_BLOCK = 256, 64
"""Numbers of a row that share a factor in eight bits. Rows that no such block divides keep float32."""


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: RunConfig) -> Optimizer:
    """Build the optimizer of a run. Matrices and stacks of matrices are decayed; norms and biases are not.

    With `loraplus_lr_ratio`, the B of low-rank pairs have a learning rate of their own: `lr_ratio` of their group.
    """
    return BUILDERS[config.optim](list(_group(parameters.items(), config)), config)


def _group(named: Iterable[tuple[str, nn.Parameter]], config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield groups of parameters of one weight decay, learning rate and kind."""
    groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    for name, parameter in named:
        is_decayed = parameter.dim() >= 2 and not name.endswith("bias")
        ratio = config.loraplus_lr_ratio or 1.0 if name.endswith("lora_B") else 1.0
        groups.setdefault((is_decayed, ratio, _is_matrix(name, parameter)), []).append(parameter)
    for (is_decayed, ratio, is_matrix), members in sorted(groups.items(), key=lambda group: group[0], reverse=True):
        decay = config.weight_decay if is_decayed else 0.0
        yield {"params": members, "weight_decay": decay, "lr_ratio": ratio, "is_matrix": is_matrix}


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix inside a layer, or a stack of experts' matrices."""
    is_stack = parameter.dim() == 3 and "expert" in name
    return IN_LAYER.search(name) is not None and not name.endswith("bias") and (parameter.dim() == 2 or is_stack)


def _build_adamw(groups: Groups, config: RunConfig) -> Optimizer:
    options: dict[str, Any] = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    return torch.optim.AdamW(groups, lr=float(config.learning_rate), fused=True, **options)


def _build_sgd(groups: Groups, config: RunConfig) -> Optimizer:
    return torch.optim.SGD(groups, lr=float(config.learning_rate))


class _InTurn(Optimizer, ABC):
    """An optimizer that updates one parameter after the other, from its gradient and its state."""

    def __init__(self, groups: Groups, config: RunConfig) -> None:
        self._betas, self._eps = (config.adam_beta1, config.adam_beta2), config.adam_epsilon
        super().__init__(groups, {"lr": float(config.learning_rate), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    @abstractmethod
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Update a parameter in place; its state is empty at first."""


class Lion(_InTurn):
    """The sign of a moving average, as a step of one size for all weights."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        average = state["exp_avg"]
        update = average.mul(self._betas[0]).add_(gradient, alpha=1 - self._betas[0]).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        average.mul_(self._betas[1]).add_(gradient, alpha=1 - self._betas[1])


class Adafactor(_InTurn):
    """Squares of gradients by the means of rows and columns, with the learning rate of the run, as transformers has it
    with `scale_parameter=False, relative_step=False`."""

    SQUARES_FLOOR, CLIP, DECAY = 1e-30, 1.0, -0.8

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        is_factored = parameter.dim() >= 2
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the host, which needs its value
        state["step"] += 1
        beta = 1.0 - float(state["step"]) ** self.DECAY
        squares = gradient.square().add_(self.SQUARES_FLOOR)
        if is_factored:
            rows, columns = (_mean(squares, dim) for dim in (-1, -2))
            for name, mean in (("rows", rows), ("columns", columns)):
                state[name] = state[name].lerp_(mean, 1 - beta) if name in state else mean
            row_factor = (state["rows"] / _mean(state["rows"], -2)).rsqrt_()
            update = gradient * row_factor * state["columns"].rsqrt()
        else:
            state["squares"] = state["squares"].lerp_(squares, 1 - beta) if "squares" in state else squares
            update = gradient * state["squares"].rsqrt()
        rms = (_sum(update.square()) / update.numel()).sqrt_()
        update.div_((rms / self.CLIP).clamp_(min=1.0))
        if isinstance(update, DTensor) and isinstance(parameter, DTensor):  # that of a single row is on each rank
            update = update.redistribute(placements=parameter.placements)
        parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


def _sum(tensor: Tensor) -> Tensor:
    return _complete(tensor.sum())


def _mean(tensor: Tensor, dim: int) -> Tensor:
    """Return the means over a dimension, which stays with size 1. Sums, because shards may differ in size."""
    return _complete(tensor.sum(dim, keepdim=True)).div_(tensor.shape[dim])


def _complete(tensor: Tensor) -> Tensor:
    """Return a tensor whose parts are summed over the ranks, if they are not yet."""
    if not isinstance(tensor, DTensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)


class Muon(_InTurn):
    """Momentum whose singular values are made equal, matrix by matrix, for matrices of layers; AdamW for the rest.

    A matrix that is cut over ranks is gathered for it. Stacks of experts are cut by expert, and are not.
    """

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        learning_rate = group["lr"]
        if not group["is_matrix"]:
            _update_adamw(parameter, gradient, state, learning_rate, group["weight_decay"], self._betas, self._eps)
            return
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
        direction = gradient.lerp(momentum, MUON_MOMENTUM)
        own = block_of(parameter)
        is_cut = isinstance(direction, DTensor) and parameter.dim() == 2
        whole = direction.full_tensor() if isinstance(direction, DTensor) and is_cut else block_of(direction).local
        update = orthogonalise(whole)
        height, width = parameter.shape[-2:]
        scale = RMS_OF_ADAMW * max(height, width) ** 0.5
        own.local.mul_(1 - learning_rate * group["weight_decay"])
        own.local.add_(update[own.span] if is_cut else update, alpha=-learning_rate * scale)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices [.., m, n] with about equal singular values, by five steps of Newton and Schulz in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / x.flatten(-2).norm(dim=-1)[..., None, None].clamp(min=1e-7)
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _update_adamw(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    learning_rate: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state |= {name: torch.zeros_like(parameter) for name in MOMENTS}
    state["step"] += 1
    first, second = (state[name] for name in MOMENTS)
    first.lerp_(gradient, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    _apply_adamw(parameter, first, second, float(state["step"]), learning_rate, decay, betas, eps)


def _apply_adamw(
    parameter: Tensor,
    first: Tensor,
    second: Tensor,
    step: float,
    learning_rate: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update a parameter by its two moments."""
    corrections = [1 - beta**step for beta in betas]
    parameter.mul_(1 - learning_rate * decay)
    denominator = (second / corrections[1]).sqrt_().add_(eps)
    parameter.addcdiv_(first, denominator, value=-learning_rate / corrections[0])


class AdamW8bit(_InTurn):
    """AdamW whose moments are stored in eight bits, in blocks of one row, so that they are sharded as rows are."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        block_size = find_block_size(parameter)
        if block_size is None:
            decay = group["weight_decay"]
            _update_adamw(parameter, gradient, state, group["lr"], decay, self._betas, self._eps)
            return
        if not state:
            state |= _create_eight_bits(parameter, block_size)
        state["step"] += 1
        local, own_gradient = block_of(parameter).local, block_of(gradient).local
        if not local.numel():
            return
        moments = [self._read(state, name, local.shape, block_size) for name in MOMENTS]
        moments[0].lerp_(own_gradient, 1 - self._betas[0])
        moments[1].mul_(self._betas[1]).addcmul_(own_gradient, own_gradient, value=1 - self._betas[1])
        step, decay = float(state["step"]), group["weight_decay"]
        _apply_adamw(local, moments[0], moments[1], step, group["lr"], decay, self._betas, self._eps)
        for name, moment in zip(MOMENTS, moments, strict=True):
            codes, factors = operators().quantize_blockwise(moment, _get_map(name, moment.device), block_size)
            block_of(state[name]).local.copy_(codes.view(moment.shape))
            block_of(state[f"{name}_absmax"]).local.copy_(factors.view(*moment.shape[:-1], -1))

    @staticmethod
    def _read(state: Mapping[str, Any], name: str, shape: torch.Size, block_size: int) -> Tensor:
        codes, factors = (block_of(state[part]).local for part in (name, f"{name}_absmax"))
        levels = _get_map(name, codes.device)
        read = operators().dequantize_blockwise(codes, factors.reshape(-1), levels, block_size, torch.float32)
        moment: Tensor = read.view(shape)
        return moment


def find_block_size(parameter: Tensor) -> int | None:
    """Return the numbers that share a factor in eight bits; None for a parameter that keeps moments in float32."""
    if parameter.dim() < 2:
        return None
    size = LARGEST_BLOCK
    while size >= SMALLEST_BLOCK:
        if parameter.shape[-1] % size == 0:
            return size
        size //= 2
    return None


def _create_eight_bits(parameter: Tensor, block_size: int) -> dict[str, Any]:
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32)}
    width = parameter.shape[-1] // block_size
    for name in MOMENTS:
        zero = int(_get_map(name, torch.device("cpu")).abs().argmin())
        state[name] = torch.full_like(parameter, zero, dtype=torch.uint8)
        state[f"{name}_absmax"] = torch.zeros_like(parameter[..., :width])
    return state


@cache
def _get_map(name: str, device: torch.device) -> Tensor:
    """Return the 256 levels of a moment; the second is never negative."""
    operators()
    from bitsandbytes.functional import create_dynamic_map

    levels: Tensor = create_dynamic_map(signed=name == MOMENTS[0])
    return levels.to(device)


BUILDERS: dict[str, Callable[[Groups, RunConfig], Optimizer]] = {
    "adamw": _build_adamw,
    "adamw_8bit": AdamW8bit,
    "adafactor": Adafactor,
    "muon": Muon,
    "lion": Lion,
    "sgd": _build_sgd,
}
"""Name in `optim` -> what builds the optimizer of groups of parameters."""


STATE_OF_ALL: dict[str, tuple[str, ...]] = {"adamw": ("step", *MOMENTS), "lion": ("exp_avg",), "sgd": ()}
"""Optimizer -> the state of each of its parameters, where it is the same for all. `step` is one number."""


def state_blocks(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, LocalShard]:
    """Return this rank's parts of an optimizer's state, by the names that checkpoints give them: `exp_avg.NAME`."""
    return {
        f"{part}.{name}": block_of(value)
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for part, value in optimizer.state[parameter].items()
    }


def create_state(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Create the state that the first step creates, without a change of the weights, for a checkpoint to fill.

    Collective, as a step is.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
