"""Public API of d9d's packages: declared modules and their names, compared with the imports of a source.

The list of declared modules is ``api.json``; ``tools/public_surface.py`` writes it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from d9d_core.deprecation import Deprecated

__all__ = ["Api", "Use", "imported_modules", "references"]


class Use(NamedTuple):
    """Import of a module or a name in a source, or a reference ``"module:name"``.

    Attributes:
        module: imported module.
        name: imported name; empty for ``import module``.
        line: line of the source, from 1.
    """

    module: str
    name: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.name or 'all'} of {self.module}"


@dataclass(frozen=True, slots=True)
class Api:
    """Modules and names that plugins may import.

    Attributes:
        packages: import names of all packages of d9d.
        foundation: d9d's own packages that plugins build on; they may import all modules of each other.
        outer: packages of tools around the training loop; they may import all modules of ``foundation``.
        for_suites: declared modules that only conformance suites may import; they may change within a plugin API.
        names: declared module -> name -> first release with the name.
        deprecated: declared module -> old name -> its deprecation.
    """

    packages: frozenset[str]
    foundation: frozenset[str]
    outer: frozenset[str]
    for_suites: frozenset[str]
    names: Mapping[str, Mapping[str, str]]
    deprecated: Mapping[str, Mapping[str, Deprecated]]

    @classmethod
    def shipped(cls) -> Api:
        """API of the installed d9d-core, from its ``api.json``."""
        return cls.from_json(json.loads(files("d9d_core.registry").joinpath("api.json").read_text("utf-8")))

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Api:
        """API in the form of ``api.json``, whose names are grouped by release."""
        names = {
            module: {name: release for release, added in releases.items() for name in added}
            for module, releases in found["names"].items()
        }
        deprecated = {
            module: {name: Deprecated(**facts) for name, facts in old.items()}
            for module, old in found["deprecated"].items()
        }
        sets = {field: frozenset(found[field]) for field in ("packages", "foundation", "outer", "for_suites")}
        return cls(names=names, deprecated=deprecated, **sets)

    def exempt(self, own: str) -> frozenset[str]:
        """Packages of which the package ``own`` may import everything."""
        return frozenset({own}) | (self.foundation if own in self.foundation | self.outer else frozenset())

    def undeclared(self, uses: Iterable[Use], exempt: Collection[str] = (), *, suites: bool = False) -> list[Use]:
        """Uses of names that are in no declared module of d9d's packages.

        Args:
            uses: uses in a source, as from :func:`imported_modules`.
            exempt: packages whose modules may all be imported.
            suites: whether modules that are declared for conformance suites may be imported.
        """
        packages = self.packages - set(exempt)
        hidden = frozenset() if suites else self.for_suites
        return [use for use in uses if use.module.partition(".")[0] in packages and not self._declares(use, hidden)]

    def _declares(self, use: Use, hidden: Collection[str]) -> bool:
        inner = f"{use.module}.{use.name}"
        if inner in self.names and inner not in hidden:
            return True
        if use.module not in self.names or use.module in hidden:
            return False
        return use.name in ("", "*", *self.names[use.module], *self.deprecated.get(use.module, ()))


def imported_modules(source: str) -> Iterator[Use]:
    """Imports of a source, with their lines.

    Raises:
        SyntaxError: the source is not Python.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Use(alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (Use(node.module, alias.name, node.lineno) for alias in node.names)


def references(source: str) -> Iterator[Use]:
    """Texts of the form ``"d9d_package.module:name"`` in a source, with which declarations refer to code."""
    for number, line in enumerate(source.splitlines(), 1):
        for module, name in re.findall(r'"(d9d_\w+(?:\.\w+)*):(\w+)"', line):
            yield Use(module, name, number)
