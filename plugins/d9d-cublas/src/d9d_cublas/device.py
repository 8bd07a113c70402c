"""Products of one device, each by the algorithm that was chosen for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from d9d_cublas.binding import LibraryError
from d9d_cublas.choices import Choice, Choices, Key
from d9d_cublas.problem import Problem, Settings, multiply
from d9d_cublas.tuning import Run, Tuner, is_right

#: Candidates of the library's heuristic.
_CANDIDATES = 8
#: Products that a process measures at most: where the number of rows changes with each step, there is no end of them.
_MEASURED = 64
#: Floating-point operations of the smallest product that is measured, about 30 us on an H200.
_SMALLEST = 20 * 10**9


class Offers(Protocol):
    """Library of algorithms, such as :class:`d9d_cublas.library.Library`."""

    version: int

    def describe(self, problem: Problem, strides: tuple[int, int]) -> Any:
        """Description of a product, by the row strides of its operands."""

    def listed(self, description: Any, count: int) -> list[Any]:
        """Algorithms for a product, at most ``count``; each has ``settings``."""

    def restore(self, description: Any, settings: Settings) -> Any | None:
        """Algorithm of given settings, if the library has it for this product."""

    def run(self, description: Any, algorithm: Any, first: Tensor, second: Tensor, out: Tensor) -> None:
        """Compute a product."""


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream, so that nothing may wait for the device."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, slots=True)
class _Plan:
    """Plan of a product: its algorithm, or none, for torch's."""

    description: Any = None
    algorithm: Any = None


class DeviceProducts:
    """Products of one device by chosen cuBLAS algorithms.

    Args:
        library: offers algorithms.
        name: name of the device.
        choices: made before.
        tuner: measures where there is no choice.
        capturing: whether a CUDA graph is being captured.
        smallest: floating-point operations below which products stay as they are.
    """

    def __init__(
        self,
        library: Offers,
        name: str,
        choices: Choices,
        tuner: Tuner,
        capturing: Callable[[], bool] = is_capturing,
        smallest: int = _SMALLEST,
    ) -> None:
        self._library = library
        self._name = name
        self._choices = choices
        self._tuner = tuner
        self._capturing = capturing
        self._smallest = smallest
        self._plans: dict[tuple[Problem, tuple[int, int]], _Plan] = {}
        self._measured = 0
        # Forward and backward run in threads of their own.
        self._lock = threading.Lock()

    def multiply(self, layout: str, first: Tensor, second: Tensor, out: Tensor) -> None:
        """Compute a product.

        Args:
            layout: one of :data:`~d9d_cublas.problem.LAYOUTS`.
            first: first operand.
            second: second operand; both fit (:func:`~d9d_cublas.problem.fits`).
            out: receives the product; contiguous.
        """
        problem, strides = Problem.of(layout, first, second), (first.stride(0), second.stride(0))
        plan = self._plans.get((problem, strides))
        if plan is None:
            with self._lock:
                plan = self._plan(problem, strides, first, second, out)
        if plan.algorithm is None:
            multiply(layout, first, second, out)
        else:
            self._library.run(plan.description, plan.algorithm, first, second, out)

    def _plan(self, problem: Problem, strides: tuple[int, int], first: Tensor, second: Tensor, out: Tensor) -> _Plan:
        """Plan of a product, kept once it is final."""
        choice = self._find(problem)
        if choice is None and not self._capturing():
            self._measured += 1
            choice = self._measure(problem, strides, first, second, out)
        if choice is None:
            return _Plan()
        plan = self._restored(problem, strides, choice)
        self._plans[problem, strides] = plan
        return plan

    def _find(self, problem: Problem) -> Choice | None:
        """Choice that needs no measurement."""
        if problem.operations < self._smallest:
            return Choice(None)
        key = self._key(problem)
        if torch.are_deterministic_algorithms_enabled():
            # What this machine measured must not decide about bits.
            return self._choices.find_shipped(key) or Choice(None)
        found = self._choices.find(key)
        return Choice(None) if found is None and self._measured >= _MEASURED else found

    def _measure(
        self, problem: Problem, strides: tuple[int, int], first: Tensor, second: Tensor, out: Tensor
    ) -> Choice | None:
        """Choice by measurement; ``None`` where the operands or the free memory of now do not allow one."""
        layout = problem.layout
        multiply(layout, first, second, out)
        # Zeros take less power than numbers, and nothing is near to what is not finite.
        norm = torch.linalg.vector_norm(out, dtype=torch.float32).item()
        if not 0 < norm < float("inf"):
            return None
        try:
            trial = torch.empty_like(out)
            candidates = self._candidates(problem, strides, (first, second, trial), out)
            runs = [run for _, run in candidates]
            chosen, times = self._tuner.choose(lambda: multiply(layout, first, second, trial), runs)
        except torch.OutOfMemoryError:
            return None
        choice = Choice(None if chosen is None else candidates[chosen][0], times)
        return self._choices.record(self._key(problem), choice)

    def _candidates(
        self, problem: Problem, strides: tuple[int, int], tensors: tuple[Tensor, Tensor, Tensor], expected: Tensor
    ) -> list[tuple[Settings, Run]]:
        """Settings of algorithms whose results are right, and runs of them on two operands and a result."""
        description = self._library.describe(problem, strides)
        try:
            listed = self._library.listed(description, _CANDIDATES)
        except LibraryError:  # it has none for this product
            return []
        runs = [partial(self._library.run, description, algorithm, *tensors) for algorithm in listed]
        found = zip(listed, runs, strict=True)
        return [(algorithm.settings, run) for algorithm, run in found if is_right(run, tensors[-1], expected)]

    def _restored(self, problem: Problem, strides: tuple[int, int], choice: Choice) -> _Plan:
        if choice.algorithm is None:
            return _Plan()
        description = self._library.describe(problem, strides)
        algorithm = self._library.restore(description, choice.algorithm)
        return _Plan() if algorithm is None else _Plan(description, algorithm)

    def _key(self, problem: Problem) -> Key:
        return Key(self._name, self._library.version, problem)
