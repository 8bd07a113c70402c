"""Finds installed distributions that declare plugins, without importing them; damaged distributions are reported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from d9d_core.registry.entries import Origin
from d9d_core.registry.hooks import PROJECT
from d9d_core.registry.policy import normalise

__all__ = ["scan"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Declaration module listed in a distribution's metadata.

    Attributes:
        origin: the distribution and the module.
        damage: exception raised by reading the metadata, so that the module is unknown; ``None`` if it could be read.
    """

    origin: Origin
    damage: Exception | None = None


def scan() -> list[Candidate]:
    """Find the declaration modules of all installed distributions, sorted by distribution and module."""
    found: dict[str, list[Candidate]] = {}
    for distribution in distributions():
        if declared := _declared(distribution):
            # Of several versions, Python imports the first one on the path.
            found.setdefault(declared[0].origin.distribution, declared)
    return [candidate for name in sorted(found) for candidate in found[name]]


def _declared(distribution: Distribution) -> list[Candidate]:
    try:
        if f"[{PROJECT}]" not in (distribution.read_text("entry_points.txt") or ""):
            return []
        name, version = _identity(distribution)
        modules = {point.module for point in distribution.entry_points if point.group == PROJECT}
        editable = _is_editable(distribution)
        return [Candidate(Origin(name, version, module, editable)) for module in sorted(modules)]
    except Exception as error:
        return [Candidate(_by_directory(distribution), error)]


def _identity(distribution: Distribution) -> tuple[str, str]:
    metadata = distribution.metadata  # parsed at each access; repeated accesses took a quarter of the discovery
    name, version = metadata["Name"], metadata["Version"]
    if not name or not version:
        raise ValueError("METADATA gives no name or no version")
    return normalise(name), version


def _is_editable(distribution: Distribution) -> bool:
    text = distribution.read_text("direct_url.json")
    return bool(text and json.loads(text).get("dir_info", {}).get("editable"))


def _by_directory(distribution: Distribution) -> Origin:
    # A private attribute, used only to name a distribution without a readable name.
    directory = Path(str(getattr(distribution, "_path", "unknown")))
    name, _, version = directory.stem.partition("-")
    return Origin(normalise(name), version, "")
