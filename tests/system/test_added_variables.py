"""Variables that a run sets for itself are not taken for the user's."""

import os

import pytest

from surefoot.launch.run_verb import run_verb
from surefoot.system.added_variables import ADDED, add_variables, remove_variables, variables_of_user
from surefoot.system.allocators import EXPANDABLE, VARIABLES, allocator_settings


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables, and with what a test sets removed at its end."""
    for name in (ADDED, "FIRST", "SECOND", "CUDA_DEVICE_ORDER", *VARIABLES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_variables_are_set_where_the_user_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECOND", "mine")
    assert add_variables({"FIRST": "1", "SECOND": "2"}) == ["FIRST"]
    assert (os.environ["FIRST"], os.environ["SECOND"]) == ("1", "mine")
    assert add_variables({"FIRST": "3"}) == []
    user = variables_of_user()
    assert "SECOND" in user
    assert not {"FIRST", ADDED} & user.keys()
    remove_variables(["FIRST"])
    assert not {"FIRST", ADDED} & os.environ.keys()


def test_some_are_removed_and_others_stay() -> None:
    first = add_variables({"FIRST": "1"})
    add_variables({"SECOND": "2"})
    remove_variables(first)
    assert os.environ[ADDED] == "SECOND"
    assert "SECOND" not in variables_of_user()


@pytest.mark.parametrize(("set_by_user", "order"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")])
def test_commands_number_gpus_as_nvidia_smi_does(
    monkeypatch: pytest.MonkeyPatch, set_by_user: str | None, order: str
) -> None:
    if set_by_user is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", set_by_user)
    assert run_verb(lambda: 0) == 0
    assert os.environ["CUDA_DEVICE_ORDER"] == order
    assert variables_of_user().get("CUDA_DEVICE_ORDER") == set_by_user


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_of_gpus_grows_in_segments_unless_the_user_sets_the_allocator(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    if name is not None:
        monkeypatch.setenv(name, "max_split_size_mb:128")
    assert run_verb(lambda: 0) == 0
    assert allocator_settings() == (EXPANDABLE if name is None else "max_split_size_mb:128")
    assert variables_of_user().keys() & set(VARIABLES) <= {name}, "a rollout server gets the user's settings alone"
