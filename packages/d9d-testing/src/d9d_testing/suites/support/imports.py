"""Imports between packages of d9d and plugins, compared with the declared modules.

The list of declared modules comes with this package, in ``declared.json``; ``tools/public_surface.py`` writes it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Declared:
    """Modules and names that other packages may import.

    Attributes:
        packages: import names of all packages of d9d.
        foundation: packages that may import each other's modules.
        outer: packages of tools around the loop, which may import all modules of the foundation.
        for_suites: declared modules that only conformance suites may import.
        names: declared module -> its names.
    """

    packages: frozenset[str]
    foundation: frozenset[str]
    outer: frozenset[str]
    for_suites: frozenset[str]
    names: Mapping[str, frozenset[str]]

    def exempt(self, own: str) -> frozenset[str]:
        """Packages of which the package ``own`` may import everything."""
        return frozenset({own}) | (self.foundation if own in self.foundation | self.outer else frozenset())


@cache
def declared() -> Declared:
    """List of declared modules, read from the ``declared.json`` of this package."""
    found = json.loads(Path(__file__).with_name("declared.json").read_text("utf-8"))
    names = {module: frozenset(names) for module, names in found.pop("names").items()}
    return Declared(names=names, **{field: frozenset(values) for field, values in found.items()})


def imported_modules(source: str) -> Iterator[tuple[str, str]]:
    """Module and name of each import in a source; the name is empty for ``import module``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def references(source: str) -> Iterator[tuple[str, str]]:
    """Module and name of each text of the form ``"module:name"`` in a source, with which declarations refer to code."""
    yield from re.findall(r'"(d9d_\w+(?:\.\w+)*):(\w+)"', source)


def undeclared(uses: Iterable[tuple[str, str]], exempt: Collection[str] = (), *, suites: bool = False) -> list[str]:
    """Uses of names that are in no declared module of d9d's packages.

    Args:
        uses: modules and names, as from :func:`imported_modules`.
        exempt: packages whose modules may all be imported.
        suites: whether modules that are declared for conformance suites may be imported.
    """
    known = declared()
    allowed = {module: names for module, names in known.names.items() if suites or module not in known.for_suites}
    packages = known.packages - set(exempt)
    return [
        f"{name or 'all'} of {module}"
        for module, name in uses
        if module.partition(".")[0] in packages
        and (module not in allowed if name in ("", "*") else name not in allowed.get(module, ()))
        and f"{module}.{name}" not in allowed
    ]
