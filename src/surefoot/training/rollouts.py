"""The parts of a GRPO run besides model and loss: reward workers, an engine, and the source that joins them."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.config import LoadedConfig, RunConfig
from surefoot.errors import StoppedOnFinding
from surefoot.events import Event
from surefoot.findings import CATALOGUE, Finding
from surefoot.models.generate import end_tokens
from surefoot.parallel.ranks import Ranks
from surefoot.rl.engines.local import LocalEngine
from surefoot.rl.engines.server import Server, ServerFailed, start_server
from surefoot.rl.engines.vllm import VllmEngine
from surefoot.rl.rewards import Rewards
from surefoot.rl.rollout import Engine, Sampling
from surefoot.rl.source import RolloutSource
from surefoot.training.artifacts import lora_settings
from surefoot.training.batches import RunData
from surefoot.training.grpo import GrpoObjective
from surefoot.training.phases import Phases
from surefoot.training.step import Learner

ENGINE = "engine"
"""Of the run folder: the server's log, and what is sent to it."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Of adapters, as --max-lora-rank takes them."""
PROBE_TEXT = "One, two, three, four, five"
LEAST_CONTEXT = 128
"""Of a server, in tokens: what the probe may need."""
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
OF_LAUNCHERS_BEGIN = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_")
"""Variables of our ranks, by which a server would take itself for one of them."""


def start_rewards(loaded: LoadedConfig) -> Rewards:
    """The reward functions of a run, on this rank. Raises: ConfigError where one cannot be loaded."""
    config = loaded.run
    return Rewards(
        config.rewards,
        num_workers=config.reward_num_proc,
        timeout_s=config.reward_timeout_s,
        where=loaded.where("reward_funcs"),
    )


def open_server(loaded: LoadedConfig, base: Path, ranks: Ranks) -> Server:
    """The server that a config names, or one that rank 0 starts; it gets ready while this process goes on.

    Collective. Raises: ConfigError on all ranks where it cannot be started.
    """
    config = loaded.run
    started: list[Server] = []

    def address() -> str:
        if config.vllm_server is not None:
            return config.vllm_server
        folder = config.run_folder / ENGINE
        where = loaded.where("vllm_command", "rollout_engine")
        options = _options(config)
        started.append(
            start_server(config.vllm_command, base, options, _environment(config), folder / "vllm.log", where)
        )
        return started[0].address

    said: str = ranks.from_first(address)
    return started[0] if started else Server(said)


def _options(config: RunConfig) -> list[str]:
    """Of `vllm serve`; those of `vllm_args` come last, and win."""
    rank = next((one for one in VLLM_RANKS if one >= config.lora_rank), config.lora_rank)
    options = {
        "--dtype": config.dtype,
        "--max-model-len": max(config.prompt_length + config.max_completion_length, LEAST_CONTEXT),
        "--max-lora-rank": rank,
        "--max-loras": 2,  # the newest adapter comes before the one before it goes
        "--logprobs-mode": "processed_logprobs",  # those of logits / temperature, as in training
        "--seed": config.seed,
    }
    flags = ["--enable-lora", *(["--enforce-eager"] if config.device == "cpu" else [])]
    return [*(str(part) for pair in options.items() for part in pair), *flags, *config.vllm_args]


def _environment(config: RunConfig) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not _is_of_launcher(name)}
    if config.device == "cpu":
        own.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if config.vllm_devices is not None:
        own["CUDA_VISIBLE_DEVICES"] = config.vllm_devices
    return {**own, "VLLM_NO_USAGE_STATS": "1"}


def _is_of_launcher(name: str) -> bool:
    return name in OF_LAUNCHERS or name.startswith(OF_LAUNCHERS_BEGIN)


def rollout_source(
    config: RunConfig,
    data: RunData,
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    rewards: Rewards,
    server: Server | None,
    phases: Phases,
    emit: Callable[[Event], None],
) -> RolloutSource:
    """The batch source of a learner. Collective. Raises: StoppedOnFinding (SF801) where a server does not get ready."""
    engine: Engine
    assert isinstance(learner.objective, GrpoObjective)
    if server is None:
        engine = LocalEngine(
            learner.model,
            tokenizer,
            ranks=learner.ranks,
            in_step=config.zero_stage == 3 or config.expert_parallel_size != 1,
            batch_size=config.rollout_batch_size,
            forward_context=learner.forward_context,
            reader=data.reader,
            routing=learner.objective.routing if config.routing_replay == "rollout" else None,
        )
    else:
        engine = _vllm(config, learner, tokenizer, server)
    sampling = Sampling(
        max_tokens=config.max_completion_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        ends=frozenset(end_tokens(learner.model, tokenizer)),
        stops=tuple(config.stops),
        banned=_image_tokens(learner.model) if data.reader is not None else frozenset(),
    )
    return RolloutSource(
        config,
        data.train,
        data.order,
        engine,
        rewards,
        tokenizer,
        sampling=sampling,
        context=getattr(learner.model.config.get_text_config(), "max_position_embeddings", None),
        # On CUDA attention over packed samples is one kernel, which does not know of shared prompts.
        share_prompts=learner.device == torch.device("cpu"),
        reader=data.reader,
        ranks=learner.ranks,
        phase=phases,
        emit=emit,
    )


def _image_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that stand for what is seen: of images and of videos."""
    ids = (getattr(model.config, name, None) for name in ("image_token_id", "video_token_id"))
    return frozenset(token for token in ids if token is not None)


def _vllm(config: RunConfig, learner: Learner, tokenizer: PreTrainedTokenizerBase, server: Server) -> VllmEngine:
    ranks, objective, settings = learner.ranks, learner.objective, lora_settings(config)
    assert isinstance(objective, GrpoObjective)
    assert settings is not None

    def ready() -> None:
        try:
            server.wait_until_ready(config.vllm_start_timeout_s)
        except ServerFailed as error:
            raise StoppedOnFinding(Finding("SF801", str(error), server.evidence(), CATALOGUE["SF801"].fix)) from error

    ranks.from_first(ready)

    def score(prompt: list[int], ids: list[int]) -> list[float]:
        with learner.forward_context():
            return objective.score(prompt, ids, learner.device)

    return VllmEngine(
        server,
        learner.model,
        settings,
        config.run_folder / ENGINE / "adapters",
        score,
        timeout_s=config.rollout_timeout_s,
        probe_prompt=tokenizer(PROBE_TEXT)["input_ids"],
        temperature=config.temperature,
        has_seeds=config.device != "cpu",
        ranks=ranks,
    )
