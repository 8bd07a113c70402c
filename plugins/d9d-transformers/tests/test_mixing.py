"""Modules that mix tokens are found in stand-in models, and models whose tokens reach earlier positions are refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_transformers import mixing
from d9d_transformers.config import TransformersConfig
from d9d_transformers.library import library
from d9d_transformers.mixing import own_value, parts_of
from d9d_transformers.structure import Parts
from torch import Tensor, nn


class Own(nn.Module):
    """Module that computes each position alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.steps = nn.Parameter(torch.arange(4.0))
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class Shift(nn.Module):
    """Module that adds to each position another position, so many before it."""

    by = 1

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return hidden + hidden.roll(self.by, dims=1), None


class ShiftMore(Shift):
    by = 6  # from position 5 to position 11, the last one


class ShiftBack(Shift):
    by = -1


class Layer(nn.Module):
    """Layer of these modules; one of the calls may be by keywords."""

    def __init__(self, *parts: nn.Module, inside: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        for index, part in enumerate(parts):
            self.add_module(f"part{index}", part)
        self.inside = inside

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        for part in self.children():
            out = part(hidden_states)
            hidden_states = out[0] if isinstance(out, tuple) else out
        return hidden_states if self.inside is None else self.inside(hidden_states)


class Another(Layer):
    """Layer of another class."""


class Base(nn.Module):
    """Model without its head."""

    def __init__(self, layers: list[nn.Module], *others: Any, **keywords: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(layers)
        self.dropout = nn.Dropout(0.5)
        self.config = SimpleNamespace(num_hidden_layers=len(layers))
        self._no_split_modules = ["Layer", "Another"]
        self.others, self.keywords = others, keywords
        self.calls: list[tuple[list[int], list[int], bool, torch.dtype]] = []

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        self.calls.append((input_ids.tolist(), position_ids.tolist(), use_cache, self.embed.weight.dtype))
        hidden = self.dropout(self.embed(input_ids))
        for layer in self.layers:
            if self.keywords.get("named"):
                hidden = layer(hidden_states=hidden)
            else:
                hidden = layer(hidden, *self.others, **self.keywords)
        return (hidden,)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    mixing._parts_of.cache_clear()
    configs: list[Any] = []

    def of(base: nn.Module, **fields: Any) -> Parts:
        native = nn.ModuleDict({"model": base})
        native.base_model_prefix = "model"  # type: ignore[assignment]

        def small(config: Any, attention: str) -> nn.Module:
            assert attention == "d9d_own_value"
            configs.append(config)
            return native

        monkeypatch.setattr(mixing, "native_model", small)
        mixing._parts_of.cache_clear()
        try:
            return parts_of(TransformersConfig(config={"model_type": "llama", **fields}))
        finally:
            mixing._parts_of.cache_clear()

    of.configs = configs  # type: ignore[attr-defined]
    return of


def test_modules_that_mix_tokens_are_told_from_others(found: Any) -> None:
    base = Base([Layer(Own(), Shift(), Own()), Another(Own(), ShiftMore(), Shift()), Layer(Own())])
    state = torch.get_rng_state()
    parts = found(base)
    assert torch.equal(torch.get_rng_state(), state)
    # The second module that mixes tokens is not reached in a layer, so Shift is known from the first layer.
    assert parts.mixers == {"Shift", "ShiftMore"}
    assert parts.others == {"Layer", "Another", "Own"}
    assert parts.constants == {("Own", "scale"): 2.0, ("Own", "offset"): 0.0}
    assert library().AttentionInterface()["d9d_own_value"] is own_value
    assert parts.routers == {}
    ids = list(range(12))
    assert base.calls[:2] == [([[one + 3 for one in ids]], [ids], False, torch.float32)] * 2
    assert not base.training
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in base.modules())


def test_a_layer_that_mixes_tokens_itself_is_a_mixer(found: Any) -> None:
    parts = found(Base([Layer(Own(), inside=lambda hidden: hidden.cumsum(1)), Another(Own())]))
    assert (parts.mixers, parts.others) == ({"Layer"}, {"Own", "Another"})


@pytest.mark.parametrize("feature", [0, 3])
def test_a_module_that_mixes_one_feature_is_a_mixer(found: Any, feature: int) -> None:
    class ShiftOne(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + hidden.roll(1, dims=1) * (torch.arange(4) == feature)

    assert found(Base([Layer(Own(), ShiftOne())])).mixers == {"ShiftOne"}


def test_values_that_differ_between_modules_of_a_class_are_no_constants(found: Any) -> None:
    base = Base([Layer(Own()), Layer(Own())])
    with torch.no_grad():
        base.layers[1].part0.scale.fill_(3.0)  # type: ignore[union-attr, operator]
    assert found(base).constants == {("Own", "offset"): 0.0}


def test_without_mixers_all_classes_are_others(found: Any) -> None:
    for base in (Base([Layer(Own())]), Base([Layer(Own())], named=True).double()):
        assert found(base).mixers == set()
    assert found(Base([Layer(Own())])).others == {"Layer", "Own"}


def test_tokens_that_change_earlier_positions_are_refused(found: Any) -> None:
    with pytest.raises(
        BuildError, match=r"^model\.config: layers\.1\.part1 of Base lets tokens change results at earlier"
    ):
        found(Base([Layer(Own()), Layer(Own(), ShiftBack())]))


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (torch.zeros(1, 12, 4), True),
        (torch.zeros(1, 12, 4, dtype=torch.int64), False),
        (torch.zeros(1, 12, 8), False),
        (3, False),
    ],
)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_layers_that_read_other_hidden_states_are_refused(
    found: Any, given: Any, refused: bool, by_keyword: bool
) -> None:
    base = Base([Layer(Own())], embeddings=given) if by_keyword else Base([Layer(Own())], given)
    if refused:
        with pytest.raises(BuildError, match=r"^model\.config: Layer reads other tensors besides the previous layer's"):
            found(base)
    else:
        assert found(base).mixers == set()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in base.modules())


def test_a_forward_that_fails_is_named(found: Any) -> None:
    def fail(_: Tensor) -> Tensor:
        raise KeyError("mask")

    with pytest.raises(
        BuildError, match=r"^model\.config: a small Base, made to find modules that mix tokens, fails: 'mask'$"
    ):
        found(Base([Layer(Own(), inside=fail)]))


@pytest.mark.parametrize(("layers", "kept"), [(3, 3), (4, 4), (6, 4)])
def test_the_small_model_has_small_sizes_and_up_to_four_layers(found: Any, layers: int, kept: int) -> None:
    found(Base([Layer(Own())]), hidden_size=64, num_attention_heads=2, num_hidden_layers=layers, vocab_size=100)
    for config in found.configs:
        assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (32, 2, kept)
        assert (config.vocab_size, config.intermediate_size) == (100, 48)


@pytest.mark.parametrize("more", [0, 1])
def test_a_small_model_that_is_large_is_refused(found: Any, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    base = Base([Layer(Own())])
    monkeypatch.setattr(mixing, "_LARGEST", sum(parameter.numel() for parameter in base.parameters()) - more)
    if more:
        with pytest.raises(BuildError, match="examines a small llama .*, but the smallest has 72 parameters, too many"):
            found(base)
    else:
        assert found(base).mixers == set()


def test_attention_of_own_values_repeats_the_heads() -> None:
    value = torch.arange(24.0).view(1, 2, 3, 4)
    out, weights = own_value(nn.Identity(), torch.zeros(1, 6, 3, 5), value, value, None, scaling=1)
    assert out.shape == (1, 3, 6, 4)
    for head in range(6):
        assert torch.equal(out[0, :, head], value[0, head // 3])
    assert (weights, out.is_contiguous()) == (None, True)
