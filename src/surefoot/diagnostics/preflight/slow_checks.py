"""Checks of the doctor that take seconds, or that a run repeats itself when it starts."""

import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from surefoot.config import RolloutConfig, RunConfig, changed_fields, vllm_settings
from surefoot.diagnostics.preflight.check import CheckContext, NotApplicable, Result, fail, ok
from surefoot.errors import CheckpointError, SurefootError
from surefoot.models.resolve_model import folder_here
from surefoot.system import allocators
from surefoot.system.added_variables import variables_of_user
from surefoot.system.json_files import DamagedFile
from surefoot.system.machine_snapshot import SET_BY_A_RUN
from surefoot.system.safetensors_header import read_header
from surefoot.training.manifest import read_manifest

MACHINE_PREFIXES = ("NCCL_", "GLOO_", "CUDA_", "OMP_", "PYTORCH_", "TORCH_")
"""Prefixes of variables that are usually about the machine."""
MAY_DIFFER = frozenset(("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", *allocators.VARIABLES))
"""Variables that may differ between a server and training."""
CONNECT_WITHIN_S = 2.0
LEAST_VLLM = (0, 32)
"""Oldest vLLM version that was tested, 2026-11."""


def check_resume(context: CheckContext) -> Result:
    """Check the checkpoint that the run would resume from: its files, and the settings it was written with."""
    run = context.require_run()
    if run.overwrite_output_dir or run.resume_from_checkpoint is False:
        raise NotApplicable("the run begins anew")
    checkpoints, where = [Path(str(run.resume_from_checkpoint))], context.where("resume_from_checkpoint")
    if run.resume_from_checkpoint == "auto":
        checkpoints, where = sorted((run.run_folder / "checkpoints").glob("step-*")), context.where("output_dir")
        if not checkpoints:
            raise NotApplicable(f"no checkpoint in {run.run_folder}")
    path = checkpoints[-1]
    damage = _describe_damage(path)
    if damage:
        # A run skips damaged checkpoints as long as one is intact.
        is_fatal = all(_describe_damage(checkpoint) for checkpoint in checkpoints)
        return fail("SF739", f"{path} {damage}", is_fatal=is_fatal, where=where)
    settings = read_manifest(path)["config"]
    changes = changed_fields(settings, _match_saved_settings(run, settings))
    if changes:
        cause = f"{path} was written with other settings: {'; '.join(changes)}"
        return fail("SF739", cause, is_fatal=True, changes=changes, where=where)
    return ok(f"from {path.name} (checksums are compared when the run starts)")


def _describe_damage(checkpoint: Path) -> str:
    """Return why a run could not resume from a checkpoint, or an empty string. Checksums of files are not compared."""
    try:
        files = list(read_manifest(checkpoint)["files"])
    except (DamagedFile, CheckpointError) as error:
        return f"has no manifest that can be read: {error}"
    missing = [name for name in files if not (checkpoint / name).is_file()]
    if missing:
        return f"lacks {', '.join(missing[:3])}"
    short = [name for name in files if name.endswith(".safetensors") and not _is_complete(checkpoint / name)]
    return f"holds a part of {', '.join(short[:3])}" if short else ""


def _is_complete(file: Path) -> bool:
    try:
        read_header(file)
    except ValueError:
        return False
    return True


def _match_saved_settings(run: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return a config with batch sizes resolved and `auto` settings taken from the checkpoint: no device is queried."""
    size = run.global_batch_size or run.sequences_per_step * run.nproc_per_node * run.nnodes
    automatic = [name for name in ("device", "dtype") if getattr(run, name) == "auto" and name in settings]
    values = {"global_batch_size": size, "gradient_accumulation_steps": None}
    return run.model_copy(update={**values, **{name: settings[name] for name in automatic}})


def check_warmup(context: CheckContext) -> Result:
    """Check that the learning rate reaches the end of its warm-up."""
    run = context.run
    if run is None or not run.warmup_steps or run.max_steps is None:
        raise NotApplicable("warmup_steps or max_steps is not set")
    summary = f"warmup_steps={run.warmup_steps}, of max_steps={run.max_steps}"
    if run.warmup_steps > run.max_steps:
        cause, where = (
            f"{summary}: the learning rate never reaches its peak",
            context.where("warmup_steps", "max_steps"),
        )
        fix = "Lower warmup_steps, or take warmup_ratio, unless the run is only to be tried."
        return fail("SF720", cause, fix=fix, where=where, warmup_steps=run.warmup_steps, max_steps=run.max_steps)
    return ok(summary)


def check_chat_template(context: CheckContext) -> Result:
    """Check that the assistant's part of a conversation can be located in what the chat template renders."""
    run = context.require_run()
    folder = folder_here(run.model)
    if folder is None:
        raise NotApplicable(f"{run.model} is not here yet")
    from surefoot.data.conversation import BadRow, Conversation, Message
    from surefoot.diagnostics.preflight.dataset_sample import load_run_tokenizer, open_template
    from surefoot.models.pretrained import load_config

    try:
        load_config(folder)
    except SurefootError as error:
        raise NotApplicable("the model would be refused") from error
    try:
        tokenizer = load_run_tokenizer(run, folder)
    except SurefootError as error:
        fix = "Fetch the folder again, with all files of its tokenizer."
        return fail("SF718", " ".join(str(error).split()), fix=fix, where=context.where("model"))
    if tokenizer.chat_template is None and run.chat_template is None:
        raise NotApplicable("the model has none: conversations would be refused, bare texts are fine")
    try:
        messages = (Message("user", "What is one and one?"), Message("assistant", "It is two."))
        rendered = open_template(run, tokenizer).render(Conversation(messages))
    except (SurefootError, BadRow) as error:
        return fail("SF740", str(error), where=context.where("chat_template", "model"))
    trained_texts = " ".join(repr(rendered.text[span.begin : span.end]) for span in rendered.spans)
    return ok(f"trained text of an answer: {trained_texts}")


def check_server(context: CheckContext) -> Result:
    """Check the variables and the version of a vLLM server that runs on this machine."""
    servers = context.run.running_servers if context.run is not None else {}
    for setting, address in servers.items():
        silent = _knock(context, setting, address)
        if silent is not None:
            return silent
    run = vllm_settings(context.run)
    if run is None and servers:
        return ok(f"{', '.join(servers.values())} can be reached")
    if run is None:
        raise NotApplicable("no run with a vLLM server is given")
    if run.vllm_server is not None:
        return _check_running_server(context, run, run.vllm_server)
    environment = context.machine.environment
    segments = [name for name in allocators.VARIABLES if "expandable" in environment.get(name, "")]
    if run.vllm_sleep and segments:
        return fail(
            "SF710",
            f"{segments[0]}={environment[segments[0]]} applies to training only: the server is started without it, "
            "because memory that grows in segments cannot be given up while it sleeps",
            fix="Nothing, if that is what you want; else unset it, or drop vllm_sleep.",
        )
    return _check_vllm_version(run.vllm_command)


def _knock(context: CheckContext, setting: str, address: str) -> Result | None:
    """Return the failure if nothing answers at the address in a setting."""
    host, port = _split_address(address)
    try:
        socket.create_connection((host, port), CONNECT_WITHIN_S).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        waits = ""
        if setting == "vllm_server" and (run := vllm_settings(context.run)) is not None:
            waits = f". A run waits {run.vllm_start_timeout_s:.0f} s for it"
        return fail(
            "SF801",
            f"no server answers at {host}:{port}, the address in {setting}: {error}{waits}",
            fix="Start it, correct the address, or open the port to this machine.",
            where=context.where(setting),
        )
    return None


def _split_address(address: str) -> tuple[str, int]:
    parts = urlsplit(address if "//" in address else f"//{address}")
    return parts.hostname or "", parts.port or 80


def _check_running_server(context: CheckContext, run: RolloutConfig, address: str) -> Result:
    host, port = _split_address(address)
    if host not in ("127.0.0.1", "localhost", "::1", socket.gethostname()):
        raise NotApplicable(f"{host} is another machine, and can be reached: run `surefoot doctor` there")
    server = _read_listener_environment(port)
    if server is None:
        raise NotApplicable(f"the process that listens at port {port} cannot be inspected")
    takes_adapters = server.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").lower() in ("1", "true")
    if run.tuning == "lora" and not takes_adapters:
        cause = f"the server at {address} has no VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and will load no adapter"
        fix = "Restart it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment and --enable-lora."
        return fail("SF710", cause, fix=fix, is_fatal=True)
    server = variables_of_user(server)
    local, ignored = context.machine.environment, MAY_DIFFER | SET_BY_A_RUN
    differing = [
        f"{name}={server.get(name, '(not set)')} there, {local.get(name, '(not set)')} here"
        for name in sorted({*local, *server})
        if name.startswith(MACHINE_PREFIXES) and name not in ignored and local.get(name) != server.get(name)
    ]
    if differing:
        cause = f"variables of the server at {address} are not those of the run: {', '.join(differing)}"
        fix = "Start both with the same, where a variable is about this machine and not about one of them."
        return fail("SF710", cause, fix=fix)
    return ok(f"{address} has the variables of the run")


def _check_vllm_version(command: str) -> Result:
    """Check the version in the installed package metadata, because running the command takes as long as the server."""
    path = shutil.which(command)
    if path is None:
        raise NotApplicable(f"there is no {command} here")
    packages = Path(path).resolve().parent.parent.glob("lib/python*/site-packages/vllm-*.dist-info")
    version = next((package.name.split("-")[1].removesuffix(".dist") for package in packages), None)
    if version is None:
        raise NotApplicable(f"the version of {path} is unknown")
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if release < LEAST_VLLM:
        least = ".".join(map(str, LEAST_VLLM))
        cause = f"this is vLLM {version}; prompts with images and other endpoints that are used came with {least}"
        return fail("SF709", cause, fix="pip install -U vllm in its environment.")
    return ok(f"vLLM {version}")


def _read_listener_environment(port: int) -> dict[str, str] | None:
    """Return the environment of the local process that listens on a port, or None if none does or access is denied."""
    try:
        for connection in psutil.net_connections("tcp"):
            is_at_port = connection.laddr and connection.laddr.port == port
            if connection.status == psutil.CONN_LISTEN and is_at_port and connection.pid is not None:
                return psutil.Process(connection.pid).environ()
    except (psutil.Error, OSError):  # owned by another user, or exited
        pass
    return None
