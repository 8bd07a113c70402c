"""Runner of overlapped pairs: a forward and a backward of two stages on one rank, at the same time.

A Python thread inside a backward cannot run a forward. The backward therefore gets its own thread, and both threads
take turns at yield points (:mod:`~d9d_pipeline.overlap.yield_points`,
:mod:`~d9d_pipeline.overlap.yielding_dispatcher`): one thread launches kernels up to its next yield point, long before
the GPU executes them, then the other thread does. On the GPU the streams of the two stages run concurrently: one
computes while the communication of the other is in progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from d9d_core.traits import HasBlocks, HasExperts, modules_with
from torch import nn

from d9d_pipeline.overlap.turns import AbortedError, Side, Turns
from d9d_pipeline.overlap.yield_points import BlockHook, Remove, YieldPoints, add_block_hook
from d9d_pipeline.overlap.yielding_dispatcher import reaches_other_ranks, replace_dispatcher


class PairRunner:
    """Runner of overlapped pairs; made once for the stages of a rank, after all strategies were applied.

    Adds yield points to the stages, but changes no module, parameter or name. A forward yields where it enters a block
    (trait ``HasBlocks``), a backward where it leaves one; both yield after a layer with experts on several ranks
    (``HasExperts``) has sent tensors. If the stages have neither blocks nor such layers, a pair runs a forward and then
    a backward.

    Args:
        stages: stages of the rank, by index.
        device: device of the stages.

    Attributes:
        blocks: number of blocks with a yield point.
    """

    def __init__(self, stages: Mapping[int, nn.Module], device: torch.device) -> None:
        self._device = device
        self._points = YieldPoints()
        self._removes: list[Remove] = []
        self.blocks = sum(self._install(stage) for stage in stages.values())

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run a forward and a backward. On return all work is launched; a GPU may still be computing.

        Each function must launch on the stream of its stage, see :class:`~d9d_pipeline.overlap.streams.StageStreams`.
        The order of their collectives depends on the model alone, so all ranks of a process group must run the same
        pair.

        Args:
            forward: called in this thread. It may not run a backward on the GPU, which would wait for the other
                backward.
            backward: called in another thread, with autograd's defaults: grad mode on, autocast off. When the backward
                yields, the states of random number generators are unchanged, because no yield point is inside a
                recomputed forward. A recomputed forward empties autocast's cache of cast weights, so a weight that the
                forward of the pair uses twice may be cast twice; this changes the rounding of its gradient.

        Raises:
            BaseException: the exception of the side (forward or backward) that failed first. The other side ends at the
                yield point where it waits. FSDP2 and process groups are in an undefined state, so the job should end.
        """
        turns = Turns()
        device = torch.cuda.current_device() if self._device.type == "cuda" else None
        errors: list[BaseException] = []  # only one side runs at a time, so the first is the cause

        def play(side: Side, part: Callable[[], None]) -> None:
            failed = True
            try:
                turns.begin(side)
                part()
                failed = False
            except AbortedError:
                pass
            except BaseException as error:
                errors.append(error)
            finally:
                turns.end(side, failed=failed)

        def beside() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own current device
            backward()

        thread = threading.Thread(target=play, args=(Side.BACKWARD, beside), name="d9d-backward", daemon=True)
        self._points.turns = turns
        try:
            thread.start()
            play(Side.FORWARD, forward)
            thread.join()
        finally:
            self._points.turns = None
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # break the reference cycle with this frame, which keeps the step's tensors

    def close(self) -> None:
        """Remove all yield points from the stages."""
        while self._removes:
            self._removes.pop()()

    def _install(self, stage: nn.Module) -> int:
        layers = [layer for layer in modules_with(stage, HasExperts).values() if reaches_other_ranks(layer.dispatcher)]
        self._removes += [replace_dispatcher(layer, self._points) for layer in layers]
        sending = {id(layer) for layer in layers}
        # A model may return its backbone's blocks, so model and backbone may both return the same block.
        owners = modules_with(stage, HasBlocks).values()
        blocks = {id(block): block for owner in owners for block in owner.blocks().values()}
        for block in blocks.values():
            inside = any(id(module) in sending for module in block.modules())
            self._removes.append(add_block_hook(block, BlockHook(self._points, forward=not inside)))
        return len(blocks)
