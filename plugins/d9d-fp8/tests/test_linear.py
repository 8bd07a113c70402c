"""Linear layers in float8: the numbers of torchao, and nothing else changed about the layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from d9d_core.deferral import Deferral
from d9d_fp8.linear import convert
from d9d_fp8.recipes import RECIPES
from d9d_nn.linear import Linear
from torch import Tensor, nn

#: Recipes that torchao has, and its name of each.
TORCHAO = {"rowwise": "rowwise", "rowwise_gw_hp": "rowwise_with_gw_hp", "tensorwise": "tensorwise"}


def layer(recipe: str | None, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> Linear:
    torch.manual_seed(0)
    found = Linear(256, 128, std=0.1, bias=bias).to(dtype)
    if bias:
        nn.init.normal_(found.bias)
    if recipe:
        convert(found, {}, recipe, emulate=True)
    return found


def outcome(module: nn.Module, rows: int = 48, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, rows // 2, 256, generator=generator).to(dtype).requires_grad_()
    out = module(x)
    out.backward(1e-4 * torch.randn(out.shape, generator=generator).to(dtype))
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **gradients}


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", TORCHAO)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.filterwarnings("ignore")  # torchao's own
def test_the_numbers_are_those_of_torchao(recipe: str, dtype: torch.dtype) -> None:
    float8 = pytest.importorskip("torchao.float8")
    mine = layer(recipe, bias=True, dtype=dtype)
    theirs = nn.Linear(256, 128).to(dtype)
    theirs.load_state_dict(mine.state_dict())
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(TORCHAO[recipe]), emulate=True)
    theirs = float8.convert_to_float8_training(nn.Sequential(theirs), config=config)[0]
    found, expected = outcome(mine, dtype=dtype), outcome(theirs, dtype=dtype)
    for name, tensor in expected.items():
        # They divide by scales, we multiply by their inverse: the same for powers of two, else a last bit.
        within = 0.0 if recipe != "tensorwise" else 2**-7 if dtype == torch.bfloat16 else 1e-6
        largest = tensor.abs().max().item()
        torch.testing.assert_close(found[name], tensor, rtol=within, atol=within * largest, msg=name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_and_gradients_are_near_those_in_full_precision(recipe: str) -> None:
    found, exact = outcome(layer(recipe, bias=True)), outcome(layer(None, bias=True))
    for name, tensor in exact.items():
        assert found[name].dtype == tensor.dtype
        error = (found[name] - tensor).norm() / tensor.norm()
        # Two operands with 3 bits of mantissa are off by about 2.5 % each; e5m2 has 2 bits.
        assert error < (0.09 if recipe == "tensorwise" else 0.05), (name, error)
    off = {name for name, tensor in exact.items() if not torch.equal(found[name], tensor)}
    assert off == {"out", "x", "weight"} - ({"weight"} if recipe == "rowwise_gw_hp" else set())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [0, 2, 46, 130])
def test_any_number_of_rows_will_do(recipe: str, rows: int) -> None:
    found, exact = outcome(layer(recipe), rows), outcome(layer(None), rows)
    for name, tensor in exact.items():
        assert (found[name] - tensor).norm() <= 0.1 * tensor.norm(), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_deferred_weight_gradient_is_the_same(recipe: str) -> None:
    at_once = outcome(layer(recipe, bias=True))
    later, deferral = layer(recipe, bias=True), Deferral()
    assert list(later.defer_to(deferral)) == ["weight"]
    with deferral.collect() as left:
        outcome(later)
    assert later.weight.grad is None
    assert len(left) == 1
    left.run()
    assert torch.equal(later.weight.grad, at_once["weight"])
    assert torch.equal(later.bias.grad, at_once["bias"])


def test_a_frozen_weight_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = layer("rowwise")
    frozen.weight.requires_grad_(False)
    monkeypatch.setattr("d9d_fp8.linear.weight_gradient", None)
    assert outcome(frozen)["weight"] is None


def test_the_layer_stays_what_it_was() -> None:
    plain, converted = layer(None), layer("rowwise")
    assert isinstance(converted, Linear)
    assert converted.state_dict().keys() == plain.state_dict().keys()
    assert type(converted.weight) is nn.Parameter
    torch.manual_seed(3)
    plain.reset_parameters()
    torch.manual_seed(3)
    converted.reset_parameters()
    assert torch.equal(plain.weight, converted.weight)
    assert "float8=rowwise emulated" in repr(converted)


def test_autocast_decides_the_dtype_as_it_does_for_any_linear_layer() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = layer("rowwise")(torch.randn(4, 256))
    assert out.dtype == torch.bfloat16


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.smoke
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_compiles_as_one_graph_with_the_same_numbers(recipe: str, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    module = layer(recipe, bias=True, dtype=dtype)
    expected = outcome(module, dtype=dtype)
    module.zero_grad()
    module.compile(backend="aot_eager", fullgraph=True)
    found = outcome(module, dtype=dtype)
    torch.compiler.reset()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.gpu
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gpu_computes_what_emulation_does(recipe: str, compiled: bool) -> None:
    assert torch.cuda.get_device_capability() >= (9, 0)
    results = []
    for emulate in (True, False):
        torch.manual_seed(0)
        module = Linear(512, 768, std=0.1).to("cuda", torch.bfloat16)
        convert(module, {}, recipe, emulate=emulate)
        if compiled and not emulate:
            module.compile(fullgraph=True)
        x = torch.randn(1000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        out = module(x)
        out.backward(torch.randn_like(out))
        results.append((out.detach(), x.grad, module.weight.grad))
    for expected, found in zip(*results, strict=True):
        # Sums in another order and with fewer bits, then rounded to bfloat16.
        assert (found.float() - expected.float()).norm() < 0.01 * expected.float().norm()


def test_a_layer_in_float8_lends_its_product_to_nobody() -> None:
    mine = layer("rowwise")
    x = torch.randn(16, 256)
    expected = mine(x)
    assert not mine.lend_product(lambda _: torch.zeros(16, 128))
    assert torch.equal(mine(x), expected)
