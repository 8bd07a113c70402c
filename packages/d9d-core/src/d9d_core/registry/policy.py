"""Plugin policy: restricts which installed plugins are loaded."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from d9d_core.errors import PluginError

__all__ = ["PluginPolicy"]

#: d9d's own distributions, always loaded if installed: they define the meaning of jobs, and the commands.
FOUNDATION = frozenset(
    {
        "d9d-core",
        "d9d-engine",
        "d9d-inference",
        "d9d-launch",
        "d9d-planner",
        "d9d-reports",
        "d9d-testing",
        "d9d-verify",
        "d9d-weights",
    }
)


def normalise(distribution: str) -> str:
    """Normalised name of a distribution, as packaging tools compare names: lower case, single dashes."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True, slots=True)
class PluginPolicy:
    """Policy on which plugins are loaded, applied before any import.

    Attributes:
        allow: the only distributions to load; ``None`` allows all.
        block: distributions not to load.
        require: distributions that must be installed and must load.
        autoload: whether installed plugins are loaded.
        files: additional single-file plugins.
        strict: whether any problem with any plugin is an error.
        named: (source, distribution) of each allowed or blocked distribution, for errors about misspelt names.
    """

    allow: frozenset[str] | None = None
    block: frozenset[str] = frozenset()
    require: frozenset[str] = frozenset()
    autoload: bool = True
    files: tuple[Path, ...] = ()
    strict: bool = False
    named: frozenset[tuple[str, str]] = field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.named:
            allowed = {("plugins.allow", name) for name in self.allow or ()}
            object.__setattr__(self, "named", frozenset(allowed | {("plugins.block", name) for name in self.block}))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> PluginPolicy:
        """Read ``D9D_PLUGINS``: ``none``, or a comma-separated list.

        An entry ``distribution`` allows it and excludes distributions not listed; ``-distribution`` blocks it; a path
        ending in ``.py`` is loaded as a single-file plugin.
        """
        words = [word.strip() for word in environ.get("D9D_PLUGINS", "").split(",") if word.strip()]
        if words == ["none"]:
            return cls(autoload=False)
        files = tuple(Path(word) for word in words if word.endswith(".py"))
        block = frozenset(normalise(word[1:]) for word in words if word.startswith("-"))
        allow = frozenset(normalise(w) for w in words if not w.startswith("-") and not w.endswith(".py"))
        named = frozenset(("D9D_PLUGINS", name) for name in allow | block)
        return cls(allow=allow or None, block=block, files=files, named=named)

    def __or__(self, other: PluginPolicy) -> PluginPolicy:
        """Combine two policies: the result has the restrictions and the plugin files of both policies."""
        allows = [policy.allow for policy in (self, other) if policy.allow is not None]
        return PluginPolicy(
            allow=frozenset.intersection(*allows) if allows else None,
            block=self.block | other.block,
            require=self.require | other.require,
            autoload=self.autoload and other.autoload,
            files=tuple(dict.fromkeys(self.files + other.files)),
            strict=self.strict or other.strict,
            named=self.named | other.named,
        )

    def check(self, installed: Iterable[str]) -> None:
        """Check the distributions that the policy names.

        Raises:
            PluginError: an allowed or blocked distribution is not installed, or one of d9d's own packages is blocked.
        """
        for where, name in sorted(self.named):
            if name in FOUNDATION & self.block:
                raise PluginError(f"{where}: {name} cannot be blocked; d9d's own packages are always loaded")
        present = sorted({*installed, *FOUNDATION})
        for where, name in sorted(self.named):
            if name not in present:
                near = difflib.get_close_matches(name, present, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"installed: {', '.join(present)}"
                raise PluginError(f"{where}: no plugin '{name}' is installed; {hint}")

    def refusal(self, distribution: str) -> str | None:
        """Reason why a distribution is not loaded; ``None`` if it is loaded."""
        if distribution in FOUNDATION:
            return None
        if not self.autoload:
            return "installed plugins are disabled (plugins.autoload, --no-plugins or D9D_PLUGINS=none)"
        if distribution in self.block:
            return "it is blocked (plugins.block or D9D_PLUGINS)"
        if self.allow is not None and distribution not in self.allow:
            return "it is not in the list of allowed plugins (plugins.allow or D9D_PLUGINS)"
        return None
