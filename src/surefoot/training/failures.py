"""How errors end a run: recorded as its end, and shown as findings where their text names a cause."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from surefoot.errors import StoppedOnFinding, StorageError, SurefootError
from surefoot.events import Emit, FindingMade, Notice
from surefoot.findings import Finding
from surefoot.findings.library_errors import find_library_error
from surefoot.system.allocators import is_out_of_memory
from surefoot.system.console import say
from surefoot.training.out_of_memory import DeviceNow, MemoryWatch
from surefoot.training.run_summary import Status


@contextmanager
def recording_failure(finish: Callable[..., Any], emit: Emit, memory: MemoryWatch) -> Iterator[None]:
    """Record an error of the block as the end of the run; out of memory and known errors become StoppedOnFinding.

    `finish`: called with the status and `error=` to write the end of the run.
    """

    def fail(status: Status, error: str) -> None:
        """Record how the run ended; if a full disk refuses that, the original error is still raised."""
        try:
            finish(status, error=error)
        except StorageError as refused:
            emit(Notice(str(refused)))

    try:
        yield
    except KeyboardInterrupt:
        step = memory.step
        fail("interrupted", f"stopped by a second signal in step {step}" if step else "stopped before the first step")
        raise
    except StoppedOnFinding as error:
        emit(FindingMade(error.finding))
        fail("failed", str(error))
        raise
    except SurefootError as error:
        fail("failed", str(error))
        raise
    except Exception as error:
        if is_out_of_memory(error):
            finding: Finding | None = memory.finding(error, DeviceNow.read())
        else:
            finding = find_library_error(str(error))
        if finding is None:
            fail("failed", f"{type(error).__name__}: {error}")
            raise
        emit(FindingMade(finding))
        fail("failed", finding.as_text())
        raise StoppedOnFinding(finding) from error


@contextmanager
def reading_causes() -> Iterator[None]:
    """Show an error that names its cause as a finding, before there is a run that could record it."""
    try:
        yield
    except SurefootError:
        raise
    except Exception as error:
        finding = find_library_error(str(error))
        if finding is None:
            raise
        say(finding.as_text())
        raise StoppedOnFinding(finding) from error
