"""Setup of the engine that generates completions, with the server if there is one."""

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Picture
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.config import LoadedConfig, RolloutConfig, rollout_settings
from surefoot.config.vllm_args import allowed_lora_rank
from surefoot.data.collate import collate
from surefoot.data.image_processor import PixelReader
from surefoot.data.images import ImageSettings, find_image
from surefoot.data.render import answer_ends
from surefoot.distributed.artifact import write_trained_model
from surefoot.distributed.fsdp import reshard
from surefoot.distributed.process_group import World
from surefoot.errors import ConfigError
from surefoot.events import Emit, Heartbeat, Notice
from surefoot.methods.base import MethodContext, TrainContext
from surefoot.methods.rollout.engines.local import LocalEngine, RolloutLimits
from surefoot.methods.rollout.engines.server import Server, ServerFailed, start_server
from surefoot.methods.rollout.engines.vllm import VllmEngine
from surefoot.methods.rollout.engines.vllm_client import CompletionClient
from surefoot.methods.rollout.engines.vllm_probe import PolicyProbe
from surefoot.methods.rollout.engines.vllm_protocol import RoutingLayers, ServedModel
from surefoot.methods.rollout.engines.vllm_sync import AdapterSync, FullSync, Sync
from surefoot.methods.rollout.generator import Generator, complete_prompt
from surefoot.methods.rollout.types import Engine, Request, Sampling
from surefoot.methods.token_loss import TokenLogprobs, eval_no_grad
from surefoot.methods.training_data import HEARTBEAT_EVERY_S
from surefoot.models.expert_layouts import experts_of, is_fused_experts
from surefoot.models.generate import end_tokens
from surefoot.models.lora import checked_targets, lora_settings, perturbed_lora
from surefoot.models.pretrained import meta_model
from surefoot.models.resolve_model import longest_context
from surefoot.models.routing import RoutingRecorder, router_names
from surefoot.models.vision import image_tokens
from surefoot.system import allocators, loopback
from surefoot.system.added_variables import variables_of_user

ENGINE_FOLDER = "engine"
"""Subfolder of the run folder for the server's log and the weights that are sent to it."""
PROBE_TEXT = "One, two, three, four, five"
MIN_CONTEXT_TOKENS = 128
"""Smallest context length of a server, in tokens: the probe may need it."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
LAUNCHER_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_")
"""Variables of the training ranks, with which a server would take itself for one of them."""


class Rollouts:
    """The part of a method that generates completions: the server, if there is one, and the engine."""

    def __init__(self, context: MethodContext) -> None:
        settings = rollout_settings(context.loaded.run)
        assert settings is not None
        self._context = context
        self._settings = settings
        self._parts = ExitStack()
        """Callbacks that end what was started, each even if another fails to end."""
        self._server: Server | None = None

    def start(self) -> None:
        """Start the server if there is one, which gets ready while the data are prepared. Collective."""
        context, reader = self._context, self._context.data.reader
        if self._settings.rollout_engine == "vllm":
            images = reader.settings if reader is not None else None
            self._server = open_server(context.loaded, context.base, images, context.ranks)
            self._parts.callback(self._server.end)

    def connect(self) -> None:
        """Wait for the server to take its memory before training does. Collective."""
        if self._server is not None:
            self._context.ranks.run_or_raise_on_all(self._server.check_alive, names_rank=False)
            with self._context.phase("sync"):
                reserve_server_memory(self._settings, self._server, self._context.ranks, self._context.emit)

    def load(
        self, config: RolloutConfig, train_context: TrainContext, routing: RoutingRecorder | None = None
    ) -> Generator:
        """Connect the engine to the model. `routing`: recorder of the routers, if experts are recorded. Collective.

        Raises: StoppedOnFinding (SF801) if a server does not get ready.
        """
        engine, sampling = _build_engine(config, self._context, train_context, self._server, routing)
        generator = Generator(
            engine,
            sampling,
            self._context,
            longest_context=longest_context(train_context.model.config.get_text_config().to_dict()),
        )
        self._parts.callback(engine.end)
        return generator

    def end(self) -> None:
        """End engine and server, whether the run succeeded or not. Not collective."""
        self._parts.close()


def open_server(loaded: LoadedConfig, base: Path, images: ImageSettings | None, ranks: World) -> Server:
    """Return the server that a config names, or one that rank 0 starts and that gets ready in the background.

    `images`: the model's image settings. Collective. Raises: ConfigError on all ranks if it cannot be started.
    """
    config = rollout_settings(loaded.run)
    assert config is not None
    if images is not None and images.processor is not None:
        raise ConfigError(
            f"rollout_engine=vllm: {config.model} has images that its own processor scales and describes, and only "
            "images that are grids of cells (Qwen-VL) are sent to a server as they are trained. Set rollout_engine: "
            f"local ({loaded.where('rollout_engine')})."
        )
    log = config.run_folder / ENGINE_FOLDER / "vllm.log"
    servers: list[Server] = []

    def open_on_rank0() -> str:
        if config.vllm_server is not None:
            return config.vllm_server
        where = loaded.where("vllm_command", "rollout_engine")
        settings = lora_settings(config)
        adapts_experts = settings is not None and bool(checked_targets(meta_model(base), settings).experts)
        options = _build_options(config, images, adapts_experts=adapts_experts)
        servers.append(start_server(config.vllm_command, base, options, _build_environment(config), log, where))
        return servers[0].address

    address: str = ranks.broadcast_from_rank0(open_on_rank0)
    # Each rank sends requests to the server, and must be able to show its log if one fails.
    return servers[0] if servers else Server(address, log=log if config.vllm_server is None else None)


def reserve_server_memory(config: RolloutConfig, server: Server, ranks: World, emit: Emit) -> None:
    """Let a server that shares GPUs with training take its memory first, and free it again if `vllm_sleep` is set.

    vLLM measures free GPU memory while it starts, so memory that other processes take or free meanwhile counts as its
    own. Collective. Raises: StoppedOnFinding (SF801).
    """
    starts_here = config.vllm_server is None and config.device == "cuda" and config.vllm_devices is None
    if config.vllm_sleep or starts_here:
        ranks.broadcast_from_rank0(lambda: _wait_for_server(server, config, emit))
    if config.vllm_sleep:
        ranks.broadcast_from_rank0(server.sleep)


def _wait_for_server(server: Server, config: RolloutConfig, emit: Emit) -> None:
    def notify(text: str) -> None:
        emit(Notice(text))
        emit(Heartbeat())  # the supervisor must not see a stall

    try:
        server.wait_until_ready(config.vllm_start_timeout_s, notify)
    except ServerFailed as error:
        raise server.stopped("SF801", str(error)) from error


def _build_options(config: RolloutConfig, images: ImageSettings | None, *, adapts_experts: bool) -> list[str]:
    """Return the options of `vllm serve`. Those of `vllm_args` come last, and win."""
    is_raw = config.cuts_sampling and config.temperature == 1.0
    options: dict[str, Any] = {
        "--dtype": config.dtype,
        "--max-model-len": max(config.max_row_tokens + config.max_completion_length, MIN_CONTEXT_TOKENS),
        # Logprobs are those before temperature and cut, or after both. With either alone, one mode matches training.
        "--logprobs-mode": "raw_logprobs" if is_raw else "processed_logprobs",
        "--generation-config": "vllm",  # ignore the model's own top_p, top_k and penalties
        "--seed": config.seed,
    }
    flags = []
    if config.device == "cpu":
        flags = ["--enforce-eager", "--block-size", "32"]  # the smallest: completions of a group share whole blocks
    if config.tuning == "lora":
        flags.append("--enable-lora")
        options["--max-lora-rank"] = allowed_lora_rank(config.lora_rank)
        if adapts_experts:
            flags.append("--enable-mixed-moe-lora-format")  # adapters have the experts of a layer in one tensor
        options["--max-loras"] = 2  # the newest adapter is loaded before the previous one is unloaded
    if config.vllm_sleep:
        flags.append("--enable-sleep-mode")
    if config.records_routing:
        flags.append("--enable-return-routed-experts")
    if images is not None:
        flags.append("--enable-scale-out")  # the endpoint that takes tokens with images
        options["--mm-processor-kwargs"] = json.dumps(
            {"min_pixels": images.min_pixels, "max_pixels": images.max_pixels}
        )
        options["--limit-mm-per-prompt"] = json.dumps({"video": 0})
    return [*(str(part) for pair in options.items() for part in pair), *flags, *config.vllm_args]


def _build_environment(config: RolloutConfig) -> dict[str, str]:
    variables = {name: value for name, value in variables_of_user().items() if not _is_launcher_variable(name)}
    if config.device == "cpu":
        variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if not config.generates_during_training:  # training waits meanwhile, so no core is reserved for other work
            variables.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    if config.vllm_devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = config.vllm_devices
    if config.vllm_sleep:  # memory that grows in segments cannot be freed
        variables |= {
            name: _drop_expandable_segments(variables[name]) for name in allocators.VARIABLES if name in variables
        }
    if config.tuning == "full" or config.vllm_sleep:  # new weights, sleep and wake are endpoints of this mode
        variables["VLLM_SERVER_DEV_MODE"] = "1"
    if config.records_routing:  # the model runner that reports the experts of tokens
        variables.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    if config.tuning == "lora":
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    variables.pop("VLLM_API_KEY", None)  # it is another server's: this one is local, and requests carry no key
    # GPUs have the same numbers as in this process.
    own = {"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST"), "VLLM_HOST_IP": loopback.ADDRESS}
    return {**loopback.loopback_variables(), **own, **variables, "VLLM_NO_USAGE_STATS": "1"}


def _drop_expandable_segments(options: str) -> str:
    return ",".join(option for option in options.split(",") if not option.strip().startswith("expandable_segments"))


def _is_launcher_variable(name: str) -> bool:
    return name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIXES)


def _build_engine(
    config: RolloutConfig,
    context: MethodContext,
    train_context: TrainContext,
    server: Server | None,
    routing: RoutingRecorder | None,
) -> tuple[Engine, Sampling]:
    """Return the engine that a config names, and how it draws tokens. Collective."""
    tokenizer = context.tokenizer
    text = train_context.model.config.get_text_config()
    ends = end_tokens(train_context.model, tokenizer) | answer_ends(tokenizer, config.template_variables)
    sampling = Sampling(
        max_tokens=config.max_completion_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        ends=frozenset(token for token in ends if token < text.vocab_size),
        stops=tuple(config.stops),
        banned=image_tokens(train_context.model),
    )
    engine: Engine
    if server is None:
        engine = LocalEngine(
            train_context.model,
            tokenizer,
            ranks=train_context.ranks,
            in_lockstep=config.zero_stage == 3 or config.expert_parallel_size != 1,
            forward_context=train_context.rollout_context,
            reader=context.data.reader,
            routing=routing,
            limits=RolloutLimits(
                config.rollout_batch_size,
                config.rollout_timeout_s,
                config.max_row_tokens + config.max_added_tokens,
                _add_heartbeats(context.stop_requested, context.emit),
            ),
        )
    else:
        engine = _build_vllm_engine(config, context, train_context, server, sampling)
    return engine, sampling


def _add_heartbeats(stop_requested: Callable[[], bool], emit: Emit) -> Callable[[], bool]:
    """Return the check, which runs at each token, with heartbeats: the supervisor must not see a stall."""
    last_heartbeat_s = time.monotonic()

    def check() -> bool:
        nonlocal last_heartbeat_s
        if time.monotonic() - last_heartbeat_s > HEARTBEAT_EVERY_S:
            last_heartbeat_s = time.monotonic()
            emit(Heartbeat())
        return stop_requested()

    return check


def _build_vllm_engine(
    config: RolloutConfig, context: MethodContext, train_context: TrainContext, server: Server, sampling: Sampling
) -> VllmEngine:
    ranks, reader = train_context.ranks, context.data.reader
    with train_context.forward_context():
        logprobs = TokenLogprobs(train_context.model, config.temperature)
    ranks.broadcast_from_rank0(lambda: _wait_for_server(server, config, context.emit))

    def score(request: Request, ids: list[int]) -> list[float]:
        with train_context.forward_context():
            return _score(logprobs, train_context, request, ids, reader)

    model = ServedModel(
        vocab_size=int(train_context.model.config.get_text_config().vocab_size),
        image_token=reader.settings.token_id if reader is not None else None,
        routing=_find_routing_layers(train_context) if config.records_routing else None,
        has_seeds=config.device != "cpu",
    )
    client = CompletionClient(server, model, timeout_s=config.rollout_timeout_s, reader=reader)
    probe = PolicyProbe(
        client,
        score,
        ranks.run_or_raise_on_all(lambda: _build_probe_prompt(train_context.model, context.tokenizer, reader)),
        sampling if config.knows_rollout_logprobs else replace(sampling, top_p=1.0, top_k=0),
        dtype=getattr(torch, config.dtype),  # the server's type; full fine-tuning keeps its own weights in float32
        quantization=config.quantization,
        add_noise=partial(perturbed_lora, train_context.model) if config.tuning == "lora" else None,
        ranks=ranks,
    )
    sync = _build_sync(config, context, train_context, server)
    return VllmEngine(client, sync, probe, sleeps=config.vllm_sleep, ranks=ranks)


def _score(
    logprobs: TokenLogprobs, context: TrainContext, request: Request, ids: Sequence[int], reader: PixelReader | None
) -> list[float]:
    """Return the log-probabilities of tokens after a prompt, without dropout. Collective. `reader`: opens images."""
    sample = complete_prompt(request.prompt, ids, request.images, request.place)
    with eval_no_grad(context.model):
        values, _ = logprobs(collate([sample], reader).to(context.device))
    reshard(context.model)
    return [float(value) for value in values.tolist()]


def _find_routing_layers(train_context: TrainContext) -> RoutingLayers:
    model, text = train_context.model, train_context.model.config.get_text_config()
    numbers = [int(number) for name in router_names(model) for number in re.findall(r"\blayers\.(\d+)\.", name)[:1]]
    experts = max(map(experts_of, filter(is_fused_experts, model.modules())))
    return RoutingLayers(tuple(numbers), int(text.num_hidden_layers), experts)


def _build_sync(config: RolloutConfig, context: MethodContext, train_context: TrainContext, server: Server) -> Sync:
    """Return the sync of adapters, or of the full model."""
    settings, ranks, folder = lora_settings(config), train_context.ranks, config.run_folder / ENGINE_FOLDER
    if settings is not None:
        return AdapterSync(server, train_context.model, settings, folder / "adapters", ranks)

    def write(target: Path) -> None:
        # The server's compute type: a smaller type of the base model would round away what training has learned.
        dtype = getattr(torch, config.dtype)
        write_trained_model(target, train_context.model, context.tokenizer, context.base, ranks, dtype)

    return FullSync(server, write, folder / "weights", config.rollout_timeout_s, ranks)


def _build_probe_prompt(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, reader: PixelReader | None
) -> Request:
    """Return a prompt that trainer and server can read, with an image for a model with vision. Raises: StorageError."""
    text_ids: list[int] = tokenizer(PROBE_TEXT)["input_ids"]
    if reader is None:
        return Request(text_ids, (0,), place="the probe")
    settings, file = reader.settings, BytesIO()
    shades = Picture.linear_gradient("L").resize((3 * settings.cell, 2 * settings.cell))
    Picture.merge("RGB", (shades, shades.rotate(180), shades.rotate(90))).save(file, "PNG")
    image = find_image(file.getvalue(), Path(), settings)
    delimiters = [getattr(model.config, f"vision_{side}_token_id", None) for side in ("start", "end")]
    begin, end = ([token] if token is not None else [] for token in delimiters)
    return Request([*begin, *[settings.token_id] * image.num_tokens, *end, *text_ids], (0,), (image,), "the probe")
