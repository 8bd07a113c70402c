"""Events of the training loop for subscribers: frozen, delivered in order.

    EventsReady         a subscriber can emit its own events
    JobConfigured       the job is validated; nothing is built yet
    ModelPlanned        the model is assembled on the meta device
    DataReady           the data stream is open
    ModelReady          the model is built and initialised; no checkpoint is loaded yet
    OptimizerReady      the optimizer and its state exist
    ForwardReady        handlers of TrainingStarts and later events can run the model on their own data
    TrainingStarts      weights, data position and counters are final; the first step follows
    AttemptStarts       the replicas that share a step have agreed to attempt it; only with elastic replicas
    StepStarts          the step's pack (its microbatches on this rank) is on the device
      ForwardBackwardStarts, ForwardBackwardEnds
      OptimizerStepStarts, OptimizerStepEnds
    StepEnds            with the step's device tensors; reading their values synchronizes with the GPU
    ValuesLogged        host values of an earlier step, once they have been copied
    EvaluationStarts, EvaluationEnds
    CheckpointStarts, CheckpointSaved
    SleepStarts, SleepEnds, WakeStarts, WakeEnds
                        the trainer's device memory is released, and later restored
    TrainingFinished    all steps are done, or a subscriber ended the run early
    TrainingStopped     interrupted; the state is saved
    TrainingFailed      an exception ends the run; it is raised again after this event

Events of an inference job:

    JobConfigured, ModelPlanned, DataReady, ModelReady
    InferenceStarts     the number of finished samples is known; the first pack follows
    PackStarts, PackEnds
    RowsWritten         rows are on disk and survive a kill
    InferenceFinished, InferenceStopped, InferenceFailed

An exception in a subscriber's handler ends the run, and the subscriber is not called again. If the exception occurs
between TrainingStarts and TrainingFinished, all ranks first finish the same step and save a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from d9d_core.data import DataStream
from d9d_core.elastic import Attempt
from d9d_core.forward import ForwardPass
from d9d_core.job_file.job import BaseJob
from d9d_core.optimizer import Optimizer
from d9d_core.subscriber import OwnEvent
from d9d_core.topology import Topology
from d9d_core.tracker import RunLog
from d9d_core.types import Pack

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "CATALOGUE", "AttemptStarts", "CheckpointSaved", "CheckpointStarts", "DataReady", "EvaluationEnds",
    "EvaluationStarts", "EventsReady", "ForwardBackwardEnds", "ForwardBackwardStarts", "ForwardReady",
    "InferenceFailed", "InferenceFinished", "InferenceStarts", "InferenceStopped", "JobConfigured", "ModelPlanned",
    "ModelReady", "OptimizerReady", "OptimizerStepEnds", "OptimizerStepStarts", "PackEnds", "PackStarts", "RowsWritten",
    "SaveReport", "SleepEnds", "SleepStarts", "StepEnds", "StepResult", "StepStarts", "TrainingFailed",
    "TrainingFinished", "TrainingStarts", "TrainingStopped", "ValuesLogged", "WakeEnds", "WakeStarts",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Report of a finished save.

    Attributes:
        step: number of optimizer steps in the checkpoint.
        location: path or address of the checkpoint.
        stall_seconds: time for which the save blocked training on this rank.
        write_seconds: time that writing took.
        bytes: size of the checkpoint, over all ranks.
        warning: message that an older checkpoint could not be removed; ``None`` if there is none.
    """

    step: int
    location: str
    stall_seconds: float
    write_seconds: float
    bytes: int
    warning: str | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step as device tensors, equal on all ranks. Creating a result does not synchronize with the GPU.

    Attributes:
        loss: float32 0-d, the weighted loss over the full batch.
        terms: loss term -> its mean before the coefficient is applied.
        grad_norm: float32 0-d, gradient norm before clipping; if replicas take their own optimizer steps, the mean of
            their norms.
        finite: bool 0-d; where false, the step left the training state unchanged.
        tokens: 0-d, tokens (or samples) of the step over all ranks.
        stop: bool 0-d, whether any rank was asked to stop.
    """

    loss: Tensor
    terms: Mapping[str, Tensor]
    grad_norm: Tensor
    finite: Tensor
    tokens: Tensor
    stop: Tensor


@dataclass(frozen=True, slots=True)
class EventsReady:
    """Subscribers can emit their own events from now on.

    Attributes:
        emit: function that calls the handlers of an :class:`~d9d_core.subscriber.OwnEvent`.
    """

    emit: Callable[[OwnEvent], None]


@dataclass(frozen=True, slots=True)
class JobConfigured:
    """The job is validated; nothing is built yet."""

    job: BaseJob


@dataclass(frozen=True, slots=True)
class ModelPlanned:
    """The model is assembled on the meta device, with all strategies; no memory is allocated, no weights are read."""

    job: BaseJob


@dataclass(frozen=True, slots=True)
class DataReady:
    """The data stream is open."""

    stream: DataStream


@dataclass(frozen=True, slots=True)
class ModelReady:
    """The model is built and initialised.

    Attributes:
        stage: part of the model on this rank: the full model, or its pipeline stages as one module.
        stage_holders: mapping from tensors to the pipeline ranks that hold them, a
            :class:`d9d_weights.sharding.stage_holders.StageHolders`; ``None`` if each rank holds all tensors.
    """

    stage: nn.Module
    stage_holders: Any = None


@dataclass(frozen=True, slots=True)
class OptimizerReady:
    """The optimizer and its state exist."""

    optimizer: Optimizer


@dataclass(frozen=True, slots=True)
class ForwardReady:
    """Subscribers can run the model forward on their own data between steps.

    Handlers of ``TrainingStarts``, of ``StepEnds``, and of the events between two steps may do so.

    Attributes:
        forward: function that runs the forward without effect on training; collective over all ranks.
        topology: coordinates, meshes and groups of this process.
    """

    forward: ForwardPass
    topology: Topology


@dataclass(frozen=True, slots=True)
class TrainingStarts:
    """Training starts or continues; ``step`` steps are done already.

    Attributes:
        step: number of steps that are done.
        total_steps: steps of the whole run.
        log: log for the subscriber's own values, until training ends.
    """

    step: int
    total_steps: int
    log: RunLog


@dataclass(frozen=True, slots=True)
class AttemptStarts:
    """An attempt at step ``step`` (0-based) begins, in a job with elastic replicas (:mod:`d9d_core.elastic`).

    If a replica is lost during the attempt, the attempt is undone: AttemptStarts, StepStarts and the events of the
    forward and backward follow again for the same step. If this replica takes the state of a replica that is ahead,
    this replica has no events of the steps that it skips.
    """

    step: int
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class StepStarts:
    """Step ``step`` (0-based) begins."""

    step: int
    pack: Pack


@dataclass(frozen=True, slots=True)
class ForwardBackwardStarts:
    """The forwards and backwards of the step begin."""

    step: int


@dataclass(frozen=True, slots=True)
class ForwardBackwardEnds:
    """Every backward was launched; reductions of gradients may still run, and gradients are not clipped yet."""

    step: int


@dataclass(frozen=True, slots=True)
class OptimizerStepStarts:
    """Gradients are final and clipped; the optimizer step follows.

    If no subscriber handles this event or :class:`OptimizerStepEnds`, the optimizer may clip inside its step instead.
    """

    step: int


@dataclass(frozen=True, slots=True)
class OptimizerStepEnds:
    """Parameters are updated; gradients still exist."""

    step: int


@dataclass(frozen=True, slots=True)
class StepEnds:
    """Step ``step`` (0-based) is done; ``result`` has its loss and gradient norm."""

    step: int
    result: StepResult


@dataclass(frozen=True, slots=True)
class ValuesLogged:
    """Host values after ``step`` steps (1-based), as passed to the trackers."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvaluationStarts:
    """An evaluation starts after ``step`` steps."""

    step: int


@dataclass(frozen=True, slots=True)
class EvaluationEnds:
    """An evaluation ended; ``values`` holds its losses and metrics by name."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointStarts:
    """A save starts after ``step`` steps."""

    step: int


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is complete. An asynchronous save ends some steps after it started.

    Attributes:
        report: step, location, size and times of the save.
    """

    report: SaveReport


@dataclass(frozen=True, slots=True)
class SleepStarts:
    """Sleep begins after ``step`` steps: the memory groups named by the tags are about to leave the device."""

    step: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SleepEnds:
    """Sleep has begun: ``bytes`` of tensors have left the device and must not be used until they wake."""

    step: int
    tags: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class WakeStarts:
    """Waking begins: device memory for the memory groups named by the tags is about to be allocated again."""

    step: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WakeEnds:
    """Waking has ended: ``bytes`` of tensors are on the device again, with the values they had."""

    step: int
    tags: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class TrainingFinished:
    """The run is finished: all steps are done, or a subscriber ended it early; it is saved and exported."""

    step: int


@dataclass(frozen=True, slots=True)
class TrainingStopped:
    """The run was interrupted after ``step`` steps; the state is saved."""

    step: int


@dataclass(frozen=True, slots=True)
class TrainingFailed:
    """The run ends with the exception ``error``."""

    step: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class InferenceStarts:
    """Inference starts or continues; ``samples`` of ``total_samples`` are done already."""

    samples: int
    total_samples: int


@dataclass(frozen=True, slots=True)
class PackStarts:
    """A pack, the microbatches of one batch, is on the device; its first sample has index ``first``."""

    first: int
    pack: Pack


@dataclass(frozen=True, slots=True)
class PackEnds:
    """All forwards of a pack were launched; its first sample has index ``first``."""

    first: int


@dataclass(frozen=True, slots=True)
class RowsWritten:
    """Rows of the first ``samples`` samples are on disk; emitted on the first rank only."""

    samples: int


@dataclass(frozen=True, slots=True)
class InferenceFinished:
    """All rows are written and joined to one file."""

    samples: int


@dataclass(frozen=True, slots=True)
class InferenceStopped:
    """Inference was interrupted after ``samples`` samples; their rows are written."""

    samples: int


@dataclass(frozen=True, slots=True)
class InferenceFailed:
    """The run ends with the exception ``error``; rows of the first ``samples`` samples are written."""

    samples: int
    error: BaseException


#: Types of all events, in the order of their first emission in a run.
CATALOGUE: tuple[type[Any], ...] = (
    EventsReady,
    JobConfigured,
    ModelPlanned,
    DataReady,
    ModelReady,
    OptimizerReady,
    ForwardReady,
    TrainingStarts,
    AttemptStarts,
    StepStarts,
    ForwardBackwardStarts,
    ForwardBackwardEnds,
    OptimizerStepStarts,
    OptimizerStepEnds,
    StepEnds,
    ValuesLogged,
    EvaluationStarts,
    EvaluationEnds,
    CheckpointStarts,
    CheckpointSaved,
    SleepStarts,
    SleepEnds,
    WakeStarts,
    WakeEnds,
    TrainingFinished,
    TrainingStopped,
    TrainingFailed,
    InferenceStarts,
    PackStarts,
    PackEnds,
    RowsWritten,
    InferenceFinished,
    InferenceStopped,
    InferenceFailed,
)
