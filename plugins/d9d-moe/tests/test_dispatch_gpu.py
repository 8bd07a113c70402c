"""A whole layer on CUDA: the host waits for nothing, and two runs give the same bits."""

from __future__ import annotations

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_moe.experts.layer import MoELayer
from d9d_moe.router.top_k import TopKRouter
from d9d_nn.ops import grouped_linear_torch
from d9d_testing.tolerances import assert_close_gradients
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def layer(*, kernel: bool) -> MoELayer:
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = MoELayer(
            TopKRouter(64, 16, 4, std=0.5, scoring="sigmoid", groups=4, top_groups=2, selection_bias=True),
            GroupedSwiGLU(64, 96, 16, std=0.2, output_std=0.2),
            LocalDispatcher(),
        ).bfloat16()
    for slot in (made.experts.into, made.experts.out_of) if kernel else ():
        signature = OpSignature("grouped_linear", "cuda", "bfloat16", slot.static)
        decision = grouped_linear_torch.supports(signature)
        if not decision.accept:
            pytest.skip(decision.reason)
        slot.bind("grouped_mm", grouped_linear_torch.build(signature))
    return made


def step(made: MoELayer, hidden: Tensor) -> dict[str, Tensor]:
    made.zero_grad()
    hidden = hidden.detach().requires_grad_()
    out = made(hidden)
    out.square().sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in made.named_parameters()}
    return grads | {"out": out.detach(), "hidden": hidden.grad}


def test_a_step_waits_for_nothing_and_repeats_bit_by_bit() -> None:
    made, hidden = layer(kernel=True), torch.randn(2, 100, 64, device="cuda", dtype=torch.bfloat16)
    first = step(made, hidden)  # the first call may set up libraries
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = step(made, hidden)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert_close_gradients(first, step(layer(kernel=False), hidden))
