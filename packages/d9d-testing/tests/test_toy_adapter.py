"""The toy fine-tuning method: low-rank updates of linear layers."""

from __future__ import annotations

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_testing.toy.adapter import AdaptedLinear, LowRank, ToyAdapter
from d9d_testing.toy.config import ToyAdapterConfig
from torch import nn


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False))


def test_only_matching_linear_layers_get_adapters() -> None:
    whole = model().eval()
    added = ToyAdapter(ToyAdapterConfig(match="2", rank=5)).inject(whole)
    assert added == {"2.adapter.down", "2.adapter.up"}
    assert [type(part) for part in whole] == [nn.Linear, nn.Tanh, AdaptedLinear]
    shapes = {name: tuple(value.shape) for name, value in whole.named_parameters()}
    assert shapes == {
        "0.weight": (3, 4), "0.bias": (3,), "2.weight": (2, 3), "2.adapter.down": (5, 3), "2.adapter.up": (2, 5),
    }  # fmt: skip
    assert not whole[2].training
    with pytest.raises(BuildError, match="peft.match: no linear layer matches '7'; the model has: 0, 2"):
        ToyAdapter(ToyAdapterConfig(match="7")).inject(model())
    with pytest.raises(BuildError, match="the model has: none"):
        ToyAdapter(ToyAdapterConfig(match="*")).inject(nn.Sequential())


def test_an_adapter_begins_as_zero_and_adds_its_product() -> None:
    low = LowRank(torch.zeros(3, 400), 50)
    low.reset_parameters()
    assert torch.equal(low.up, torch.zeros(3, 50))
    assert low.down.std().item() == pytest.approx(400**-0.5, rel=0.05)
    with torch.no_grad():
        low.up.fill_(2.0)
        low.down.fill_(0.5)
    torch.testing.assert_close(low(torch.ones(1, 400)), torch.full((1, 3), 400 * 0.5 * 50 * 2.0))


def test_adapters_can_be_off_for_a_while_and_merged() -> None:
    method, whole, x = ToyAdapter(ToyAdapterConfig(match="*", rank=2)), model(), torch.randn(5, 4)
    plain = whole(x)
    method.inject(whole)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if "adapter" in name:
                parameter.copy_(torch.randn(parameter.shape))
    adapted = whole(x)
    assert not torch.allclose(adapted, plain)
    with method.off(whole):
        assert torch.equal(whole(x), plain)
        with method.off(whole):
            pass
        assert torch.equal(whole(x), plain)
    assert torch.equal(whole(x), adapted)
    with pytest.raises(RuntimeError, match="inside"), method.off(whole):
        raise RuntimeError("inside")
    assert torch.equal(whole(x), adapted)
    method.merge(whole)
    assert [type(part) for part in whole] == [nn.Linear, nn.Tanh, nn.Linear]
    torch.testing.assert_close(whole(x), adapted)
    assert [name for name, _ in whole.named_parameters()] == ["0.weight", "0.bias", "2.weight"]
