"""Error messages of file systems: drivers of addresses raise whatever their client library raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from d9d_core.errors import CheckpointError


@contextmanager
def unreadable(what: object) -> Iterator[None]:
    """Raise failures inside as errors that say which file or directory could not be read, and what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{what} is not there: check the path, or download the model first") from error
    except ImportError as error:
        raise CheckpointError(f"{what} cannot be reached: {error}; install the driver of such addresses") from error
    except Exception as error:
        raise CheckpointError(f"{what} cannot be read: {type(error).__name__}: {error}") from error


@contextmanager
def unwritable(what: object) -> Iterator[None]:
    """Raise failures inside as errors that say which address could not be written, and what to do."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{what} cannot be written: {type(error).__name__}: {error}; "
            "check the address, its driver and your rights there"
        ) from error


@contextmanager
def as_os_error() -> Iterator[None]:
    """Raise failures inside as OSError, as local files do."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
