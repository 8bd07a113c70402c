"""Conversion of file-system errors, because fsspec drivers raise exceptions of their client libraries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from d9d_core.errors import CheckpointError


@contextmanager
def unreadable(what: object) -> Iterator[None]:
    """Convert exceptions inside the ``with`` block to errors that name the unreadable file and the next action."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{what} does not exist: check the path, or download the model first") from error
    except ImportError as error:
        raise CheckpointError(f"{what} cannot be reached: {error}; install its fsspec driver") from error
    except Exception as error:
        raise CheckpointError(f"{what} cannot be read: {type(error).__name__}: {error}") from error


@contextmanager
def unwritable(what: object) -> Iterator[None]:
    """Convert exceptions inside the ``with`` block to errors that name the unwritable address and the next action."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{what} cannot be written: {type(error).__name__}: {error}; "
            "check the address, its driver and your permissions"
        ) from error


@contextmanager
def as_os_error() -> Iterator[None]:
    """Convert exceptions inside the ``with`` block to :class:`OSError`, as local files raise."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
