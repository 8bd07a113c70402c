"""The component under test: its record, its config and its construction, in this process and in those of a world."""

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
    """A registry of one plugin and core's own records.

    Args:
        plugin: a declaration module, or the path of a single-file plugin; ``None`` for whatever is installed.
    """
    if plugin is None:
        return _installed(tuple(sys.path))
    file = plugin.endswith(".py")
    return Registry.of(file_plugin(Path(plugin))[1]() if file else importlib.import_module(plugin))


@lru_cache(maxsize=1)
def _installed(_path: tuple[str, ...]) -> Registry:
    """Registry of what is installed on this path, kept: suites ask hundreds of times, at 20 milliseconds each."""
    return discover()


def configured(kind: str, plugin: str | None, target: str, fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """The record of a component and its config.

    Args:
        kind: as in :data:`d9d_core.registry.hooks.KINDS`.
        plugin: see :func:`registry_of`.
        target: how a job file selects the component.
        fields: of its config, as a job file has them.
    """
    registry = registry_of(plugin)
    spec: Any = registry.find(kind, target).spec
    return spec, spec.config.load().model_validate({**fields, "name": spec.name}, context={"registry": registry})


def build_component(kind: str, plugin: str | None, target: str, fields: Mapping[str, Any], *arguments: Any) -> Any:
    """The component that a job file with these fields selects; see :func:`configured`."""
    spec, config = configured(kind, plugin, target, fields)
    inner = [inner_builder(registry_of(plugin), kind, config)] if spec.composite else []
    return spec.build.load()(config, *arguments, *inner)


class ComponentSuite:
    """Base of the conformance suites of single components.

    Attributes:
        kind: the extension point; set by each suite.
        target: how a job file selects the component.
        plugin: its declaration module, or the path of a single-file plugin; by default, whatever is installed.
        config: fields of its config, as a job file has them.
    """

    pytestmark = pytest.mark.smoke

    kind: ClassVar[str]
    target: ClassVar[str]
    plugin: ClassVar[str | None] = None
    config: ClassVar[Mapping[str, Any]] = {}

    def build(self, *arguments: Any, **fields: Any) -> Any:
        """A new component.

        Args:
            arguments: of the record's ``build``, after the config.
            fields: replace fields of ``config``.
        """
        return build_component(self.kind, self.plugin, self.target, {**self.config, **fields}, *arguments)

    def address(self) -> list[Any]:
        """The first four arguments of :func:`build_component`, as plain data for other processes."""
        return [self.kind, self.plugin, self.target, json.loads(json.dumps(dict(self.config)))]


def plain_json(value: Any, what: str) -> Any:
    """The value after a round trip through JSON.

    Raises:
        AssertionError: JSON cannot hold it, or reads back something else.
    """
    try:
        again = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{what} must be what JSON can hold, which {value!r} is not: {error}") from error
    assert again == _lists(value), f"{what} changes in JSON: {value!r} reads back as {again!r}; use str keys and lists"
    return again


def _lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
