"""The settings of distillation, and the conflicts among them."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from surefoot.config.rollout import RolloutConfig, check_address
from surefoot.config.schema import CONVERSATION, PROMPT, Contradiction, Free, ModelBeside, RowKind, RunConfig

OF_ROLLOUTS = (
    frozenset(RolloutConfig.model_fields) - frozenset(RunConfig.model_fields) - {"temperature", "max_completion_length"}
)
"""Settings that are refused without completions of the student. A limit of their length may stay when `lmbda` is 0."""


class DistillConfig(RolloutConfig):
    """Settings of a run with `method: distill`."""

    implementation: ClassVar[str] = "surefoot.methods.distill.method:Distill"

    method: Literal["distill"] = "distill"
    """Distillation: the student's distribution of each next token comes closer to a teacher's."""
    teacher_model: str | None = Field(default=None, min_length=1)
    """Model whose distribution is learned: a folder, a hub id, or the folder of a run or an adapter. It runs in the
    processes that train; if it is `model` itself and LoRA is trained, it is the model without its adapter. With
    `teacher_server` the name of the model there; needed only if the server has several."""
    teacher_server: Free[str | None] = None
    """Address of a running vLLM server with the teacher: `http://127.0.0.1:8000`. It gives the `teacher_top_k`
    likeliest tokens, for text alone."""
    teacher_timeout_s: Free[float] = Field(default=300.0, gt=0)
    """Seconds in which the server must give the log-probabilities of all samples of a rank's step."""
    teacher_top_k: int = Field(default=0, ge=0, le=1024)
    """Number of the teacher's likeliest tokens that are compared, with all other tokens as one outcome more. 0 compares
    the whole distribution, which a server does not give."""
    teacher_top_k_tail: bool = True
    """Whether all other tokens are one outcome more; else both distributions are normalised over the `teacher_top_k`
    tokens, and what the student gives to others costs nothing."""
    divergence_temperature: float | None = Field(default=None, ge=0.01)
    """Divisor of both models' logits in the loss. Default: `temperature`."""
    beta: float = Field(default=0.5, ge=0, le=1)
    """Divergence of a student q from a teacher p that is minimised. 0: the forward divergence KL(p || q). 1: the
    reverse KL(q || p). Between: the generalised Jensen-Shannon divergence, beta KL(p || m) + (1 - beta) KL(q || m) with
    m = beta p + (1 - beta) q."""
    lmbda: float = Field(default=0.0, ge=0, le=1)
    """Share of the steps that train on completions of the student itself (on-policy), drawn from (seed, step); the
    others train on the answers of the rows. With 1, rows need no answer."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood of the rows' answers, which is added where these are trained on."""

    @property
    def row(self) -> RowKind:
        """A prompt if every step trains on the student's completions, else a conversation with its answer."""
        return PROMPT if self.lmbda == 1 else CONVERSATION

    @property
    def generates(self) -> bool:
        """Whether some steps train on the student's completions."""
        return self.lmbda > 0

    @property
    def max_row_tokens(self) -> int:
        """Longest prompt in tokens if rows are prompts, else the longest sample."""
        return super().max_row_tokens if self.lmbda == 1 else self.max_length

    @property
    def row_limit_setting(self) -> str:
        """Name of the setting that limits the length of a row."""
        return super().row_limit_setting if self.lmbda == 1 else "max_length"

    @property
    def max_added_tokens(self) -> int:
        """Longest completion in tokens."""
        return self.max_completion_length if self.generates else 0

    @property
    def loss_temperature(self) -> float:
        """Divisor of the logits in the loss."""
        return self.divergence_temperature or self.temperature

    @property
    def shares_base(self) -> bool:
        """Whether the teacher is the model without its adapter."""
        is_same = self.teacher_server is None and self.teacher_model == self.model
        return is_same and self.tuning == "lora" and not self.trained_in_full

    @property
    def models_beside(self) -> list[ModelBeside]:
        """The teacher, if it is a model of its own."""
        if self.teacher_model is None or self.teacher_server is not None or self.shares_base:
            return []
        return [ModelBeside(self.teacher_model, "teacher", is_sharded=self.zero_stage == 3)]

    @property
    def running_servers(self) -> dict[str, str]:
        """`vllm_server` and `teacher_server`."""
        servers = super().running_servers
        return servers if self.teacher_server is None else {**servers, "teacher_server": self.teacher_server}

    def contradictions(self, non_default: set[str]) -> Iterator[Contradiction]:
        """Yield missing settings of distillation, and conflicts among its settings."""
        yield from super().contradictions(non_default)
        yield from self._check_teacher()
        unused = sorted(non_default & OF_ROLLOUTS) if not self.generates else []
        if unused:
            yield Contradiction(
                f"{', '.join(unused)}: a setting of completions, but lmbda=0 trains on the answers of the rows alone. "
                "Set lmbda, or drop it",
                *unused,
            )
        unavailable = {
            "packing": self.packing and self.generates,
            "train_on": self.train_on == "all" and self.generates,
            "lora_dropout": self.lora_dropout > 0 and self.tuning == "lora" and self.generates,
            "compile": self.compile,
            "expert_parallel_size": self.expert_parallel_size == "auto",
        }
        for name in (name for name, is_set in unavailable.items() if is_set):
            suffix = " and lmbda" if name in ("packing", "train_on", "lora_dropout") else ""
            yield Contradiction(
                f"{name}={getattr(self, name)} is not available with method: distill{suffix}. Drop it", name
            )
        if self.max_prompt_length is not None and 0 < self.lmbda < 1:
            yield Contradiction(
                f"max_prompt_length={self.max_prompt_length} with lmbda={self.lmbda:g}: rows have answers, and "
                "max_length limits them. Drop it, or set lmbda: 1",
                "max_prompt_length",
                "lmbda",
            )
        if self.sft_weight and self.lmbda == 1:
            yield Contradiction(
                f"sft_weight={self.sft_weight} with lmbda=1: no step trains on the answers of the rows. Drop it, or "
                "lower lmbda",
                "sft_weight",
                "lmbda",
            )

    def _check_teacher(self) -> Iterator[Contradiction]:
        if self.teacher_model is None and self.teacher_server is None:
            yield Contradiction(
                "method=distill without a teacher. Set teacher_model to a model, or teacher_server to the address of "
                "a vLLM server",
                "method",
            )
        has_noise = self.tuning == "lora" and self.lora_dropout > 0
        is_student = self.teacher_server is None and self.teacher_model == self.model
        if is_student and self.init_adapter is None and not self.sft_weight and not has_noise:
            yield Contradiction(
                "teacher_model is the model that training begins with, so the divergence is 0 and nothing is learned. "
                "Name another teacher, or set init_adapter or sft_weight",
                "teacher_model",
                "model",
            )
        if not self.teacher_top_k_tail and not self.teacher_top_k:
            yield Contradiction(
                "teacher_top_k_tail=False with teacher_top_k=0: the whole distribution is compared. Set teacher_top_k, "
                "or drop it",
                "teacher_top_k_tail",
                "teacher_top_k",
            )
        if self.teacher_server is None:
            if self.teacher_timeout_s != type(self).model_fields["teacher_timeout_s"].default:
                yield Contradiction(
                    f"teacher_timeout_s={self.teacher_timeout_s:g} without teacher_server: nothing is waited for. Drop "
                    "it, or set teacher_server",
                    "teacher_timeout_s",
                )
            return
        yield from check_address("teacher_server", self.teacher_server)
        if not self.teacher_top_k:
            yield Contradiction(
                "teacher_server with teacher_top_k=0: a server gives the likeliest tokens, and no whole distribution. "
                "Set teacher_top_k: 20, or more if the server is started with --max-logprobs",
                "teacher_server",
                "teacher_top_k",
            )
        if self.loss_temperature != 1 and self.teacher_top_k_tail:
            name = "temperature" if self.divergence_temperature is None else "divergence_temperature"
            yield Contradiction(
                f"{name}={self.loss_temperature:g} with teacher_server: log-probabilities of a server are those at "
                "temperature 1, and without all of them the share of other tokens cannot be converted. Set "
                "divergence_temperature: 1.0, teacher_top_k_tail: false, or teacher_model",
                name,
                "teacher_server",
            )


def distill_settings(run: RunConfig) -> DistillConfig:
    """Return the settings of a distillation run."""
    assert isinstance(run, DistillConfig)
    return run
