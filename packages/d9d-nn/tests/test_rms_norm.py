"""RMSNorm in a residual stream: which function is called, and with what result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from d9d_nn.ops.add_rms_norm import add_rms_norm
from d9d_nn.rms_norm import RMSNorm
from torch import Tensor

FEATURES = 8


class Scaled(RMSNorm):
    """Norm with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def normal(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, FEATURES, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_of(kind: type[RMSNorm] = RMSNorm) -> RMSNorm:
    norm = kind(FEATURES, eps=1e-6, residual=True)
    with torch.no_grad():
        norm.weight.copy_(normal(3)[0, 0])
    return norm


def bound(norm: RMSNorm) -> list[Tensor | None]:
    """Bind a kernel that records the added tensor of each call."""
    calls: list[Tensor | None] = []

    def kernel(
        x: Tensor, added: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        calls.append(added)
        return add_rms_norm(x, added, weight, eps, dtype)

    norm.add_rms_norm.bind("noting", kernel)
    return calls


def gradients(
    norm: RMSNorm, step: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]], adds: bool
) -> list[Tensor]:
    """Results of a step of the residual stream, and the gradients of all that it reads."""
    leaves = [normal(seed, torch.bfloat16).requires_grad_() for seed in range(1 + adds)]
    normed, total = step(leaves[0], leaves[1] if adds else None)
    norm.weight.grad = None
    torch.autograd.backward([normed, total], [normal(8, normed.dtype), normal(9, total.dtype)])
    grads = [leaf.grad for leaf in (*leaves, norm.weight)]
    return [normed.detach(), total.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.smoke
@pytest.mark.parametrize("adds", [True, False])
def test_a_branch_begins_with_the_norm_of_the_sum_bit_by_bit(adds: bool) -> None:
    norm = norm_of()

    def by_hand(x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if added is None else x + added
        return norm(total), total

    plain = gradients(norm, by_hand, adds)
    assert len(plain) == 4 + adds
    assert all(map(torch.equal, gradients(norm, norm.branch, adds), plain))
    calls = bound(norm)
    assert all(map(torch.equal, gradients(norm, norm.branch, adds), plain))
    assert [added is not None for added in calls] == [adds]


def test_the_reference_adds_as_torch_does() -> None:
    x, added = normal(0, torch.bfloat16), normal(1)
    normed, total = add_rms_norm(x, added, torch.ones(FEATURES), 1e-6)
    assert torch.equal(total, x + added)
    assert normed.dtype == total.dtype == torch.float32
    assert add_rms_norm(x, None, torch.ones(FEATURES), 1e-6)[1] is x


def test_only_norms_of_branches_have_the_slot() -> None:
    assert set(norm_of().op_slots()) == {"rms_norm", "add_rms_norm"}
    assert set(RMSNorm(FEATURES, eps=1e-6).op_slots()) == {"rms_norm"}
    assert norm_of().add_rms_norm.parts == ("rms_norm",)
    assert norm_of().add_rms_norm.static == {"features": FEATURES}


def test_a_norm_with_a_forward_of_another_keeps_it() -> None:
    plain = norm_of()
    replaced, derived = norm_of(), norm_of(Scaled)
    replaced.forward = lambda x: 2 * plain(x)  # type: ignore[method-assign]
    for norm in (replaced, derived):
        assert set(norm.op_slots()) == {"rms_norm"}
        calls = bound(norm)
        assert torch.equal(norm.branch(normal(0), normal(1))[0], 2 * plain(normal(0) + normal(1)))
        assert calls == []


@pytest.mark.parametrize("before", [True, False])
def test_hooks_see_what_is_normalised(before: bool) -> None:
    norm, seen = norm_of(), []
    calls = bound(norm)
    if before:
        handle = norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    else:
        handle = norm.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    _, total = norm.branch(normal(0), normal(1))
    handle.remove()
    assert torch.equal(seen[0], total)
    assert calls == []
    norm.branch(normal(0), normal(1))
    assert len(calls) == 1


@pytest.mark.parametrize("fused", [True, False], ids=["a kernel", "the reference"])
def test_autocast_narrows_the_norm_in_a_kernel_only_where_products_alone_read_it(fused: bool) -> None:
    norms = [RMSNorm(FEATURES, eps=1e-6, residual=True, for_products=asked) for asked in (True, False)]
    for norm in norms if fused else []:
        bound(norm)
    with torch.autocast("cpu", torch.bfloat16):
        found = [norm.branch(normal(0))[0].dtype for norm in norms]
    assert found == [torch.bfloat16 if fused else torch.float32, torch.float32]
    assert norms[0].branch(normal(0))[0].dtype == torch.float32, "autocast is off"
