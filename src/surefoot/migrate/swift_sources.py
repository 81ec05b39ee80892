"""Data sources of ms-swift as entries of `dataset`."""

import re
from typing import Any

from surefoot.config.schema import HUB_ID
from surefoot.migrate.parsed_run import ParsedRun, resolve_path

SWIFT_SOURCE = re.compile(r"^(?:(HF|MS|hf|ms)::)?(?:([\w.-]+/[\w.-]+):([\w./-]+?)|(.+?))(?:#(\d+))?$")
"""Source of ms-swift: `HF::owner/name:subset#500`, or a path."""


MODELSCOPE_NOTE = "this is an id of ModelScope, but ids of data here are those of huggingface.co"
MODELSCOPE_MODEL_NOTE = (
    "ms-swift fetches it from ModelScope unless USE_HF=1 is set, Surefoot from huggingface.co: write modelscope:{} to "
    "fetch it from ModelScope, with the package modelscope"
)
MODELSCOPE_OWNERS = ("AI-ModelScope/", "LLM-Research/", "ZhipuAI/", "damo/", "iic/", "modelscope/", "swift/")
"""Owners on ModelScope whose models are missing or different on huggingface.co."""


def is_modelscope_id(name: str) -> bool:
    return name.startswith(MODELSCOPE_OWNERS)


def note_hub_of_model(run: ParsedRun, model: str) -> str | None:
    """Return the note on a model of ms-swift that is fetched from another hub here; None for a folder."""
    if not HUB_ID.match(model) or resolve_path(run.base, model).exists():
        return None
    return MODELSCOPE_MODEL_NOTE.format(model)


def parse_swift_source(text: str) -> Any:
    """Return a source of ms-swift as an entry of `dataset`; `name#500` becomes the first 500 rows."""
    match = SWIFT_SOURCE.match(text)
    if match is None:
        return text
    _, name, subset, path, count = match.groups()
    source = {"path": name or path, "subset": subset, "split": f"[:{count}]" if count else None}
    fields = {key: part for key, part in source.items() if part}
    return fields["path"] if len(fields) == 1 else fields


def list_swift_left_out(name: str, value: Any, *, default_hub: str) -> dict[str, str]:
    """Return the meaning of ms-swift's sources that is not carried, each with its reason.

    `default_hub`: HF or MS, the hub of sources that name none.
    """
    left_out = {}
    for source in value if isinstance(value, list) else [value]:
        match = SWIFT_SOURCE.match(str(source))
        if match is not None and match[5]:
            left_out[f"#{match[5]} of {name} = {source}"] = (
                "the first rows are taken, whereas ms-swift samples them at random"
            )
        if match is not None and (match[1] or default_hub).upper() == "MS":
            is_modelscope = match[1] or match[2] or is_modelscope_id(match[4])
            left_out |= {f"{name} = {source}": MODELSCOPE_NOTE} if is_modelscope else {}
    return left_out
