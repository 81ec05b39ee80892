"""Checks of the doctor that take seconds, or that a run repeats itself when it starts."""

import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from surefoot.config import RunConfig, changed_fields, vllm_settings
from surefoot.diagnostics.preflight.check import Check, CheckContext, fail, not_applicable, ok
from surefoot.diagnostics.preflight.model_size import read_header
from surefoot.errors import SurefootError
from surefoot.models.resolve_model import folder_here
from surefoot.system.json_files import read_object
from surefoot.system.machine_snapshot import SET_BY_A_RUN

MACHINE_PREFIXES = ("NCCL_", "GLOO_", "CUDA_", "OMP_", "PYTORCH_", "TORCH_")
"""Prefixes of variables that are usually about the machine."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
MAY_DIFFER = frozenset(("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", *ALLOCATOR))
"""Variables that may differ between a server and training."""
SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size")
"""Settings of a checkpoint that enter calculations, so that they must be numbers."""
CONNECT_WITHIN_S = 2.0
LEAST_VLLM = (0, 32)
"""Oldest vLLM version that was tested, 2026-11."""


def resume(context: CheckContext) -> Check:
    """Check the checkpoint that the run would resume from: its files, and the settings it was written with."""
    name, run = "resume", context.run
    if run is None or context.loaded is None:
        return not_applicable(name, "no run is given")
    if run.overwrite_output_dir or run.resume_from_checkpoint is False:
        return not_applicable(name, "the run begins anew")
    if run.resume_from_checkpoint == "auto":
        checkpoints = sorted((run.run_folder / "checkpoints").glob("step-*"))
        if not checkpoints:
            return not_applicable(name, f"no checkpoint in {run.run_folder}")
        path, where = checkpoints[-1], context.loaded.where("output_dir")
        # A run skips damaged checkpoints as long as one is intact.
        is_fatal = all(_describe_damage(checkpoint) for checkpoint in checkpoints)
    else:
        path, where = Path(str(run.resume_from_checkpoint)), context.loaded.where("resume_from_checkpoint")
        is_fatal = True
    damage = _describe_damage(path)
    if damage:
        return fail(name, "SF739", f"{path} {damage}", where=where, is_fatal=is_fatal)
    settings = read_object(path / "manifest.json")["config"]
    changes = changed_fields(settings, _match_saved_settings(run, settings))
    if changes:
        return fail(name, "SF739", f"{path} was written with other settings: {'; '.join(changes)}", changes=changes,
                     where=where, is_fatal=True)  # fmt: skip
    return ok(name, f"from {path.name} (checksums are compared when the run starts)")


def _describe_damage(checkpoint: Path) -> str:
    """Return why a run could not resume from a checkpoint, or an empty string. Checksums are not compared."""
    try:
        manifest = read_object(checkpoint / "manifest.json")
        files, config = list(manifest["files"]), manifest["config"]
        if not isinstance(config, dict) or not all(isinstance(config.get(name, 0), int | None) for name in SIZES):
            raise ValueError("its config is damaged")
    except (ValueError, KeyError, TypeError) as error:
        return f"has no manifest that can be read: {error}"
    missing = [name for name in files if not (checkpoint / name).is_file()]
    if missing:
        return f"lacks {', '.join(missing[:3])}"
    short = [name for name in files if name.endswith(".safetensors") and not _is_whole(checkpoint / name)]
    return f"holds a part of {', '.join(short[:3])}" if short else ""


def _is_whole(file: Path) -> bool:
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


def chat_template(context: CheckContext) -> Check:
    """Check that the assistant's part of a conversation can be located in what the chat template renders."""
    name, run = "chat template", context.run
    if run is None:
        return not_applicable(name, "no run is given")
    folder = folder_here(run.model)
    if folder is None:
        return not_applicable(name, f"{run.model} is not here yet")
    is_fetched = not Path(run.model).is_dir()  # files of a cached model may be missing
    if is_fetched and not (folder / "tokenizer_config.json").is_file():
        return not_applicable(name, f"the tokenizer of {run.model} is not here yet")
    from surefoot.data.conversation import BadRow, Conversation, Message
    from surefoot.data.render import Renderer, RendererSource
    from surefoot.models.build import load_tokenizer

    try:
        tokenizer = load_tokenizer(folder)
    except SurefootError as error:
        if is_fetched:
            return not_applicable(name, f"the tokenizer of {run.model} is not all here yet")
        message = " ".join(str(error).split())
        where = context.loaded.where("model") if context.loaded else ""
        return fail(name, "SF718", message, where=where, fix="Fetch the folder again, with all files of its tokenizer.")
    try:
        if run.chat_template is not None:
            tokenizer = load_tokenizer(folder, run.chat_template)
        if tokenizer.chat_template is None and is_fetched and not (folder / "chat_template.jinja").is_file():
            return not_applicable(name, f"no template of {run.model} is here yet")
        if tokenizer.chat_template is None:
            return not_applicable(name, "the model has none: conversations would be refused, bare texts are fine")
        source = RendererSource.of(tokenizer, run.template_variables, parse_special_tokens=run.parse_special_tokens)
        messages = (Message("user", "What is one and one?"), Message("assistant", "It is two."))
        rendered = Renderer(source).template.render(Conversation(messages))
    except (SurefootError, BadRow) as error:
        return fail(
            name, "SF740", str(error), where=context.loaded.where("chat_template", "model") if context.loaded else ""
        )
    trained_texts = " ".join(repr(rendered.text[span.begin : span.end]) for span in rendered.spans)
    return ok(name, f"of an answer it trains {trained_texts}")


def server(context: CheckContext) -> Check:
    """Check the variables and the version of a vLLM server that runs on this machine."""
    name, run = "rollout server's own", vllm_settings(context.run)
    if run is None:
        return not_applicable(name, "no run with a vLLM server is given")
    if run.vllm_server is None:
        allocator_settings = [f"{variable}={context.machine.environment[variable]}" for variable in ALLOCATOR
                    if "expandable" in context.machine.environment.get(variable, "")]  # fmt: skip
        if run.vllm_sleep and allocator_settings:
            return fail(
                name,
                "SF710",
                f"{allocator_settings[0]} holds for training alone: the server is started without it, because memory "
                "that grows in segments cannot be given up while it sleeps",
                fix="Nothing, if that is what you want; else unset it, or drop vllm_sleep.",
            )
        return _check_vllm_version(name, run.vllm_command)
    parts = urlsplit(run.vllm_server if "//" in run.vllm_server else f"//{run.vllm_server}")
    host, port = parts.hostname or "", parts.port or 80
    try:
        socket.create_connection((host, port), CONNECT_WITHIN_S).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        return fail(
            name,
            "SF801",
            f"nobody can be reached at {host}:{port}, where vllm_server says that the server is: {error}. A run waits "
            f"{run.vllm_start_timeout_s:.0f} s for it",
            fix="Start it, correct the address, or open the port to this machine.",
            where=context.loaded.where("vllm_server") if context.loaded else "",
        )
    if host not in ("127.0.0.1", "localhost", "::1", socket.gethostname()):
        return not_applicable(name, f"{host} is another machine, and can be reached: run `surefoot doctor` there")
    server_environment = environment_of_listener(port)
    if server_environment is None:
        return not_applicable(name, f"the process that listens at port {port} may not be looked at")
    if run.tuning == "lora" and server_environment.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").lower() not in (
        "1",
        "true",
    ):
        return fail(
            name,
            "SF710",
            f"the server at {run.vllm_server} has no VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and will take no adapter",
            fix="Start it anew with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment and --enable-lora.",
            is_fatal=True,
        )
    environment = context.machine.environment
    variables = sorted(
        variable
        for variable in {*environment, *server_environment}
        if variable.startswith(MACHINE_PREFIXES) and variable not in MAY_DIFFER | SET_BY_A_RUN
    )
    differing = [
        f"{variable}={server_environment.get(variable, '(not set)')} there, "
        f"{environment.get(variable, '(not set)')} here"
        for variable in variables
        if environment.get(variable) != server_environment.get(variable)
    ]
    if differing:
        return fail(
            name,
            "SF710",
            f"variables of the server at {run.vllm_server} are not those of the run: {', '.join(differing)}",
            fix="Start both with the same, where a variable is about this machine and not about one of them.",
        )
    return ok(name, f"{run.vllm_server} has the variables of the run")


def _check_vllm_version(name: str, command: str) -> Check:
    """Check the version in the installed package metadata, because running the command takes as long as the server."""
    path = shutil.which(command)
    if path is None:
        return not_applicable(name, f"there is no {command} here")
    packages = Path(path).resolve().parent.parent.glob("lib/python*/site-packages/vllm-*.dist-info")
    version = next((package.name.split("-")[1].removesuffix(".dist") for package in packages), None)
    if version is None:
        return not_applicable(name, f"the version of {path} is not known")
    release = tuple(int(package) for package in re.findall(r"\d+", version)[:2])
    if release < LEAST_VLLM:
        least = ".".join(map(str, LEAST_VLLM))
        return fail(
            name,
            "SF709",
            f"this is vLLM {version}; prompts with images and other endpoints that are used came with {least}",
            fix="pip install -U vllm in its environment.",
        )
    return ok(name, f"vLLM {version}")


def environment_of_listener(port: int) -> dict[str, str] | None:
    """Return the environment of the local process that listens on a port, or None if none does or access is denied."""
    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == port
                and connection.pid is not None
            ):
                return psutil.Process(connection.pid).environ()
    except (psutil.Error, OSError):  # owned by another user, or exited
        pass
    return None


def schedule(context: CheckContext) -> Check:
    """Check that the learning rate reaches the end of its warm-up."""
    name, run = "schedule", context.run
    if run is None or not run.warmup_steps or run.max_steps is None:
        return not_applicable(name, "no warm-up of so many steps in a run of so many")
    summary = f"warmup_steps={run.warmup_steps}, of max_steps={run.max_steps}"
    if run.warmup_steps > run.max_steps:
        return fail(name, "SF720", f"{summary}: the learning rate never reaches its peak",
                     fix="Lower warmup_steps, or take warmup_ratio, unless the run is only to be tried.",
                     where=context.loaded.where("warmup_steps", "max_steps") if context.loaded else "",
                     warmup_steps=run.warmup_steps, max_steps=run.max_steps)  # fmt: skip
    return ok(name, summary)


CHECKS = (resume, schedule, chat_template, server)
