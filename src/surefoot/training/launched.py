"""A run of several ranks as its caller sees it: started, waited for, and its end written down if no rank could."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from surefoot import errors
from surefoot.config import LoadedConfig
from surefoot.errors import StoppedOnFinding, SurefootError
from surefoot.parallel.launch import RankFailure, launch
from surefoot.storage import write_json
from surefoot.training.metrics import METRICS
from surefoot.training.record import RunRecord, RunResult, read_result


def train_launched(
    loaded: LoadedConfig,
    config: str | Path | None,
    overrides: Sequence[str],
    settings: Mapping[str, Any],
    *,
    screen: bool,
) -> RunResult:
    """Start the ranks of this machine; each reads the same config, overrides and settings again.

    Returns what rank 0 wrote down. Raises: what the ranks agreed on, or SurefootError naming the rank that failed.
    """
    folder = loaded.run.run_folder
    job = {
        "config": str(Path(config).resolve()) if config is not None else None,
        "overrides": list(overrides),
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
        "screen": screen,
    }
    failure = launch(loaded.run, job)
    if failure is not None:
        _raise(failure, folder)
    result = read_result(folder)
    if result is None:
        raise SurefootError(f"{folder}/summary.json is not there, although all ranks ended well.")
    return result


def _raise(failure: RankFailure, folder: Path) -> NoReturn:
    """Raises: what the ranks raised."""
    result = read_result(folder)
    if failure.kind == StoppedOnFinding.__name__ and result is not None and result.findings:
        raise StoppedOnFinding(result.findings[-1])
    if not failure.kind and (folder / METRICS).is_file():  # no rank could tell the run folder
        result = result or RunRecord(folder).result("failed")
        ended = replace(result, status="failed", steps=_steps_done(folder), artifact=None, error=failure.reason)
        write_json(folder / "summary.json", ended.as_dict())
    kind: type[SurefootError] = getattr(errors, failure.kind) if failure.kind else SurefootError
    raise kind(failure.reason)


def _steps_done(folder: Path) -> int:
    """Of the last whole line of the metrics."""
    steps = 0
    for line in (folder / METRICS).read_text("utf-8").splitlines():
        try:
            steps = json.loads(line)["step"]
        except ValueError:  # cut short by a kill
            break
    return steps
