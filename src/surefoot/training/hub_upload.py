"""Upload of a completed run's adapter or model to the hub that `push_to_hub` names."""

from surefoot.config import LoadedConfig
from surefoot.errors import ModelError
from surefoot.models.hubs import check_may_push, push
from surefoot.system.console import say
from surefoot.training.run_summary import RunResult


def check_upload(loaded: LoadedConfig) -> None:
    """Raise ModelError, before the run starts, if its artifact could not be uploaded."""
    if loaded.run.push_to_hub is not None:
        check_may_push(loaded.run.push_to_hub, loaded.where("push_to_hub"))


def upload_artifact(loaded: LoadedConfig, result: RunResult) -> None:
    """Upload the artifact of a completed run, if its config requests that. A failure is only reported."""
    repository = loaded.run.push_to_hub
    if repository is None or result.status != "completed" or result.artifact is None:
        return
    try:
        address = push(result.artifact, repository, is_private=True, where=loaded.where("push_to_hub"))
    except ModelError as error:
        say(f"{error} `surefoot push {loaded.run.run_folder} {repository}` tries again.")
    else:
        say(f"uploaded: {result.artifact} to {address}")
