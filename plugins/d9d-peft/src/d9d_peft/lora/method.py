"""Fine-tuning method ``lora``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from d9d_core.extend import BuildError, CheckpointError, HasBanks, modules_with
from d9d_weights import Mapper
from torch import Tensor, nn

from d9d_peft.config import ALL_LINEAR, LowRankConfig
from d9d_peft.lora import files
from d9d_peft.lora.banks import GroupedTerm
from d9d_peft.lora.linear import Adapted, adapt, adapted_layers, is_adapted, merge
from d9d_peft.lora.merging import adapted_names, merger
from d9d_peft.patterns import matches, select


class Lora:
    """Method that adds low-rank terms to linear layers and banks of experts, and trains nothing else.

    Attributes:
        how: how an adapted layer computes.
    """

    how: ClassVar[type[Adapted]] = Adapted

    def __init__(self, config: LowRankConfig) -> None:
        self._config = config
        self._kinds: dict[type, type] = {}

    def inject(self, stage: nn.Module) -> frozenset[str]:
        """Add the terms, which train.

        Raises:
            BuildError: a pattern matches nothing that could have a term, nothing is left of what they match, or the
                rank is larger than a matrix.
        """
        linears, banks = _linears(stage), self._banks(stage)
        names = self._targets(linears.keys(), banks.keys())
        for name in names:
            if is_adapted(linears[name]) if name in linears else name.rpartition(".")[2] in banks[name][0]:
                raise BuildError(
                    f"peft.targets: '{name}' has a term of another method already; name it in peft.exclude"
                )
        self._check_rank({name: linears[name].weight if name in linears else banks[name][1] for name in names})
        config, own = self._config, {name for name, _ in stage.named_parameters()}
        for name in names:
            if name in linears:
                adapt(linears[name], self._kinds, config.r, config.scale, config.dropout, self.how)
            else:
                terms, bank = banks[name]
                terms[name.rpartition(".")[2]] = GroupedTerm(bank, config.r, config.scale, config.dropout)
        return frozenset(name for name, _ in stage.named_parameters() if name not in own)

    def merge(self, stage: nn.Module) -> None:
        """Fold the terms into the weights. Collective over the ranks that share them."""
        for _, layer in list(adapted_layers(stage)):
            merge(layer)
        for module in modules_with(stage, HasBanks).values():
            for name, term in list(module.bank_terms().items()):
                if isinstance(term, GroupedTerm):
                    term.merge_into(module.banks()[name])
                    del module.bank_terms()[name]

    @contextmanager
    def off(self, stage: nn.Module) -> Iterator[None]:
        """Compute without the terms inside the block; see :class:`d9d_core.extend.SwitchesOff`."""
        terms: list[Any] = [m for m in stage.modules() if is_adapted(m) or isinstance(m, GroupedTerm)]
        before = [term.lora_off for term in terms]
        for term in terms:
            term.lora_off = True
        try:
            yield
        finally:
            for term, value in zip(terms, before, strict=True):
                term.lora_off = value

    def merger(self, names: Collection[str]) -> Mapper:
        """Mapper that merges tensors of a checkpoint; see :class:`d9d_weights.MergesTensors`."""
        linears, banks = adapted_names(names)
        own = [name for name in linears if self._means(name, is_linear=True)]
        return self._merger(own, [name for name in banks if self._means(name, is_linear=False)])

    @property
    def init_from(self) -> str | None:
        """Directory of the adapter to start from."""
        return self._config.init_from

    def adapter_config(self, stage: nn.Module, published: Mapping[str, str]) -> dict[str, Any]:
        """Contents of ``adapter_config.json``; see :class:`d9d_weights.AdapterFormat`."""
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

    def _merger(self, linears: Sequence[str], banks: Sequence[str]) -> Mapper:
        return merger(linears, banks, self._config.scale)

    def _banks(self, stage: nn.Module) -> dict[str, tuple[nn.ModuleDict, nn.Parameter]]:
        """Banks of experts by name: where a term goes, and the bank [experts, in, out]."""
        return {
            f"{name}.{bank}": (module.bank_terms(), parameter)
            for name, module in modules_with(stage, HasBanks).items()
            for bank, parameter in module.banks().items()
        }

    def _modules(self, stage: nn.Module, published: Mapping[str, str]) -> dict[str, str]:
        if any(isinstance(module, GroupedTerm) for module in stage.modules()):
            raise CheckpointError("terms of experts are in no adapter's file; export the merged model")
        return files.modules_of([name for name, _ in adapted_layers(stage)], published)

    def _targets(self, linears: Collection[str], banks: Collection[str]) -> list[str]:
        config, names = self._config, [*linears, *banks]
        if not names:
            raise BuildError("peft.targets: the model has no linear layers")
        patterns = [pattern for pattern in config.targets if pattern != ALL_LINEAR]
        select(names, patterns, "peft.targets", "linear layers")
        if config.exclude:
            select(names, config.exclude, "peft.exclude", "linear layers")
        left = [name for name in names if self._means(name, is_linear=name in linears)]
        if not left:
            raise BuildError("peft.exclude: it leaves nothing of peft.targets; exclude less")
        return left

    def _means(self, name: str, *, is_linear: bool) -> bool:
        config = self._config
        wanted = (is_linear and ALL_LINEAR in config.targets) or any(matches(name, p) for p in config.targets)
        return wanted and not any(matches(name, pattern) for pattern in config.exclude)

    def _check_rank(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            shape = list(weight.shape[-2:])
            if self._config.r > min(shape):
                raise BuildError(
                    f"peft.r: a rank of {self._config.r} is larger than the matrix of '{name}' {shape}; "
                    f"use at most {min(shape)}, or exclude that layer"
                )


def _linears(stage: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers of the model, by name; those inside of terms are none of them."""
    layers = {name: module for name, module in stage.named_modules() if isinstance(module, nn.Linear)}
    adapted = tuple(f"{name}." for name, _ in adapted_layers(stage))
    return {name: module for name, module in layers.items() if not name.startswith(adapted)}
