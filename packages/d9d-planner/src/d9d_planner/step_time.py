"""Predicted time of a step. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from d9d_core.cost import BlockCost, Exchange, OpCost, StageCost, StageTimes, StrategyCost
from d9d_core.errors import JobError

from d9d_planner.device import ATTENTION_LENGTH, Device
from d9d_planner.layout import Layout, axis_group
from d9d_planner.network import Group, seconds
from d9d_planner.workload import Workload, steady

#: Bytes of a float32 number; narrower dtypes are computed at the rate of bfloat16.
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted time of a step, in seconds.

    Attributes:
        total: seconds of the step.
        parts: kind of work -> seconds, averaged over pipeline ranks; ``bubble`` is idle time in the pipeline.
    """

    total: float
    parts: dict[str, float]

    @property
    def bound(self) -> str:
        """Kind of work with the largest time that another layout could reduce; ``compute`` if there is none."""
        names = [name for name in self.parts if name not in _WORK]
        largest = max(names, key=lambda name: self.parts[name], default=None)
        if largest is None or self.parts[largest] < 0.05 * self.total:
            return "compute"
        return f"{largest} {self.parts[largest] / self.total:.0%}"


#: Kinds of work that every layout has; other kinds depend on the layout.
_WORK = ("products", "experts", "attention", "elementwise", "optimizer", "idle")
_OF_KIND = {
    "product": "products",
    "grouped_product": "experts",
    "attention": "attention",
    "memory": "elementwise",
}


@dataclass
class _Tally:
    """Times of one stage for one microbatch, in seconds."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, forward: float = 0.0, backward: float = 0.0) -> None:
        self.forward += forward
        self.backward += backward
        self.parts[kind] = self.parts.get(kind, 0.0) + forward + backward


class TimeModel:
    """Predicts the time of a step.

    Args:
        workload: workload of the job.
        layout: layout of the job.
        stages: costs of the stages.
        device: rates of the device.
    """

    def __init__(self, workload: Workload, layout: Layout, stages: list[StageCost], device: Device) -> None:
        self._workload, self._layout, self._stages, self._device = workload, layout, stages, device
        self._effect: StrategyCost = workload.strategy(layout)
        self._groups = workload.groups(layout)
        self._met = self._groups.replicas
        if self._effect.meets_every:  # replicas that take their own steps reduce no gradients among each other
            self._groups = replace(self._groups, replicas=Group(1), expert_replicas=Group(1))
        self._width = workload.compute_width(self._effect)
        self._found: dict[int, _Tally] = {}
        self._axes = {axis: axis_group(layout.mesh, axis) for axis in ("tp", "cp", "ep")}
        effect, groups = self._effect, tuple(self._axes.values())
        again = effect.recomputed, effect.keeps_attention
        self._common = (id(device), self._width, effect.compiled, again, effect.overlaps, groups)

    def least(self) -> float:
        """Approximate lower bound of a step's seconds under any schedule: counts a quarter of the bubble of 1F1B."""
        slowest = max(tally.forward + tally.backward for tally in self._tallies())
        return slowest * (self._layout.microbatches + (self._layout.mesh.pp - 1) / 4)

    def step(self) -> StepTime:
        """Predict the time of a step.

        Raises:
            JobError: the schedule cannot be simulated.
        """
        layout, count, ranks = self._layout, self._layout.microbatches, self._layout.mesh.pp
        tallies = self._tallies()
        parts: dict[str, float] = {}
        for tally in tallies:
            for name, taken in tally.parts.items():
                parts[name] = parts.get(name, 0.0) + taken * count / ranks
        busy = sum(parts.values())
        total = busy if layout.pipeline is None else self._simulated(tallies)
        parts["bubble"] = total - busy
        parts["optimizer"] = self._optimizer()
        ends = self._ends() + self._meeting()
        parts["data parallelism"] = parts.get("data parallelism", 0.0) + ends
        parts["idle"] = self._device.overhead * busy
        return StepTime(total + parts["optimizer"] + ends + parts["idle"], parts)

    def _simulated(self, tallies: list[_Tally]) -> float:
        boundary = max(stage.boundary for stage in self._stages)
        transfer = seconds("send", boundary, axis_group(self._layout.mesh, "pp"), self._device)
        times = StageTimes(
            [tally.forward for tally in tallies],
            [tally.backward for tally in tallies],
            [tally.weight for tally in tallies],
            transfer,
        )
        simulate, count = self._workload.simulator(self._layout), self._layout.microbatches
        simulated = min(count, steady(self._layout.mesh.pp))
        busy = self._busy(self._workload.hosts(self._layout), tallies)
        try:
            # In the steady state, each microbatch takes as long as the busiest rank computes for it.
            taken = simulate(self._workload.programs(self._layout, simulated), times)
            return taken + (count - simulated) * max(busy)
        except ValueError as error:
            raise JobError(f"pipeline: {error}") from error

    def _tallies(self) -> list[_Tally]:
        """Times of all stages, cached as most stages are alike."""
        for stage in self._stages:
            if id(stage) not in self._found:
                self._found[id(stage)] = self._stage(stage)
        return [self._found[id(stage)] for stage in self._stages]

    def _busy(self, hosts: list[int], tallies: list[_Tally]) -> list[float]:
        """Seconds of computation of each pipeline rank for one microbatch."""
        busy = [0.0] * self._layout.mesh.pp
        for host, tally in zip(hosts, tallies, strict=True):
            busy[host] += tally.forward + tally.backward
        return busy

    def _stage(self, stage: StageCost) -> _Tally:
        alone = self._own_times(stage)
        tally = _Tally(alone.forward, alone.backward, alone.weight, dict(alone.parts))
        self._data_parallel(tally, stage.blocks)
        of_block, blocks = self._device.launch / 3, [block for block in stage.blocks if block.is_block]
        ahead = of_block * sum(block.count for block in blocks)
        again = 2 + self._effect.recomputed
        behind = of_block * again * sum(block.count for block in blocks if block.has_backward)
        tally.add("host", max(0.0, ahead - tally.forward), max(0.0, behind - tally.backward))
        return tally

    def _own_times(self, stage: StageCost) -> _Tally:
        """Times of a stage without data-parallel communication; cached, because many layouts of a search share them."""
        key = (id(stage), self._common)
        if key not in self._workload.tallies:
            tally = _Tally()
            for block in stage.blocks:
                self._block(tally, block)
            self._workload.tallies[key] = (stage, self._device, tally)  # keeps the objects with these ids alive
        found: _Tally = self._workload.tallies[key][2]
        return found

    def _block(self, tally: _Tally, block: BlockCost) -> None:
        count, again = block.count, self._effect.recomputed if block.is_block and block.has_backward else 0.0
        # The backward of compiled and of recomputed blocks cannot be split into input and weight gradients.
        whole = self._effect.compiled or again > 0
        attended = multiplied = (0.0, 0.0)
        for op in block.ops:
            forward, backward = (
                self._op(op, op.flops, op.traffic),
                self._op(op, op.backward_flops, op.backward_traffic),
            )
            kind = "attention" if op.attention is not None else _OF_KIND[op.kind]
            tally.add(kind, count * forward, count * backward)
            if op.attention is not None:
                attended = (attended[0] + forward, attended[1] + backward)
            if op.kind == "product":
                multiplied = (multiplied[0] + forward, multiplied[1] + backward)
            if block.is_block and not whole and op.kind in ("product", "grouped_product"):
                tally.weight += count * max(0.0, backward - forward)
            if op.attention is None or not self._effect.keeps_attention:
                tally.add("recomputation", 0.0, count * again * forward)
        sent, returned = self._exchanges(block.exchanges), self._exchanges(block.backward_exchanges)
        if block.is_block:
            hidden = {_AXES[axis] for axis in self._effect.overlaps}
            for found, computed in zip((sent, returned), multiplied, strict=True):
                found |= {name: self._exposed(taken, computed) for name, taken in found.items() if name in hidden}
        beside = [self._exchanges(block.beside), self._exchanges(block.backward_beside)]
        for name in {*sent, *returned, *beside[0], *beside[1]}:
            ahead = sent.get(name, 0.0) + self._exposed(beside[0].get(name, 0.0), attended[0])
            back = returned.get(name, 0.0) + self._exposed(beside[1].get(name, 0.0), attended[1])
            tally.add(name, count * ahead, count * (back + again * ahead))

    def _exposed(self, taken: float, beside: float) -> float:
        """Seconds that overlapped communication adds: its excess over the computation, and the slowdown it causes."""
        return max(0.0, taken - beside) + self._device.interference * min(taken, beside)

    def _op(self, op: OpCost, flops: float, traffic: float) -> float:
        device = self._device
        if op.kind == "memory":
            return traffic / device.elementwise_bytes
        rate = {
            "product": device.product,
            "grouped_product": device.grouped_product,
            "attention": device.attention * self._attention_speed(op),
        }[op.kind]
        if self._width >= _FLOAT32:
            rate *= device.product_float32 / device.product
        return max(flops / rate, traffic / device.copy_bytes)

    def _attention_speed(self, op: OpCost) -> float:
        """FLOP/s of an attention relative to 4,096 positions: kernels are faster the more keys a query reads."""
        shape, half = op.attention, self._device.attention_half
        if shape is None or not op.flops or not half:
            return 1.0
        # Positions of a causal sample in which queries read as many keys on average; a product has two FLOPs per key.
        length = op.flops / (2 * shape.rows * shape.query_heads * shape.features)
        return length / (length + half) * (1 + half / ATTENTION_LENGTH)

    def _exchanges(self, exchanges: Iterable[Exchange]) -> dict[str, float]:
        """Seconds of the collectives of each mesh axis, by the name of the axis in the report."""
        found: dict[str, float] = {}
        for exchange in exchanges:
            name = _AXES[exchange.axis]
            if exchange.axis not in self._axes:
                self._axes[exchange.axis] = axis_group(self._layout.mesh, exchange.axis)
            group = self._axes[exchange.axis]
            if exchange.ranks is not None:
                group = Group(exchange.ranks, exchange.stride * group.stride)
            taken = seconds(exchange.operation, exchange.size, group, self._device)
            found[name] = found.get(name, 0.0) + exchange.count * taken
        return found

    def _data_parallel(self, tally: _Tally, blocks: tuple[BlockCost, ...]) -> None:
        """Add gathers of parameters and reductions of gradients, which overlap with one microbatch's computation."""
        effect, device = self._effect, self._device
        gathers, copies = self._gather(blocks)
        forward = backward = 0.0
        if effect.gathers == "twice":
            forward, backward = gathers, gathers
        elif effect.gathers == "once":
            forward = gathers
        moved = copies * (2 if effect.gathers == "twice" else 1)
        sums, replicas, reduced = self._reduce(blocks)
        if effect.reduces in ("each", "replicas_last"):
            backward, moved = backward + sums, moved + reduced
        if effect.reduces == "each":
            backward += replicas
        ahead, behind = self._exposed(forward, tally.forward), self._exposed(backward, tally.backward)
        tally.add("data parallelism", ahead, behind + moved / device.copy_bytes)
        if self._layout.microbatches > 1:  # accumulation reads and writes gradients
            number = self._numbers(blocks)
            added = 3 * self._workload.gradient_width * number
            tally.add("elementwise", 0.0, added / device.copy_bytes)

    def _gather(self, blocks: Iterable[BlockCost]) -> tuple[float, float]:
        """Seconds of all-gathering all parameters of blocks, and bytes of the copies that this needs.

        Shards are gathered directly into the parameters, after a cast to the compute dtype; offloaded parameters go
        through a buffer.
        """
        if self._effect.gathers == "never" or not self._effect.shards:
            return 0.0, 0.0
        stored = self._workload.parameter_width
        cast = 0 if self._effect.compute_width in (None, stored) else stored + self._width
        buffered = 2 * self._width if self._effect.offloads else 0
        taken = moved = 0.0
        for block in blocks:
            for number, group in self._sharded(block):
                taken += block.count * seconds("all_gather", number * self._width, group, self._device)
                moved += block.count * number * (buffered or cast / group.size) if group.size > 1 else 0.0
        return taken, moved

    def _reduce(self, blocks: Iterable[BlockCost]) -> tuple[float, float, float]:
        """Seconds to reduce the gradients of all blocks, to shards and over replicas, and bytes of the copies for this.

        Gradients with the parameters' dtype are reduced to shards in place, unless parameters are offloaded.
        """
        width = self._effect.reduce_width or max(self._width, self._workload.gradient_width)
        one_format = self._effect.compute_width is None and width == self._workload.parameter_width
        in_place = one_format and not self._effect.offloads
        sums = over_replicas = moved = 0.0
        if self._effect.reduces == "never":
            return 0.0, 0.0, 0.0
        for block in blocks:
            for number, group, replicas in self._reduced(block):
                size, shards = number * width, group if self._effect.shards else Group(1)
                sums += block.count * seconds("reduce_scatter", size, shards, self._device)
                over_replicas += block.count * seconds("all_reduce", size / shards.size, replicas, self._device)
                copied = replicas.size > 1 or (shards.size > 1 and not in_place)
                copied = copied and self._effect.gathers != "never"
                moved += block.count * 2 * size if copied else 0.0
        return sums, over_replicas, moved

    def _reduced(self, block: BlockCost) -> list[tuple[int, Group, Group]]:
        groups = self._groups
        return [
            (block.parameters - block.frozen, groups.shards, groups.replicas),
            (block.expert_parameters - block.frozen_experts, groups.expert_shards, groups.expert_replicas),
        ]

    def _sharded(self, block: BlockCost) -> list[tuple[int, Group]]:
        return [(block.parameters, self._groups.shards), (block.expert_parameters, self._groups.expert_shards)]

    def _numbers(self, blocks: Iterable[BlockCost]) -> float:
        """Number of the parameters in a list of blocks that this rank updates."""
        parts = (
            (number / group.size if self._effect.shards else number) * block.count
            for block in blocks
            for number, group, _ in self._reduced(block)
        )
        return sum(parts)

    def _optimizer(self) -> float:
        """Seconds of norm, clipping and update on the slowest rank."""
        hosts, width, device = self._workload.hosts(self._layout), self._workload.gradient_width, self._device
        updates, shards = self._workload.updates(self._layout), self._groups.shards
        sharing = shards if shards.size > 1 else axis_group(self._layout.mesh, "tp")
        taken = [0.0] * self._layout.mesh.pp
        for host, stage in zip(hosts, self._stages, strict=True):
            update = updates.of(stage.blocks)
            moved = update.traffic + width * self._numbers(stage.blocks)
            sent = 2 * seconds("all_to_all", update.exchanged, sharing, device)
            taken[host] += moved / device.copy_bytes + update.flops / device.product + sent
        return max(taken)

    def _meeting(self) -> float:
        """Seconds per step of the periodic averaging of replicas that take local steps (as in DiLoCo)."""
        if not self._effect.meets_every:
            return 0.0
        sizes = (_FLOAT32 * self._numbers(stage.blocks) for stage in self._stages)
        return max(seconds("all_reduce", size, self._met, self._device) for size in sizes) / self._effect.meets_every

    def _ends(self) -> float:
        """Seconds of data-parallel communication that no computation hides.

        These are the first gather and the last reduction of parameters outside blocks, and the part of the reductions
        after the last microbatch that exceeds its backward. If no strategy reduces gradients, they are all-reduced over
        ``cp`` after the last backward.
        """
        effect, cp = self._effect, axis_group(self._layout.mesh, "cp")
        if effect.reduces == "never":
            width = self._workload.gradient_width
            sizes = (width * self._numbers(stage.blocks) for stage in self._stages)
            return max(seconds("all_reduce", size, cp, self._device) for size in sizes)
        outside = [block for block in self._stages[0].blocks if not block.is_block]
        exposed = self._gather(outside)[0] + sum(self._reduce(outside)[:2])
        longest = 0.0
        for stage, tally in zip(self._stages, self._tallies(), strict=True):
            sums, replicas, _ = self._reduce(stage.blocks)
            waiting = {"last": sums + replicas, "replicas_last": replicas}.get(effect.reduces, 0.0)
            longest = max(longest, self._exposed(waiting, tally.backward))
        return exposed + longest


_AXES = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "pp": "pipeline",
    "dp_shard": "data parallelism",
    "dp_replicate": "data parallelism",
}
