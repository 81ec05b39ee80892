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


def variables_of_user(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process without the variables that were set here."""
    added = {ADDED, *_names(environment)}
    return {name: value for name, value in environment.items() if name not in added}


def _names(environment: Mapping[str, str] = os.environ) -> list[str]:
    return [name for name in environment.get(ADDED, "").split(",") if name]


def _note(names: list[str]) -> None:
    if names:
        os.environ[ADDED] = ",".join(dict.fromkeys(names))
    else:
        os.environ.pop(ADDED, None)
