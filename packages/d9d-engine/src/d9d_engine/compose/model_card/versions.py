"""Versions of the packages that train a model."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from d9d_core.registry.manifest import Manifest

#: Packages that train and that no manifest of plugins needs to name.
_FOUNDATION = ("d9d-core", "d9d-engine", "d9d-weights")


def versions_now(manifest: Manifest) -> dict[str, str]:
    """Versions of torch, of d9d and of the loaded plugins, by package; a plugin that is a file has its digest."""
    own = {name: version(name) for name in _FOUNDATION}
    return {**own, "torch": torch.__version__, **versions_of(manifest.plugins)}


def versions_of(plugins: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Versions of the plugins in a manifest, by package; those that have neither version nor digest are left out."""
    found = {name: facts["version"] or facts["sha256"][:12] for name, facts in plugins.items()}
    return {name: text for name, text in found.items() if text}
