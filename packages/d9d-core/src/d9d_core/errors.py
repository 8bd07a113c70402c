"""Errors that d9d raises on purpose.

    D9dError                      the base; the command line prints it without a traceback and exits with 2
    ├── JobError                  the job file: unreadable, malformed, wrong values, impossible combinations
    ├── PluginError               a plugin: absent, ambiguous, broken, incompatible, wrongly declared
    ├── DataError                 the training data: missing, empty, unreadable, too small
    ├── BuildError                the model, its strategies and kernels cannot be put together
    ├── CheckpointError           a checkpoint cannot be written, read, or belongs to something else
    │   └── SaveError             the storage failed during a save; exit status 1: another attempt may succeed
    └── TrainingError             the run itself went wrong; exit status 1
        └── NonFiniteError        a loss or gradient was NaN or infinite and the policy is ``error``

Texts say where (file, line, field, parameter), why, which distribution is concerned, and what to do next.
"""

from __future__ import annotations

__all__ = [
    "BuildError", "CheckpointError", "D9dError", "DataError", "JobError", "NonFiniteError", "PluginError", "SaveError",
    "TrainingError",
]  # fmt: skip


class D9dError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 2
    #: The exception of foreign code (a plugin) behind this error, if its traceback helps.
    origin: BaseException | None = None


class JobError(D9dError):
    """The job file, or an override of it, is wrong. One message line per problem."""


class PluginError(D9dError):
    """A plugin is absent, ambiguous, broken, incompatible or wrongly declared."""


class DataError(D9dError):
    """The training data is missing, empty, unreadable or too small."""


class BuildError(D9dError):
    """The components named in the job cannot be put together."""


class CheckpointError(D9dError):
    """A checkpoint cannot be written, cannot be read, or belongs to another model."""


class SaveError(CheckpointError):
    """The storage failed while a checkpoint was written: a full disk, an input/output error. It may pass."""

    exit_code = 1


class TrainingError(D9dError):
    """Training cannot go on."""

    exit_code = 1


class NonFiniteError(TrainingError):
    """A loss or a gradient was NaN or infinite; that step changed nothing."""


def interrupt_behind(error: BaseException) -> bool:
    """Whether it was an interrupt, which code that makes a class has turned into this exception.

    Up to Python 3.11, what ``__set_name__`` of a class's attribute raises, as of each ``cached_property``, becomes the
    cause of a RuntimeError; while pydantic builds a validator, an interrupt becomes an error of the schema.
    """
    if type(error).__name__ == "SchemaError":
        return "KeyboardInterrupt" in str(error)
    return isinstance(error, RuntimeError) and isinstance(error.__cause__, KeyboardInterrupt)
