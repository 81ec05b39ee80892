"""Conversion of peer settings of the rollout engine: a vLLM server started elsewhere, or one that the run starts."""

from typing import Any

from surefoot.config.methods import known_fields
from surefoot.migrate.imported_run import ImportedRun
from surefoot.migrate.peer_defaults import collect_defaults
from surefoot.migrate.peer_tables import VLLM_FLAGS, VLLM_OPTIONS
from surefoot.migrate.values import as_list, parse_number

ADDRESS_SETTINGS = ("vllm_server_host", "vllm_server_port")
"""Peer settings with the address of a server that was started elsewhere."""

COLOCATED = (
    "the run starts one vLLM server for all ranks, beside them on their GPUs. vllm_sleep: true lets it release its "
    "memory between rollouts; vllm_devices gives it GPUs of its own"
)
"""Note on vLLM engines inside the ranks."""


def choose_rollout_engine(imported: ImportedRun) -> None:
    """Set `vllm_server` for a server started elsewhere, or `vllm_args` for the server that this run starts."""
    options = imported.source.settings
    if imported.get_value("rollout_engine") == "vllm" and "vllm_server" not in imported.settings:
        mode = options.get("vllm_mode")
        address_setting = next((name for name in ADDRESS_SETTINGS if options.get(name)), None)
        if mode == "server" or (address_setting is not None and mode != "colocate"):
            _set_server_address(imported, address_setting or "vllm_mode")
        else:
            _set_server_arguments(imported)
        if mode == "colocate":
            imported.left_out["vllm_mode = colocate"] = COLOCATED
    if "vllm_server" in imported.settings:
        imported.left_out[f"the server at {imported.get_value('vllm_server')}"] = (
            "it must be `vllm serve`, started as docs/grpo.md shows: `swift rollout` and `trl vllm-serve` have other "
            "protocols"
        )
    if "vllm_args" not in imported.settings:
        server_settings = {name: value for name, value in options.items() if name in VLLM_OPTIONS or name in VLLM_FLAGS}
        why = "it applies only to a server that the run starts itself"
        imported.left_out |= {f"{name} = {value}": why for name, value in server_settings.items()}


def _set_server_address(imported: ImportedRun, origin: str) -> None:
    """Set the address of the first server; one server generates all completions."""
    options = imported.source.settings
    hosts = as_list(options.get("vllm_server_host") or "127.0.0.1")
    ports = as_list(options.get("vllm_server_port") or 8000)
    imported.settings["vllm_server"] = (f"http://{hosts[0]}:{ports[0]}", f"{origin} of {imported.program}")
    for name in ADDRESS_SETTINGS:
        for extra in as_list(options.get(name))[1:]:
            imported.left_out[f"{name} = {extra}"] = "one server generates all completions"


def _set_server_arguments(imported: ImportedRun) -> None:
    """Set the arguments of the server that the run starts."""
    options = dict(imported.source.settings)
    if imported.program == "TRL":
        options = {"vllm_gpu_memory_utilization": 0.3, **options}  # TRL's default
    prompt, completion = _get_lengths(imported)
    for name in [name for name in options if VLLM_OPTIONS.get(name) == "max-model-len"]:
        context = parse_number(options[name])
        is_known = all(isinstance(length, int) for length in (context, prompt, completion))
        if is_known and context < prompt + completion:
            why = f"prompts of {prompt} tokens and completions of {completion} tokens need more"
            imported.left_out[f"{name} = {options.pop(name)}"] = why
    words = [f"--{option}={options[name]}" for name, option in VLLM_OPTIONS.items() if options.get(name) is not None]
    words += [f"--{option}" for name, option in VLLM_FLAGS.items() if options.get(name) is True]
    if words:
        imported.settings["vllm_args"] = (words, f"vllm_... of {imported.program}")


def _get_lengths(imported: ImportedRun) -> tuple[Any, Any]:
    """Return the most tokens of a prompt and of a completion."""
    fields, defaults = known_fields(), collect_defaults(imported)

    def get_length(name: str) -> Any:
        return imported.get_value(name, defaults.get(name, fields[name].default))

    return get_length("max_prompt_length") or get_length("max_length"), get_length("max_completion_length")
