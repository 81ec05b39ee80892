"""Parsing of command lines, scripts, YAML and JSON of other programs: the program, its method and its settings."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os.path import normpath
from pathlib import Path
from typing import Any

from surefoot.config.documents import parse_json, parse_yaml, read_text, shorten
from surefoot.errors import ConfigError
from surefoot.migrate.shell import ASSIGNMENT, UNSET, extract_heredocs, extract_script, parse_commands

HYDRA_OPTION = re.compile(r"^\w+=")
SHORT_OPTION = re.compile(r"^-[A-Za-z]")
UNKNOWN_WORD = re.compile(rf"^{UNSET}(@|\*|\{{?\w+\[[@*]\]\}}?$)")
"""`$@`, or the words of an array that the script does not set: options that cannot be known."""
WHICH_OUTPUT = re.compile(r"\$\(which (\S+)\)")
"""`$(which swift)`, as scripts write it for torchrun."""
SUBCOMMANDS = frozenset({"sft", "rlhf", "pt", "grpo", "train"})
"""Subcommands that follow the program's name. A script of such a name has a suffix instead."""
IGNORED_COMMANDS = frozenset({"echo", "printf", "cat", "ls", "cd", "source", "."})
LAUNCHER_OPTIONS = {"nproc_per_node": "nproc_per_node", "num_processes": "nproc_per_node", "num_gpus": "nproc_per_node",
                    "nnodes": "nnodes", "num_machines": "nnodes", "num_nodes": "nnodes"}  # fmt: skip
"""Option of torchrun, accelerate or deepspeed before the script -> Surefoot setting."""
ACCELERATE_OPTIONS = {
    "zero_stage": "zero_stage",
    "deepspeed_config_file": "deepspeed",
    "gradient_clipping": "max_grad_norm",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
"""Option of accelerate before the script -> Surefoot setting."""
RENDEZVOUS_OPTIONS = {
    "master_addr": "host",
    "main_process_ip": "host",
    "master_port": "port",
    "main_process_port": "port",
    "rdzv_endpoint": "endpoint",
}
"""Launcher option -> the part of the rendezvous address that it sets."""
IGNORED_LAUNCHER_OPTIONS = frozenset(
    "standalone node_rank machine_rank rdzv_backend rdzv_id multi_gpu num_cpu_threads_per_process use_deepspeed "
    "max_restarts tee log_dir".split()
)
"""Launcher options without a setting: Surefoot takes them when the run is started, or always acts like this."""
MODULES = {
    "swift.cli.sft": ("ms-swift", "sft"),
    "swift.cli.rlhf": ("ms-swift", "rlhf"),
    "swift.cli.pt": ("ms-swift", "pt"),
    "trl.scripts.sft": ("TRL", "sft"),
    "trl.scripts.grpo": ("TRL", "grpo"),
    "axolotl.cli.train": ("axolotl", "sft"),
    "llamafactory.launcher": ("LLaMA-Factory", "sft"),
}
"""Module of `python -m` or `accelerate launch -m` -> (program, method)."""
DEEPSPEED_JSON_KEYS = frozenset(
    "activation_checkpointing aio amp autotuning bf16 checkpoint comms_logger communication_data_type compression "
    "csv_monitor data_efficiency data_types dump_state elasticity flops_profiler fp16 fp32_allreduce "
    "gradient_accumulation_steps gradient_clipping gradient_predivide_factor optimizer prescale_gradients scheduler "
    "seed sparse_gradients steps_per_print tensorboard train_batch_size train_micro_batch_size_per_gpu "
    "wall_clock_breakdown wandb zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization".split()
)
"""Top-level keys of a DeepSpeed JSON. Source: https://www.deepspeed.ai/docs/config-json/"""
ACCEPTED_INPUTS = "an ms-swift, LLaMA-Factory, TRL or axolotl command line or YAML, or a DeepSpeed JSON"


@dataclass
class ParsedRun:
    """A run of another program, as parsed from its command line, script or config."""

    program: str
    settings: dict[str, Any]
    """Peer setting -> value as written."""
    locations: dict[str, str]
    """Peer setting -> where it is set: `train.sh` or `train.yaml:3`."""
    environment: dict[str, str] = field(default_factory=dict)
    base: Path = field(default_factory=Path.cwd)
    """Folder that relative paths of the run are relative to."""
    method: str = "sft"
    launcher: dict[str, Any] = field(default_factory=dict)
    """Launcher options before the script that the program itself does not read."""
    other_commands: list[str] = field(default_factory=list)
    """Further commands of known programs in the same script."""
    rendezvous: dict[str, str] = field(default_factory=dict)
    """Rendezvous address from the launcher's options: host, port, endpoint."""
    unset: frozenset[str] = frozenset()
    """Settings and variables whose value the script does not give: an unset shell variable, a command's output."""
    notes: dict[str, str] = field(default_factory=dict)
    """Other parts of the script that the user should check -> why."""


def read(source: str | Sequence[str]) -> ParsedRun:
    """Parse the run of another program.

    `source`: a file name, or the words of a command line. Raises: ConfigError if the program is not recognized.
    """
    if not isinstance(source, str):
        script = extract_script(source)
        if script is not None:
            return _read_script(Path.cwd() / "command line", script)
        return _read_command(list(source), {}, "command line", Path.cwd())
    return _read_file(Path(source), None)


def _read_file(path: Path, program: str | None) -> ParsedRun:
    """Parse a YAML, JSON or script file.

    `program`: the program whose command line names the file; None to detect it from the contents.
    """
    try:
        text = read_text(path)
    except ConfigError as error:
        raise ConfigError(f"{error} Give {ACCEPTED_INPUTS}.") from error
    if path.suffix in (".yaml", ".yml", ".json"):
        return _read_mapping(path.resolve() if program else path, text, program)
    return _read_script(path, text)


def _read_mapping(path: Path, text: str, program: str | None) -> ParsedRun:
    settings = parse_json(text, str(path)) if path.suffix == ".json" else parse_yaml(text, str(path))
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ConfigError(f"{path}: holds no settings by name. Give {ACCEPTED_INPUTS}.")
    program = program or _detect_program(settings)
    if program is None:
        names = shorten(", ".join(list(settings)[:8]), quote=False)
        raise ConfigError(f"{path}: settings of no program that is known: {names}. Give {ACCEPTED_INPUTS}.")
    lines = {match[1]: number for number, line in enumerate(text.splitlines(), 1)
             if (match := re.match(r"""^\s*["']?([\w.-]+)["']?\s*:""", line))}  # fmt: skip
    if program == "axolotl" and isinstance(settings.get("trl"), dict):  # axolotl nests the settings of GRPO
        settings = {**settings, **settings["trl"]}
        del settings["trl"]
    locations = {key: f"{path.name}:{lines[key]}" if key in lines else path.name for key in settings}
    if program == "DeepSpeed":
        settings, locations = {"deepspeed": str(path)}, {"deepspeed": path.name}
    return ParsedRun(
        program, dict(settings), locations, base=path.resolve().parent, method=_detect_method(program, settings)
    )


def _detect_program(settings: Mapping[str, Any]) -> str | None:
    names = settings.keys()
    is_deepspeed = names <= DEEPSPEED_JSON_KEYS and any(isinstance(value, dict) for value in settings.values())
    if names & {"zero_optimization", "train_micro_batch_size_per_gpu"} or (names and is_deepspeed):
        return "DeepSpeed"
    if "base_model" in names:
        return "axolotl"
    if names & {"finetuning_type", "cutoff_len", "template"} or ("stage" in names and "model_name_or_path" in names):
        return "LLaMA-Factory"
    if names & {"train_type", "tuner_type", "rlhf_type"} and "model" in names:
        return "ms-swift"
    if names & {"model_name_or_path", "dataset_name"} and names & {
        "use_peft",
        "dataset_name",
        "trl",
        "max_length",
        "datasets",
    }:
        return "TRL"
    return None


def _read_script(path: Path, text: str) -> ParsedRun:
    """Parse the first command of a known program in a shell script, with the variables set before it."""
    run: ParsedRun | None = None
    other_commands: list[str] = []
    try:
        for command in parse_commands(text):
            words = command.words
            if words[0] in IGNORED_COMMANDS or (_find_command(words) is None and not _is_server_command(words)):
                continue
            if run is not None or _find_command(words) is None:
                other_commands.append(_restore_dollars(" ".join(words))[:80])
                continue
            base = path.resolve().parent
            run = _read_command(words, command.environment, path.name, base, extract_heredocs(text))
            why = "it is set in a branch or a loop of the script: is it this?"
            run.notes |= {f"${name} = {_restore_dollars(value)}": why for name, value in command.uncertain.items()}
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as a shell script: {error}") from error
    if run is not None:
        run.other_commands = other_commands
        return run
    raise ConfigError(f"{path}: holds no command of a program that is known. Give {ACCEPTED_INPUTS}.")


def _restore_dollars(text: str) -> str:
    return text.replace(UNSET, "$")


def _is_server_command(words: Sequence[str]) -> bool:
    """Return whether a command starts an inference server that runs beside the training."""
    return any(pair in (("swift", "rollout"), ("vllm", "serve"), ("trl", "vllm-serve")) for pair in pairwise(words))


def _find_command(words: Sequence[str]) -> tuple[str, str, int] | None:
    """Return (program, method, index of the first option) of a command, or None if no known program is in it."""
    for index, word in enumerate(words):
        which_match = WHICH_OUTPUT.fullmatch(_restore_dollars(word))
        name = which_match[1] if which_match else Path(word).name
        following = words[index + 1] if index + 1 < len(words) else ""
        if name == "megatron" and following in ("sft", "pt", "rlhf"):
            raise ConfigError(
                f"megatron {following}: no command of a program that is known: ms-swift's Megatron has options of its "
                f"own, which are not read. Give the `swift {following}` of the same run."
            )
        if word in MODULES:
            return *MODULES[word], index + 1
        if name in ("sft.py", "rlhf.py", "pt.py") and "swift" in Path(word).parts:
            return "ms-swift", name.removesuffix(".py"), index + 1
        if name == "swift" and following in ("sft", "rlhf", "pt"):
            return "ms-swift", following, index + 2
        if name == "trl" and following in ("sft", "grpo"):
            return "TRL", following, index + 2
        if name == "llamafactory-cli" and following == "train":
            return "LLaMA-Factory", "sft", index + 2
        if (
            name in ("train_bash.py", "train.py", "launcher.py")
            and "src" in Path(word).parts
            and _is_llamafactory_command(words)
        ):
            return "LLaMA-Factory", "sft", index + 1
        if name in ("sft.py", "grpo.py"):
            return "TRL", name.removesuffix(".py"), index + 1
        if name == "axolotl" and following == "train":
            return "axolotl", "sft", index + 2
    return None


def _is_llamafactory_command(words: Sequence[str]) -> bool:
    """Return whether the options are those of LLaMA-Factory, because the script's name (train.py) is too common."""
    names = {word.partition("=")[0] for word in words}
    files = (".yaml", ".yml", ".json")
    return bool(names & {"--stage", "--finetuning_type", "--template"}) or words[-1].endswith(files)


def _read_command(
    words: list[str], environment: dict[str, str], location: str, base: Path, heredocs: Mapping[str, str] | None = None
) -> ParsedRun:
    """Parse one command: variables before it, the launcher's options, the program and its options.

    `heredocs`: file name -> text of the files that the script writes itself.
    """
    environment = dict(environment)
    while words and (match := ASSIGNMENT.match(words[0])):
        environment[match[1]] = match[3]
        words = words[1:]
    unset = {name for name, value in environment.items() if UNSET in value}
    environment = {name: _restore_dollars(value) for name, value in environment.items()}
    command = _find_command(words)
    if command is None:
        raise ConfigError(
            f"{' '.join(words[:4]) or 'nothing'}: no command of a program that is known. Give {ACCEPTED_INPUTS}."
        )
    program, method, begin = command
    launcher = _parse_launcher(words[: begin - (2 if words[begin - 1] in SUBCOMMANDS else 1)])
    unset |= launcher.unset
    options, unknown_words = _parse_options(words[begin:])
    arguments = [_restore_dollars(word) for word in words[begin:]]
    notes = dict.fromkeys(unknown_words, "the script does not say what it stands for: its options are not in this file")
    unset |= {name for name, value in options.items() if UNSET in str(value)}
    options = {name: _restore_value(value) for name, value in options.items()}
    settings = launcher.settings
    config = arguments[0] if arguments and not arguments[0].startswith("--") else options.get("config", "")
    if isinstance(config, str) and Path(config).suffix in (".yaml", ".yml", ".json"):  # options override the file
        heredoc = (heredocs or {}).get(normpath(config))
        if heredoc is None:
            run = _read_file(resolve_path(base, config), program)
        else:
            run = _read_mapping(base / config, heredoc, program)
            unset |= {name for name, value in run.settings.items() if "$" in str(value)}
        run.method = run.method if method in ("sft", "rlhf") else method
        overrides = settings | {name: value for name, value in options.items() if name not in ("", "config")}
        run.settings |= overrides
        run.locations |= dict.fromkeys(overrides, location)
        run.environment |= environment
        run.launcher |= launcher.other_options
    else:
        settings |= options
        run = ParsedRun(
            program, settings, dict.fromkeys(settings, location), environment, base, launcher=launcher.other_options
        )
        run.method = _detect_method(program, settings, method) if method in ("sft", "rlhf") else method
    run.unset, run.notes, run.rendezvous = frozenset(unset), notes, launcher.rendezvous
    if isinstance(hostfile := launcher.other_options.get("hostfile"), str):
        _apply_hostfile(run, hostfile)
    config_file = launcher.other_options.get("config_file")
    if "accelerate" in [Path(word).name for word in words[:begin]]:
        if isinstance(config_file, str):
            _apply_accelerate_config(run, config_file)
        _divide_processes(run.settings)
    return run


@dataclass
class _Launcher:
    """The parsed options of torchrun, accelerate or deepspeed before the program."""

    settings: dict[str, Any] = field(default_factory=dict)
    rendezvous: dict[str, str] = field(default_factory=dict)
    other_options: dict[str, Any] = field(default_factory=dict)
    unset: set[str] = field(default_factory=set)
    """Settings whose value the script does not give."""


def _parse_launcher(words: Sequence[str]) -> _Launcher:
    launcher = _Launcher()
    for name, value in _parse_options(words)[0].items():
        if name in LAUNCHER_OPTIONS and value in ("auto", "gpu"):
            launcher.other_options[name] = value
        elif name in LAUNCHER_OPTIONS:
            launcher.settings[LAUNCHER_OPTIONS[name]] = _restore_value(value)
            launcher.unset |= {LAUNCHER_OPTIONS[name]} if UNSET in str(value) else set()
        elif name in RENDEZVOUS_OPTIONS:
            launcher.rendezvous[RENDEZVOUS_OPTIONS[name]] = _restore_dollars(str(value))
        elif name in ACCELERATE_OPTIONS:
            launcher.settings |= {ACCELERATE_OPTIONS[name]: _restore_value(value)} if value != "auto" else {}
        elif name in ("offload_optimizer_device", "offload_param_device"):
            launcher.settings |= {"offload": "cpu"} if value not in ("none", "auto") else {}
            launcher.other_options |= {name: value} if value == "nvme" else {}
        elif name == "use_fsdp":
            launcher.settings[name] = value
        elif name.startswith("fsdp_"):
            launcher.settings.setdefault("fsdp_config", {})[name] = _restore_value(value)
        elif name == "include" and ":" in str(value):  # deepspeed's form: host:0,1,2,3@other:0,1,2,3
            machines = str(value).split("@")
            launcher.settings["nproc_per_node"] = len(machines[0].partition(":")[2].split(","))
            launcher.settings |= {"nnodes": len(machines)} if len(machines) > 1 else {}
        elif name == "mixed_precision" and value in ("no", "fp16", "bf16"):  # accelerate's option
            launcher.settings |= {value: True} if value != "no" else {}
        elif name not in IGNORED_LAUNCHER_OPTIONS and name not in ("", "-m", "-u"):
            launcher.other_options[name] = _restore_value(value)
    return launcher


def _restore_value(value: Any) -> Any:
    """Return an option's value with `$` restored in each of its words."""
    if isinstance(value, list):
        return [_restore_value(item) for item in value]
    return _restore_dollars(value) if isinstance(value, str) else value


def resolve_path(base: Path, name: str) -> Path:
    """Return the path of a file named by a run: in `base` or, as scripts are often started at the root, in the cwd."""
    return next((folder / name for folder in (base, Path.cwd()) if (folder / name).exists()), base / name)


def _apply_hostfile(run: ParsedRun, name: str) -> None:
    """Set nnodes and nproc_per_node from deepspeed's hostfile (`NAME slots=8` per line) unless the script sets them."""
    path = resolve_path(run.base, name)
    try:
        lines = [line.partition("#")[0] for line in read_text(path).splitlines()]
    except ConfigError:
        run.notes[f"hostfile = {name}"] = f"the file is not at {run.base}: set nnodes and nproc_per_node as it says"
        return
    finally:
        run.launcher.pop("hostfile", None)
    slots = [int(match[1]) for line in lines if (match := re.search(r"\bslots\s*=\s*(\d{1,9})\b", line))]
    if slots:
        counts = {"nnodes": len(slots), "nproc_per_node": min(slots)}
        run.locations |= dict.fromkeys(counts.keys() - run.settings.keys(), path.name)
        run.settings = {**counts, **run.settings}


def _apply_accelerate_config(run: ParsedRun, name: str) -> None:
    """Add the settings in the file of `accelerate launch --config_file`; options override them.

    Raises: ConfigError if the file holds no settings by name.
    """
    path = resolve_path(run.base, name)
    if not path.is_file():
        del run.launcher["config_file"]
        run.notes[f"config_file = {name}"] = f"the file is not at {run.base}: its stage and offload are not known"
        return
    config = parse_yaml(read_text(path), str(path))
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds no settings by name.")
    del run.launcher["config_file"]
    deepspeed = config.get("deepspeed_config") or {}
    if not isinstance(deepspeed, dict):
        raise ConfigError(f"{path}: deepspeed_config={deepspeed!r}, and not settings by name.")
    file = deepspeed.get("deepspeed_config_file")
    settings = {
        "nproc_per_node": config.get("num_processes"),
        "nnodes": config.get("num_machines"),
        "deepspeed": file and str(resolve_path(path.parent, str(file))),
        "zero_stage": None if file else deepspeed.get("zero_stage"),
        "gradient_accumulation_steps": deepspeed.get("gradient_accumulation_steps"),
        **({config["mixed_precision"]: True} if config.get("mixed_precision") in ("fp16", "bf16") else {}),
    }
    settings = {
        key: value for key, value in settings.items() if value not in (None, "auto") and key not in run.settings
    }
    run.settings |= settings
    run.locations |= dict.fromkeys(settings, path.name)
    for option, part in RENDEZVOUS_OPTIONS.items():
        if config.get(option) is not None:
            run.rendezvous.setdefault(part, str(config[option]))
    for key in ("offload_optimizer_device", "offload_param_device"):
        if deepspeed.get(key) not in (None, "none", "auto"):
            run.settings.setdefault("offload", "cpu")
            run.locations.setdefault("offload", path.name)
    if config.get("fsdp_config") and str(config.get("distributed_type", "FSDP")).upper().startswith("FSDP"):
        for name, value in (("use_fsdp", True), ("fsdp_config", config["fsdp_config"])):
            run.settings.setdefault(name, value)
            run.locations.setdefault(name, path.name)


def _divide_processes(settings: dict[str, Any]) -> None:
    """Divide accelerate's process count, a total, by the machines. Raises: ConfigError if it is not divisible."""
    total, machines = (str(settings.get(name, 1)) for name in ("nproc_per_node", "nnodes"))
    if total.isdecimal() and machines.isdecimal() and int(machines) > 1:
        if int(total) % int(machines):
            raise ConfigError(f"--num_processes {total} is not divided by --num_machines {machines}.")
        settings["nproc_per_node"] = int(total) // int(machines)


def _detect_method(program: str, settings: Mapping[str, Any], subcommand: str = "sft") -> str:
    task = str(settings.get("task_type") or "causal_lm").lower()
    if program == "ms-swift" and task != "causal_lm":
        return task
    method = (
        settings.get("rlhf_type") or settings.get("rl") or (settings.get("stage") if program == "LLaMA-Factory" else "")
    )
    if not method and subcommand == "rlhf":
        return "dpo"  # ms-swift's default
    if not method and program == "TRL" and settings.keys() & {"reward_funcs", "num_generations"}:
        return "grpo"
    return str(method or "sft")


def _parse_options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options by name, and the words that may expand to further options.

    Forms: `--name value ...`, `--name=value`, `--flag` and Hydra's `name=value`. The name of `-x` includes its dash.
    Words before the first name belong to the name "".
    """
    options: dict[str, Any] = {}
    unknown_words: list[str] = []
    name = ""
    for word in words:
        if UNKNOWN_WORD.match(word) or (word.startswith(UNSET) and options.get(name, "") is not True):
            unknown_words.append(_restore_dollars(word))
        elif word.startswith("--") or (HYDRA_OPTION.match(word) and not name):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            options[name] = value if equals else True
            name = name if word.startswith("--") else ""
        elif SHORT_OPTION.match(word):
            name = word
            options[name] = True
        else:
            previous = options.setdefault(name, True)
            options[name] = (
                word if previous is True else [*previous, word] if isinstance(previous, list) else [previous, word]
            )
    return {key: _parse_value(value) for key, value in options.items()}, unknown_words


def _parse_value(text: Any) -> Any:
    if isinstance(text, list):
        return [_parse_value(item) for item in text]
    if isinstance(text, str) and text.lower() in ("true", "false", "none", "null"):
        return {"true": True, "false": False}.get(text.lower())
    return text
