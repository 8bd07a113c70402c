"""Fine-tuning method ``full_tune``: trains some parameters of the model, and freezes all other parameters."""

from __future__ import annotations

from collections.abc import Collection

from d9d_core.errors import BuildError
from d9d_weights.graph.base import Mapper
from d9d_weights.graph.mappers import Identity
from torch import nn

from d9d_peft.config import FullTuneConfig
from d9d_peft.patterns import owners, select


class FullTune:
    """Full tuning: trains all parameters of the modules whose names match, or single parameters."""

    def __init__(self, config: FullTuneConfig) -> None:
        self._match = config.match

    def inject(self, stage: nn.Module) -> frozenset[str]:
        """Return the names of the parameters to train; adds no parameters to the model.

        Raises:
            BuildError: a pattern matches no module and no parameter, or only modules without parameters.
        """
        parameters = [name for name, _ in stage.named_parameters()]
        modules = [name for name, _ in stage.named_modules() if name]
        # A pattern may match modules and single parameters.
        chosen = {*select([*parameters, *modules], self._match, "peft.match", "modules or parameters")}
        trained = frozenset(name for name in parameters if chosen & {name, *owners(name)})
        if not trained:
            raise BuildError(
                f"peft.match: {', '.join(sorted(chosen)[:3])} have no parameters, so nothing would be trained; name "
                "other modules"
            )
        return trained

    def merger(self, names: Collection[str]) -> Mapper:  # noqa: ARG002 - see d9d_weights.hugging_face.adapter.MergesTensors
        """Mapper that keeps all tensors of a checkpoint unchanged."""
        return Identity()

    def merge(self, stage: nn.Module) -> None:
        """Do nothing, because the trained parameters already belong to the model."""
