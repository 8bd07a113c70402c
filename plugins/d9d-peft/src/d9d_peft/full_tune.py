"""Fine-tuning method ``full_tune``: some parameters train as they are, the others are frozen."""

from __future__ import annotations

from collections.abc import Collection

from d9d_core.errors import BuildError
from d9d_weights.graph.base import Mapper
from d9d_weights.graph.mappers import Identity
from torch import nn

from d9d_peft.config import FullTuneConfig
from d9d_peft.patterns import select


class FullTune:
    """Full tuning: method that trains all parameters of the modules that patterns name, or single parameters."""

    def __init__(self, config: FullTuneConfig) -> None:
        self._match = config.match

    def inject(self, stage: nn.Module) -> frozenset[str]:
        """Names of the parameters that train; nothing is added.

        Raises:
            BuildError: a pattern matches no module and no parameter, or only modules without parameters.
        """
        parameters = [name for name, _ in stage.named_parameters()]
        modules = [name for name, _ in stage.named_modules() if name]
        # A whole model may be meant, but not by a pattern that also means a part of it.
        chosen = {*select([*parameters, *modules], self._match, "peft.match", "modules or parameters")}
        trained = frozenset(name for name in parameters if chosen & {name, *_owners(name)})
        if not trained:
            raise BuildError(f"peft.match: {', '.join(sorted(chosen)[:3])} have no parameters, so nothing would train")
        return trained

    def merger(self, names: Collection[str]) -> Mapper:  # noqa: ARG002 - see d9d_weights.hugging_face.adapter.MergesTensors
        """Mapper that keeps all tensors of a checkpoint."""
        return Identity()

    def merge(self, stage: nn.Module) -> None:
        """Leave everything as it is: what trained is the model's own."""


def _owners(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
