"""The probe of a new model: two samples in one row against each of them alone, with equal inputs.

Each part of the decoder is compared by itself, then the logits of the whole model.

Independent of data, methods and training.
"""

import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from transformers import PreTrainedModel

from surefoot.errors import ModelError, one_line
from surefoot.models.attention import has_packed_attention, own_implementation
from surefoot.models.decoder_layers import class_name, decoder_layers
from surefoot.models.expert_layouts import is_fused_experts
from surefoot.models.per_sample import CallShapes, same_rows
from surefoot.models.pretrained import BAD_CONFIG
from surefoot.models.routing import router_names
from surefoot.models.sample_layout import ARGUMENT, SampleLayout, samples_are
from surefoot.models.score_head import token_outputs
from surefoot.models.vision import attention, image_tokens
from surefoot.system.allocators import is_out_of_memory

PROBE_LENGTHS = (13, 10)
"""Lengths of the two samples of the probe; the second is changed where its sum would be a size of the model."""
TOLERANCE = {torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.05
"""Largest relative difference (of norms) between a sample in a row and alone that rounding explains."""
LOGITS_TOLERANCE = 0.2
"""The same for logits in low precision, after every layer's rounding and an expert chosen otherwise here and there."""
AHEAD_TOLERANCE = 0.01
"""Largest relative difference in low precision that tokens may make to those before them. Both rows have one shape: on
the CPU the difference is 0 for every causal architecture, and 0.07 for a BERT of 12 layers that attends both ways. Rows
of experts are grouped with those of other tokens, and kernels may round them otherwise: `LOGITS_TOLERANCE` holds there.
"""
MISSING_KERNELS = re.compile(r"keep packed sequences apart without `([^`]+)`")
"""transformers' message for a kernel that is not installed."""
OTHER_TYPES = re.compile(r"scalar type|same dtype|BFloat16|dtypes? match", re.IGNORECASE)
"""torch's messages for an op on tensors of different types."""
MOST_TOKENS = 1000
"""Number of tokens of the vocabulary that the probe draws from."""


class MissingKernelError(Exception):
    """A kernel that would be told where samples end is not installed. The message is the name of its package."""


class MixingProbe:
    """Two samples of random tokens in one row."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype
        self.tolerance = TOLERANCE.get(dtype, LOGITS_TOLERANCE)
        sizes = {size for parameter in model.parameters() for size in parameter.shape}
        sizes |= {value for value in model.config.get_text_config().to_dict().values() if isinstance(value, int)}
        first, second = PROBE_LENGTHS
        while first + second in sizes:  # a dimension of this size must be that of the tokens
            second += 1
        self._device = model.device
        self._samples = SampleLayout.of([first, second], self._device)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        pad = getattr(model.config.get_text_config(), "pad_token_id", None)
        special = image_tokens(model) | {pad}
        usable = [token for token in range(min(vocabulary, MOST_TOKENS)) if token not in special]
        chosen = torch.randint(0, len(usable), (first + second,), generator=torch.Generator().manual_seed(0))
        self._ids = torch.tensor(usable)[chosen].to(self._device)

    def find_mixing(self, decoder: nn.Module) -> dict[str, CallShapes]:
        """Return the parts of the decoder in which samples mix, and the shapes of their calls."""
        is_unknown = not has_packed_attention(self._model)
        observers = {}
        numbering = _RowNumbering(self._samples.num_tokens)
        with numbering, ExitStack() as hooks:
            for name, module in _parts_to_probe(self._model, decoder):
                observers[name] = observer = _PartObserver(self._samples, is_unknown, numbering)
                hooks.callback(module.register_forward_pre_hook(observer.begin).remove)
                handle = module.register_forward_hook(observer, prepend=True, with_kwargs=True)
                hooks.callback(handle.remove)
            self._together = self.run_row()
        tables = {name for name in observers if self.has_table_of_pairs(decoder.get_submodule(name))}
        return {name: observer.shapes for name, observer in observers.items() if observer.mixes or name in tables}

    def has_table_of_pairs(self, module: nn.Module) -> bool:
        """Return whether a part has a table of all pairs of positions, which ends at those of the longest sample."""
        longest = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        return any(buffer.shape[-2:] == (longest, longest) for buffer in module.buffers())

    def observe_parts(self, decoder: nn.Module) -> dict[str, CallShapes]:
        """Return the shapes of the calls of the parts of the decoder in a forward of the row."""
        return self._observe_shapes(dict(_parts_to_probe(self._model, decoder)))

    def run_row(self) -> Tensor:
        """Return the logits of both samples in a row. Shapes: [T, V]."""
        return self._run(self._ids, self._samples)

    def observe_shapes(self, module: nn.Module) -> CallShapes:
        """Return the shapes of the calls of a module in a forward of the row."""
        return self._observe_shapes({"": module})[""]

    def _observe_shapes(self, modules: Mapping[str, nn.Module]) -> dict[str, CallShapes]:
        shapes = {name: CallShapes() for name in modules}

        def observe(name: str, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            shapes[name].observe(args, kwargs, output, self._samples.num_tokens)

        with ExitStack() as hooks:
            for name, module in modules.items():
                handle = module.register_forward_hook(partial(observe, name), with_kwargs=True)
                hooks.callback(handle.remove)
            self.run_row()
        return shapes

    def find_idle_parts(self, decoder: nn.Module) -> list[nn.Module]:
        """Return the parts with parameters that return nothing for a sample of two tokens, outermost ones alone.

        They compute from a number of tokens on, as those that compress keys do (DeepSeek-V4).
        """
        idle: list[nn.Module] = []

        def observe(module: nn.Module, _args: Any, output: Any) -> None:
            tensors = [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            if tensors and tensors[0].numel() == 0:
                idle.append(module)

        with ExitStack() as hooks:
            for module in decoder.modules():
                if next(module.parameters(), None) is not None:
                    hooks.callback(module.register_forward_hook(observe).remove)
            self._run(self._ids[:2], SampleLayout.of([2], self._device))
        inner = {part for module in idle for part in module.modules() if part is not module}
        return [module for module in dict.fromkeys(idle) if module not in inner]

    def measure_mixing(self, *, is_changed: bool) -> float:
        """Return the largest difference of a sample's logits from those that it has alone, relative to their norm.

        `is_changed`: whether the model was changed since its parts were looked at.
        """
        lengths = self._samples.lengths
        together = (self.run_row() if is_changed else self._together).split(lengths)
        alone = [self._run_alone(ids) for ids in self._ids.split(lengths)]
        return max(map(_relative_difference, together, alone))

    def looks_ahead(self) -> bool:
        """Return whether the logits of a sample change with a token that follows them."""
        ids = self._ids[: self._samples.lengths[0]]
        half = len(ids) // 2
        others = self._ids[-(len(ids) - half) :]
        before, after = (self._run_alone(each)[:half] for each in (ids, torch.cat([ids[:half], others])))
        tolerance = TOLERANCE.get(self._dtype, AHEAD_TOLERANCE)
        return _relative_difference(after, before) > (self.tolerance if router_names(self._model) else tolerance)

    @contextmanager
    def _forward_errors(self, ids: Tensor) -> Iterator[None]:
        """Turn what a forward raises into a ModelError: the model has its own weights and ordinary tokens."""
        try:
            yield
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise
        except BAD_CONFIG as error:
            if is_out_of_memory(error):
                raise
            if missing := MISSING_KERNELS.search(str(error)):
                raise MissingKernelError(missing[1].replace("_", "-")) from error
            place = traceback.extract_tb(error.__traceback__)[-1]
            advice = "Check the sizes in config.json, or take a model that transformers runs."
            if OTHER_TYPES.search(str(error)):
                advice = "Its code works in float32 alone: set dtype: float32."
            raise ModelError(
                f"{class_name(self._model)} cannot be run on a row of {len(ids)} tokens: {one_line(error)} "
                f"({Path(place.filename).name}:{place.lineno}). {advice}"
            ) from error

    @torch.no_grad()
    def _run_alone(self, ids: Tensor) -> Tensor:
        """Return the logits of a sample by the model's own attention and positions. Shapes: ids [T] -> [T, V]."""
        samples = SampleLayout.of([len(ids)], self._device)
        with (
            attention(self._model, own_implementation(type(self._model), self._model.config)),
            self._forward_errors(ids),
        ):
            return token_outputs(self._model, input_ids=ids[None], use_cache=False, **{ARGUMENT: samples})[0].float()

    @torch.no_grad()
    def _run(self, ids: Tensor, samples: SampleLayout) -> Tensor:
        """Return the logits of a row of samples. Shapes: ids [T] -> [T, V]."""
        positions = torch.cat([torch.arange(length) for length in samples.lengths])[None].to(self._device)
        arguments: dict[str, Any] = {"position_ids": positions, "attention_mask": None, "use_cache": False}
        with self._forward_errors(ids):
            return token_outputs(self._model, input_ids=ids[None], **arguments, **{ARGUMENT: samples})[0].float()


def _parts_to_probe(model: PreTrainedModel, decoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of the parts of a decoder that are probed: those that layers consist of.

    Parts with experts are looked into: what runs once per sample may not hold experts, which all ranks call together.
    Routers and experts themselves compute each token by itself.
    """
    routers = [model.get_submodule(name) for name in router_names(model)]
    layers = decoder_layers(model)

    def expand(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        is_list |= any(part is layers for part in module.modules())
        holds_experts = any(part is router for part in module.modules() for router in routers)
        if is_fused_experts(module) or any(module is router for router in routers):
            return
        is_layer = any(module is each for each in layers)
        if not (is_list or is_layer or holds_experts):
            yield name, module
            return
        for leaf, child in module.named_children():
            yield from expand(f"{name}.{leaf}", child)

    for name, child in decoder.named_children():
        yield from expand(name, child)


class _RowNumbering(TorchFunctionMode):
    """Counts the calls of `torch.arange` over all tokens of the row, by which a part makes its own positions.

    They are not the positions in a sample, which may show only after thousands of tokens: Llama 4 scales the queries
    of some layers by them from position 8,192 on.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.arange and len(output) == self._num_tokens:
            self.count += 1
        return output


class _PartObserver:
    """Hooks that compare what a part of the decoder computes for two samples in a row with each alone."""

    def __init__(self, samples: SampleLayout, is_unknown: bool, numbering: _RowNumbering) -> None:
        self._samples = samples
        self._is_unknown = is_unknown
        """Whether the part may begin to mix samples only after many tokens, as its model computes attention itself."""
        self._numbering = numbering
        self._count_before = 0
        self._is_running = False
        self.shapes = CallShapes()
        self.mixes = False

    def begin(self, _module: nn.Module, _args: Any) -> None:
        """Note where the part begins."""
        if not self._is_running:
            self._count_before = self._numbering.count

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Compare when the part has ended."""
        if self._is_running:
            return
        numbers_row = self._numbering.count > self._count_before
        self.shapes.observe(args, kwargs, output, self._samples.num_tokens)
        if not self._rows(output) or not any(self.shapes.arguments.values()):
            return
        self._is_running = True
        try:
            self.mixes = self.mixes or numbers_row or self._differs(module, args, kwargs, output)
        finally:
            self._is_running = False

    def _differs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        for sample, span in enumerate(self._samples.spans):
            if self._is_given_row_numbers(args, kwargs, sample):
                return True
            alone = self.shapes.run_sample(module.forward, args, kwargs, self._samples, sample)
            together = self.shapes.rows(output, span)
            if not all(map(_are_equal, self._rows(together), self._rows(alone))):
                return True
        return self._is_unknown and self._reads_other_tokens(module, args, kwargs, output)

    def _is_given_row_numbers(self, args: Any, kwargs: Any, sample: int) -> bool:
        """Return whether each token of a sample is given numbers of tokens of the whole row, as another layer chose.

        Running the part with them would be an error that ends the process on a GPU.
        """
        length = self._samples.lengths[sample]
        leaves = _pytree.tree_leaves(self.shapes.slice_arguments(args, kwargs, self._samples, sample))
        lists = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in (torch.int32, torch.int64)]
        return any(leaf.dim() > 1 and leaf.shape[-2] == length and int(leaf.max()) >= length for leaf in lists)

    def _rows(self, output: Any) -> list[Tensor]:
        """Return the results that have a row per token."""
        leaves, _ = _pytree.tree_flatten_with_path(output)
        return [leaf for path, leaf in leaves if len(self.shapes.results.get(path, ())) == 1]

    def _reads_other_tokens(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
        """Return whether the results of other tokens change with the states of the first one."""
        leaves, structure = _pytree.tree_flatten_with_path((args, kwargs))
        values = [leaf for _, leaf in leaves]
        for index, (path, leaf) in enumerate(leaves):
            dims = self.shapes.arguments.get(path, ())
            if len(dims) == 1 and leaf.is_floating_point():
                values[index] = leaf.clone()
                values[index].narrow(dims[0], 0, 1).add_(1.0)
                break
        changed_args, changed_kwargs = _pytree.tree_unflatten(values, structure)
        with samples_are(self._samples):
            changed = module.forward(*changed_args, **changed_kwargs)
        rest = slice(1, self._samples.num_tokens)
        before, after = (self._rows(self.shapes.rows(each, rest)) for each in (output, changed))
        return not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _relative_difference(together: Tensor, alone: Tensor) -> float:
    """Return the norm of the difference of a sample in a row from the sample alone, relative to the latter's norm.

    Logits that are not finite alone tell nothing about samples: the first step names what they come from.
    """
    if not alone.isfinite().all():
        return 0.0
    return float((together - alone).norm() / alone.norm()) if together.isfinite().all() else inf


def _are_equal(together: Tensor, alone: Tensor) -> bool:
    """Return whether a result of a sample in a row is that of the sample alone, up to rounding.

    Results of other widths, such as the keys that an indexer chose among those of a row, are compared by their effect.
    """
    if alone.is_complex():
        together, alone = torch.view_as_real(together), torch.view_as_real(alone)
    tolerance = TOLERANCE.get(alone.dtype, LOW_PRECISION_TOLERANCE)
    return together.shape != alone.shape or same_rows(together.float(), alone.float(), tolerance)
