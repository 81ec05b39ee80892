"""Assembly of a model to train: stock transformers class + LoRA created on the meta device + streamed weights.

The order matters and is fixed here: LoRA is attached in the constructor, so it exists before transformers shards and
streams weights; its values are set after, from (seed, name); freezing comes last, because the loader replaces
parameters.

Independent of data, loss and optimisers.
"""

import logging
import re
from collections.abc import Callable, Collection, Container
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from surefoot.config.schema import Checkpointing
from surefoot.errors import ModelError
from surefoot.models import attention, experts, score_head, vision
from surefoot.models.attention_math import leave_out_cudnn
from surefoot.models.checkpoint_weights import CheckpointWeights
from surefoot.models.decoder_layers import class_name, decoder_layers
from surefoot.models.dtensor_blocks import load_full
from surefoot.models.frozen_parts import ONLY_VISION, FrozenParts, names_frozen
from surefoot.models.fused_gates import fuse_gates
from surefoot.models.fused_norms import fuse_norms
from surefoot.models.fused_rotary import fuse_rotary
from surefoot.models.isolation import Isolation, isolate_samples, isolate_without_values
from surefoot.models.kept_experts import Contexts, KeptExperts
from surefoot.models.lora import LoraSettings, LoraTargets, attach, checked_targets, initial_value, is_lora
from surefoot.models.lora_copies import PairCopies
from surefoot.models.lora_linear import MAGNITUDE
from surefoot.models.pretrained import (
    check_generation_config,
    check_type,
    config_errors,
    load_config,
    load_tokenizer,
    meta_model,
    model_class,
    quiet_transformers,
)
from surefoot.models.quantization.base import FLOAT
from surefoot.models.routing import KeptChoices, RoutingRecorder, router_names
from surefoot.models.sample_layout import accept_samples, keep_layout_on_recompute
from surefoot.models.sample_masks import LAYER_KINDS
from surefoot.models.weight_loading import (
    check_weights_fill,
    computing_on,
    laid_out_like,
    load_weights,
    parts_stay_in_host_memory,
)

__all__ = [
    "BuiltModel",
    "Sharding",
    "build_model",
    "build_without_storage",
    "compile_layers",
    "load_config",
    "load_tokenizer",
    "meta_model",
    "model_class",
    "quiet_transformers",
    "trainable_parameters",
]


KERNEL_LOG = logging.getLogger("transformers.integrations.hub_kernels")
"""transformers' log of each kernel that is not installed, on each rank, also on the CPU, where there are none.
`Isolation.describe` says it once."""


class Sharding(Protocol):
    """Layout of a model over ranks."""

    meshes: Any
    is_offloaded: bool
    """Whether the sharded state is in host memory."""

    def apply(self, model: PreTrainedModel) -> None:
        """Shard the parameters of a model that has no storage yet, in place."""

    def reshard(self, model: PreTrainedModel) -> None:
        """Free the parameters that a forward without backward leaves gathered."""


@dataclass(frozen=True)
class BuiltModel:
    """A model ready to train."""

    model: PreTrainedModel
    targets: LoraTargets | None
    """Modules and parameters that LoRA adapts; None if every weight is trained."""
    routing: RoutingRecorder
    kept_choices: KeptChoices | None
    """Experts that each router chose in the first forward, for its recomputation; None without recomputed routers."""
    autocast: bool
    """Whether float32 weights are trained with bfloat16 arithmetic, so forwards run under autocast."""
    isolation: Isolation
    pair_copies: PairCopies | None
    """Hooks that copy low-rank pairs in the type of the products; None where the pairs have that type."""


def build_without_storage(
    folder: Path,
    *,
    lora: LoraSettings | None,
    dtype: torch.dtype,
    gradient_checkpointing: Checkpointing,
    packed_attention: str | None,
    layers: int | None = None,
    frozen: FrozenParts = ONLY_VISION,
    has_score: bool = False,
    is_run: bool = True,
) -> BuiltModel:
    """Build the model of `build_model` from its config alone, under an active FakeTensorMode.

    `packed_attention`: name of a function for attention over packed samples, for models that can be given one; None for
    the model's own. `layers`: build only the first layers of the decoder. `is_run`: whether forwards of it will run.
    Raises: ModelError for a config that transformers cannot build, or targets that match nothing.
    """
    KERNEL_LOG.setLevel(logging.ERROR)
    config = load_config(folder, has_score=has_score)
    stock = model_class(folder, config, has_score=has_score)
    stored = dtype if lora is not None else torch.float32
    check_type(folder, config, stored)
    if layers is not None:
        _keep_layers(config.get_text_config(), layers)
    is_packed = packed_attention is not None and attention.implementation_for(stock, config) == attention.IMPLEMENTATION
    implementation = packed_attention if is_packed else attention.own_implementation(stock, config)
    # Initial values are of no use without storage, and some initialisers read them.
    with quiet_transformers(), config_errors(folder), no_init_weights():
        model: PreTrainedModel = stock._from_config(config, dtype=stored, attn_implementation=implementation)
        model.tie_weights()  # which transformers leaves out with the initial values
        targets = attach(model, lora) if lora is not None else None
    experts.plug_in(model)
    fuse_gates(model)
    if targets is not None:
        mark_trainable(model, targets)
        _return_states_in(dtype, model, targets)
    else:
        _freeze(model, names_frozen(model, frozen))
    accept_samples(model)
    kept_choices = KeptChoices(model) if gradient_checkpointing and router_names(model) else None
    if is_run:
        isolate_without_values(model, has_own_attention=not is_packed)
    return _prepare_for_training(
        model,
        targets,
        dtype=dtype,
        gradient_checkpointing=gradient_checkpointing,
        kept_choices=kept_choices,
        isolation=Isolation(),
    )


def _keep_layers(text: PreTrainedConfig, count: int) -> None:
    text.num_hidden_layers = count
    for name in LAYER_KINDS:
        kinds = getattr(text, name, None)
        if kinds and len(kinds) > count:  # others follow from the number of layers
            setattr(text, name, kinds[:count])


def build_model(
    folder: Path,
    *,
    lora: LoraSettings | None,
    device: torch.device,
    dtype: torch.dtype,
    gradient_checkpointing: Checkpointing = False,
    sharding: Sharding | None = None,
    frozen: FrozenParts = ONLY_VISION,
    for_packed_rows: bool = True,
    has_score: bool = False,
    seed: int = 0,
    is_trained: bool = True,
) -> BuiltModel:
    """Load a causal LM for training, in full or as this rank's part of it; with `has_score` a reward model.

    With LoRA the base is stored in `dtype` and frozen, LoRA (and a score head, and routers, if targeted) in float32.
    Without, everything (but the parts in `frozen`) is trained, and all is stored in float32, and
    computed in `dtype` through autocast. `seed`: of a score head that the folder does not have. `is_trained`: false for
    a model that is only run, all of which is stored in `dtype`.
    Raises: ModelError for a folder whose weights do not fill the model exactly, or targets that match nothing.
    """
    KERNEL_LOG.setLevel(logging.ERROR)
    config = load_config(folder, has_score=has_score)
    stock = model_class(folder, config, has_score=has_score)
    if has_score:
        stock = score_head.with_exact_head(stock)
    stored = dtype if lora is not None or not is_trained else torch.float32
    check_type(folder, config, stored)
    check_generation_config(folder)
    check_weights_fill(folder, has_score=has_score)
    whole = meta_model(folder, has_score=has_score)
    untrained = names_frozen(whole, frozen) if lora is None else set()
    if not is_trained:
        untrained |= {name for name, _ in whole.named_parameters()}
    attached_targets: list[LoraTargets] = []
    if lora is not None:
        stock = _with_float32(stock, checked_targets(whole, lora).in_full)
    cls = _add_lora_to_class(stock, lora, attached_targets) if lora is not None else stock

    def mark(model: PreTrainedModel) -> None:
        if lora is not None:
            mark_trainable(model, attached_targets[-1])
        else:
            _freeze(model, untrained)

    if sharding is not None:
        cls = _add_sharding_to_class(cls, sharding, mark, CheckpointWeights(folder).weights)
    # FSDP expects offloaded parameters on the CPU from the start; the rest moves to the device afterwards.
    is_offloaded = sharding is not None and sharding.is_offloaded
    reads_to = torch.device("cpu") if is_offloaded else device
    if is_offloaded:
        cls = computing_on(cls, device)
    with parts_stay_in_host_memory() if is_offloaded else nullcontext():
        model = load_weights(
            cls,
            folder,
            config,
            stored,
            reads_to,
            lora.weight_format if lora else FLOAT,
            is_sharded=sharding is not None,
        )
    experts.plug_in(model)
    vision.plug_in(model)
    fuse_gates(model)
    fuse_rotary(model)
    if is_offloaded:
        _move_whole_tensors(model, device)
    targets = attached_targets[-1] if lora is not None else None
    mark(model)
    if lora is not None:
        _set_initial_values(model, lora, device)
    if targets is not None:
        _return_states_in(dtype, model, targets)
    if has_score and score_head.WEIGHT not in CheckpointWeights(folder).weights:
        _set_initial_score(model, seed)
    _align_weights(model)
    if device.type == "cuda":
        _choose_gpu_kernels(model)
    kept_choices = KeptChoices(model) if gradient_checkpointing and router_names(model) else None
    with torch.autocast(device.type, torch.bfloat16, enabled=_is_mixed(model, dtype)):
        isolation = isolate_samples(model, dtype, is_sharded=sharding is not None) if for_packed_rows else Isolation()
    if sharding is not None:
        sharding.reshard(model)  # weights may be loaded before the next forward
    return _prepare_for_training(
        model,
        targets,
        dtype=dtype,
        gradient_checkpointing=gradient_checkpointing,
        kept_choices=kept_choices,
        isolation=isolation,
    )


def _choose_gpu_kernels(model: nn.Module) -> None:
    """Choose the kernels that are fast and right on a GPU, before the first forward."""
    fuse_norms(model)
    leave_out_cudnn()


def compile_layers(built: BuiltModel) -> None:
    """Compile the decoder layers; under gradient checkpointing what is recomputed, not the checkpointing around it."""
    if built.kept_choices is not None:
        built.kept_choices.run_eagerly()
    if built.pair_copies is not None:
        built.pair_copies.remove()  # a compiled layer has the casts in its own kernels
    compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def run_layer(checkpoint: Callable[..., Any], forward: partial[Any], *args: Any) -> Any:
        function = forward.func
        if function not in compiled:
            compiled[function] = torch.compile(function, dynamic=True)
        return checkpoint(partial(compiled[function], *forward.args, **forward.keywords), *args)

    for layer in decoder_layers(built.model):
        if getattr(layer, "gradient_checkpointing", False):
            # transformers gives it the forward of the layer's class with the layer and its keyword arguments.
            checkpoint = partial(run_layer, layer._gradient_checkpointing_func)  # type: ignore[arg-type]
            layer._gradient_checkpointing_func = checkpoint  # type: ignore[assignment]
        else:
            layer.compile(dynamic=True)


def _prepare_for_training(
    model: PreTrainedModel,
    targets: LoraTargets | None,
    *,
    dtype: torch.dtype,
    gradient_checkpointing: Checkpointing,
    kept_choices: KeptChoices | None,
    isolation: Isolation,
) -> BuiltModel:
    model.train()
    routing = RoutingRecorder(model)
    if gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise ModelError(
            f"gradient_checkpointing: transformers' {class_name(model)} cannot recompute its layers. "
            "Set gradient_checkpointing: false."
        )
    if gradient_checkpointing == "selective" and not experts.can_keep_outputs(model):
        raise ModelError(
            f"gradient_checkpointing: selective keeps what experts return, and {class_name(model)} has none in the "
            "layout of transformers' fused experts. Set gradient_checkpointing: true."
        )
    if gradient_checkpointing:
        context_fn: Callable[[], Contexts] = kept_choices or keep_layout_on_recompute
        if experts.can_keep_outputs(model):
            context_fn = KeptExperts(context_fn, keeps_outputs=gradient_checkpointing == "selective")
        options: dict[str, Any] = {"use_reentrant": False, "context_fn": context_fn}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        # transformers makes the outputs of input embeddings need gradients, for reentrant checkpointing. A frozen
        # vision tower would then run a backward.
        model.disable_input_require_grads()
    return BuiltModel(
        model,
        targets,
        routing,
        kept_choices,
        autocast=_is_mixed(model, dtype),
        isolation=isolation,
        pair_copies=PairCopies(model, dtype) if targets is not None and dtype != torch.float32 else None,
    )


def _is_mixed(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Return whether float32 weights besides LoRA are trained in a model that computes in a smaller type."""
    return dtype != torch.float32 and any(p.requires_grad and not is_lora(name) for name, p in model.named_parameters())


def _add_lora_to_class(
    stock: type[PreTrainedModel], lora: LoraSettings, attached_targets: list[LoraTargets]
) -> type[PreTrainedModel]:
    """Return a subclass of the stock model that attaches LoRA when constructed, on whatever device that happens."""

    def construct(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        stock.__init__(self, config, *args, **kwargs)
        attached_targets.append(attach(self, lora))

    return type(stock.__name__, (stock,), {"__init__": construct, "__module__": stock.__module__})


def _add_sharding_to_class(
    cls: type[PreTrainedModel],
    sharding: Sharding,
    mark: Callable[[PreTrainedModel], None],
    stored: Container[str],
) -> type[PreTrainedModel]:
    """Return a subclass that transformers' loader shards over the ranks with `sharding`, then fills part by part.

    `mark` sets which parameters are trained, because that determines how they are sharded. `stored`: names in the
    checkpoint; transformers does not tie weights that it finds there twice.
    """

    def prepare(_cls: Any, distributed_config: Any, device_map: Any = None) -> Any:
        return distributed_config, device_map, sharding.meshes

    def distribute(_cls: Any, model: PreTrainedModel, *_: Any) -> PreTrainedModel:
        # One parameter must be sharded as one, and transformers ties weights only after it has read them.
        if not any(name in stored and source in stored for name, source in model.all_tied_weights_keys.items()):
            model.tie_weights()
        mark(model)
        experts.plug_in(model)
        sharding.apply(model)
        model._is_distributed_loading_by_transformers = True
        model._is_fsdp_managed_module = True
        return model

    methods = {"prepare_distribute_model": classmethod(prepare), "maybe_distribute_model": classmethod(distribute)}
    return type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})


def _with_float32(cls: type[PreTrainedModel], names: Collection[str]) -> type[PreTrainedModel]:
    """Return a subclass that stores these parameters, which are trained in full, in float32."""
    patterns = [f"^{re.escape(name)}$" for name in names]
    in_float32 = [*(cls._keep_in_fp32_modules_strict or ()), *patterns]
    return type(cls.__name__, (cls,), {"_keep_in_fp32_modules_strict": in_float32, "__module__": cls.__module__})


def mark_trainable(model: PreTrainedModel, targets: LoraTargets) -> None:
    """Set LoRA, what is trained in full beside it and a score head to be trained, and freeze everything else."""
    in_full = targets.in_full
    if score_head.head_of(model) is not None:
        in_full.add(score_head.WEIGHT)
    floats = {
        id(parameter): nn.Parameter(parameter.data.float())
        for name, parameter in model.named_parameters()
        if name in in_full and parameter.dtype != torch.float32
    }
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):  # in each place that shares it
        owner, _, leaf = name.rpartition(".")
        if id(parameter) in floats:
            setattr(model.get_submodule(owner), leaf, floats[id(parameter)])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_lora(name) or name in in_full)


def _return_states_in(dtype: torch.dtype, model: PreTrainedModel, targets: LoraTargets) -> None:
    """Let modules that are trained in full in float32 return what other modules compute with in `dtype`."""

    def convert(_module: nn.Module, _inputs: Any, states: Any) -> Any:
        return states.to(dtype) if isinstance(states, Tensor) else states

    for owner in {name.rpartition(".")[0] for name in targets.whole} if dtype != torch.float32 else ():
        model.get_submodule(owner).register_forward_hook(convert)


def _freeze(model: PreTrainedModel, names: Container[str]) -> None:
    """Train all parameters but those of these names."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)


def _set_initial_values(model: PreTrainedModel, lora: LoraSettings, device: torch.device) -> None:
    """Set the same initial values on every topology: drawn in full, then cut to this rank's part."""
    for module in model.modules():
        if getattr(module, MAGNITUDE, None) is not None:
            module.set_magnitude(device)
    for name, parameter in model.named_parameters():
        if is_lora(name) and not name.endswith(MAGNITUDE):
            load_full(parameter, initial_value(name, parameter.shape, lora.seed))


def _set_initial_score(model: PreTrainedModel, seed: int) -> None:
    head = score_head.head_of(model)
    assert head is not None
    std = float(model.config.get_text_config().initializer_range)
    load_full(head.weight, score_head.initial_weight(head, std, seed))


def trainable_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the trained parameters, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _align_weights(model: PreTrainedModel) -> None:
    """Move weights from unaligned file-mapped addresses to addresses that suit vector instructions."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and parameter.device.type == "cpu" and parameter.data_ptr() % 64:
            parameter.data = parameter.data.clone()


def _move_whole_tensors(model: PreTrainedModel, device: torch.device) -> None:
    """Move tensors that no FSDP group manages: frozen weights that are replicated or expert-parallel, and buffers."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)
    for name, parameter in list(model.named_parameters()):
        if not isinstance(parameter, DTensor):
            continue
        if not {"fsdp", "dp_replicate"} & set(parameter.device_mesh.mesh_dim_names or ()):
            owner, _, leaf = name.rpartition(".")
            moved = laid_out_like(parameter.to_local().to(device), parameter)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(moved, requires_grad=parameter.requires_grad))
