"""Manifest of the plugins that a process loaded; compared between ranks, and saved with runs and checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from d9d_core.registry.entries import Origin
from d9d_core.registry.registry import Registry

__all__ = ["Manifest"]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Loaded plugins: name -> ``{version, editable, sha256}``. Contains no paths, which differ between nodes.

    Single-file plugins with equal names but different content are named ``mine.py@<start of the sha256>``.
    """

    plugins: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, registry: Registry) -> Manifest:
        """Manifest of a registry."""
        # Sort by name and content, not by path: the paths of files differ between nodes.
        origins = sorted(registry.plugins, key=lambda origin: (_name(origin), origin.digest, origin.module))
        several = Counter(_name(origin) for origin in {o.digest: o for o in origins if o.digest}.values())
        plugins = {}
        for origin in origins:
            name = _name(origin)
            if several[name] > 1:
                name += f"@{origin.digest[:8]}"
            plugins[name] = {"version": origin.version, "editable": origin.editable, "sha256": origin.digest}
        return cls(plugins)

    @property
    def digest(self) -> str:
        """Sha256 of the manifest's canonical JSON form."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Manifest as a JSON object."""
        return {name: dict(facts) for name, facts in self.plugins.items()}

    def differences(self, other: Manifest, mine: str, theirs: str) -> list[str]:
        """Differences between two manifests, one line per plugin.

        ``mine`` and ``theirs`` are names of the two sides in the lines, such as ``rank 0``.
        """

        def say(facts: Mapping[str, Any] | None) -> str:
            if facts is None:
                return "not loaded"
            return facts["version"] or f"sha256 {facts['sha256'][:12]}"

        names = sorted({*self.plugins, *other.plugins})
        return [
            f"{name}: {mine} {say(self.plugins.get(name))}, {theirs} {say(other.plugins.get(name))}"
            for name in names
            if self.plugins.get(name) != other.plugins.get(name)
        ]


def _name(origin: Origin) -> str:
    return PurePath(origin.distribution).name if origin.digest else origin.distribution
