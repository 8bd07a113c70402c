"""Job file section ``kernels``: backends of ops, for all modules or for some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag

from d9d_core.config import Section

__all__ = ["KernelRule", "backend_names"]


class KernelRule(Section):
    """Backend of an op in some modules of the model; for all modules that no rule matches, d9d chooses a backend."""

    backend: str
    """Name of the backend."""
    match: Annotated[list[str], Field(min_length=1)]
    """Patterns of the names of modules, with all that they contain, such as ``layers.0`` or ``layers.1?.attention``."""


def _listed(value: object) -> object:
    if isinstance(value, Mapping):
        raise ValueError("rules are a list; write [{backend: ..., match: [...]}]")  # noqa: TRY004 - for pydantic
    return value


#: Backend of an op in all modules, or rules for modules.
KernelRequest: TypeAlias = Annotated[
    Annotated[str, Tag("name")] | Annotated[list[KernelRule], Field(min_length=1), Tag("rules")],
    # Without tags, an error would state that the value fits neither of the two types.
    Discriminator(lambda value: "name" if isinstance(value, str) else "rules"),
    BeforeValidator(_listed),
]


def backend_names(kernels: Mapping[str, str | Sequence[KernelRule]]) -> list[tuple[str, str]]:
    """Pairs of an op and a name of a backend that a section ``kernels`` names, in order."""
    return [
        (op, name)
        for op, request in kernels.items()
        for name in ([request] if isinstance(request, str) else [rule.backend for rule in request])
    ]
