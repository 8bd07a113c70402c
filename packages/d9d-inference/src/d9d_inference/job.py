"""Inference jobs from Python: load, build, run.

from d9d_inference.job import InferenceJob

InferenceJob.load("infer.yaml").build().run()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from d9d_core.config import PluginConfig
from d9d_core.job_file.inference import InferenceBatch, InferenceConfig
from d9d_core.job_file.open_union import Named
from d9d_core.job_file.resolve import Resolution
from d9d_core.program.placement import plan_pipeline
from d9d_engine.job import Job
from d9d_engine.joining import JoinsProcesses, print_note
from d9d_engine.run.interrupt import Interrupts

from d9d_inference.config import JsonlWriterConfig

if TYPE_CHECKING:
    from d9d_core.subscriber import Subscriber
    from d9d_engine.distributed.mesh import Topology

    from d9d_inference.runner import Inference


#: Sections that mean something else in an inference job, or only have a use while a model is trained.
_OF_TRAINING = ("task", "batch", "nonfinite", "subscribers", "peft")


class InferenceJob(JoinsProcesses, InferenceConfig):
    """A validated inference job that can be built and run.

    This module imports no torch: a wrong job file is reported at once.
    """

    # Again, because the other base has the field of training.
    batch: InferenceBatch = InferenceBatch()
    """Samples at a time."""
    writer: Annotated[PluginConfig, Named("writer")] = JsonlWriterConfig()
    """Format of the output, <run>/output with the format's suffix."""

    @classmethod
    def over(cls, job: Job, **values: Any) -> InferenceJob:
        """Make the inference job over a training job's model, which starts from its run's newest checkpoint.

        Args:
            job: the training job.
            values: sections of an inference job, such as ``task``; ``model``, ``data``, ``precision`` and the layout
                are the training job's where they are not given, and the run's name is its with that of the task.

        Raises:
            JobError: a value is wrong; one line per problem.
        """
        own = job.resolved()
        given = {name: own[name] for name in cls.model_fields if name in own and name not in _OF_TRAINING}
        # A run's weights have what its fine-tuning method added; where training started from says nothing about them.
        given["loading"] = {**own["loading"], "weights": True}
        model = {**own["model"], "pretrained": str(job.run.directory)}
        task = values.get("task")
        name = task if isinstance(task, str) else dict(task or {}).get("name", "inference")
        run = {**own["run"], "name": f"{job.run.name}-{name}"}
        return cls.from_values({**given, "model": model, "run": run, **values}, registry=job.registry)

    def check(self, world_size: int | None = None) -> Resolution[Any]:
        """Check all that needs no tensors: names, values, capabilities, views, the forward-only programs.

        Args:
            world_size: number of processes; by default, what the mesh needs.

        Raises:
            D9dError: the job cannot run.
        """
        resolution = super().check(world_size)
        plan_pipeline(self, resolution.selection).forward_program(0, self.microbatches)
        return resolution

    def build(
        self,
        note: Callable[[str], None] = print_note,
        topology: Topology | None = None,
        observers: Sequence[Subscriber] = (),
        interrupts: Interrupts | None = None,
        owning: bool = False,
    ) -> Inference:
        """Build what runs the job in this process. Collective over all ranks.

        Args:
            note: gets one line about each piece of long work, and warnings.
            topology: this process among others, from :meth:`joined`; by default it is alone.
            observers: subscribers besides those of the job file.
            interrupts: requests to stop, which may have come already; by default, signals during the run.
            owning: own the run's directory from now on; see :meth:`d9d_engine.job.Job.build`.

        Raises:
            D9dError: the job cannot run.
        """
        with self.composed(note, topology) as root:
            from d9d_inference.compose import build_inference

            return build_inference(root, observers, interrupts, owning)
