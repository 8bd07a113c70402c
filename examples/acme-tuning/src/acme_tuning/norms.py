"""Fine-tuning method ``norms``: Zhao et al. 2023, "Tuning LayerNorm in Attention", section 3."""

from __future__ import annotations

from fnmatch import fnmatchcase

from d9d_core.errors import BuildError
from torch import nn

from acme_tuning.config import NormsConfig


class Norms:
    """Trains the parameters of matching layers, and adds none: an exported model has the usual names."""

    def __init__(self, config: NormsConfig) -> None:
        self._config = config

    def inject(self, stage: nn.Module) -> frozenset[str]:
        """Names of the trained parameters.

        Raises:
            BuildError: no layer with parameters matches.
        """
        layers = {name: list(layer.named_parameters(recurse=False)) for name, layer in stage.named_modules()}
        names = [name for name, parameters in layers.items() if parameters]
        chosen = [name for name in names if fnmatchcase(name, self._config.match)]
        if not chosen:
            raise BuildError(f"peft.match: no layer matches '{self._config.match}'; there are: {', '.join(names)}")
        return frozenset(f"{name}.{leaf}" for name in chosen for leaf, _ in layers[name])

    def merge(self, stage: nn.Module) -> None:
        """Change nothing: the trained weights are the model's own."""
