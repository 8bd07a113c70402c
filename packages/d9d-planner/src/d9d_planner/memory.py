"""Predicted peak memory of each pipeline rank. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from d9d_core.cost import BlockCost, StageCost, StrategyCost

from d9d_planner.costs.update import Update, uneven_shards
from d9d_planner.layout import Layout
from d9d_planner.live import Moment
from d9d_planner.workload import Workload

#: Bytes outside of torch's allocator: first of the driver context and library kernels, then of the buffers of one
#: communicator (there is one for each mesh axis with several ranks).
_CONTEXT = 0.7 * 2**30
_COMMUNICATOR = 0.25 * 2**30
#: Memory in gaps between allocations, as a fraction of the allocated memory.
_FRAGMENTATION = 0.04
#: Number of blocks whose parameters are unsharded at a time: the current block, and the next, which is being gathered.
_GATHERED_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """Predicted peak memory of a rank, in bytes.

    Attributes:
        parameters, gradients, optimizer: shards of this rank.
        activations: tensors kept for backwards, over all microbatches in flight, including inputs of recomputed blocks;
            without ``logits``.
        logits: tensors that the heads keep for backwards.
        workspace: temporary tensors of the backward at the peak.
        communication: unsharded parameters and gradients, and tensors between stages.
        outside: driver, libraries and communicators, outside of torch's allocator.
        fragmentation: allowance for gaps between allocations.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    workspace: float
    communication: float
    outside: float
    fragmentation: float

    @property
    def allocated(self) -> float:
        """Peak bytes of torch's allocator, without gaps between allocations."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.workspace
            + self.communication
        )

    @property
    def needed(self) -> float:
        """Bytes of memory that the device must have."""
        return self.allocated + self.outside + self.fragmentation


@dataclass(frozen=True, slots=True)
class _Weights:
    """Numbers of parameters on a rank: unsharded, sharded, and trained parameters after sharding."""

    whole: float
    shards: float
    trained: float


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over a stage: bytes of activations and of logits per microbatch, parameters, and optimizer update."""

    kept: float
    logits: float
    weights: _Weights
    update: Update


class MemoryModel:
    """Predicts the peak memory of each pipeline rank in a layout.

    Args:
        workload: workload of the job.
        layout: layout of the job.
        stages: costs of the stages.
    """

    def __init__(self, workload: Workload, layout: Layout, stages: list[StageCost]) -> None:
        self._workload, self._layout, self._stages = workload, layout, stages
        self._effect: StrategyCost = workload.strategy(layout)
        self._groups = workload.groups(layout)
        self._updates = workload.updates(layout)
        self._sums: dict[int, _Sums] = {}

    def ranks(self) -> list[Memory]:
        """Peak memory of each pipeline rank: in a backward of its program, or in the optimizer's update."""
        hosts = self._workload.hosts(self._layout)
        held = [[stage for stage, host in enumerate(hosts) if host == rank] for rank in range(self._layout.mesh.pp)]
        return [
            max(
                (*(self._at(moment, stages) for moment in moments), self._updating(stages)),
                key=lambda memory: memory.needed,
            )
            for moments, stages in zip(self._workload.moments(self._layout), held, strict=True)
        ]

    def least(self) -> float:
        """Lower bound of the largest rank's memory under any schedule: one stage and one microbatch per rank."""
        load, on_device = self._workload, 0.0 if self._effect.offloads else 1.0
        alike = {id(cost): stage for stage, cost in enumerate(self._stages)}
        return max(
            on_device * (self._number(stage).shards * load.parameter_width + self._state(stage))
            + self._communication([stage])
            + self._kept(stage)
            for stage in alike.values()
        )

    def _updating(self, stages: list[int]) -> Memory:
        """Memory during the optimizer's update: no activations, complete gradients."""
        on_device = 0.0 if self._effect.offloads else 1.0
        shards = on_device * sum(self._number(stage).shards for stage in stages)
        updates = [self._sum(stage).update for stage in stages]
        parts = {
            "parameters": shards * self._workload.parameter_width,
            "optimizer": on_device * sum(self._state(stage) for stage in stages),
            "gradients": sum(self._gradients(stage) for stage in stages),
            "activations": 0.0,
            "logits": 0.0,
            "workspace": on_device * sum(update.workspace for update in updates),
            "communication": 0.0,
        }
        return self._memory(parts)

    def _at(self, moment: Moment, stages: list[int]) -> Memory:
        """Peak memory during the backward that begins in state ``moment``."""
        effect, load = self._effect, self._workload
        shards = sum(self._number(stage).shards for stage in stages)
        whole = sum(self._number(stage).whole for stage in stages)
        on_device = 0.0 if effect.offloads else 1.0
        kept = sum(count * self._kept(stage) for stage, count in moment.held)
        logits = sum(count * self._logits(stage) for stage, count in moment.held)
        graded = sum(self._number(stage).trained for stage in stages if stage in moment.graded)
        point = self._fullest(moment, graded * load.gradient_width * on_device)
        copies = whole * load.compute_width(effect) if load.job.precision.autocast else 0.0
        parts = {
            "parameters": shards * load.parameter_width * on_device,
            "optimizer": sum(self._state(stage) for stage in stages) * on_device,
            "gradients": point.gradients,
            "activations": kept - logits - point.released_activations,
            "logits": logits - point.released_logits,
            "workspace": point.workspace + copies,
            "communication": self._communication(stages),
        }
        return self._memory(parts)

    def _memory(self, parts: dict[str, float]) -> Memory:
        """Add memory outside of torch's allocator, and gaps, to the given parts."""
        outside = _CONTEXT + _COMMUNICATOR * sum(size > 1 for size in self._layout.mesh.sizes().values())
        return Memory(**parts, outside=outside, fragmentation=_FRAGMENTATION * sum(parts.values()))

    def _fullest(self, moment: Moment, graded: float) -> _Point:
        """Peak point of a stage's backward: at its heads, in its largest or first block, or at its end."""
        blocks = self._stages[moment.stage].blocks
        new = 0.0 if moment.stage in moment.graded else self._gradients(moment.stage)
        points = [_Point(graded, 0.0, 0.0, blocks[-1].workspace if not blocks[-1].is_block else 0.0)]
        layers = [block for block in blocks if block.is_block]
        ends = [block for block in blocks if not block.is_block]
        logits = self._logits(moment.stage)
        heads = sum(self._block_kept(block) for block in ends) - logits
        if layers:
            largest = max(layers, key=self._working)
            part = self._numbers(ends[-1:]).trained * self._workload.gradient_width
            points.append(_Point(graded + min(part, new), heads, logits, self._working(largest)))
            # Backward of the first block: only its activations are left, and the embedding has no gradient yet.
            part = self._numbers([block for block in blocks[:1] if not block.is_block]).trained
            freed = self._kept(moment.stage) - logits - self._block_kept(layers[0])
            left = graded + max(new - part * self._workload.gradient_width, 0.0)
            points.append(_Point(left, freed, logits, self._working(layers[0])))
        points.append(_Point(graded + new, self._kept(moment.stage) - logits, logits, 0.0))
        return max(points, key=lambda point: point.total)

    def _working(self, block: BlockCost) -> float:
        """Temporary bytes of a block's backward; a recomputed block adds its recomputed activations."""
        again = block.kept - self._attended(block) if self._effect.recomputed and block.has_backward else 0.0
        return block.workspace + again

    def _sum(self, stage: int) -> _Sums:
        """Sums of activations, logits, parameters and updates over a stage, cached because most stages are alike."""
        cost = self._stages[stage]
        if id(cost) not in self._sums:
            self._sums[id(cost)] = _Sums(
                sum(self._block_kept(block) * block.count for block in cost.blocks),
                sum(op.kept for block in cost.blocks for op in block.ops if op.name == "head"),
                self._numbers(cost.blocks),
                self._updates.of(cost.blocks),
            )
        return self._sums[id(cost)]

    def _state(self, stage: int) -> float:
        """Bytes of the optimizer's state, and of the tensors that strategies keep."""
        kept = self._effect.state + self._effect.copies * self._workload.parameter_width
        return self._sum(stage).update.state + self._number(stage).trained * kept

    def _kept(self, stage: int) -> float:
        return self._sum(stage).kept

    def _block_kept(self, block: BlockCost) -> float:
        part = self._effect.recomputed if block.is_block else 0.0
        return (1 - part) * block.kept + part * (block.input + self._attended(block))

    def _attended(self, block: BlockCost) -> float:
        """Bytes of attention outputs that a recomputed block keeps in addition to its input."""
        return block.attended if self._effect.keeps_attention else 0.0

    def _logits(self, stage: int) -> float:
        return self._sum(stage).logits

    def _gradients(self, stage: int) -> float:
        return 0.0 if self._effect.offloads else self._number(stage).trained * self._workload.gradient_width

    def _number(self, stage: int) -> _Weights:
        return self._sum(stage).weights

    def _numbers(self, blocks: tuple[BlockCost, ...] | list[BlockCost]) -> _Weights:
        """Numbers of parameters of blocks on one rank: unsharded, sharded, and trained parameters after sharding."""
        dense = sum(block.parameters * block.count for block in blocks)
        experts = sum(block.expert_parameters * block.count for block in blocks)
        trained = sum((block.parameters - block.frozen) * block.count for block in blocks)
        trained_experts = sum((block.expert_parameters - block.frozen_experts) * block.count for block in blocks)
        if not self._effect.shards:
            return _Weights(dense + experts, dense + experts, trained + trained_experts)
        size = self._groups.expert_shards.size
        uneven = [uneven_shards(block, self._groups.shards.size) for block in blocks]
        own = sum(block.count * largest for block, (largest, _) in zip(blocks, uneven, strict=True))
        own_trained = sum(block.count * largest for block, (_, largest) in zip(blocks, uneven, strict=True))
        return _Weights(dense + experts, own + experts / size, own_trained + trained_experts / size)

    def _communication(self, stages: list[int]) -> float:
        """Bytes of unsharded parameters, unsharded gradients, and tensors between stages."""
        effect, width = self._effect, self._workload.compute_width(self._effect)
        blocks = [block for stage in stages for block in self._stages[stage].blocks]
        between = 2 * max(self._stages[stage].boundary for stage in stages) if self._layout.mesh.pp > 1 else 0.0
        if effect.gathers == "never":
            return between
        whole = sum((block.parameters + block.expert_parameters) * block.count for block in blocks)
        largest = max((block.parameters + block.expert_parameters for block in blocks if block.is_block), default=0)
        root = sum(block.parameters for block in blocks if not block.is_block)
        gathered = whole if effect.gathers == "once" else root + _GATHERED_BLOCKS * largest
        waits = effect.reduces == "last" and self._layout.microbatches > 1
        trained = sum(_trained(block) * block.count for block in blocks)
        # Gradients of blocks are reduced block by block, gradients of all other parameters together.
        at_once = max([*map(_trained, blocks), sum(_trained(block) for block in blocks if not block.is_block)])
        reduced = (trained if waits else at_once) * (effect.reduce_width or width)
        return between + gathered * width + reduced


def _trained(block: BlockCost) -> int:
    """Number of trained parameters of a block."""
    return block.parameters + block.expert_parameters - block.frozen - block.frozen_experts


@dataclass(frozen=True, slots=True)
class _Point:
    """Memory at one point of a backward, in bytes: gradients so far, activations freed so far, temporary tensors."""

    gradients: float
    released_activations: float
    released_logits: float
    workspace: float

    @property
    def total(self) -> float:
        """Bytes in use at this point minus activations that were freed since the backward began."""
        return self.gradients + self.workspace - self.released_activations - self.released_logits
