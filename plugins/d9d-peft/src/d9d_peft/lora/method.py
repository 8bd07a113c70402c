"""Fine-tuning method ``lora``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_core.extend import BuildError
from d9d_weights import Mapper
from torch import nn

from d9d_peft.config import ALL_LINEAR, LoraConfig
from d9d_peft.lora import files
from d9d_peft.lora.linear import LORA_A, LORA_B, adapt, adapted_layers, is_adapted, merge
from d9d_peft.patterns import matches, select


class Lora:
    """Method that adds a low-rank term to linear layers and trains nothing else."""

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        self._kinds: dict[type, type] = {}

    def inject(self, stage: nn.Module) -> frozenset[str]:
        """Add the terms, which train.

        Raises:
            BuildError: a pattern matches no linear layer, nothing is left of what they match, or the rank is larger
                than a matrix.
        """
        linears = _linears(stage)
        names = self._targets(linears)
        for name in names:
            layer = linears[name]
            smaller = min(layer.in_features, layer.out_features)
            if self._config.r > smaller:
                raise BuildError(
                    f"peft.r: a rank of {self._config.r} is larger than the matrix of '{name}' "
                    f"[{layer.out_features}, {layer.in_features}]; use at most {smaller}, or exclude that layer"
                )
        for name in names:
            config = self._config
            adapt(linears[name], self._kinds, rank=config.r, scale=config.scale, dropout=config.dropout)
        return frozenset(f"{name}.{child}.weight" for name in names for child in (LORA_A, LORA_B))

    def merge(self, stage: nn.Module) -> None:
        """Fold the terms into the weights. Collective over the ranks that share them."""
        for _, layer in list(adapted_layers(stage)):
            merge(layer)

    @property
    def init_from(self) -> str | None:
        """Directory of the adapter to start from."""
        return self._config.init_from

    def adapter_config(self, stage: nn.Module, published: Mapping[str, str]) -> dict[str, Any]:
        """Contents of ``adapter_config.json``; see :class:`d9d_weights.hugging_face.adapter.AdapterFormat`."""
        return files.config_json(self._config, self._modules(stage, published))

    def adapter_exporter(self, stage: nn.Module, published: Mapping[str, str]) -> Mapper:
        """Mapper from the names of the terms to those in the file of the ``peft`` library."""
        return files.exporter(self._modules(stage, published))

    def check_adapter(self, config_json: Mapping[str, Any]) -> None:
        """Compare the config with that of an adapter to start from.

        Raises:
            CheckpointError: it is of another kind, rank or scale.
        """
        files.check_config(self._config, config_json)

    def _modules(self, stage: nn.Module, published: Mapping[str, str]) -> dict[str, str]:
        return files.modules_of([name for name, _ in adapted_layers(stage)], published)

    def _targets(self, linears: Mapping[str, nn.Linear]) -> list[str]:
        config = self._config
        if not linears:
            raise BuildError("peft.targets: the model has no linear layers without a term")
        patterns = [pattern for pattern in config.targets if pattern != ALL_LINEAR]
        chosen = select(linears, patterns, "peft.targets", "linear layers")
        if ALL_LINEAR in config.targets:
            chosen = list(linears)
        if config.exclude:
            select(linears, config.exclude, "peft.exclude", "linear layers")
        chosen = [name for name in chosen if not any(matches(name, pattern) for pattern in config.exclude)]
        if not chosen:
            raise BuildError("peft.exclude: it leaves nothing of peft.targets; exclude less")
        return chosen


def _linears(stage: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers without a term, by name; those inside of terms are none of the model's."""
    layers = {name: module for name, module in stage.named_modules() if isinstance(module, nn.Linear)}
    adapted = [f"{name}." for name, _ in adapted_layers(stage)]
    return {n: m for n, m in layers.items() if not is_adapted(m) and not n.startswith(tuple(adapted))}
