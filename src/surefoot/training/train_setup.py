"""Setup of a `TrainContext` from a config: the model as this rank holds it, its optimizer and its objective."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch

from surefoot.config import LoadedConfig, RunConfig
from surefoot.data.image_processor import PixelReader, Vision
from surefoot.distributed.fsdp import Sharding, as_fsdp_forward, reshard
from surefoot.distributed.parallel_dims import Layout
from surefoot.distributed.process_group import World
from surefoot.errors import ConfigError, ModelError
from surefoot.methods.base import TrainContext
from surefoot.methods.registry import method_of
from surefoot.methods.token_loss import eval_no_grad
from surefoot.models.adapter import read_adapter
from surefoot.models.build import build_model, compile_layers, mark_trainable, meta_model, trainable_parameters
from surefoot.models.frozen_parts import check_frozen_parts, frozen_parts
from surefoot.models.lora import attach, check_frozen_weights, checked_targets, format_of_frozen, lora_settings
from surefoot.models.quantization.bitsandbytes_ops import check_package
from surefoot.models.quantization.released import find_quantization
from surefoot.models.router_bias import RouterBiases
from surefoot.models.vision import check_tower
from surefoot.models.weight_loading import keep_freed_memory
from surefoot.training.export import load_adapter
from surefoot.training.optimizers import build_optimizer

Context = Callable[[], AbstractContextManager[object]]
TARGET_SETTINGS = ("modules_to_save", "layers_to_transform", "use_dora", "lora_dropout")
"""Settings with which a refusal of targets may begin, beside `target_modules`."""


def sharding_of(config: RunConfig, ranks: World, device: torch.device) -> Sharding | None:
    """Return the sharding of a model over the ranks; None on one rank. Collective: creates process groups."""
    layout = Layout.of(config, ranks.size)
    return Sharding(layout, device) if layout.is_sharded else None


def check_router_biases(loaded: LoadedConfig, base: Path) -> None:
    """Raise ConfigError if biases of routers are to be updated in a model that has none. Reads no weights."""
    rate = loaded.run.router_bias_update_rate
    if rate and not RouterBiases(meta_model(base)).tensors:
        raise ConfigError(
            f"router_bias_update_rate={rate}, but the routers of {loaded.run.model} have no correction bias. "
            f"Drop it, or set router_aux_loss_coef to balance the experts ({loaded.where('router_bias_update_rate')})."
        )


def check_packages(loaded: LoadedConfig) -> None:
    """Raise ModelError, with its place in the config, for a missing package of the optimizer or of frozen weights."""
    run, setting = loaded.run, "optim"
    try:
        if run.optim == "adamw_8bit":
            check_package("optim: adamw_8bit", "adamw needs no package")
        setting = "quantization"
        format_of_frozen(run).check_package()
    except ModelError as error:
        raise ModelError(f"{str(error).removesuffix('.')} ({loaded.where(setting)}).") from error


def check_targets(loaded: LoadedConfig, base: Path) -> None:
    """Raise ModelError, with its place in the config, for targets of LoRA that model or `init_adapter` do not have.

    The same for frozen weights that cannot be stored as the config says, and for parts that cannot be frozen. Reads no
    weights of the model, so it comes before the data are prepared. Raises: ModelError for a config.json that is no
    model's.
    """
    lora, model = lora_settings(loaded.run), meta_model(base, has_score=loaded.run.has_score)
    if lora is None:
        try:
            check_frozen_parts(model, frozen_parts(loaded.run))
        except ModelError as error:
            setting = str(error).partition(":")[0]
            raise ModelError(f"{str(error).removesuffix('.')} ({loaded.where(setting)}).") from error
        return
    try:
        checked_targets(model, lora)
    except ModelError as error:
        setting = next((name for name in TARGET_SETTINGS if str(error).startswith(name)), "target_modules")
        raise ModelError(f"{str(error).removesuffix('.')} ({loaded.where(setting)}).") from error
    try:
        _check_stored_otherwise(base, loaded.run.quantization)
        check_frozen_weights(model, lora.weight_format)
    except ModelError as error:
        raise ModelError(f"{str(error).removesuffix('.')} ({loaded.where('quantization')}).") from error
    if loaded.run.init_adapter is not None:
        with torch.device("meta"):
            mark_trainable(model, attach(model, lora))
        shapes = {name: parameter.shape for name, parameter in trainable_parameters(model).items()}
        try:
            read_adapter(Path(loaded.run.init_adapter), shapes, lora, model)
        except ModelError as error:
            raise ModelError(f"{str(error).removesuffix('.')} ({loaded.where('init_adapter')}).") from error


def _check_stored_otherwise(base: Path, quantization: str | None) -> None:
    """Raise ModelError for weights that are stored in four or eight bits and are to be stored in the other number."""
    stored = find_quantization(base / "config.json")
    own = stored.bitsandbytes_kind if stored is not None else None
    if stored is not None and own is not None and quantization not in (None, own):
        remedy = f"Set quantization: {own}, or take" if own != "fp4" else "Set quantization: null, or take"
        raise ModelError(
            f"quantization: {quantization}, and the weights of {base} are stored as {own} ({stored.method}): they "
            f"would be rounded twice. {remedy} the model's release."
        )


def check_images(context: TrainContext, reader: PixelReader, where: str) -> None:
    """Check that the model's vision tower and its processor fit each other, on a blank image. Collective.

    `where`: the place of the model in the config. Raises: ModelError.
    """
    tensors, num_tokens = reader.blank
    on_device = Vision(tensors, 1, is_blank=True).to(context.device).tensors

    def check_blank() -> None:
        try:
            check_tower(context.model, on_device, num_tokens)
        except ModelError as error:
            raise ModelError(f"{str(error).removesuffix('.')} ({where}).") from error

    with eval_no_grad(context.model), context.forward_context():
        context.ranks.run_or_raise_on_all(as_fsdp_forward(context.model, check_blank))
    reshard(context.model)


def build_train_context(
    config: RunConfig, base: Path, ranks: World, device: torch.device, sharding: Sharding | None
) -> TrainContext:
    """Build model, optimizer and objective at their initial values. `base` is the folder of the model.

    Collective. Raises: ModelError for a folder whose weights do not fill the model, or settings that do not fit it.
    """
    lora = lora_settings(config)
    built = build_model(
        base,
        lora=lora,
        device=device,
        dtype=getattr(torch, config.dtype),
        gradient_checkpointing=config.checkpointing,
        sharding=sharding,
        frozen=frozen_parts(config),
        has_score=config.has_score,
        seed=config.seed,
    )
    if config.compile:
        compile_layers(built)
    if device.type == "cpu":
        keep_freed_memory()
    if config.init_adapter and lora is not None:
        load_adapter(Path(config.init_adapter), built.model, lora)
    parameters = trainable_parameters(built.model)
    forward_context: Context = nullcontext
    rollout_context: Context = nullcontext
    if built.autocast:
        autocast = partial(torch.autocast, device.type, torch.bfloat16)
        # With its cache it would hold a bfloat16 copy of every weight to the end of a forward, which checkpointing and
        # ZeRO 3 should free. A rollout uses the copies again for each token.
        forward_context = partial(autocast, cache_enabled=False)
        rollout_context = autocast if config.zero_stage < 3 else forward_context
    with forward_context():
        objective = method_of(config).build_objective(built, config, ranks)
    return TrainContext(
        model=built.model,
        parameters=parameters,
        optimizer=build_optimizer(parameters, config),
        objective=objective,
        ranks=ranks,
        device=device,
        router_biases=RouterBiases(built.model) if lora is None else None,
        forward_context=forward_context,
        rollout_context=rollout_context,
        isolation=built.isolation,
        before_micro_batch=partial(sharding.before_micro_batch, built.model) if sharding else lambda _: None,
    )
