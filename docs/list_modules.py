"""Write code.md, the list of all modules, from the first sentences of their docstrings: python docs/list_modules.py"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "surefoot"
ROOMS = (
    "config data models models/quantization distributed methods methods/sft methods/dpo methods/kto methods/orpo "
    "methods/reward methods/distill methods/grpo methods/rollout methods/rollout/engines training inference cli launch "
    "diagnostics diagnostics/monitor diagnostics/rules diagnostics/preflight diagnostics/selftest diagnostics/report "
    "planner migrate integrations system findings"
).split()
"""Folders, from the core to its wings to what all stand on."""


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, without the full stop at its end."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].removesuffix(".")


def list_modules() -> str:
    """Return the page."""
    lines = [
        "# The code",
        "",
        "What each module is for; the picture is in [ARCHITECTURE.md](../ARCHITECTURE.md). This page is generated from",
        "the modules' docstrings by `python docs/list_modules.py`.",
    ]
    for room in (".", *ROOMS):
        folder = SOURCE / room
        about = "" if room == "." else first_sentence(folder / "__init__.py")
        lines += [
            "",
            f"## `src/surefoot/{'' if room == '.' else room + '/'}`",
            *(["", f"{about}."] if about else []),
            "",
        ]
        modules = sorted(path for path in folder.glob("*.py") if not path.name.startswith("__"))
        lines += [f"- `{path.name}`: {first_sentence(path)}." for path in modules]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "code.md").write_text(list_modules(), "utf-8")
