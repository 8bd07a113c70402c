"""Conformance suite of metrics: states are merged over ranks, saved, loaded and reset."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from d9d_core.metric import StageMetric, Table, Vector
from d9d_engine.distributed.packed_reduction import PackedReduction
from d9d_engine.step.metrics import Statistics
from torch import Tensor, nn

from d9d_testing.suites.support.component import ComponentSuite
from d9d_testing.suites.support.observations import SAMPLES, observed
from d9d_testing.suites.support.tensors import HostReads, bits, differing, facts

_OPERATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda shards: shards.sum(0),
    "max": lambda shards: shards.amax(0),
    "min": lambda shards: shards.amin(0),
}
#: Dtypes that both gloo and NCCL can reduce by sum, maximum and minimum.
_REDUCED = (torch.float16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64)


class MetricSuite(ComponentSuite):
    """Conformance suite of metrics (:class:`d9d_core.metric.Metric`).

    Subclass it and name the metric::

        class TestMyMetric(MetricSuite):
            target = "my_metric"

    By default it uses the observations of first-party tasks. For other observations, override ``observations``, which
    must return equal tensors in every call; for a metric over tallies, which are sums that modules of the model keep,
    also override ``stage``::

            def observations(self, samples):
                return {"scores": torch.arange(12.0)[samples]}

            def stage(self):
                return MyModel()

    Attributes:
        samples: number of samples.
    """

    kind = "metric"

    samples: ClassVar[int] = SAMPLES

    # --- for subclasses to override

    def observations(self, samples: slice) -> Mapping[str, Tensor]:
        """Observations of the samples in a slice of all ``samples`` samples; equal in every call."""
        return observed(samples)

    def stage(self) -> nn.Module | None:
        """Model to which a metric over tallies (sums that modules of the model keep) is attached."""
        return None

    # --- tests

    def test_shards_merge_to_the_whole(self) -> None:
        """Values do not depend on the split of samples into microbatches and ranks, even if ranks have no samples."""
        expected = _values(self.updated([slice(0, self.samples)]))
        assert expected, "the metric computes no series from these observations; give it others in observations()"
        for seed in range(8):
            chance = random.Random(seed)  # noqa: S311 - no secret
            ranks = chance.choice([1, 2, 3, 5])
            shards: list[list[slice]] = [[] for _ in range(ranks)]
            for part in self.cuts(chance):
                chance.choice(shards).append(part)
            merged = self.merged([self.updated(shard) for shard in shards])
            where = f"{self.samples} samples in shards of {[[p.stop - p.start for p in shard] for shard in shards]}"
            _assert_same(merged, expected, where, "merge sums and counts, and divide in compute()")

    def test_ranks_that_saw_nothing_change_nothing(self) -> None:
        """The states of a new metric and of a reset metric are neutral in a merge."""
        parts = [slice(0, self.samples)]
        expected = _values(self.updated(parts))
        emptied = self.updated(parts)
        emptied.reset()
        for name, idle in (("new", self.made()), ("reset", emptied)):
            merged = self.merged([self.updated(parts), idle])
            _assert_same(merged, expected, f"merged with a {name} one", "start from the operation's neutral value")

    def test_largest_and_smallest_values_start_from_neutral_ones(self) -> None:
        """States reduced by ``max`` and ``min`` must start from a neutral value, such as the extreme of their dtype."""
        parts = [slice(0, self.samples)]
        plain, extreme = self.updated(parts).state(), self.made()
        neutral = {
            name: torch.full_like(tensor, _extreme(tensor.dtype, extreme.reductions[name]))
            if extreme.reductions[name] in ("max", "min")
            else tensor.clone()
            for name, tensor in extreme.state().items()
        }
        extreme.load_state({name: tensor.clone() for name, tensor in neutral.items()})
        found = self.updated(parts, extreme).state()
        for name, how in extreme.reductions.items():
            seen = found[name] != neutral[name]  # other elements got no sample
            wrong = seen & (found[name] != plain[name]) & ~(found[name].isnan() & plain[name].isnan())
            assert not wrong.any() or how == "sum", (
                f"state {name} is {plain[name].tolist()}, but the {how} of the samples is {found[name].tolist()}; "
                f"start it from the {'smallest' if how == 'max' else 'largest'} value of its dtype, in reset() too"
            )

    def test_state_has_its_final_form_from_the_start(self) -> None:
        """Names, shapes and dtypes of states never change: checkpoints are loaded into them, and ranks reduce them."""
        metric = self.made()
        start = facts(metric.state())
        known = metric.reductions
        assert start.keys() == known.keys(), f"state has {sorted(start)}, reductions say {sorted(known)}; name all"
        unknown = {name: how for name, how in known.items() if how not in _OPERATIONS}
        assert not unknown, f"reductions {unknown} are unknown; use one of {', '.join(_OPERATIONS)}"
        state = metric.state()
        moments = {
            "an update": lambda: metric.update(self.observations(slice(0, 5))),
            "load_state()": lambda: metric.load_state({name: tensor.clone() for name, tensor in state.items()}),
            "reset()": metric.reset,
        }
        for what, happen in moments.items():
            happen()
            now = facts(metric.state())
            assert now == start, f"after {what} the state is {now}, at the start it is {start}; it must not change form"

    def test_reset_forgets_everything(self) -> None:
        """After ``reset``, the state equals a new metric's, and so do the values after further updates."""
        metric, fresh = self.updated([slice(0, self.samples)]), self.made()
        metric.reset()
        changed = differing(bits(fresh.state()), bits(metric.state()))
        assert not changed, f"reset() leaves {changed} of the state"
        part = [slice(3, 8)]
        again = _values(self.updated(part, metric))
        _assert_same(again, _values(self.updated(part)), "after reset()", "reset attributes outside of the state too")

    def test_a_loaded_state_continues(self) -> None:
        """A new metric continues from a copy of the state alone."""
        first, rest = [slice(0, 5)], [slice(5, self.samples)]
        expected = _values(self.updated([*first, *rest]))
        saved = {name: tensor.clone() for name, tensor in self.updated(first).state().items()}
        resumed = self.made()
        resumed.load_state(saved)
        _assert_same(
            _values(self.updated(rest, resumed)), expected, "resumed", "keep all that compute() needs in state()"
        )

    def test_a_refused_step_counts_nowhere(self) -> None:
        """``load_state`` with the state before a step undoes the update of the step, as for non-finite steps."""
        metric = self.updated([slice(0, 5)])
        before = {name: tensor.clone() for name, tensor in metric.state().items()}
        statistics = Statistics({"mine": metric}, gated=True)
        statistics.begin()
        metric.update(self.observations(slice(5, self.samples)))
        statistics.settle(torch.tensor(False))
        changed = differing(bits(before), bits(metric.state()))
        assert not changed, f"{changed} keep the update of a refused step; load_state() must replace the whole state"

    def test_series_keep_their_names(self) -> None:
        """Series names never change, because trackers and charts identify series by name.

        ``compute`` changes no state.
        """
        metric = self.updated([slice(0, 5)])
        before = bits(metric.state())
        names = list(metric.compute())
        assert all(isinstance(name, str) and name for name in names), f"series are named {names}; use texts"
        _assert_same(_values(metric), _values(metric), "computed twice", "compute() must not change anything")
        changed = differing(before, bits(metric.state()))
        assert not changed, f"compute() changes {changed} of the state"
        for parts in ([slice(5, self.samples)], [slice(0, self.samples)]):
            found = list(self.updated(parts).compute())
            assert found == names, f"series of samples {parts} are {found}, of others {names}; keep the names"
        unknown = set(self.made().compute()) - set(names)
        assert not unknown, f"before the first update there are series {sorted(unknown)} that do not exist later"

    def test_values_can_be_logged(self) -> None:
        """``compute`` returns scalars, vectors or tables, without an autograd graph."""
        for name, value in self.updated([slice(0, self.samples)]).compute().items():
            found = value.values if isinstance(value, Table | Vector) else value
            assert isinstance(found, Tensor), f"{name} is a {type(value).__name__}; return tensors, Vectors or Tables"
            if isinstance(value, Table):
                assert found.ndim == 2, f"table {name} has shape {tuple(found.shape)}; it needs two dims"
            else:
                assert found.ndim < 2, f"{name} has shape {tuple(found.shape)}; return 0-d or 1-D tensors, or a Table"
            assert not found.requires_grad, f"{name} carries a graph; detach the observations"

    def test_vectors_keep_their_series(self) -> None:
        """The length and names of a vector never change, because each value is logged as a series."""
        wholes = [self.made(), self.updated([slice(0, 1)]), self.updated([slice(0, self.samples)])]
        expected: dict[str, Any] = {}
        for metric in wholes:
            for name, value in metric.compute().items():
                if isinstance(value, Table) or (isinstance(value, Tensor) and value.ndim == 0):
                    continue
                series = value.names if isinstance(value, Vector) else len(value)
                known = expected.setdefault(name, series)
                assert series == known, f"the values of {name} are {series}, before they were {known}; keep all of them"

    def test_states_are_reduced_together(self) -> None:
        """States can be packed with other metrics' states into one buffer per operation and dtype."""
        for metric in (self.made(), self.updated([slice(0, 5)])):
            for name, tensor in metric.state().items():
                where = f"state {name} of dtype {tensor.dtype}"
                assert tensor.dtype in _REDUCED, f"{where} cannot be reduced by every backend; use one of {_REDUCED}"
                assert tensor.layout == torch.strided, f"{where} is {tensor.layout}; use dense tensors"
        state = self.updated([slice(0, 5)]).state()
        before = bits(state)
        packed = PackedReduction.of(state, self.made().reductions, None)
        metric = self.updated([slice(0, 5)])
        expected = _values(metric)
        twin = self.made()
        twin.load_state({name: packed.view(name) for name in state})
        _assert_same(_values(twin), expected, "loaded from a buffer of all states", "use the loaded tensors unchanged")
        changed = differing(before, bits({name: packed.view(name) for name in state}))
        assert not changed, f"compute() writes into {changed} of the state"

    def test_an_update_only_reads_and_never_waits(self) -> None:
        """``update`` does not write to observations, and does not synchronize with the device."""
        metric = self.made()
        observations = {name: tensor.clone() for name, tensor in self.observations(slice(0, 5)).items()}
        before = bits(observations)
        with HostReads() as reads:
            metric.update(observations)
        assert not reads.found, (
            f"update() reads values on the host ({', '.join(sorted(set(reads.found)))}); use torch.where and sums"
        )
        changed = differing(before, bits(observations))
        assert not changed, f"update() writes into the observations {changed}"

    def test_values_are_computed_without_waiting(self) -> None:
        """``load_state`` and ``compute`` do not synchronize, because they run during steps."""
        metric = self.updated([slice(0, 5)])
        state = metric.state()
        for what, happen in {"load_state()": lambda: metric.load_state(state), "compute()": metric.compute}.items():
            with HostReads() as reads:
                happen()
            assert not reads.found, (
                f"{what} waits for the device: it reads values on the host ({', '.join(sorted(set(reads.found)))}); "
                "return device tensors"
            )

    # --- helpers for subclasses

    def made(self) -> Any:
        """New metric, attached to the model if it is a metric over tallies."""
        metric = self.build()
        if isinstance(metric, StageMetric):
            stage = self.stage()
            assert stage is not None, f"{type(self).__name__}: override stage() with the model of a metric over tallies"
            metric.attach(stage)
        return metric

    def updated(self, parts: Iterable[slice], metric: Any = None) -> Any:
        """A metric (by default a new one) after one update for each part of the samples."""
        metric = self.made() if metric is None else metric
        for part in parts:
            metric.update(self.observations(part))
        return metric

    def cuts(self, chance: random.Random) -> list[slice]:
        """All samples, split into microbatches of random sizes."""
        inner = chance.sample(range(1, self.samples), chance.randrange(self.samples - 1))
        ends = [0, *sorted(inner), self.samples]
        return [slice(begin, end) for begin, end in itertools.pairwise(ends)]

    def merged(self, metrics: Sequence[Any]) -> dict[str, Tensor]:
        """Values that a new metric computes from the merged states of several metrics, one for each simulated rank."""
        states = [metric.state() for metric in metrics]
        reductions = metrics[0].reductions
        merged = self.made()
        merged.load_state(
            {name: _OPERATIONS[how](torch.stack([state[name] for state in states])) for name, how in reductions.items()}
        )
        return _values(merged)


def _extreme(dtype: torch.dtype, reduction: str) -> float:
    """Neutral value of the reduction ``max`` or ``min``: the smallest or largest value of a dtype."""
    if dtype == torch.bool:
        return float(reduction == "min")
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return limits.min if reduction == "max" else limits.max


def _values(metric: Any) -> dict[str, Tensor]:
    computed = metric.compute().items()
    values = {name: value.values if isinstance(value, Table | Vector) else value for name, value in computed}
    return {name: value.detach().clone() for name, value in values.items()}


def _assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str, hint: str) -> None:
    assert found.keys() == expected.keys(), f"{where}: series {sorted(found)}, expected {sorted(expected)}"
    for name, value in expected.items():
        close = torch.allclose(found[name].double(), value.double(), rtol=1e-5, atol=1e-7, equal_nan=True)
        assert close, f"{where}: {name} is {found[name].tolist()}, expected {value.tolist()}; {hint}"
