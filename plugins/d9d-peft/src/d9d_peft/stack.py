"""Fine-tuning method ``stack``: several methods on one model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from d9d_core.config import PluginConfig
from d9d_core.errors import BuildError
from d9d_core.peft import PeftMethod, StartsFromWeights, SwitchesOff
from d9d_weights.graph.base import Mapper, Sequential
from d9d_weights.hugging_face.adapter import MergesTensors
from torch import nn

from d9d_peft.config import StackConfig


class Stack:
    """Stack of fine-tuning methods: injects them in order and merges them in reverse order.

    It has the optional methods ``off`` and ``merger`` if all of its methods have them.

    Args:
        config: config with the methods.
        build: function that builds a method.
    """

    def __init__(self, config: StackConfig, build: Callable[[PluginConfig], PeftMethod]) -> None:
        self._methods = [build(method) for method in config.methods]
        switches = [method for method in self._methods if isinstance(method, SwitchesOff)]
        if len(switches) == len(self._methods):
            self.off = _off_of(switches)
        mergers = [method for method in self._methods if isinstance(method, MergesTensors)]
        if len(mergers) == len(self._methods):
            self.merger = _merger_of(mergers)

    def inject(self, stage: nn.Module) -> frozenset[str]:
        """Inject all methods; returns the names of the parameters that any method trains.

        Raises:
            BuildError: a method refuses the model, or two methods add parameters to one layer: the result would then
                depend on their order, and merging one after the other would not give the same model.
        """
        modules = {name: module for name, module in stage.named_modules() if name}
        trained: frozenset[str] = frozenset()
        adds_to: dict[str, int] = {}
        for number, method in enumerate(self._methods):
            before = {name for name, _ in stage.named_parameters()}
            try:
                trained |= method.inject(stage)
            except BuildError as error:
                # A nested `stack` method has already put its own field into the message.
                raise BuildError(str(error).replace("peft.", f"peft.methods[{number}].")) from error
            new = [name for name, _ in stage.named_parameters() if name not in before]
            for layer in dict.fromkeys(_layer(name, modules) for name in new):
                if adds_to.setdefault(layer, number) != number:
                    raise BuildError(
                        f"peft.methods[{number}]: it adds to '{layer}', as does methods[{adds_to[layer]}]; "
                        "exclude that layer from one of them"
                    )
        return trained

    def start(self, stage: nn.Module) -> None:
        """Start the methods that start from the model's weights. Collective over the ranks that share the weights."""
        for method in self._methods:
            if isinstance(method, StartsFromWeights):
                method.start(stage)

    def merge(self, stage: nn.Module) -> None:
        """Merge all methods, the last method first."""
        for method in reversed(self._methods):
            method.merge(stage)


def _layer(parameter: str, modules: Mapping[str, nn.Module]) -> str:
    """Name of the layer to which an added parameter belongs; a ``ModuleDict`` that holds updates counts as no layer."""
    parts = parameter.split(".")
    count = next(count for count in range(len(parts) - 1, -1, -1) if count == 0 or ".".join(parts[:count]) in modules)
    if isinstance(modules.get(".".join(parts[:count])), nn.ModuleDict):
        count += 1
    return ".".join(parts[:count])


def _off_of(methods: Sequence[SwitchesOff]) -> Callable[[nn.Module], object]:
    @contextmanager
    def off(stage: nn.Module) -> Iterator[None]:
        with ExitStack() as blocks:
            for method in methods:
                blocks.enter_context(method.off(stage))
            yield

    return off


def _merger_of(methods: Sequence[MergesTensors]) -> Callable[[Collection[str]], Mapper]:
    return lambda names: Sequential(*(method.merger(names) for method in reversed(methods)))
