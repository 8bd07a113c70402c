"""Resolution of component configs to records, for conformance suites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from d9d_core.components import instantiate
from d9d_core.config import PluginConfig
from d9d_core.job_file.inner import choose
from d9d_core.job_file.resolve import tensors_given
from d9d_core.registry.registry import Registry


def inner_builder(registry: Registry, kind: str, config: PluginConfig) -> Callable[..., Any]:
    """Function that builds components nested in a config, the last argument of a composite record's ``build``.

    Args:
        registry: registry that resolves names in the config.
        kind: extension point of the config.
        config: config of the outer component.
    """
    return instantiate.inner_builder(choose(registry, kind, kind, config))


def given_by(registry: Registry, dataset: PluginConfig) -> Mapping[str, int] | None:
    """Tensors in every microbatch of a dataset: name -> number of dimensions; ``None`` if unknown.

    Args:
        registry: registry that resolves names in the config.
        dataset: config of the dataset.
    """
    return tensors_given(choose(registry, "dataset", "data", dataset), dataset)
