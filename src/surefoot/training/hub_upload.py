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


def upload_artifact(result: RunResult, repository: str, where: str) -> None:
    """Upload the artifact of a completed run. A failure is only reported: the run is completed."""
    if result.status != "completed" or result.artifact is None:
        return
    try:
        address = push(result.artifact, repository, is_private=True, where=where)
    except ModelError as error:
        say(f"{error} `surefoot push {result.run_folder} {repository}` tries again.")
    else:
        say(f"uploaded: {result.artifact} to {address}")
