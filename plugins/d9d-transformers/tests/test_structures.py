"""Structures of stand-in models, and stand-ins that d9d cannot train."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_transformers.attention import AttentionCall, mask_on_meta, record
from d9d_transformers.structure import Parts, Structure, examine, layer_list, masked_calls, with_parameters
from torch import Tensor, nn


class Attention(nn.Module):
    """Attention that looks its function up by name, with masks of windows of 3 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)
        self.implementation = ""

    def forward(self, hidden: Tensor, mask: Tensor | None, keywords: dict[str, Any]) -> Tensor:
        assert self.implementation in ("d9d_examined", "d9d_masked")
        assert (mask is not None) == (self.implementation == "d9d_masked")
        heads = self.proj(hidden).view(*hidden.shape[:2], 2, 4).transpose(1, 2)
        out, _ = record(self, heads, heads[:, :1], heads[:, :1], mask, **keywords)
        return out.flatten(2)


class Layer(nn.Module):
    """Layer with attention, or with a part that mixes tokens."""

    def __init__(self, kind: str, extra: int | None) -> None:
        super().__init__()
        self.extra = extra
        self.part: nn.Module = Attention() if kind == "attention" else Mixer() if kind == "mixer" else nn.Linear(8, 8)

    def forward(self, hidden: Tensor, mask: Tensor | None, keywords: dict[str, Any]) -> Any:
        is_attention = isinstance(self.part, Attention)
        hidden = self.part(hidden, mask, keywords) if is_attention else self.part(hidden)
        return hidden if self.extra is None else (hidden, *(None,) * self.extra)


class Mixer(nn.Linear):
    """Module that is said to mix tokens."""

    def __init__(self) -> None:
        super().__init__(8, 8)


class Base(nn.Module):
    """Model without its head; the order of its calls is an argument."""

    def __init__(
        self, *kinds: str, order: str = "embed scale 0 1 norm", extras: Any = (None, None), **given: Any
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=2)
        self._no_split_modules: Any = ["Layer"]
        self.embed, self.scale, self.norm = nn.Embedding(5, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        made = (Layer(kind, extra) for kind, extra in zip(kinds or ("plain", "plain"), extras, strict=True))
        self.layers = nn.ModuleList(made)
        self.order, self.given = order, given
        self.implementations: list[str] = []

    def set_attn_implementation(self, name: str) -> None:
        self.implementations.append(name)
        for module in self.modules():
            if isinstance(module, Attention):
                module.implementation = name

    def forward(self, *, input_ids: Tensor, position_ids: Tensor, use_cache: bool, **keywords: Any) -> Any:
        assert (input_ids.shape, position_ids.shape, use_cache) == ((1, 16), (1, 16), False)
        assert input_ids.is_meta
        assert position_ids.is_meta
        padding = keywords.pop("attention_mask", None)
        mask = None
        if padding is not None:
            assert padding.shape == (1, 16)
            assert torch.all(padding)
            mask = mask_on_meta(
                mask_function=lambda _b, _h, query, key: (key <= query) & (key > query - 3), q_length=16, kv_length=16
            )
        if self.given.get("fails") == (padding is not None):
            raise KeyError("cache")
        hidden: Any = input_ids
        for name in self.order.split():
            is_layer = name.isdigit()
            hidden = self.layers[int(name)](hidden, mask, keywords) if is_layer else getattr(self, name)(hidden)
            if isinstance(hidden, tuple):
                hidden = hidden[0]
        return (hidden,)


PARTS = Parts(frozenset({"Mixer"}), frozenset({"Layer", "Linear"}), {}, {})


def found(base: Base, parts: Parts = PARTS) -> Structure:
    return examine(base.to("meta"), parts)


def test_modules_have_their_roles_in_the_order_of_their_calls() -> None:
    base = Base()
    assert found(base) == Structure("layers", 2, ("embed", "scale"), ("norm",), None, {}, ())
    assert base.implementations == ["d9d_examined", "d9d"]
    twice = Base(order="embed scale scale 0 1 norm", extras=(0, 0))
    assert found(twice) == Structure("layers", 2, ("embed", "scale"), ("norm",), 1, {}, ())
    assert found(Base(order="embed 0 1 norm scale", extras=(2, 2))) == Structure(
        "layers", 2, ("embed",), ("norm", "scale"), 3, {}, ()
    )
    assert not any(module._forward_hooks for module in base.modules())


def test_attention_is_recorded_with_the_masks_of_the_model_and_mixers_are_named() -> None:
    base = Base("attention", "mixer")
    call = AttentionCall(2, 1, 4, 4, 0.5, 3, None, False, ())
    assert found(base) == Structure(
        "layers", 2, ("embed", "scale"), ("norm",), None, {"layers.0.part": call}, ("layers.1.part",)
    )
    assert base.implementations == ["d9d_examined", "d9d", "d9d_masked", "d9d"]
    assert masked_calls(base) == {"layers.0.part": call}
    whole = Parts(frozenset({"Layer"}), frozenset({"Mixer", "Linear"}), {}, {})
    assert found(Base("attention", "plain"), whole).mixers == ("layers.0", "layers.1")


@pytest.mark.parametrize(
    ("base", "text"),
    [
        (Base(order="embed scale 1 0 norm"), "the layers in layers do not run once each in order"),
        (Base(order="embed scale 0 0 1 norm"), "the layers in layers do not run once each in order"),
        (Base(order="embed scale 0 norm"), "the layers in layers do not run once each in order"),
        (Base(extras=(1, 2)), "the layers in layers return different numbers of values"),
        (Base(extras=(None, 0)), "the layers in layers return different numbers of values"),
        (Base(order="embed 0 1"), "the parameters of norm, scale are used outside of their modules"),
        (
            Base(order="embed 0 scale 1 norm"),
            "other modules with parameters run between two layers of layers;",
        ),
        (Base(fails=False), "^model.config: the forward of Base fails with d9d's attention: 'cache'$"),
        (Base("attention", "plain", fails=True), "fails with d9d's attention and masks: 'cache'$"),
    ],
)
def test_models_that_run_otherwise_are_refused(base: Base, text: str) -> None:
    with pytest.raises(BuildError, match=text):
        found(base)
    assert base.implementations[-1] == "d9d"
    assert not any(module._forward_hooks for module in base.modules())


def test_a_part_of_unknown_kind_is_refused_unless_it_is_attention() -> None:
    with pytest.raises(
        BuildError, match=r"cannot tell whether layers\.1\.part \(Mixer\) mixes documents; .* has no Mixer$"
    ):
        found(Base("attention", "mixer"), Parts(frozenset(), frozenset({"Layer"}), {}, {}))
    with pytest.raises(BuildError, match=r"cannot tell whether layers\.1 \(Layer\) mixes documents"):
        found(Base("attention", "plain"), Parts(frozenset(), frozenset({"Linear"}), {}, {}))


def test_one_parameter_with_two_names_is_refused() -> None:
    base = Base()
    base.layers[1].part.weight = base.layers[0].part.weight  # type: ignore[union-attr, assignment]
    text = r"layers\.1\.part\.weight and layers\.0\.part\.weight are one parameter"
    with pytest.raises(BuildError, match=text):
        examine(base, PARTS)


class Pair(nn.Module):
    """Module that returns two tensors, or none."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.ones(8)), kept

    def forward(self, hidden: Tensor) -> Any:
        return (hidden, hidden) if self.kept else {"hidden": hidden}


@pytest.mark.parametrize(("kept", "kind"), [(True, "tuple"), (False, "dict")])
def test_modules_that_return_more_than_a_tensor_are_refused(kept: bool, kind: str) -> None:
    base = Base()
    base.scale = Pair(kept)  # type: ignore[assignment]
    with pytest.raises(BuildError, match=rf"^model\.config: scale returns more than one tensor \({kind}\)"):
        found(base)


def test_the_list_of_layers_is_the_one_with_their_number_and_class() -> None:
    base = Base()
    base.others = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    base.short = nn.ModuleList([Layer("plain", None)])
    assert layer_list(base) == ("layers", base.layers)
    base.again = nn.ModuleList([Layer("plain", None), Layer("plain", None)])
    with pytest.raises(
        BuildError, match=r"^model\.config: Base has 2 lists of 2 layers \(Layer\), but d9d needs exactly"
    ):
        layer_list(base)
    base._no_split_modules = ["Other", "Another"]
    with pytest.raises(BuildError, match=r"Base has 0 lists of 2 layers \(Another, Other\)"):
        layer_list(base)
    base._no_split_modules = None
    with pytest.raises(BuildError, match="Base names no layer class in _no_split_modules, so d9d cannot find the list"):
        layer_list(base)


def test_modules_with_parameters_of_their_own() -> None:
    base = nn.ModuleDict({"inner": nn.ModuleDict({"linear": nn.Linear(1, 1)}), "empty": nn.Identity()})
    assert with_parameters(base) == ["inner.linear"]
    base.register_parameter("own", nn.Parameter(torch.ones(1)))
    assert with_parameters(base) == ["", "inner.linear"]
