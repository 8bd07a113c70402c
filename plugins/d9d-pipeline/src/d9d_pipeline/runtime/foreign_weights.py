"""Foreign weights: matrices of modules without ``DefersWeights``; only a graph walk can defer their gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from d9d_core.deferral import Deferral
from d9d_core.traits import DefersWeights
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

#: Fraction of the stage's matrix elements below which foreign matrices are not worth keeping the graph for.
_NOTABLE = 1 / 16


class ForeignWeights:
    """Foreign weights of a stage: matrices of modules that cannot defer their weight gradients themselves.

    The constructor attaches the stage's deferral to all modules with the trait ``DefersWeights``.

    Args:
        stage: stage after all strategies were applied.
        deferral: deferral of the stage.
        whole: names of modules to leave unchanged, with all their submodules.
    """

    def __init__(self, stage: nn.Module, deferral: Deferral, whole: Collection[str]) -> None:
        #: Name of a matrix -> number of elements.
        self._sizes: dict[str, int] = {}
        #: id of a leaf tensor -> the tensor, kept so that its id is not reused, and its name.
        self._leaves: dict[int, tuple[Tensor, str]] = {}
        self._units: dict[str, FSDPModule] = {}
        kept_whole = {id(inner) for name in whole for inner in stage.get_submodule(name).modules()}
        matrices = 0
        for path, module in stage.named_modules():
            if id(module) in kept_whole or isinstance(module, nn.Embedding):
                continue
            deferred = module.defer_to(deferral) if isinstance(module, DefersWeights) else ()
            own = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad and p.ndim > 1}
            matrices += sum(parameter.numel() for parameter in own.values())
            if foreign := {name: parameter for name, parameter in own.items() if name not in deferred}:
                self._add(stage, path, foreign)
        self._least = matrices * _NOTABLE

    def _add(self, stage: nn.Module, path: str, foreign: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in foreign.items():
            self._sizes[f"{path}.{name}"] = parameter.numel()
            self._leaves[id(parameter)] = (parameter, f"{path}.{name}")
        if unit := _unit_of(stage, path):
            self._units.update(unit)
            # In a forward, FSDP2 replaces the parameters by other tensors, which are then the leaves of the graph.
            stage.get_submodule(path).register_forward_pre_hook(partial(self._remember, path, tuple(foreign)))

    @property
    def worthwhile(self) -> bool:
        """Whether the foreign matrices are a large enough fraction of the stage's matrices to defer their gradients."""
        return sum(self._sizes.values()) > self._least

    def is_late(self, leaf: Tensor) -> bool:
        """Whether a leaf tensor is one of the foreign matrices, so that its gradient may be deferred."""
        known, name = self._leaves.get(id(leaf), (None, ""))
        return known is leaf and name in self._sizes

    def at_once(self, leaves: Sequence[Tensor]) -> None:
        """Exclude foreign matrices whose gradients cannot be deferred; the input phase computes them."""
        for leaf in leaves:
            self._sizes.pop(self._leaves[id(leaf)][1], None)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Context in which parameters that FSDP2 shards are gathered. Collective over the ranks of the shards."""
        for unit in self._units.values():
            # A backward through a part of the graph would make FSDP2 free the parameters at its end, but other parts of
            # the graph still need them.
            unit.set_reshard_after_backward(False, recurse=False)
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._units.values():
                unit.set_reshard_after_backward(True, recurse=False)  # FSDP2's default
                unit.reshard()

    def _remember(self, path: str, names: Sequence[str], module: nn.Module, _inputs: object) -> None:
        for name in names:
            if isinstance(leaf := getattr(module, name), nn.Parameter):
                self._leaves[id(leaf)] = (leaf, f"{path}.{name}")


def _unit_of(stage: nn.Module, path: str) -> dict[str, FSDPModule]:
    """Name and module of the FSDP2 unit that gathers a module's parameters; empty if there is none."""
    parts = path.split(".")
    for length in range(len(parts), -1, -1):
        name = ".".join(parts[:length])
        module = stage.get_submodule(name)
        if isinstance(module, FSDPModule):
            return {name: module}
    return {}
