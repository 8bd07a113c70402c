"""Products that overlap with the exchange of positions: they are those that wait for it, with every gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.deferral import Deferral, DeferredWeights
from d9d_parallel.ranks import Ranks
from d9d_parallel.tensor_parallel import micro_pipeline, symmetric_memory
from d9d_parallel.tensor_parallel.async_products import AsyncProducts
from d9d_parallel.tensor_parallel.collectives import gather, scatter_sum
from d9d_testing.world import RankFailedError, World
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

HIDDEN, INSIDE = 8, 4
Columns = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]
Row = Callable[[Tensor, Tensor], Tensor]


def ranks() -> Ranks:
    assert dist.group.WORLD is not None
    return Ranks(dist.group.WORLD)


def drawn(*shape: int, dtype: torch.dtype, seed: int, grad: bool = True, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(17 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_(grad)


def one_after_the_other() -> tuple[Columns, Row]:
    def columns(rows: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        whole = gather(rows, ranks(), summed=True)
        return whole, [functional.linear(whole, weight) for weight in weights]

    return columns, lambda rows, weight: scatter_sum(functional.linear(rows, weight), ranks())


def overlapped(
    deferral: Deferral | None = None, *, symmetric: bool = False, in_graphs: bool = False
) -> tuple[Columns, Row]:
    products = AsyncProducts(ranks(), symmetric=symmetric, in_graphs=in_graphs)

    def columns(rows: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        return products.columns(rows, weights, [deferral] * len(weights))

    return columns, lambda rows, weight: products.row(rows, weight, deferral)


def results(made: tuple[Columns, Row], case: dict[str, Any], left: DeferredWeights | None = None) -> list[Tensor]:
    """Outputs and gradients of a layer of two column-wise products and a row-wise one, of which some may be left."""
    columns, row = made
    samples, positions, dtype, device = case["samples"], case["positions"], case["dtype"], case.get("device", "cpu")
    trained = not case.get("frozen", False)
    own = (samples, positions, HIDDEN)
    rows = drawn(*own, dtype=dtype, seed=1, grad=case.get("grad", True), device=device)
    first = drawn(INSIDE, HIDDEN, dtype=dtype, seed=2, device=device)
    second = drawn(INSIDE, HIDDEN, dtype=dtype, seed=3, grad=trained, device=device)
    last = drawn(HIDDEN, INSIDE, dtype=dtype, seed=4, grad=trained, device=device)

    def layer(rows: Tensor) -> tuple[Tensor, Tensor]:
        whole, (one, other) = columns(rows, [first, second])
        # Low-rank terms read the rows, too.
        return whole, row(one.tanh() * other + (whole[..., :INSIDE] if case.get("read", False) else 0), last)

    if case.get("checkpointed", False):
        layer = partial(checkpoint, layer, use_reentrant=False)
    if case.get("compiled", False):
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, torch.bfloat16, enabled=case.get("autocast", False)):
        whole, out = layer(rows)
    out.backward(drawn(*out.shape, dtype=out.dtype, seed=5, grad=False, device=device))
    if left is not None:
        assert len(left) == (1 if case.get("frozen", False) else 3)
        left.run()
    return [whole, out, *(one.grad for one in (rows, first, second, last) if one.requires_grad)]


def assert_near(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare numbers of float32 one by one, and numbers of bfloat16 as a whole: sums round them in another order."""
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        if all(tensor.dtype == torch.float32 for tensor in expected):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        else:
            assert (one.double() - other.double()).norm() <= 0.02 * other.double().norm()


def same(case: dict[str, Any]) -> None:
    assert_near(results(overlapped(), case), results(one_after_the_other(), case))


class WithoutGradient(torch.autograd.Function):
    """Zeros that hand no gradient back."""

    @staticmethod
    def forward(_ctx: Any, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows)

    @staticmethod
    def backward(_ctx: Any, _grad: Tensor) -> None:
        return None


def unusual_gradients(samples: int) -> None:
    rows = drawn(samples, 3, HIDDEN, dtype=torch.float32, seed=1)
    weight = drawn(INSIDE, HIDDEN, dtype=torch.float32, seed=2)
    columns, _ = overlapped()
    whole, (out,) = columns(rows, [weight])
    WithoutGradient.apply(out).sum().backward()
    assert (rows.grad, weight.grad) == (None, None)
    whole, _ = columns(rows, [weight])
    whole.sum().backward()  # one number with strides of zero
    assert rows.grad is not None
    assert rows.grad.eq(ranks().size).all()


@pytest.mark.thorough
@pytest.mark.parametrize("samples", [1, 3])
def test_column_products_take_a_gradient_of_the_rows_alone_and_none_at_all(samples: int) -> None:
    World(2).run(unusual_gradients, samples)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_products_and_gradients_are_those_of_one_after_the_other(size: int, samples: int, dtype: torch.dtype) -> None:
    World(size).run(same, {"samples": samples, "positions": 3, "dtype": dtype})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        {"frozen": True},
        {"grad": False},
        {"read": True},
        {"checkpointed": True},
        {"autocast": True},
        {"compiled": True},
        {"positions": 1},
    ],
    ids=lambda case: next(iter(case)),
)
@pytest.mark.parametrize("samples", [1, pytest.param(2, marks=pytest.mark.full)])
def test_they_are_so_in_every_kind_of_job(samples: int, case: dict[str, Any]) -> None:
    World(2).run(same, {"samples": samples, "positions": 4, "dtype": torch.float32, **case})


def on_gpus(symmetric: bool) -> bool:
    """Compare on this rank's GPU; return whether GPUs reach each other's memory."""
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    usable = symmetric_memory.is_usable(ranks(), device)
    for samples, dtype in ((1, torch.bfloat16), (3, torch.bfloat16), (2, torch.float32)):
        case = {"samples": samples, "positions": 64, "dtype": dtype, "device": "cuda"}
        found = results(overlapped(symmetric=symmetric and usable), case)
        assert_near(found, results(one_after_the_other(), case))
    return usable


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("symmetric", [True, False])
def test_gpus_compute_the_same(symmetric: bool) -> None:
    usable = World(2, timeout=120.0, backend="cpu:gloo,cuda:nccl").run(on_gpus, symmetric)
    assert usable[0] == usable[1]


def fallbacks(calls: list[str]) -> dict[str, Callable[..., Any]]:
    """Torch's own fallbacks of the fused operators, which note their names."""
    import torch.distributed._symmetric_memory as symmetric

    def noted(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(name)
            return getattr(symmetric, f"_{name}_fallback")(*args)

        return call

    return {name: noted(name) for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")}


def fused(case: dict[str, Any]) -> int:
    """Number of fused operators that a layer and its backward call; torch's own fallbacks serve instead of a GPU."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "symm_mem", SimpleNamespace(**fallbacks(calls)))
        patch.setattr(torch.cuda, "current_stream", lambda _: case.get("stream", 0))
        patch.setattr(torch.cuda, "default_stream", lambda _: 0)
        found = results(overlapped(symmetric=True), case)
    assert_near(found, results(one_after_the_other(), case))
    assert all(one.is_contiguous() for one in found)
    return len(calls)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "calls"),
    [
        ({}, 4),
        ({"dtype": torch.bfloat16}, 4),
        ({"samples": 1}, 4),
        ({"read": True}, 3),  # what else reads the rows adds to their gradient part by part
        ({"autocast": True}, 2),  # rows that are cast are exchanged as they were
        pytest.param({"compiled": True}, 0, marks=pytest.mark.full),
        ({"stream": 1}, 0),
    ],
    ids=str,
)
def test_operators_that_fuse_exchange_and_product_serve_what_they_can(case: dict[str, Any], calls: int) -> None:
    full = {"samples": 2, "positions": 4, "dtype": torch.float32, **case}
    assert World(2).run(fused, full) == [calls, calls]


def fused_in_a_graph() -> None:
    """Compare a compiled layer whose graph has the fused operators; torch's own fallbacks serve instead of a GPU."""
    library = torch.library.Library("symm_mem", "IMPL")
    calls: list[str] = []
    for name, function in fallbacks(calls).items():
        library.impl(name, function, "CPU")
    case = {"samples": 2, "positions": 4, "dtype": torch.float32, "compiled": True}
    found = results(overlapped(symmetric=True, in_graphs=True), case)
    assert_near(found, results(one_after_the_other(), case))
    assert len(calls) == 3  # no other op reads the rows, except in a graph that has a gradient: zeros


@pytest.mark.full
def test_a_compiled_graph_has_the_fused_operators_where_nothing_runs_beside_it() -> None:
    World(2).run(fused_in_a_graph)


def deferred() -> None:
    for extra in ({}, {"grad": False}, {"frozen": True}):
        case = {"samples": 2, "positions": 2, "dtype": torch.float32, **extra}
        deferral = Deferral()
        with deferral.collect() as left:
            found = results(overlapped(deferral), case, left)
        assert_near(found, results(one_after_the_other(), case))


def test_weight_gradients_come_later_where_a_pipeline_asks_for_it() -> None:
    World(2).run(deferred)


def order(checkpointed: bool) -> list[str]:
    """Starts and ends of exchanges, and products, of a layer and its backward."""
    events: list[str] = []
    exchange, multiply = dist.all_to_all_single, torch.Tensor.mm

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            events.append("wait")
            self.work.wait()

    def started(*args: Any, **kwargs: Any) -> Watched:
        events.append("start")
        return Watched(exchange(*args, **kwargs))

    def noted(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            events.append("product")
            return of(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_pipeline, "dist", SimpleNamespace(all_to_all_single=started))
        patch.setattr(torch, "mm", noted(torch.mm))
        patch.setattr(torch, "addmm", noted(torch.addmm))
        patch.setattr(torch.Tensor, "mm", noted(multiply))
        results(overlapped(), {"samples": 1, "positions": 2, "dtype": torch.float32, "checkpointed": checkpointed})
    return events


@pytest.mark.thorough
def test_products_run_while_parts_travel() -> None:
    """Two columns forward, a row forward; then the backward of the row, and the backward of the columns."""
    column = ["start", "product", "product", "wait", "product", "product"]
    row = ["product", "start", "product", "wait"]
    of_row = ["start", "product", "wait", "product", "product"]  # the last one is the weight's
    of_columns = ["product", "product", "start", *["product"] * 4, "wait"]  # its own part, and two weights
    backward = of_row + of_columns
    assert World(2).run(order, False)[0] == column + row + backward
    # A second forward needs the outputs of the columns, and nothing of the row.
    assert World(2).run(order, True)[0] == column + row + column + backward


def odd() -> None:
    products = AsyncProducts(ranks(), symmetric=False)
    products.row(torch.zeros(1, 3, 4), torch.zeros(2, 4), None)


def test_positions_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(RankFailedError, match="mesh.tp = 2 ranks, which does not divide the 3 positions"):
        World(2).run(odd)


def usable_without_gpus() -> bool:
    products = AsyncProducts(ranks(), symmetric=False)
    assert deepcopy(products).ranks is products.ranks
    return symmetric_memory.is_usable(ranks(), torch.device("cpu"))


def test_symmetric_memory_is_of_gpus_alone() -> None:
    assert World(2).run(usable_without_gpus) == [False, False]


def machines(number: int) -> list[bool]:
    """Whether ranks are on one machine; the last one is elsewhere if the number is not its own."""
    here = number if dist.get_rank() == dist.get_world_size() - 1 else 7
    same_machine = symmetric_memory._same_on_all
    return [same_machine(here, ranks(), torch.device("cpu")), symmetric_memory._node() > 0]


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "same_machine"), [(7, True), (8, False), (6, False)])
def test_all_ranks_agree_whether_they_are_on_one_machine(number: int, same_machine: bool) -> None:
    assert World(3).run(machines, number) == [[same_machine, True]] * 3


def test_torch_has_what_is_used_of_its_private_modules() -> None:
    """Fails when a version of torch changes it; then change symmetric_memory.py or micro_pipeline.py."""
    import torch.distributed._symmetric_memory as symmetric

    gathers = torch.ops.symm_mem.fused_all_gather_matmul.default._schema
    assert [argument.name for argument in gathers.arguments] == ["A", "Bs", "gather_dim", "group_name", "return_A"]
    assert gathers.arguments[-1].default_value is True  # without the rows, it may use multicast
    scatters = torch.ops.symm_mem.fused_matmul_reduce_scatter.default._schema
    assert [argument.name for argument in scatters.arguments][:5] == [
        "A", "B", "reduce_op", "scatter_dim", "group_name",
    ]  # fmt: skip
    assert all(argument.has_default_value() for argument in scatters.arguments[5:])
    assert list(inspect.signature(symmetric.rendezvous).parameters)[:2] == ["tensor", "group"]
    assert list(inspect.signature(symmetric.is_symm_mem_enabled_for_group).parameters) == ["group_name"]
    swaps = torch.ops._c10d_functional.all_to_all_single.default._schema
    assert [argument.name for argument in swaps.arguments] == [
        "input", "output_split_sizes", "input_split_sizes", "group_name",
    ]  # fmt: skip
    assert len(torch.ops._c10d_functional.wait_tensor.default._schema.arguments) == 1
