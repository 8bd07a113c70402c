"""Matrix products of one device, each with the algorithm chosen for it."""

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

#: Number of candidates to request from the library's heuristic.
_CANDIDATES = 8
#: Largest number of products that a process measures. Without a limit, a number of rows that changes with each step
#: would cause a measurement in each step.
_MEASURED = 64
#: FLOP of the smallest product to measure, about 30 us on an H200.
_SMALLEST = 20 * 10**9


class Offers(Protocol):
    """Source of algorithms, such as :class:`d9d_cublas.library.Library`."""

    version: int

    def describe(self, problem: Problem, strides: tuple[int, int]) -> Any:
        """Descriptor of a product, for the row strides of its operands."""

    def listed(self, description: Any, count: int) -> list[Any]:
        """At most ``count`` algorithms for a product; each has the attribute ``settings``."""

    def restore(self, description: Any, settings: Settings) -> Any | None:
        """Algorithm with the given settings; ``None`` if the library does not have it for this product."""

    def run(self, description: Any, algorithm: Any, first: Tensor, second: Tensor, out: Tensor) -> None:
        """Compute a product with the given algorithm."""


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream, which forbids synchronisation with the device."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, slots=True)
class _Plan:
    """Plan of a product: its descriptor and the algorithm that computes it; if ``None``, torch computes the product."""

    description: Any = None
    algorithm: Any = None


class DeviceProducts:
    """Computes the matrix products of one device, each by the cuBLAS algorithm chosen for it.

    Args:
        library: source of algorithms.
        name: name of the device.
        choices: earlier choices.
        tuner: measures products that have no choice yet.
        capturing: returns whether a CUDA graph is being captured, during which nothing is measured.
        smallest: products of fewer FLOP than this are computed by torch.
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
        # The keys are plain facts of the operands, because each product would spend microseconds on a Problem.
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._measured = 0
        # Forward and backward run in different threads.
        self._lock = threading.Lock()

    def multiply(self, layout: str, first: Tensor, second: Tensor, out: Tensor) -> None:
        """Compute a matrix product with the algorithm chosen for it.

        Args:
            layout: one of :data:`~d9d_cublas.problem.LAYOUTS`.
            first: first operand.
            second: second operand; both must pass :func:`~d9d_cublas.problem.fits`.
            out: receives the product; contiguous.
        """
        key = layout, first.shape, second.shape, first.stride(0), second.stride(0), first.dtype
        plan = self._plans.get(key)
        if plan is None:
            with self._lock:
                plan = self._plan(key, layout, first, second, out)
        if plan.algorithm is None:
            multiply(layout, first, second, out)
        else:
            self._library.run(plan.description, plan.algorithm, first, second, out)

    def _plan(self, key: tuple[Any, ...], layout: str, first: Tensor, second: Tensor, out: Tensor) -> _Plan:
        """Plan of a product; cached, unless the product has no choice yet and cannot be measured now."""
        problem, strides = Problem.of(layout, first, second), (first.stride(0), second.stride(0))
        choice = self._find(problem)
        if choice is None and not self._capturing():
            self._measured += 1
            choice = self._measure(problem, strides, first, second, out)
        if choice is None:
            return _Plan()
        plan = self._restored(problem, strides, choice)
        self._plans[key] = plan
        return plan

    def _find(self, problem: Problem) -> Choice | None:
        """Choice for a matrix product that needs no measurement; ``None`` if the product must be measured."""
        if problem.operations < self._smallest:
            return Choice(None)
        key = self._key(problem)
        if torch.are_deterministic_algorithms_enabled():
            # Results must not depend on measurements of this machine.
            return self._choices.find_shipped(key) or Choice(None)
        found = self._choices.find(key)
        return Choice(None) if found is None and self._measured >= _MEASURED else found

    def _measure(
        self, problem: Problem, strides: tuple[int, int], first: Tensor, second: Tensor, out: Tensor
    ) -> Choice | None:
        """Measure and record a choice; ``None`` if the operands' values or the free memory do not allow it."""
        layout = problem.layout
        multiply(layout, first, second, out)
        # Products of zeros draw less power than others, so their times mislead; non-finite results cannot be compared.
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
        """Settings and calls of the algorithms whose results are correct, for the given operands and output."""
        description = self._library.describe(problem, strides)
        try:
            listed = self._library.listed(description, _CANDIDATES)
        except LibraryError:  # no algorithm for this product
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
