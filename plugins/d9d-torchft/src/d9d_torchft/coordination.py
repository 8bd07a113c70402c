"""Coordination of replicas: torchft's lighthouse decides which replicas take part in the next attempt at a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

from d9d_core.errors import JobError, TrainingError

from d9d_torchft.members import Member

Result = TypeVar("Result")
#: Seconds between two heartbeats: a tenth of the silence after which the lighthouse, by default, gives up a replica.
HEARTBEAT = 0.2
#: Seconds between two attempts to reach the lighthouse.
_PAUSE = 0.5
#: Seconds between two checks whether to stop waiting.
_LOOK = 0.2
_CONNECT = timedelta(seconds=5)


class Coordinator(Protocol):
    """Coordinator of the replicas, used by the first rank of each replica."""

    def quorum(self, member: Member, seconds: float, stops: Callable[[], bool]) -> Sequence[Member] | None:
        """Members of the next attempt, this replica included; waits until the other replicas ask, too.

        Args:
            member: this replica.
            seconds: longest time to wait.
            stops: function that tells whether to stop waiting; the result is ``None`` then.

        Raises:
            TrainingError: there was no quorum in time.
        """
        ...

    def close(self) -> None:
        """Leave the quorum."""
        ...


class Lighthouse:
    """Client of torchft's lighthouse (``torchft.coordination``, in Rust, without pickle), with heartbeats.

    Args:
        address: address of the lighthouse, ``http://HOST:PORT``.
        replica: name of this replica.

    Raises:
        JobError: torchft is not installed.
    """

    def __init__(self, address: str, replica: str) -> None:
        try:
            from torchft.coordination import LighthouseClient
        except ImportError as error:
            raise JobError(
                f"strategy torchft: torchft cannot be imported ({error}); install it: pip install 'torchft==0.2.*'"
            ) from error
        self._address = address
        self._replica = replica
        self._connect: Callable[[], Any] = lambda: LighthouseClient(address, _CONNECT)
        self._client: Any = None
        self._ended = threading.Event()
        self._heart: threading.Thread | None = None

    def quorum(self, member: Member, seconds: float, stops: Callable[[], bool]) -> Sequence[Member] | None:
        """Ask the lighthouse; see :class:`Coordinator`."""
        deadline = time.monotonic() + seconds
        if self._heart is None:
            self._heart = threading.Thread(target=self._beat, name="d9d-torchft-heartbeat", daemon=True)
            self._heart.start()
        while True:
            left = max(_PAUSE, deadline - time.monotonic())
            try:
                return waited(partial(self._asked, member, left), stops)
            except (RuntimeError, TimeoutError, OSError) as error:
                self._client = None
                if deadline - time.monotonic() < _PAUSE:
                    raise TrainingError(
                        f"the lighthouse {self._address} gave no quorum within {seconds:g} s (quorum_timeout): "
                        f"{error}; is it running, and are the other replicas?"
                    ) from error
                time.sleep(_PAUSE)
                if stops():
                    return None

    def close(self) -> None:
        """Send no more heartbeats; the lighthouse then goes on without this replica."""
        self._ended.set()
        if self._heart is not None:
            self._heart.join()

    def _asked(self, member: Member, seconds: float) -> Sequence[Member]:
        self._client = self._client or self._connect()
        found = self._client.quorum(
            member.name,
            timedelta(seconds=seconds),
            address=member.servers[0],
            store_address=member.store,
            step=member.step,
            world_size=len(member.servers),
            shrink_only=False,
            data={"member": member.to_json()},
        )
        try:
            members = [Member.of(one.data["member"]) for one in found.participants]
        except (TypeError, KeyError, ValueError) as error:
            raise TrainingError(
                f"the lighthouse {self._address} has a replica that d9d-torchft cannot understand ({error}); use one "
                "lighthouse for each job, and the same version in all replicas"
            ) from error
        return sorted(members, key=lambda one: one.name)

    def _beat(self) -> None:
        client = None
        while not self._ended.wait(HEARTBEAT):
            with suppress(RuntimeError, TimeoutError, OSError):  # the next quorum reports a lost lighthouse
                client = client or self._connect()
                client.heartbeat(self._replica)


def waited(call: Callable[[], Result], stops: Callable[[], bool]) -> Result | None:
    """Run a call that blocks outside of Python in another thread, so that this thread still handles signals.

    Args:
        call: the call.
        stops: function that tells whether to stop waiting; the call then continues in its thread, and the result is
            ``None``.
    """
    found: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # raised again in the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, name="d9d-torchft-quorum", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK)
        if thread.is_alive() and stops():
            return None
    if errors:
        raise errors[0]
    return found[0]
