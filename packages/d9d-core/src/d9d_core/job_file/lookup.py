"""Loads a record's config class; a wrong reference in a plugin becomes an error that names the plugin."""

from __future__ import annotations

from typing import Any

from d9d_core.config import PluginConfig
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import PluginError
from d9d_core.plugin import ConfiguredSpec
from d9d_core.registry.entries import Entry, plugin_error, shown
from d9d_core.registry.imports import import_advice

__all__ = ["load_config"]


def load_config(entry: Entry) -> type[PluginConfig]:
    """Config class of a record.

    Raises:
        PluginError: the reference does not load, or is not a ``PluginConfig`` with the record's name.
    """
    assert isinstance(entry.spec, ConfiguredSpec)
    subject = f"{entry.kind.name} {entry}: its config {entry.spec.config}"
    try:
        config = entry.spec.config.load()
    except FOREIGN_FAILURES as error:
        raise plugin_error(f"{subject} failed to load: {shown(error)}{import_advice(error)}", error) from error
    if not (isinstance(config, type) and issubclass(config, PluginConfig)):
        raise PluginError(f"{subject} is not a subclass of d9d_core.config.PluginConfig; derive it from this class")
    name = config.model_fields["name"].default
    if name != entry.spec.key:
        wanted = f"name: Literal[{entry.spec.key!r}] = {entry.spec.key!r}"
        found = f"the name {name!r}" if isinstance(name, str) else "no default name"
        raise PluginError(f"{subject} has {found}; write {wanted}")
    return config


def config_schema(entry: Entry) -> dict[str, Any]:
    """JSON schema of a record's config.

    Raises:
        PluginError: the config class cannot be loaded, or has no JSON schema.
    """
    config = load_config(entry)
    try:
        return config.model_json_schema()
    except FOREIGN_FAILURES as error:
        text = f"{entry.kind.name} {entry}: its config {config.__qualname__} has no JSON schema: {shown(error)}"
        raise plugin_error(text, error) from error
