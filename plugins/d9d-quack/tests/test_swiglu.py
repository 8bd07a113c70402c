"""The feed-forward layer against the op's reference, over a stand-in that is as demanding as the library."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from d9d_core.deferral import Deferral
from d9d_core.kernel import OpSignature
from d9d_quack import rules
from d9d_quack.swiglu import _fake_backward, _fake_forward, build, swiglu
from d9d_testing.suites.kernel import KernelSuite
from torch import Tensor
from torch.nn import functional

SwiGLU = pytest.importorskip("d9d_nn.swiglu").SwiGLU
FLOATS = (torch.bfloat16, torch.float16)


def in_turns(weight: Tensor) -> Tensor:
    """Rows of gate and up in turns, of those one behind the other."""
    gate, up = weight.chunk(2)
    return torch.stack([gate, up], 1).flatten(0, 1)


def gemm_gated(
    A: Tensor, B: Tensor, *, activation: str, concat_layout: tuple[str, ...], tuned: bool
) -> tuple[Tensor, Tensor]:
    """Stand-in: gate and up in turns, and the gated product."""
    assert (activation, concat_layout, tuned) == ("swiglu", ("B",), False)
    assert A.dtype == B.dtype
    assert A.dtype in FLOATS
    assert A.is_contiguous()
    assert B.T.is_contiguous()
    both = A.float() @ in_turns(B.T).T.float()
    return both.to(A.dtype), (functional.silu(both[:, ::2]) * both[:, 1::2]).to(A.dtype)


def gemm_dgated(
    A: Tensor, B: Tensor, PreAct: Tensor, *, activation: str, dynamic_scheduler: bool, tuned: bool
) -> tuple[Tensor, Tensor]:
    """Stand-in: gradients of gate and up in turns, and once more what was gated."""
    assert (activation, dynamic_scheduler, tuned) == ("swiglu", True, False)
    assert A.is_contiguous()
    assert B.is_contiguous()
    gate, up, grad = PreAct[:, ::2].float(), PreAct[:, 1::2].float(), A.float() @ B.float()
    # Inside of an op, autograd records nothing.
    grads = torch.ops.aten.silu_backward(grad * up, gate), grad * functional.silu(gate)
    return torch.stack(grads, -1).flatten(1).to(A.dtype), (functional.silu(gate) * up).to(A.dtype)


def gemm(A: Tensor, B: Tensor, *, dynamic_scheduler: bool, tuned: bool, concat_layout: tuple[str, ...]) -> Tensor:
    """Stand-in: rows of gate and up one behind the other, of those in turns."""
    assert (concat_layout, dynamic_scheduler, tuned) == (("out",), True, False)
    out = (A.float() @ B.float()).to(A.dtype)
    return torch.cat([out[::2], out[1::2]])


@pytest.fixture
def library(install: Any) -> None:
    install("quack.gemm_interface", gemm, gemm_gated, gemm_dgated)


@pytest.mark.thorough
@pytest.mark.usefixtures("library")
class TestSwiglu(KernelSuite):
    """Over the stand-in, with tensors on the CPU."""

    target = "swiglu.quack"
    asked = "cuda"
    dtypes = ("bfloat16",)
    refused = ({"dtype": "float32"}, {"device": "cpu"})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # many, of the library and of its dependencies
@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("quack") is None, reason="needs a CUDA device and QuACK")
class TestSwigluOnCuda(KernelSuite):
    """The library itself."""

    target = "swiglu.quack"
    device = "cuda"
    dtypes = ("bfloat16",)


def layer(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return SwiGLU(16, 24, std=0.3, output_std=0.3).to(torch.bfloat16)


def step(module: Any, x: Tensor) -> list[Tensor | None]:
    """Result of a layer, and the gradients of its input and weights."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    out = module(x)
    out.backward(torch.ones_like(out).cumsum(0) / 8)
    return [out.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def alike(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert [each is None for each in found] == [each is None for each in expected]
    for one, other in zip(found, expected, strict=True):
        if one is not None and other is not None:
            assert (one.float() - other.float()).norm() <= 2e-2 * other.float().norm()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "frozen", [(), ("gate_proj",), ("up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj")]
)
def test_a_layer_computes_the_same_and_only_the_gradients_that_are_needed(frozen: tuple[str, ...]) -> None:
    plain, fused = layer(), layer()
    for module in (plain, fused):
        for name in frozen:
            module.get_submodule(name).requires_grad_(False)
    fused.swiglu.bind("quack", build(OpSignature("swiglu", "cuda", "bfloat16")))
    x = torch.randn(2, 5, 16).to(torch.bfloat16)
    alike(step(fused, x), step(plain, x))


@pytest.mark.usefixtures("library")
def test_a_layer_keeps_its_weights_wide_under_autocast() -> None:
    plain, fused = layer().float(), layer().float()
    fused.swiglu.bind("quack", swiglu)
    x = torch.randn(2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = step(fused, x), step(plain, x)
    assert found[0] is not None
    assert found[0].dtype == torch.bfloat16
    assert {each.dtype for each in found[1:] if each is not None} == {torch.float32}
    alike(found, expected)


@pytest.mark.thorough
@pytest.mark.usefixtures("library")
def test_a_compiled_layer_keeps_the_op() -> None:
    fused, compiled = layer(), layer()
    for module in (fused, compiled):
        module.swiglu.bind("quack", swiglu)
    compiled.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5, 16).to(torch.bfloat16)
    alike(step(compiled, x), step(fused, x))


def test_weight_gradients_that_are_left_for_later_are_products_of_their_own() -> None:
    module = layer()
    module.swiglu.bind("quack", lambda *_: pytest.fail("has no weight gradients to leave"))
    deferral = Deferral()
    for projection in (module.gate_proj, module.up_proj, module.down_proj):
        projection.defer_to(deferral)
    module(torch.randn(3, 16).to(torch.bfloat16).requires_grad_())


def test_a_layer_with_a_changed_projection_has_no_slot_for_the_whole() -> None:
    def slots(change: Any) -> set[str]:
        module = layer()
        change(module)
        return set(module.op_slots())

    class Other(type(layer().up_proj)):
        """Product of a third party."""

    def replace_forward(module: Any) -> None:
        module.down_proj.forward = lambda rows: rows

    def replace_class(module: Any) -> None:
        module.up_proj.__class__ = Other

    assert slots(lambda _: None) == {"silu_mul", "swiglu"}
    assert slots(replace_forward) == slots(replace_class) == {"silu_mul"}


def test_dtypes_that_differ_are_refused() -> None:
    module = layer()
    weights = [projection.weight for projection in (module.gate_proj, module.up_proj, module.down_proj)]
    with pytest.raises(TypeError, match="must all be bfloat16, or all float16, not torch.bfloat16, torch.float32"):
        swiglu(torch.randn(3, 16), *weights)
    with pytest.raises(TypeError, match=r"must all be bfloat16, or all float16, not torch\.float32$"):
        swiglu(torch.randn(3, 16), *(weight.float() for weight in weights))


def signature(**changes: Any) -> OpSignature:
    values = {"device": "cuda", "dtype": "bfloat16", "static": {"hidden": 64, "features": 128}} | changes
    return OpSignature("swiglu", **values)


@pytest.mark.parametrize(
    ("major", "changes", "reason"),
    [
        (9, {}, "used only if the job names it"),
        (None, {}, "used only if the job names it"),
        (8, {}, "this GPU has 8.x"),
        (9, {"static": {"hidden": 64, "features": 100}}, "features 100 is no multiple of 8"),
        (9, {"dtype": "float32"}, "multiplies bfloat16 or float16; the tensors are float32"),
    ],
)
def test_it_accepts_where_its_products_run_but_never_volunteers(
    monkeypatch: pytest.MonkeyPatch, major: int | None, changes: Any, reason: str
) -> None:
    monkeypatch.setattr(rules, "capability", lambda: major)
    decision = rules.swiglu(signature(**changes))
    assert (decision.accept, decision.priority) == ("names it" in reason, 0)
    assert reason in decision.reason


@pytest.mark.full
def test_the_stand_ins_take_what_the_library_takes() -> None:
    """The library imports on a CPU, and computes nothing there."""
    library = pytest.importorskip("quack.gemm_interface")
    for ours in (gemm, gemm_gated, gemm_dgated):
        theirs = inspect.signature(getattr(library, ours.__name__)).parameters
        assert [name for name in inspect.signature(ours).parameters if name not in theirs] == []


def test_shapes_of_the_compiled_layer_are_those_of_its_results() -> None:
    rows, gate = torch.empty(3, 8, device="meta"), torch.empty(5, 8, device="meta")
    out, both = _fake_forward(rows, gate, gate, torch.empty(8, 5, device="meta"))
    assert (out.shape, both.shape) == ((3, 8), (3, 10))


@pytest.mark.parametrize(
    ("needed", "sizes"),
    [
        ([True, False, False, True], [48, 0, 512]), ([False, True, False, False], [0, 1024, 0]),
        ([False, False, True, False], [0, 1024, 0]),
    ],
)  # fmt: skip
def test_a_compiler_sees_the_gradients_that_are_needed(needed: list[bool], sizes: list[int]) -> None:
    rows, weight, down = torch.empty(3, 16), torch.empty(32, 16), torch.empty(16, 32)
    found = _fake_backward(rows, rows, weight, weight, down, rows, needed)
    assert [tensor.numel() for tensor in found] == sizes
