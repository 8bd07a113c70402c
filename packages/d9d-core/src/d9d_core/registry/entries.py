"""Records of loaded plugins with where they come from, and problems of plugins that could not be loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from d9d_core.errors import PluginError
from d9d_core.plugin import CapabilitySpec, Spec
from d9d_core.registry.hooks import Kind
from d9d_core.registry.policy import normalise

__all__ = ["Entry", "Origin", "plugin_error"]

Record = Spec | CapabilitySpec
#: Characters of a plugin's value that messages show.
_SHOWN = 500


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a registry entry: distribution or file of the plugin, and version.

    Attributes:
        distribution: normalised name of the distribution, or the path of a single-file plugin.
        version: its version; empty for a file.
        module: the imported declaration module.
        editable: installed in editable mode, so the version does not pin the content.
        digest: sha256 of a single-file plugin, else empty.
        seconds: how long the declaration took to import.
    """

    distribution: str
    version: str
    module: str
    editable: bool = False
    digest: str = ""
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    def is_called(self, name: str) -> bool:
        """Whether a user who writes this name means this plugin; ``D9D_Moe`` is ``d9d-moe``."""
        return self.distribution in (name, normalise(name))


@dataclass(frozen=True, slots=True)
class Entry:
    """Record, and the plugin that declared it."""

    kind: Kind
    spec: Record
    origin: Origin

    def __str__(self) -> str:
        return f"'{self.spec.key}' ({self.origin})"


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem of a plugin that could not be loaded, or that breaks a rule.

    Attributes:
        origin: the plugin.
        text: what is wrong, without the plugin's name.
        error: the exception behind it, if there is one.
        loaded: whether its records are in the registry nevertheless.
    """

    origin: Origin
    text: str
    error: BaseException | None = None
    loaded: bool = False

    def __str__(self) -> str:
        return f"{self.origin} {self.text}"


def shown(value: object) -> str:
    """Text of a value of a plugin for messages: short, printable, and there whatever its ``repr`` does."""
    try:
        text = repr(value)
    except BaseException as error:
        text = f"<{type(value).__name__} whose repr() raises {type(error).__name__}>"
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"
    return text.encode("utf-8", "backslashreplace").decode()


def plugin_error(text: str, origin: BaseException | None) -> PluginError:
    """A PluginError about a failure in the plugin's own code, whose traceback is shown."""
    error = PluginError(text)
    error.origin = origin
    return error
