"""Runs with a subscriber under test, in one process or on the ranks of a world."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from d9d_core import events as ev
from d9d_core.config import PluginConfig
from d9d_core.plugin import Ref, StrategySpec, hookimpl
from d9d_core.strategy import Applied, no_collectives
from d9d_core.subscriber import Subscriber
from d9d_core.topology import Topology
from torch import distributed as dist
from torch import nn

from d9d_testing.layouts import job_of, topology_here
from d9d_testing.suites.support.component import build_component

#: Strategy of a run on several ranks, from this module.
REPLICAS = "suite_replicas"
_NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?|-?\d+e[+-]?\d+")
#: Largest relative difference between numbers in files of two runs.
_ROUNDING = 1e-3


class ReplicasConfig(PluginConfig):
    """Config of a strategy that keeps copies of the model on all ranks; d9d's synchroniser sums their gradients."""

    name: Literal["suite_replicas"] = "suite_replicas"
    """Selects the strategy."""


class Replicas:
    """Data-parallel strategy that changes nothing in the model."""

    def __init__(self, _config: ReplicasConfig) -> None: ...

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:  # noqa: ARG002 - the signature of a strategy
        """Report the whole stage as changed, because a strategy that changes no module is an error."""
        return Applied(modules=("",), collectives=no_collectives)


@hookimpl
def d9d_strategies() -> Iterator[StrategySpec]:
    """Strategy ``Replicas``, for which no other package is needed."""
    yield StrategySpec(
        name=REPLICAS,
        summary="Copies of the model.",
        anchor="data",
        axes=frozenset({"dp_replicate"}),
        config=Ref(f"{__name__}:ReplicasConfig"),
        build=Ref(f"{__name__}:Replicas"),
    )


class Interruption(Exception):  # noqa: N818 - raised on purpose
    """Exception that ends a run, which the suite resumes later."""


class Interrupts:
    """Observer that raises :class:`Interruption` at the end of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Subscription to the ends of steps."""
        return [(ev.StepEnds, self._end)]

    def _end(self, event: ev.StepEnds) -> None:
        if event.step == self._step:
            raise Interruption


def watched_run(
    values: Mapping[str, Any], plugins: Sequence[str], address: Sequence[Any], *observers: Subscriber
) -> None:
    """Run a job on this rank with a new subscriber. Collective over the world.

    Args:
        values: values of the job file.
        plugins: plugins of the job.
        address: arguments of :func:`build_component` for the subscriber.
        observers: further observers, after the subscriber.
    """
    if dist.is_initialized():
        values = {**values, "mesh": {"dp_replicate": dist.get_world_size()}, "parallel": [REPLICAS]}
    job = job_of(values, [*plugins, __name__])
    topology = topology_here(job) if dist.is_initialized() else None
    job.build(lambda _: None, topology, observers=[build_component(*address), *observers]).train()


def text_difference(found: bytes, expected: bytes) -> str | None:
    """First difference of two files, with a line of each; ``None`` if they agree.

    Numbers with a fraction or an exponent may differ by rounding.
    """
    if found == expected:
        return None
    try:
        lines, wanted = (content.decode().splitlines() for content in (found, expected))
    except UnicodeDecodeError:
        return f"{len(found)} bytes differ from {len(expected)} bytes"
    for number, (line, other) in enumerate(zip(lines, wanted, strict=False), start=1):
        if not _close(line, other):
            return f"line {number} is {line[:200]!r}, expected {other[:200]!r}"
    if len(lines) != len(wanted):
        return f"there are {len(lines)} lines, expected {len(wanted)}"
    return None


def _close(line: str, other: str) -> bool:
    if _NUMBER.sub("#", line) != _NUMBER.sub("#", other):
        return False
    pairs = zip(map(float, _NUMBER.findall(line)), map(float, _NUMBER.findall(other)), strict=True)
    return all(abs(one - two) <= _ROUNDING * max(abs(one), abs(two)) + 1e-6 for one, two in pairs)


def contents(directory: Path) -> dict[str, bytes]:
    """Relative path -> content of all files below a directory; the directory's path is removed from the contents."""
    own = str(directory).encode()
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes().replace(own, b"") for path in files}
