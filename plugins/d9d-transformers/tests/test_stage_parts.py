"""Layers and modules of other stages are replaced by stand-ins; each stage has its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.model import Stage
from d9d_transformers.head import Head
from d9d_transformers.stages import Absent, AbsentLayer, keep_stage, layers_of
from d9d_transformers.structure import Structure
from torch import nn


class Layer(nn.Module):
    """Layer with attributes that a model reads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_type, self.layer_idx, self.scale, self.list = "full", 3, 0.5, [1]
        self._outputs = 7
        self.linear = nn.Linear(2, 2)


@pytest.mark.parametrize(("outputs", "tail"), [(None, None), (1, ()), (2, (None,)), (3, (None, None))])
def test_an_absent_layer_returns_its_input_in_the_form_of_the_layer(
    outputs: int | None, tail: tuple[None, ...] | None
) -> None:
    layer = AbsentLayer(Layer().eval(), outputs)
    own, handed = torch.ones(1, 2, 3), torch.zeros(1, 2, 3)
    for given, expected in ((None, own), (handed, handed), (None, own)):
        if given is not None:
            layer.hand(given)
        found: Any = layer(own, "mask", cache=1)
        first, rest = (found, None) if tail is None else (found[0], found[1:])
        assert first is expected
        assert rest == tail
        assert layer.take() is expected
        with pytest.raises(AssertionError):
            layer.take()


def test_an_absent_layer_has_the_texts_and_numbers_of_the_layer() -> None:
    layer = AbsentLayer(Layer().eval(), None)
    assert (layer.attention_type, layer.layer_idx, layer.scale) == ("full", 3, 0.5)
    assert not hasattr(layer, "list")
    assert layer.training
    assert list(layer.parameters()) == []
    assert torch.is_tensor(layer(torch.ones(1)))


def test_an_absent_module_returns_its_first_argument() -> None:
    given = object()
    assert Absent()(given, 2, x=3) is given


def head(features: int, vocabulary: int) -> Head:
    return Head("lm_head", "embed", features, vocabulary, 0.02, tied=False, scale=1.0, softcap=None)


@pytest.mark.parametrize(
    ("features", "vocabulary", "numbers", "counts"),
    [
        (1, 1, 12_000, [4, 4, 4]),
        (10, 20, 1200, [4, 5, 3]),  # a head like two layers, an embedding like an eighth of a layer
        (10, 40, 1200, [5, 6, 1]),
        (32, 100, 1200, [5, 6, 1]),  # an embedding like two layers
        (33, 100, 1200, [4, 7, 1]),
        (48, 100, 1200, [4, 7, 1]),
    ],
)
def test_stages_cost_about_the_same(features: int, vocabulary: int, numbers: int, counts: list[int]) -> None:
    found = [layers_of(12, numbers, head(features, vocabulary), Stage(index, 3)) for index in range(3)]
    assert [len(layers) for layers in found] == counts
    assert [index for layers in found for index in layers] == list(range(12))


@pytest.mark.parametrize(
    ("stage", "embedding", "absent"),
    [
        (Stage(0, 3), False, ["norm", "top"]),
        (Stage(1, 3), False, ["embed", "start", "norm", "top"]),
        (Stage(2, 3), False, ["embed", "start"]),
        (Stage(2, 3), True, ["start"]),
        (Stage(0, 1), False, []),
        (Stage(0, 1), True, []),
    ],
)
def test_a_stage_keeps_its_own_layers_and_modules(stage: Stage, embedding: bool, absent: list[str]) -> None:
    parts = {name: nn.Linear(2, 2) for name in ("embed", "start", "norm", "top")}
    listed = nn.ModuleList(Layer() for _ in range(6))
    layers = list(listed)
    base = nn.ModuleDict({**parts, "layers": listed})
    structure = Structure("layers", 6, ("embed", "start"), ("norm", "top"), 2, {}, ())
    own = range(2 * stage.index, 2 * stage.index + 2) if stage.count == 3 else range(6)
    entry, end = keep_stage(base, structure, own, first=stage.is_first, last=stage.is_last, embedding=embedding)
    assert [name for name in parts if isinstance(base[name], Absent)] == absent
    assert all(base[name] is part for name, part in parts.items() if name not in absent)
    assert [index for index in range(6) if listed[index] is layers[index]] == list(own)
    assert entry is (None if stage.is_first else listed[own.start - 1])
    assert end is (None if stage.is_last else listed[own.stop])
    for module in (listed[index] for index in range(6) if index not in own):
        assert module(torch.ones(1)) == (torch.ones(1), None)
