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


class SurefootError(Exception):
    """Anything Surefoot raises on purpose; the command line shows its text without a traceback."""

    exit_status = 1
    is_agreed = False
    """Whether all ranks of the run raise it together."""


class InputError(SurefootError):
    """What the user gave cannot be used."""

    exit_status = 2


class ConfigError(InputError):
    """A key, a value or a combination of settings is wrong."""


class DataError(InputError):
    """A dataset, one of its rows, or the chat template is wrong."""


class ModelError(InputError):
    """A model folder, a model source, a target module or an adapter is wrong."""


class CheckpointError(InputError):
    """A checkpoint or an output folder cannot be used as asked."""


class StorageError(SurefootError):
    """A file could not be written; what was there before is untouched."""


class StoppedOnFinding(SurefootError):
    """The run stopped because going on would be wrong; `finding` says why."""

    exit_status = 3

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.as_text())
        self.finding = finding


def is_panic(error: BaseException) -> bool:
    """Return whether a library written in Rust has panicked: PyO3 raises that as no Exception, of a class it hides."""
    return type(error).__name__ == "PanicException"
