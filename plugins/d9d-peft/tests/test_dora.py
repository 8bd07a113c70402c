"""Low-rank terms for directions, with magnitudes."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError
from d9d_peft.config import DoraConfig
from d9d_peft.lora.dora import Dora, row_norms
from torch import Tensor, nn


def adapted(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Any, Dora]:
    torch.manual_seed(0)
    stage, method = nn.ModuleDict({"q": nn.Linear(6, 5, bias=bias, dtype=dtype)}), Dora(DoraConfig(r=2, alpha=3))
    named = method.inject(stage)
    method.start(stage)
    assert named == {"q.lora_A.weight", "q.lora_B.weight", "q.lora_magnitude_vector.weight"}
    layer: Any = stage["q"]
    return layer, method


def parts(layer: Any) -> tuple[Tensor, ...]:
    """Fresh leaves: weight, A, B, magnitudes."""
    owners = layer, layer.lora_A, layer.lora_B, layer.lora_magnitude_vector
    return tuple(owner.weight.detach().clone().requires_grad_() for owner in owners)


@pytest.mark.parametrize("bias", [True, False])
def test_the_output_is_that_of_the_paper_and_the_norm_is_a_constant_in_the_backward(bias: bool) -> None:
    layer, _ = adapted(bias)
    for factor in (layer.lora_A, layer.lora_B):
        nn.init.normal_(factor.weight)
    x = torch.randn(7, 6)
    weight, a, b, magnitude = parts(layer)
    turned = weight + 1.5 * b @ a
    expected = x @ (turned * (magnitude / turned.detach().norm(dim=1)).unsqueeze(1)).T
    if bias:
        expected = expected + layer.bias
    out = layer(x)
    torch.testing.assert_close(out, expected)
    expected.square().sum().backward()
    out.square().sum().backward()
    for ours, of in zip((layer.lora_A, layer.lora_B, layer.lora_magnitude_vector), (a, b, magnitude), strict=True):
        torch.testing.assert_close(ours.weight.grad, of.grad)


def test_magnitudes_start_as_the_norms_of_the_weights_rows() -> None:
    layer, _ = adapted()
    torch.testing.assert_close(layer.lora_magnitude_vector.weight, layer.weight.norm(dim=1))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 4)])
def test_squares_of_rows_are_added_up_in_float32_or_wider(dtype: torch.dtype, width: int) -> None:
    layer, _ = adapted(dtype=dtype)
    assert layer.forward_collectives(cast("Any", None)) == [("all_reduce", 5 * width)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_the_sum_although_it_is_never_made(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, a, b = torch.randn(16, 32).to(dtype), torch.randn(4, 32).to(dtype), torch.randn(16, 4).to(dtype)
    expected = (weight.double() + 0.5 * b.double() @ a.double()).norm(dim=1).float()
    close = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(row_norms(weight, a, b, 0.5), expected, rtol=close, atol=0)
    opposite = row_norms(weight, torch.eye(32)[:4], torch.zeros(16, 4), 1.0)
    torch.testing.assert_close(opposite, weight.float().norm(dim=1), rtol=1e-3, atol=0)


def test_the_term_that_undoes_a_row_gives_no_nan() -> None:
    weight = torch.ones(2, 2)
    assert row_norms(weight, torch.ones(1, 2), -torch.ones(2, 1), 1.0).isfinite().all()


def test_banks_of_experts_and_adapters_without_magnitudes_are_refused() -> None:
    experts = pytest.importorskip("d9d_moe.experts.grouped_swiglu")
    bank = nn.ModuleDict({"experts": experts.GroupedSwiGLU(6, 4, 3, std=0.5, output_std=0.5), "q": nn.Linear(4, 4)})
    with pytest.raises(BuildError, match="no linear layers match 'gate_proj'; there are: q"):
        Dora(DoraConfig(r=2, targets=("gate_proj",))).inject(bank)
    lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 3.0, "use_rslora": False}
    method = Dora(DoraConfig(r=2, alpha=3))
    with pytest.raises(CheckpointError, match=r"the adapter has no magnitudes \(use_dora\), but peft is 'dora'"):
        method.check_adapter(nn.Module(), {}, lora, [])
    method.check_adapter(nn.Module(), {}, lora | {"use_dora": True}, [])
