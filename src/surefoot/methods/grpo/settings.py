"""The settings of GRPO, and the conflicts among them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from surefoot.config.rollout import RolloutConfig
from surefoot.config.schema import Contradiction, Free, Item, ModelBeside, RunConfig

Weight = Annotated[float, Field(ge=-1e6, le=1e6)]


OF_MODEL = "model:"
"""Beginning of an entry of `reward_funcs` that is a reward model."""


class RewardItem(Item):
    """One reward function."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    text_key: ClassVar[str] = "func"

    func: str = Field(min_length=1)
    """`file.py:function`, a built-in (exact_match, math_verify, regex, json_schema, length), or `model:PATH`: a reward
    model, as a run with `method: reward` trains it, which scores a completion behind its prompt."""
    weight: Weight = 1.0
    """Factor of its value in a completion's reward."""
    args: dict[str, Any] = Field(default={})
    """Further keyword arguments of its calls: `{pattern: "<answer>.*</answer>"}`."""

    @classmethod
    def resolve(cls, text: str, resolve: Callable[[str], Path]) -> str:
        """Make the file of a function, or the folder of a reward model, absolute; a built-in has none."""
        if text.startswith(OF_MODEL):
            path = resolve(text.removeprefix(OF_MODEL))
            return f"{OF_MODEL}{path}" if path.exists() else text
        file, colon, function = text.rpartition(":")
        return f"{resolve(file)}:{function}" if colon and file.endswith(".py") else text

    @property
    def file(self) -> str:
        """The file of the function; empty for a built-in and a reward model."""
        return self.func.rpartition(":")[0] if not self.model else ""

    @property
    def model(self) -> str:
        """The reward model, as a folder or a hub id; empty for a function."""
        return self.func.removeprefix(OF_MODEL) if self.func.startswith(OF_MODEL) else ""


class GrpoConfig(RolloutConfig):
    """Settings of a run with `method: grpo`."""

    implementation: ClassVar[str] = "surefoot.methods.grpo.method:Grpo"
    learning_rate_share: ClassVar[float] = 0.1
    """1e-6 in full and 2e-5 with LoRA for 8B, in the range of TRL's default (1e-6) and its examples with LoRA."""
    sequences_per_row_setting: ClassVar[str] = "num_generations"

    method: Literal["grpo"] = "grpo"
    """Group relative policy optimisation."""
    num_generations: int = Field(default=8, gt=1)
    """Completions per prompt, compared with each other. `global_batch_size`, in completions, must be a multiple."""
    reward_funcs: list[RewardItem] = Field(default=[])
    """Reward functions: `file.py:function`, `exact_match`, ..., or `{func, weight, args}`. Their values are added."""
    reward_weights: list[Weight] | None = None
    """A weight for each of `reward_funcs`, in their order, instead of their own `weight`."""
    reward_timeout_s: Free[float] = Field(default=60.0, gt=0)
    """Seconds that a reward function may take for one group; a slower call is ended, and its completions are masked."""
    reward_num_proc: Free[int] = Field(default=1, gt=0, le=256)
    """Worker processes of each rank for reward functions."""
    loss_type: Literal["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "sapo", "rloo"] = "dapo"
    """How a token's ratio and advantage become a loss, and what the loss is averaged over. See docs/grpo.md."""
    epsilon: float | None = Field(default=None, ge=0, lt=1)
    """Ratios below 1 - epsilon are clipped. Default: 0.2; for gspo 3e-4. cispo clips no small ratio."""
    epsilon_high: float | None = Field(default=None, ge=0)
    """Ratios above 1 + epsilon_high are clipped. Default: epsilon; for gspo 4e-4, if epsilon is not set either. For
    cispo it is the largest ratio itself: 5."""
    sapo_temperature_pos: float = Field(default=1.0, gt=0, le=100)
    """Steepness with which sapo bounds the ratios of tokens with a positive advantage."""
    sapo_temperature_neg: float = Field(default=1.05, gt=0, le=100)
    """The same for other tokens: a steeper bound gives them less weight where ratios are far from 1."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the model without its adapter. 0 does not compute it."""
    kl_in_reward: bool = False
    """Whether `beta` times the divergence of a completion is taken from its reward before advantages are computed, as
    in RLOO and REINFORCE++, and not added to the loss of its tokens, as in GRPO."""
    num_iterations: int = Field(default=1, gt=0)
    """Optimizer steps on the same completions."""
    max_staleness: int = Field(default=0, ge=0)
    """Most optimizer steps by which completions may be older than the weights that begin to train on them.
    0: the server waits for each update. `num_iterations` or more: it generates while the model trains."""
    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = "grpo"
    """The value that a reward is compared with. `grpo`: the mean of its group. `rloo`: the mean of the others in it.
    `reinforce_plus_plus`: the mean of its group, and then the deviation is that of all such differences of the step."""
    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        BeforeValidator(lambda value: {True: "group", False: "none"}[value] if isinstance(value, bool) else value),
    ] = "group"
    """Advantages are divided by the standard deviation of the rewards of the group, of the step, or not at all. The
    paper of `rloo` has none, that of `reinforce_plus_plus` batch."""
    importance_correction: Literal["truncate", "mask", "sequence_truncate", "sequence_mask", "none"] = "truncate"
    """Correction of tokens whose probability in sampling differs from that in training. `truncate`: their ratio,
    clamped to `importance_floor` and `importance_cap`. `mask`: their ratio, 0 outside these. `sequence_truncate`,
    `sequence_mask`: the same with the product of all ratios of a completion. `none`: no correction."""
    importance_cap: float = Field(default=2.0, gt=1)
    """Largest weight that `importance_correction` gives a token."""
    importance_floor: float = Field(default=0.0, ge=0, lt=1)
    """Smallest weight that it gives a token: truncating raises smaller ratios to it, masking makes them 0."""
    routing_replay: Literal["none", "rollout", "first"] = "none"
    """Which experts training uses for a token of an MoE model. `none`: those that its routers choose at each forward.
    `rollout`: those that the engine used. `first`: those of the first forward on a completion, in all `num_iterations`
    steps on it."""
    mask_truncated_completions: bool = False
    """Leave completions that reached `max_completion_length` out of the loss."""
    soft_overlong_length: int = Field(default=0, ge=0)
    """Number of tokens before `max_completion_length` over which the reward falls by up to 1 (DAPO)."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal, which have no learning signal, by groups of the next prompts."""
    dynamic_sampling_tries: int = Field(default=3, gt=0)
    """Rounds of such replacements in a step; after them the step trains on the groups that it has."""

    @property
    def steps_per_batch(self) -> int:
        """`num_iterations`."""
        return self.num_iterations

    @property
    def generates_during_training(self) -> bool:
        """`max_staleness`."""
        return self.max_staleness > 0

    @property
    def records_routing(self) -> bool:
        """`routing_replay: rollout`."""
        return self.routing_replay == "rollout"

    @property
    def may_skip_rows(self) -> bool:
        """`dynamic_sampling`."""
        return self.dynamic_sampling

    @property
    def rewards(self) -> list[RewardItem]:
        """`reward_funcs` with the weights that apply."""
        weights = self.reward_weights or [item.weight for item in self.reward_funcs]
        pairs = zip(self.reward_funcs, weights, strict=True)
        return [item.model_copy(update={"weight": weight}) for item, weight in pairs]

    @property
    def models_beside(self) -> list[ModelBeside]:
        """The reward models."""
        return [ModelBeside(item.model, "reward model") for item in self.reward_funcs if item.model]

    def code_files(self) -> list[str]:
        """Return the files with reward functions."""
        return [item.file for item in self.reward_funcs if item.file]

    def contradictions(self, non_default: set[str]) -> Iterator[Contradiction]:
        """Yield missing settings of GRPO, and conflicts among its settings."""
        yield from self._check_rewards()
        yield from self._check_divergence()
        if self.lora_dropout and self.tuning == "lora":
            yield Contradiction(
                f"lora_dropout={self.lora_dropout} with method=grpo: completions are sampled without dropout, so "
                "training with dropout would use another policy than the one that sampled them. Set lora_dropout: 0",
                "lora_dropout",
                "method",
            )
        yield from self._check_loss()
        yield from self._check_staleness()
        yield from self._check_corrections()
        yield from super().contradictions(non_default)
        unavailable = {
            "packing": self.packing,
            "train_on": self.train_on != "assistant",
            "router_aux_loss_coef": self.router_aux_loss_coef > 0,
            "compile": self.compile,
            "expert_parallel_size": self.expert_parallel_size == "auto",
        }
        for name in (name for name, is_set in unavailable.items() if is_set):
            value = getattr(self, name)
            shown = f"{name}={value}" if isinstance(value, str | int | float) else name
            yield Contradiction(f"{shown} is not available with method: grpo. Drop it", name)

    def _check_rewards(self) -> Iterator[Contradiction]:
        if not self.reward_funcs:
            yield Contradiction(
                "method=grpo without reward_funcs: GRPO learns from rewards alone. Set reward_funcs", "method"
            )
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            yield Contradiction(
                f"reward_weights has {len(self.reward_weights)} numbers for {len(self.reward_funcs)} reward_funcs",
                "reward_weights",
                "reward_funcs",
            )
        elif self.reward_funcs and not any(item.weight for item in self.rewards):
            yield Contradiction(
                "each of reward_funcs has weight 0, so no completion would have a reward. Give one a weight",
                "reward_funcs",
                "reward_weights",
            )
        if self.global_batch_size is not None and self.global_batch_size % self.num_generations:
            yield Contradiction(
                f"global_batch_size={self.global_batch_size} completions per step are not a multiple of "
                f"num_generations={self.num_generations}, so a group would be split between steps",
                "global_batch_size",
                "num_generations",
            )

    def _check_divergence(self) -> Iterator[Contradiction]:
        """Yield why `beta` has no reference: no model without its adapter, or one that training did not begin with."""
        if not self.beta:
            if self.kl_in_reward:
                yield Contradiction(
                    "kl_in_reward=True with beta=0: nothing is taken from rewards. Set beta", "kl_in_reward"
                )
            return
        if self.kl_in_reward and not self.knows_rollout_logprobs:
            yield Contradiction(
                "kl_in_reward=True with top_p or top_k in vLLM: the divergence is measured by the server's logprobs, "
                "which are then normalised over the tokens that these leave. Drop top_p and top_k, or kl_in_reward",
                "kl_in_reward",
            )
        demand = f"beta={self.beta}"
        if self.tuning == "full":
            yield Contradiction(
                f"{demand} with tuning=full: the reference is the model without its adapter, and full fine-tuning has "
                "none. Set tuning: lora, or set beta: 0",
                "beta",
                "tuning",
            )
            return
        for name, setting in self.trained_in_full.items():
            yield Contradiction(
                f"{demand} with {name} in {setting}: it is trained in full, so the model without its adapter is not "
                f"the one that training began with. Leave {name} out, or set beta: 0",
                "beta",
                setting,
            )
        if self.init_adapter:
            yield Contradiction(
                f"{demand} with init_adapter: the reference is the model without any adapter, so the loss would pull "
                "the model back to its state before that adapter was trained. Merge it first (`surefoot export RUN "
                "FOLDER --merge`) and start from the result, or set beta: 0",
                "beta",
                "init_adapter",
            )

    def _check_loss(self) -> Iterator[Contradiction]:
        if self.soft_overlong_length > self.max_completion_length:
            yield Contradiction(
                f"soft_overlong_length={self.soft_overlong_length} is more than "
                f"max_completion_length={self.max_completion_length}",
                "soft_overlong_length",
                "max_completion_length",
            )
        if self.loss_type == "cispo" and self.epsilon_high is not None and self.epsilon_high < 1:
            yield Contradiction(
                f"epsilon_high={self.epsilon_high} with loss_type=cispo, for which it is the largest ratio itself: "
                f"every token would be clipped, and the loss scaled by {self.epsilon_high}. Set 5, or 1 plus the value "
                "for other losses",
                "epsilon_high",
                "loss_type",
            )
        if self.loss_type == "cispo" and self.epsilon is not None:
            yield Contradiction(
                f"epsilon={self.epsilon} with loss_type=cispo, which clips no small ratio. Drop it", "epsilon"
            )
        for name in ("epsilon", "epsilon_high") if self.loss_type == "sapo" else ():
            if getattr(self, name) is not None:
                yield Contradiction(
                    f"{name}={getattr(self, name)} with loss_type=sapo, which clips no ratio: sapo_temperature_pos and "
                    "sapo_temperature_neg bound them. Drop it",
                    name,
                    "loss_type",
                )
        for name in ("sapo_temperature_pos", "sapo_temperature_neg") if self.loss_type != "sapo" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                yield Contradiction(
                    f"{name}={getattr(self, name)} with loss_type={self.loss_type}: only sapo reads it. Drop it",
                    name,
                    "loss_type",
                )

    def _check_staleness(self) -> Iterator[Contradiction]:
        """Yield why completions cannot be generated while the model trains."""
        if self.max_staleness and self.rollout_engine == "local":
            yield Contradiction(
                f"max_staleness={self.max_staleness} with rollout_engine=local: the local engine generates with the "
                "trained model itself, which cannot train at the same time. Set rollout_engine: vllm, or "
                "max_staleness: 0",
                "max_staleness",
                "rollout_engine",
            )
        if self.vllm_sleep and self.max_staleness:
            yield Contradiction(
                f"vllm_sleep with max_staleness={self.max_staleness}: the server would sleep while it should generate "
                "the next completions. Drop one of them",
                "vllm_sleep",
                "max_staleness",
            )

    def _check_corrections(self) -> Iterator[Contradiction]:
        """Yield conflicts between how completions are generated and how the loss corrects for it."""
        if self.routing_replay == "first" and self.num_iterations == 1:
            yield Contradiction(
                "routing_replay=first with num_iterations=1: each completion has a single forward, so nothing can be "
                "replayed. Set routing_replay: rollout, or none",
                "routing_replay",
                "num_iterations",
            )
        if self.rollout_engine == "vllm" and 0 < self.max_staleness < self.num_iterations:
            yield Contradiction(
                f"max_staleness={self.max_staleness} with num_iterations={self.num_iterations}: completions that are "
                f"generated during training lag by {self.num_iterations} steps. Set max_staleness: 0, or "
                f"{self.num_iterations}",
                "max_staleness",
                "num_iterations",
            )
        is_vllm, corrects = self.rollout_engine == "vllm", self.importance_correction != "none"
        if self.max_staleness and is_vllm and not corrects:
            yield Contradiction(
                f"max_staleness={self.max_staleness} with importance_correction=none: nothing would correct for "
                "completions of older weights. Drop importance_correction, or set max_staleness: 0",
                "max_staleness",
                "importance_correction",
            )
        if self.importance_floor and not corrects:
            yield Contradiction(
                f"importance_floor={self.importance_floor} with importance_correction=none has no effect. Drop "
                "importance_floor, or set importance_correction",
                "importance_floor",
                "importance_correction",
            )
        if is_vllm and self.device == "cpu" and self.routing_replay == "rollout":
            yield Contradiction(
                "routing_replay with device=cpu: vLLM does not support it on the CPU. Set routing_replay: none",
                "routing_replay",
                "device",
            )
        if is_vllm and corrects and not self.knows_rollout_logprobs:
            yield Contradiction(
                f"rollout_engine=vllm with top_p or top_k at temperature={self.temperature:g}: the server's logprobs "
                "are then normalised over the tokens that these leave, so "
                f"importance_correction={self.importance_correction} cannot compare them with training's. Set "
                "temperature: 1.0, importance_correction: none or rollout_engine: local, or drop top_p and top_k",
                "top_p",
                "top_k",
                "temperature",
                "importance_correction",
            )


def grpo_settings(run: RunConfig) -> GrpoConfig:
    """Return the settings of a GRPO run."""
    assert isinstance(run, GrpoConfig)
    return run
