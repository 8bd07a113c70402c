"""The library itself on a GPU: values and gradients against the op's reference in float32.

Shapes: B samples, S positions, K key heads, N value heads, D_k and D_v features of a key and value head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_fla import rules
from d9d_fla.gated_delta_rule import build
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients
from torch import Tensor

op = pytest.importorskip("d9d_nn.ops.gated_delta_rule")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # of the library, of Triton and of torch's synchronisation check
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ("query", "key", "value", "decay", "beta")
#: B, S, K, N, D_k, D_v; chunks have 64 positions.
SIZES = [
    (1, 1, 1, 1, 64, 64), (2, 63, 1, 2, 64, 128), (1, 64, 2, 2, 128, 128), (2, 200, 2, 4, 128, 128),
    (1, 1000, 1, 3, 128, 64), (2, 130, 1, 1, 256, 128), (1, 77, 1, 2, 96, 48),
]  # fmt: skip


def signature(size: tuple[int, ...], dtype: str = "bfloat16") -> OpSignature:
    static = dict(zip(("key_heads", "value_heads", "key_dim", "value_dim"), size[2:], strict=True))
    return OpSignature("gated_delta_rule", "cuda", dtype, static)


def inputs(size: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors as a layer makes them: decays in float32, from 0.9 to 1 for most tokens."""
    samples, length, keys, values, of_keys, of_values = size
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    found = {
        "query": normal(samples, length, keys, of_keys),
        "key": normal(samples, length, keys, of_keys),
        "value": normal(samples, length, values, of_values),
        "decay": -0.1 * normal(samples, length, values).square(),
        "beta": normal(samples, length, values).sigmoid(),
    }
    return {name: x.cuda() if name == "decay" else x.to("cuda", dtype) for name, x in found.items()}


def numbers(size: tuple[int, ...], starts: float) -> Tensor:
    """Documents [B, S], of which each position starts one with the given probability."""
    drawn = torch.rand(size[0], size[1], generator=torch.Generator().manual_seed(7)) < starts
    return drawn.long().cumsum(1).cuda()


def results(
    rule: Callable[..., Tensor], tensors: dict[str, Tensor], documents: Tensor | None, *, gradients: bool = True
) -> dict[str, Tensor]:
    """Output, and the gradients of a random weighted sum."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out = rule(*leaves.values(), documents)
    found = {"out": out.detach()}
    if gradients:
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.device, out.dtype)
        found |= dict(zip(NAMES, torch.autograd.grad(out, list(leaves.values()), weights), strict=True))
    return found


def expected(tensors: dict[str, Tensor], documents: Tensor | None) -> dict[str, Tensor]:
    """Results of the reference in float32, from the same rounded inputs."""
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    return {name: tensor.float() for name, tensor in results(op.gated_delta_rule, wide, documents).items()}


@pytest.fixture
def library() -> Any:
    if refusal := rules._unsupported_library():
        pytest.skip(refusal)
    return pytest.importorskip("fla.ops.gated_delta_rule", reason="needs fla-core")


@pytest.fixture
def trains(library: Any) -> None:
    """Skip where the backend refuses this machine."""
    decision = rules.gated_delta_rule(signature(SIZES[0]))
    if not decision.accept:
        pytest.skip(decision.reason)


documented = pytest.mark.parametrize("starts", [None, 0.02, 0.3], ids=["one document", "documents", "short documents"])
#: Each size and dtype is tuned for seconds, so float16 has two sizes only.
typed = pytest.mark.parametrize(
    ("size", "dtype"),
    [*((size, "bfloat16") for size in SIZES), *((size, "float16") for size in SIZES[1::2][:2])],
    ids=str,
)


@pytest.mark.usefixtures("library")
@typed
@documented
def test_values(size: tuple[int, ...], dtype: str, starts: float | None) -> None:
    if rules.gated_delta_rule(signature(size, dtype)).accept:
        pytest.skip("compared together with the gradients")
    tensors = inputs(size, getattr(torch, dtype))
    documents = None if starts is None else numbers(size, starts)
    found = results(build(signature(size, dtype)), tensors, documents, gradients=False)
    assert found["out"].dtype == getattr(torch, dtype)
    wanted = {"out": expected(tensors, documents)["out"]}
    assert_close_gradients(found, wanted, TOLERANCES[getattr(torch, dtype)])


@pytest.mark.usefixtures("trains")
@typed
@documented
def test_values_and_gradients(size: tuple[int, ...], dtype: str, starts: float | None) -> None:
    tensors = inputs(size, getattr(torch, dtype))
    documents = None if starts is None else numbers(size, starts)
    found = results(build(signature(size, dtype)), tensors, documents)
    assert {name: found[name].dtype for name in NAMES} == {name: tensors[name].dtype for name in NAMES}
    wanted = expected(tensors, documents)
    if size[1] == 1:  # nothing precedes the only position of a sample
        assert found.pop("decay").abs().max() <= 1e-2
        assert not wanted.pop("decay").any()
    assert_close_gradients(found, wanted, TOLERANCES[getattr(torch, dtype)])


@pytest.mark.usefixtures("library")
def test_a_document_is_computed_as_it_is_alone() -> None:
    """Values of the document before are huge; the border is inside a chunk of the library."""
    size = (1, 192, 2, 4, 128, 128)
    tensors, rule = inputs(size, torch.bfloat16), build(signature(size))
    tensors["value"][:, :100] *= 1e4
    documents = (torch.arange(192, device="cuda") >= 100).long().unsqueeze(0)
    with torch.no_grad():
        whole = rule(*tensors.values(), documents)[:, 100:]
        alone = rule(*(tensor[:, 100:] for tensor in tensors.values()), None)
    assert_close_gradients({"out": whole}, {"out": alone}, TOLERANCES[torch.bfloat16])


@pytest.mark.usefixtures("library")
def test_the_library_refuses_what_the_rule_refuses() -> None:
    if rules.gated_delta_rule(signature(SIZES[2])).accept:
        pytest.skip("gradients are computed on this machine")
    with pytest.raises(RuntimeError, match="Triton"):
        results(build(signature(SIZES[2])), inputs(SIZES[2], torch.bfloat16), None)


@pytest.mark.usefixtures("trains")
def test_the_host_never_waits() -> None:
    size = (2, 200, 2, 4, 128, 128)
    tensors, documents, rule = inputs(size, torch.bfloat16), numbers(size, 0.05), build(signature(size))
    weights = torch.randn(2, 200, 4, 128, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors.values()]
        torch.autograd.grad(rule(*leaves, documents), leaves, weights)

    step()  # compiles and tunes
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("trains")
class TestSuite(KernelSuite):
    """Further calls, such as tensors that are not contiguous."""

    target = "gated_delta_rule.fla"
    device = "cuda"
    dtypes = ("bfloat16", "float16")
