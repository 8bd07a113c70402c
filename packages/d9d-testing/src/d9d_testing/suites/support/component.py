"""Component under test: its record, config and construction, in this process and in the ranks of a world."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
from d9d_core.registry.loader import discover
from d9d_core.registry.registry import Registry
from d9d_core.registry.single_file import file_plugin

from d9d_testing.suites.support.resolved import inner_builder


def registry_of(plugin: str | None) -> Registry:
    """Registry of one plugin, d9d-core and d9d-engine.

    Args:
        plugin: declaration module, or path of a single-file plugin; ``None`` for all installed plugins.
    """
    if plugin is None:
        return _installed(tuple(sys.path))
    file = plugin.endswith(".py")
    return Registry.of(file_plugin(Path(plugin))[1]() if file else importlib.import_module(plugin))


@lru_cache(maxsize=1)
def _installed(_path: tuple[str, ...]) -> Registry:
    """Registry of all plugins installed on this path; cached, because suites need it hundreds of times, 20 ms each."""
    return discover()


def configured(kind: str, plugin: str | None, target: str, fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """Record of a component, and its config.

    Args:
        kind: kind in :data:`d9d_core.registry.hooks.KINDS`.
        plugin: declaration module, or path of a single-file plugin; ``None`` for all installed plugins.
        target: name or ``distribution/name`` of the component.
        fields: config fields, as in a job file.
    """
    registry = registry_of(plugin)
    spec: Any = registry.find(kind, target).spec
    return spec, spec.config.load().model_validate({**fields, "name": spec.name}, context={"registry": registry})


def build_component(kind: str, plugin: str | None, target: str, fields: Mapping[str, Any], *arguments: Any) -> Any:
    """Build the component that a job file with these fields selects; see :func:`configured`."""
    spec, config = configured(kind, plugin, target, fields)
    inner = [inner_builder(registry_of(plugin), kind, config)] if spec.composite else []
    return spec.build.load()(config, *arguments, *inner)


class ComponentSuite:
    """Base of the conformance suites of single components.

    Attributes:
        kind: extension point; set by each suite.
        target: name or ``distribution/name`` of the component.
        plugin: declaration module, or path of a single-file plugin; by default, any installed plugin.
        config: config fields, as in a job file.
    """

    pytestmark = pytest.mark.smoke

    kind: ClassVar[str]
    target: ClassVar[str]
    plugin: ClassVar[str | None] = None
    config: ClassVar[Mapping[str, Any]] = {}

    def build(self, *arguments: Any, **fields: Any) -> Any:
        """New component that ``target`` names, built from its config.

        Args:
            arguments: arguments of the record's ``build`` after the config.
            fields: replacements for fields of ``config``.
        """
        return build_component(self.kind, self.plugin, self.target, {**self.config, **fields}, *arguments)

    def address(self) -> list[Any]:
        """First four arguments of :func:`build_component`, as JSON values for other processes."""
        return [self.kind, self.plugin, self.target, json.loads(json.dumps(dict(self.config)))]


def plain_json(value: Any, what: str) -> Any:
    """Value after a round trip through JSON.

    Raises:
        AssertionError: the value is not JSON, or reads back differently.
    """
    try:
        again = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{what} must be JSON values, but is {value!r}: {error}") from error
    assert again == _lists(value), f"{what} changes in JSON: {value!r} reads back as {again!r}; use str keys and lists"
    return again


def _lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
