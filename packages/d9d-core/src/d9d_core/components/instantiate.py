"""Instantiation of the components that a job's records stand for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from d9d_core.components.contract import check_component
from d9d_core.config.base import PluginConfig
from d9d_core.config.open_union import inner_configs, open_fields
from d9d_core.errors import BuildError
from d9d_core.plugin.capabilities import Chosen
from d9d_core.plugin.records import ConfiguredSpec

#: How torch says that sizes, or their product, have no 64 bits.
_TOO_LARGE = re.compile(r"calculation overflowed|multiplication overflow|Overflow when unpacking|too large to convert")


def instantiate(chosen: Chosen, config: PluginConfig, *arguments: object) -> Any:
    """Instantiate a component: call its record's ``build`` reference, and check what it returns.

    If its config has open fields, ``build`` gets one more argument, see :func:`inner_builder`.

    Raises:
        BuildError: its module cannot be imported, it takes other arguments, it builds something else, or sizes in its
            config make a tensor that no memory holds.
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
    arguments = (*arguments, *inner_builder(chosen, config))
    try:
        component = build(config, *arguments)
    except (TypeError, RuntimeError, OverflowError) as error:
        where = f"{chosen.where}: {chosen.entry.kind.name} {chosen.entry}"
        if _TOO_LARGE.search(str(error)):
            reason = str(error).partition("\n")[0][:200]
            raise BuildError(
                f"{where}: its sizes make a tensor larger than any memory ({reason}); correct them"
            ) from error
        if not isinstance(error, TypeError):
            raise
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # it was not entered
            kinds = ", ".join(["config", *(type(argument).__name__ for argument in arguments)])
            raise BuildError(f"{where}: {chosen.spec.build} cannot be called with ({kinds}): {error}") from error
        raise
    check_component(chosen, component)
    return component


def inner_builder(chosen: Chosen, config: PluginConfig) -> tuple[Callable[..., Any], ...]:
    """Last argument of ``build`` for a component that is made of others; none if its config has no open fields.

    Returns:
        A function ``(inner config, *arguments of its kind's build) -> component``.
    """
    if not open_fields(type(config)):
        return ()
    parts = [(one, of) for of, (_, _, one) in zip(chosen.inner, inner_configs(config), strict=True)]

    def build_inner(inner: PluginConfig, *arguments: object) -> Any:
        found = [of for one, of in parts if one is inner]
        if not found:
            raise BuildError(f"{chosen.where}: {chosen.entry} builds a config that is in none of its open fields")
        return instantiate(found[0], inner, *arguments)

    return (build_inner,)
