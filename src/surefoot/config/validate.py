"""Settings of a run that exclude each other, or that mean nothing without others. Knows nothing of files or lines."""

import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from surefoot.config.schema import RunConfig
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

ENDPOINT = re.compile(r"^[^\s:]+:(\d{1,5})$")
VLLM_ADDRESS = re.compile(r"^http://[^\s/:]+:(\d{1,5})/?$")
MOST_PORT = 65535


class Contradiction:
    """What excludes what, why, and what to do about it; the fields that it is about."""

    def __init__(self, text: str, *fields: str) -> None:
        self.text, self.fields = text, fields


def contradictions(run: RunConfig, given: set[str]) -> Iterator[Contradiction]:
    """All there are. `given`: the fields that were asked for."""
    yield from _check_json(run)
    yield from _check_grpo(run, given)
    yield from _check_ranks(run)
    yield from _check_tuning(run, given)
    yield from _check_course(run, given)


def _check_ranks(run: RunConfig) -> Iterator[Contradiction]:
    """What is dealt to ranks, and where they meet."""
    if run.global_batch_size is not None and run.gradient_accumulation_steps is not None:
        ranks = run.nproc_per_node * run.nnodes
        product = run.per_device_train_batch_size * run.gradient_accumulation_steps * ranks
        if product != run.global_batch_size:
            yield Contradiction(
                f"global_batch_size={run.global_batch_size} but per_device_train_batch_size="
                f"{run.per_device_train_batch_size} x gradient_accumulation_steps={run.gradient_accumulation_steps} x "
                f"{ranks} ranks = {product}. Both name the sequences of one step; keep global_batch_size "
                "and drop the other",
                "global_batch_size",
                "gradient_accumulation_steps",
            )
    if run.nnodes > 1 and not run.rdzv_endpoint:
        yield Contradiction(
            f"nnodes={run.nnodes} without rdzv_endpoint: the machines have no place to meet. Give host:port of the "
            "first one, for example rdzv_endpoint: node0:29500",
            "nnodes",
        )
    if run.rdzv_endpoint is not None:
        port = ENDPOINT.match(run.rdzv_endpoint)
        if port is None or not 0 < int(port[1]) <= MOST_PORT:
            yield Contradiction(
                f"rdzv_endpoint={run.rdzv_endpoint:.80} is not host:port with a port from 1 to {MOST_PORT}. An example "
                "is node0:29500; an IPv6 address needs a name",
                "rdzv_endpoint",
            )
    if run.webhook is not None and run.webhook.removeprefix("$") not in os.environ:
        yield Contradiction(
            f"webhook={run.webhook:.80}, but the environment has no {run.webhook[1:81]}. Export it, or leave "
            "webhook out",
            "webhook",
        )


def _check_tuning(run: RunConfig, given: set[str]) -> Iterator[Contradiction]:
    """What is trained."""
    if run.tuning == "full":
        lora = sorted(
            given & {"lora_rank", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "init_adapter"}
        )
        if lora:
            yield Contradiction(
                f"tuning=full trains every weight, yet {', '.join(lora)} asks for LoRA. Drop them or set tuning: lora",
                *lora,
            )
        return  # nothing else of LoRA matters then
    if not run.freeze_vision_tower:
        yield Contradiction(
            "freeze_vision_tower=false is of full fine-tuning: LoRA changes no weight of the model. Name vision in "
            "target_modules to adapt the tower, or set tuning: full",
            "freeze_vision_tower",
            "tuning",
        )
    targets = [run.target_modules] if isinstance(run.target_modules, str) else run.target_modules
    if not targets:
        yield Contradiction(
            "target_modules is empty, so LoRA would train nothing. Name a group such as attention", "target_modules"
        )
    if run.lora_dropout and any("experts" in target for target in targets):
        yield Contradiction(
            f"lora_dropout={run.lora_dropout} with target_modules={targets!s:.80}: dropout cannot be applied inside "
            "the grouped expert product, and PEFT refuses it too. Set lora_dropout: 0 or leave experts out",
            "lora_dropout",
            "target_modules",
        )


def _check_grpo(run: RunConfig, given: set[str]) -> Iterator[Contradiction]:
    """What GRPO needs, and what means nothing without it."""
    own = {name for name in given if (RunConfig.model_fields[name].description or "").startswith("GRPO:")}
    if run.method != "grpo":
        if own:
            yield Contradiction(
                f"{', '.join(sorted(own))} is a setting of GRPO. Set method: grpo, or drop it", *sorted(own)
            )
        return
    if not run.reward_funcs:
        yield Contradiction(
            "method=grpo without reward_funcs: nothing says which answers are better. Name some", "method"
        )
    if run.reward_weights is not None and len(run.reward_weights) != len(run.reward_funcs):
        yield Contradiction(
            f"reward_weights has {len(run.reward_weights)} numbers for {len(run.reward_funcs)} reward_funcs",
            "reward_weights",
            "reward_funcs",
        )
    elif run.reward_funcs and not any(item.weight for item in run.rewards):
        yield Contradiction(
            "each of reward_funcs has weight 0, so no completion would have a reward. Give one a weight",
            "reward_funcs",
            "reward_weights",
        )
    if run.global_batch_size is not None and run.global_batch_size % run.num_generations:
        yield Contradiction(
            f"global_batch_size={run.global_batch_size} completions a step are no multiple of "
            f"num_generations={run.num_generations}, so that a group would be cut",
            "global_batch_size",
            "num_generations",
        )
    yield from _check_divergence(run)
    if run.lora_dropout and run.tuning == "lora":
        yield Contradiction(
            f"lora_dropout={run.lora_dropout} with method=grpo: completions are drawn without dropout, so that each "
            "token would be trained on under another policy than the one that drew it. Drop it",
            "lora_dropout",
            "method",
        )
    if run.soft_overlong_length > run.max_completion_length:
        yield Contradiction(
            f"soft_overlong_length={run.soft_overlong_length} is more than "
            f"max_completion_length={run.max_completion_length}",
            "soft_overlong_length",
            "max_completion_length",
        )
    if run.loss_type == "cispo" and run.epsilon_high is not None and run.epsilon_high < 1:
        yield Contradiction(
            f"epsilon_high={run.epsilon_high} with loss_type=cispo, whose largest ratio it is: every token would be "
            f"clipped, and the loss be {run.epsilon_high} of itself. Set 5, or 1 and what other losses would have",
            "epsilon_high",
            "loss_type",
        )
    if run.loss_type == "cispo" and run.epsilon is not None:
        yield Contradiction(
            f"epsilon={run.epsilon} with loss_type=cispo, which clips no small ratio. Drop it", "epsilon"
        )
    yield from _check_rollouts(run, given)
    if "" in run.stops:
        yield Contradiction("stop holds an empty text, which ends every completion at once", "stop")
    if run.truncation == "right":
        yield Contradiction(
            "truncation=right would cut off the end of a prompt, where the model's turn begins. Set left or drop",
            "truncation",
        )
    unfit = {
        "packing": run.packing,
        "train_on": run.train_on != "assistant",
        "router_aux_loss_coef": run.router_aux_loss_coef > 0,
        "compile": run.compile,
        "expert_parallel_size": run.expert_parallel_size == "auto",
    }
    for name in (name for name, is_asked in unfit.items() if is_asked):
        value = getattr(run, name)
        shown = f"{name}={value}" if isinstance(value, str | int | float) else name
        yield Contradiction(f"{shown} is not available with method: grpo. Drop it", name)


def _check_divergence(run: RunConfig) -> Iterator[Contradiction]:
    """What the divergence from the model without its adapter needs."""
    if not run.beta:
        return
    if run.tuning == "full":
        yield Contradiction(
            f"beta={run.beta} with tuning=full: the divergence is measured from the model without its adapter, and "
            "there is none. Set tuning: lora, or beta: 0",
            "beta",
            "tuning",
        )
        return
    targets = [run.target_modules] if isinstance(run.target_modules, str) else run.target_modules
    if "router" in targets:
        yield Contradiction(
            f"beta={run.beta} with router in target_modules: routers are trained in full, so the model without its "
            "adapter is not the one that training began with. Leave router out, or set beta: 0",
            "beta",
            "target_modules",
        )
    if run.init_adapter:
        yield Contradiction(
            f"beta={run.beta} with init_adapter: the divergence is measured from the model without any adapter, so it "
            "would pull back to what the model was before that adapter was trained. Merge it first (`surefoot export "
            "RUN FOLDER --merge`) and start from the result, or set beta: 0",
            "beta",
            "init_adapter",
        )


def _check_rollouts(run: RunConfig, given: set[str]) -> Iterator[Contradiction]:
    """How completions are made, and what of that training uses again."""
    if run.routing_replay == "first" and run.num_iterations == 1:
        yield Contradiction(
            "routing_replay=first with num_iterations=1: there is one forward on each completion, and none to repeat "
            "it. Set routing_replay: rollout, or none",
            "routing_replay",
            "num_iterations",
        )
    if run.max_staleness and run.rollout_engine == "local":
        yield Contradiction(
            f"max_staleness={run.max_staleness} with rollout_engine=local: it generates with the trained model itself, "
            "which cannot train meanwhile. Set rollout_engine: vllm, or max_staleness: 0",
            "max_staleness",
            "rollout_engine",
        )
    elif 0 < run.max_staleness < run.num_iterations:
        yield Contradiction(
            f"max_staleness={run.max_staleness} with num_iterations={run.num_iterations}: completions that are made "
            f"while others are trained on lag by {run.num_iterations} steps. Set it to 0, or to as many",
            "max_staleness",
            "num_iterations",
        )
    if run.max_staleness and run.rollout_engine == "vllm" and run.importance_correction == "none":
        yield Contradiction(
            f"max_staleness={run.max_staleness} with importance_correction=none: nothing would make up for completions "
            "of older weights. Drop importance_correction, or set max_staleness: 0",
            "max_staleness",
            "importance_correction",
        )
    if run.importance_floor and run.importance_correction == "none":
        yield Contradiction(
            f"importance_floor={run.importance_floor} with importance_correction=none, which weighs nothing. Drop "
            "it, or set importance_correction",
            "importance_floor",
            "importance_correction",
        )
    if run.rollout_engine == "vllm":
        yield from _check_vllm(run, given)
    elif unused := sorted(name for name in given if name.startswith("vllm_")):
        yield Contradiction(
            f"{', '.join(unused)}: a setting of vLLM, but rollout_engine is local. Set rollout_engine: vllm, or drop "
            "it",
            *unused,
        )


def _check_vllm(run: RunConfig, given: set[str]) -> Iterator[Contradiction]:
    if run.nnodes > 1 and run.vllm_server is None:
        yield Contradiction(
            f"rollout_engine=vllm with nnodes={run.nnodes}: a server that the run starts is reached from its own "
            "machine only. Start one that all of them reach, and give its address as vllm_server",
            "rollout_engine",
            "nnodes",
        )
    for name in ("vllm_sleep", "routing_replay"):
        if run.device == "cpu" and getattr(run, name) in (True, "rollout"):
            yield Contradiction(f"{name} with device=cpu: vLLM does not have it on the CPU. Drop it", name, "device")
    if run.vllm_sleep and run.max_staleness:
        yield Contradiction(
            f"vllm_sleep with max_staleness={run.max_staleness}: the server would sleep while it makes the next "
            "completions. Drop one of them",
            "vllm_sleep",
            "max_staleness",
        )
    if run.importance_correction != "none" and not run.knows_rollout_logprobs:
        yield Contradiction(
            f"rollout_engine=vllm with top_p or top_k at temperature={run.temperature:g}: the server's logprobs are "
            "then those of what is left after cutting, which "
            f"importance_correction={run.importance_correction} cannot compare with training's. Set temperature: 1.0, "
            "importance_correction: none or rollout_engine: local, or drop top_p and top_k",
            "top_p",
            "top_k",
            "temperature",
            "importance_correction",
        )
    address = VLLM_ADDRESS.match(run.vllm_server or "http://127.0.0.1:1")
    if address is None or int(address[1]) > MOST_PORT:
        yield Contradiction(
            f"vllm_server={run.vllm_server!s:.80} is no address of the form http://127.0.0.1:8000", "vllm_server"
        )
    targets = [run.target_modules] if isinstance(run.target_modules, str) else run.target_modules
    unsent = {
        "router": "routers are trained in full, and beside full fine-tuning only adapters are sent to a server",
        "vision": "a server applies adapters to the language model alone",
    }
    for target in (target for target in unsent if run.tuning == "lora" and target in targets):
        yield Contradiction(
            f"rollout_engine=vllm with {target} in target_modules: {unsent[target]}. Leave {target} out, or set "
            "rollout_engine: local",
            "rollout_engine",
            "target_modules",
        )
    readers: dict[str, Callable[[list[str]], float | None]] = {
        MEMORY_SHARE: memory_share,
        TENSOR_PARALLEL: tensor_parallel,
        MOST_TOKENS: most_tokens,
    }
    told: dict[str, float | None] = {}
    for name, read in readers.items():
        try:
            told[name] = read(run.vllm_args)
        except ValueError as error:
            yield Contradiction(f"vllm_args: {name}: {error}", "vllm_args")
    for name, reason in OF_THE_RUN.items():
        if value_of(run.vllm_args, name) is not None:
            yield Contradiction(f"vllm_args: {name} is not yours to set: {reason}. Leave it out", "vllm_args")
    room, longest = told.get(MOST_TOKENS), run.prompt_length + run.max_completion_length
    if room is not None and room < longest:
        yield Contradiction(
            f"vllm_args: {MOST_TOKENS} {room:.0f} has no room for a prompt of {run.prompt_length} tokens with a "
            f"completion of {run.max_completion_length}. Leave it out, and it is {longest}",
            "vllm_args",
            "max_completion_length",
        )
    started = given & {"vllm_command", "vllm_args", "vllm_devices"}
    if run.vllm_server is not None and started:
        yield Contradiction(
            f"vllm_server is there already, so {', '.join(sorted(started))} would start nothing. Drop one of them",
            "vllm_server",
            *sorted(started),
        )


def _check_json(run: RunConfig) -> Iterator[Contradiction]:
    """All ranks get the config as JSON, and the run folder as YAML: what neither can hold would not be the same."""
    values: dict[str, Any] = {
        "chat_template_kwargs": run.chat_template_kwargs,
        "reward_funcs": [item.args for item in run.reward_funcs],
    }
    for name, value in values.items():
        try:
            is_same = json.loads(json.dumps(value)) == value
        except TypeError:
            is_same = False
        if not is_same:
            yield Contradiction(
                f"{name}={value!s:.80} holds values that are no JSON, or keys that are no text. Quote them: YAML reads "
                "2024-01-01 as a date",
                name,
            )


def _check_course(run: RunConfig, given: set[str]) -> Iterator[Contradiction]:
    """How long the run is, what it evaluates and goes on from."""
    if run.compile and run.gradient_checkpointing:
        yield Contradiction(
            "compile and gradient_checkpointing exclude each other: routing of the first forward cannot be carried "
            "into a compiled recomputation. Keep one",
            "compile",
            "gradient_checkpointing",
        )
    if run.warmup_steps is not None and run.warmup_ratio:
        yield Contradiction(
            "warmup_steps and warmup_ratio both set the warm-up. Keep one", "warmup_steps", "warmup_ratio"
        )
    if run.max_steps is not None and run.num_train_epochs is not None:
        yield Contradiction(
            "max_steps and num_train_epochs both set the length of the run. Keep one", "max_steps", "num_train_epochs"
        )
    if run.eval_steps is not None and run.eval_dataset is None and not run.eval_fraction:
        yield Contradiction(
            f"eval_steps={run.eval_steps} without eval_dataset or eval_fraction: there is nothing to evaluate",
            "eval_steps",
        )
    if run.eval_dataset is not None and run.eval_fraction:
        yield Contradiction(
            "eval_dataset and eval_fraction both set the held-out data. Keep one", "eval_dataset", "eval_fraction"
        )
    if run.enable_thinking is not None and "enable_thinking" in run.chat_template_kwargs:
        yield Contradiction(
            "enable_thinking is set twice, also in chat_template_kwargs. Keep one",
            "enable_thinking",
            "chat_template_kwargs",
        )
    if run.overwrite_output_dir and isinstance(run.resume_from_checkpoint, str) and "resume_from_checkpoint" in given:
        yield Contradiction(
            "overwrite_output_dir deletes the run that resume_from_checkpoint would go on from. Keep one",
            "overwrite_output_dir",
            "resume_from_checkpoint",
        )
