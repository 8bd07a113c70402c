"""Instantiation of the components that a job's records stand for."""

from __future__ import annotations

from typing import Any

from d9d_core.config.base import PluginConfig
from d9d_core.errors import BuildError
from d9d_core.plugin.capabilities import Chosen
from d9d_core.plugin.records import ConfiguredSpec


def instantiate(chosen: Chosen, config: PluginConfig, *arguments: object) -> Any:
    """Call a record's ``build`` reference.

    Raises:
        BuildError: its module cannot be imported.
    """
    assert isinstance(chosen.spec, ConfiguredSpec)
    try:
        build = chosen.spec.build.load()
    except (ImportError, AttributeError) as error:
        kind = chosen.entry.kind.name
        text = f"{chosen.where}: {kind} {chosen.entry}: {chosen.spec.build} failed to load: {error!r}"
        build_error = BuildError(text)
        build_error.origin = error
        raise build_error from error
    return build(config, *arguments)
