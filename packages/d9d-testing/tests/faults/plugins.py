"""Plugins whose configs contain other configs, with one fault each."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from d9d_testing.suites.plugin import PluginSuite

_NUMBERS = itertools.count()

DECLARATION = """
from d9d_core.plugin import DatasetSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_datasets():
    yield DatasetSpec(
        name="blend",
        summary="Parts of other datasets.",
        config=Ref("{module}_config:BlendConfig"),
        build=Ref("{module}_build:Blend"),
        gives={{}},
        composite={composite},
    )
"""
CONFIG = '''
from typing import Annotated, Literal

from d9d_core.config import PluginConfig, Section
from d9d_core.job_file.open_union import Named
from pydantic import Field, field_serializer


class Part(Section):
    """A part of the blend."""

    {part_options}
    weight: float = 0.5
    """Share of the samples."""
    data: Annotated[PluginConfig, Named("{kind}")] | None = None
    """Dataset of the part."""
    {part_body}


class Linear(Section):
    """Shares change at a constant rate."""

    kind: Literal["linear"] = "linear"
    """Selects the rule."""
    steps: int = 10
    """Steps of the change."""


class Cosine(Section):
    """Shares change along a cosine."""

    kind: Literal["cosine"] = "cosine"
    """Selects the rule."""
    steps: int = 10
    {cosine_docstring}


class Short(Section):
    """A pause of some steps."""

    steps: int = 1
    """Length of the pause."""


class Long(Section):
    """A pause of some thousand steps."""

    steps: int = 1
    """Length of the pause, in thousands."""


class BlendConfig(PluginConfig):
    """Parts of other datasets."""

    name: Literal["blend"] = "blend"
    """Selects the dataset."""
    parts: list[Part] = [Part()]
    """Parts of the blend."""
    named: dict[str, Part] = {{}}
    """Further parts by name."""
    rule: Annotated[Linear | Cosine, Field(discriminator="kind")] = Linear()
    """Change of the shares."""
    {body}
'''
BUILD = """
{imports}


class Blend:
    def __init__(self, config, context, build_inner): ...
"""


class Sound(PluginSuite):
    composite = True
    kind = "dataset"
    part_options = ""
    part_body = ""
    cosine_docstring = '"""Steps of the change."""'
    body = ""
    imports = "from d9d_core.data import DataContext"

    @pytest.fixture(autouse=True)
    def _written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plugin = f"acme_blend_{next(_NUMBERS)}"
        parts = {name: getattr(self, name) for name in vars(Sound) if not name.startswith("_")}
        for suffix, text in (("", DECLARATION), ("_config", CONFIG), ("_build", BUILD)):
            (tmp_path / f"{self.plugin}{suffix}.py").write_text(text.format(module=self.plugin, **parts))
        monkeypatch.syspath_prepend(str(tmp_path))


def _fault(text: str, **parts: Any) -> tuple[dict[str, Any], str]:
    return parts, text


LOSSY = """
    @field_serializer("weight")
    def _rounded(self, value):
        return round(value)
"""
FAULTS = {
    "a variant of a union is not documented": _fault("", cosine_docstring=""),
    "items of a list take unknown fields": _fault("", part_options='model_config = {"extra": "ignore"}'),
    "items of a list can be changed": _fault("", part_options='model_config = {"frozen": False}'),
    "items of a list lose digits": _fault("", part_body=LOSSY),
    "a union reads back as another variant": _fault("", body='pause: Short | Long = Long()\n    """A pause."""'),
    "inner components of an unknown kind": _fault("", kind="datasets"),
    "inner components, but not composite": _fault("", composite=False),
    "imports a private module": _fault("", imports="from d9d_engine.subscribers.early_stopping import EarlyStopping"),
    "imports a private name": _fault("", imports="from d9d_core.tracker import LONGEST_NAME"),
}
