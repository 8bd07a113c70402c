"""Job file section ``plugins``: the plugins that may be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import model_validator

from d9d_core.config import Section
from d9d_core.registry.policy import PluginPolicy, normalise

__all__ = ["Plugins"]


class Plugins(Section):
    """Plugins that may be loaded. Loaded plugins provide the names of components that the job file can use."""

    allow: list[str] | None = None
    """Load only these distributions."""
    block: list[str] = []
    """Do not load these distributions."""
    require: list[str] = []
    """Refuse to start unless these distributions load."""
    autoload: bool = True
    """Load installed plugins; false loads only ``files``."""
    files: list[Path] = []
    """Single-file plugins, relative to the job file; ``plugins`` may be this list directly."""

    @model_validator(mode="before")
    @classmethod
    def _list_of_files(cls, value: Any) -> Any:
        return {"files": value} if isinstance(value, list) else value

    def policy(self) -> PluginPolicy:
        """Plugin policy of this section."""
        return PluginPolicy(
            allow=None if self.allow is None else frozenset(map(normalise, self.allow)),
            block=frozenset(map(normalise, self.block)),
            require=frozenset(map(normalise, self.require)),
            autoload=self.autoload,
            files=tuple(self.files),
        )
