"""Checks that take seconds, or say what a run would refuse by itself anyway: for who asks before starting one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.config import RunConfig, changed_fields
from surefoot.doctor.check import Check, Seen, fine, not_applicable, wrong
from surefoot.errors import SurefootError


def resume(seen: Seen) -> Check:
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
    else:
        path, where = Path(str(run.resume_from_checkpoint)), seen.loaded.where("resume_from_checkpoint")
    try:
        manifest = json.loads((path / "manifest.json").read_text("utf-8"))
        files, settings = list(manifest["files"]), dict(manifest["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return wrong(name, "SF739", f"{path} has no manifest that can be read: {error}", where=where)
    missing = [one for one in files if not (path / one).is_file()]
    if missing:
        return wrong(name, "SF739", f"{path} lacks {', '.join(missing[:3])}", missing=missing, where=where)
    changes = changed_fields(settings, _as_then(run, settings))
    if changes:
        return wrong(name, "SF739", f"{path} was written with other settings: {'; '.join(changes)}", changes=changes,
                     where=where)  # fmt: skip
    return fine(name, f"from {path.name} (checksums are compared when the run starts)")


def _as_then(run: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """A config with its sizes written out as a run's are, and `auto` read as it was then: devices are not looked at."""
    size = run.global_batch_size or run.sequences_per_step * run.nproc_per_node * run.nnodes
    automatic = [name for name in ("device", "dtype") if getattr(run, name) == "auto" and name in settings]
    values = {"global_batch_size": size, "gradient_accumulation_steps": None}
    return run.model_copy(update={**values, **{name: settings[name] for name in automatic}})


def template(seen: Seen) -> Check:
    """Whether the model's chat template lets the assistant's part of a conversation be told from the rest."""
    name, run = "chat template", seen.run
    if run is None:
        return not_applicable(name, "no run is given")
    folder = Path(run.model)
    if not folder.is_dir():
        return not_applicable(name, f"{run.model} is no folder here")
    from surefoot.data.conversation import BadRow, Conversation, Message
    from surefoot.data.render import Renderer, RendererSource
    from surefoot.models.build import load_tokenizer

    try:
        tokenizer = load_tokenizer(folder, run.chat_template)
        if tokenizer.chat_template is None:
            return not_applicable(name, "the model has none: conversations would be refused, bare texts are fine")
        source = RendererSource.of(tokenizer, run.template_variables, parse_special_tokens=run.parse_special_tokens)
        words = (Message("user", "What is one and one?"), Message("assistant", "It is two."))
        shown = Renderer(source).template.render(Conversation(words))
    except (SurefootError, BadRow) as error:
        return wrong(
            name, "SF740", str(error), where=seen.loaded.where("chat_template", "model") if seen.loaded else ""
        )
    trained = " ".join(repr(shown.text[span.begin : span.end]) for span in shown.spans)
    return fine(name, f"of an answer it trains {trained}")


CHECKS = (resume, template)
