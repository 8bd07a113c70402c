"""Evaluation: losses and metrics over evaluation data, which is the same each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from d9d_core.metric import Table
from d9d_core.task import LanguageModelTask
from d9d_core.tensors import wide_dtype
from d9d_core.types import Microbatch, Pack
from torch import Tensor, nn
from torch import distributed as dist

from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.run.real_samples import ROWS, RealSamples, only
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.executor import Executor
from d9d_engine.step.first_pass import FirstPassRunner, no_first_pass
from d9d_engine.step.metrics import Statistics

#: Function that is called with a set's name, the last stage's outputs and the microbatch; outputs and microbatch have
#: real samples only, without samples that fill up the last batch.
Seen = Callable[[str, Mapping[str, Tensor], Microbatch], None]


@dataclass(frozen=True)
class EvaluationSet:
    """Evaluation dataset, with its metrics.

    Attributes:
        prefetcher: prefetcher of the dataset, at its start.
        packs: number of batches to evaluate each time.
        name: name of the set, which is part of the names of its logged series; empty if there is only one set.
        statistics: metrics over this dataset, if there are any.
        first_pass: first forward over the microbatches of a batch, whose results the loss uses.
        real: stream that tells which samples of a single pass are real, and do not only fill up the last batch;
            ``None`` counts all samples.
    """

    prefetcher: DevicePrefetcher
    packs: int
    name: str = ""
    statistics: Statistics | None = None
    first_pass: FirstPassRunner = no_first_pass
    real: RealSamples | None = None

    @property
    def prefix(self) -> str:
        """Prefix of the names of the set's series."""
        return prefix_of(self.name)


class Evaluator:
    """Evaluates loss terms and metrics over one or several datasets.

    Args:
        task: computes losses of microbatches.
        executor: runs the model.
        model: this rank's stages of the model.
        sets: evaluation datasets.
        group: process group of the ranks with other samples, other positions of the same samples, or other stages;
            ``None`` for a single rank.
        beat: called before each batch, so that the watchdog sees progress.
        likelihood: loss term whose exponential is the perplexity, if there is one.
        seen: called with all evaluated outputs, on the ranks that have the last stage.
    """

    def __init__(
        self,
        task: CheckedTask,
        executor: Executor,
        model: nn.Module,
        sets: Sequence[EvaluationSet],
        group: dist.ProcessGroup | None = None,
        beat: Callable[[], None] = lambda: None,
        likelihood: str | None = None,
        seen: Seen | None = None,
    ) -> None:
        self.sets = sets
        self._task = task
        self._executor = executor
        self._model = model
        self._group = group
        self._beat = beat
        self._likelihood = likelihood
        self._seen = seen
        #: Set -> number of samples counted in the last run, over all ranks.
        self.counted: dict[str, int] = {}
        self._starts = [one.prefetcher.state() for one in sets]

    def run(self, tables: Callable[[Mapping[str, Table]], None] | None = None) -> dict[str, float]:
        """Compute ``eval/loss``, with several terms ``eval/<term>``, with several sets ``eval/<set>/loss`` and so on.

        Waits for the device once. Collective over all ranks.

        Args:
            tables: called with the metrics' tables, if there are any.
        """
        training = self._model.training
        self._model.eval()
        totals = torch.stack([self._totals(one) for one in self.sets])  # [sets, 2, terms + 1]
        self._model.train(training)
        for one, start in zip(self.sets, self._starts, strict=True):
            one.prefetcher.load_state(start)  # ends the prefetching thread
        if self._group is not None:
            dist.all_reduce(totals, group=self._group)
        measured = self._metrics()
        cells = [totals, *(value.values if isinstance(value, Table) else value for value in measured.values())]
        sizes = [cell.numel() for cell in cells]
        row = torch.cat([cell.flatten().to(totals.device, totals.dtype) for cell in cells]).cpu()
        host = torch.split(row, sizes)
        values: dict[str, float] = {}
        for one, (sums, weights) in zip(self.sets, host[0].view(totals.shape).tolist(), strict=True):
            values |= self._means(one.prefix, sums[:-1], weights[:-1])
            # Context-parallel ranks have parts of the same samples.
            self.counted[one.name] = round(sums[-1]) // self._executor.topology.sizes.get("cp", 1)
        found: dict[str, Table] = {}
        for (name, value), cell in zip(measured.items(), host[1:], strict=True):
            if isinstance(value, Table):
                found[name] = replace(value, values=cell.view(value.values.shape))
            else:
                values[name] = cell.item()
        if tables is not None and found:
            tables(found)
        return values

    @property
    def _terms(self) -> list[str]:
        return list(self._task.coefficients)

    def _totals(self, one: EvaluationSet) -> Tensor:
        """Sums and weights of the loss terms on this rank, and the number of samples: [2, terms + 1]."""
        parts: list[Tensor] = []
        if one.statistics is not None:
            one.statistics.reset()
        for _ in range(one.packs):
            self._beat()
            pack = one.prefetcher.next()
            places = None if one.real is None else one.real.take()
            pack = one.first_pass(pack, None)
            # Only the rank with the last stage computes losses; the other ranks add zeros.
            parts.append(self._none(pack))
            real = {} if places is None else {id(mb): here for mb, here in zip(pack, places, strict=True)}

            def measure(
                outputs: Mapping[str, Tensor],
                microbatch: Microbatch,
                real: Mapping[int, Sequence[int]] = real,
            ) -> None:
                here = real.get(id(microbatch))
                if here is not None and not here:
                    return
                if here is not None and len(here) < len(microbatch[ROWS]):
                    outputs, microbatch = (only(of, microbatch, here) for of in (outputs, microbatch))
                parts.append(self._measure(outputs, microbatch))
                if one.statistics is not None:
                    one.statistics.update(self._task.observations(outputs, microbatch))
                if self._seen is not None:
                    self._seen(one.name, outputs, microbatch)

            self._executor.evaluate(pack, measure)
        return torch.stack(parts).sum(0)

    def _metrics(self) -> dict[str, Tensor | Table]:
        """Values of the metrics of all sets. Collective over the group."""
        return {
            one.prefix + name: value
            for one in self.sets
            if one.statistics is not None
            for name, value in one.statistics.compute().items()
        }

    def _means(self, prefix: str, sums: Sequence[float], weights: Sequence[float]) -> dict[str, float]:
        coefficients = self._task.coefficients
        means = {t: s / w if w else 0.0 for t, s, w in zip(coefficients, sums, weights, strict=True)}
        values = {f"{prefix}loss": sum(coefficients[term] * mean for term, mean in means.items())}
        if self._likelihood is not None:
            values[f"{prefix}perplexity"] = _exponential(means[self._likelihood])
        return values | ({f"{prefix}{term}": mean for term, mean in means.items()} if len(means) > 1 else {})

    def _none(self, pack: Pack) -> Tensor:
        device = next(iter(pack[0].values())).device
        return torch.zeros(2, len(self._terms) + 1, dtype=wide_dtype(device), device=device)

    def _measure(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Tensor:
        sums, weights = self._task.losses(outputs, microbatch), self._task.weigh(outputs, microbatch)
        values = torch.stack([torch.stack([of[t].float() for t in self._terms]) for of in (sums, weights)])
        samples = len(microbatch.get("samples", next(iter(microbatch.values()))))
        counted = values.new_full((2, 1), samples)
        return torch.cat([values, counted], dim=1).to(wide_dtype(values.device))


def prefix_of(name: str) -> str:
    """Prefix of the names of an evaluation set's series; a single set has no name."""
    return f"eval/{name}/" if name else "eval/"


def series_of_sets(names: Iterable[str], terms: Collection[str], likelihood: str | None) -> Iterator[str]:
    """Series that evaluation sets always log, without series of metrics.

    Args:
        names: names of the sets.
        terms: loss terms.
        likelihood: loss term whose exponential is the perplexity, if there is one.
    """
    several = terms if len(terms) > 1 else ()
    for name in names:
        for series in ("loss", *(["perplexity"] if likelihood else []), *several):
            yield prefix_of(name) + series


def likelihood_of(task: object) -> str | None:
    """Loss term of a task whose exponential is the perplexity; ``None`` if there is none."""
    return task.likelihood if isinstance(task, LanguageModelTask) else None


def _exponential(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
