"""Deprecations of public names: an old name works until the release in which it ends, and warns once per plugin.

Start here: a module serves its old names from a table, and marks its old functions and methods::

    from typing import TYPE_CHECKING

    from d9d_core.deprecation import Deprecated, DeprecatedNames, deprecated

    if not TYPE_CHECKING:  # so that type checkers report the old names
        __getattr__ = DeprecatedNames(
            __name__, {"Loss": Deprecated("d9d_core.task:Task", ends="0.4", last_api=2)}
        )

    class Grid:
        @deprecated(use="Grid.sizes", ends="0.4")
        def axes(self): ...

``d9d plugins check`` lists the uses of old names, and ``--strict-plugins`` makes them errors. docs/api-policy.md says
how long an old name works.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import entry_points
from types import FrameType
from typing import Any, ParamSpec, TypeVar

__all__ = ["Deprecated", "DeprecatedNameWarning", "DeprecatedNames", "deprecated"]

P = ParamSpec("P")
R = TypeVar("R")


class DeprecatedNameWarning(FutureWarning):
    """Use of a name that ends in a later release; Python shows it by default, because users can update the plugin.

    Args:
        user: distribution and version, or file, of the plugin.
        text: the use and the replacement; continues a sentence that begins with ``user``.
    """

    def __init__(self, user: str, text: str) -> None:
        super().__init__(f"{user} {text}")
        self.user = user
        self.text = text


@dataclass(frozen=True, slots=True)
class Deprecated:
    """Deprecation of one name in a module, which still serves it.

    Attributes:
        target: ``"package.module:attribute"``, the object that the old name still means; imported when it is used.
        ends: first release without the old name, such as ``0.4``.
        last_api: last plugin API with the old name.
        use: replacement, for messages; by default the target.

    Raises:
        ValueError: ``target`` or ``ends`` has another form.
    """

    target: str
    ends: str
    last_api: int
    use: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.]+:\w+", self.target):
            raise ValueError(f"target is {self.target!r}; write 'package.module:attribute'")
        _check_release(self.ends)
        if not self.use:
            object.__setattr__(self, "use", self.target.replace(":", "."))


class DeprecatedNames:
    """Function for a module's ``__getattr__``: serves the old names of the module, with a warning.

    Args:
        module: name of the module.
        names: old name -> its deprecation. ``__all__`` does not list the old names.
    """

    def __init__(self, module: str, names: Mapping[str, Deprecated]) -> None:
        self.module = module
        self.names = dict(names)

    def __call__(self, name: str) -> Any:
        """Object of an old name, with a warning that names the plugin.

        Raises:
            AttributeError: the module has no such name.
        """
        found = self.names.get(name)
        if found is None:
            raise AttributeError(f"module {self.module!r} has no attribute {name!r}")
        _warn(f"{self.module}.{name}", found.use, found.ends)
        module, _, attribute = found.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


def deprecated(*, use: str, ends: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of an old function or method, which warns when it is called.

    Args:
        use: replacement, for messages.
        ends: first release without the function, such as ``0.4``.

    Raises:
        ValueError: ``ends`` is not a release.
    """
    _check_release(ends)

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        name = f"{function.__module__}.{function.__qualname__}"

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            _warn(name, use, ends)
            return function(*args, **kwargs)

        return call

    return mark


def deprecation_text(name: str, use: str, ends: str) -> str:
    """Message about the use of an old name; continues a sentence that begins with the user of the name."""
    return f"uses {name}, which ends in release {ends} of d9d; use {use}"


def _check_release(ends: str) -> None:
    if not re.fullmatch(r"\d+\.\d+", ends):
        raise ValueError(f"ends is {ends!r}; write the first release without the name, such as '0.4'")


def _warn(name: str, use: str, ends: str) -> None:
    """Warn once per name and top-level package that uses the name."""
    frame = _caller()
    module = str(frame.f_globals.get("__name__", ""))
    package = module.partition(".")[0]
    home = sys.modules.get(package)
    # Use the registry in which Python's `warnings` records the warnings that a module has caused.
    registry = (frame.f_globals if home is None else vars(home)).setdefault("__warningregistry__", {})
    key = (DeprecatedNameWarning, name)
    if key in registry:
        return
    registry[key] = True
    user = frame.f_code.co_filename if package.startswith("d9d_file_") else _distribution(package)
    warning = DeprecatedNameWarning(user, deprecation_text(name, use, ends))
    warnings.warn_explicit(warning, DeprecatedNameWarning, frame.f_code.co_filename, frame.f_lineno, module)


def _caller() -> FrameType:
    """Innermost frame outside of this module and of the import system."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None:
        if frame.f_globals.get("__name__", "") not in (__name__, "importlib", "importlib._bootstrap"):
            break
        frame = frame.f_back
    assert frame is not None
    return frame


def _distribution(package: str) -> str:
    """Distribution and version of the plugin with this import package; the package if no plugin has it."""
    with suppress(Exception):  # damaged metadata of any distribution
        for point in entry_points(group="d9d"):
            if point.dist is not None and point.module.partition(".")[0] == package:
                return f"{point.dist.name} {point.dist.version}"
    return package
