"""Parsing of command lines, scripts, YAML and JSON of other programs: the program, its method and its settings."""

import re
from collections.abc import Mapping, Sequence
from os.path import normpath
from pathlib import Path
from typing import Any

from surefoot.config.documents import parse_json, parse_yaml, read_text, shorten
from surefoot.config.methods import known_fields
from surefoot.errors import ConfigError
from surefoot.migrate.command_line import (
    MEGATRON,
    apply_accelerate_config,
    apply_hostfile,
    divide_processes,
    find_command,
    is_server_command,
    parse_launcher,
    parse_options,
    restore_values,
)
from surefoot.migrate.parsed_run import ParsedRun, resolve_path
from surefoot.migrate.python_script import read_python_script
from surefoot.migrate.shell import ASSIGNMENT, UNSET, extract_heredocs, extract_script, parse_commands, restore_dollars

IGNORED_COMMANDS = frozenset({"echo", "printf", "cat", "ls", "cd", "source", "."})
CUT_OFF = (
    "a comment or an empty line above it ends the command, so a shell does not pass it either: move it up to the other "
    "options, or delete it"
)
"""Note on options that stand alone, after the command of the run."""
DEEPSPEED_JSON_KEYS = frozenset(
    "activation_checkpointing aio amp autotuning bf16 checkpoint comms_logger communication_data_type compression "
    "csv_monitor data_efficiency data_types dump_state elasticity flops_profiler fp16 fp32_allreduce "
    "gradient_accumulation_steps gradient_clipping gradient_predivide_factor optimizer prescale_gradients scheduler "
    "seed sparse_gradients steps_per_print tensorboard train_batch_size train_micro_batch_size_per_gpu "
    "wall_clock_breakdown wandb zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization".split()
)
"""Top-level keys of a DeepSpeed JSON. Source: https://www.deepspeed.ai/docs/config-json/"""
SIGNS_OF_METHOD: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "TRL": {
        "rloo": ("normalize_advantages", "reward_clip_range"),
        "grpo": ("reward_funcs", "num_generations"),
        "kto": ("desirable_weight", "undesirable_weight"),
        "reward": ("center_rewards_coefficient",),
        "dpo": ("beta", "label_smoothing", "rpo_alpha", "ld_alpha", "precompute_ref_log_probs", "f_divergence_type"),
    },
    "axolotl": {"reward": ("reward_model",), "prm": ("process_reward_model",), "diffusion": ("diffusion",)},
}
"""Program -> method -> settings that only this method (or a later one here) has, for files that do not name theirs."""
LLAMAFACTORY_V1 = frozenset("dist_config init_config kernel_config model_class peft_config quant_config".split())
"""Settings that only configs of LLaMA-Factory v1 have. Source: examples/v1 of its repository."""
ACCEPTED_INPUTS = (
    "an ms-swift, LLaMA-Factory, TRL or axolotl command line or YAML, a Python script of TRL, or a DeepSpeed JSON"
)


def parse_run(source: str | Sequence[str]) -> ParsedRun:
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
    run = read_python_script(path, text) if path.suffix == ".py" else None
    return run if run is not None else _read_script(path, text)


def _read_mapping(path: Path, text: str, program: str | None) -> ParsedRun:
    settings = parse_json(text, str(path)) if path.suffix == ".json" else parse_yaml(text, str(path))
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ConfigError(f"{path}: contains no settings by name. Give {ACCEPTED_INPUTS}.")
    if settings.keys() & LLAMAFACTORY_V1 and program in (None, "LLaMA-Factory"):
        names = ", ".join(sorted(settings.keys() & LLAMAFACTORY_V1))
        raise ConfigError(
            f"{path}: is a config of LLaMA-Factory v1 ({names}), which is not read: its settings have other names, "
            "places and defaults. Give the same run as a config with model_name_or_path and stage, or write a run.yaml."
        )
    program = program or _detect_program(settings)
    if program is None and settings and settings.keys() <= known_fields().keys():
        raise ConfigError(f"{path}: is a run.yaml of Surefoot already. Run `surefoot train {path}`.")
    if program is None:
        names = shorten(", ".join(list(settings)[:8]), quote=False)
        raise ConfigError(f"{path}: settings of no program that is supported: {names}. Give {ACCEPTED_INPUTS}.")
    lines = {match[1]: number for number, line in enumerate(text.splitlines(), 1)
             if (match := re.match(r"""^\s*["']?([\w.-]+)["']?\s*:""", line))}  # fmt: skip
    if program == "axolotl" and isinstance(settings.get("trl"), dict):  # axolotl nests the settings of GRPO
        settings = {**settings, **settings["trl"]}
        del settings["trl"]
    locations = {key: f"{path.name}:{lines[key]}" if key in lines else path.name for key in settings}
    if program == "DeepSpeed":
        settings, locations = {"deepspeed": str(path)}, {"deepspeed": path.name}
    run = ParsedRun(
        program, dict(settings), locations, base=path.resolve().parent, method=_detect_method(program, settings)
    )
    signs = [key for key in SIGNS_OF_METHOD.get(program, {}).get(run.method, ()) if settings.get(key)]
    if signs and not any(settings.get(name) for name in ("rlhf_type", "rl", "stage")):
        why = f"the file does not name its method, and {signs[0]} is a setting of this one"
        run.notes[f"method = {run.method}"] = why
    return run


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
    trl_names = {"use_peft", "dataset_name", "trl", "max_length", "datasets"}
    return "TRL" if names & {"model_name_or_path", "dataset_name"} and names & trl_names else None


def _read_script(path: Path, text: str) -> ParsedRun:
    """Parse the first command of a known program in a shell script, with the variables set before it."""
    run: ParsedRun | None = None
    other_commands: list[str] = []
    try:
        for command in parse_commands(text):
            words = command.words
            if run is not None and words[0].startswith("--"):
                run.notes[restore_dollars(" ".join(words))[:80]] = CUT_OFF
            if words[0] in IGNORED_COMMANDS or (find_command(words) is None and not is_server_command(words)):
                continue
            if run is not None or find_command(words) is None:
                other_commands.append(restore_dollars(" ".join(words))[:80])
                continue
            base = path.resolve().parent
            run = _read_command(words, command.environment, path.name, base, extract_heredocs(text))
            why = "a branch or a loop of the script sets it: check this value"
            run.notes |= {f"${name} = {restore_dollars(value)}": why for name, value in command.uncertain.items()}
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as a shell script: {error}") from error
    if run is not None:
        run.other_commands = other_commands
        return run
    if path.suffix == ".py":
        raise ConfigError(
            f"{path}: makes no trainer of TRL (SFTTrainer, GRPOTrainer), and other Python scripts are not read. Give "
            f"{ACCEPTED_INPUTS}."
        )
    raise ConfigError(f"{path}: contains no command of a known program. Give {ACCEPTED_INPUTS}.")


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
    environment = {name: restore_dollars(value) for name, value in environment.items()}
    command = find_command(words)
    if command is None:
        raise ConfigError(f"{' '.join(words[:4]) or 'nothing'}: no command of a known program. Give {ACCEPTED_INPUTS}.")
    program, method = command.program, command.method
    launcher = parse_launcher(words[: command.begin])
    unset |= launcher.unset
    options, unknown_words = parse_options(words[command.options_begin :])
    arguments = [restore_dollars(word) for word in words[command.options_begin :]]
    notes = dict.fromkeys(unknown_words, "the script does not set this variable, so its options are unknown")
    unset |= {name for name, value in options.items() if UNSET in str(value)}
    options = _read_negations({name: restore_values(value) for name, value in options.items()})
    config = arguments[0] if arguments and not arguments[0].startswith("--") else options.get("config", "")
    if isinstance(config, str) and Path(config).suffix in (".yaml", ".yml", ".json"):  # options override the file
        options = {name: value for name, value in options.items() if name not in ("", "config")}
        heredoc = (heredocs or {}).get(normpath(config))
        if heredoc is None:
            run = _read_file(resolve_path(base, config), program)
        else:
            run = _read_mapping(base / config, heredoc, program)
            unset |= {name for name, value in run.settings.items() if "$" in str(value)}
    else:
        settings = launcher.settings | options
        run = ParsedRun(program, {}, {}, base=base, method=_detect_method(program, settings, method))
    run.uses_megatron = Path(words[command.begin]).name == MEGATRON
    run.method = run.method if method in ("sft", "rlhf") else method
    overrides = launcher.settings | options
    run.settings |= overrides
    run.locations |= dict.fromkeys(overrides, location)
    run.environment |= environment
    run.launcher |= launcher.other_options
    run.unset, run.notes, run.rendezvous = frozenset(unset), notes, launcher.rendezvous
    if isinstance(hostfile := launcher.other_options.get("hostfile"), str):
        apply_hostfile(run, hostfile)
    config_file = launcher.other_options.get("config_file")
    if "accelerate" in [Path(word).name for word in words[: command.begin]]:
        if isinstance(config_file, str):
            apply_accelerate_config(run, config_file)
        divide_processes(run.settings)
    return run


def _read_negations(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with `x = False` for `--no_x`, which the argument parser of transformers adds."""
    negated = [name for name, value in options.items() if name.startswith("no_") and value is True]
    others = {name: value for name, value in options.items() if name not in negated}
    return others | {name.removeprefix("no_"): False for name in negated}


def _detect_method(program: str, settings: Mapping[str, Any], subcommand: str = "sft") -> str:
    task = str(settings.get("task_type") or "causal_lm").lower()
    if program == "ms-swift" and task != "causal_lm":
        return task
    method = (
        settings.get("rlhf_type") or settings.get("rl") or (settings.get("stage") if program == "LLaMA-Factory" else "")
    )
    if not method and subcommand == "rlhf":
        return "dpo"  # ms-swift's default
    signs = SIGNS_OF_METHOD.get(program, {}) if not method else {}
    return str(method or next((name for name, keys in signs.items() if any(settings.get(key) for key in keys)), "sft"))
