"""Predicted memory and time of a job on a device. Imports no torch."""

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
    """Predicted memory and time of one layout of a job.

    Attributes:
        workload: workload of the job.
        layout: layout of the job.
        device: rates of the device.
    """

    workload: Workload
    layout: Layout
    device: Device

    @cached_property
    def ranks(self) -> list[Memory]:
        """Predicted peak memory of each pipeline rank.

        Raises:
            D9dError: the model or the schedule does not support the layout.
        """
        stages = self.workload.stages(self.layout, self.device.memory)
        return MemoryModel(self.workload, self.layout, stages).ranks()

    @cached_property
    def memory(self) -> Memory:
        """Predicted peak memory of the pipeline rank that needs the most."""
        return max(self.ranks, key=lambda memory: memory.needed)

    @cached_property
    def least_time(self) -> float:
        """Approximate lower bound of the seconds of a step under any schedule, without simulating one.

        Raises:
            D9dError: the model does not support the layout.
        """
        return TimeModel(self.workload, self.layout, self._single_stages, self.device).least()

    @cached_property
    def least_memory(self) -> float:
        """Lower bound of the largest rank's memory in bytes under any schedule.

        Raises:
            D9dError: the model does not support the layout.
        """
        return MemoryModel(self.workload, self.layout, self._single_stages).least()

    @cached_property
    def time(self) -> StepTime:
        stages = self.workload.stages(self.layout, self.device.memory)
        return TimeModel(self.workload, self.layout, stages, self.device).step()

    @cached_property
    def _single_stages(self) -> list[StageCost]:
        """Costs of the stages with one stage per pipeline rank."""
        return self.workload.stages(self.layout, self.device.memory, self.layout.mesh.pp)

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return self.memory.needed <= self.device.memory

    @property
    def tokens_per_second(self) -> float:
        return (
            self.layout.size
            * self.workload.texts
            * self.workload.length
            / self.time.total
            / self.layout.mesh.world_size
        )


def predict(job: JobConfig, registry: Registry, views: dict[str, ViewSpec], device: Device) -> Prediction:
    """Predict a job with its own layout.

    Raises:
        D9dError: the model or its fine-tuning method has no cost description.
    """
    return Prediction(Workload(job, registry, views), Layout.of(job), device)
