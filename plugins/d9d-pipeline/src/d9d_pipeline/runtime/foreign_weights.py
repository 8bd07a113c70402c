"""Foreign weights: matrices of modules without ``DefersWeights``, which only a graph walk can defer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from d9d_core.deferral import Deferral
from d9d_core.traits import DefersWeights
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

#: Below this part of the stage's matrices, foreign ones are not worth a graph that stays alive.
_NOTABLE = 1 / 16


class ForeignWeights:
    """Foreign weights of a stage; attaches the stage's deferral to all modules with ``DefersWeights``.

    Args:
        stage: after all strategies were applied.
        deferral: deferral of the stage.
        whole: names of modules that are left alone, with everything in them.
    """

    def __init__(self, stage: nn.Module, deferral: Deferral, whole: Collection[str]) -> None:
        #: matrix, by its name -> number of elements
        self._sizes: dict[str, int] = {}
        #: identity of a leaf tensor -> the tensor, which keeps its identity from being another's, and its name
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
            # FSDP2 puts other tensors in the place of parameters for the forward, always the same ones.
            stage.get_submodule(path).register_forward_pre_hook(partial(self._remember, path, tuple(foreign)))

    @property
    def worthwhile(self) -> bool:
        """Whether a notable part of the stage's matrices is foreign."""
        return sum(self._sizes.values()) > self._least

    def is_late(self, leaf: Tensor) -> bool:
        """Whether ``leaf`` is one of these matrices, so that its gradient may be late."""
        known, name = self._leaves.get(id(leaf), (None, ""))
        return known is leaf and name in self._sizes

    def at_once(self, leaves: Sequence[Tensor]) -> None:
        """Exclude matrices whose gradients cannot be deferred."""
        for leaf in leaves:
            self._sizes.pop(self._leaves[id(leaf)][1], None)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Context in which the parameters are gathered, also if FSDP2 shards them. Collective over their ranks."""
        for unit in self._units.values():
            # Nodes that pass once more tell FSDP2 of a backward, at the end of which it would free what others need.
            unit.set_reshard_after_backward(False, recurse=False)
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._units.values():
                unit.set_reshard_after_backward(True, recurse=False)  # as it comes
                unit.reshard()

    def _remember(self, path: str, names: Sequence[str], module: nn.Module, _inputs: object) -> None:
        for name in names:
            if isinstance(leaf := getattr(module, name), nn.Parameter):
                self._leaves[id(leaf)] = (leaf, f"{path}.{name}")


def _unit_of(stage: nn.Module, path: str) -> dict[str, FSDPModule]:
    """FSDP2 unit that gathers a module's parameters, by its name; empty if there is none."""
    parts = path.split(".")
    for length in range(len(parts), -1, -1):
        name = ".".join(parts[:length])
        module = stage.get_submodule(name)
        if isinstance(module, FSDPModule):
            return {name: module}
    return {}
