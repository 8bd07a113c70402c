"""Certificate of a model: one verdict for each layout and feature."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from typing import Any, Literal

from d9d_core.config import PluginConfig

Standing = Literal["exact", "refused", "differs", "not applicable"]
#: Distributions, besides d9d's own, on whose versions a result depends.
_LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True)
class Cell:
    """Result for one layout or feature.

    Attributes:
        name: name of the layout or feature.
        standing: ``exact`` up to rounding; ``refused`` with an error before training; ``differs``; or ``not
            applicable``.
        detail: largest deviation, or the reason for another standing than ``exact``.
    """

    name: str
    standing: Standing
    detail: str


@dataclass(frozen=True)
class Certificate:
    """Results for one model, valid only for the stated config and versions.

    Attributes:
        model: name of the model plugin.
        model_type: ``model_type`` in Hugging Face files; ``None`` if the model has no Hugging Face format.
        config: SHA-256 of the config's canonical JSON.
        versions: name of an installed distribution -> its version.
        cells: one result for each layout or feature.
    """

    model: str
    model_type: str | None
    config: str
    versions: Mapping[str, str]
    cells: Sequence[Cell]

    @property
    def holds(self) -> bool:
        """Whether no layout or feature differs."""
        return all(cell.standing != "differs" for cell in self.cells)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self) | {"holds": self.holds}


def fingerprint(config: PluginConfig) -> str:
    """SHA-256 of a config's canonical JSON, without the field ``pretrained``, the location of weights."""
    values = {name: value for name, value in config.model_dump(mode="json").items() if name != "pretrained"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def installed_versions() -> dict[str, str]:
    """Installed versions of d9d's distributions, torch and transformers."""
    found = {distribution.name.lower(): distribution.version for distribution in distributions()}
    return {name: found[name] for name in sorted(found) if name.startswith("d9d-") or name in _LIBRARIES}
