"""A run of several ranks as its caller sees it: started, waited for, and its end written down if no rank could."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from surefoot import errors
from surefoot.config import LoadedConfig
from surefoot.errors import StoppedOnFinding, SurefootError
from surefoot.parallel.launch import RankFailure, launch
from surefoot.parallel.layout import Layout
from surefoot.storage import write_json
from surefoot.training.metrics import METRICS
from surefoot.training.record import RunRecord, RunResult, read_result
from surefoot.training.resolve import device_type


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
    device_type(loaded)  # what is wrong for any rank is refused before ranks are started
    Layout.of(loaded.run, loaded.run.nproc_per_node * loaded.run.nnodes)
    began_s = time.time()
    failure = launch(loaded.run, job)
    if failure is not None:
        _raise(failure, folder, began_s)
    result = read_result(folder)
    if result is None:
        raise SurefootError(
            f"{folder}/summary.json is not there, although all ranks ended well. Do all machines share output_dir?"
        )
    return result


def _raise(failure: RankFailure, folder: Path, began_s: float) -> NoReturn:
    """Raises: what the ranks raised. Where they took steps since `began_s` and none could say so, summary.json does."""
    result = read_result(folder)
    if failure.kind == StoppedOnFinding.__name__ and result is not None and result.findings:
        raise StoppedOnFinding(result.findings[-1])
    metrics = folder / METRICS
    took_steps = metrics.is_file() and metrics.stat().st_mtime >= began_s
    if not failure.kind and (took_steps or (result is None and folder.is_dir())):
        result = result or RunRecord(folder).result("failed")
        ended = replace(result, status="failed", steps=_steps_done(metrics), artifact=None, error=failure.reason)
        write_json(folder / "summary.json", ended.as_dict())
    kind: type[SurefootError] = getattr(errors, failure.kind) if failure.kind else SurefootError
    raise kind(failure.reason)


def _steps_done(metrics: Path) -> int:
    """Of the last whole line of the metrics."""
    steps = 0
    for line in metrics.read_text("utf-8").splitlines() if metrics.is_file() else ():
        try:
            steps = json.loads(line)["step"]
        except ValueError:  # cut short by a kill
            break
    return steps
