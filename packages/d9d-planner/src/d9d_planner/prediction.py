"""Predictions of a job's memory and time on a device. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from d9d_core.cost import StageCost
from d9d_core.job_file.job import JobConfig
from d9d_core.plugin import ViewSpec
from d9d_core.registry.registry import Registry

from d9d_planner.device import Device
from d9d_planner.layout import Layout
from d9d_planner.memory import Memory, MemoryModel
from d9d_planner.step_time import StepTime, TimeModel
from d9d_planner.workload import Workload


@dataclass(frozen=True)
class Prediction:
    """Prediction of memory and time for one layout of a job.

    Attributes:
        workload: the job.
        layout: the layout.
        device: what it runs on.
    """

    workload: Workload
    layout: Layout
    device: Device

    @cached_property
    def ranks(self) -> list[Memory]:
        """Memory of each pipeline rank.

        Raises:
            D9dError: the model or the schedule cannot be laid out so.
        """
        stages = self.workload.stages(self.layout, self.device.memory)
        return MemoryModel(self.workload, self.layout, stages).ranks()

    @cached_property
    def memory(self) -> Memory:
        """Memory of the fullest rank."""
        return max(self.ranks, key=lambda memory: memory.needed)

    @cached_property
    def least_time(self) -> float:
        """Seconds of a step under the best schedule, about; no schedule is looked at for that.

        Raises:
            D9dError: the model cannot be laid out so.
        """
        return TimeModel(self.workload, self.layout, self._one_each, self.device).least()

    @cached_property
    def least_memory(self) -> float:
        """Bytes of the fullest rank under any schedule, at least.

        Raises:
            D9dError: the model cannot be laid out so.
        """
        return MemoryModel(self.workload, self.layout, self._one_each).least()

    @cached_property
    def time(self) -> StepTime:
        """Time of a step."""
        stages = self.workload.stages(self.layout, self.device.memory)
        return TimeModel(self.workload, self.layout, stages, self.device).step()

    @cached_property
    def _one_each(self) -> list[StageCost]:
        """Costs of stages if each pipeline rank has one."""
        return self.workload.stages(self.layout, self.device.memory, self.layout.mesh.pp)

    @property
    def fits(self) -> bool:
        """Whether the device has the memory."""
        return self.memory.needed <= self.device.memory

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a second on each device."""
        return (
            self.layout.size
            * self.workload.texts
            * self.workload.length
            / self.time.total
            / self.layout.mesh.world_size
        )


def predict(job: JobConfig, registry: Registry, views: dict[str, ViewSpec], device: Device) -> Prediction:
    """Predict a job as it is.

    Raises:
        D9dError: nothing describes the cost of its model.
    """
    return Prediction(Workload(job, registry, views), Layout.of(job), device)
