"""A run of another program in our words, and how it is written down."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.findings import Finding
from surefoot.migrate.parse_input import found_at

PATHS = (
    "model",
    "dataset",
    "eval_dataset",
    "dataset_dir",
    "image_dir",
    "init_adapter",
    "chat_template",
    *DEEPSPEED_KEYS,
)
"""Settings that may name a file."""


@dataclass(frozen=True)
class Imported:
    """A run of another program, in our words."""

    program: str
    settings: dict[str, tuple[Any, str]]
    """Ours -> (value, where it comes from)."""
    left_out: dict[str, str]
    """`their setting = value` -> why."""
    unknown: list[str]
    """`their setting = value` that nothing is known of."""
    findings: list[Finding]
    variables: dict[str, str]
    """Of the environment, that the command was given and that act on their own."""

    def moved(self, base: Path, folder: Path) -> "Imported":
        """The same for a run.yaml in `folder`, where relative paths of files that are there are relative to `base`."""

        def path_of(value: Any) -> Any:
            if isinstance(value, list):
                return [path_of(one) for one in value]
            if isinstance(value, dict) and isinstance(value.get("path"), str):
                return {**value, "path": path_of(value["path"])}
            is_here = isinstance(value, str) and not Path(value).is_absolute() and found_at(base, value).exists()
            return os.path.relpath(found_at(base, value), folder) if is_here else value

        settings = {
            name: (path_of(value) if name in PATHS else value, origin)
            for name, (value, origin) in self.settings.items()
        }
        output, origin = settings.get("output_dir", (None, ""))
        if isinstance(output, str) and not Path(output).is_absolute():  # it need not be there yet
            settings["output_dir"] = (os.path.relpath(found_at(base, output), folder), origin)
        return replace(self, settings=settings)

    def as_yaml(self) -> str:
        """run.yaml, each line with its origin."""
        lines = [f"# Made by `surefoot import` from a run of {self.program}."]
        for name, (value, origin) in self.settings.items():
            is_plain = isinstance(value, str) and value.isprintable()
            said = yaml.safe_dump(value, allow_unicode=True, width=10_000).split("\n")[0] if is_plain else _json(value)
            lines.append(f"{name}: {said}  # {_line(origin)}")
        lines += [f"# not carried: {_line(what)}: {why}" for what, why in self.left_out.items()]
        lines += [f"# not known: {_line(what)}" for what in self.unknown]
        lines += [f"# environment, as before: {name}={_line(value)}" for name, value in self.variables.items()]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "settings": {name: value for name, (value, _) in self.settings.items()},
            "left_out": self.left_out,
            "unknown": self.unknown,
            "environment": self.variables,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def _line(text: str) -> str:
    """For a comment, which ends with its line."""
    return text if text.isprintable() else _json(text)


def _json(value: Any) -> str:
    """Which YAML reads as well."""
    return json.dumps(value, ensure_ascii=False)
