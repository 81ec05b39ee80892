"""Write the reference pages from the code: python docs/generate_reference.py"""

import argparse
import json
from pathlib import Path
from typing import Any

from surefoot.cli import build_parser
from surefoot.config.aliases import ALIASES
from surefoot.config.describe import allowed_values, describe_settings, run_schema
from surefoot.findings import CATALOGUE

DOCS = Path(__file__).parent
NOTE = "This page is generated from the code by `python docs/generate_reference.py`."
GROUPS = {
    "SF1": "Stalls and deaths",
    "SF2": "Memory",
    "SF3": "Speed",
    "SF4": "Numbers",
    "SF5": "Data",
    "SF6": "Checkpoints",
    "SF7": "Before the run",
    "SF8": "Rollouts and rewards",
}


def settings() -> str:
    """Return the page of all settings of run.yaml."""
    described = describe_settings()
    peers: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        peers.setdefault(name, []).append(alias)
    lines = ["# Settings", "", "Every key of run.yaml. `surefoot settings` prints them too. " + NOTE]
    group = ""
    for name, about in described.items():
        if about["group"] != group:
            group = about["group"]
            lines += ["", f"## {group}", *_settings_head()]
        default = f"`{json.dumps(about['default'])}`" if "default" in about else "required"
        others = f" Also read as: {', '.join(f'`{alias}`' for alias in peers[name])}." if name in peers else ""
        text = " ".join(str(about["description"]).split())
        lines.append(f"| `{name}` | {default} | {_cell(allowed_values(about))} | {_cell(text + others)} |")
    return "\n".join(lines) + "\n"


def _settings_head() -> list[str]:
    return ["", "| key | default | values | meaning |", "|---|---|---|---|"]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def findings() -> str:
    """Return the page of all findings."""
    lines = ["# Findings", "", f"What Surefoot names. `surefoot explain SF106` prints one. {NOTE}"]
    group = ""
    for code, page in sorted(CATALOGUE.items()):
        if GROUPS[code[:3]] != group:
            group = GROUPS[code[:3]]
            lines += ["", f"## {group}"]
        lines += ["", f"### {code} {page.title}", "", f"*{page.severity}*", ""]
        lines += [f"**How it is recognised.** {_cell(page.evidence)}", "", f"**What to do.** {_cell(page.fix)}"]
        if page.cases:
            links = (f"[{case}](https://github.com/{case.replace('#', '/issues/')})" for case in page.cases)
            lines += ["", f"Seen in {', '.join(links)}."]
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Return the page of all verbs with their options."""
    parser = build_parser()
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help for action in verbs._choices_actions}
    lines = ["# Commands", "", f"`surefoot VERB --help` prints the same. {NOTE}"]
    for name, verb in verbs.choices.items():
        usage = " ".join(verb.format_usage().removeprefix("usage: ").split())
        lines += ["", f"## surefoot {name}", "", f"{_sentence(helps.get(name) or '')}", "", f"    {usage}", ""]
        for action in (action for action in verb._actions if action.dest != "help"):
            shown = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            lines.append(f"- `{shown}`: {_cell(_help_of(action))}" if action.help else f"- `{shown}`")
    return "\n".join(lines) + "\n"


def _help_of(action: argparse.Action) -> str:
    values: dict[str, Any] = vars(action)
    return str(action.help) % values if "%" in str(action.help) else str(action.help)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


PAGES = {"settings.md": settings, "findings.md": findings, "commands.md": commands}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / "reference" / name).write_text(page(), "utf-8")
    (DOCS / "run.schema.json").write_text(json.dumps(run_schema(), indent=1) + "\n", "utf-8")
