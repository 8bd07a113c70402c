"""Instantiation of components from a job's records."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from d9d_core.components.contract import check_component
from d9d_core.config import PluginConfig
from d9d_core.containment import directory_kept
from d9d_core.errors import BuildError
from d9d_core.plugin import ConfiguredSpec
from d9d_core.registry.capabilities import Chosen

__all__ = ["inner_builder", "instantiate"]

#: Texts of torch's errors about sizes, or products of sizes, above 64 bits.
_TOO_LARGE = re.compile(r"calculation overflowed|multiplication overflow|Overflow when unpacking|too large to convert")


def inner_builder(chosen: Chosen) -> Callable[..., Any]:
    """Function that builds a component nested in ``chosen``, from its config and further arguments of its ``build``."""

    def build(config: PluginConfig, *arguments: object) -> Any:
        same = [inner for inner, given in chosen.inner if given is config]
        same = same or [inner for inner, given in chosen.inner if given == config]
        if not same:
            raise BuildError(
                f"{chosen.where}: the build of {chosen.entry} passed a config of '{config.selector}' that is not "
                "nested in the component's own config; pass the value of one of its fields"
            )
        return instantiate(same[0], config, *arguments)

    return build


def instantiate(chosen: Chosen, config: PluginConfig, *arguments: object) -> Any:
    """Instantiate a component: call its record's ``build`` reference, and check the result.

    Raises:
        BuildError: the reference cannot be loaded, ``build`` takes other arguments or returns a wrong object, or the
            config's sizes make a tensor too large for any memory.
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
    if chosen.spec.composite:
        arguments = (*arguments, inner_builder(chosen))
    try:
        with directory_kept():
            component = build(config, *arguments)
    except (TypeError, RuntimeError, OverflowError) as error:
        where = f"{chosen.where}: {chosen.entry.kind.name} {chosen.entry}"
        if _TOO_LARGE.search(str(error)):
            reason = str(error).partition("\n")[0][:200]
            raise BuildError(
                f"{where}: the sizes in its config need a tensor larger than any memory ({reason}); lower them"
            ) from error
        if not isinstance(error, TypeError):
            raise
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # raised by the call, not inside it
            kinds = ", ".join(["config", *(type(argument).__name__ for argument in arguments)])
            raise BuildError(
                f"{where}: {chosen.spec.build} cannot be called with ({kinds}): {error}; give it these parameters"
            ) from error
        raise
    check_component(chosen, component)
    return component
