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


#: Sections of a training job that an inference job does not take over, as they differ or only training uses them.
_OF_TRAINING = ("task", "batch", "nonfinite", "subscribers", "peft")


class InferenceJob(JoinsProcesses, InferenceConfig):
    """A validated inference job that can be built and run.

    This module imports no torch: an invalid job file is reported before the slow import.
    """

    # Repeated from InferenceConfig, because the other base class has the training job's field of this name.
    batch: InferenceBatch = InferenceBatch()
    """Number of samples that are processed together."""
    writer: Annotated[PluginConfig, Named("writer")] = JsonlWriterConfig()
    """Format of the output file, <run>/output with the format's suffix."""

    @classmethod
    def over(cls, job: Job, **values: Any) -> InferenceJob:
        """Make an inference job for a training job's model, with the weights of its newest checkpoint.

        Args:
            job: training job.
            values: sections of the inference job, such as ``task``. By default, ``model``, ``data``, ``precision`` and
                the layout are taken from the training job, and the name of the run is the training run's name with the
                name of the task appended.

        Raises:
            JobError: a value is invalid; one line per problem.
        """
        own = job.resolved()
        given = {name: own[name] for name in cls.model_fields if name in own and name not in _OF_TRAINING}
        # The run's checkpoints replace the weights that training started from, and include the adapter.
        given["loading"] = {**own["loading"], "weights": True}
        model = {**own["model"], "pretrained": str(job.run.directory)}
        task = values.get("task")
        name = task if isinstance(task, str) else dict(task or {}).get("name", "inference")
        run = {**own["run"], "name": f"{job.run.name}-{name}"}
        return cls.from_values({**given, "model": model, "run": run, **values}, registry=job.registry)

    def check(self, world_size: int | None = None) -> Resolution[Any]:
        """Check everything that needs no tensors: names, values, capabilities, and the pipeline's forward-only program.

        Args:
            world_size: number of processes; by default, the product of the mesh axes.

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
        """Build the inference run of the job in this process. Collective over all ranks.

        Args:
            note: called with one line of text for each warning and at the start of long operations.
            topology: rank and process groups, from :meth:`joined`; by default, a single process.
            observers: subscribers in addition to the subscribers in the job file.
            interrupts: stop requests, which may already have arrived; by default, signals received during the run.
            owning: take ownership of the run's directory now; see :meth:`d9d_engine.job.Job.build`.

        Raises:
            D9dError: the job cannot run.
        """
        with self.composed(note, topology) as root:
            from d9d_inference.compose import build_inference

            return build_inference(root, observers, interrupts, owning)
