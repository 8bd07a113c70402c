"""Identity of ranks: job, plugins and versions, compared through a store before any communicator exists.

Ranks with different plugins or jobs would build different collectives and wait for each other forever. A store needs
no communicator, so each difference can become an error on every rank.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

from d9d_core.errors import D9dError, JobError, PluginError, TrainingError
from d9d_core.registry.manifest import Manifest

from d9d_engine.process_env import ProcessEnv

#: Distributions whose versions must be equal on all ranks, but which are missing in the manifest of plugins.
_SOFTWARE = ("torch", "d9d-core", "d9d-weights")
#: Seconds by which the clocks of two machines may differ without a warning.
_CLOCKS = 60.0
_ERRORS: Mapping[str, type[D9dError]] = {kind.__name__: kind for kind in (JobError, PluginError)}


class Store(Protocol):
    """Protocol of a ``torch.distributed`` store. All methods raise RuntimeError if the server has ended."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a value; waits until the key has one."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, and return the sum of all amounts."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have a value."""
        ...

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Write if the key has the expected value, or no value; return the value afterwards."""
        ...

    def clone(self) -> Store:
        """Open another connection to the same values, for another thread."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a rank's process: data that must be equal on all ranks.

    Attributes:
        software: versions of Python, torch, and packages of d9d that are no plugins.
        plugins: loaded plugins.
        job: field -> value as JSON, from the full resolved job.
    """

    software: Mapping[str, str]
    plugins: Mapping[str, Mapping[str, Any]]
    job: Mapping[str, str]

    @classmethod
    def of(cls, manifest: Manifest, resolved: Mapping[str, Any]) -> Identity:
        """Identity of a job in this process.

        Args:
            manifest: manifest of the loaded plugins.
            resolved: all values of the job. Its ``plugins`` section is left out: it has paths, which may differ between
                machines, while the manifest has the loaded plugins.
        """
        software = {"python": platform.python_version(), **{name: version(name) for name in _SOFTWARE}}
        values = {key: value for key, value in resolved.items() if key != "plugins"}
        return cls(software, manifest.to_json(), dict(_flatten(values)))

    def dumps(self) -> str:
        """Serialise as canonical JSON."""
        return json.dumps([self.software, self.plugins, self.job], sort_keys=True)

    @classmethod
    def loads(cls, data: bytes) -> Identity:
        """Parse the JSON that :meth:`dumps` returned."""
        return cls(*json.loads(data))

    def differences(self, other: Identity, mine: str, theirs: str) -> Iterator[tuple[type[D9dError], str]]:
        """Yield the differences of two identities: for each, the type of the error to raise and its message.

        Differences of the jobs are left out if versions differ, because other versions may have other defaults.
        """
        versions: list[tuple[type[D9dError], str]] = [
            (JobError, f"software differs across ranks: {name}: {mine} {here}, {theirs} {there}")
            for name, here, there in _changes(self.software, other.software)
        ]
        versions += [
            (PluginError, f"plugin sets differ across ranks: {line}")
            for line in Manifest(self.plugins).differences(Manifest(other.plugins), mine, theirs)
        ]
        yield from versions
        if versions:
            return
        for name, here, there in _changes(self.job, other.job):
            yield JobError, f"the job differs across ranks: {name}: {mine} {here}, {theirs} {there}"


def agree(store: Store, env: ProcessEnv, identity: Identity, timeout: float) -> None:
    """Check through the store that all ranks have the same identity. Collective over all ranks.

    Args:
        store: store without values under its prefix.
        env: rank and sizes of this process.
        identity: identity of this rank.
        timeout: seconds to wait for ranks that have not arrived.

    Raises:
        JobError: jobs or software differ; the same error on all ranks.
        PluginError: loaded plugins differ; the same error on all ranks.
        TrainingError: ranks did not arrive in time.
    """
    data = identity.dumps()
    digest = hashlib.sha256(data.encode()).hexdigest()
    if not store.check([f"identity/{digest}"]):
        store.set(f"identity/{digest}", data)
    store.set(f"here/{env.rank}", json.dumps([digest, env.node]))
    store.add("arrived", 1)
    pause = max(0.02, env.world_size / 20_000)  # seconds between requests: one store serves all ranks
    if env.rank == 0:
        arrived = wait_until(lambda: store.add("arrived", 0) >= env.world_size, timeout, pause)
        verdict = json.dumps(_judge(store, env) if arrived else _missing(store, env, timeout))
        store.set("clock", json.dumps([time.time(), env.node]))
        store.set("verdict", verdict)
    elif not wait_until(lambda: store.check(["verdict"]), timeout + min(30, timeout), pause):
        raise TrainingError(f"rank 0 did not arrive within {timeout:g} s (timeouts.startup); check that it was started")
    now = time.time()
    kind, text = json.loads(store.get("verdict"))
    if not kind:
        if env.local_rank == 0:
            _compare_clocks(now, env.node, *json.loads(store.get("clock")))
        return
    store.add("read", 1)
    if env.rank == 0:  # rank 0 may serve the store
        wait_until(lambda: store.add("read", 0) >= store.add("arrived", 0), 5, pause)
    raise _ERRORS.get(kind, TrainingError)(text)


def wait_until(true: Callable[[], bool], timeout: float, pause: float) -> bool:
    """Wait until a condition holds, testing every ``pause`` seconds; false if it does not hold within ``timeout``.

    Unlike waiting in the store, this can be interrupted, and other threads can use the store.
    """
    deadline = time.monotonic() + timeout
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def spell_ranks(ranks: Iterable[int]) -> str:
    """Text of a set of ranks: ``rank 3``, or ``ranks 0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    word = "rank" if len(runs) == 1 and len(runs[0]) == 1 else "ranks"
    return f"{word} " + ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _judge(store: Store, env: ProcessEnv) -> tuple[str, str]:
    by_digest: dict[str, list[tuple[int, str]]] = {}
    for rank in range(env.world_size):
        digest, node = json.loads(store.get(f"here/{rank}"))
        by_digest.setdefault(digest, []).append((rank, node))
    (own, _), *others = by_digest.items()
    reference = Identity.loads(store.get(f"identity/{own}"))
    found: list[tuple[type[D9dError], str]] = []
    for digest, members in others:
        nodes = ", ".join(dict.fromkeys(node for _, node in members))
        label = f"{spell_ranks(rank for rank, _ in members)} ({nodes})"
        other = Identity.loads(store.get(f"identity/{digest}"))
        found += reference.differences(other, f"rank 0 ({env.node})", label)
    if not found:
        return "", ""
    kind = PluginError if any(one is PluginError for one, _ in found) else JobError
    return kind.__name__, "\n".join(text for _, text in found) + _advice(found)


def _advice(found: list[tuple[type[D9dError], str]]) -> str:
    if all(text.startswith("the job") for _, text in found):
        return "; start all machines with the same job file and options"
    return "; install the same versions on all machines"


def _compare_clocks(now: float, node: str, first: float, first_node: str) -> None:
    """Warn if the clocks of two machines differ; ``first`` is at most a polling pause older than ``now``."""
    if abs(now - first) > _CLOCKS:
        warnings.warn(
            f"the clock of {node} is {abs(now - first):,.0f} s {'ahead of' if now > first else 'behind'} the clock of "
            f"{first_node}; training does not depend on it, but the times in logs and trackers differ: synchronise the "
            "clocks, for example by NTP",
            stacklevel=2,
        )


def _missing(store: Store, env: ProcessEnv, timeout: float) -> tuple[str, str]:
    missing = [rank for rank in range(env.world_size) if not store.check([f"here/{rank}"])]
    return "TrainingError", (
        f"{spell_ranks(missing)} of {env.world_size} did not arrive within {timeout:g} s (timeouts.startup); "
        "did the processes start, and can they reach this one?"
    )


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _flatten(item, f"{path}[{index}]")
    else:
        yield path, json.dumps(value)


def _changes(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            yield name, _short(here.get(name, "unset")), _short(there.get(name, "unset"))


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
