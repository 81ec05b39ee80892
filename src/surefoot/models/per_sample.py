"""A module that runs once per sample of a row.

Which dimensions of its arguments and results count tokens is observed in a call of known length (`CallShapes`), so
nothing has to be known about the module.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._pytree import MappingKey, SequenceKey

from surefoot.errors import ModelError
from surefoot.models.sample_layout import SampleLayout, current_layout, samples_are
from surefoot.models.sample_masks import SampleMask

KERNEL_ARGUMENTS = ("cu_seq_lens_q", "seq_idx")
"""Arguments by which kernels know where samples end; a layer that runs once per sample does not need them."""

ALIBI = "alibi"
COUNTED_FROM_THE_FIRST: tuple[Any, ...] = (MappingKey(ALIBI), MappingKey("attention_mask"))
"""Arguments of a layer with ALiBi whose values are counted, and rounded, from the first token of the row on: BLOOM's
terms, Falcon's terms and the mask that holds them. A sample is given those of as many first tokens."""

Path = tuple[Any, ...]


@dataclass(frozen=True)
class CallShapes:
    """The dimensions that count tokens in a call's arguments and results, by their place in them.

    Dimensions are negative: tensors of the same meaning may have more leading dimensions in another call.
    """

    arguments: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    results: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of_position_embedding(cls) -> "CallShapes":
        """Return those of transformers' RoPE modules, by position or by name: (x, position_ids) -> (cos, sin), or one
        complex tensor (DeepSeek V2, Llama 4)."""
        arguments: dict[Path, tuple[int, ...]] = {
            (SequenceKey(0), SequenceKey(0)): (-2,),
            (SequenceKey(0), SequenceKey(1)): (-1,),
            (SequenceKey(1), MappingKey("x")): (-2,),
            (SequenceKey(1), MappingKey("position_ids")): (-1,),
        }
        return cls(arguments, {(): (-2,), (SequenceKey(0),): (-2,), (SequenceKey(1),): (-2,)})

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, num_tokens: int) -> None:
        """Add the dimensions of a call with this number of tokens, which no other dimension has."""
        self.arguments.update(_token_dims(_open_mappings((args, kwargs)), num_tokens))
        self.results.update(_token_dims(output, num_tokens))

    def slice_arguments(self, args: Any, kwargs: dict[str, Any], samples: SampleLayout, sample: int) -> tuple[Any, Any]:
        """Return the arguments for a sample, which reads its tokens after those of the sample that it continues."""
        spans, num_tokens = samples.spans_read[sample], samples.num_tokens
        count = sum(span.stop - span.start for span in spans)
        has_alibi = kwargs.get(ALIBI) is not None

        def cut(path: Path, leaf: Any) -> Any:
            if isinstance(leaf, SampleValues):
                return leaf.values[sample]
            if isinstance(leaf, SampleMask):
                return leaf.of_spans(spans)
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                return leaf
            for dim in self.arguments[path] if path in self.arguments else _usual_token_dims(leaf, num_tokens, path):
                counts = has_alibi and path[-1] in COUNTED_FROM_THE_FIRST
                leaf = _take(leaf, dim, [slice(0, count)] if counts else spans)
            return leaf

        others = {name: value for name, value in kwargs.items() if name not in KERNEL_ARGUMENTS}
        return _pytree.tree_map_with_path(cut, _open_mappings((args, others)))  # type: ignore[no-any-return]

    def run_sample(
        self, forward: Callable[..., Any], args: Any, kwargs: Any, samples: SampleLayout, sample: int
    ) -> Any:
        """Return the results of a sample of the row, for its own tokens."""
        part_args, part_kwargs = self.slice_arguments(args, kwargs, samples, sample)
        own = samples.lengths[sample]
        count = sum(span.stop - span.start for span in samples.spans_read[sample])
        with samples_are(SampleLayout.of([count], samples.ends.device)):
            output = forward(*part_args, **part_kwargs)
        return output if count == own else self.rows(output, slice(count - own, count))

    def rows(self, output: Any, span: slice) -> Any:
        """Return the results of the tokens of a span."""

        def cut(path: Path, leaf: Any) -> Any:
            for dim in self.results.get(path, ()):
                leaf = leaf.narrow(dim, span.start, span.stop - span.start)
            return leaf

        return _pytree.tree_map_with_path(cut, output)

    def join(self, outputs: list[Any]) -> Any:
        """Return the results of samples as those of one row.

        Results without tokens are those of the last sample. Those with two dimensions of tokens, such as attention
        weights or the keys that an indexer chose, are kept sample by sample.
        """
        paths = [path for path, _ in _pytree.tree_flatten_with_path(outputs[0])[0]]
        leaves = [_pytree.tree_leaves(output) for output in outputs]
        joined: list[Any] = []
        for path, parts in zip(paths, zip(*leaves, strict=True), strict=True):
            dims = self.results.get(path, ())
            if len(dims) > 1:
                joined.append(SampleValues(list(parts)))
            elif dims:
                joined.append(_lay_end_to_end(list(parts), dims[0]))
            else:
                joined.append(parts[-1])
        return _pytree.tree_unflatten(joined, _pytree.tree_structure(outputs[0]))


@dataclass(frozen=True)
class SampleValues:
    """A result of each sample that cannot be laid end to end, for a later layer that reads it sample by sample."""

    values: list[Tensor]


def _lay_end_to_end(parts: list[Tensor], dim: int) -> Tensor | SampleValues:
    others = {tuple(size for place, size in enumerate(part.shape) if place != part.dim() + dim) for part in parts}
    return torch.cat(parts, dim=dim) if len(others) == 1 else SampleValues(parts)


def _open_mappings(tree: Any) -> Any:
    """Return arguments with plain dictionaries in place of other mappings, such as keys that layers share."""
    return _pytree.tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else leaf, tree)


def _token_dims(tree: Any, num_tokens: int) -> dict[Path, tuple[int, ...]]:
    leaves, _ = _pytree.tree_flatten_with_path(tree)
    return {
        path: tuple(dim - leaf.dim() for dim, size in enumerate(leaf.shape) if size == num_tokens)
        for path, leaf in leaves
        if isinstance(leaf, Tensor)
    }


def _usual_token_dims(tensor: Tensor, num_tokens: int, path: Path) -> tuple[int, ...]:
    """Return the dimension of tokens of an argument that the observed call did not have: positions, states, masks."""
    dims = {1: (-1,), 2: (-1,), 3: (-2,), 4: (-2, -1)}.get(tensor.dim(), ())
    if not dims or any(tensor.shape[dim] != num_tokens for dim in dims):
        raise ModelError(f"{_pytree.keystr(path)} of shape {tuple(tensor.shape)} is not known to have rows of tokens.")
    return dims


def _take(tensor: Tensor, dim: int, spans: list[slice]) -> Tensor:
    parts = [tensor.narrow(dim, span.start, span.stop - span.start) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def run_per_sample(module: nn.Module, shapes: CallShapes, *, is_stateful: bool) -> None:
    """Let a module run once per sample of a row from now on, wherever the samples are known.

    With `is_stateful` each sample meets the module's attributes and buffers as they are now, whatever came before it.
    """
    module.forward = _PerSample(module, shapes, is_stateful)


def restore_state(module: nn.Module) -> None:
    """Give a module that runs once per sample, and has state, the state that each sample meets."""
    assert isinstance(module.forward, _PerSample)
    module.forward.restore_state()


def run_whole(module: nn.Module) -> None:
    """Undo `run_per_sample`."""
    assert isinstance(module.forward, _PerSample)
    module.forward = module.forward.whole


class _PerSample:
    """The forward of a module, once per sample."""

    def __init__(self, module: nn.Module, shapes: CallShapes, is_stateful: bool) -> None:
        self._module = module
        self.whole: Callable[..., Any] = module.forward
        self._shapes = shapes
        self._state = _attributes(module) if is_stateful else None

    def restore_state(self) -> None:
        """Set the module's attributes to those that each sample meets, if it has state."""
        if self._state is not None:
            _set_attributes(self._module, self._state)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layout = current_layout()
        if layout is None or (len(layout.lengths) == 1 and self._state is None):
            return self.whole(*args, **kwargs)
        outputs = []
        for sample in range(len(layout.lengths)):
            self.restore_state()
            outputs.append(self._shapes.run_sample(self.whole, args, kwargs, layout, sample))
        return outputs[0] if len(outputs) == 1 else self._shapes.join(outputs)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, with copies of its buffers."""
    buffers = {name: buffer.clone() if buffer is not None else None for name, buffer in module._buffers.items()}
    return {**vars(module), "_buffers": buffers}


def _set_attributes(module: nn.Module, state: dict[str, Any]) -> None:
    forward = vars(module)["forward"]
    vars(module).clear()
    vars(module).update(state, forward=forward, _buffers=dict(state["_buffers"]))


def same_rows(together: Tensor, alone: Tensor, tolerance: float) -> bool:
    """Return whether two results are equal up to rounding; a sample that is not finite alone tells nothing."""
    return bool((together - alone).norm() <= tolerance * alone.norm()) or not bool(alone.isfinite().all())
