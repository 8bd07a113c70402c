"""Captures of module outputs inside a model, sent to the rank with the model's last stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from d9d_core.errors import BuildError
from d9d_core.program.placement import Pipeline
from d9d_core.types import Microbatch, Pack
from d9d_engine.distributed.mesh import Topology
from d9d_engine.step.executor import Executor, Outputs
from d9d_weights.sharding.collectives import all_gather_objects
from torch import Tensor, nn
from torch import distributed as dist

#: Number of microbatches, per pipeline rank, that run together: enough to fill the pipeline.
TOGETHER = 4


class Captures:
    """Captures the outputs of named modules, and adds them to the model's outputs as ``module/<name>``.

    Args:
        names: names of modules in the full model.
        stages: index -> stage of this rank.
        pipeline: all stages, and the ranks that run them.
        topology: rank, device, meshes and process groups of this process.
    """

    def __init__(
        self, names: Sequence[str], stages: Mapping[int, nn.Module], pipeline: Pipeline, topology: Topology
    ) -> None:
        self._names = tuple(names)
        self._pipeline = pipeline
        self._topology = topology
        self._seen: dict[str, list[Tensor]] = {}
        here: dict[str, nn.Module] = {}
        for stage in stages.values():
            here |= {name: module for name, module in stage.named_modules() if name in self._names}
        for name, module in here.items():
            module.register_forward_hook(self._keeper(name))

    def groups(self, pack: Pack) -> Iterator[Pack]:
        """Split microbatches into groups that run together; small groups if pipeline ranks must store captures."""
        held = self._names and len(self._pipeline.hosts) > 1
        yield from groups_of(pack, TOGETHER * self._pipeline.ranks if held else len(pack))

    def run(self, executor: Executor, pack: Pack, outputs: Outputs) -> None:
        """Run the model over microbatches; pass outputs and captures to ``outputs``. Collective over ``pp``.

        Raises:
            BuildError: a named module does not run exactly once per microbatch, or returns no tensor.
        """
        if self._pipeline.ranks == 1:
            executor.evaluate(pack, lambda found, microbatch: outputs({**found, **self._taken()}, microbatch))
            if more := [name for name, tensors in self._seen.items() if tensors]:
                raise _not_once_error(more[0])
            return
        if not self._names:
            executor.evaluate(pack, outputs)
            return
        held: list[tuple[Mapping[str, Tensor], Microbatch]] = []
        executor.evaluate(pack, lambda found, microbatch: held.append((found, microbatch)))
        arrived = self._sent(len(pack))
        for index, (found, microbatch) in enumerate(held):
            outputs({**found, **{_key(name): tensors[index] for name, tensors in arrived.items()}}, microbatch)

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, _inputs: object, output: object) -> None:
            if not isinstance(output, Tensor):
                raise BuildError(
                    f"module '{name}' ({type(module).__name__}) returns no tensor; name another module in the task"
                )
            self._seen.setdefault(name, []).append(output)

        return keep

    def _taken(self) -> dict[str, Tensor]:
        """Remove and return the captures of the microbatch that the last stage just finished.

        Earlier stages on this rank may already have computed later microbatches.
        """
        if missing := [name for name in self._names if not self._seen.get(name)]:
            raise _not_once_error(missing[0])
        return {_key(name): tensors.pop(0) for name, tensors in self._seen.items()}

    def _sent(self, count: int) -> dict[str, list[Tensor]]:
        """Send the captures of all microbatches to the rank with the last stage, which returns them by module name.

        Collective over ``pp``.
        """
        group = self._topology.axes_group("pp")
        assert group is not None
        here = {name: [(list(one.shape), str(one.dtype)) for one in found] for name, found in self._seen.items()}
        told: list[dict[str, Any]] = all_gather_objects(here, group)
        position, last = self._topology.coordinate["pp"], self._pipeline.hosts[-1]
        arrived: dict[str, list[Tensor]] = {}
        for name in self._names:
            owner = next((rank for rank, captures in enumerate(told) if len(captures.get(name, ())) == count), None)
            if owner is None:
                raise _not_once_error(name)
            for index in range(count):
                if owner == last == position:
                    tensor = self._seen[name][index]
                elif position == owner:
                    dist.send(self._seen[name][index].contiguous(), group=group, group_dst=last)
                    continue
                elif position == last:
                    shape, dtype = told[owner][name][index]
                    tensor = torch.empty(
                        shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=self._topology.device
                    )
                    dist.recv(tensor, group=group, group_src=owner)
                else:
                    continue
                arrived.setdefault(name, []).append(tensor)
        self._seen.clear()
        return arrived


def module_names(stages: Sequence[nn.Module]) -> list[str]:
    """Names of all modules of a model, in order, without duplicates."""
    return list(dict.fromkeys(name for stage in stages for name, _ in stage.named_modules() if name))


def groups_of(pack: Pack, size: int) -> Iterator[Pack]:
    """Split microbatches into groups of at least ``size``, which a schedule may need; one group if there are fewer."""
    count = max(1, len(pack) // size)
    edges = [len(pack) * index // count for index in range(count + 1)]
    return (pack[begin:end] for begin, end in pairwise(edges))


def _not_once_error(name: str) -> BuildError:
    return BuildError(
        f"the output of module '{name}' cannot be read, as the module does not run exactly once for each microbatch; "
        "name another module in the task"
    )


def _key(name: str) -> str:
    return f"module/{name}"
