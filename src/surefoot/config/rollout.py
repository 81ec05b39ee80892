"""Settings of every method that generates completions: sampling, and the engine that generates."""

import re
from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import Field

from surefoot.config.schema import PROMPT, Contradiction, Free, RowKind, RunConfig
from surefoot.config.validate import MOST_PORT
from surefoot.config.vllm_args import (
    MEMORY_SHARE,
    MOST_TOKENS,
    OF_THE_RUN,
    TENSOR_PARALLEL,
    memory_share,
    most_tokens,
    tensor_parallel,
    value_of,
)

VLLM_ADDRESS = re.compile(r"^http://[^\s/:]+:(\d{1,5})/?$")


def check_address(name: str, address: str | None) -> Iterator[Contradiction]:
    """Yield what is wrong with the address of a vLLM server, if anything is. `name`: of its setting."""
    if address is None:
        return
    if not _is_address(address):
        base = address.rstrip("/").removesuffix("/v1")
        fix = f". Drop /v1: {name}: {base}" if _is_address(base) and base != address.rstrip("/") else ""
        yield Contradiction(f"{name}={address:.80} is no address of the form http://127.0.0.1:8000{fix}", name)


def _is_address(text: str) -> bool:
    match = VLLM_ADDRESS.match(text)
    return match is not None and int(match[1]) <= MOST_PORT


class RolloutConfig(RunConfig):
    """Settings of a run that trains on completions of its own model."""

    max_prompt_length: int | None = Field(default=None, gt=0)
    """Longest prompt in tokens; `truncation` decides what happens to longer ones. Default: `max_length`."""
    max_completion_length: int = Field(default=256, gt=0)
    """Most tokens of a completion, including its end token."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Divisor of the logits, in sampling and in training alike."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of likeliest tokens whose probabilities sum to this; 1 samples from all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this number of likeliest tokens; 0 samples from all tokens."""
    stop: str | list[str] = Field(default=[])
    """Texts that end a completion, besides end-of-turn tokens; the `local` engine searches the last 32 tokens."""
    rollout_engine: Literal["local", "vllm"] = "local"
    """Engine that generates completions. `local`: the trained model itself. `vllm`: a server that receives weights."""
    rollout_timeout_s: Free[float] = Field(default=1200.0, gt=0)
    """Seconds within which a rollout must have all its completions; a slower one stops the run with the reason."""
    vllm_server: Free[str | None] = None
    """Address of a running server: `http://127.0.0.1:8000`. Default: the run starts one."""
    vllm_command: Free[str] = "vllm"
    """Command that starts a server; for vLLM in another virtual environment: `/opt/vllm/bin/vllm`."""
    vllm_args: Free[list[str]] = Field(default=[])
    """Further arguments of a server that the run starts: `[--gpu-memory-utilization, "0.4"]`."""
    vllm_devices: Free[str | None] = None
    """CUDA_VISIBLE_DEVICES of a server that the run starts: `"6,7"`. Default: the devices of the run."""
    vllm_sleep: Free[bool] = False
    """Let the server release its GPU memory while the model trains, for a server on the GPUs that train."""
    vllm_start_timeout_s: Free[float] = Field(default=900.0, gt=0)
    """Seconds within which a server must be ready."""
    rollout_batch_size: Free[int | None] = Field(default=None, gt=0)
    """Most completions that a rank generates at the same time; it bounds memory. Default: all of a step."""

    @property
    def row(self) -> RowKind:
        """A prompt."""
        return PROMPT

    @property
    def generates(self) -> bool:
        """Whether the run generates completions at all."""
        return True

    @property
    def generates_during_training(self) -> bool:
        """Whether a server generates the next completions while the model trains."""
        return False

    @property
    def records_routing(self) -> bool:
        """Whether the engine reports the experts of each token."""
        return False

    @property
    def max_row_tokens(self) -> int:
        """Longest prompt in tokens."""
        return self.max_prompt_length or self.max_length

    @property
    def row_limit_setting(self) -> str:
        """Name of the setting that limits the length of a prompt."""
        return "max_prompt_length" if self.max_prompt_length else "max_length"

    @property
    def max_added_tokens(self) -> int:
        """Longest completion in tokens."""
        return self.max_completion_length

    @property
    def stops(self) -> list[str]:
        """The `stop` strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def cuts_sampling(self) -> bool:
        """Whether some tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def knows_rollout_logprobs(self) -> bool:
        """Whether the engine's log-probabilities are over all tokens, at the temperature of training."""
        return self.rollout_engine == "local" or not self.cuts_sampling or self.temperature == 1.0

    @property
    def starts_server(self) -> bool:
        """Whether the run starts a vLLM server of its own."""
        return self.rollout_engine == "vllm" and self.vllm_server is None

    @property
    def running_servers(self) -> dict[str, str]:
        """`vllm_server`."""
        uses_server = self.generates and self.rollout_engine == "vllm" and self.vllm_server is not None
        return {"vllm_server": str(self.vllm_server)} if uses_server else {}

    def contradictions(self, non_default: set[str]) -> Iterator[Contradiction]:
        """Yield conflicts among the settings of sampling and of the engine."""
        yield from super().contradictions(non_default)
        if "" in self.stops:
            yield Contradiction("stop holds an empty text, which ends every completion at once", "stop")
        if self.truncation == "right" and self.row.is_prompt:
            yield Contradiction(
                "truncation=right would cut off the end of a prompt, where the model's turn begins. Set left or drop "
                "it",
                "truncation",
            )
        if self.rollout_engine == "vllm":
            yield from self._check_vllm(non_default)
            yield from self._check_vllm_args()
        elif unused := sorted(name for name in non_default if name.startswith("vllm_")):
            yield Contradiction(
                f"{', '.join(unused)}: a setting of vLLM, but rollout_engine is local. Set rollout_engine: vllm, or "
                "drop it",
                *unused,
            )

    def _check_vllm(self, non_default: set[str]) -> Iterator[Contradiction]:
        if self.nnodes > 1 and self.vllm_server is None:
            yield Contradiction(
                f"rollout_engine=vllm with nnodes={self.nnodes}: only its own machine can reach a server that the run "
                "starts. Start a server that all machines can reach, and set vllm_server to its address",
                "rollout_engine",
                "nnodes",
            )
        if self.device == "cpu" and self.vllm_sleep:
            yield Contradiction(
                "vllm_sleep with device=cpu: vLLM does not have it on the CPU. Drop it", "vllm_sleep", "device"
            )
        yield from check_address("vllm_server", self.vllm_server)
        targets = [self.target_modules] if isinstance(self.target_modules, str) else self.target_modules
        in_full = "it is trained in full, and beside full fine-tuning only low-rank pairs are sent to a server"
        unsent = {name: (setting, in_full) for name, setting in self.trained_in_full.items()}
        if self.tuning == "lora" and "vision" in targets:
            unsent["vision"] = ("target_modules", "a server applies adapters to the language model alone")
        for name, (setting, reason) in unsent.items():
            yield Contradiction(
                f"rollout_engine=vllm with {name} in {setting}: {reason}. Leave {name} out, or set "
                "rollout_engine: local",
                "rollout_engine",
                setting,
            )
        if self.use_dora and self.tuning == "lora":
            yield Contradiction(
                "rollout_engine=vllm with use_dora: vLLM has no adapters with magnitudes. Drop use_dora, or set "
                "rollout_engine: local",
                "rollout_engine",
                "use_dora",
            )
        started = non_default & {"vllm_command", "vllm_args", "vllm_devices"}
        if self.vllm_server is not None and started:
            yield Contradiction(
                f"vllm_server names a running server, so {', '.join(sorted(started))} would start nothing. Drop one "
                "of them",
                "vllm_server",
                *sorted(started),
            )

    def _check_vllm_args(self) -> Iterator[Contradiction]:
        readers: dict[str, Callable[[list[str]], float | None]] = {
            MEMORY_SHARE: memory_share,
            TENSOR_PARALLEL: tensor_parallel,
            MOST_TOKENS: most_tokens,
        }
        values: dict[str, float | None] = {}
        for name, read in readers.items():
            try:
                values[name] = read(self.vllm_args)
            except ValueError as error:
                yield Contradiction(f"vllm_args: {name}: {error}", "vllm_args")
        for name, reason in OF_THE_RUN.items():
            if value_of(self.vllm_args, name) is not None:
                yield Contradiction(f"vllm_args: {name} is not yours to set: {reason}. Leave it out", "vllm_args")
        room, longest = values.get(MOST_TOKENS), self.max_row_tokens + self.max_completion_length
        if room is not None and room < longest:
            yield Contradiction(
                f"vllm_args: {MOST_TOKENS} {room:.0f} has no room for a prompt of {self.max_row_tokens} tokens with a "
                f"completion of {self.max_completion_length}. Leave it out, and it is {longest}",
                "vllm_args",
                "max_completion_length",
            )


def rollout_settings(run: RunConfig | None) -> RolloutConfig | None:
    """Return the settings of a run that generates completions; None for any other run."""
    return run if isinstance(run, RolloutConfig) and run.generates else None


def vllm_settings(run: RunConfig | None) -> RolloutConfig | None:
    """Return the settings of a run whose completions come from a vLLM server; None for any other run."""
    settings = rollout_settings(run)
    return settings if settings is not None and settings.rollout_engine == "vllm" else None
