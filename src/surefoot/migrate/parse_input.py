"""Command lines, scripts, YAML and JSON of other programs -> which program it is, and what it was told."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os.path import normpath
from pathlib import Path
from typing import Any

from surefoot.config.documents import parse_json, parse_yaml, read_text, shorten
from surefoot.errors import ConfigError
from surefoot.migrate.shell import ASSIGNMENT, UNSET, commands, documents, script_of

HYDRA = re.compile(r"^\w+=")
SHORT = re.compile(r"^-[A-Za-z]")
OF_OTHERS = re.compile(rf"^{UNSET}(@|\*|\{{?\w+\[[@*]\]\}}?$)")
"""`$@`, and the words of an array that the script does not set: options of which nothing is known."""
WHICH = re.compile(r"\$\(which (\S+)\)")
"""`$(which swift)`, for torchrun."""
SUBCOMMANDS = frozenset({"sft", "rlhf", "pt", "grpo", "train"})
"""Words behind the program that say what it is to do; a script of such a name has a suffix."""
SPEAKING = frozenset({"echo", "printf", "cat", "ls", "cd", "source", "."})
LAUNCHERS = {"nproc_per_node": "nproc_per_node", "num_processes": "nproc_per_node", "num_gpus": "nproc_per_node",
             "nnodes": "nnodes", "num_machines": "nnodes", "num_nodes": "nnodes"}  # fmt: skip
"""Options of torchrun, accelerate and deepspeed before the script."""
OF_ACCELERATE = {"zero_stage": "zero_stage", "deepspeed_config_file": "deepspeed", "gradient_clipping": "max_grad_norm",
                 "gradient_accumulation_steps": "gradient_accumulation_steps"}  # fmt: skip
"""Of accelerate's before the script -> ours."""
MEETING = {"master_addr": "host", "main_process_ip": "host", "master_port": "port", "main_process_port": "port",
           "rdzv_endpoint": "endpoint"}  # fmt: skip
"""Others of theirs -> what they say of where machines meet."""
OF_MEETING = frozenset(
    "standalone node_rank machine_rank rdzv_backend rdzv_id multi_gpu num_cpu_threads_per_process use_deepspeed "
    "max_restarts tee log_dir".split()
)
"""And what here is said when the run is started, or always so."""
MODULES = {
    "swift.cli.sft": ("ms-swift", "sft"),
    "swift.cli.rlhf": ("ms-swift", "rlhf"),
    "swift.cli.pt": ("ms-swift", "pt"),
    "trl.scripts.sft": ("TRL", "sft"),
    "trl.scripts.grpo": ("TRL", "grpo"),
    "axolotl.cli.train": ("axolotl", "sft"),
    "llamafactory.launcher": ("LLaMA-Factory", "sft"),
}
"""What `python -m` and `accelerate launch -m` are given -> (program, method)."""
OF_DEEPSPEED = frozenset(
    "activation_checkpointing aio amp autotuning bf16 checkpoint comms_logger communication_data_type compression "
    "csv_monitor data_efficiency data_types dump_state elasticity flops_profiler fp16 fp32_allreduce "
    "gradient_accumulation_steps gradient_clipping gradient_predivide_factor optimizer prescale_gradients scheduler "
    "seed sparse_gradients steps_per_print tensorboard train_batch_size train_micro_batch_size_per_gpu "
    "wall_clock_breakdown wandb zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization".split()
)
"""Names at the top of a DeepSpeed JSON. Source: https://www.deepspeed.ai/docs/config-json/"""
KNOWN = "an ms-swift, LLaMA-Factory, TRL or axolotl command line or YAML, or a DeepSpeed JSON"


@dataclass
class ParsedRun:
    """What a program was told."""

    program: str
    settings: dict[str, Any]
    """Their name -> value as it was written."""
    places: dict[str, str]
    """Their name -> `train.sh` or `train.yaml:3`."""
    environment: dict[str, str] = field(default_factory=dict)
    base: Path = field(default_factory=Path.cwd)
    """Relative paths in it are relative to this folder."""
    method: str = "sft"
    launcher: dict[str, Any] = field(default_factory=dict)
    """Options before the script that mean nothing to the program itself."""
    others: list[str] = field(default_factory=list)
    """Further commands of known programs in the same script."""
    meeting: dict[str, str] = field(default_factory=dict)
    """Where machines meet: host, port, endpoint, of what the launcher was told."""
    unset: frozenset[str] = frozenset()
    """Names of settings, and of variables, whose value the script does not say: a variable of the shell, an output."""
    notes: dict[str, str] = field(default_factory=dict)
    """What else of a script is to be looked at -> why."""


def read(source: str | Sequence[str]) -> ParsedRun:
    """`source`: a file, or the words of a command line. Raises: ConfigError for what is none of the known ones."""
    if not isinstance(source, str):
        inside = script_of(source)
        if inside is not None:
            return _read_script(Path.cwd() / "command line", inside)
        return _read_command(list(source), {}, "command line", Path.cwd())
    return _read_file(Path(source), None)


def _read_file(path: Path, program: str | None) -> ParsedRun:
    """`program`: that is given the file, where a command says so."""
    try:
        text = read_text(path)
    except ConfigError as error:
        raise ConfigError(f"{error} Give {KNOWN}.") from error
    if path.suffix in (".yaml", ".yml", ".json"):
        return _read_mapping(path.resolve() if program else path, text, program)
    return _read_script(path, text)


def _read_mapping(path: Path, text: str, program: str | None) -> ParsedRun:
    said = parse_json(text, str(path)) if path.suffix == ".json" else parse_yaml(text, str(path))
    if not isinstance(said, dict) or not all(isinstance(key, str) for key in said):
        raise ConfigError(f"{path}: holds no settings by name. Give {KNOWN}.")
    program = program or _program_of(said)
    if program is None:
        names = shorten(", ".join(list(said)[:8]), quote=False)
        raise ConfigError(f"{path}: settings of no program that is known: {names}. Give {KNOWN}.")
    lines = {match[1]: number for number, line in enumerate(text.splitlines(), 1)
             if (match := re.match(r"""^\s*["']?([\w.-]+)["']?\s*:""", line))}  # fmt: skip
    if program == "axolotl" and isinstance(said.get("trl"), dict):  # of its GRPO
        said = {**said, **said["trl"]}
        del said["trl"]
    places = {key: f"{path.name}:{lines[key]}" if key in lines else path.name for key in said}
    if program == "DeepSpeed":
        said, places = {"deepspeed": str(path)}, {"deepspeed": path.name}
    return ParsedRun(program, dict(said), places, base=path.resolve().parent, method=_method(program, said))


def _program_of(said: Mapping[str, Any]) -> str | None:
    names = said.keys()
    is_deepspeed = names <= OF_DEEPSPEED and any(isinstance(value, dict) for value in said.values())
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
    """The first command of a known program in a shell script, with the variables that were set before it."""
    found: ParsedRun | None = None
    others: list[str] = []
    try:
        for command in commands(text):
            words = command.words
            if words[0] in SPEAKING or (_command_of(words) is None and not _serves(words)):
                continue
            if found is not None or _command_of(words) is None:
                others.append(_plain(" ".join(words))[:80])
                continue
            base = path.resolve().parent
            found = _read_command(words, command.environment, path.name, base, documents(text))
            found.notes |= {f"${name} = {_plain(value)}": "it is set in a branch or a loop of the script: is it this?"
                            for name, value in command.uncertain.items()}  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as a shell script: {error}") from error
    if found is not None:
        found.others = others
        return found
    raise ConfigError(f"{path}: holds no command of a program that is known. Give {KNOWN}.")


def _plain(text: str) -> str:
    return text.replace(UNSET, "$")


def _serves(words: Sequence[str]) -> bool:
    """Whether a command starts a server beside a run."""
    return any(pair in (("swift", "rollout"), ("vllm", "serve"), ("trl", "vllm-serve")) for pair in pairwise(words))


def _command_of(words: Sequence[str]) -> tuple[str, str, int] | None:
    """(program, method, where its options begin)."""
    for number, word in enumerate(words):
        which = WHICH.fullmatch(_plain(word))
        name = which[1] if which else Path(word).name
        following = words[number + 1] if number + 1 < len(words) else ""
        if name == "megatron" and following in ("sft", "pt", "rlhf"):
            raise ConfigError(
                f"megatron {following}: no command of a program that is known: ms-swift's Megatron has options of its "
                f"own, which are not read. Give the `swift {following}` of the same run."
            )
        if word in MODULES:
            return *MODULES[word], number + 1
        if name in ("sft.py", "rlhf.py", "pt.py") and "swift" in Path(word).parts:
            return "ms-swift", name.removesuffix(".py"), number + 1
        if name == "swift" and following in ("sft", "rlhf", "pt"):
            return "ms-swift", following, number + 2
        if name == "trl" and following in ("sft", "grpo"):
            return "TRL", following, number + 2
        if name == "llamafactory-cli" and following == "train":
            return "LLaMA-Factory", "sft", number + 2
        if name in ("train_bash.py", "train.py", "launcher.py") and "src" in Path(word).parts and _is_factorys(words):
            return "LLaMA-Factory", "sft", number + 1
        if name in ("sft.py", "grpo.py"):
            return "TRL", name.removesuffix(".py"), number + 1
        if name == "axolotl" and following == "train":
            return "axolotl", "sft", number + 2
    return None


def _is_factorys(words: Sequence[str]) -> bool:
    """Whether a script of so common a name is given what LLaMA-Factory's is."""
    names = {word.partition("=")[0] for word in words}
    files = (".yaml", ".yml", ".json")
    return bool(names & {"--stage", "--finetuning_type", "--template"}) or words[-1].endswith(files)


def _read_command(
    words: list[str], environment: dict[str, str], place: str, base: Path, written: Mapping[str, str] | None = None
) -> ParsedRun:
    """`written`: files that the script writes itself, by name."""
    environment = dict(environment)
    while words and (match := ASSIGNMENT.match(words[0])):
        environment[match[1]] = match[3]
        words = words[1:]
    unset = {name for name, value in environment.items() if UNSET in value}
    environment = {name: _plain(value) for name, value in environment.items()}
    command = _command_of(words)
    if command is None:
        raise ConfigError(f"{' '.join(words[:4]) or 'nothing'}: no command of a program that is known. Give {KNOWN}.")
    program, method, begin = command
    launcher = _launcher_of(words[: begin - (2 if words[begin - 1] in SUBCOMMANDS else 1)])
    unset |= launcher.unset
    options, loose = _options(words[begin:])
    rest = [_plain(word) for word in words[begin:]]
    notes = dict.fromkeys(loose, "the script does not say what it stands for: its options are not in this file")
    unset |= {name for name, value in options.items() if UNSET in str(value)}
    options = {name: _clean(value) for name, value in options.items()}
    settings = launcher.settings
    named = rest[0] if rest and not rest[0].startswith("--") else options.get("config", "")
    if isinstance(named, str) and Path(named).suffix in (".yaml", ".yml", ".json"):  # and options that win over it
        document = (written or {}).get(normpath(named))
        if document is None:
            told = _read_file(found_at(base, named), program)
        else:
            told = _read_mapping(base / named, document, program)
            unset |= {name for name, value in told.settings.items() if "$" in str(value)}
        told.method = told.method if method in ("sft", "rlhf") else method
        own = settings | {name: value for name, value in options.items() if name not in ("", "config")}
        told.settings |= own
        told.places |= dict.fromkeys(own, place)
        told.environment |= environment
        told.launcher |= launcher.others
    else:
        settings |= options
        told = ParsedRun(program, settings, dict.fromkeys(settings, place), environment, base, launcher=launcher.others)
        told.method = _method(program, settings, method) if method in ("sft", "rlhf") else method
    told.unset, told.notes, told.meeting = frozenset(unset), notes, launcher.meeting
    if isinstance(hostfile := launcher.others.get("hostfile"), str):
        _of_hostfile(told, hostfile)
    config_file = launcher.others.get("config_file")
    if "accelerate" in [Path(word).name for word in words[:begin]]:
        if isinstance(config_file, str):
            _of_accelerate(told, config_file)
        _per_machine(told.settings)
    return told


@dataclass
class _Launcher:
    """What the options of torchrun, accelerate or deepspeed say, before the program."""

    settings: dict[str, Any] = field(default_factory=dict)
    meeting: dict[str, str] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    unset: set[str] = field(default_factory=set)
    """Settings whose value the script does not say."""


def _launcher_of(words: Sequence[str]) -> _Launcher:
    said = _Launcher()
    for name, value in _options(words)[0].items():
        if name in LAUNCHERS and value in ("auto", "gpu"):
            said.others[name] = value
        elif name in LAUNCHERS:
            said.settings[LAUNCHERS[name]] = _clean(value)
            said.unset |= {LAUNCHERS[name]} if UNSET in str(value) else set()
        elif name in MEETING:
            said.meeting[MEETING[name]] = _plain(str(value))
        elif name in OF_ACCELERATE:
            said.settings |= {OF_ACCELERATE[name]: _clean(value)} if value != "auto" else {}
        elif name in ("offload_optimizer_device", "offload_param_device"):
            said.settings |= {"offload": "cpu"} if value not in ("none", "auto") else {}
            said.others |= {name: value} if value == "nvme" else {}
        elif name == "use_fsdp":
            said.settings[name] = value
        elif name.startswith("fsdp_"):
            said.settings.setdefault("fsdp_config", {})[name] = _clean(value)
        elif name == "include" and ":" in str(value):  # of deepspeed: host:0,1,2,3@other:0,1,2,3
            machines = str(value).split("@")
            said.settings["nproc_per_node"] = len(machines[0].partition(":")[2].split(","))
            said.settings |= {"nnodes": len(machines)} if len(machines) > 1 else {}
        elif name == "mixed_precision" and value in ("no", "fp16", "bf16"):  # of accelerate
            said.settings |= {value: True} if value != "no" else {}
        elif name not in OF_MEETING and name not in ("", "-m", "-u"):
            said.others[name] = _clean(value)
    return said


def _clean(value: Any) -> Any:
    if isinstance(value, list):
        return [_clean(one) for one in value]
    return _plain(value) if isinstance(value, str) else value


def found_at(base: Path, name: str) -> Path:
    """A file that a run names: beside what names it, else where the program is started, as many are from their root."""
    return next((folder / name for folder in (base, Path.cwd()) if (folder / name).exists()), base / name)


def _of_hostfile(told: ParsedRun, name: str) -> None:
    """Machines and their GPUs of deepspeed's `NAME slots=8`, a line each, where a script says nothing else of them."""
    path = found_at(told.base, name)
    try:
        lines = [line.partition("#")[0] for line in read_text(path).splitlines()]
    except ConfigError:
        told.notes[f"hostfile = {name}"] = f"the file is not at {told.base}: set nnodes and nproc_per_node as it says"
        return
    finally:
        told.launcher.pop("hostfile", None)
    slots = [int(found[1]) for line in lines if (found := re.search(r"\bslots\s*=\s*(\d{1,9})\b", line))]
    if slots:
        counts = {"nnodes": len(slots), "nproc_per_node": min(slots)}
        told.places |= dict.fromkeys(counts.keys() - told.settings.keys(), path.name)
        told.settings = {**counts, **told.settings}


def _of_accelerate(told: ParsedRun, name: str) -> None:
    """What the file of `accelerate launch --config_file` says; options win over it. Raises: ConfigError."""
    path = found_at(told.base, name)
    if not path.is_file():
        del told.launcher["config_file"]
        told.notes[f"config_file = {name}"] = f"the file is not at {told.base}: its stage and offload are not known"
        return
    said = parse_yaml(read_text(path), str(path))
    if not isinstance(said, dict):
        raise ConfigError(f"{path}: holds no settings by name.")
    del told.launcher["config_file"]
    sharding = said.get("deepspeed_config") or {}
    if not isinstance(sharding, dict):
        raise ConfigError(f"{path}: deepspeed_config={sharding!r}, and not settings by name.")
    file = sharding.get("deepspeed_config_file")
    found = {
        "nproc_per_node": said.get("num_processes"),
        "nnodes": said.get("num_machines"),
        "deepspeed": file and str(found_at(path.parent, str(file))),
        "zero_stage": None if file else sharding.get("zero_stage"),
        "gradient_accumulation_steps": sharding.get("gradient_accumulation_steps"),
        **({said["mixed_precision"]: True} if said.get("mixed_precision") in ("fp16", "bf16") else {}),
    }
    found = {key: value for key, value in found.items() if value not in (None, "auto") and key not in told.settings}
    told.settings |= found
    told.places |= dict.fromkeys(found, path.name)
    for theirs, ours in MEETING.items():
        if said.get(theirs) is not None:
            told.meeting.setdefault(ours, str(said[theirs]))
    for key in ("offload_optimizer_device", "offload_param_device"):
        if sharding.get(key) not in (None, "none", "auto"):
            told.settings.setdefault("offload", "cpu")
            told.places.setdefault("offload", path.name)
    if said.get("fsdp_config") and str(said.get("distributed_type", "FSDP")).upper().startswith("FSDP"):
        for name, value in (("use_fsdp", True), ("fsdp_config", said["fsdp_config"])):
            told.settings.setdefault(name, value)
            told.places.setdefault(name, path.name)


def _per_machine(settings: dict[str, Any]) -> None:
    """accelerate's number of processes is that of all machines. Raises: ConfigError where it does not divide."""
    total, machines = (str(settings.get(name, 1)) for name in ("nproc_per_node", "nnodes"))
    if total.isdecimal() and machines.isdecimal() and int(machines) > 1:
        if int(total) % int(machines):
            raise ConfigError(f"--num_processes {total} is not divided by --num_machines {machines}.")
        settings["nproc_per_node"] = int(total) // int(machines)


def _method(program: str, settings: Mapping[str, Any], subcommand: str = "sft") -> str:
    task = str(settings.get("task_type") or "causal_lm").lower()
    if program == "ms-swift" and task != "causal_lm":
        return task
    said = (
        settings.get("rlhf_type") or settings.get("rl") or (settings.get("stage") if program == "LLaMA-Factory" else "")
    )
    if not said and subcommand == "rlhf":
        return "dpo"  # what ms-swift does then
    if not said and program == "TRL" and settings.keys() & {"reward_funcs", "num_generations"}:
        return "grpo"
    return str(said or "sft")


def _options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(`--name value ...`, `--name=value`, `--flag`, and `name=value` (of Hydra); words that may stand for options).

    `-x` is a name as it stands; words before the first name are those of "".
    """
    found: dict[str, Any] = {}
    loose: list[str] = []
    name = ""
    for word in words:
        if OF_OTHERS.match(word) or (word.startswith(UNSET) and found.get(name, "") is not True):
            loose.append(_plain(word))
        elif word.startswith("--") or (HYDRA.match(word) and not name):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            found[name] = value if equals else True
            name = name if word.startswith("--") else ""
        elif SHORT.match(word):
            name = word
            found[name] = True
        else:
            before = found.setdefault(name, True)
            found[name] = word if before is True else [*before, word] if isinstance(before, list) else [before, word]
    return {key: _value(value) for key, value in found.items()}, loose


def _value(text: Any) -> Any:
    if isinstance(text, list):
        return [_value(one) for one in text]
    if isinstance(text, str) and text.lower() in ("true", "false", "none", "null"):
        return {"true": True, "false": False}.get(text.lower())
    return text
