"""Uploads of adapters and models to a hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import surefoot as package
from surefoot.errors import ModelError
from surefoot.models.hubs import check_may_push
from tests.support.hub import Hub, local_hub
from tests.support.processes import surefoot


@pytest.fixture
def hub() -> Iterator[Hub]:
    with local_hub() as server:
        yield server


def online(hub: Hub, token: str = "secret") -> dict[str, str]:
    """Return the environment of a process that uses this hub."""
    return {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.parametrize("how", ["verb", pytest.param("setting", marks=pytest.mark.matrix)])
def test_the_files_of_the_adapter_are_uploaded(settings: dict[str, Any], tmp_path: Path, hub: Hub, how: str) -> None:
    run = Path(settings["output_dir"])
    if how == "setting":
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**settings, "push_to_hub": "me/count"}))
        done = surefoot("train", str(tmp_path / "run.yaml"), env=online(hub))
    else:
        package.train(settings, screen=False)
        done = surefoot("push", str(run), "me/count", env=online(hub))
    assert done.returncode == 0, done.stderr
    assert {name: values["visibility"] for name, values in hub.repositories.items()} == {"me/count": "private"}
    assert hub.files == contents(run / "adapter")
    assert "README.md" in hub.files


@pytest.mark.matrix
def test_a_refused_upload_fails_the_verb_but_not_the_run(settings: dict[str, Any], tmp_path: Path, hub: Hub) -> None:
    hub.refuses = True
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**settings, "push_to_hub": "me/count"}))
    done = surefoot("train", str(tmp_path / "run.yaml"), env=online(hub))
    assert done.returncode == 0, done.stderr
    assert "surefoot push" in done.stderr
    pushed = surefoot("push", settings["output_dir"], "me/count", env=online(hub))
    assert pushed.returncode == 2
    assert "Traceback" not in pushed.stderr


def test_a_run_that_could_not_upload_is_refused_before_it_starts(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
    with pytest.raises(ModelError, match="token"):
        package.train(settings, screen=False, push_to_hub="me/count")
    assert not Path(settings["output_dir"], "checkpoints").exists()


@pytest.mark.parametrize("name", ["count", "me/count/more", "http://hub/me/count"])
def test_what_is_no_repository_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="user/name"):
        check_may_push(name, "run.yaml:3")
