"""Dropout of low-rank terms whose input features are shared by ranks."""

from __future__ import annotations

import pytest
import torch
from d9d_peft.config import LoraConfig
from d9d_peft.lora.dropout import dropped
from d9d_peft.lora.method import Lora
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def drawn(x: Tensor, share: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Output of a dropout, and the next random number."""
    torch.manual_seed(3)
    return dropped(x.to(dtype), 0.5, True, share), torch.rand(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_those_of_one_process_and_generators_stay_together(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 8)
    whole, following = drawn(x, (0, 1), dtype)
    parts = [drawn(part, (rank, 4), dtype) for rank, part in enumerate(x.chunk(4, dim=-1))]
    assert torch.equal(torch.cat([part for part, _ in parts], dim=-1), whole)
    assert all(torch.equal(after, following) for _, after in parts)


def test_masks_of_parts_are_independent_and_those_of_whole_inputs_agree() -> None:
    x = torch.ones(64, 64)
    (first, _), (second, _) = (drawn(x, (rank, 2)) for rank in range(2))
    assert 0.4 < (first == second).float().mean() < 0.6
    assert torch.equal(drawn(x, (0, 1))[0], drawn(x, (0, 1))[0])


@pytest.mark.thorough
def test_gradients_are_scaled_as_the_outputs_and_a_second_forward_drops_the_same() -> None:
    x = torch.rand(16, 8).add(1).requires_grad_()
    torch.manual_seed(0)
    out = checkpoint(lambda rows: dropped(rows, 0.25, True, (1, 2)).square(), x, use_reentrant=False)
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * out.detach() / x.detach())  # of (x / 0.75)**2 or of zero
    assert 0 < (out == 0).sum() < out.numel()


@pytest.mark.thorough
def test_an_evaluated_layer_drops_nothing_and_a_compiled_one_is_one_graph() -> None:
    x = torch.randn(4, 8)
    assert dropped(x, 0.5, False, (1, 2)) is x
    torch.compiler.reset()
    whole = torch.compile(lambda rows: dropped(rows, 0.5, True, (1, 2)), backend="aot_eager", fullgraph=True)
    torch.manual_seed(3)
    assert torch.equal(whole(x), drawn(x, (1, 2))[0])


def test_a_layer_drops_the_part_that_it_was_told() -> None:
    stage = nn.ModuleDict({"q": nn.Linear(8, 8, bias=False)})
    Lora(LoraConfig(r=2, alpha=2, dropout=0.5)).inject(stage)
    layer = stage["q"]
    nn.init.normal_(layer.lora_B.weight)
    x, a = torch.randn(5, 8), layer.lora_A.weight.detach()
    outs = []
    for part, rows in enumerate(x.chunk(2, dim=-1)):
        layer.share_inputs(part, 2)
        layer.lora_A.weight = nn.Parameter(a.chunk(2, dim=-1)[part])
        torch.manual_seed(3)
        outs.append(layer.lora_term(rows))
    torch.testing.assert_close(sum(outs), drawn(x, (0, 1))[0] @ a.T @ layer.lora_B.weight.T * layer.lora_scale)
