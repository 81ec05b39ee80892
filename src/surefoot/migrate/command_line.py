"""Parsing of command lines: the program, its options, and those of the launcher before it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.config.documents import parse_yaml, read_text
from surefoot.errors import ConfigError
from surefoot.migrate.parsed_run import ParsedRun, resolve_path
from surefoot.migrate.shell import UNSET, restore_dollars

HYDRA_OPTION = re.compile(r"^\w+=")
SHORT_OPTION = re.compile(r"^-[A-Za-z]")
UNKNOWN_WORD = re.compile(rf"^{UNSET}(@|\*|\{{?\w+\[[@*]\]\}}?$)")
"""`$@`, or the words of an array that the script does not set: options that cannot be known."""
DASHES = "\u2010-\u2015\u2212\uff0d"
TYPOGRAPHIC_OPTION = re.compile(
    rf"^(?=-*[{DASHES}])(?:[-{DASHES}]{{2,}}([A-Za-z]\w*)|[{DASHES}]([A-Za-z]\w*_\w+))(?:=|$)"
)
"""An option with dashes that text programs and input methods put in the place of `--`."""
OTHER_QUOTES = re.compile(r"[\u2018\u201c\u300c]\S*[\u2019\u201d\u300d]")
"""A word in quotes that text programs and input methods put in the place of `"`."""
WHICH_OUTPUT = re.compile(r"\$\(which (\S+)\)")
"""`$(which swift)`, as scripts write it for torchrun."""
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
MEGATRON = "megatron"
"""Command of ms-swift for training with Megatron."""
TRL_METHODS = ("sft", "grpo", "dpo", "kto", "reward", "rloo", "distillation")
"""Subcommands of `trl`."""
TRL_SCRIPTS = frozenset(f"{method}.py" for method in TRL_METHODS)
"""Scripts of TRL; other programs have a reward.py too."""
MODULES = {
    "swift.cli.sft": ("ms-swift", "sft"),
    "swift.cli.rlhf": ("ms-swift", "rlhf"),
    "swift.cli.pt": ("ms-swift", "pt"),
    **{f"trl.scripts.{method}": ("TRL", method) for method in TRL_METHODS},
    "axolotl.cli.train": ("axolotl", "sft"),
    "llamafactory.launcher": ("LLaMA-Factory", "sft"),
}
"""Module of `python -m` or `accelerate launch -m` -> (program, method)."""
SUBCOMMANDS = {
    ("swift", "sft"): ("ms-swift", "sft"),
    ("swift", "rlhf"): ("ms-swift", "rlhf"),
    ("swift", "pt"): ("ms-swift", "pt"),
    **{(MEGATRON, method): ("ms-swift", method) for method in ("sft", "rlhf", "pt")},
    **{("trl", method): ("TRL", method) for method in TRL_METHODS},
    ("axolotl", "train"): ("axolotl", "sft"),
    ("llamafactory-cli", "train"): ("LLaMA-Factory", "sft"),
}
"""(command, subcommand) -> (program, method)."""
LLAMAFACTORY_SCRIPTS = ("train_bash.py", "train.py", "launcher.py")
"""Scripts in LLaMA-Factory's folder `src`."""
SERVER_COMMANDS = (("swift", "rollout"), ("vllm", "serve"), ("trl", "vllm-serve"))


def is_server_command(words: Sequence[str]) -> bool:
    """Return whether a command starts an inference server that runs beside the training."""
    return any(pair in SERVER_COMMANDS for pair in pairwise(words))


class PeerCommand(NamedTuple):
    """The command of a known program among the words of a command line."""

    program: str
    method: str
    begin: int
    """Index of the first word of the command; the launcher's words are before it."""
    options_begin: int
    """Index of the first option."""


def find_command(words: Sequence[str]) -> PeerCommand | None:
    """Return the command of a known program, or None if the words contain none."""
    for index, word in enumerate(words):
        which_match = WHICH_OUTPUT.fullmatch(restore_dollars(word))
        name = which_match[1] if which_match else Path(word).name
        folders = Path(word).parts
        following = words[index + 1] if index + 1 < len(words) else ""
        if (name, following) in SUBCOMMANDS:
            return PeerCommand(*SUBCOMMANDS[name, following], index, index + 2)
        script: tuple[str, str] | None = MODULES.get(word)
        if name in ("sft.py", "rlhf.py", "pt.py") and "swift" in folders:
            script = ("ms-swift", name.removesuffix(".py"))
        elif name in ("sft.py", "grpo.py") or (name in TRL_SCRIPTS and _has_option(words, "--model_name_or_path")):
            script = ("TRL", name.removesuffix(".py"))
        elif name in LLAMAFACTORY_SCRIPTS and "src" in folders and _is_llamafactory_command(words):
            script = ("LLaMA-Factory", "sft")
        if script is not None:
            return PeerCommand(*script, index, index + 1)
    return None


def _is_llamafactory_command(words: Sequence[str]) -> bool:
    """Return whether the options are those of LLaMA-Factory, because the script's name (train.py) is too common."""
    files = (".yaml", ".yml", ".json")
    return _has_option(words, "--stage", "--finetuning_type", "--template") or words[-1].endswith(files)


def _has_option(words: Sequence[str], *names: str) -> bool:
    return any(word.partition("=")[0] in names for word in words)


@dataclass
class Launcher:
    """The parsed options of torchrun, accelerate or deepspeed before the program."""

    settings: dict[str, Any] = field(default_factory=dict)
    rendezvous: dict[str, str] = field(default_factory=dict)
    other_options: dict[str, Any] = field(default_factory=dict)
    unset: set[str] = field(default_factory=set)
    """Settings whose value the script does not give."""


def parse_launcher(words: Sequence[str]) -> Launcher:
    launcher = Launcher()
    for name, value in parse_options(words)[0].items():
        if name in LAUNCHER_OPTIONS and value in ("auto", "gpu"):
            launcher.other_options[name] = value
        elif name in LAUNCHER_OPTIONS:
            launcher.settings[LAUNCHER_OPTIONS[name]] = restore_values(value)
            launcher.unset |= {LAUNCHER_OPTIONS[name]} if UNSET in str(value) else set()
        elif name in RENDEZVOUS_OPTIONS:
            launcher.rendezvous[RENDEZVOUS_OPTIONS[name]] = restore_dollars(str(value))
        elif name in ACCELERATE_OPTIONS:
            launcher.settings |= {ACCELERATE_OPTIONS[name]: restore_values(value)} if value != "auto" else {}
        elif name in ("offload_optimizer_device", "offload_param_device"):
            launcher.settings |= {"offload": "cpu"} if value not in ("none", "auto") else {}
            launcher.other_options |= {name: value} if value == "nvme" else {}
        elif name == "use_fsdp":
            launcher.settings[name] = value
        elif name.startswith("fsdp_"):
            launcher.settings.setdefault("fsdp_config", {})[name] = restore_values(value)
        elif name == "include" and ":" in str(value):  # deepspeed's form: host:0,1,2,3@other:0,1,2,3
            machines = str(value).split("@")
            launcher.settings["nproc_per_node"] = len(machines[0].partition(":")[2].split(","))
            launcher.settings |= {"nnodes": len(machines)} if len(machines) > 1 else {}
        elif name == "mixed_precision" and value in ("no", "fp16", "bf16"):  # accelerate's option
            launcher.settings |= {value: True} if value != "no" else {}
        elif name not in IGNORED_LAUNCHER_OPTIONS and name not in ("", "-m", "-u"):
            launcher.other_options[name] = restore_values(value)
    return launcher


def restore_values(value: Any) -> Any:
    """Return an option's value with `$` restored in each of its words."""
    if isinstance(value, list):
        return [restore_values(item) for item in value]
    return restore_dollars(value) if isinstance(value, str) else value


def apply_hostfile(run: ParsedRun, name: str) -> None:
    """Set nnodes and nproc_per_node from deepspeed's hostfile (`NAME slots=8` per line) unless the script sets them."""
    del run.launcher["hostfile"]
    path = resolve_path(run.base, name)
    try:
        lines = [line.partition("#")[0] for line in read_text(path).splitlines()]
    except ConfigError:
        run.notes[f"hostfile = {name}"] = f"there is no such file in {run.base}: set nnodes and nproc_per_node yourself"
        return
    slots = [int(match[1]) for line in lines if (match := re.search(r"\bslots\s*=\s*(\d{1,9})\b", line))]
    if slots:
        counts = {"nnodes": len(slots), "nproc_per_node": min(slots)}
        run.locations |= dict.fromkeys(counts.keys() - run.settings.keys(), path.name)
        run.settings = {**counts, **run.settings}


def apply_accelerate_config(run: ParsedRun, name: str) -> None:
    """Add the settings in the file of `accelerate launch --config_file`; options override them.

    Raises: ConfigError if the file holds no settings by name.
    """
    del run.launcher["config_file"]
    path = resolve_path(run.base, name)
    if not path.is_file():
        run.notes[f"config_file = {name}"] = f"there is no such file in {run.base}: set zero_stage and offload yourself"
        return
    config = parse_yaml(read_text(path), str(path))
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected settings by name.")
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
    devices = [deepspeed.get(key) for key in ("offload_optimizer_device", "offload_param_device")]
    if any(device not in (None, "none", "auto") for device in devices):
        settings["offload"] = "cpu"
    if config.get("fsdp_config") and str(config.get("distributed_type", "FSDP")).upper().startswith("FSDP"):
        settings |= {"use_fsdp": True, "fsdp_config": config["fsdp_config"]}
    run.add_settings({key: value for key, value in settings.items() if value not in (None, "auto")}, path.name)
    for option, part in RENDEZVOUS_OPTIONS.items():
        if config.get(option) is not None:
            run.rendezvous.setdefault(part, str(config[option]))


def divide_processes(settings: dict[str, Any]) -> None:
    """Divide accelerate's process count, a total, by the machines. Raises: ConfigError if it is not divisible."""
    total, machines = (str(settings.get(name, 1)) for name in ("nproc_per_node", "nnodes"))
    if total.isdecimal() and machines.isdecimal() and int(machines) > 1:
        if int(total) % int(machines):
            raise ConfigError(f"--num_processes {total} is not divided by --num_machines {machines}.")
        settings["nproc_per_node"] = int(total) // int(machines)


def parse_options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options by name, and the words that may expand to further options.

    Forms: `--name value ...`, `--name=value`, `--flag` and Hydra's `name=value`. The name of `-x` includes its dash.
    Words before the first name belong to the name "". Raises: ConfigError for an option with a typographic dash.
    """
    options: dict[str, Any] = {}
    unknown_words: list[str] = []
    name = ""
    for word in words:
        if match := TYPOGRAPHIC_OPTION.match(word):
            raise ConfigError(
                f"{word[:80]}: begins with a dash that is not `-`, so no program takes it for an option. Write "
                f"--{match[1] or match[2]}."
            )
        if OTHER_QUOTES.fullmatch(word):
            raise ConfigError(f"{word[:80]}: these quotes are none to a shell. Write ' or \".")
        if UNKNOWN_WORD.match(word) or (word.startswith(UNSET) and options.get(name, "") is not True):
            unknown_words.append(restore_dollars(word))
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
