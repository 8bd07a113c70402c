"""Calls of cuBLASLt and of CUDA's events, over stand-ins of both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_cublas.binding import Algo, Result
from d9d_cublas.library import WORKSPACE, Library
from d9d_cublas.problem import Problem, Settings
from d9d_cublas.tuning import event_clock


def settings(number: int) -> Settings:
    return Settings(number, tile=1, stages=1, cluster=0, custom=0, swizzle=0, split_k=1, reduction=0, inner=0)


class Functions:
    """Stand-in of the binding: notes its calls; algorithms are known by the number that the library wrote."""

    version = 130100

    def __init__(self) -> None:
        self.called: list[tuple[str, tuple[Any, ...]]] = []
        self.values: list[tuple[str, Any, int, int]] = []
        self.results: list[tuple[int, int]] = []  # state and workspace
        self.refused = ""
        self.workspace = 0
        self.read: Callable[[Any], Settings] = lambda _algo: settings(7)
        self.configured: list[Settings] = []

    def make(self, kind: str, *arguments: Any) -> Any:
        return (kind, *arguments)

    def set(self, kind: str, descriptor: Any, attribute: int, value: Any) -> None:
        self.values.append((kind, descriptor, attribute, value.value))

    def call(self, name: str, *arguments: Any) -> None:
        self.called.append((name, arguments))
        if name == "MatmulAlgoGetHeuristic":
            *_, results, found = arguments
            for result, (state, workspace) in zip(results, self.results, strict=False):
                result.state, result.workspace = state, workspace
            found._obj.value = len(self.results)

    def status(self, name: str, *arguments: Any) -> int:
        self.called.append((name, arguments))
        if name == "MatmulAlgoCheck":
            arguments[-1]._obj.workspace = self.workspace
        return int(name == self.refused)

    def settings(self, algo: Any) -> Settings:
        return self.read(algo)

    def configure(self, _algo: Algo, wanted: Settings) -> None:
        self.configured.append(wanted)


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> Functions:
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=99))
    return Functions()


def library(functions: Any) -> tuple[Library, Any]:
    made = Library(functions, torch.device("cuda:0"))
    return made, made.describe(Problem("forward", 64, 24, 16, "bfloat16"), (16, 16))


def test_algorithms_without_an_error_are_listed_in_order(functions: Functions) -> None:
    made, description = library(functions)
    assert made.version == 130100
    assert functions.called[0][0] == "Create"
    functions.results = [(0, 5), (1, 6), (0, 7)]
    assert [algorithm.workspace for algorithm in made.listed(description, 8)] == [5, 7]
    preference = ("MatmulPreference",)
    assert functions.values[-2:] == [
        ("MatmulPreference", preference, 1, 32 * 2**20), ("MatmulPreference", preference, 3, 2),
    ]  # fmt: skip
    _, (_, operation, a, b, c, d, given, count, results, _) = functions.called[-1]
    assert (operation, given, count, len(results)) == (description.operation, preference, 8, 8)
    assert [a, b, c, d] == [description.matrices[number] for number in (0, 1, 2, 2)]
    assert all(isinstance(result, Result) for result in results)


def test_an_algorithm_is_restored_only_as_it_was(functions: Functions) -> None:
    made, description = library(functions)
    found = made.restore(description, settings(7))
    assert found is not None
    assert (found.settings, found.workspace) == (settings(7), 0)
    assert functions.configured == [settings(7)]
    calls = dict(functions.called)
    assert calls["MatmulAlgoInit"][1:8] == (68, 0, 14, 14, 14, 14, 7)
    assert calls["MatmulAlgoCheck"][1:6] == (description.operation, *description.matrices, description.matrices[2])
    functions.workspace = WORKSPACE
    assert made.restore(description, settings(7)) is not None
    functions.workspace = WORKSPACE + 1
    assert made.restore(description, settings(7)) is None
    functions.workspace = 0
    for refused in ("MatmulAlgoInit", "MatmulAlgoCheck"):
        functions.refused = refused
        assert made.restore(description, settings(7)) is None
    functions.refused = ""
    assert made.restore(description, settings(8)) is None  # the library has changed a setting


@pytest.mark.parametrize("workspace", [0, 64])
def test_a_product_has_its_operands_in_the_order_of_columns(functions: Functions, workspace: int) -> None:
    made, description = library(functions)
    functions.workspace = workspace
    algorithm = made.restore(description, settings(7))
    assert algorithm is not None
    first, second, out = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((64, 16), (24, 16), (64, 24)))
    made.run(description, algorithm, first, second, out)
    name, given = functions.called[-1]
    a, b, d = description.matrices
    assert name == "Matmul"
    assert given[1] == description.operation
    assert given[2]._obj.value == 1.0
    assert given[3:7] == (second.data_ptr(), a, first.data_ptr(), b)
    assert given[7]._obj.value == 0.0
    assert given[8:12] == (out.data_ptr(), d, out.data_ptr(), d)
    assert given[12]._obj is algorithm.opaque
    assert (given[13] is None, given[14], given[15]) == (workspace == 0, workspace, 99)


def test_a_call_takes_the_mean_of_its_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    waited: list[float] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = -1.0

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            waited.append(self.at)

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    def takes(milliseconds: float) -> Callable[[], None]:
        def run() -> None:
            now[0] += milliseconds

        return run

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert event_clock([takes(2.0), takes(3.0), takes(0.5)], [2, 1, 4]) == [2.0, 3.0, 0.5]
    assert waited == [109.0]  # once, for the last call
