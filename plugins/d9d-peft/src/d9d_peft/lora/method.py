"""Fine-tuning method ``lora``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from d9d_core.errors import BuildError
from d9d_core.traits import HasBanks, modules_with
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.mappers import Identity
from torch import Tensor, nn

from d9d_peft.config import ALL_LINEAR, LowRankConfig
from d9d_peft.lora import files
from d9d_peft.lora.banks import GroupedTerm
from d9d_peft.lora.linear import Adapted, AdaptedLinear, adapted_layers, is_adapted, merge
from d9d_peft.lora.merging import TERMS, Term, fold, terms_of
from d9d_peft.lora.saved import check_saved, saved_names, saved_parameters
from d9d_peft.lora.sites import Site, Sizes, sites_of
from d9d_peft.patterns import first_match, matches, select


class Lora:
    """LoRA: adds low-rank updates to linear layers, embeddings, heads and experts; trains only the updates.

    With ``modules_to_save``, it also trains the parameters of these modules. It then has no method ``off``, which
    computes the original model, because the original values of these parameters are not kept.

    Attributes:
        how: mixin of an adapted linear layer.
    """

    how: ClassVar[type[Adapted]] = AdaptedLinear

    def __init__(self, config: LowRankConfig) -> None:
        self._config = config
        if not config.modules_to_save:
            self.off = self._off

    def inject(self, stage: nn.Module) -> frozenset[str]:
        """Add the updates; returns the names of the parameters to train: of updates and of ``modules_to_save``.

        Raises:
            BuildError: a pattern matches no layer that LoRA supports, no target or no module; ``exclude`` excludes all
                targets; a rank is larger than a side of a matrix; a target is adapted already; the weight of a target,
                or of one of ``modules_to_save``, is tied to another module; or one of ``modules_to_save`` contains a
                target.
        """
        sites, config = sites_of(stage, self.how), self._config
        own = {name for name, _ in stage.named_parameters()}
        chosen = {name: sites[name] for name in self._targets(sites)}
        for name, site in chosen.items():
            if site.has_term:
                text = f"'{name}' is adapted by another method already; add it to peft.exclude"
                raise BuildError(f"peft.targets: {text}")
            self._check_rank(name, site.weight)
        select(chosen, config.rank_pattern, "peft.rank_pattern", "targets")
        select(chosen, config.alpha_pattern, "peft.alpha_pattern", "targets")
        check_saved(stage, config.modules_to_save, chosen)
        for name, site in chosen.items():
            site.add(Sizes(config.rank_of(name), config.scale_of(name), config.dropout))
        added = frozenset(name for name, _ in stage.named_parameters() if name not in own)
        return added.union(saved_parameters(stage, config.modules_to_save))

    def merge(self, stage: nn.Module) -> None:
        """Add the updates to the weights. Collective over the ranks that hold shards of them."""
        for _, layer in list(adapted_layers(stage)):
            merge(layer)
        for module in modules_with(stage, HasBanks).values():
            for name, term in list(module.bank_terms().items()):
                if isinstance(term, GroupedTerm):
                    term.merge_into(module.banks()[name])
                    del module.bank_terms()[name]

    @contextmanager
    def _off(self, stage: nn.Module) -> Iterator[None]:
        """Compute without the updates inside the ``with`` block; see :class:`d9d_core.peft.SwitchesOff`."""
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
        """Mapper that merges tensors of a checkpoint; see :class:`d9d_weights.hugging_face.adapter.MergesTensors`."""
        own = [term for term in terms_of(names) if self._means(term.owner, is_linear=term.is_linear)]
        return Parallel(*(self._fold(term) for term in own), Identity())

    @property
    def init_from(self) -> str | None:
        """Directory or address of the adapter to start from."""
        return self._config.init_from

    def adapter_config(self, stage: nn.Module, published: Mapping[str, str]) -> dict[str, Any]:
        """Contents of ``adapter_config.json``; see :class:`d9d_weights.hugging_face.adapter.AdapterFormat`."""
        banks = files.experts_of(stage, published, self._config)
        experts = [one for number, there in banks.values() for one in files.modules_of_experts(there, number)]
        saved = saved_names(stage, self._config.modules_to_save, published)
        return files.config_json(self._config, self._modules(stage, published), experts, saved.values())

    def adapter_exporter(self, stage: nn.Module, published: Mapping[str, str]) -> Mapper:
        """Mapper from the names of the updates to the names in a file of the ``peft`` library."""
        layers = dict(adapted_layers(stage))
        modules = {n: (there, layers[n].lora_files) for n, there in self._modules(stage, published).items()}
        saved = saved_names(stage, self._config.modules_to_save, published)
        return files.exporter(modules, files.experts_of(stage, published, self._config), saved)

    def check_adapter(
        self, stage: nn.Module, published: Mapping[str, str], config_json: Mapping[str, Any], names: Collection[str]
    ) -> None:
        """Check the config of an adapter to start from.

        Raises:
            CheckpointError: the adapter is of another method, has another rank or scale, or has features that this
                method does not support.
        """
        files.check_config(self._config, config_json, names)
        files.check_patterns(self._config, config_json, self._files_of(stage, published))

    def _files_of(self, stage: nn.Module, published: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield each target with the name of its module in files; an expert weight once for each expert."""
        yield from self._modules(stage, published).items()
        for term, (number, there) in files.experts_of(stage, published, self._config).items():
            for module in files.modules_of_experts(there, number):
                yield ".".join(term.rsplit(TERMS, 1)), module

    def _fold(self, term: Term) -> Mapper:
        scale = self._config.scale_of(term.owner)
        return fold(term.weight, term.factors, lambda weight, a, b: term.merged(weight, a, b, scale))

    def _modules(self, stage: nn.Module, published: Mapping[str, str]) -> dict[str, str]:
        modules = files.modules_of([name for name, _ in adapted_layers(stage)], published)
        files.check_no_expert(stage, modules.values())
        return modules

    def _targets(self, sites: Mapping[str, Site]) -> list[str]:
        config, what = self._config, "layers" if self.how is AdaptedLinear else "linear layers"
        if not sites:
            raise BuildError(
                "peft.targets: the model has no layer that LoRA supports (linear, embedding, head, experts)"
            )
        select(sites, [one for one in config.targets if one != ALL_LINEAR], "peft.targets", what)
        if config.exclude:
            select(sites, config.exclude, "peft.exclude", what)
        left = [name for name, site in sites.items() if self._means(name, is_linear=site.is_linear)]
        if not left:
            raise BuildError("peft.exclude: all targets are excluded; exclude fewer layers")
        return left

    def _means(self, name: str, *, is_linear: bool) -> bool:
        config = self._config
        wanted = (is_linear and ALL_LINEAR in config.targets) or any(matches(name, p) for p in config.targets)
        return wanted and not any(matches(name, pattern) for pattern in config.exclude)

    def _check_rank(self, name: str, weight: Tensor) -> None:
        shape, rank = list(weight.shape[-2:]), self._config.rank_of(name)
        if rank > min(shape):
            pattern = first_match(name, self._config.rank_pattern)
            field = "r" if pattern is None else f"rank_pattern.{pattern}"
            raise BuildError(
                f"peft.{field}: a rank of {rank} is larger than the matrix of '{name}' {shape}; "
                f"use at most {min(shape)}, or exclude that layer"
            )
