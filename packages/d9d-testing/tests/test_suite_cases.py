"""Cases and comparisons of the suites of dispatchers, kernels, optimizers and datasets, without an implementation."""

from __future__ import annotations

import inspect
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_engine.distributed.simulate import simulated_world
from d9d_testing.hostile.judge import Judge
from d9d_testing.hostile.values import edited_job
from d9d_testing.suites import metric
from d9d_testing.suites.kernel import KernelSuite, _strided
from d9d_testing.suites.support import dataset_ranks, optimizer_ranks
from d9d_testing.suites.support.calls import Call
from d9d_testing.tolerances import Tolerance, assert_close_gradients
from hypothesis import find, settings
from torch import Tensor

# --- dispatchers


def dispatcher_module() -> Any:
    pytest.importorskip("d9d_moe", reason="the suite is for plugins that build on d9d-moe")
    from d9d_testing.suites.moe import dispatcher

    return dispatcher


def test_corner_cases_of_routing_on_two_ranks() -> None:
    cases = dispatcher_module()._corners(2)
    chosen = {name: [rows.tolist() for rows in case.indices] for name, case in cases.items()}
    shapes = {name: [tuple(rows.shape) for rows in case.indices] for name, case in cases.items()}
    assert {name: case.experts for name, case in cases.items() if case.experts != 4} == {"one expert for each rank": 2}
    assert chosen["all tokens to one expert"] == [[[3, 3]] * 5, []]
    assert chosen["no token leaves its rank"] == [[[0]] * 4, [[2]] * 4]
    assert chosen["one token in all"] == [[[0, 1]], []]
    assert shapes["no token at all"] == [(0, 2), (0, 2)]
    assert chosen["all experts for each token"] == [[[0, 1, 2, 3]] * 5, []]
    assert (shapes["spread"], shapes["one expert for each rank"]) == ([(5, 3), (0, 3)], [(5, 4), (0, 4)])
    assert shapes["some rows are dropped"] == [(6, 3), (6, 3)]
    padded = [[3 * [4] if token % 3 == 1 else row for token, row in enumerate(chosen["spread"][0])], []]
    assert chosen["some tokens are padding"] == padded
    assert chosen["all tokens are padding"] == [[[4] * 3] * 5, []]
    assert chosen["all but one are dropped"] == [[[0, 4, 4], *[[4] * 3] * 5]] * 2
    assert (shapes["no row is dropped"], shapes["no token and a limit"]) == ([(6, 2)] * 2, [(0, 2)] * 2)
    assert {name: case.limit for name, case in cases.items() if case.limit is not None} == {
        "some rows are dropped": 2, "padding and a limit": 2, "no row is dropped": 100, "no token and a limit": 3,
        "all but one are dropped": 1, "dropped and computed again": 2,
    }  # fmt: skip
    everything = ("tokens", "weights", "bank")
    assert {name: case.learns for name, case in cases.items() if case.learns != everything} == {
        "only experts learn": ("bank",), "only tokens learn": ("tokens",), "only weights learn": ("weights",),
        "no gradients at all": (),
    }  # fmt: skip
    assert [name for name, case in cases.items() if case.checkpointed] == [
        "computed again",
        "dropped and computed again",
    ]
    assert [name for name, case in cases.items() if case.interleaved] == [
        "another microbatch between dispatch and combine"
    ]
    assert [len(rows) for rows in dispatcher_module()._corners(4)["spread"].indices] == [5, 0, 9, 1]


def test_rows_over_the_limit_of_an_expert_are_dropped_rank_by_rank() -> None:
    limited = dispatcher_module()._limited
    rows = [torch.tensor([[0, 1], [0, 0], [1, 0]]), torch.tensor([[0, 0]])]
    assert [kept.tolist() for kept in limited(rows, 2, 2).indices] == [[[0, 1], [0, 2], [1, 2]], [[0, 0]]]
    assert [kept.tolist() for kept in limited(rows, 2, 1).indices] == [[[0, 1], [2, 2], [2, 2]], [[0, 2]]]
    assert limited(rows, 2, None).indices is rows


def test_drawn_experts_are_among_the_favourites_and_depend_on_the_seed() -> None:
    drawn = dispatcher_module()._drawn
    first, again, other = (drawn(2, 8, 3, (30, 2), None, (5, 2), seed).indices for seed in (1, 1, 2))
    assert [tuple(rows.shape) for rows in first] == [(30, 3), (2, 3)]
    assert set(first[0].flatten().tolist()) == {2, 5}
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert set(drawn(1, 4, 3, (30,)).indices[0].flatten().tolist()) == {0, 1, 2, 3}


# --- kernels


def kernel_suite(run: Any, exact: Tensor, reference: Tensor | None = None) -> Any:
    """Suite of a kernel with one call, whose output is given."""
    call, signature = Call("a call", {"x": exact}, {}), OpSignature("op", "cpu", "float32", {})
    values = {
        "accepted": lambda _suite, **_: iter([("float32, a call", signature, call)]),
        "run": lambda *_, **__: {"out": run},
        "exact": lambda *_, **__: {"out": exact},
        "reference": lambda *_, **__: {"out": exact.float() if reference is None else reference},
        "tolerances": {torch.float32: Tolerance(rtol=0.0, atol=0.01, angle=0.01, norm=0.01)},
    }
    return type("Suite", (KernelSuite,), values)()


@pytest.mark.parametrize(
    ("expected", "off", "passes"),
    [([0.1, 0.2], 0.009, True), ([0.1, 0.2], 0.011, False), ([-0.1, 50.0], 0.4, True), ([0.1, -50.0], 0.6, False)],
)
def test_tolerances_of_values_grow_with_the_largest_one(expected: list[float], off: float, passes: bool) -> None:
    exact = torch.tensor(expected, dtype=torch.float64)
    found = exact.float() + torch.tensor([off, 0.0])
    if passes:
        kernel_suite(found, exact).test_values_are_those_of_the_reference()
    else:
        with pytest.raises(AssertionError, match="float32, a call"):
            kernel_suite(found, exact).test_values_are_those_of_the_reference()


def test_outputs_of_another_shape_or_dtype_are_named() -> None:
    exact = torch.zeros(2, 0, dtype=torch.float64)
    kernel_suite(torch.zeros(2, 0), exact).test_values_are_those_of_the_reference()
    for found, said in ((torch.zeros(1, 0), r"\(1, 0\) torch.float32"), (exact, r"\(2, 0\) torch.float64")):
        with pytest.raises(AssertionError, match=f"the output is {said}, the reference's .2, 0. torch.float32"):
            kernel_suite(found, exact).test_values_are_those_of_the_reference()


def test_inputs_that_are_numbers_and_no_constants_are_differentiated() -> None:
    inputs = {"x": torch.ones(2), "cos": torch.ones(2), "index": torch.ones(2, dtype=torch.int64)}
    suite = kernel_suite(None, torch.ones(1))
    assert suite.differentiable(Call("a call", inputs, {}, constants=("cos",))) == ["x"]
    assert suite.differentiable(Call("a call", inputs, {})) == ["x", "cos"]


@pytest.mark.parametrize(
    ("largest", "gradient", "rounding"),
    [(0.5, 1e-9, True), (0.5, 1.1e-9, False), (-20.0, 2e-8, True), (20.0, 3e-8, False)],
)
def test_tiny_gradients_are_rounding_relative_to_the_largest_input(
    largest: float, gradient: float, rounding: bool
) -> None:
    call = Call("a call", {"x": torch.tensor([0.1, largest]), "none": torch.zeros(0)}, {})
    found = torch.tensor([0.0, -gradient], dtype=torch.float64)
    assert kernel_suite(None, torch.ones(1)).is_rounding(found, call) is rounding


def test_a_strided_copy_uses_every_second_element() -> None:
    x = torch.arange(6.0).view(2, 3)
    view = _strided(x)
    assert torch.equal(view, x)
    assert (view.stride(), view.dtype) == ((6, 2), x.dtype)
    assert view._base is not None
    assert view._base[:, 1::2].tolist() == [[-1.0] * 3] * 2


# --- optimizers and datasets


class Descent:
    """Gradient descent with momentum on shards; may ignore the gate."""

    def __init__(self, parameters: Any, gated: bool) -> None:
        self._parameters, self._gated = parameters, gated

    def init_state(self) -> None:
        self._momentum = {name: torch.zeros_like(p.detach()) for name, p in self._parameters.items()}

    def state(self) -> dict[str, Tensor]:
        return {f"{name}/momentum": tensor for name, tensor in self._momentum.items()}

    @torch.no_grad()
    def step(self, gate: Tensor) -> None:
        if self._gated and not gate:
            return
        for name, parameter in self._parameters.items():
            self._momentum[name].add_(parameter.grad)
            parameter.sub_(self._momentum[name])


@pytest.mark.thorough
@pytest.mark.parametrize("gated", [True, False])
def test_optimizers_step_on_shards_as_on_whole_tensors(monkeypatch: pytest.MonkeyPatch, gated: bool) -> None:
    def build(*given: Any) -> Descent:
        return Descent(given[-1], gated)

    monkeypatch.setattr(optimizer_ranks, "build_component", build)
    shapes = {"a": (2, 3), "b": (4,)}
    with simulated_world(1):
        found = optimizer_ranks.sharded_steps(["optimizer"], shapes, "float32")
    assert found["refused"] == ([] if gated else ["a", "a/momentum", "b", "b/momentum"])
    assert {name: tensor.tolist() for name, tensor in found["start"].items()} == {
        "a/momentum": [[0.0] * 3] * 2, "b/momentum": [0.0] * 4,
    }  # fmt: skip
    assert found["facts"] == {
        "a": [[2, 3], "torch.float32"], "b": [[4], "torch.float32"],
        "a/momentum": [[2, 3], "torch.float32"], "b/momentum": [[4], "torch.float32"],
    }  # fmt: skip
    whole: Any = optimizer_ranks.draw_parameters(shapes, "float32")
    reference = Descent(whole, gated=True)
    reference.init_state()
    if not gated:
        optimizer_ranks.stepped(reference, whole, [50], "cpu")
    optimizer_ranks.stepped(reference, whole, [0, 1], "cpu")
    for name, parameter in whole.items():
        torch.testing.assert_close(found["parameters"][name], parameter.detach())


@pytest.mark.parametrize("closes", [True, False])
def test_packs_of_another_process_are_copies_and_the_stream_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closes: bool
) -> None:
    shared, closed = torch.zeros(2), list[bool]()

    def next_pack() -> Any:
        shared.add_(1)
        return [{"x": shared}, {"x": shared, "y": shared}]

    stream = SimpleNamespace(next_pack=next_pack, **({"close": lambda: closed.append(True)} if closes else {}))
    contexts: list[Any] = []
    monkeypatch.setattr(dataset_ranks, "build_component", lambda *given: contexts.append(given) or stream)
    monkeypatch.setattr(dataset_ranks, "DataContext", lambda **facts: facts)
    found = dataset_ranks.packs(["dataset"], {"seed": 3}, str(tmp_path), 2)
    assert [[{name: x.tolist() for name, x in batch.items()} for batch in pack] for pack in found] == [
        [{"x": [value] * 2}, {"x": [value] * 2, "y": [value] * 2}] for value in (1.0, 2.0)
    ]
    assert contexts == [("dataset", {"seed": 3, "cache_dir": tmp_path})]
    assert closed == [True] * closes


# --- comparisons and hostile values


def test_gradients_that_differ_most_relative_to_their_limit_come_first() -> None:
    within = Tolerance(rtol=0, atol=0, angle=0.5, norm=0.01)
    east = torch.tensor([1.0, 0.0])
    found = {
        "turned": torch.tensor([-1.0, 0.0]),
        "longer": 1.05 * east,
        "fine": east,
        "lost": torch.tensor([torch.nan, 1]),
    }
    with pytest.raises(AssertionError) as caught:
        assert_close_gradients(found, dict.fromkeys(found, east), within)
    first, *lines = str(caught.value).splitlines()
    assert first == "3 of 4 gradients differ, worst first:"
    # 1-cos 2 is 4 times its limit of 0.5, a norm off by 0.05 / 1.05 is 4.76 times its limit of 0.01.
    assert [line.split(":")[0].strip() for line in lines] == ["lost", "longer", "turned"]
    assert lines[1:] == [
        "  longer: 1-cos 0.00e+00 (allowed 5e-01), norm off by 4.76e-02 (1e-02)",
        "  turned: 1-cos 2.00e+00 (allowed 5e-01), norm off by 0.00e+00 (1e-02)",
    ]
    many = {f"w{number:02}": -east for number in range(12)}
    with pytest.raises(AssertionError) as caught:
        assert_close_gradients(many, dict.fromkeys(many, east), within)
    assert len(str(caught.value).splitlines()) == 11


def test_readers_have_ten_seconds() -> None:
    assert inspect.signature(Judge).parameters["seconds"].default == 10


def test_drawn_sections_of_a_job_keep_the_other_fields() -> None:
    schema: Any = {"properties": {"run": {"type": "object", "properties": {"name": {"type": "string"}}}}}
    job = {"run": {"dir": "here"}, "steps": 3}

    def merged(values: Any) -> bool:
        return (
            isinstance(values, dict) and isinstance(values.get("run"), dict) and {"dir", "name"} <= values["run"].keys()
        )

    quick = settings(max_examples=500, database=None, derandomize=True)
    found = find(edited_job(job, schema), merged, settings=quick)
    assert (found["run"]["dir"], found["steps"]) == ("here", 3)
    assert job == {"run": {"dir": "here"}, "steps": 3}


# --- routers and metrics


@pytest.mark.parametrize(("top_groups", "passes"), [(1, False), (2, True)])
def test_groups_are_counted_for_the_token_with_the_most(top_groups: int, passes: bool) -> None:
    pytest.importorskip("d9d_moe", reason="the suite is for plugins that build on d9d-moe")
    from d9d_testing.suites.moe import router

    size = router._EXPERTS // 2
    rows = torch.tensor([[0, size - 1], [0, size], [0, router._EXPERTS]])  # the last token has a dropped row
    values = {
        "settings": {"a": {"groups": 2, "top_groups": top_groups}},
        "routers": lambda _suite: [("a", lambda _tokens: SimpleNamespace(indices=rows))],
    }
    suite: Any = type("Suite", (router.RouterSuite,), values)()
    if passes:
        suite.test_a_token_uses_few_groups()
    else:
        with pytest.raises(AssertionError, match="^a: a token uses 2 groups"):
            suite.test_a_token_uses_few_groups()


def test_neutral_values_of_extremes_are_the_limits_of_their_dtype() -> None:
    assert [metric._extreme(torch.int8, how) for how in ("max", "min")] == [-128, 127]
    assert [metric._extreme(torch.float16, how) for how in ("max", "min")] == [-65504.0, 65504.0]
    assert [metric._extreme(torch.bool, how) for how in ("max", "min")] == [0.0, 1.0]


def test_random_cuts_cover_all_samples_in_order() -> None:
    suite: Any = type("Suite", (metric.MetricSuite,), {"samples": 4})()
    counts = set()
    for seed in range(60):
        cuts = suite.cuts(Random(seed))
        assert (cuts[0].start, cuts[-1].stop) == (0, 4)
        assert all(cut.start < cut.stop for cut in cuts)
        assert all(cut.stop == after.start for cut, after in pairwise(cuts))
        counts.add(len(cuts))
    assert counts == {1, 2, 3}
