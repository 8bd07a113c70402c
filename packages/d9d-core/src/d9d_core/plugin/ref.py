"""References to attributes of modules, resolved only when they are needed."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

#: What code of a plugin may raise. SystemExit is among it: a plugin must not end d9d as if all had gone well.
FOREIGN_FAILURES = (Exception, SystemExit)

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference ``"package.module:attribute"``: lets a declaration name heavy code without importing it.

    Raises:
        ValueError: the text does not have that form.
    """

    target: str

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.target):
            raise ValueError(f"{self.target!r} is not of the form 'package.module:attribute'")

    def load(self) -> Any:
        """Import the module and return the attribute.

        Raises:
            ImportError: the module cannot be imported.
            AttributeError: it has no such attribute.
        """
        module, _, path = self.target.partition(":")
        value: Any = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
        return value

    def __str__(self) -> str:
        return self.target
