"""Nested components: configs inside a component's config, such as the parts of a mixture of datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from d9d_core.config import PartConfig, PluginConfig, Section
from d9d_core.job_file.open_union import Named
from d9d_core.registry.capabilities import Chosen
from d9d_core.registry.registry import Registry

__all__ = ["choose"]


def choose(registry: Registry, kind: str, where: str, config: PluginConfig) -> Chosen:
    """Choose the record of a config, and the records of the configs inside it.

    Args:
        registry: registry that resolves names.
        kind: extension point.
        where: field of the job file that holds the config.
        config: config of the component.

    Raises:
        PluginError: the registry does not have a named component.
    """
    inner = [(choose(registry, its_kind, its_where, its), its) for its_kind, its_where, its in _inside(config, where)]
    of_part = isinstance(config, PartConfig) and bool(config.match)
    return Chosen(where, registry.find(kind, config.selector), tuple(inner), of_part)


def _inside(section: Section, where: str) -> Iterator[tuple[str, str, PluginConfig]]:
    """Component configs that are fields of a section, with kind and field name; configs inside them are left out."""
    for name, field in type(section).model_fields.items():
        kind = kind_in((*field.metadata, field.annotation))
        yield from _found(getattr(section, name), f"{where}.{name}", kind)


def _found(value: Any, where: str, kind: str | None) -> Iterator[tuple[str, str, PluginConfig]]:
    if isinstance(value, PluginConfig):
        if kind is not None:
            yield kind, where, value
    elif isinstance(value, Section):
        yield from _inside(value, where)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _found(item, f"{where}[{index}]", kind)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _found(item, f"{where}.{name}", kind)


def kind_in(annotations: tuple[Any, ...]) -> str | None:
    """Kind of component that a field's annotation names (:class:`Named`); ``None`` if it names none."""
    for annotation in annotations:
        if isinstance(annotation, Named):
            return annotation.kind
        if kind := kind_in((*getattr(annotation, "__metadata__", ()), *get_args(annotation))):
            return kind
    return None
