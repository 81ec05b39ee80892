"""The converted run, as run.yaml and as JSON."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.findings import Finding
from surefoot.migrate.parse_input import resolve_path

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
"""Surefoot settings that may name a file."""


@dataclass(frozen=True)
class Imported:
    """A run of another program, converted to Surefoot settings."""

    program: str
    settings: dict[str, tuple[Any, str]]
    """Surefoot setting -> (value, its origin)."""
    left_out: dict[str, str]
    """`peer setting = value` that is not carried -> why."""
    unknown: list[str]
    """`peer setting = value` entries that are not known."""
    findings: list[Finding]
    variables: dict[str, str]
    """Environment variables of the command that libraries read themselves."""

    def moved(self, base: Path, folder: Path) -> "Imported":
        """Return the run for a run.yaml in `folder`: paths of existing files in `base` become relative to `folder`."""

        def relocate_path(value: Any) -> Any:
            if isinstance(value, list):
                return [relocate_path(item) for item in value]
            if isinstance(value, dict) and isinstance(value.get("path"), str):
                return {**value, "path": relocate_path(value["path"])}
            is_existing = (
                isinstance(value, str) and not Path(value).is_absolute() and resolve_path(base, value).exists()
            )
            return os.path.relpath(resolve_path(base, value), folder) if is_existing else value

        settings = {
            name: (relocate_path(value) if name in PATHS else value, origin)
            for name, (value, origin) in self.settings.items()
        }
        output, origin = settings.get("output_dir", (None, ""))
        if isinstance(output, str) and not Path(output).is_absolute():  # relocated even if it does not exist yet
            settings["output_dir"] = (os.path.relpath(resolve_path(base, output), folder), origin)
        return replace(self, settings=settings)

    def as_yaml(self) -> str:
        """Return the text of run.yaml, each line with its origin."""
        lines = [f"# Made by `surefoot import` from a run of {self.program}."]
        for name, (value, origin) in self.settings.items():
            is_plain = isinstance(value, str) and value.isprintable()
            text = (
                yaml.safe_dump(value, allow_unicode=True, width=10_000).split("\n")[0]
                if is_plain
                else _dump_json(value)
            )
            lines.append(f"{name}: {text}  # {_escape_line(origin)}")
        lines += [f"# not carried: {_escape_line(setting)}: {why}" for setting, why in self.left_out.items()]
        lines += [f"# not known: {_escape_line(setting)}" for setting in self.unknown]
        lines += [f"# environment, as before: {name}={_escape_line(value)}" for name, value in self.variables.items()]
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


def _escape_line(text: str) -> str:
    """Return text for a comment on one line: as JSON if it has unprintable characters."""
    return text if text.isprintable() else _dump_json(text)


def _dump_json(value: Any) -> str:
    """Return the value as JSON, which is also valid YAML."""
    return json.dumps(value, ensure_ascii=False)
