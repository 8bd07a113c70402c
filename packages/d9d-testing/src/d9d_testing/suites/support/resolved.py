"""Configs of components with the records that they name, as conformance suites build and judge them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from d9d_core.components import instantiate
from d9d_core.config import PluginConfig
from d9d_core.job_file.inner import choose
from d9d_core.job_file.resolve import tensors_given
from d9d_core.registry.registry import Registry


def inner_builder(registry: Registry, kind: str, config: PluginConfig) -> Callable[..., Any]:
    """Builder of the components inside a config, the last argument of a composite record's ``build``.

    Args:
        registry: meaning of the names in the config.
        kind: the extension point of the config.
        config: of the outer component.
    """
    return instantiate.inner_builder(choose(registry, kind, kind, config))


def given_by(registry: Registry, dataset: PluginConfig) -> Mapping[str, int] | None:
    """Tensors that every microbatch of a dataset has -> their number of dims; ``None`` if that is not known.

    Args:
        registry: meaning of the names in the config.
        dataset: its config.
    """
    return tensors_given(choose(registry, "dataset", "data", dataset), dataset)
