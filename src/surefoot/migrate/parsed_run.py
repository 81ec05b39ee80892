"""The parsed run: another program's run as it was written, before any setting is converted."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError


@dataclass
class ParsedRun:
    """A run of another program, as parsed from its command line, script or config."""

    program: str
    settings: dict[str, Any]
    """Peer setting -> value as written."""
    locations: dict[str, str]
    """Peer setting -> where it is set: `train.sh` or `train.yaml:3`."""
    environment: dict[str, str] = field(default_factory=dict)
    base: Path = field(default_factory=Path.cwd)
    """Folder that relative paths of the run are relative to."""
    method: str = "sft"
    peer_method: str = ""
    """The method under its name in the other program, where Surefoot has another name; else empty."""
    uses_megatron: bool = False
    """Whether it is a run of ms-swift's Megatron, whose options have other names."""
    launcher: dict[str, Any] = field(default_factory=dict)
    """Launcher options before the script that the program itself does not read."""
    other_commands: list[str] = field(default_factory=list)
    """Further commands of known programs in the same script."""
    rendezvous: dict[str, str] = field(default_factory=dict)
    """Rendezvous address from the launcher's options: host, port, endpoint."""
    unset: frozenset[str] = frozenset()
    """Settings and variables whose value the script does not give: an unset shell variable, a command's output."""
    notes: dict[str, str] = field(default_factory=dict)
    """Other parts of the script that the user should check -> why."""

    def add_settings(self, settings: dict[str, Any], location: str) -> None:
        """Add the settings that the run does not have yet."""
        for name, value in settings.items():
            if name not in self.settings:
                self.settings[name], self.locations[name] = value, location

    def get_location(self, name: str) -> str:
        """Return where a peer setting is set; the program's name if that is unknown."""
        return self.locations.get(name, self.program)

    def check_entries(self, name: str, value: Any) -> list[dict[str, Any]]:
        """Return the entries of a list of data sources. Raises: ConfigError if one is no mapping with a path."""
        if not isinstance(value, list) or not all(isinstance(entry, dict) and entry.get("path") for entry in value):
            raise self.make_value_error(name, value, "a list of mappings with a path each")
        return value

    def make_value_error(self, name: str, value: Any, expected: str) -> ConfigError:
        """Return the error for a setting whose value is not what is `expected`, with its file and line."""
        return ConfigError(f"{name}={value!r}, but expected {expected} ({self.get_location(name)}).")


def resolve_path(base: Path, name: str) -> Path:
    """Return the path of a file named by a run: in `base` or, as scripts are often started at the root, in the cwd."""
    return next((folder / name for folder in (base, Path.cwd()) if (folder / name).exists()), base / name)
