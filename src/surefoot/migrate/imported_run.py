"""The imported run: another program's run as Surefoot settings, printed as run.yaml or JSON."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.findings import Finding
from surefoot.migrate.parsed_run import ParsedRun, resolve_path

PATHS = (
    "model",
    "dataset",
    "eval_dataset",
    "dataset_dir",
    "image_dir",
    "init_adapter",
    "teacher_model",
    "chat_template",
    *DEEPSPEED_KEYS,
)
"""Surefoot settings that may name a file."""
NOT_GIVEN = ", which was not given"
"""Ending of an entry of `left_out` for a setting that the run does not set, as opposed to one that is not carried."""


@dataclass
class ImportedRun:
    """A run of another program, converted to Surefoot settings."""

    source: ParsedRun
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Surefoot setting -> (value, its origin)."""
    left_out: dict[str, str] = field(default_factory=dict)
    """`peer setting = value` that is not carried -> why."""
    unknown: list[str] = field(default_factory=list)
    """`peer setting = value` entries that are not known."""
    not_needed: list[str] = field(default_factory=list)
    """Peer settings of how a result is computed, which is done in one way here."""
    findings: list[Finding] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the command that libraries read themselves."""

    @property
    def program(self) -> str:
        return self.source.program

    @property
    def has_evaluation(self) -> bool:
        return not self.settings.keys().isdisjoint(("eval_dataset", "eval_fraction"))

    def get_value(self, name: str, default: Any = None) -> Any:
        return self.settings.get(name, (default, ""))[0]

    def leave_out(self, name: str, why: str) -> None:
        """Remove a Surefoot setting if it is present, and record the reason."""
        if name in self.settings:
            self.left_out[f"{name} = {self.settings.pop(name)[0]}"] = why

    def note_missing(self, name: str, why: str) -> None:
        """Record a Surefoot setting that the run does not set, and what the user should know about it."""
        self.left_out[f"{name}{NOT_GIVEN}"] = why

    def move_to(self, folder: Path) -> None:
        """Make the paths of existing files relative to `folder`, where run.yaml is written.

        `output_dir` is taken to be where the files are: in the folder of the run, or in the current one.
        """
        base = self.source.base
        bases: list[Path] = []

        def relocate_path(value: Any) -> Any:
            if isinstance(value, list):
                return [relocate_path(item) for item in value]
            if isinstance(value, dict) and isinstance(value.get("path"), str):
                return {**value, "path": relocate_path(value["path"])}
            if not isinstance(value, str) or Path(value).is_absolute():
                return value
            path = resolve_path(base, value)
            if not path.exists():
                return value
            bases.append(base if (base / value).exists() else Path.cwd())
            return os.path.relpath(path, folder)

        for name in self.settings.keys() & set(PATHS):
            value, origin = self.settings[name]
            self.settings[name] = (relocate_path(value), origin)
        output, origin = self.settings.get("output_dir", (None, ""))
        if isinstance(output, str) and not Path(output).is_absolute():  # relocated even if it does not exist yet
            path = base / output if base in bases or not bases else Path.cwd() / output
            self.settings["output_dir"] = (os.path.relpath(path, folder), origin)

    def as_yaml(self) -> str:
        """Return the text of run.yaml, each line with its origin."""
        lines = [f"# Made by `surefoot import` from a run of {self.program}."]
        lines += [f"{name}: {_dump_yaml(value)}  # {_escape_line(origin)}" for name, (value, origin) in
                  self.settings.items()]  # fmt: skip
        lines += [f"# {line}" for line in self.list_differences()]
        lines += [f"# not needed here: {', '.join(self.not_needed)}"] if self.not_needed else []
        lines += [f"# environment, as before: {name}={_escape_line(value)}" for name, value in self.variables.items()]
        return "\n".join(lines) + "\n"

    def list_differences(self) -> list[str]:
        """Return a line for each setting that is not carried, not given or not known."""
        lines = []
        for setting, why in self.left_out.items():
            kind = "not given" if setting.endswith(NOT_GIVEN) else "not carried"
            lines.append(f"{kind}: {_escape_line(setting.removesuffix(NOT_GIVEN))}: {why}")
        return lines + [f"not known: {_escape_line(setting)}" for setting in self.unknown]

    def as_dict(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "settings": {name: value for name, (value, _) in self.settings.items()},
            "left_out": self.left_out,
            "unknown": self.unknown,
            "not_needed": self.not_needed,
            "environment": self.variables,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def _dump_yaml(value: Any) -> str:
    """Return a value on one line: plain text as YAML, anything else as JSON, which is also valid YAML."""
    if isinstance(value, str) and value.isprintable():
        return yaml.safe_dump(value, allow_unicode=True, width=10_000).split("\n")[0]
    return json.dumps(value, ensure_ascii=False)


def _escape_line(text: str) -> str:
    """Return text for a comment on one line: as JSON if it has unprintable characters."""
    return text if text.isprintable() else json.dumps(text, ensure_ascii=False)
