"""How modules of experts store their weights and are called, for every layout of transformers.

The flags that transformers sets on modules of its own convention say all of that; each module outside the convention is
one entry of `LAYOUTS`. The modules' code stays transformers'.

Independent of arithmetic: `experts.py` and `composed_experts.py` compute what is described here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

from torch import Tensor, nn

GATED, UNGATED = ("gate_up_proj",), ("up_proj",)


@dataclass(frozen=True)
class ExpertLayout:
    """Names of the stacks of a module of experts, how they are stored, and how the module is called."""

    up: tuple[str, ...] = GATED
    """Names of the stacks before the gate, whose outputs are concatenated."""
    down: str | None = "down_proj"
    """Name of the stack after the gate; None for a module that is one stack without a gate."""
    transposed: frozenset[str] = frozenset()
    """Names of the stacks that are stored as [E, in, out]."""
    has_bias: bool = False
    has_gate: bool = True
    activation: str = "act_fn"
    """Name of the activation."""
    has_post_norm: bool = False
    """Whether each expert's output is normalised before it is weighed."""
    has_identity: bool = False
    """Whether numbers of experts above those of the stacks stand for experts that return their input."""
    call: Literal["tokens", "copies", "sorted"] = "tokens"
    """Arguments of the forward: (tokens, experts of each token, weights of these), or a copy of all tokens for each
    expert, weighed already, or (rows sorted by expert, number of rows of each expert)."""
    is_dispatched: bool = False
    """Whether transformers calls the registered function in place of the module's own forward."""

    @cached_property
    def stacks(self) -> tuple[str, ...]:
        """Names of the stacks, relative to the module."""
        return self.up if self.down is None else (*self.up, self.down)

    @property
    def is_conventional(self) -> bool:
        """Whether one stack before the gate and one after it are all that the module does with its rows."""
        return len(self.stacks) == 2 and self.call == "tokens" and not (self.has_post_norm or self.has_identity)

    @property
    def can_be_shared_out(self) -> bool:
        """Whether ranks can hold some of the experts each, and exchange tokens."""
        return self.call == "tokens" and not self.has_identity and not any("." in stack for stack in self.stacks)


LAYOUTS = {
    "Step3p7Experts": ExpertLayout(),
    "LongcatFlashExperts": ExpertLayout(has_identity=True),
    "Llama4TextExperts": ExpertLayout(transposed=frozenset({"gate_up_proj", "down_proj"}), call="copies"),
    "DbrxExperts": ExpertLayout(
        ("mlp.w1", "mlp.v1"), "mlp.w2", transposed=frozenset({"mlp.w2"}), activation="mlp.activation_fn"
    ),
    "JetMoeParallelExperts": ExpertLayout(("weight",), None, call="sorted"),
}
"""Layouts of the modules that do not use transformers' decorator of experts, by the name of their class."""

WITHOUT_STACKS = {
    "DogeCDMoE": "an expert is one row of two embeddings, too small for a low-rank pair",
}
"""Why the experts of a module cannot be adapted, by the name of its class."""


@dataclass(frozen=True)
class Stack:
    """One stack of experts of a model."""

    owner: nn.Module
    """Module whose parameter the stack is."""
    leaf: str
    """Name of that parameter."""
    num_experts: int
    out_features: int
    in_features: int
    is_transposed: bool


def layout_of(module: nn.Module) -> ExpertLayout | None:
    """Return the layout of a module of experts; None for other modules."""
    layout = next((LAYOUTS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in LAYOUTS), None)
    if layout is None and hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
        layout = _read_flags(module)
    return layout if layout is not None and all(_is_stack(module, name) for name in layout.stacks) else None


def _read_flags(module: Any) -> ExpertLayout:
    up = GATED if module.has_gate else UNGATED
    return ExpertLayout(
        up=up,
        transposed=frozenset({*up, "down_proj"} if module.is_transposed else ()),
        has_bias=bool(module.has_bias),
        has_gate=bool(module.has_gate),
        has_post_norm=bool(module.has_post_expert_norm),
        is_dispatched=True,
    )


def _is_stack(module: nn.Module, name: str) -> bool:
    try:
        stack = attrgetter(name)(module)
    except AttributeError:
        return False
    return isinstance(stack, Tensor) and stack.dim() in (2, 3)


def stack_of(module: Any, name: str) -> Stack:
    """Return a stack of a module of experts by its name there."""
    layout = layout_of(module)
    assert layout is not None
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    shape = getattr(owner, leaf).shape
    if len(shape) == 2:  # a matrix holds the experts one below the other
        shape = (module.num_experts, shape[0] // module.num_experts, shape[1])
    num_experts, rows, columns = shape
    is_transposed = name in layout.transposed
    out_features, in_features = (columns, rows) if is_transposed else (rows, columns)
    return Stack(owner, leaf, num_experts, out_features, in_features, is_transposed)


def is_fused_experts(module: nn.Module) -> bool:
    """Return whether `module` holds experts as stacks that are computed here."""
    return layout_of(module) is not None


def can_be_shared_out(module: nn.Module) -> bool:
    """Return whether ranks can hold some of the experts of a module each (expert parallelism)."""
    layout = layout_of(module)
    return layout is not None and layout.can_be_shared_out


def experts_of(module: nn.Module) -> int:
    """Return the number of experts of a fused experts module, over all ranks."""
    layout = layout_of(module)
    assert layout is not None
    return stack_of(module, layout.stacks[-1]).num_experts


def expert_stacks(model: nn.Module) -> Iterator[tuple[str, Stack]]:
    """Yield the full name of each stack of experts of a model, and the stack."""
    for name, module in model.named_modules():
        layout = layout_of(module)
        for stack in layout.stacks if layout is not None else ():
            yield f"{name}.{stack}", stack_of(module, stack)
