"""Settings of a run that exclude each other, or that need others to have an effect. Independent of files and lines."""

import json
import os
import re
from collections.abc import Iterator

from surefoot.config.schema import AUTO, CONVERSATION, EPSILON, REGULAR_EXPRESSION, Contradiction, RunConfig

ENDPOINT = re.compile(r"^[^\s:]+:(\d{1,5})$")
MOST_PORT = 65535


def contradictions(run: RunConfig, non_default: set[str]) -> Iterator[Contradiction]:
    """Yield all conflicts. `non_default`: names of the settings that differ from their default."""
    yield from _check_json(run)
    yield from run.contradictions(non_default)
    yield from _check_ranks(run)
    yield from _check_tuning(run, non_default)
    yield from _check_learning_rate(run, non_default)
    yield from _check_length(run, non_default)
    yield from _check_other_pairs(run, non_default)


def _check_ranks(run: RunConfig) -> Iterator[Contradiction]:
    """Check batch sizes against ranks, the rendezvous endpoint and the webhook."""
    if run.per_device_train_batch_size == AUTO:
        if run.global_batch_size is None:
            yield Contradiction(
                "per_device_train_batch_size=auto without global_batch_size: the sequences of a step, and with them "
                "the result, would depend on the memory of the machine. Set global_batch_size",
                "per_device_train_batch_size",
            )
        if run.gradient_accumulation_steps is not None:
            yield Contradiction(
                f"per_device_train_batch_size=auto with gradient_accumulation_steps={run.gradient_accumulation_steps}: "
                "together they would set the size of a step, which global_batch_size does. Drop "
                "gradient_accumulation_steps",
                "per_device_train_batch_size",
                "gradient_accumulation_steps",
            )
    elif run.global_batch_size is not None and run.gradient_accumulation_steps is not None:
        ranks = run.nproc_per_node * run.nnodes
        product = run.rows_at_a_time * run.gradient_accumulation_steps * ranks
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
            f"nnodes={run.nnodes} without rdzv_endpoint: the machines have no rendezvous address. Give host:port of "
            "the first one, for example rdzv_endpoint: node0:29500",
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


def _check_tuning(run: RunConfig, non_default: set[str]) -> Iterator[Contradiction]:
    """Check the settings of LoRA and of full fine-tuning."""
    of_nf4 = sorted(non_default & {"quantization_block_size", "double_quantization"})
    if of_nf4 and run.quantization != "nf4":
        yield Contradiction(
            f"{', '.join(of_nf4)} without quantization=nf4 has no effect. Set quantization: nf4, or leave it out",
            *of_nf4,
        )
    if run.tuning == "full":
        lora = sorted(
            non_default
            & {
                "lora_rank",
                "lora_alpha",
                "lora_dropout",
                "use_rslora",
                "use_dora",
                "target_modules",
                "init_adapter",
                "layers_to_transform",
                "modules_to_save",
            }
        )
        if lora:
            yield Contradiction(
                f"tuning=full trains every weight, yet {', '.join(lora)} asks for LoRA. Drop them or set tuning: lora",
                *lora,
            )
        if run.quantization is not None:
            yield Contradiction(
                f"quantization={run.quantization} with tuning=full: quantised weights cannot be trained, because their "
                "steps are coarser than an update. Set tuning: lora, or quantization: null",
                "quantization",
                "tuning",
            )
        if run.loraplus_lr_ratio is not None:
            yield Contradiction(
                f"loraplus_lr_ratio={run.loraplus_lr_ratio} is of LoRA, and tuning=full trains no low-rank pairs. Drop "
                "it",
                "loraplus_lr_ratio",
                "tuning",
            )
        if run.router_bias_update_rate and (named := non_default & {"freeze_layers", "freeze_modules"}):
            yield Contradiction(
                f"router_bias_update_rate={run.router_bias_update_rate} changes the biases of all routers, also in "
                f"what {min(named)} leaves unchanged. Drop one of them",
                "router_bias_update_rate",
                min(named),
            )
        return  # the other LoRA settings have no effect then
    for name in sorted(non_default & {"freeze_layers", "freeze_modules"}):
        yield Contradiction(
            f"{name} is of full fine-tuning: LoRA changes no weight of the model. Name what it adapts in "
            "target_modules and layers_to_transform, or set tuning: full",
            name,
            "tuning",
        )
    if not run.freeze_vision_tower:
        yield Contradiction(
            "freeze_vision_tower=false is of full fine-tuning: LoRA changes no weight of the model. Name vision in "
            "target_modules to adapt the tower, or set tuning: full",
            "freeze_vision_tower",
            "tuning",
        )
    if run.router_bias_update_rate:
        yield Contradiction(
            f"router_bias_update_rate={run.router_bias_update_rate} is of full fine-tuning: LoRA leaves the model "
            "unchanged, and an adapter file could not hold the bias. Drop it, or set tuning: full",
            "router_bias_update_rate",
            "tuning",
        )
    targets = [run.target_modules] if isinstance(run.target_modules, str) else run.target_modules
    if not targets:
        yield Contradiction(
            "target_modules is empty, so LoRA would train nothing. Name a group such as attention", "target_modules"
        )
    for target in filter(REGULAR_EXPRESSION.search, targets):
        try:
            re.compile(target)
        except re.error as error:
            yield Contradiction(
                f"target_modules={target!s:.80} is no regular expression of Python: {error}. Correct it, or name "
                "groups or modules",
                "target_modules",
            )
    if run.lora_dropout and any("experts" in target.split(".") for target in targets):
        yield Contradiction(
            f"lora_dropout={run.lora_dropout} with target_modules={targets!s:.80}: dropout cannot be applied inside "
            "the grouped expert product, and PEFT refuses it too. Set lora_dropout: 0 or leave experts out",
            "lora_dropout",
            "target_modules",
        )


def _check_json(run: RunConfig) -> Iterator[Contradiction]:
    """Check that all values survive JSON (which ranks receive) and YAML (which the run folder holds)."""
    nested = {name: value for name, value in run.model_dump().items() if isinstance(value, dict | list)}
    for name, value in nested.items():
        try:
            is_same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            is_same = False
        if not is_same:
            yield Contradiction(
                f"{name}={value!s:.80} holds values that JSON does not have, or keys that are not text. Quote them: "
                "YAML reads 2024-01-01 as a date",
                name,
            )


UNUSED_BY = {
    **dict.fromkeys(("adafactor", "sgd"), ("adam_beta1", "adam_beta2", "adam_epsilon")),
    "lion": ("adam_epsilon",),
}
"""Optimizer -> settings of others that it does not read."""


def _check_learning_rate(run: RunConfig, non_default: set[str]) -> Iterator[Contradiction]:
    """Check the settings of the learning-rate schedule."""
    unused = [name for name in UNUSED_BY.get(run.optim, ()) if name in non_default]
    if unused:
        yield Contradiction(
            f"{', '.join(unused)} has no effect with optim={run.optim}. Leave it out, or set optim: adamw",
            *unused,
            "optim",
        )
    if run.optim == "sgd" and run.learning_rate == AUTO:
        yield Contradiction(
            "optim=sgd needs a learning_rate: it depends on the size of gradients, and recipes have none. Begin with "
            "0.1",
            "optim",
            "learning_rate",
        )
    if run.warmup_steps is not None and run.warmup_ratio:
        yield Contradiction(
            "warmup_steps and warmup_ratio both set the warm-up. Keep one", "warmup_steps", "warmup_ratio"
        )
    if run.lr_scheduler_type in ("constant", "inverse_sqrt") and "min_lr_ratio" in non_default:
        yield Contradiction(
            f"min_lr_ratio={run.min_lr_ratio} has no effect with lr_scheduler_type={run.lr_scheduler_type}, which has "
            "no lowest learning rate. Drop it, or choose another schedule",
            "min_lr_ratio",
            "lr_scheduler_type",
        )
    if run.lr_scheduler_type == "inverse_sqrt" and not (run.warmup_steps or run.warmup_ratio):
        yield Contradiction(
            "lr_scheduler_type=inverse_sqrt without a warm-up: the learning rate falls with the steps relative to "
            "those of the warm-up. Set warmup_steps, or choose another schedule",
            "lr_scheduler_type",
        )
    for name, schedule in (("lr_cycles", "cosine_with_restarts"), ("lr_power", "polynomial")):
        if name in non_default and run.lr_scheduler_type != schedule:
            yield Contradiction(
                f"{name}={getattr(run, name)} has no effect with lr_scheduler_type={run.lr_scheduler_type}. Drop it, "
                f"or set lr_scheduler_type: {schedule}",
                name,
                "lr_scheduler_type",
            )
    if run.lr_scheduler_type != "wsd" and "decay_ratio" in non_default:
        yield Contradiction(
            f"decay_ratio={run.decay_ratio} has no effect with lr_scheduler_type={run.lr_scheduler_type}. Drop it, or "
            "set lr_scheduler_type: wsd",
            "decay_ratio",
            "lr_scheduler_type",
        )
    if run.lr_scheduler_type == "wsd" and run.warmup_ratio + run.decay_ratio > 1 + EPSILON:
        yield Contradiction(
            f"warmup_ratio={run.warmup_ratio} and decay_ratio={run.decay_ratio} are more than the whole run, so the "
            "learning rate would jump between them. Lower one of them",
            "warmup_ratio",
            "decay_ratio",
        )


def _check_length(run: RunConfig, non_default: set[str]) -> Iterator[Contradiction]:
    """Check the length of the run and its evaluation."""
    if run.max_steps is not None and run.num_train_epochs is not None:
        yield Contradiction(
            "max_steps and num_train_epochs both set the length of the run. Keep one", "max_steps", "num_train_epochs"
        )
    for name in ("eval_steps", "evals_per_epoch"):
        if (value := getattr(run, name)) is not None and run.eval_dataset is None and not run.eval_fraction:
            yield Contradiction(
                f"{name}={value} without eval_dataset or eval_fraction: there is nothing to evaluate", name
            )
    for steps, per_epoch in (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch")):
        if {steps, per_epoch} <= non_default:
            yield Contradiction(f"{steps} and {per_epoch} set the same. Keep one", steps, per_epoch)
    if run.eval_dataset is not None and run.eval_fraction:
        yield Contradiction(
            "eval_dataset and eval_fraction both set the held-out data. Keep one", "eval_dataset", "eval_fraction"
        )


def _check_other_pairs(run: RunConfig, non_default: set[str]) -> Iterator[Contradiction]:
    """Check other settings that exclude each other."""
    if run.truncation == "split" and (run.row != CONVERSATION or run.train_on != "all"):
        yield Contradiction(
            "truncation=split makes several samples of a long text, which is for texts of which every token is "
            "trained: set train_on: all, with method: sft. Else set right, left or drop",
            "truncation",
            "train_on",
        )
    if run.enable_thinking is not None and "enable_thinking" in run.chat_template_kwargs:
        yield Contradiction(
            "enable_thinking is set twice, also in chat_template_kwargs. Keep one",
            "enable_thinking",
            "chat_template_kwargs",
        )
    if (
        run.overwrite_output_dir
        and isinstance(run.resume_from_checkpoint, str)
        and "resume_from_checkpoint" in non_default
    ):
        yield Contradiction(
            "overwrite_output_dir deletes the run that resume_from_checkpoint would go on from. Keep one",
            "overwrite_output_dir",
            "resume_from_checkpoint",
        )
