"""Plugin policy: which of the installed plugins may be loaded."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from d9d_core.errors import PluginError

__all__ = ["PluginPolicy"]

#: Distributions of d9d itself, of which the installed ones are always loaded: what a job means, and the commands.
FOUNDATION = frozenset(
    {
        "d9d-core",
        "d9d-engine",
        "d9d-inference",
        "d9d-planner",
        "d9d-reports",
        "d9d-testing",
        "d9d-verify",
        "d9d-weights",
    }
)


def normalise(distribution: str) -> str:
    """A distribution's name as packaging tools compare it: lower case, single dashes."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True, slots=True)
class PluginPolicy:
    """Policy of which plugins are loaded, decided before anything is imported.

    Attributes:
        allow: only these distributions are loaded; ``None`` allows all.
        block: these are not.
        require: these must be there and load.
        autoload: whether installed plugins are loaded at all.
        files: single-file plugins, loaded besides.
        strict: any problem with any plugin is an error.
        named: (where, distribution) for each distribution that was allowed or blocked, so that typing errors are found.
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

        In the list a distribution is allowed (naming one excludes those not named), ``-distribution`` is blocked, and a
        path ending in ``.py`` is loaded as a single-file plugin.
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
        """Combine two policies: the stricter of each."""
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
        """Refuse names without effect.

        Raises:
            PluginError: a distribution that is allowed or blocked is not installed, or the foundation is blocked.
        """
        for where, name in sorted(self.named):
            if name in FOUNDATION & self.block:
                raise PluginError(f"{where}: {name} cannot be blocked; what it declares is always loaded")
        present = sorted({*installed, *FOUNDATION})
        for where, name in sorted(self.named):
            if name not in present:
                near = difflib.get_close_matches(name, present, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"installed: {', '.join(present)}"
                raise PluginError(f"{where}: no plugin '{name}' is installed; {hint}")

    def refusal(self, distribution: str) -> str | None:
        """Why a distribution is not loaded, or ``None`` if it is."""
        if distribution in FOUNDATION:
            return None
        if not self.autoload:
            return "installed plugins are switched off (plugins.autoload, --no-plugins or D9D_PLUGINS=none)"
        if distribution in self.block:
            return "it is blocked (plugins.block or D9D_PLUGINS)"
        if self.allow is not None and distribution not in self.allow:
            return "it is not in the list of allowed plugins (plugins.allow or D9D_PLUGINS)"
        return None
