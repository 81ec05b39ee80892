"""Environment variables that a run sets for itself, and that are not the user's."""

import os
from collections.abc import Iterable, Mapping

ADDED = "SUREFOOT_ADDED_VARIABLES"
"""Environment variable with the names of the variables that were set here."""


def add_variables(variables: Mapping[str, str]) -> list[str]:
    """Set the variables that the environment lacks, for this process and its children. Returns their names."""
    added = {name: value for name, value in variables.items() if not os.environ.get(name)}
    os.environ.update(added)
    _note([*_names(), *added])
    return list(added)


def remove_variables(names: Iterable[str]) -> None:
    """Remove variables that `add_variables` has set."""
    removed = set(names)
    for name in removed:
        os.environ.pop(name, None)
    _note([name for name in _names() if name not in removed])


def variables_of_user() -> dict[str, str]:
    """Return the environment without the variables that were set here."""
    added = {ADDED, *_names()}
    return {name: value for name, value in os.environ.items() if name not in added}


def _names() -> list[str]:
    return [name for name in os.environ.get(ADDED, "").split(",") if name]


def _note(names: list[str]) -> None:
    if names:
        os.environ[ADDED] = ",".join(dict.fromkeys(names))
    else:
        os.environ.pop(ADDED, None)
