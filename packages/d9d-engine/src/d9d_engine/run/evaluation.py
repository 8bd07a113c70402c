"""Evaluation: the loss on other data, always the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from d9d_core.protocols.task import Task
from d9d_core.tensors import wide_dtype
from d9d_core.types import Pack
from torch import Tensor, nn
from torch import distributed as dist

from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.step.executor import Executor
from d9d_engine.step.first_pass import FirstPassRunner, no_first_pass


class Evaluator:
    """Evaluator of every loss term over the first packs of a stream.

    Args:
        task: turns microbatches into losses.
        executor: runs the model.
        model: this rank's part of it.
        prefetcher: evaluation data, at its start.
        packs: how many packs are measured.
        group: the ranks that see other samples, or other parts of them, or have other stages; ``None`` if there are
            none.
        beat: called before each pack: no sign of life for long means that something hangs.
        first_pass: what the loss needs of a forward before.
    """

    def __init__(
        self,
        task: Task,
        executor: Executor,
        model: nn.Module,
        prefetcher: DevicePrefetcher,
        packs: int,
        group: dist.ProcessGroup | None = None,
        beat: Callable[[], None] = lambda: None,
        first_pass: FirstPassRunner = no_first_pass,
    ) -> None:
        self._task = task
        self._executor = executor
        self._model = model
        self._prefetcher = prefetcher
        self._packs = packs
        self._group = group
        self._beat = beat
        self._first_pass = first_pass
        self._start = prefetcher.state()

    def run(self) -> dict[str, float]:
        """Measure ``eval/loss``, and ``eval/<term>`` of several. Waits for the device. Collective over all ranks."""
        coefficients = self._task.coefficients
        parts: list[Tensor] = []
        self._model.eval()
        for _ in range(self._packs):
            pack = self._first_pass(self._next(), None)
            # Only the rank with the last stage measures; another has zeros to add.
            parts.append(self._none(pack))
            self._executor.evaluate(pack, lambda outputs, microbatch: parts.append(self._measure(outputs, microbatch)))
        self._model.train()
        self._prefetcher.load_state(self._start)  # ends its thread until the next time
        totals = torch.stack(parts).sum(0)  # [2, terms]
        if self._group is not None:
            dist.all_reduce(totals, group=self._group)
        sums, weights = totals.tolist()
        means = {t: s / w if w else 0.0 for t, s, w in zip(coefficients, sums, weights, strict=True)}
        values = {"eval/loss": sum(coefficients[term] * mean for term, mean in means.items())}
        return values | ({f"eval/{term}": mean for term, mean in means.items()} if len(means) > 1 else {})

    def _next(self) -> Pack:
        self._beat()
        return self._prefetcher.next()

    def _none(self, pack: Pack) -> Tensor:
        device = next(iter(pack[0].values())).device
        return torch.zeros(2, len(self._task.coefficients), dtype=wide_dtype(device), device=device)

    def _measure(self, outputs: Mapping[str, Tensor], microbatch: Mapping[str, Tensor]) -> Tensor:
        sums, weights = self._task.losses(outputs, microbatch), self._task.weights(microbatch)
        terms = list(self._task.coefficients)
        values = torch.stack([torch.stack([of[t].float() for t in terms]) for of in (sums, weights)])
        return values.to(wide_dtype(values.device))
