"""Checks that take seconds, or say what a run would refuse by itself anyway: for who asks before starting one."""

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
from surefoot.diagnostics.preflight.model_size import header
from surefoot.errors import SurefootError
from surefoot.models.resolve_model import folder_here
from surefoot.system.json_files import read_object
from surefoot.system.machine_snapshot import SET_BY_A_RUN

OF_BOTH = ("NCCL_", "GLOO_", "CUDA_", "OMP_", "PYTORCH_", "TORCH_")
"""Variables that begin so are about the machine, as a rule."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
OWN = frozenset(("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", *ALLOCATOR))
"""But for these, in which a server and training may well differ."""
SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size")
"""Settings of a checkpoint that are calculated with."""
CONNECT_WITHIN_S = 2.0
LEAST_VLLM = (0, 32)
"""With which this was tried, 2026-11."""


def resume(seen: CheckContext) -> Check:
    """What the run would go on from: a checkpoint's files, and the settings it was written with."""
    name, run = "resume", seen.run
    if run is None or seen.loaded is None:
        return not_applicable(name, "no run is given")
    if run.overwrite_output_dir or run.resume_from_checkpoint is False:
        return not_applicable(name, "the run begins anew")
    if run.resume_from_checkpoint == "auto":
        found = sorted((run.run_folder / "checkpoints").glob("step-*"))
        if not found:
            return not_applicable(name, f"no checkpoint in {run.run_folder}")
        path, where = found[-1], seen.loaded.where("output_dir")
        # A run passes over damaged ones, as long as one is sound.
        is_fatal = all(_damage(one) for one in found)
    else:
        path, where = Path(str(run.resume_from_checkpoint)), seen.loaded.where("resume_from_checkpoint")
        is_fatal = True
    damage = _damage(path)
    if damage:
        return fail(name, "SF739", f"{path} {damage}", where=where, is_fatal=is_fatal)
    settings = read_object(path / "manifest.json")["config"]
    changes = changed_fields(settings, _as_then(run, settings))
    if changes:
        return fail(name, "SF739", f"{path} was written with other settings: {'; '.join(changes)}", changes=changes,
                     where=where, is_fatal=True)  # fmt: skip
    return ok(name, f"from {path.name} (checksums are compared when the run starts)")


def _damage(checkpoint: Path) -> str:
    """Why a run could not go on from it, where that is seen without reading all of it; checksums are not compared."""
    try:
        manifest = read_object(checkpoint / "manifest.json")
        files, config = list(manifest["files"]), manifest["config"]
        if not isinstance(config, dict) or not all(isinstance(config.get(name, 0), int | None) for name in SIZES):
            raise ValueError("its config is damaged")
    except (ValueError, KeyError, TypeError) as error:
        return f"has no manifest that can be read: {error}"
    missing = [one for one in files if not (checkpoint / one).is_file()]
    if missing:
        return f"lacks {', '.join(missing[:3])}"
    short = [one for one in files if one.endswith(".safetensors") and not _is_whole(checkpoint / one)]
    return f"holds a part of {', '.join(short[:3])}" if short else ""


def _is_whole(file: Path) -> bool:
    try:
        header(file)
    except ValueError:
        return False
    return True


def _as_then(run: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """A config with its sizes written out as a run's are, and `auto` read as it was then: devices are not looked at."""
    size = run.global_batch_size or run.sequences_per_step * run.nproc_per_node * run.nnodes
    automatic = [name for name in ("device", "dtype") if getattr(run, name) == "auto" and name in settings]
    values = {"global_batch_size": size, "gradient_accumulation_steps": None}
    return run.model_copy(update={**values, **{name: settings[name] for name in automatic}})


def chat_template(seen: CheckContext) -> Check:
    """Whether the model's chat template lets the assistant's part of a conversation be told from the rest."""
    name, run = "chat template", seen.run
    if run is None:
        return not_applicable(name, "no run is given")
    folder = folder_here(run.model)
    if folder is None:
        return not_applicable(name, f"{run.model} is not here yet")
    is_fetched = not Path(run.model).is_dir()  # of what was fetched before, some files may still be missing
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
        said = " ".join(str(error).split())
        where = seen.loaded.where("model") if seen.loaded else ""
        return fail(name, "SF718", said, where=where, fix="Fetch the folder again, with all files of its tokenizer.")
    try:
        if run.chat_template is not None:
            tokenizer = load_tokenizer(folder, run.chat_template)
        if tokenizer.chat_template is None and is_fetched and not (folder / "chat_template.jinja").is_file():
            return not_applicable(name, f"no template of {run.model} is here yet")
        if tokenizer.chat_template is None:
            return not_applicable(name, "the model has none: conversations would be refused, bare texts are fine")
        source = RendererSource.of(tokenizer, run.template_variables, parse_special_tokens=run.parse_special_tokens)
        words = (Message("user", "What is one and one?"), Message("assistant", "It is two."))
        shown = Renderer(source).template.render(Conversation(words))
    except (SurefootError, BadRow) as error:
        return fail(name, "SF740", str(error), where=seen.loaded.where("chat_template", "model") if seen.loaded else "")
    trained = " ".join(repr(shown.text[span.begin : span.end]) for span in shown.spans)
    return ok(name, f"of an answer it trains {trained}")


def server(seen: CheckContext) -> Check:
    """The variables and the version of a vLLM server, where it is of this machine."""
    name, run = "rollout server's own", vllm_settings(seen.run)
    if run is None:
        return not_applicable(name, "no run with a vLLM server is given")
    if run.vllm_server is None:
        segments = [f"{one}={seen.machine.environment[one]}" for one in ALLOCATOR
                    if "expandable" in seen.machine.environment.get(one, "")]  # fmt: skip
        if run.vllm_sleep and segments:
            return fail(
                name,
                "SF710",
                f"{segments[0]} holds for training alone: the server is started without it, because memory that grows "
                "in segments cannot be given up while it sleeps",
                fix="Nothing, if that is what you want; else unset it, or drop vllm_sleep.",
            )
        return _version_of(name, run.vllm_command)
    parts = urlsplit(run.vllm_server if "//" in run.vllm_server else f"//{run.vllm_server}")
    host, port = parts.hostname or "", parts.port or 80
    try:
        socket.create_connection((host, port), CONNECT_WITHIN_S).close()
    except (OSError, UnicodeError) as error:  # the second: a name that cannot be one
        return fail(
            name,
            "SF801",
            f"nobody can be reached at {host}:{port}, where vllm_server says that the server is: {error}. A run waits "
            f"{run.vllm_start_timeout_s:.0f} s for it",
            fix="Start it, correct the address, or open the port to this machine.",
            where=seen.loaded.where("vllm_server") if seen.loaded else "",
        )
    if host not in ("127.0.0.1", "localhost", "::1", socket.gethostname()):
        return not_applicable(name, f"{host} is another machine, and can be reached: run `surefoot doctor` there")
    theirs = environment_of_listener(port)
    if theirs is None:
        return not_applicable(name, f"the process that listens at port {port} may not be looked at")
    if run.tuning == "lora" and theirs.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").lower() not in ("1", "true"):
        return fail(
            name,
            "SF710",
            f"the server at {run.vllm_server} has no VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and will take no adapter",
            fix="Start it anew with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment and --enable-lora.",
            is_fatal=True,
        )
    ours = seen.machine.environment
    compared = sorted(one for one in {*ours, *theirs} if one.startswith(OF_BOTH) and one not in OWN | SET_BY_A_RUN)
    differing = [
        f"{one}={theirs.get(one, '(not set)')} there, {ours.get(one, '(not set)')} here"
        for one in compared
        if ours.get(one) != theirs.get(one)
    ]
    if differing:
        return fail(
            name,
            "SF710",
            f"variables of the server at {run.vllm_server} are not those of the run: {', '.join(differing)}",
            fix="Start both with the same, where a variable is about this machine and not about one of them.",
        )
    return ok(name, f"{run.vllm_server} has the variables of the run")


def _version_of(name: str, command: str) -> Check:
    """By the packages beside the command: to ask it would take as long as to start it."""
    found = shutil.which(command)
    if found is None:
        return not_applicable(name, f"there is no {command} here")
    packages = Path(found).resolve().parent.parent.glob("lib/python*/site-packages/vllm-*.dist-info")
    version = next((one.name.split("-")[1].removesuffix(".dist") for one in packages), None)
    if version is None:
        return not_applicable(name, f"the version of {found} is not known")
    numbers = tuple(int(one) for one in re.findall(r"\d+", version)[:2])
    if numbers < LEAST_VLLM:
        least = ".".join(map(str, LEAST_VLLM))
        return fail(
            name,
            "SF709",
            f"this is vLLM {version}; prompts with images and other endpoints that are used came with {least}",
            fix="pip install -U vllm in its environment.",
        )
    return ok(name, f"vLLM {version}")


def environment_of_listener(port: int) -> dict[str, str] | None:
    """Of the process of this machine that listens at a port; None where there is none, or it may not be looked at."""
    try:
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid is not None:
                return psutil.Process(one.pid).environ()
    except (psutil.Error, OSError):  # of another user, or gone
        pass
    return None


def schedule(seen: CheckContext) -> Check:
    """Whether the learning rate gets to where it is warmed up to."""
    name, run = "schedule", seen.run
    if run is None or not run.warmup_steps or run.max_steps is None:
        return not_applicable(name, "no warm-up of so many steps in a run of so many")
    said = f"warmup_steps={run.warmup_steps}, of max_steps={run.max_steps}"
    if run.warmup_steps > run.max_steps:
        return fail(name, "SF720", f"{said}: the learning rate never reaches its peak",
                     fix="Lower warmup_steps, or take warmup_ratio, unless the run is only to be tried.",
                     where=seen.loaded.where("warmup_steps", "max_steps") if seen.loaded else "",
                     warmup_steps=run.warmup_steps, max_steps=run.max_steps)  # fmt: skip
    return ok(name, said)


CHECKS = (resume, schedule, chat_template, server)
