"""Strategies and schedules for the search of layouts. Imports no torch."""

from __future__ import annotations

import math
from itertools import product

from d9d_core.config import PluginConfig
from d9d_core.errors import D9dError
from d9d_core.job_file.job import JobConfig, Mesh
from d9d_core.job_file.lookup import load_config
from d9d_core.layout.check import covers, strategies_for
from d9d_core.plugin import StrategySpec
from d9d_core.registry.registry import Registry
from pydantic import ValidationError

#: Anchors (points in the order of application) of strategies that the search varies; it keeps the job's strategies with
#: other anchors.
_OF_LAYOUTS = {"tensor", "context", "expert", "checkpointing", "data"}


class Options:
    """Strategies and schedules that the search of layouts may use."""

    def __init__(self, job: JobConfig, registry: Registry) -> None:
        self._job, self._registry = job, registry
        own = {config.selector: config for config in job.parallel}
        self._own = own
        self._configs: dict[tuple[str, str], PluginConfig | None] = {}
        specs = {name: registry.find("strategy", name).spec for name in own}
        altering = [spec for spec in specs.values() if isinstance(spec, StrategySpec) and spec.alters_training]
        self.kept = [
            config
            for name, config in own.items()
            if specs[name] in altering
            or not (isinstance(spec := specs[name], StrategySpec) and spec.anchor in _OF_LAYOUTS)
        ]
        #: Axes of strategies that alter the training, whose sizes the search keeps.
        self.fixed = {axis: job.mesh.sizes()[axis] for spec in altering for axis in spec.axes}
        self._excluded = {token for spec in altering for token in spec.conflicts}
        self.recomputing = [
            [config]
            for entry in registry.entries("strategy")
            if isinstance(entry.spec, StrategySpec)
            and entry.spec.anchor == "checkpointing"
            and (config := self._config("strategy", entry.spec.key)) is not None
        ]
        self.schedules = self._schedules()
        self._by_axis = {axis: self._ready(axis) for axis in ("tp", "cp", "ep")}
        self._of_axes: dict[str, list[PluginConfig]] = {}
        self._settings: dict[frozenset[str], list[PluginConfig]] = {}
        self._data = [*self._ready("dp_shard"), *self._ready("dp_replicate")]

    def _ready(self, axis: str) -> list[StrategySpec]:
        """Strategies for an axis: the job's own, or else all that need no additional library."""
        found = strategies_for(axis, self._registry)
        specs = [spec for spec in found if f"strategy:{spec.key}" not in self._excluded]
        own = [spec for spec in specs if spec.key in self._own]
        needy = [spec for spec in specs if any(token.startswith("import:") for token in spec.requires)]
        return own or [spec for spec in specs if spec not in needy]

    def strategies(self, axis: str) -> list[StrategySpec]:
        """Strategies that the search may use for a mesh axis."""
        return self._by_axis[axis]

    def expert_groups(self, mesh: Mesh) -> list[int]:
        """Valid sizes of ``ep`` on a mesh."""
        experts = getattr(self._job.model, "num_experts", None)
        if not isinstance(experts, int) or not self._by_axis["ep"]:
            return [1]
        return [ep for ep in divisors(experts) if covers(ep, mesh)]

    def parallel(self, mesh: Mesh, waits: bool) -> list[list[PluginConfig]]:
        """Alternative lists of strategies, with settings, for the axes of a mesh; empty if an axis has no strategy.

        Args:
            mesh: sizes of the axes.
            waits: whether to include settings of data-parallel strategies that delay reductions to the last microbatch.
        """
        used = [axis for axis in ("tp", "cp", "ep") if mesh.sizes()[axis] > 1]
        several = [list(choice) for choice in product(*(self._of_axis(axis) for axis in used))]
        data = [axis for axis in ("dp_shard", "dp_replicate") if axis not in self.fixed]
        needed = frozenset(axis for axis in data if mesh.sizes()[axis] > 1)
        if not needed:
            return several
        settings = self._data_parallel(needed)
        return [[*inner, config] for config in (settings if waits else settings[:1]) for inner in several]

    def _of_axis(self, axis: str) -> list[PluginConfig]:
        """Configs to try of the strategy for an axis, the job's own first; empty if its config has required fields."""
        if axis not in self._of_axes:
            spec = self._by_axis[axis][0]
            config = self._config("strategy", spec.key)
            # Each setting multiplies the number of layouts, so vary settings only if the job uses the strategy.
            others = spec.alternatives if spec.key in self._own else None
            more = others.load()(config) if config is not None and others is not None else ()
            self._of_axes[axis] = [] if config is None else [config, *more]
        return self._of_axes[axis]

    def _data_parallel(self, needed: frozenset[str]) -> list[PluginConfig]:
        """Configs to try of one strategy for all ``needed`` axes, preferably for no other axes and used by the job."""
        if needed not in self._settings:
            fitting = [spec for spec in self._data if needed <= spec.axes]
            fitting.sort(key=lambda spec: (len(spec.axes - needed), spec.key not in self._own))
            config = self._config("strategy", fitting[0].key) if fitting else None
            others = fitting[0].alternatives if fitting else None
            more = others.load()(config) if config is not None and others is not None else ()
            self._settings[needed] = [] if config is None else [config, *more]
        return self._settings[needed]

    def _schedules(self) -> list[PluginConfig | None]:
        own = self._job.pipeline
        names = [entry.spec.key for entry in self._registry.entries("schedule")]
        found = [own if own is not None and own.selector == name else self._config("schedule", name) for name in names]
        # The job's numbers of layers per stage do not fit other numbers of stages.
        found = [None if config is None else config.model_copy(update={"layers": None}) for config in found]
        return [config for config in found if config is not None]

    def _config(self, kind: str, name: str) -> PluginConfig | None:
        """The job's config of a strategy, else the default config of a component; always the same object.

        ``None`` if the config has required fields.
        """
        if kind == "strategy" and name in self._own:
            return self._own[name]
        if (kind, name) not in self._configs:
            try:
                self._configs[kind, name] = load_config(self._registry.find(kind, name))(name=name)
            except (D9dError, ValidationError):
                self._configs[kind, name] = None
        return self._configs[kind, name]


def divisors(number: int) -> list[int]:
    """Divisors of a number, ascending."""
    small = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return sorted({*small, *(number // count for count in small)})
