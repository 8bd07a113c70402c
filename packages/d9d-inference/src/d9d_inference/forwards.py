"""Forwards of an inference run: one per microbatch, or one per generated token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from d9d_core.program.placement import Pipeline
from d9d_core.types import Microbatch, Pack
from d9d_engine.distributed.mesh import Topology
from d9d_engine.step.executor import Executor, Outputs
from torch import Tensor

from d9d_inference.captures import TOGETHER, Captures, groups_of
from d9d_inference.generation.decoder import Decoder


class Forwards(Protocol):
    """Runs the model over the microbatches of one rank."""

    def run(self, pack: Pack, outputs: Outputs) -> None:
        """Run the model over microbatches. Collective over all ranks, with the same number of microbatches on each.

        Args:
            pack: microbatches on the device; each has ``rows``, the indices of its rows.
            outputs: called with each microbatch and its outputs, in order, on the ranks that have the last stage.
        """
        ...


class OneForward:
    """Runs one forward per microbatch.

    Args:
        executor: runs the model.
        captures: captures the outputs of the modules that the task reads.
    """

    def __init__(self, executor: Executor, captures: Captures) -> None:
        self._executor = executor
        self._captures = captures

    def run(self, pack: Pack, outputs: Outputs) -> None:
        """Run the model over microbatches; see :class:`Forwards`."""
        for group in self._captures.groups(pack):
            self._captures.run(self._executor, group, outputs)


class ManyForwards:
    """Runs one forward per new token of a microbatch's sequences, for a few microbatches at a time.

    Args:
        executor: runs the model.
        pipeline: all stages, and the ranks that run them.
        topology: rank, device, meshes and process groups of this process.
        decoder: makes a decoder from a forward function.
        holds_last: whether this rank has the last stage.
    """

    def __init__(
        self,
        executor: Executor,
        pipeline: Pipeline,
        topology: Topology,
        decoder: Callable[[Callable[[Pack, Outputs], None]], Decoder],
        holds_last: bool,
    ) -> None:
        self._executor = executor
        self._size = 1 if pipeline.ranks == 1 else TOGETHER * pipeline.ranks
        self._topology = topology
        self._decoder = decoder(self._forward)
        self._holds_last = holds_last

    def run(self, pack: Pack, outputs: Outputs) -> None:
        """Continue the sequences of microbatches; see :class:`Forwards`.

        Raises:
            BuildError: the model returns no logits.
            NonFiniteError: logits have NaN or infinity, and the decoder's ``nonfinite`` is ``error``.
        """
        for group in groups_of(pack, self._size):
            for microbatch, found in zip(group, self._decoder.continue_all(group), strict=True):
                if self._holds_last:
                    outputs({"new_tokens": found.new, "ended": found.ended}, microbatch)

    def _forward(self, pack: Pack, outputs: Callable[[Mapping[str, Tensor], Microbatch], None]) -> None:
        self._topology.watchdog.beat()
        self._executor.evaluate(pack, outputs)
