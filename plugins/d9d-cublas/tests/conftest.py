"""Stand-in of the library, on the CPU: as demanding as the library, and as fast as a test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_cublas import products
from d9d_cublas.binding import LibraryError
from d9d_cublas.choices import SHIPPED, Choices
from d9d_cublas.device import DeviceProducts
from d9d_cublas.problem import LAYOUTS, Problem, Settings, stored_shapes
from d9d_cublas.tuning import Run, Tuner
from torch import Tensor

#: Listed by the library for each product; 66 is the one that is fast.
LISTED = (Settings(66, tile=36), Settings(67, tile=20, split_k=2, reduction=2))
#: Milliseconds of a product; of torch's, 1.
FAST = {66: 0.9, 67: 1.05}


@dataclass(frozen=True)
class Described:
    """Description of a product, as it was asked for."""

    problem: Problem
    strides: tuple[int, int]


@dataclass(frozen=True)
class Made:
    """Algorithm for a description."""

    settings: Settings
    workspace: int
    described: Described


@dataclass
class StandIn:
    """The library, see :class:`d9d_cublas.library.Library`; ``wrong`` algorithms leave a part of the result."""

    version: int = 130100
    offered: Sequence[Settings] = LISTED
    wrong: Sequence[int] = ()
    ran: list[tuple[Problem, int]] = field(default_factory=list)

    def describe(self, problem: Problem, strides: tuple[int, int]) -> Described:
        assert problem.layout in LAYOUTS
        for (_, columns), stride in zip(stored_shapes(problem), strides, strict=False):
            assert stride >= columns
            assert stride % 8 == 0
        return Described(problem, strides)

    def listed(self, description: Described, count: int) -> list[Made]:
        if not self.offered:
            raise LibraryError("lists nothing")
        return [Made(settings, 0, description) for settings in self.offered][:count]

    def restore(self, description: Described, settings: Settings) -> Made | None:
        return Made(settings, 0, description) if settings in self.offered else None

    def run(self, description: Described, algorithm: Made, first: Tensor, second: Tensor, out: Tensor) -> None:
        problem = description.problem
        assert algorithm.described == description
        shapes = tuple(tuple(tensor.shape) for tensor in (first, second, out))
        assert shapes == stored_shapes(problem)
        assert (first.stride(), second.stride()) == tuple((stride, 1) for stride in description.strides)
        assert out.is_contiguous()
        assert {str(tensor.dtype) for tensor in (first, second, out)} == {f"torch.{problem.dtype}"}
        assert not any(tensor.data_ptr() % 16 for tensor in (first, second))
        transposed = LAYOUTS[problem.layout]
        left, right = (t.float().T if turn else t.float() for t, turn in zip((first, second), transposed, strict=True))
        out.copy_(left @ right)
        if algorithm.settings.id in self.wrong:
            out[0] = torch.nan
        self.ran.append((problem, algorithm.settings.id))


class StandInClock:
    """Clock whose runs take the times of a table, by the algorithm that the stand-in ran; nothing is waited for.

    Args:
        library: the stand-in.
        milliseconds: of a product by each algorithm.
    """

    def __init__(self, library: StandIn, milliseconds: Mapping[int, float] = FAST) -> None:
        self.library = library
        self.milliseconds = milliseconds
        self.calls = 0

    def __call__(self, runs: Sequence[Run], repetitions: Sequence[int]) -> list[float]:
        self.calls += 1
        return [self._of(run) for run in runs]

    def _of(self, run: Any) -> float:
        before = len(self.library.ran)
        run()
        return self.milliseconds[self.library.ran[-1][1]] if len(self.library.ran) > before else 1.0


@pytest.fixture
def library() -> StandIn:
    """The library of the products below."""
    return StandIn()


@pytest.fixture
def clock(library: StandIn) -> StandInClock:
    """Clock of the products below."""
    return StandInClock(library)


@pytest.fixture
def opened(library: StandIn, clock: StandInClock, tmp_path: Path) -> Callable[..., DeviceProducts]:
    """Products of one process that has just started; processes of one test share a file of choices."""

    def open_device(**options: Any) -> DeviceProducts:
        choices = Choices(options.pop("cache", tmp_path / "cublas.json"), options.pop("shipped", SHIPPED))
        values = {"library": library, "tuner": Tuner(clock), "capturing": lambda: False, "smallest": 0} | options
        return DeviceProducts(name="chip", choices=choices, **values)

    return open_device


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch, opened: Callable[..., DeviceProducts], library: StandIn) -> StandIn:
    """The library behind the ops, for tensors on the CPU."""
    monkeypatch.setattr(products, "_PRODUCTS", products.Products(lambda device: opened()))
    return library
