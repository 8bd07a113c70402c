from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from d9d_core.data import packs_documents
from d9d_data import plugin
from d9d_data.config import ChatConfig, DocumentsConfig, LabelledConfig, PairsConfig, PreferenceConfig, TextConfig
from d9d_data.dataset.config import DatasetConfig
from d9d_data.mixture.config import MixtureConfig, MixturePart

TEXT: dict[str, Any] = {"sources": ["a.txt"], "sequence_length": 8}
ITEMS = DatasetConfig(build="mine:items")


def test_every_reference_loads_and_names_agree() -> None:
    for record in plugin.d9d_datasets():
        assert record.config.load().model_fields["name"].default == record.name
        assert callable(record.build.load())


def test_declaration_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, d9d_data.plugin as p; list(p.d9d_datasets());"
        "sys.exit(bool({'torch', 'pydantic', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("config", "packs"),
    [
        (TextConfig(**TEXT), True),
        (TextConfig(**TEXT, packing="best_fit"), True),
        (ChatConfig(**TEXT), False),
        (ChatConfig(**TEXT, packing="concat"), True),
        (ChatConfig(**TEXT, packing="best_fit"), True),
        (DocumentsConfig(**TEXT), False),
        (PreferenceConfig(**TEXT), False),
        (LabelledConfig(**TEXT), False),
        (PairsConfig(**TEXT), False),
        (ITEMS, None),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_datasets_say_whether_they_pack_documents(config: Any, packs: bool | None) -> None:
    assert packs_documents(config) is packs


def test_a_mixture_packs_documents_if_a_part_does() -> None:
    whole, packed = DocumentsConfig(**TEXT), TextConfig(**TEXT)

    def of(*parts: Any) -> bool | None:
        return packs_documents(MixtureConfig(parts=tuple(MixturePart(data=part) for part in parts)))

    assert of(whole, whole) is False
    assert of(whole, packed, ITEMS) is True
    assert of(whole, ITEMS) is None


def test_columns_of_microbatches_have_the_declared_dimensions() -> None:
    rows, samples = {"tokens": 2, "targets": 2}, {"samples": 1}
    found = {one.name: one.gives for one in plugin.d9d_datasets() if one.gives}
    assert found == {
        "text": {**rows, "positions": 2, "documents": 2}, "documents": rows, "chat": rows, "tokens": rows,
        "preference": {**rows, **samples}, "labelled": {"tokens": 2, "labels": 1}, "pairs": {"tokens": 2, **samples},
        "mixture": "inner",
    }  # fmt: skip
    assert [one.name for one in plugin.d9d_datasets() if one.composite] == ["mixture"]
