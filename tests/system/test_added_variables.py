"""Variables that a run sets for itself are not taken for the user's."""

import os

import pytest

from surefoot.launch.run_verb import run_verb
from surefoot.system.added_variables import ADDED, add_variables, remove_variables, variables_of_user

GPU_VARIABLES = ("CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables, and with what a test sets removed at its end."""
    for name in (ADDED, "FIRST", "SECOND", *GPU_VARIABLES):
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


@pytest.mark.parametrize("set_by_user", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}])
def test_commands_number_gpus_as_nvidia_smi_does_and_let_memory_grow(
    monkeypatch: pytest.MonkeyPatch, set_by_user: dict[str, str]
) -> None:
    for name, value in set_by_user.items():
        monkeypatch.setenv(name, value)
    assert run_verb(lambda: 0) == 0
    chosen = {name: os.environ[name] for name in GPU_VARIABLES if name in os.environ}
    grows = {} if set_by_user else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert chosen == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **grows, **set_by_user}
    assert not {"CUDA_DEVICE_ORDER", *grows} & variables_of_user().keys()
