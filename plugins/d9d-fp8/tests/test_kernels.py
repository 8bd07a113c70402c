"""The way to torch's kernels, over stand-ins on the CPU that insist on the layouts that those document."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_fp8.grouped import grouped
from d9d_fp8.linear import convert
from d9d_fp8.products import _right_scale, divisor
from d9d_fp8.quantization import Granularity
from d9d_fp8.recipes import RECIPES
from d9d_nn.linear import Linear
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

BLOCK = 128


def whole_scale(scale: Tensor, recipe: ScalingType, rows: int, depth: int) -> Tensor:
    """Scales [rows, depth] of an operand [rows, depth]; the second operand is checked by its transpose."""
    if recipe is ScalingType.TensorWise:
        assert scale.numel() == 1
        return scale.reshape(1, 1)
    if recipe is ScalingType.RowWise:
        assert scale.is_contiguous()
        return scale.reshape(rows, 1)
    blocks = depth // BLOCK
    if recipe is ScalingType.BlockWise1x128:
        assert scale.shape == (rows, blocks)
        assert scale.stride(0) == 1
        return scale.repeat_interleave(BLOCK, 1)
    assert recipe is ScalingType.BlockWise128x128
    padded = -(-blocks // 4) * 4
    assert scale.shape == (padded, rows // BLOCK)
    assert scale.stride(0) == 1
    return scale.t()[:, :blocks].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any, *,
    output_dtype: torch.dtype, use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    """Stand-in for torch.nn.functional.scaled_mm, as it computes on a GPU."""
    assert isinstance(use_fast_accum, bool)
    (m, k), n = a.shape, b.shape[1]
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert k % 16 == n % 16 == 0
    assert not (a.dtype == b.dtype == torch.float8_e5m2)
    if recipe_a is ScalingType.RowWise:
        assert recipe_b is ScalingType.RowWise
        assert scale_a.shape == (m, 1)
        assert scale_b.shape == (1, n)
    wide_a = a.float() * whole_scale(scale_a, recipe_a, m, k)
    wide_b = b.t().float() * whole_scale(scale_b, recipe_b, n, k)
    return (wide_a @ wide_b.t()).to(output_dtype)


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any, *,
    offs: Tensor, output_dtype: torch.dtype, use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    """Stand-in for torch.nn.functional.scaled_grouped_mm; rows past the end are memory as it was."""
    assert isinstance(use_fast_accum, bool)
    assert recipe_a is recipe_b is ScalingType.RowWise
    (rows, depth), (experts, _, n) = a.shape, b.shape
    assert a.is_contiguous()
    assert b.mT.is_contiguous()
    assert depth % 16 == n % 16 == 0
    assert scale_a.shape == (rows,)
    assert scale_b.shape == (experts, n)
    assert scale_b.is_contiguous()
    assert offs.dtype == torch.int32
    out = torch.full((rows, n), torch.nan, dtype=output_dtype)
    for expert, (start, end) in enumerate(zip([0, *offs.tolist()], offs.tolist(), strict=False)):
        wide = a[start:end].float() * scale_a[start:end, None]
        out[start:end] = (wide @ (b[expert].float() * scale_b[expert])).to(output_dtype)
    return out


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(functional, "scaled_grouped_mm", scaled_grouped_mm)


def outcome(recipe: str, emulate: bool, *, compiled: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    layer = Linear(384, 256, std=0.1).bfloat16()
    convert(layer, {}, recipe, emulate=emulate)
    if compiled:
        layer.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 50, 384).bfloat16().requires_grad_()
    out = layer(x)
    out.backward(torch.randn_like(out))
    return {"out": out.detach(), "x": x.grad, "weight": layer.weight.grad}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.smoke
def test_kernels_get_what_they_document_and_compute_what_emulation_does(recipe: str) -> None:
    expected = outcome(recipe, emulate=True)
    for name, tensor in outcome(recipe, emulate=False).items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.smoke
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
def test_a_compiled_layer_calls_them_as_well(recipe: str) -> None:
    torch.compiler.reset()
    expected, found = outcome(recipe, emulate=False), outcome(recipe, emulate=False, compiled=True)
    torch.compiler.reset()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.thorough
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0], [8, 0, 0]])
@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.smoke
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
def test_experts_too(counts: list[int], spare: int, compiled: bool) -> None:
    results = []
    for emulate in (True, False):
        torch.manual_seed(0)
        torch.compiler.reset()
        x = torch.randn(sum(counts) + spare, 32).bfloat16().requires_grad_()
        bank = torch.randn(3, 32, 48).bfloat16().requires_grad_()
        fast = compiled and not emulate
        function = torch.compile(grouped, backend="aot_eager", fullgraph=True) if fast else grouped
        out = function(x, bank, torch.tensor(counts), spare_rows=bool(spare), emulate=emulate)
        out.backward(torch.randn(out.shape).bfloat16())
        results.append((out.detach(), x.grad, bank.grad))
    torch.compiler.reset()
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("recipe", "fast"),
    [
        ("rowwise", [True, False, False]),
        ("rowwise_gw_hp", [True, False]),
        ("tensorwise", [True, False, False]),
        ("blockwise", [False, False, False]),
    ],
)
def test_only_sums_of_outputs_without_block_scales_stay_in_the_tensor_core(
    monkeypatch: pytest.MonkeyPatch, recipe: str, fast: list[bool]
) -> None:
    asked: list[bool] = []

    def noted(*given: Any, use_fast_accum: bool, **options: Any) -> Tensor:
        asked.append(use_fast_accum)
        return scaled_mm(*given, use_fast_accum=use_fast_accum, **options)

    monkeypatch.setattr(functional, "scaled_mm", noted)
    outcome(recipe, emulate=False)
    assert asked == fast


def test_products_of_experts_sum_in_the_tensor_core(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def noted(*given: Any, **options: Any) -> Tensor:
        asked.append((options["use_fast_accum"], options["offs"].tolist()))
        return scaled_grouped_mm(*given, **options)

    monkeypatch.setattr(functional, "scaled_grouped_mm", noted)
    x, bank = torch.randn(5, 32).bfloat16(), torch.randn(2, 32, 16).bfloat16()
    assert grouped(x, bank, torch.tensor([2, 3])).shape == (5, 16)
    assert grouped(x[:0], bank, torch.tensor([0, 0])).shape == (0, 16)
    assert asked == [(True, [2, 5])]


@pytest.mark.parametrize(("blocks", "padded"), [(1, 4), (3, 4), (4, 4), (5, 8)])
def test_columns_of_square_scales_are_padded_to_four_blocks_with_ones(blocks: int, padded: int) -> None:
    scale = torch.full((2, blocks), 3.0)
    found = _right_scale(scale, Granularity.SQUARE)
    assert found.tolist() == [[3.0, 3.0]] * blocks + [[1.0, 1.0]] * (padded - blocks)
    assert [divisor(granularity) for granularity in Granularity] == [16, 16, 128, 128]
