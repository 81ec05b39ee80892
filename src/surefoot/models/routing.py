"""Decisions of routers: recorded in a forward, for the load-balancing loss and the expert-load metrics, or replayed.

Works for every model that declares where its router logits are (`_can_record_outputs`). Routers return (logits,
weights, experts), whether they choose by softmax, by sigmoid with a correction bias, within groups, or by token (hash
routing); the others are one entry of `OUTPUT_FORMS` each. Routers that return no choice (DBRX) are not recorded.
Recomputation under gradient checkpointing happens outside `recording()`, so nothing is counted twice.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from surefoot.errors import ModelError
from surefoot.models.decoder_layers import indexer_names
from surefoot.models.expert_layouts import WITHOUT_STACKS
from surefoot.models.sample_layout import KeptLayout
from surefoot.models.vision import vision_parts

PROBABILITIES_WITHIN = 0.02
"""Largest difference of their sum from 1, in bfloat16."""


@dataclass(frozen=True)
class LayerRouting:
    """Decisions of one MoE layer for one batch."""

    logits: Tensor
    """Router logits [T, E], with their graph."""
    index: Tensor
    """Chosen experts, int64 [T, K]."""


def _find_router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    classes = []
    for module in model.modules():
        recorders = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type) and target.__name__ not in WITHOUT_STACKS:
                classes.append(target)
    return tuple(classes)


def router_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the decoder's router modules, in the order of a forward; empty for a dense one."""
    classes = _find_router_classes(model)
    towers = tuple(f"{name}." for name in vision_parts(model))
    names = [
        name
        for name, module in model.named_modules()
        if classes
        and (isinstance(module, classes) or type(module).__name__.endswith("Router"))
        and not name.startswith(towers)
    ]
    # A model may declare the block around its router.
    routers = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    layers = [re.sub(r"(.*\.\d+)\..*", r"\1", name) for name in routers]
    order = sorted(range(len(routers)), key=lambda i: (layers.index(layers[i]), "attention" not in routers[i]))
    return [routers[i] for i in order]


def router_weight_owners(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules that hold the matrices of routers: routers, or linear layers in them."""
    routers = [(name, model.get_submodule(name)) for name in router_names(model)]
    return [
        ".".join(filter(None, (name, inner)))
        for name, router in routers
        for inner, module in router.named_modules()
        if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.dim() == 2
    ]


def _read_scores_of_all(router: Any, output: Any) -> tuple[Tensor, Tensor]:
    scores, logits = output
    return logits, (scores > 0).int().argsort(dim=-1, descending=True, stable=True)[:, : router.top_k]


def _read_sorted_rows(router: Any, output: Any) -> tuple[Tensor, Tensor]:
    order_S, _, _, sizes, logits = output
    experts = torch.arange(len(sizes), device=logits.device)
    ids_S = experts.repeat_interleave(torch.tensor(sizes, device=logits.device), output_size=len(order_S))
    return logits, torch.empty_like(order_S).index_copy_(0, order_S, ids_S).view(-1, router.top_k)


OUTPUT_FORMS: dict[str, Callable[[Any, Any], tuple[Tensor, Tensor]]] = {
    "Llama4Router": _read_scores_of_all,
    "JetMoeTopKGating": _read_sorted_rows,
}
"""Readers of (logits, experts) from the outputs of routers of other forms, by the name of their class."""


class _Slot:
    """Latest decisions of one router. A list for all routers would make torch.compile compile each layer anew."""

    def __init__(self) -> None:
        self.is_open = False
        self.kept: tuple[Tensor, Tensor] | None = None

    def keep(self, router: nn.Module, _inputs: Any, output: Any) -> None:
        """Store the router's output; a forward hook."""
        if not self.is_open:
            return
        if (read := OUTPUT_FORMS.get(type(router).__name__)) is not None:
            self.kept = read(router, output)
        elif isinstance(output, tuple) and len(output) >= 3 and not output[2].is_floating_point():
            self.kept = output[0], output[2]


class RoutingRecorder:
    """Recorder of each router's logits and choices while `recording()` is active."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.names = router_names(model)
        self.num_experts = _count_choices(model, self.names)
        """Number of experts that each router chooses among; None if that differs."""
        self._slots = [_Slot() for _ in self.names]
        for name, slot in zip(self.names, self._slots, strict=True):
            model.get_submodule(name).register_forward_hook(slot.keep)

    @contextmanager
    def recording(self) -> Iterator[list[LayerRouting]]:
        """Record the forward inside the block: one `LayerRouting` per layer, in order, filled at the block's end."""
        layers: list[LayerRouting] = []
        for slot in self._slots:
            slot.is_open = True
        try:
            yield layers
            layers += [LayerRouting(*slot.kept) for slot in self._slots if slot.kept is not None]
        finally:
            for slot in self._slots:
                slot.is_open, slot.kept = False, None


def _count_choices(model: PreTrainedModel, names: list[str]) -> int | None:
    matrices = [[p for p in model.get_submodule(name).parameters() if p.dim() == 2] for name in names]
    counts = {of_router[-1].shape[0] for of_router in matrices if of_router}
    return int(counts.pop()) if len(counts) == 1 else None


class ReplayedRouting(TorchDispatchMode):
    """Context in which routers choose given experts; weights and gradients are those of their own logits.

    Routing replay: a token on which rollout and training choose other experts has another probability in each of them,
    whatever the weights (arXiv:2507.18071, sec. 5.3; arXiv:2510.11370).
    """

    def __init__(self, experts: Tensor, num_experts: int | None = None) -> None:
        """Shapes: experts int [T, layers, K], in the order of the forward's tokens; below 0 the router chooses.

        `num_experts`: number of experts that a router chooses among. It tells the choice of experts from the choice of
        their groups, which some routers take first.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._replay = experts.long().unbind(1)
        self._num_experts = num_experts
        self.own: list[Tensor] = []
        """Experts that each layer's router would have chosen: int64 [T, K]."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None and len(self.own) != len(self._replay):
            raise ModelError(
                f"routing_replay: {len(self.own)} routers chose, where {len(self._replay)} had choices to repeat. "
                "Set routing_replay: none."
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        is_choice = func is torch.ops.aten.topk.default and self._num_experts in (None, args[0].shape[-1])
        if not is_choice:
            return output
        own = output[1]
        replayed = self._replay[len(self.own)] if len(self.own) < len(self._replay) else None
        if replayed is None or (replayed.numel(), replayed.shape[-1]) != (own.numel(), own.shape[-1]):
            raise ModelError(
                f"routing_replay: router {len(self.own)} chooses {tuple(own.shape)} (tokens, experts), but there are "
                f"choices of {len(self._replay)} routers for it to repeat, of shape {tuple(self._replay[0].shape)}. "
                "Set routing_replay: none."
            )
        self.own.append(own.view_as(replayed))
        index = torch.where(replayed < 0, own.view_as(replayed), replayed).view_as(own)
        return args[0].gather(-1, index), index


def check_recorded(layers: list[LayerRouting], names: list[str]) -> None:
    """Check that a forward recorded the inputs of the load-balancing loss. Waits for the device.

    Raises: ModelError for routers that do not return their choices as (logits, weights, indices).
    """
    if len(layers) != len(names):
        raise ModelError(
            f"router_aux_loss_coef: {len(layers)} of the {len(names)} routers of this model report their choices in "
            f"a known form ({names[0]} does). Drop it."
        )
    first = layers[0].logits.detach().float()
    if bool((first >= 0).all()) and bool(((first.sum(-1) - 1).abs() < PROBABILITIES_WITHIN).all()):
        raise ModelError(
            f"router_aux_loss_coef: the routers of this model ({names[0]}) return probabilities, not logits: "
            "the loss would take the softmax again. Drop it."
        )


def expert_counts(layers: list[LayerRouting], num_experts: int, is_counted: Tensor | None = None) -> Tensor:
    """Count the rows sent to each expert: int64 [layers, E]. `is_counted`: whether each token is, bool [T]."""
    first = layers[0].index
    weights = (first.new_ones(1) if is_counted is None else is_counted.to(first.dtype))[:, None]
    counts = []
    for _, alike in groupby(layers, key=lambda layer: layer.index.shape):  # layers that choose as many: all at once
        index = torch.stack([layer.index for layer in alike])
        # bincount would make the host wait for the device.
        of_layers = index.new_zeros(len(index), num_experts)
        counts.append(of_layers.scatter_add_(1, index.flatten(1), weights.expand_as(index).flatten(1)))
    return torch.cat(counts)


def load_balancing_loss(layers: list[LayerRouting], counts: Tensor, num_tokens: int) -> Tensor:
    """Return this batch's share of the load-balancing loss of the global batch, averaged over layers.

    Per layer E * sum_e f_e P_e, where f_e = counts_e / num_tokens over the whole global batch and P_e the mean router
    probability over it; the shares of all batches and ranks add up to the loss. It is K when experts are used evenly.
    Layers are not pooled, so one layer's imbalance cannot hide another's.

    Shapes: counts [layers, E] over the global batch; num_tokens over the global batch.
    Source: Fedus et al., https://arxiv.org/abs/2101.03961, equations 4-6
    """
    shares = []
    for layer, layer_counts in zip(layers, counts, strict=True):
        probabilities = torch.softmax(layer.logits.float(), dim=-1)
        fraction = layer_counts.to(probabilities.dtype) / num_tokens
        shares.append(layer.logits.shape[-1] * (probabilities.sum(0) / num_tokens * fraction).sum())
    return torch.stack(shares).mean()


class KeptChoices:
    """A `context_fn` for `torch.utils.checkpoint`: a recomputation repeats the experts chosen in the first forward.

    A router that decides differently the second time (other kernels, another reduction order) would change the number
    of rows an expert gets, and with it the saved shapes and every expert's gradient. Only the indices are kept: the
    weights are computed again from them, because routers normalise them in place. The samples of the row are those of
    the first forward, too.

    Choices are intercepted only in the modules that make them, because a dispatch mode costs time in every operation:
    in a router if it returned its choice so far, else in the block around it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Add hooks to the modules that may choose."""
        self._routers: dict[nn.Module, bool] = {}
        """Whether each router has returned its own choice."""
        self._blocks: dict[nn.Module, list[nn.Module]] = {}
        """The routers in each block."""
        self._indexers = [model.get_submodule(name) for name in indexer_names(model)]
        """Parts of sparse attention that choose tokens."""
        for name in router_names(model):
            router = model.get_submodule(name)
            self._routers[router] = False
            self._blocks.setdefault(model.get_submodule(name.rpartition(".")[0]), []).append(router)
            router.register_forward_hook(torch.compiler.disable(self._observe))
        modules = (*self._routers, *self._blocks, *self._indexers)
        self._hooks = {module: _intercept_in(module, partial(self._chooses, module)) for module in modules}

    def __call__(self) -> tuple["_FirstForward", "_Recomputation"]:
        """Return the contexts of the first forward of a layer and of its recomputation."""
        chosen: list[Tensor] = []
        return _FirstForward(_RememberChoices(chosen)), _Recomputation(_RepeatChoices(chosen))

    def run_eagerly(self) -> None:
        """Leave the modules that choose out of layers that are compiled: what a mode intercepts is not compiled."""
        for module, hooks in self._hooks.items():
            if self._chooses(module):
                module.forward = torch.compiler.disable(module.forward)
            else:
                for hook in hooks:
                    hook.remove()

    def _observe(self, router: nn.Module, _inputs: Any, output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        self._routers[router] = any(isinstance(part, Tensor) and not part.is_floating_point() for part in results)

    def _chooses(self, module: nn.Module) -> bool:
        if module in self._blocks:
            return not all(self._routers[router] for router in self._blocks[module])
        return self._routers.get(module, True)


class _ChoiceMode(TorchDispatchMode):
    """A mode that intercepts choices, active in the modules that make them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_entered = False


_mode: _ChoiceMode | None = None
"""The mode of the forward in progress of a layer under gradient checkpointing."""


def _intercept_in(module: nn.Module, is_wanted: Callable[[], bool]) -> list[RemovableHandle]:
    """Activate the current mode in the forwards of a module, where it is wanted and no outer module has done so."""
    entered: list[_ChoiceMode] = []

    def enter(_module: nn.Module, _inputs: Any) -> None:
        if _mode is not None and not _mode.is_entered and is_wanted():
            _mode.is_entered = True
            _mode.__enter__()  # type: ignore[no-untyped-call]
            entered.append(_mode)

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        if entered:
            mode = entered.pop()
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            mode.is_entered = False

    return [
        module.register_forward_pre_hook(torch.compiler.disable(enter)),
        # A recomputation ends by raising, when it has all it needs.
        module.register_forward_hook(torch.compiler.disable(leave), always_call=True),
    ]


class _FirstForward:
    """The context of a layer's forward in which a mode intercepts choices."""

    def __init__(self, mode: _ChoiceMode) -> None:
        self._own = mode
        self._before: _ChoiceMode | None = None

    def __enter__(self) -> None:
        global _mode
        self._before, _mode = _mode, self._own

    def __exit__(self, *_: object) -> None:
        global _mode
        _mode = self._before


class _Recomputation(_FirstForward):
    """The same for a recomputation, which has the samples of the first forward."""

    def __init__(self, mode: "_RepeatChoices") -> None:
        super().__init__(mode)
        self._repeat, self._samples = mode, KeptLayout()

    def __enter__(self) -> None:
        self._repeat.next = 0
        self._samples.__enter__()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._samples.__exit__()


class _RememberChoices(_ChoiceMode):
    def __init__(self, chosen: list[Tensor]) -> None:
        super().__init__()
        self._chosen = chosen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            self._chosen.append(output[1])
        return output


class _RepeatChoices(_ChoiceMode):
    def __init__(self, chosen: list[Tensor]) -> None:
        super().__init__()
        self._chosen = chosen
        self.next = 0
        """Number of choices of this recomputation so far."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.topk.default:
            return func(*args, **(kwargs or {}))
        index = self._chosen[self.next]
        self.next += 1
        dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", -1)
        return args[0].gather(dim, index), index
