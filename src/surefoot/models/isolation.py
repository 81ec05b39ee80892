"""No sample sees another: layers that would mix the samples of a row run once per sample.

Attention knows where samples end, and so do the kernels of some recurrent layers. A layer that does not know is found
by `MixingProbe` and taken apart: it runs once per sample, whatever it is called and computes. Everything else of the
model still computes the row as a whole.

Independent of data, methods and training.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.errors import ModelError
from surefoot.models.attention import has_packed_attention, own_implementation
from surefoot.models.decoder_layers import body_of, class_name, decoder_of
from surefoot.models.mixing_probe import MissingKernelError, MixingProbe
from surefoot.models.per_sample import CallShapes, restore_state, run_per_sample, run_whole
from surefoot.models.routing import router_names
from surefoot.models.sample_layout import SampleArguments, accept_samples
from surefoot.models.sample_masks import NeedsOwnAttentionError, layer_kinds
from surefoot.models.varlen_attention import aligns_ends
from surefoot.models.vision import attention_of

KERNEL_KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Kinds of layers for which kernels exist that take the ends of samples."""
LONGEST_POSITION_ROPE = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on the longest position of a forward."""


@dataclass(frozen=True)
class Isolation:
    """How the samples of a row are kept apart in the layers that do not know where samples end."""

    apart: Mapping[str, int] = field(default_factory=dict)
    """Number of modules that run once per sample, by the name of their class."""
    missing_kernels: str | None = None
    """Package of kernels with which such layers would compute the row as a whole; None if none is missing."""

    def describe(self) -> str | None:
        """Return what a user may want to know; None if nothing runs once per sample."""
        if not self.apart:
            return None
        names = ", ".join(f"{count} x {name}" for name, count in self.apart.items())
        advice = (
            f" They are faster with its kernels: pip install {self.missing_kernels}." if self.missing_kernels else ""
        )
        return f"run once per sample, because samples of a row would mix in them: {names}.{advice}"


def isolate_samples(model: PreTrainedModel, dtype: torch.dtype, *, is_sharded: bool) -> Isolation:
    """Make the samples of a row independent of each other in every layer, and check that they are. Collective.

    Costs about five forwards of 23 tokens at most. The model has its weights, computes in `dtype` and is not compiled.
    Raises: ModelError if samples still mix, or if tokens see those that follow them.
    """
    arguments = accept_samples(model)
    decoder = decoder_of(model)
    rotary = {decoder.get_submodule(name): shapes for name, shapes in _find_rotary(decoder).items()}
    for module, shapes in rotary.items():  # before a forward of the probe changes their frequencies
        run_per_sample(module, shapes, is_stateful=True)
    probe = MixingProbe(model, dtype)
    model.eval()
    missing_kernels = _tell_kernels(probe, arguments) if _wants_kernels(model) else None
    try:
        apart, difference = _take_apart(probe, decoder)
    except NeedsOwnAttentionError:
        apart, difference = {}, float("inf")
    if difference > probe.tolerance and has_packed_attention(model):
        for module in apart:
            run_whole(module)
        model.set_attn_implementation(attention_of(model.config, own_implementation(type(model), model.config)))
        apart, difference = _take_apart(probe, decoder)
    if difference > probe.tolerance and not is_sharded and not router_names(model):
        body = body_of(model)  # one process may run it any number of times
        apart = {body: probe.observe_shapes(body)}
        run_per_sample(body, apart[body], is_stateful=False)
        difference = probe.measure_mixing(is_changed=True)
    if difference > probe.tolerance:
        fix = "Take another model."
        if is_sharded and not router_names(model):
            fix = "One process can run it once per sample as a whole: set nproc_per_node: 1, or take another model."
        raise ModelError(
            f"{class_name(model)} mixes samples that share a row: alone, the logits of a sample differ by "
            f"{difference:.1e} of their norm, and nothing that could be run once per sample explains it. {fix}"
        )
    if probe.looks_ahead():
        raise ModelError(
            f"{class_name(model)} looks ahead: a token's logits change with the tokens after it, so training would "
            "show it the token that it must predict. Models that can attend in one direction need it in config.json: "
            '"is_decoder": true for the family of BERT, "causal": true for XLM, "attn_type": "uni" for XLNet, '
            '"use_bidirectional_attention": false for Gemma 3. Otherwise, take another model.'
        )
    for module in rotary:
        restore_state(module)
    if is_sharded:
        for module in probe.find_idle_parts(decoder):
            module.register_forward_hook(_keep_gradients)
    return Isolation(dict(Counter(type(module).__name__ for module in [*rotary, *apart])), missing_kernels)


def _keep_gradients(module: nn.Module, _arguments: Any, output: Any) -> Any:
    """Give the parameters of a part a gradient, of zero if need be, also where it computes nothing.

    Ranks sum the gradients of a layer together, so each must have the same ones, whatever the lengths of its samples.
    """
    touched = [parameter.flatten()[:0].sum() for parameter in module.parameters() if parameter.requires_grad]
    if not touched or not torch.is_grad_enabled():
        return output
    first, *others = output if isinstance(output, tuple) else (output,)
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return output
    first = first + torch.stack(touched).sum().to(first.dtype)
    return (first, *others) if isinstance(output, tuple) else first


def can_share_prompts(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether completions in a row may continue one copy of their prompt, in a run in `dtype` on `device`.

    Attention must know such rows, and the prompt's keys must not depend on the longest position of its completion. On a
    GPU it needs a kernel that reads them, and kernels of recurrent layers do not know such rows.
    """
    if not has_packed_attention(model) or _find_rotary(decoder_of(model)):
        return False
    if device.type == "cpu":
        return True
    is_recurrent = not KERNEL_KINDS.isdisjoint(layer_kinds(model.config.get_text_config()))
    return device.type == "cuda" and dtype == torch.bfloat16 and not is_recurrent and aligns_ends(device)


def longest_at_one_frequency(model: PreTrainedModel) -> int | None:
    """Return the tokens up to which position frequencies are the same for samples of any length; None if for all.

    A longer sample gets other frequencies at all its positions (longrope, dynamic NTK).
    """
    limits = []
    for name in _find_rotary(decoder_of(model)):
        rotary: Any = decoder_of(model).get_submodule(name)
        limits.append(int(rotary.original_max_seq_len))
        settings = rotary.config.rope_parameters
        for each in settings.values() if isinstance(rotary.rope_type, dict) else [settings]:
            limits.append(int(each.get("original_max_position_embeddings", limits[0])))
    return min(limits, default=None)


def isolate_without_values(model: PreTrainedModel, *, has_own_attention: bool) -> None:
    """Run the parts once per sample that `isolate_samples` usually finds, but for those of Llama 4. For fake tensors.

    They are the parts that convolve tokens, as recurrent layers do, those with a table of all pairs of positions, and,
    with the model's own attention, those that get a mask of the whole row, unless they share states with other layers.
    Position embeddings whose frequencies depend on
    the values of positions get constant ones, of the same size.
    """
    decoder = decoder_of(model)
    for name in _find_rotary(decoder):
        rotary = decoder.get_submodule(name)
        kinds = rotary.rope_type
        rotary.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"  # type: ignore[assignment]
    probe = MixingProbe(model, torch.float32)

    def is_apart(part: nn.Module) -> bool:
        return any(isinstance(module, nn.Conv1d) for module in part.modules()) or probe.has_table_of_pairs(part)

    if not has_own_attention and not is_apart(decoder):
        return
    for name, shapes in probe.observe_parts(decoder).items():
        part = decoder.get_submodule(name)
        is_masked = has_own_attention and any(len(dims) > 1 for dims in shapes.arguments.values())
        if is_apart(part) or (is_masked and not hasattr(part, "is_kv_shared_layer")):
            run_per_sample(part, shapes, is_stateful=False)


def _take_apart(probe: MixingProbe, decoder: nn.Module) -> tuple[dict[nn.Module, CallShapes], float]:
    """Let the parts of a decoder in which samples mix run once per sample.

    Returns: those parts, and how far the logits of samples in a row are from those of each alone (see `MixingProbe`).
    Raises: NeedsOwnAttentionError.
    """
    apart = {decoder.get_submodule(name): shapes for name, shapes in probe.find_mixing(decoder).items()}
    for module, shapes in apart.items():
        run_per_sample(module, shapes, is_stateful=False)
    return apart, probe.measure_mixing(is_changed=bool(apart))


def _wants_kernels(model: PreTrainedModel) -> bool:
    """Return whether recurrent or convolutional layers may have kernels that know where samples end."""
    return model.device.type == "cuda" and not KERNEL_KINDS.isdisjoint(layer_kinds(model.config.get_text_config()))


def _tell_kernels(probe: MixingProbe, arguments: SampleArguments) -> str | None:
    """Tell the kernels of a model where samples end; if one of them is missing, return its package and do not."""
    arguments.tells_kernels = True
    try:
        probe.run_row()
    except MissingKernelError as error:
        arguments.tells_kernels = False
        return str(error)
    return None


def _find_rotary(decoder: nn.Module) -> dict[str, CallShapes]:
    """Return position embeddings of which one long sample would change those of its whole row."""
    rotary = {}
    for name, module in decoder.named_modules():
        kinds = getattr(module, "rope_type", None)
        used = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(isinstance(kind, str) and any(part in kind for part in LONGEST_POSITION_ROPE) for kind in used):
            rotary[name] = CallShapes.of_position_embedding()
    return rotary
