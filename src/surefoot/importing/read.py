"""Command lines, scripts, YAML and JSON of other programs -> which program it is, and what it was told."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from surefoot.errors import ConfigError

ASSIGNMENT = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(.*)$", re.DOTALL)
HYDRA = re.compile(r"^\w+=")
SHORT = re.compile(r"^-[A-Za-z]")
VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^}]*))?\}|\$([A-Za-z_]\w*)")
"""`$NAME`, `${NAME}`, and `${NAME:-what it is otherwise}`."""
INSIDE = re.compile(r"(?<=[^\s;&|(])#")
"""A shell's comments begin where words begin."""
NO_COMMENT = "\ue000"
REDIRECTION = re.compile(r"^(\d*|&)[<>]")
HEREDOC = re.compile(r"<<-?\s*[\"']?(\w+)")
LAUNCHERS = {"nproc_per_node": "nproc_per_node", "num_processes": "nproc_per_node", "num_gpus": "nproc_per_node",
             "nnodes": "nnodes", "num_machines": "nnodes", "num_nodes": "nnodes"}  # fmt: skip
"""Options of torchrun, accelerate and deepspeed before the script."""
OF_MEETING = frozenset(
    "standalone node_rank machine_rank master_addr master_port main_process_ip main_process_port rdzv_backend rdzv_id "
    "rdzv_endpoint multi_gpu num_cpu_threads_per_process use_deepspeed max_restarts tee log_dir".split()
)
"""Others of theirs, that say how ranks find each other: here that is said when the run is started."""
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
KNOWN = "an ms-swift, LLaMA-Factory, TRL or axolotl command line or YAML, or a DeepSpeed JSON"


@dataclass
class Told:
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


def read(source: str | Sequence[str]) -> Told:
    """`source`: a file, or the words of a command line. Raises: ConfigError for what is none of the known ones."""
    if not isinstance(source, str):
        return _read_command(list(source), {}, "command line", Path.cwd())
    return _read_file(Path(source), None)


def _read_file(path: Path, program: str | None) -> Told:
    """`program`: that is given the file, where a command says so."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}. Give {KNOWN}.") from error
    if path.suffix in (".yaml", ".yml", ".json"):
        return _read_mapping(path.resolve() if program else path, text, program)
    return _read_script(path, text)


def _read_mapping(path: Path, text: str, program: str | None) -> Told:
    try:
        said = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: is no {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(said, dict) or not all(isinstance(key, str) for key in said):
        raise ConfigError(f"{path}: holds no settings by name. Give {KNOWN}.")
    program = program or _program_of(said)
    if program is None:
        raise ConfigError(f"{path}: settings of no program that is known: {', '.join(list(said)[:8])}. Give {KNOWN}.")
    lines = {match[1]: number for number, line in enumerate(text.splitlines(), 1)
             if (match := re.match(r"""^\s*["']?([\w.-]+)["']?\s*:""", line))}  # fmt: skip
    places = {key: f"{path.name}:{lines[key]}" if key in lines else path.name for key in said}
    if program == "DeepSpeed":
        said, places = {"deepspeed": str(path)}, {"deepspeed": path.name}
    return Told(program, dict(said), places, base=path.resolve().parent, method=_method(program, said))


def _program_of(said: Mapping[str, Any]) -> str | None:
    names = said.keys()
    if names & {"zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"}:
        return "DeepSpeed"
    if "base_model" in names:
        return "axolotl"
    if names & {"finetuning_type", "cutoff_len", "template"} or ("stage" in names and "model_name_or_path" in names):
        return "LLaMA-Factory"
    if names & {"train_type", "tuner_type", "rlhf_type"} and "model" in names:
        return "ms-swift"
    if names & {"model_name_or_path", "dataset_name"} and names & {"use_peft", "dataset_name", "trl", "max_length"}:
        return "TRL"
    return None


def _read_script(path: Path, text: str) -> Told:
    """The first command of a known program in a shell script, with the variables that were set before it."""
    joined = re.sub(r"\\\s*\n", " ", text)
    variables: dict[str, str] = {}
    exported: dict[str, str] = {}
    found: Told | None = None
    others: list[str] = []
    until = ""
    for line in joined.splitlines():
        line = line.strip()
        if until or not line or line.startswith("#"):
            until = "" if line == until else until
            continue
        document = HEREDOC.search(line)
        until = document[1] if document else ""
        try:
            words = _words(VARIABLE.sub(partial(_value_of, variables), line))
        except ValueError as error:
            if _command_of(line.split()) is None:  # a text over several lines, which is no command of interest
                continue
            raise ConfigError(f"{path}: cannot be read as a shell script: {error}") from error
        assigned: dict[str, str] = {}
        is_exported = bool(words) and words[0] == "export"
        while words and (is_exported or ASSIGNMENT.match(words[0])):
            word, *words = words
            if match := ASSIGNMENT.match(word):
                assigned[match[1]] = match[2]
            elif word in variables:
                assigned[word] = variables[word]
        if is_exported:
            exported |= assigned
        if not words or is_exported:  # before a command they are the command's alone
            variables |= assigned
        if not words or (_command_of(words) is None and not _serves(words)):
            continue
        if found is None and _command_of(words) is not None:
            known = {name: variables.get(name, value) for name, value in exported.items()}
            found = _read_command(words, known | assigned, path.name, path.resolve().parent)
        else:
            others.append(" ".join(words)[:80])
    if found is not None:
        found.others = others
        return found
    raise ConfigError(f"{path}: holds no command of a program that is known. Give {KNOWN}.")


def _words(line: str) -> list[str]:
    """As a shell splits them. Raises: ValueError."""
    split = shlex.split(INSIDE.sub(NO_COMMENT, line), comments=True)
    return [word.replace(NO_COMMENT, "#") for word in split]


def _value_of(variables: Mapping[str, str], use: "re.Match[str]") -> str:
    """What stands for a variable; where nothing is known of it, it stays."""
    name, otherwise = use[1] or use[3], use[2]
    if name in variables and (variables[name] or otherwise is None):
        return variables[name]
    return otherwise if otherwise is not None else use[0]


def _serves(words: Sequence[str]) -> bool:
    """Whether a command starts a server beside a run."""
    return any(pair in (("swift", "rollout"), ("vllm", "serve"), ("trl", "vllm-serve")) for pair in pairwise(words))


def _command_of(words: Sequence[str]) -> tuple[str, str, int] | None:
    """(program, method, where its options begin)."""
    for number, word in enumerate(words):
        name = Path(word).name
        following = words[number + 1] if number + 1 < len(words) else ""
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
        if name in ("train_bash.py", "train.py", "launcher.py") and "src" in Path(word).parts:
            return "LLaMA-Factory", "sft", number + 1
        if name in ("sft.py", "grpo.py"):
            return "TRL", name.removesuffix(".py"), number + 1
        if name == "axolotl" and following == "train":
            return "axolotl", "sft", number + 2
    return None


def _read_command(words: list[str], environment: dict[str, str], place: str, base: Path) -> Told:
    environment = dict(environment)
    while words and (match := ASSIGNMENT.match(words[0])):
        environment[match[1]] = match[2]
        words = words[1:]
    command = _command_of(words)
    if command is None:
        raise ConfigError(f"{' '.join(words[:4]) or 'nothing'}: no command of a program that is known. Give {KNOWN}.")
    program, method, begin = command
    settings: dict[str, Any] = {}
    launcher: dict[str, Any] = {}
    for name, value in _options(words[: begin - 1]).items():
        if name in LAUNCHERS:
            settings[LAUNCHERS[name]] = value
        elif name == "mixed_precision" and value in ("no", "fp16", "bf16"):  # of accelerate
            settings |= {value: True} if value != "no" else {}
        elif name not in OF_MEETING and name not in ("", "-m", "-u"):
            launcher[name] = value
    if "accelerate" in [Path(word).name for word in words[:begin]]:
        _per_machine(settings)
    rest = words[begin:]
    options = _options(rest)
    named = rest[0] if rest and not rest[0].startswith("--") else options.get("config", "")
    if isinstance(named, str) and Path(named).suffix in (".yaml", ".yml", ".json"):  # and options that win over it
        told = _read_file(base / named, program)
        told.method = told.method if method in ("sft", "rlhf") else method
        own = settings | {name: value for name, value in options.items() if name not in ("", "config")}
        told.settings |= own
        told.places |= dict.fromkeys(own, place)
        told.environment |= environment
        told.launcher |= launcher
        return told
    settings |= options
    told = Told(program, settings, dict.fromkeys(settings, place), environment, base, launcher=launcher)
    told.method = _method(program, settings, method) if method in ("sft", "rlhf") else method
    return told


def _per_machine(settings: dict[str, Any]) -> None:
    """accelerate's number of processes is that of all machines. Raises: ConfigError where it does not divide."""
    total, machines = (str(settings.get(name, 1)) for name in ("nproc_per_node", "nnodes"))
    if total.isdecimal() and machines.isdecimal() and int(machines) > 1:
        if int(total) % int(machines):
            raise ConfigError(f"--num_processes {total} is not divided by --num_machines {machines}.")
        settings["nproc_per_node"] = int(total) // int(machines)


def _method(program: str, settings: Mapping[str, Any], subcommand: str = "sft") -> str:
    said = (
        settings.get("rlhf_type") or settings.get("rl") or (settings.get("stage") if program == "LLaMA-Factory" else "")
    )
    if not said and subcommand == "rlhf":
        return "dpo"  # what ms-swift does then
    if not said and program == "TRL" and settings.keys() & {"reward_funcs", "num_generations"}:
        return "grpo"
    return str(said or "sft")


def _options(words: Sequence[str]) -> dict[str, Any]:
    """`--name value ...`, `--name=value`, `--flag`, and `name=value` (of Hydra); a shell's redirections end them.

    `-x` is a name as it stands; words before the first name are those of "".
    """
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word in ("|", "||", "&", "&&", ";") or REDIRECTION.match(word):
            break
        is_last = word.endswith(";")
        word = word.removesuffix(";")
        if word.startswith("--") or (HYDRA.match(word) and not name):
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
        if is_last:
            break
    return {key: _value(value) for key, value in found.items()}


def _value(text: Any) -> Any:
    if isinstance(text, list):
        return [_value(one) for one in text]
    if isinstance(text, str) and text.lower() in ("true", "false", "none", "null"):
        return {"true": True, "false": False}.get(text.lower())
    return text
