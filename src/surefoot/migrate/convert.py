"""What another program was told -> a run.yaml that says the same, what could not be carried, and what is odd."""

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from surefoot.config.aliases import NOT_HERE
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.deepspeed import PRESETS, read_deepspeed
from surefoot.config.methods import known_fields
from surefoot.errors import ConfigError
from surefoot.findings import Finding
from surefoot.migrate.drop_invalid import drop_what_is_refused
from surefoot.migrate.field_map import TRACKERS, is_null, listed, mapped, may_be_null, number_of, rewards_of
from surefoot.migrate.lint import MOE_NAME, lint
from surefoot.migrate.output import PATHS, Imported
from surefoot.migrate.parse_input import ParsedRun, found_at
from surefoot.migrate.peer_tables import (
    DEFAULTS,
    GRPO,
    LORA_ALPHA_TIMES,
    OF_GRPO,
    REFUSED,
    SAME_HERE,
    SAME_IF,
    SWIFT_BATCH,
    TRL_LORA,
    TRL_WITH_VLLM,
    UNCUT_PROMPTS,
    UNSAID,
    VLLM_FLAGS,
    VLLM_OPTIONS,
    WITHOUT,
)
from surefoot.migrate.sources import OF_MODELSCOPE, axolotl_left, is_of_modelscope, swift_left

VARIABLES = {
    "NPROC_PER_NODE": "nproc_per_node",
    "NNODES": "nnodes",
    "MAX_PIXELS": "max_pixels",
    "MIN_PIXELS": "min_pixels",
}
SECRET = re.compile("(?i)(key|token|secret|password)$")
SECRET_OPTION = re.compile("(?i)((api|access|auth|hub|hf|wandb|swanlab|trackio|mlflow).*(key|token)|secret|password)$")
OURS = re.compile(
    "ACCELERATE_|CUDA_|GLOO_|HF_|MASTER_|MKL_|MLFLOW_|NCCL_|NUMEXPR_|OMP_|OPENBLAS_|PYTORCH_|RDZV_|SWANLAB_|TOKENIZERS_|"
    "TORCH|TRANSFORMERS_|TRITON_|UCX_|VLLM_|WANDB_|LD_LIBRARY_PATH|PATH$|PYTHONPATH"
)
"""Variables that libraries read which are used here, too."""
OF_LAUNCHERS = frozenset({"NODE_RANK", "FORCE_TORCHRUN", "GPUS_PER_NODE", "RANK"})
"""Variables that scripts set for a launcher: here each machine finds out which it is."""
USUALLY_TRUE = frozenset({"freeze_aligner", "freeze_multi_modal_projector", "completion_only_loss"})

STAGE_NAME = re.compile(r"(?i)(?:zero|(?<![a-z])z|stage)[-_]?([0-3])(?!\d)")
"""As DeepSpeed configs with a stage are called: zero3, ds_z3_config.json, stage3.json."""
NO_OFFLOAD = re.compile(r"(?i)(?:no|without|non)[-_]?offload")
OF_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "use_rslora")
OF_EVALUATION = ("eval_dataset", "eval_fraction")
WITH_ENGINE = ("vllm_server_host", "vllm_server_port", "vllm_mode")
"""Settings that `_choose_engine` looks at."""
NOT_SAID = "the script does not say what stands there"


@dataclass
class _Draft:
    """What is known so far of a run."""

    told: ParsedRun
    ours: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Our setting -> (value, where it comes from)."""
    left_out: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def value(self, name: str, otherwise: Any = None) -> Any:
        return self.ours.get(name, (otherwise, ""))[0]

    def leave_out(self, name: str, why: str) -> None:
        """Take one of our settings out again, if it is there."""
        if name in self.ours:
            self.left_out[f"{name} = {self.ours.pop(name)[0]}"] = why

    @property
    def evaluates(self) -> bool:
        return not self.ours.keys().isdisjoint(OF_EVALUATION)


def convert(told: ParsedRun) -> Imported:
    """Raises: ConfigError where what was told makes no valid run: an odd value, settings that exclude each other."""
    draft = _Draft(told)
    _begin(draft)
    for name, value in told.settings.items():
        _carry(draft, name, value)
    _read_variables(draft)
    _choose_engine(draft)
    _say_once(draft)
    _choose_evaluation(draft)
    for name, value in _defaults(told, draft.ours).items():
        draft.ours.setdefault(name, (value, f"default of {told.program}"))
    _note_what_was_not_said(draft)
    _choose_what_is_trained(draft)
    _leave_out_dropout_of_experts(draft)
    _note_routers(draft)
    _leave_out_evaluation(draft)
    _look_into_deepspeed(draft)
    _name_where_machines_meet(draft)
    draft.ours.setdefault("output_dir", ("run", "nothing was said"))
    is_fp16 = any(": fp16.enabled" in name for name in draft.left_out)
    findings = list(lint(told, is_zero3=_is_zero3(draft), is_fp16=is_fp16))
    try:
        draft.left_out |= drop_what_is_refused(told, draft.ours)
    except ConfigError as error:  # what is odd about it is worth knowing all the more
        raise ConfigError("\n\n".join([str(error), *(finding.as_text() for finding in findings)])) from error
    _note_what_is_missing(draft)
    return _finished(draft, findings)


def _begin(draft: _Draft) -> None:
    """What is known before its settings: the launcher, the script around it, the method."""
    told = draft.told
    draft.left_out |= {f"{name} = {'(not shown)' if SECRET_OPTION.search(name) else value}": "an option of the launcher"
                       for name, value in told.launcher.items()}  # fmt: skip
    draft.left_out |= dict.fromkeys(told.others, "another command of the script: import it by itself")
    draft.left_out |= told.notes
    if told.method == "pt":  # of texts, every token is trained
        told.method = "sft"
        draft.ours["train_on"] = ("all", f"stage pt of {told.program}")
        if told.program == "LLaMA-Factory" and "packing" not in told.settings:
            draft.ours["packing"] = (True, f"stage pt of {told.program}")
    if told.method == "grpo":
        draft.ours["method"] = ("grpo", told.program)
    elif told.method != "sft":
        draft.left_out[f"method = {told.method}"] = (
            f"only sft and grpo are available; `method: {told.method}` keeps this from being trained as one of them"
        )
        draft.ours["method"] = (told.method, "not available yet")


def _carry(draft: _Draft, name: str, value: Any) -> None:
    """One of their settings: into ours, or to what is left out, with its reason, or to what is not known."""
    told, left_out = draft.told, draft.left_out
    if value is None and told.program == "axolotl" and name != "datasets":  # keys without a value mean nothing there
        return
    said = f"{name} = {value}" if name else str(value)
    said = f"{name} = (not shown)" if SECRET_OPTION.search(name) else said
    origin = f"{name} of {told.places.get(name, told.program)}"
    if name == "reward_funcs":
        names = [str(one) for one in listed(value)]
        known, others = rewards_of(told.program, names, listed(told.settings.get("reward_weights") or []))
        draft.ours |= {name: (known, origin)} if known else {}
        left_out |= {f"{name} = {one}": "a function of yours: name it as file.py:function" for one in others}
        return
    left_out |= _left_beside(told, name, value, said)
    ours = mapped(told, name, value)
    if name in told.unset:
        left_out[said] = NOT_SAID
        ours = {one: there for one, there in (ours or {}).items() if one in (*PATHS, "output_dir")}
    if ours is None:
        _leave_or_list(draft, name, value, said)
        return
    for ours_name, ours_value in ours.items():
        if ours_value is None and not may_be_null(ours_name) and known_fields()[ours_name].default is not None:
            left_out[said] = f"{ours_name} must be said here"
        else:
            _overrule(draft, ours_name, ours_value, said)
            draft.ours[ours_name] = (ours_value, origin)


def _overrule(draft: _Draft, ours_name: str, ours_value: Any, said: str) -> None:
    """List what an earlier setting of theirs said of the same of ours, where that was something else."""
    value, origin = draft.ours.get(ours_name, (ours_value, ""))
    if value != ours_value:
        earlier = origin.partition(" of ")[0]
        draft.left_out[f"{earlier} = {draft.told.settings.get(earlier, value)}"] = f"{said} is taken in its place"


def _left_beside(told: ParsedRun, name: str, value: Any, said: str) -> dict[str, str]:
    """What of a setting is not carried, although others of it are."""
    if name == "datasets" and told.program == "axolotl":
        return axolotl_left(told, value)
    if name in ("dataset", "val_dataset") and told.program == "ms-swift":
        return swift_left(name, value)
    if name == "max_length" and told.program == "TRL" and is_null(value):
        return {
            said: "there always is a limit here, 2048 tokens unless you set it; longer rows are named, and none cut"
        }
    if name in ("model", "model_id_or_path") and is_of_modelscope(str(value)):
        return {said: OF_MODELSCOPE}
    if name == "report_to":
        others = [one for one in listed(value) if one not in (*TRACKERS, "none", None)]
        return {f"{name} = {one}": f"there are {', '.join(TRACKERS)}" for one in others}
    return {said: WITHOUT["load_in_4bit"]} if name == "adapter" and value == "qlora" else {}


def _leave_or_list(draft: _Draft, name: str, value: Any, said: str) -> None:
    """A setting without a counterpart."""
    left_out = draft.left_out
    if name in GRPO:
        left_out[said] = "of rollouts"
    elif name in NOT_HERE:
        if value is True or value not in (False, None, 1, "1"):
            left_out[said] = NOT_HERE[name]
    elif name in REFUSED:
        left_out[said] = REFUSED[name]
    elif name in WITHOUT:
        usual = (True, None) if name in USUALLY_TRUE else (False, None)
        left_out |= {} if value in usual else {said: WITHOUT[name]}
    elif name in VLLM_OPTIONS or name in VLLM_FLAGS or name in WITH_ENGINE:
        pass
    elif name in SAME_IF:
        same, instead = SAME_IF[name]
        left_out |= {} if isinstance(value, str | bool | None) and value in same else {said: instead}
    elif name not in SAME_HERE:
        draft.unknown.append(said)


def _read_variables(draft: _Draft) -> None:
    """Settings that are variables of the environment there."""
    for variable, name in VARIABLES.items():
        if variable not in draft.told.environment:
            continue
        count = draft.told.environment[variable]
        if variable in draft.told.unset:
            draft.left_out[f"{variable} = {count}"] = NOT_SAID
        elif not count.isdecimal():
            raise ConfigError(f"{variable}={count} is no whole number.")
        else:
            draft.ours.setdefault(name, (int(count), variable))


def _choose_engine(draft: _Draft) -> None:
    """A server that was started elsewhere, or what the one of this run is to be started with."""
    told, said = draft.told, draft.told.settings
    if draft.value("rollout_engine") == "vllm" and "vllm_server" not in draft.ours:
        named = next((name for name in ("vllm_server_host", "vllm_server_port") if said.get(name)), "vllm_mode")
        if said.get("vllm_mode") == "server" or (named != "vllm_mode" and said.get("vllm_mode") != "colocate"):
            host, port = said.get("vllm_server_host") or "127.0.0.1", said.get("vllm_server_port") or 8000
            address = f"http://{listed(host)[0]}:{listed(port)[0]}"
            draft.ours["vllm_server"] = (address, f"{named} of {told.program}")
            draft.left_out |= {f"{name} = {one}": "one server makes all completions"
                               for name in ("vllm_server_host", "vllm_server_port")
                               for one in listed(said.get(name))[1:]}  # fmt: skip
        else:
            if told.program == "TRL":
                said = {"vllm_gpu_memory_utilization": 0.3, **said}  # theirs, where nothing is said
            said = {name: value for name, value in said.items() if not _has_no_room(draft, name, value)}
            words = [f"--{option}={said[name]}" for name, option in VLLM_OPTIONS.items() if said.get(name) is not None]
            words += [f"--{option}" for name, option in VLLM_FLAGS.items() if said.get(name) is True]
            draft.ours |= {"vllm_args": (words, f"vllm_... of {told.program}")} if words else {}
    if "vllm_server" in draft.ours:
        draft.left_out[f"the server at {draft.value('vllm_server')}"] = (
            "it is to be `vllm serve`, started as docs/grpo.md says: `swift rollout` and `trl vllm-serve` speak "
            "otherwise"
        )
    if "vllm_args" not in draft.ours:
        of_server = [name for name in told.settings if name in VLLM_OPTIONS or name in VLLM_FLAGS]
        why = "of a server that the run starts itself"
        draft.left_out |= {f"{name} = {told.settings[name]}": why for name in of_server}


def _has_no_room(draft: _Draft, name: str, value: Any) -> bool:
    """Whether it is a server's context that is shorter than this run's prompts and completions; then it is left out."""
    fields, theirs = known_fields(), _defaults(draft.told, draft.ours)
    usual = {field: theirs.get(field, fields[field].default) for field in ("max_length", "max_completion_length")}
    prompt = draft.value("max_prompt_length", theirs.get("max_prompt_length")) or draft.value(
        "max_length", usual["max_length"]
    )
    completion = draft.value("max_completion_length", usual["max_completion_length"])
    given = (number_of(value), prompt, completion)
    if VLLM_OPTIONS.get(name) != "max-model-len" or not all(isinstance(one, int) for one in given):
        return False
    if given[0] >= prompt + completion:
        return False
    draft.left_out[f"{name} = {value}"] = f"prompts of {prompt} and completions of {completion} tokens need more"
    return True


def _say_once(draft: _Draft) -> None:
    """Of settings that say the same in two ways, leave out the one that the other programs do not look at."""
    for winner, other in (("max_steps", "num_train_epochs"), ("warmup_steps", "warmup_ratio")):
        if {winner, other} <= draft.ours.keys():
            value, origin = draft.ours.pop(other)
            draft.left_out[f"{origin.partition(' of ')[0]} = {value}"] = f"{winner} overrides it, there as here"


def _choose_evaluation(draft: _Draft) -> None:
    """What is evaluated on: nothing where a strategy says so; the split `test` of TRL's dataset where another does."""
    told, said = draft.told, draft.told.settings
    strategies = [said[name] for name in ("eval_strategy", "evaluation_strategy") if name in said]
    if strategies and strategies[-1] in ("no", False):
        for name in (*OF_EVALUATION, "eval_steps"):
            draft.leave_out(name, "eval_strategy: no")
        return
    if told.program != "TRL" or not isinstance(draft.value("dataset"), str):
        return
    name, origin = draft.ours["dataset"]
    train, test, subset = (said.get(f"dataset_{part}") for part in ("train_split", "test_split", "config"))

    def source(split: Any) -> dict[str, Any]:
        return {"path": name, **({"subset": subset} if subset else {}), **({"split": split} if split else {})}

    if train or subset:
        draft.ours["dataset"] = ([source(train)], origin)
    if strategies and not draft.evaluates:
        draft.ours["eval_dataset"] = (source(test or "test"), f"dataset_test_split of {told.program}")


def _note_what_was_not_said(draft: _Draft) -> None:
    """Defaults of theirs that no setting of ours says."""
    given = {name for name, (_, origin) in draft.ours.items() if not origin.startswith("default of")}
    given |= {"nproc_per_node"} & draft.ours.keys()
    notes = UNSAID.get(draft.told.program, {})
    if draft.told.method != "sft":
        notes = {name: why for name, why in notes.items() if name == "nproc_per_node"}
        if not _cuts_prompts(draft.told, draft.ours):
            notes["max_prompt_length"] = UNCUT_PROMPTS
    if notes:
        given |= {"save_steps"} if "saves_per_epoch" in draft.told.settings else set()
        draft.left_out |= {f"{name}, which was not given": why for name, why in notes.items() if name not in given}


def _choose_what_is_trained(draft: _Draft) -> None:
    """The vision tower, and what LoRA alone has."""
    is_full = draft.value("tuning") == "full"
    frozen = draft.ours.pop("freeze_vision_tower", None)
    for name in ("freeze_llm", "freeze_language_model"):
        if number_of(draft.told.settings.get(name)) is True:
            _train_the_tower_alone(draft, name, is_full=is_full, trains_tower=frozen is not None and not frozen[0])
            return
    if frozen is not None and is_full:
        draft.ours["freeze_vision_tower"] = frozen
    elif frozen is not None and not frozen[0]:  # with LoRA they adapt the tower then
        draft.ours["target_modules"] = ([*listed(draft.value("target_modules", "all")), "vision"], frozen[1])
    for name in OF_LORA if is_full else ():
        value, origin = draft.ours.pop(name, (None, "default of nobody"))
        if not origin.startswith("default of"):
            draft.left_out[f"{name} = {value}"] = "nothing is adapted in full training"


def _train_the_tower_alone(draft: _Draft, name: str, *, is_full: bool, trains_tower: bool) -> None:
    """Raises: ConfigError where that is not available."""
    where = draft.told.places.get(name, draft.told.program)
    if is_full or not trains_tower:
        raise ConfigError(
            f"{name}=True ({where}): nothing but the vision tower or what joins it to the language model is trained "
            "there. Here full training always trains the language model. LoRA can adapt the tower alone: tuning: lora, "
            "target_modules: [vision]."
        )
    draft.ours["target_modules"] = (["vision"], f"{name} of {where}")


def _note_routers(draft: _Draft) -> None:
    """All linear layers of a Mixture-of-Experts are not the same ones there."""
    name = str(draft.value("model", ""))
    targets = listed(draft.value("target_modules", ""))
    if draft.value("tuning") == "lora" and MOE_NAME.search(name) and "all" in targets and "router" not in targets:
        draft.left_out["routers, among all linear layers"] = (
            "with transformers 4, where they are linear layers, theirs adapts them, too; for that write "
            "target_modules: [all, router]"
        )


def _leave_out_dropout_of_experts(draft: _Draft) -> None:
    """LoRA of stacked experts has no dropout, here as in PEFT."""
    targets = listed(draft.value("target_modules", "all"))
    is_moe = MOE_NAME.search(str(draft.value("model", "")))
    if is_moe and draft.value("lora_dropout") and {"all", "experts"} & {str(one) for one in targets}:
        draft.leave_out("lora_dropout", "not available where experts are adapted: they are one grouped product")


def _leave_out_evaluation(draft: _Draft) -> None:
    """What of an evaluation is said twice, or of none."""
    ours, program = draft.ours, draft.told.program
    if "eval_dataset" in ours:
        draft.leave_out("eval_fraction", "the evaluation data are named")
    if draft.evaluates and program == "ms-swift" and "save_steps" in ours:
        ours.setdefault("eval_steps", (draft.value("save_steps"), f"default of {program}"))
    if not draft.evaluates:
        draft.leave_out("eval_steps", "there is nothing to evaluate on")
    if draft.told.method == "grpo":
        for name in ("packing", "train_on"):
            draft.leave_out(name, "not available with method: grpo")


def _look_into_deepspeed(draft: _Draft) -> None:
    """What the DeepSpeed config of a run says that is not carried. Raises: ConfigError for one that is none."""
    told = draft.told
    for name in DEEPSPEED_KEYS & draft.ours.keys():
        value, origin = draft.ours[name]
        if _is_there(told, value):
            for entry in read_deepspeed(_whole(told, value), told.base, origin)[1]:
                draft.left_out[f"{name}: {entry}"] = "DeepSpeed's own, without a counterpart"
            continue
        del draft.ours[name]  # a run that names it would not start
        why = f"the file is not at {told.base}: what it says could not be looked at"
        stage = STAGE_NAME.search(Path(str(value)).name)
        if stage is not None:
            draft.ours.setdefault("zero_stage", (int(stage[1]), f"the name of {Path(str(value)).name}"))
            why += f", and zero_stage is {stage[1]} by its name"
        if "offload" in str(value).lower() and not NO_OFFLOAD.search(str(value)):
            draft.ours.setdefault("offload", ("cpu", f"the name of {Path(str(value)).name}"))
        draft.left_out[f"{name} = {value}"] = why


def _name_where_machines_meet(draft: _Draft) -> None:
    told = draft.told
    if draft.value("nnodes", 1) not in (1, None) and "rdzv_endpoint" not in draft.ours:
        host = told.meeting.get("host") or told.environment.get("MASTER_ADDR") or "HOST_OF_THE_FIRST_MACHINE"
        port = told.meeting.get("port") or told.environment.get("MASTER_PORT") or 29500
        draft.ours["rdzv_endpoint"] = (told.meeting.get("endpoint") or f"{host}:{port}", "where machines meet")


def _note_what_is_missing(draft: _Draft) -> None:
    rewards = ("reward_funcs",) if draft.told.method == "grpo" else ()
    for name in ("model", "dataset", *rewards):
        if name not in draft.ours:
            draft.left_out[f"{name}, which was not given"] = "write it into the file: nothing starts without it"


def _finished(draft: _Draft, findings: list[Finding]) -> Imported:
    """Our settings in the order of the documentation, and the variables that act on their own."""
    told, ours = draft.told, draft.ours
    order = [name for name in known_fields() if name in ours] + [name for name in ours if name in DEEPSPEED_KEYS]
    settings = {name: ours[name] for name in order if ours[name][0] is not None or may_be_null(name)}
    read = OF_LAUNCHERS | VARIABLES.keys()
    variables = {name: value for name, value in told.environment.items() if name not in read}
    kept = {name: "(not shown)" if SECRET.search(name) else value
            for name, value in variables.items() if OURS.match(name)}  # fmt: skip
    unknown = [*draft.unknown, *(f"the variable {name}" for name in variables if name not in kept)]
    return Imported(told.program, settings, draft.left_out, unknown, findings, kept)


def _is_zero3(draft: _Draft) -> bool:
    """By what its DeepSpeed config says, or is called where it is not there."""
    known = _of_deepspeed(draft.told, draft.ours)
    return bool(known.get("zero_stage", draft.value("zero_stage")) == 3)


def _is_there(told: ParsedRun, config: Any) -> bool:
    """Whether what a DeepSpeed config says can be looked at."""
    return not isinstance(config, str) or config in PRESETS or found_at(told.base, config).is_file()


def _whole(told: ParsedRun, config: Any) -> Any:
    """The name of a DeepSpeed config, with the folder it is in; others as they are."""
    return str(found_at(told.base, config)) if isinstance(config, str) and config not in PRESETS else config


def _cuts_prompts(told: ParsedRun, ours: dict[str, tuple[Any, str]]) -> bool:
    """Whether prompts of a run of GRPO are cut at a length that it gives."""
    limits = ("max_prompt_length",) if told.program == "TRL" else ("max_prompt_length", "max_length")
    return told.program not in OF_GRPO or any(name in ours for name in limits)


def _defaults(told: ParsedRun, ours: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    """What the program does where nothing was said."""
    defaults = dict(DEFAULTS[told.program])
    if told.program == "TRL" and ours.get("tuning", ("full", ""))[0] == "lora":
        defaults |= TRL_LORA
    if told.method == "grpo":
        of_sft = ("max_length", "train_on") if told.program == "TRL" else ()
        defaults = {name: value for name, value in defaults.items() if name not in of_sft}
        defaults |= OF_GRPO.get(told.program, {})
        if not _cuts_prompts(told, ours):
            defaults["truncation"] = "error"
        if told.program == "TRL" and ours.get("rollout_engine", ("", ""))[0] == "vllm":
            defaults |= TRL_WITH_VLLM
        if ours.get("importance_correction", ("", ""))[0] == "none":
            defaults.pop("importance_cap", None)
    times = LORA_ALPHA_TIMES.get(told.program)
    rank = ours.get("lora_rank", (None, ""))[0]
    if times and isinstance(rank, int):
        defaults["lora_alpha"] = times * rank
    tuning = ours.get("tuning", (defaults.get("tuning"), ""))[0]
    if tuning == "full" and told.program == "ms-swift":
        defaults["learning_rate"] = 1e-5
    if told.program == "ms-swift" and told.method == "sft":
        names = ("per_device_train_batch_size", "nproc_per_node", "nnodes")
        counts = [ours.get(name, (1, ""))[0] for name in names]
        if all(isinstance(count, int) and count > 0 for count in counts):
            defaults["gradient_accumulation_steps"] = -(-SWIFT_BATCH // prod(counts))
    if "max_steps" in ours:
        defaults.pop("num_train_epochs", None)
    if told.program == "TRL" and is_null(told.settings.get("max_length", 0)):
        defaults.pop("max_length", None)
    if str(told.settings.get("dataset_dir")).upper().startswith(("ONLINE", "REMOTE:")):
        defaults.pop("dataset_dir", None)
    if {"warmup_steps", "warmup_ratio"} & ours.keys():
        defaults.pop("warmup_ratio", None)
    if "global_batch_size" in ours:
        defaults.pop("gradient_accumulation_steps", None)
    if told.program == "LLaMA-Factory" and "vl" in str(told.settings.get("template", "")):
        defaults |= {"max_pixels": 768 * 768, "min_pixels": 32 * 32}
    visible = told.environment.get("CUDA_VISIBLE_DEVICES")
    if told.program in ("LLaMA-Factory", "axolotl") and visible:  # they start a process for each
        defaults["nproc_per_node"] = len(visible.split(","))
    if told.method == "grpo":
        defaults.pop("lora_dropout", None)  # refused here: see what is said of it there
    for name in _of_deepspeed(told, ours):
        defaults.pop(name, None)
    return defaults


def _of_deepspeed(told: ParsedRun, ours: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    """Settings that a DeepSpeed config names itself; of a file that is not there nothing is known."""
    said: dict[str, Any] = {}
    for key in DEEPSPEED_KEYS & ours.keys():
        value, origin = ours[key]
        if _is_there(told, value):
            said |= {name: its for name, its, _ in read_deepspeed(_whole(told, value), told.base, origin)[0]}
    return said
