"""Strategy and fine-tuning method."""

from collections.abc import Iterator
from contextlib import contextmanager

from d9d_core.errors import BuildError
from d9d_core.strategy import Applied, no_collectives
from d9d_core.topology import Topology
from d9d_core.traits import HasBlocks, modules_with
from torch import nn

from frozen_api_2.config import LastLayersConfig, ScaleConfig


class Scale:
    def __init__(self, config: ScaleConfig) -> None:
        self.factor = config.factor

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        found = {
            f"{owner}.{name}".lstrip("."): block
            for owner, module in modules_with(stage, HasBlocks).items()
            for name, block in module.blocks().items()
        }
        for block in found.values():
            block.register_forward_hook(lambda _module, _inputs, output: output * self.factor)
        ranks = topology.grid("dense").group(topology.rank, ["tp"])
        return Applied(tuple(found), collectives=no_collectives, notes=(f"scaled on {len(ranks)} ranks",))


class LastLayers:
    def __init__(self, config: LastLayersConfig) -> None:
        self.layers = config.layers

    def inject(self, stage: nn.Module) -> frozenset[str]:
        names = [name for name, _ in stage.named_parameters()][-self.layers :]
        if not names:
            raise BuildError("peft: the stage has no parameters")
        return frozenset(names)

    def merge(self, stage: nn.Module) -> None:
        pass

    @contextmanager
    def off(self, stage: nn.Module) -> Iterator[None]:
        yield
