"""Records of loaded plugins with their origins, and problems of plugins that could not be loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from d9d_core.errors import PluginError
from d9d_core.plugin import CapabilitySpec, Spec
from d9d_core.registry.hooks import Kind
from d9d_core.registry.policy import normalise

__all__ = ["Entry", "Origin", "plugin_error"]

Record = Spec | CapabilitySpec
#: Largest number of characters of a plugin's value in a message.
_SHOWN = 500


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a registry entry: distribution or file of the plugin, and version.

    Attributes:
        distribution: normalised name of the distribution, or the path of a single-file plugin.
        version: version of the distribution; empty for a file.
        module: imported declaration module.
        editable: whether the distribution is installed in editable mode, so that its version does not pin the code.
        digest: sha256 of a single-file plugin, else empty.
        seconds: time that importing the declarations took.
        api: plugin API that the module states; 0 if it is a single file that states none.
    """

    distribution: str
    version: str
    module: str
    editable: bool = False
    digest: str = ""
    seconds: float = field(default=0.0, compare=False)
    api: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    def is_called(self, name: str) -> bool:
        """Whether a name given by the user means this plugin; ``D9D_Moe`` means ``d9d-moe``."""
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
        origin: origin of the plugin.
        text: the problem, without the plugin's name.
        error: exception that caused the problem, if any.
        loaded: whether the plugin's records are in the registry nevertheless.
    """

    origin: Origin
    text: str
    error: BaseException | None = None
    loaded: bool = False

    def __str__(self) -> str:
        return f"{self.origin} {self.text}"


def shown(value: object) -> str:
    """Text of a plugin's value for messages: short and printable, even if the value's ``repr`` raises."""
    try:
        text = repr(value)
    except BaseException as error:
        text = f"<{type(value).__name__} whose repr() raises {type(error).__name__}>"
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"
    return text.encode("utf-8", "backslashreplace").decode()


def plugin_error(text: str, origin: BaseException | None) -> PluginError:
    """PluginError about an exception in the plugin's own code, whose traceback is printed."""
    error = PluginError(text)
    error.origin = origin
    return error
