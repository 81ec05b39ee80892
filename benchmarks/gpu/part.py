"""Parts of the acceptance call: each is a process that prints its rows, and a row that fails stops no other."""

import argparse
import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    result: str
    limit: str = ""
    passed: bool | None = None
    """None for a fact that is not checked."""


def check(name: str, measure: Callable[[], float], at_most: float) -> Iterator[Row]:
    """Yield the row of a measured number and its limit."""
    try:
        value = measure()
    except Exception as error:  # noqa: BLE001 - a part tells of every failure and goes on
        yield failure(name, error)
        return
    yield Row(name, f"{value:.1e}", f"{at_most:.0e}", value <= at_most)


def failure(name: str, error: BaseException) -> Row:
    """Return the row of something that raised."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "surefoot" in frame.filename]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return Row(name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}", "", False)


def main(*parts: Callable[[torch.device], Iterator[Row]]) -> None:
    """Print the rows of a process as lines of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    for part in parts:
        try:
            for row in part(device):
                print(json.dumps(asdict(row)), flush=True)
        except Exception as error:  # noqa: BLE001 - as above
            print(json.dumps(asdict(failure(part.__name__, error))), flush=True)
