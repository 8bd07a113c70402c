"""Errors that d9d raises on purpose.

    D9dError                      base class; the command line prints it without a traceback and exits with 2
    ├── JobError                  the job file: unreadable, malformed, wrong values, impossible combinations
    ├── PluginError               a plugin: absent, ambiguous, broken, incompatible, wrongly declared
    ├── DataError                 the training data: missing, empty, unreadable, too small
    ├── BuildError                the model, its strategies and kernels do not fit together
    ├── LaunchError               an engine, such as Slurm, is missing, refuses a submission or does not answer
    ├── CheckpointError           a checkpoint cannot be written or read, or belongs to another model
    │   └── SaveError             the storage failed during a save; exit status 1: another attempt may succeed
    └── TrainingError             a failure during training or inference; exit status 1
        └── NonFiniteError        a loss, gradient or output was NaN or infinite

Messages say where (file, line, field, parameter), why, which distribution is affected, and what to do next.
"""

from __future__ import annotations

__all__ = [
    "BuildError", "CheckpointError", "D9dError", "DataError", "JobError", "LaunchError", "NonFiniteError",
    "PluginError", "SaveError", "TrainingError",
]  # fmt: skip


class D9dError(Exception):
    """Base class of all errors that d9d raises on purpose."""

    exit_code = 2
    #: Exception of plugin code that caused this error, if its traceback is useful; ``None`` otherwise.
    origin: BaseException | None = None


class JobError(D9dError):
    """The job file, or an override, is invalid. The message has one line per problem."""


class PluginError(D9dError):
    """A plugin is absent, ambiguous, broken, incompatible or wrongly declared."""


class DataError(D9dError):
    """The training data is missing, empty, unreadable or too small."""


class BuildError(D9dError):
    """The components named in the job do not fit together."""


class LaunchError(D9dError):
    """An engine that starts jobs, such as Slurm, is missing, refuses a submission or does not answer."""


class CheckpointError(D9dError):
    """A checkpoint cannot be written, cannot be read, or belongs to another model."""


class SaveError(CheckpointError):
    """The storage failed while a checkpoint was written (full disk, input/output error); a retry may succeed."""

    exit_code = 1


class TrainingError(D9dError):
    """Training cannot continue."""

    exit_code = 1


class NonFiniteError(TrainingError):
    """A loss, gradient or output of inference was NaN or infinite, and ``nonfinite`` of the job does not allow it.

    Also raised if ``nonfinite: skip`` has skipped too many consecutive steps. A step with a NaN or infinity leaves the
    training state unchanged.
    """


def interrupt_behind(error: BaseException) -> bool:
    """Whether an exception stands for Ctrl-C that arrived while a class was being created.

    Up to Python 3.11, an interrupt in ``__set_name__``, which each ``cached_property`` has, becomes the cause of a
    RuntimeError. While pydantic builds a validator, an interrupt becomes a SchemaError.
    """
    if type(error).__name__ == "SchemaError":
        return "KeyboardInterrupt" in str(error)
    return isinstance(error, RuntimeError) and isinstance(error.__cause__, KeyboardInterrupt)
