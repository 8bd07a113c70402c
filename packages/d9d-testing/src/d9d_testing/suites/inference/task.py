"""Conformance suite of inference tasks: the rows of a sample must not depend on the other samples of its batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from d9d_core.inference import ROW, Columns
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor

from d9d_testing.suites.support.component import ComponentSuite
from d9d_testing.suites.support.tensors import HostReads


class InferenceTaskSuite(ComponentSuite):
    """Conformance suite of inference tasks (:class:`d9d_core.inference.InferenceTask`).

    Subclass it, name the task, and give a microbatch of at least four samples, with a model's outputs for it::

        class TestMyTask(InferenceTaskSuite):
            target = "my_task"

            def case(self):
                microbatch = {"tokens": torch.arange(12).view(4, 3), "rows": torch.arange(4)}
                return {"scores": torch.randn(4)}, microbatch

    Attributes:
        facts: facts of the data, for ``check``.
        model: config of a model, for ``check``.
    """

    kind = "inference task"

    facts: ClassVar[State] = {"rows": 4, "samples": 4}
    model: ClassVar[Any] = None

    def case(self) -> tuple[Mapping[str, Tensor], Microbatch]:
        """Outputs of a model, and their microbatch of B samples, with ``rows`` int64 [B]."""
        raise AssertionError(
            f"{type(self).__name__} must override case(); return outputs of a model and their microbatch"
        )

    def test_columns_begin_with_the_row(self) -> None:
        """The first column is ``row``, and every column has a description."""
        columns = self.ready().columns
        assert next(iter(columns), None) == ROW, f"columns are {list(columns)}; the first one must be '{ROW}'"
        for name, what in columns.items():
            assert isinstance(what, str), f"column '{name}' has no description"
            assert what.strip(), f"column '{name}' has no description"

    def test_inputs_are_those_of_a_stage(self) -> None:
        """``inputs`` returns the keyword arguments of the model as ``StageInputs``."""
        _, microbatch = self.case()
        inputs = self.ready().inputs(microbatch)
        assert isinstance(inputs, StageInputs), f"inputs() returned a {type(inputs).__name__}, not StageInputs"

    def test_what_is_kept_has_a_slice_for_each_sample(self) -> None:
        """``process`` returns tensors without a graph, and does not wait for the device.

        Their first dimension is the samples, so that the engine can cut off fillers.
        """
        outputs, microbatch = self.case()
        count = len(microbatch["rows"])
        task = self.ready()
        with HostReads() as reads:
            kept = task.process(outputs, microbatch)
        for name, tensor in kept.items():
            assert isinstance(tensor, Tensor), f"process() keeps '{name}', a {type(tensor).__name__}; keep tensors"
            shape = list(tensor.shape)
            assert shape[:1] == [count], f"process() keeps '{name}' of shape {shape}; the first dimension is {count}"
            assert not tensor.requires_grad, f"process() keeps '{name}' with its graph; detach it"
        assert not reads.found, (
            f"process() reads values on the host ({', '.join(sorted(set(reads.found)))}), which waits for the device; "
            "compute with tensors, and read values in rows()"
        )

    def test_rows_have_the_columns_that_are_declared(self) -> None:
        """``rows`` returns the declared columns, equally long, with a row for each sample.

        Row indices are Python ints, and no value is a tensor.
        """
        task = self.ready()
        rows = self.rows(task, slice(None))
        assert list(rows) == list(task.columns), f"rows() returned {list(rows)}, columns declares {list(task.columns)}"
        counts = {name: len(values) for name, values in rows.items()}
        assert len(set(counts.values())) == 1, f"columns are not equally long: {counts}"
        firsts = self.case()[1]["rows"].tolist()
        assert set(firsts) <= set(rows[ROW]), f"some of the samples {firsts} have no row; rows: {list(rows[ROW])}"
        assert all(type(row) is int for row in rows[ROW]), "row indices must be Python ints"
        tensors = [name for name, values in rows.items() if any(isinstance(value, Tensor) for value in values)]
        assert not tensors, f"values of {tensors} are tensors; return JSON values or lists of numbers, as of tolist()"

    def test_rows_of_a_sample_do_not_depend_on_the_others(self) -> None:
        """Two halves of the kept tensors, or of the microbatch, together give the rows of all samples.

        A second call gives equal rows, and samples after the first half may be fillers (``rows`` -1).
        """
        task = self.ready()
        count = len(self.case()[1]["rows"])
        whole = self.rows(task, slice(None))
        parts = slice(0, count // 2), slice(count // 2, count)
        _assert_joined(whole, [self.rows(task, part) for part in parts], "rows() gets the samples in two halves", _same)
        cut = [self._rows(task, *self._of(part), slice(None)) for part in parts]
        _assert_joined(whole, cut, "process() gets the samples in two halves", _close)
        outputs, microbatch = self.case()
        fillers = {**microbatch, "rows": microbatch["rows"].index_fill(0, torch.arange(count // 2, count), -1)}
        filled = [self._rows(task, outputs, fillers, parts[0]), self.rows(task, parts[1])]
        _assert_joined(whole, filled, "the other samples are fillers", _close)
        again = self.rows(task, slice(None))
        assert all(all(map(_same, again[name], values)) for name, values in whole.items()), "a second call differs"

    def test_tallies_add_up(self) -> None:
        """Tallies of parts sum to the tally of all rows, because the engine sums them over parts and ranks."""
        task = self.ready()
        count = len(self.case()[1]["rows"])
        total = task.tally(self.rows(task, slice(None)))
        parts = [task.tally(self.rows(task, part)) for part in (slice(0, 1), slice(1, count))]
        for part in parts:
            assert part.keys() == total.keys(), f"tally() names {sorted(part)} of a part and {sorted(total)} of all"
        for name, value in total.items():
            assert type(value) is float, f"tally '{name}' is a {type(value).__name__}, not a float"
            added = sum(part[name] for part in parts)
            assert math.isclose(added, value, rel_tol=1e-9, abs_tol=1e-12), (
                f"tally '{name}': {added} for two parts, {value} for both together; return sums, not means"
            )

    def test_final_values_are_numbers(self) -> None:
        """``finalize`` turns the sums over all rows into numbers."""
        task = self.ready()
        values = task.finalize(task.tally(self.rows(task, slice(None))))
        for name, value in values.items():
            assert isinstance(value, float | int), f"finalize() returned '{name}' as a {type(value).__name__}"

    def ready(self) -> Any:
        """New inference task, after a call of its ``check``."""
        task = self.build()
        task.check(self.model, self.facts)
        return task

    def rows(self, task: Any, samples: slice) -> Columns:
        """Rows of some samples, computed as the engine does."""
        return self._rows(task, *self.case(), samples)

    def part(self, tensors: Mapping[str, Tensor], samples: slice) -> Mapping[str, Tensor]:
        """Some samples of the outputs or of the microbatch; by default a slice of each tensor [B, ...] of B samples."""
        count = len(self.case()[1]["rows"])
        return {name: tensor[samples] if tensor.shape[:1] == (count,) else tensor for name, tensor in tensors.items()}

    def _of(self, samples: slice) -> tuple[Mapping[str, Tensor], Microbatch]:
        outputs, microbatch = self.case()
        return self.part(outputs, samples), self.part(microbatch, samples)

    def _rows(self, task: Any, outputs: Mapping[str, Tensor], microbatch: Microbatch, samples: slice) -> Columns:
        with torch.inference_mode():
            kept = {**task.process(outputs, microbatch), "rows": microbatch["rows"]}
            rows: Columns = task.rows({name: tensor[samples] for name, tensor in kept.items()})
        return rows


def _assert_joined(whole: Columns, parts: Sequence[Columns], condition: str, equal: Callable[[Any, Any], bool]) -> None:
    for name, values in whole.items():
        joined = [value for part in parts for value in part[name]]
        same = len(joined) == len(values) and all(map(equal, joined, values))
        assert same, f"column '{name}' differs if {condition}"


def _close(left: Any, right: Any) -> bool:
    """Whether two values are equal up to rounding, as sums over batches of different sizes may be."""
    one, other = np.asarray(left), np.asarray(right)
    numbers = one.shape == other.shape and {one.dtype.kind, other.dtype.kind} <= set("fiu")
    return bool(np.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)) if numbers else _same(left, right)


def _same(left: Any, right: Any) -> bool:
    return bool(np.array_equal(np.asarray(left), np.asarray(right)))
