"""Residual addition and RMSNorm in one: values, each gradient that may be absent, and compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from d9d_nn.ops.add_rms_norm import add_rms_norm as plain_add_rms_norm
from d9d_nn.rms_norm import RMSNorm
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients, assert_close_values
from d9d_triton.add_rms_norm import add_and_normalise, add_rms_norm
from d9d_triton.rms_norm import rms_norm_backward
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Function = Callable[..., tuple[Tensor, Tensor]]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outcome(
    function: Function,
    *inputs: Tensor | None,
    trained: tuple[bool, ...] = (True, True, True),
    arriving: tuple[bool, bool] = (True, True),
    draw: Callable[[Tensor, int], Tensor] = lambda out, seed: normal(*out.shape, seed=seed).to(out.dtype),
) -> dict[str, Tensor]:
    """Norm, sum and the gradients of x, of the added tensor and of the weight, if present.

    Args:
        function: of x, the added tensor, weight and epsilon.
        inputs: the first three.
        trained: which of them need a gradient.
        arriving: whether the gradients of the norm and of the sum arrive.
        draw: draws a gradient that arrives.
    """
    leaves = [
        None if x is None else x.detach().requires_grad_(wanted) for x, wanted in zip(inputs, trained, strict=True)
    ]
    outs = function(*leaves, 1e-3)
    read = [(out, draw(out, 8 + place)) for place, out in enumerate(outs) if arriving[place] and out.requires_grad]
    if read:
        torch.autograd.backward([out for out, _ in read], [grad for _, grad in read])
    grads = {
        name: leaf.grad
        for name, leaf in zip(("x", "added", "weight"), leaves, strict=True)
        if leaf is not None and leaf.grad is not None
    }
    return {"normed": outs[0].detach(), "total": outs[1].detach(), **grads}


def wide(*inputs: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.double() for x in inputs]


def assert_near(found: dict[str, Tensor], exact: dict[str, Tensor], *dtypes: torch.dtype) -> None:
    """Near in the widest tolerance of the inputs."""
    within = max((TOLERANCES[dtype] for dtype in dtypes), key=lambda tolerance: tolerance.rtol)
    assert found.keys() == exact.keys()
    for name in ("normed", "total"):
        assert_close_values(found[name], exact[name], within, name)
    names = exact.keys() - {"normed", "total"}
    assert_close_gradients({name: found[name] for name in names}, {name: exact[name] for name in names}, within)


class Launched(TorchDispatchMode):
    """Names of the operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).rpartition(".")[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def launched() -> Iterator[list[str]]:
    with Launched() as mode:
        yield mode.names


@pytest.mark.full
@given(
    rows=st.integers(1, 70),
    features=st.sampled_from([2, 3, 16, 17, 64, 100, 1025]),
    dtypes=st.tuples(*(st.sampled_from(DTYPES) for _ in range(3))),
    adds=st.booleans(),
    transposed=st.booleans(),
)
@settings(max_examples=30)
def test_it_agrees_with_float64(
    rows: int, features: int, dtypes: tuple[torch.dtype, ...], adds: bool, transposed: bool
) -> None:
    x = normal(features, rows, dtype=dtypes[0]).T if transposed else normal(rows, features, dtype=dtypes[0])
    added = normal(rows, features, seed=1, dtype=dtypes[1]) if adds else None
    inputs = x, added, 1 + normal(features, seed=2, dtype=dtypes[2])
    found = outcome(add_rms_norm, *inputs)
    assert_near(found, outcome(plain_add_rms_norm, *wide(*inputs)), *dtypes)
    of_sum = torch.promote_types(dtypes[0], dtypes[1]) if adds else dtypes[0]
    assert found["normed"].dtype == found["total"].dtype == of_sum
    assert [found[name].dtype for name in ("x", "weight")] == [dtypes[0], dtypes[2]]
    assert not adds or found["added"].dtype == dtypes[1]


# The interpreter cuts off bits where a GPU rounds to bfloat16; test_layers_gpu.py has that.
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_sum_is_that_of_torch_and_the_norm_is_of_the_rounded_sum(dtype: torch.dtype) -> None:
    x, added, weight = normal(5, 33, dtype=dtype), 100 * normal(5, 33, seed=1, dtype=dtype), normal(33, seed=2)
    normed, total = add_rms_norm(x, added, weight, 1e-3)
    assert torch.equal(total, x + added)
    exact, _ = plain_add_rms_norm(total.double(), None, weight.double(), 1e-3)
    # Half a place of the norm: nothing of the rounding of the sum, which is a hundred times as large as x.
    torch.testing.assert_close(normed.double(), exact, rtol=0.51 * torch.finfo(dtype).eps + 1e-6, atol=1e-6)


def test_a_norm_of_a_narrower_dtype_is_rounded_once_and_the_stream_stays_wide() -> None:
    x, weight = normal(5, 33).requires_grad_(), normal(33, seed=2)
    added = normal(5, 33, seed=1, dtype=torch.float16).requires_grad_()
    normed, total = add_rms_norm(x, added, weight, 1e-3, torch.float16)
    exact = plain_add_rms_norm(x, added, weight, 1e-3, torch.float16)
    assert (normed.dtype, total.dtype) == (torch.float16, torch.float32)
    assert torch.equal(total, exact[1])
    assert_close_values(normed, exact[0])
    arriving = [normal(5, 33, seed=3, dtype=torch.float16), normal(5, 33, seed=4)]
    with launched() as names:
        found = torch.autograd.grad((normed, total), (x, added), arriving)
    assert [grad.dtype for grad in found] == [torch.float32, torch.float16]
    assert "aten._to_copy" not in names, "the kernel writes the gradient in both dtypes"
    for one, other in zip(found, torch.autograd.grad(exact, (x, added), arriving), strict=True):
        assert_close_values(one, other, TOLERANCES[torch.float16])


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_the_norm_and_the_sum_have_the_wider_dtype_of_both_inputs(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, added, weight = normal(2, 3, dtype=dtypes[0]), normal(2, 3, seed=1, dtype=dtypes[1]), normal(3, seed=2)
    normed, total = add_rms_norm(x, added, weight, 1e-3)
    assert normed.dtype == total.dtype == torch.float32
    assert_close_values(normed, plain_add_rms_norm(x, added, weight, 1e-3)[0])


def test_without_an_addition_the_sum_has_the_memory_of_what_was_given() -> None:
    x, weight = normal(3, 8).requires_grad_(), normal(8, seed=1)
    for asked in (True, False):
        with torch.set_grad_enabled(asked):
            assert add_rms_norm(x, None, weight, 1e-6)[1].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("adds", [True, False], ids=["sum", "no sum"])
@pytest.mark.parametrize("arriving", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "trained", [(True, True, True), (True, True, False), (False, True, True), (True, False, True), (False, False, True)]
)
def test_gradients_that_are_absent_or_that_nobody_needs(
    adds: bool, arriving: tuple[bool, bool], trained: tuple[bool, ...]
) -> None:
    inputs = normal(3, 5), normal(3, 5, seed=1) if adds else None, normal(5, seed=2)
    found = outcome(add_rms_norm, *inputs, trained=trained, arriving=arriving)
    exact = outcome(plain_add_rms_norm, *wide(*inputs), trained=trained, arriving=arriving)
    assert_near(found, exact, torch.float32)


class Stopped(torch.autograd.Function):
    """Identity without a gradient."""

    @staticmethod
    def forward(_ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> tuple[None, None]:
        return None, None


def test_no_gradient_leaves_where_none_arrives() -> None:
    x, added, weight = (normal(*shape).requires_grad_() for shape in ((3, 5), (3, 5), (5,)))
    normed, total = Stopped.apply(*add_rms_norm(x, added, weight, 1e-3))
    assert torch.autograd.grad((normed + total).sum(), (x, added, weight), allow_unused=True) == (None, None, None)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(
    "draw",
    [
        lambda out, seed: normal(*out.shape[::-1], seed=seed).permute(2, 1, 0),
        lambda out, seed: torch.tensor(1.0 + seed).expand(out.shape),
    ],
    ids=["transposed", "expanded"],
)
def test_gradients_of_any_strides_arrive(adds: bool, draw: Callable[[Tensor, int], Tensor]) -> None:
    x, added = normal(6, 3, 2).permute(2, 1, 0), normal(3, 2, 6, seed=1).transpose(0, 1)
    inputs = x, added if adds else None, normal(6, seed=2)
    found, exact = (outcome(f, *inputs, draw=draw) for f in (add_rms_norm, plain_add_rms_norm))
    assert_near(found, exact, torch.float32)


@pytest.mark.parametrize("adds", [True, False])
def test_one_kernel_each_way_and_nothing_beside_it(adds: bool) -> None:
    x, weight = normal(3, 8).requires_grad_(), normal(8, seed=1).requires_grad_()
    added = normal(3, 8, seed=2).requires_grad_() if adds else None
    grads = [normal(3, 8, seed=3), normal(3, 8, seed=4)]
    with launched() as names:
        outs = add_rms_norm(x, added, weight, 1e-6)
        torch.autograd.grad(outs, [x, weight, *([added] if added is not None else [])], grads)
    assert [name for name in names if name.startswith("d9d_triton")] == [
        "d9d_triton.add_rms_norm", "d9d_triton.rms_norm_backward"
    ]  # fmt: skip
    assert not {name for name in names if name.startswith(("aten.add", "aten.clone", "aten.copy", "aten.mul"))}


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (((3, 64), (3, 64), (4,)), r"\[3, 64\], \[3, 64\], \[4\]; they must have"),
        (((3, 4), (4,), (4,)), r"\[3, 4\], \[4\], \[4\]; they must have"),
        (((3, 64), None, (4,)), r"\[3, 64\], \[4\]; they must have"),
    ],
)
def test_other_shapes_are_an_error(shapes: tuple[tuple[int, ...] | None, ...], text: str) -> None:
    inputs = [None if shape is None else normal(*shape) for shape in shapes]
    with pytest.raises(ValueError, match=rf"add_rms_norm.triton: .* {text}"):
        add_rms_norm(*inputs, 1e-6)  # type: ignore[arg-type]


def test_what_would_lose_bits_is_refused() -> None:
    with pytest.raises(TypeError, match=r"add_rms_norm.triton: added is torch.float64"):
        add_rms_norm(normal(3, 4), normal(3, 4).double(), normal(4), 1e-6)


def test_a_gradient_of_the_gradient_is_an_error() -> None:
    x, weight = normal(3, 4).requires_grad_(), normal(4, seed=1)
    (grad,) = torch.autograd.grad(add_rms_norm(x, None, weight, 1e-6)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="rms_norm_backward"):
        grad.sum().backward()


@pytest.mark.full
@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (add_and_normalise, (normal(3, 8), normal(3, 8, seed=1), normal(8, seed=2), 1e-6, None)),
        (add_and_normalise, (normal(8, 3).T, None, normal(8, seed=2), 1e-6, torch.bfloat16)),
        (
            rms_norm_backward,
            (normal(3, 8), normal(3, 8, seed=1), normal(8), 1e-6, True, True, normal(8, 3, seed=2).T),
        ),
    ],
    ids=["sum", "no sum", "backward"],
)
@pytest.mark.filterwarnings("ignore")  # of torch's own tools
def test_custom_ops_keep_torchs_rules(op: Any, arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(op.differentiable, arguments)


@pytest.mark.thorough
@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
def test_a_compiler_keeps_it_in_one_graph_and_adds_no_gradients(dtype: torch.dtype) -> None:
    norms = [RMSNorm(8, eps=1e-6, residual=True).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.add_rms_norm.bind("triton", add_rms_norm)

    def block(x: Tensor) -> Tensor:
        normed, x = norms[0].branch(x)
        normed, x = norms[1].branch(x, normed.sin())
        return x + normed.cos()

    graphs: list[list[str]] = []

    def noted(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    found = []
    for function in (block, torch.compile(block, backend=aot_autograd(fw_compiler=noted), fullgraph=True)):
        x = normal(3, 8, dtype=dtype).requires_grad_()
        for norm in norms:
            norm.weight.grad = None
        out = function(x)
        out.backward(normal(3, 8, seed=1, dtype=dtype))
        found.append([out, x.grad, *(norm.weight.grad for norm in norms)])
    for compiled, written in zip(*found, strict=True):
        assert torch.equal(compiled, written)
    ahead, back = graphs
    assert sum("d9d_triton.add_rms_norm" in name for name in ahead) == 2
    assert sum("d9d_triton.rms_norm_backward" in name for name in back) == 2
    assert not [name for name in back if name.startswith(("aten.add", "aten.clone"))]
