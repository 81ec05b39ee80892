"""The exception tree. Standard library only.

    SurefootError                 exit status 1
    |-- InputError                exit status 2: the config, the data or the arguments are wrong
    |   |-- ConfigError           a key, a value or a combination in the YAML or on the command line
    |   |-- DataError             a dataset, a row, a chat template
    |   |-- ModelError            a model folder, a source, a target module, an adapter
    |   `-- CheckpointError       a checkpoint or an output folder that cannot be used as asked
    |-- StorageError              a file could not be written (full disk, permissions)
    `-- StoppedOnFinding          exit status 3: the run stopped on a named finding

A message says what is wrong with its numbers, why it matters, what to do, and where (`run.yaml:14`).
"""

from surefoot.findings import Finding

MOST_CHARACTERS = 400
"""Longest message of another library's exception that is shown."""


class SurefootError(Exception):
    """Base class of errors that Surefoot raises on purpose; the command line shows their text without a traceback."""

    exit_status = 1
    is_agreed = False
    """Whether all ranks of the run raise it together."""


class InputError(SurefootError):
    """Unusable input from the user."""

    exit_status = 2


class ConfigError(InputError):
    """Wrong key, value or combination of settings."""


class DataError(InputError):
    """Error in a dataset, one of its rows, or the chat template."""


class ModelError(InputError):
    """Error in a model folder, a model source, a target module or an adapter."""


class CheckpointError(InputError):
    """Checkpoint or output folder that cannot be used as requested."""


class StorageError(SurefootError):
    """Failure to write a file; the previous file is untouched."""


class StoppedOnFinding(SurefootError):
    """End of a run that a finding stopped; `finding` holds the reason."""

    exit_status = 3

    def __init__(self, finding: Finding, *, is_agreed: bool = False) -> None:
        super().__init__(finding.as_text())
        self.finding = finding
        self.is_agreed = is_agreed


def one_line(error: BaseException) -> str:
    """Return the type and message of another library's exception on one line, without its full stop.

    Advice that fits only there is left out.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(line for line in lines if "trust_remote_code" not in line)
    if len(text) > MOST_CHARACTERS:  # what was wrong with a list of names is at its end
        text = f"{text[: MOST_CHARACTERS // 2]} ... {text[-MOST_CHARACTERS // 2 :]}"
    text = text.removesuffix(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_panic(error: BaseException) -> bool:
    """Return whether a library written in Rust panicked: PyO3 raises that outside Exception, in a class it hides."""
    return type(error).__name__ == "PanicException"
