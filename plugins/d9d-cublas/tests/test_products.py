"""Products of a device: choices that are looked up, measured, kept and left to torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_cublas import device
from d9d_cublas.choices import Choice, Key, read, write
from d9d_cublas.problem import LAYOUTS, Problem, Settings, fits, shape_of
from d9d_cublas.products import Products, rows_gradient, weight_gradient
from d9d_cublas.tuning import Tuner
from torch import Tensor

FAST = Settings(66, tile=36)
Opened = Callable[..., Any]


def operands(layout: str, rows: int = 5, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Operands of T rows, N 24 and K 16, in bfloat16."""
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(shape).mul(scale).bfloat16() for shape in ((rows, 16), (24, 16), (rows, 24)))
    return {"forward": (x, weight), "rows_gradient": (grad, weight), "weight_gradient": (grad, x)}[layout]


def computed(products: Any, layout: str, first: Tensor, second: Tensor) -> Tensor:
    out = torch.full(shape_of(layout, first, second), torch.nan, dtype=first.dtype)
    products.multiply(layout, first, second, out)
    return out


def exact(layout: str, first: Tensor, second: Tensor) -> Tensor:
    left, right = (
        t.double().T if turn else t.double() for t, turn in zip((first, second), LAYOUTS[layout], strict=True)
    )
    return left @ right


def near(found: Tensor, expected: Tensor) -> bool:
    return bool((found.double() - expected).norm() <= 1e-2 * expected.norm())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_algorithm_that_is_faster_is_taken_and_computes_the_product(
    opened: Opened, library: Any, layout: str
) -> None:
    products, pair = opened(), operands(layout)
    computed(products, layout, *pair)
    library.ran.clear()
    assert near(computed(products, layout, *pair), exact(layout, *pair))
    assert [number for _, number in library.ran] == [66]


def test_a_product_is_measured_once(opened: Opened, clock: Any) -> None:
    products = opened()
    for _ in range(3):
        computed(products, "forward", *operands("forward"))
    assert clock.calls == 3
    computed(products, "forward", *operands("forward", rows=7))
    assert clock.calls == 6


def test_the_next_process_takes_what_was_chosen_without_measuring(opened: Opened, clock: Any, library: Any) -> None:
    computed(opened(), "forward", *operands("forward"))
    calls = clock.calls
    library.ran.clear()
    computed(opened(), "forward", *operands("forward"))
    assert clock.calls == calls
    assert [number for _, number in library.ran] == [66]


def test_a_process_that_measured_otherwise_adopts_what_was_recorded_first(
    opened: Opened, clock: Any, library: Any
) -> None:
    class Meanwhile(type(clock)):
        """Clock during whose work another process records its choice."""

        def __call__(self, runs: Any, repetitions: Any) -> list[float]:
            computed(opened(), "forward", *operands("forward"))
            return super().__call__(runs, repetitions)

    late = opened(tuner=Tuner(Meanwhile(library, {66: 1.5, 67: 0.5})))
    computed(late, "forward", *operands("forward"))
    library.ran.clear()
    computed(late, "forward", *operands("forward"))
    assert [number for _, number in library.ran] == [66]


def test_an_algorithm_with_wrong_results_is_never_taken(opened: Opened, library: Any) -> None:
    library.wrong = (66,)
    products, pair = opened(), operands("forward")
    computed(products, "forward", *pair)
    library.ran.clear()
    assert near(computed(products, "forward", *pair), exact("forward", *pair))
    assert library.ran == []


def test_a_library_that_lists_nothing_leaves_the_product_to_torch(opened: Opened, library: Any) -> None:
    library.offered = ()
    assert near(computed(opened(), "forward", *operands("forward")), exact("forward", *operands("forward")))
    assert library.ran == []


def test_an_algorithm_that_the_library_has_no_more_leaves_the_product_to_torch(opened: Opened, library: Any) -> None:
    computed(opened(), "forward", *operands("forward"))
    library.offered = ()
    library.ran.clear()
    assert near(computed(opened(), "forward", *operands("forward")), exact("forward", *operands("forward")))
    assert library.ran == []


def test_choices_of_another_version_are_measured_again(opened: Opened, clock: Any, library: Any) -> None:
    computed(opened(), "forward", *operands("forward"))
    library.version += 1
    calls = clock.calls
    computed(opened(), "forward", *operands("forward"))
    assert clock.calls > calls


def test_nothing_is_measured_while_a_graph_is_captured_but_afterwards(opened: Opened, clock: Any, library: Any) -> None:
    capturing = True
    products = opened(capturing=lambda: capturing)
    assert near(computed(products, "forward", *operands("forward")), exact("forward", *operands("forward")))
    assert (clock.calls, library.ran) == (0, [])
    capturing = False
    computed(products, "forward", *operands("forward"))
    assert clock.calls > 0
    capturing = True
    library.ran.clear()
    computed(products, "forward", *operands("forward"))
    assert [number for _, number in library.ran] == [66]


def test_a_captured_graph_gets_choices_of_before(opened: Opened, library: Any) -> None:
    computed(opened(), "forward", *operands("forward"))
    library.ran.clear()
    computed(opened(capturing=lambda: True), "forward", *operands("forward"))
    assert [number for _, number in library.ran] == [66]


def test_a_small_product_is_torchs(opened: Opened, clock: Any, library: Any) -> None:
    computed(opened(smallest=2 * 5 * 24 * 16 + 1), "forward", *operands("forward"))
    assert (clock.calls, library.ran) == (0, [])
    computed(opened(smallest=2 * 5 * 24 * 16), "forward", *operands("forward"))
    assert clock.calls > 0


@pytest.mark.parametrize("scale", [0.0, float("inf")])
def test_zeros_and_what_is_not_finite_decide_nothing(opened: Opened, clock: Any, tmp_path: Path, scale: float) -> None:
    products = opened()
    computed(products, "forward", *operands("forward", scale=scale))
    assert clock.calls == 0
    assert not (tmp_path / "cublas.json").exists()
    computed(products, "forward", *operands("forward"))
    assert clock.calls > 0


def test_rows_that_change_with_each_step_are_not_measured_for_ever(opened: Opened, clock: Any) -> None:
    products = opened()
    for rows in range(1, 80):
        computed(products, "forward", *operands("forward", rows=rows))
    assert clock.calls == 3 * 64


def test_eight_algorithms_are_asked_for(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    products, asked = opened(), list[int]()
    listed = products._library.listed

    def counted(description: Any, count: int) -> Any:
        asked.append(count)
        return listed(description, count)

    monkeypatch.setattr(products._library, "listed", counted)
    computed(products, "forward", *operands("forward"))
    assert asked == [8]


def test_without_memory_for_a_trial_the_product_is_torchs(
    opened: Opened, clock: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError

    products = opened()
    monkeypatch.setattr("torch.empty_like", refuse)
    assert near(computed(products, "forward", *operands("forward")), exact("forward", *operands("forward")))
    assert not (tmp_path / "cublas.json").exists()


def test_deterministic_runs_take_choices_of_the_package_only(
    opened: Opened, clock: Any, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed(opened(), "forward", *operands("forward"))
    calls, shipped = clock.calls, tmp_path / "shipped.json"
    write(shipped, {Key("chip", 130100, Problem("forward", 5, 24, 16, "bfloat16")): Choice(library.offered[1])})
    library.ran.clear()
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: True)
    computed(opened(), "forward", *operands("forward"))
    assert library.ran == []
    computed(opened(shipped=shipped), "forward", *operands("forward"))
    assert [number for _, number in library.ran] == [67]
    assert clock.calls == calls


def test_choices_are_written_down_with_what_was_measured(opened: Opened, tmp_path: Path) -> None:
    computed(opened(), "forward", *operands("forward"))
    key = Key("chip", 130100, Problem("forward", 5, 24, 16, "bfloat16"))
    assert read(tmp_path / "cublas.json") == {key: Choice(FAST, (1.0, 0.9))}


def test_only_aligned_rows_of_half_precision_fit() -> None:
    x = torch.zeros(6, 32).bfloat16()
    assert fits(x, x)
    assert fits(x[:, 8:24], x[::2])
    misfits = (
        x.float(),
        x.half(),
        x[:, :12],
        x[:, 1:9],
        x.T,
        x[:0],
        x[:, ::2],
        x[:1].expand(6, 32),
        x.flatten()[4:132].view(4, 32),
    )
    assert [number for number, other in enumerate(misfits) if fits(x, other)] == []


def test_what_does_not_fit_is_multiplied_by_torch() -> None:
    products = Products(lambda device: pytest.fail("is not asked"))
    first, second = operands("forward")
    strided = torch.stack([first, first], -1).flatten(1)[:, ::2]
    for pair in ((first.float(), second.float()), (strided, second), (first[:, :15], second[:, :15])):
        assert near(products.multiply("forward", *pair), exact("forward", *pair))
    assert products.multiply("weight_gradient", first.new_empty(0, 24), first[:0]).equal(torch.zeros(24, 16).bfloat16())


def test_a_device_is_opened_once() -> None:
    asked: list[torch.device] = []
    products = Products(asked.append)
    for _ in range(2):
        products.multiply("forward", *operands("forward"))
    assert asked == [torch.device("cpu")]


def test_no_device_is_opened_while_a_graph_is_captured() -> None:
    products = Products(lambda device: pytest.fail("allocates memory"), capturing=lambda: True)
    assert near(products.multiply("forward", *operands("forward")), exact("forward", *operands("forward")))


@pytest.mark.thorough
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize(("op", "layout"), [(rows_gradient, "rows_gradient"), (weight_gradient, "weight_gradient")])
def test_ops_keep_the_rules_of_custom_ops(op: Any, layout: str) -> None:
    pair = operands(layout)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.overload, pair, test_utils=checks)


def test_eight_algorithms_are_measured_at_most(opened: Opened, library: Any) -> None:
    library.offered = [Settings(number) for number in (66, 67, *range(10, 20))]
    library.wrong = range(10, 20)
    computed(opened(), "forward", *operands("forward"))
    tried = [number for _, number in library.ran]
    assert sorted(set(tried)) == [10, 11, 12, 13, 14, 15, 66, 67]


def test_a_product_of_20_gflop_is_measured_and_a_smaller_one_is_not(opened: Opened) -> None:
    products = opened(smallest=device._SMALLEST)
    assert products._find(Problem("forward", 10_000, 1000, 1000, "bfloat16")) is None
    assert products._find(Problem("forward", 9999, 1000, 1000, "bfloat16")) == Choice(None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_problem_has_the_sizes_of_its_operands(layout: str) -> None:
    first, second = operands(layout)
    problem = Problem.of(layout, first, second)
    rows = {"forward": 5, "rows_gradient": 5, "weight_gradient": 5}[layout]
    assert problem == Problem(layout, rows, 24, 16, "bfloat16")
    assert problem.operations == 2 * 5 * 24 * 16
