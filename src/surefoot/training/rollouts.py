"""The parts of a GRPO run besides model and loss: reward workers, the engine, and the source that joins them."""

from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase

from surefoot.config import LoadedConfig, RunConfig
from surefoot.events import Event
from surefoot.models.generate import end_tokens
from surefoot.rl.engines.local import LocalEngine
from surefoot.rl.rewards import Rewards
from surefoot.rl.rollout import Sampling
from surefoot.rl.source import RolloutSource
from surefoot.training.batches import RunData
from surefoot.training.phases import Phases
from surefoot.training.step import Learner


def start_rewards(loaded: LoadedConfig) -> Rewards:
    """The reward functions of a run, on this rank. Raises: ConfigError where one cannot be loaded."""
    config = loaded.run
    return Rewards(
        config.rewards,
        num_workers=config.reward_num_proc,
        timeout_s=config.reward_timeout_s,
        where=loaded.where("reward_funcs"),
    )


def rollout_source(
    config: RunConfig,
    data: RunData,
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    rewards: Rewards,
    phases: Phases,
    emit: Callable[[Event], None],
) -> RolloutSource:
    """The batch source of a learner that generates with its own model."""
    model, ranks = learner.model, learner.ranks
    engine = LocalEngine(
        model,
        tokenizer,
        ranks=ranks,
        in_step=config.zero_stage == 3 or config.expert_parallel_size != 1,
        batch_size=config.rollout_batch_size,
        forward_context=learner.forward_context,
    )
    sampling = Sampling(
        max_tokens=config.max_completion_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        ends=frozenset(end_tokens(model, tokenizer)),
        stops=tuple(config.stops),
    )
    return RolloutSource(
        config,
        data.train,
        data.order,
        engine,
        rewards,
        tokenizer,
        sampling=sampling,
        context=getattr(model.config.get_text_config(), "max_position_embeddings", None),
        # On CUDA attention over packed samples is one kernel, which does not know of shared prompts.
        share_prompts=learner.device == torch.device("cpu"),
        ranks=ranks,
        phase=phases,
        emit=emit,
    )
