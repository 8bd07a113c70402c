"""Background thread that computes one result."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Background thread that runs one function; it does not keep the process alive.

    Args:
        work: function to run.
        name: name of the thread, for stack listings.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._future: Future[T] = Future()
        self._work = work
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the function has returned or raised."""
        return self._future.done()

    @property
    def failed(self) -> bool:
        """Whether the function has raised."""
        return self.done and self._future.exception() is not None

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the function to end; returns :attr:`done`."""
        futures.wait([self._future], seconds)
        return self.done

    def result(self) -> T:
        """Wait for the function's result.

        Raises:
            BaseException: the exception of the function.
        """
        return self._future.result()

    def _run(self) -> None:
        try:
            self._future.set_result(self._work())
        except BaseException as error:
            self._future.set_exception(error)
