"""The strategy: the layers that it takes, and its refusals."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.traits import TensorStyle
from d9d_engine.distributed.mesh import Topology
from d9d_fp8.config import Fp8Config
from d9d_fp8.linear import is_converted
from d9d_fp8.strategy import Fp8, _obstacle, _several, check_device
from d9d_nn.linear import Linear
from pydantic import ValidationError
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = Linear(32, 48, std=0.1)
        self.down = Linear(48, 32, std=0.1)
        self.narrow = Linear(32, 20, std=0.1)
        self.plain = nn.Linear(32, 32)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = Linear(32, 64, std=0.1)

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"layers.{i}": block for i, block in enumerate(self.layers)}


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_converted(module)]


def apply(model: nn.Module, **fields: object):
    return Fp8(Fp8Config.model_validate({"emulate": True, **fields})).apply(model, Topology())


def test_linear_layers_of_blocks_are_taken_where_sizes_allow_and_the_rest_is_named() -> None:
    model = Model()
    names = list(model.state_dict())
    applied = apply(model)
    assert converted(model) == ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
    assert list(applied.modules) == converted(model)
    assert list(model.state_dict()) == names
    assert applied.notes == (
        "recipe rowwise, emulated: 4 linear layers",
        "not converted: layers.0.narrow, layers.1.narrow: with 32 features in and 20 out, which the recipe 'rowwise' "
        "needs to be multiples of 16",
        "not converted: layers.0.plain, layers.1.plain: a Linear, which is no d9d_nn.linear.Linear",
        "not converted: head: not in a block",
    )


def test_alike_layers_are_of_one_class() -> None:
    model = Model()
    apply(model)
    assert type(model.layers[0].up) is type(model.layers[1].down)


@pytest.mark.parametrize("patterns", [["down", "head"], ["layers.*.down", "*head"]])
def test_patterns_choose_by_whole_name_or_last_part(patterns: list[str]) -> None:
    model = Model()
    applied = apply(model, modules=patterns)
    assert converted(model) == ["layers.0.down", "layers.1.down", "head"]
    assert applied.notes[-1].endswith("and 2 more: not in modules")


def test_a_pattern_without_a_layer_is_reported() -> None:
    applied = apply(Model(), modules=["up", "q_proj"])
    assert list(applied.unmatched) == ["q_proj"]
    assert (
        "the pattern 'q_proj' in 'modules' matches no linear layer; there are: layers.0.up"
        in applied.unmatched["q_proj"]
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"modules": ["narrow"]}, r"'layers.0.narrow', with 32 features in and 20 out.* multiples of 16; leave it out"),
        ({"modules": ["plain"]}, r"'layers.0.plain', a Linear, which is no d9d_nn.linear.Linear; leave it out"),
        ({"recipe": "blockwise"}, r"can convert no linear layer; not converted: layers.0.up.* multiples of 128"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_reason(fields: dict[str, object], text: str) -> None:
    with pytest.raises(BuildError, match=text):
        apply(Model(), **fields)


def test_a_layer_is_converted_once() -> None:
    model = Model()
    apply(model, modules=["up"])
    with pytest.raises(BuildError, match=r"would convert 'layers.0.up' a second time"):
        apply(model, modules=["u*"])


def test_a_quantised_base_is_refused() -> None:
    model = Model()
    model.layers[0].up.weight = nn.Parameter(torch.zeros(48, 32, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(BuildError, match=r"weight of 'layers.0.up' is torch.uint8, .* a base that is not quantised"):
        apply(model)


def test_a_device_without_such_products_is_refused_unless_they_are_emulated() -> None:
    with pytest.raises(BuildError, match=r"the device 'cpu' has no products in float8; set emulate: true"):
        apply(Model(), emulate=False)


@pytest.mark.parametrize(
    ("capability", "cuda", "recipe", "text"),
    [
        ((8, 0), "13.0", "rowwise", "need compute capability 8.9 or newer, this GPU has 8.0; set emulate: true"),
        (
            (8, 9),
            "13.0",
            "blockwise",
            r"needs compute capability 9.x .* this GPU has 8.9 and torch is for CUDA 13.0; use the recipe",
        ),
        ((9, 0), "12.8", "blockwise", "CUDA 12.9 or newer; this GPU has 9.0 and torch is for CUDA 12.8"),
    ],
)
def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, capability, cuda, recipe, text) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(BuildError, match=text):
        check_device(torch.device("cuda"), recipe)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check_device(torch.device("cuda"), recipe)


def test_no_pattern_at_all_is_an_error() -> None:
    with pytest.raises(ValidationError, match="needs at least one pattern"):
        Fp8Config(modules=())


@pytest.mark.thorough
def test_terms_of_fine_tuning_stay_in_full_precision_around_a_base_in_float8() -> None:
    lora = pytest.importorskip("d9d_peft.lora.linear")
    torch.manual_seed(0)
    model = Model()
    site = model.layers[0].up
    lora.adapt(site, {}, lora.AdaptedLinear, rank=16, scale=1.0, dropout=0.0)
    nn.init.normal_(site.lora_B.weight)
    applied = apply(model, modules=["layers.*up"])
    assert is_converted(site)
    assert not is_converted(site.lora_A)
    assert applied.modules == ("layers.0.up", "layers.1.up")
    x = torch.randn(4, 32)
    term = x @ site.lora_A.weight.t() @ site.lora_B.weight.t()
    site.lora_off = True
    base = site(x)
    site.lora_off = False
    torch.testing.assert_close(site(x), base + term)
    assert not torch.equal(base, x @ site.weight.t())
    model = Model()
    lora.adapt(model.layers[0].up, {}, lora.AdaptedLinear, rank=16, scale=1.0, dropout=0.0)
    notes = apply(model).notes
    assert any("lora_A" in note and "a LoRA update" in note for note in notes)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = Linear(32, 64, std=0.1)
        self.key = Linear(32, 32, std=0.1)
        self.out = Linear(64, 32, std=0.1)
        self.narrow = Linear(32, 48, std=0.1)

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        columns = dict.fromkeys(("query", "key", "narrow"), TensorStyle.COLUMN)
        return {**columns, "out": TensorStyle.ROW}

    def tensor_parallel_heads(self) -> Mapping[str, int]:
        return {"query": 4, "key": 2}


def test_sizes_are_those_of_a_rank_of_tensor_parallelism() -> None:
    """Heads that are fewer than ranks stay whole: a rank computes one of them."""
    model = Model()
    model.layers = nn.ModuleList([Attention()])
    topology = SimpleNamespace(sizes={"tp": 4}, device=torch.device("cpu"))
    applied = Fp8(Fp8Config(emulate=True)).apply(model, topology)  # type: ignore[arg-type]
    assert applied.modules == ("layers.0.query", "layers.0.key", "layers.0.out")
    assert "layers.0.narrow: with 32 features in and 12 out on a rank of tp, which the recipe" in applied.notes[1]


def test_a_layer_s_sizes_are_those_of_a_rank() -> None:
    layer, end = Linear(96, 48, std=1.0), "on a rank of tp, which the recipe 'rowwise' needs to be multiples of 16"
    for parts, why in (
        ((1, 1), None),
        ((2, 1), None),
        ((3, 3), None),
        (
            (4, 1),
            f"with 24 features in and 48 out {end}",
        ),
        (
            (1, 2),
            f"with 96 features in and 24 out {end}",
        ),
    ):
        assert _obstacle("layer", layer, {}, "rowwise", parts) == why


def test_of_many_names_four_are_shown() -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    assert _several(names[:4]) == "a, b, c, d"
    assert _several(names[:5]) == "a, b, c, d and 1 more"
    assert _several(names) == "a, b, c, d and 2 more"
    applied = apply(nn.Sequential(), modules=["up"])
    assert applied.unmatched["up"].endswith("matches no linear layer; there are: none")
    assert applied.notes == ("recipe rowwise, emulated: 0 linear layers",)


def test_a_gpu_that_is_not_here_is_assumed_to_be_suitable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 0))
    check_device(torch.device("cuda"), "blockwise")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    check_device(torch.device("cuda"), "rowwise")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    with pytest.raises(BuildError, match="torch is for CUDA None"):
        check_device(torch.device("cuda"), "blockwise")
    monkeypatch.setattr(torch.version, "cuda", "12.9.1")
    check_device(torch.device("cuda"), "blockwise")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
    with pytest.raises(BuildError, match=r"this GPU has 10.0"):
        check_device(torch.device("cuda"), "blockwise")


def test_a_strategy_without_fields_takes_all_layers_of_blocks_rowwise() -> None:
    config = Fp8Config()
    assert (config.recipe, config.modules, config.emulate) == ("rowwise", None, False)
