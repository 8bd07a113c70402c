"""Events of the training loop for subscribers: frozen, delivered in the order in which they happen.

    EventsReady         events of one's own can be emitted
    JobConfigured       the job is validated; nothing is built
    ModelPlanned        the model is assembled without memory
    DataReady           the data stream is open
    ModelReady          the model is built and initialised; a checkpoint is not loaded yet
    OptimizerReady      the optimizer and its state exist
    ForwardReady        the model can run on data of one's own, in any handler of TrainingStarts or later
    TrainingStarts      weights, data position and counters are final; the first step follows
    StepStarts          a pack is on the device
      ForwardBackwardStarts, ForwardBackwardEnds
      OptimizerStepStarts, OptimizerStepEnds
    StepEnds            with the step's device tensors; reading them waits for the GPU
    ValuesLogged        host values of an earlier step, when they have arrived
    EvaluationStarts, EvaluationEnds
    CheckpointStarts, CheckpointSaved
    SleepStarts, SleepEnds, WakeStarts, WakeEnds
                        the trainer's memory on the device is released, and taken back
    TrainingFinished    all steps are done
    TrainingStopped     interrupted; the state is saved
    TrainingFailed      an exception ends the run; it is raised again afterwards

Of an inference job:

    JobConfigured, ModelPlanned, DataReady, ModelReady
    InferenceStarts     progress is known; the first pack follows
    PackStarts, PackEnds
    RowsWritten         rows are on the disk, and a kill loses none of them
    InferenceFinished, InferenceStopped, InferenceFailed

A subscriber that raises ends the run: observers are part of the job. It is not called again; between TrainingStarts and
TrainingFinished, all ranks finish the same step and save before the exception is raised, whatever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from d9d_core.data import DataStream
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
    "CATALOGUE", "CheckpointSaved", "CheckpointStarts", "DataReady", "EvaluationEnds", "EvaluationStarts",
    "EventsReady", "ForwardBackwardEnds", "ForwardBackwardStarts", "ForwardReady", "InferenceFailed",
    "InferenceFinished", "InferenceStarts", "InferenceStopped", "JobConfigured", "ModelPlanned", "ModelReady",
    "OptimizerReady", "OptimizerStepEnds", "OptimizerStepStarts", "PackEnds", "PackStarts", "RowsWritten",
    "SaveReport", "SleepEnds", "SleepStarts", "StepEnds", "StepResult", "StepStarts", "TrainingFailed",
    "TrainingFinished", "TrainingStarts", "TrainingStopped", "ValuesLogged", "WakeEnds", "WakeStarts",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Report of a finished save.

    Attributes:
        step: optimizer steps done when it was taken.
        location: where it is.
        stall_seconds: how long it kept training from going on, on this rank.
        write_seconds: how long it took to write.
        bytes: its size, over all ranks.
        warning: an older checkpoint could not be removed, and why.
    """

    step: int
    location: str
    stall_seconds: float
    write_seconds: float
    bytes: int
    warning: str | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step as device tensors, equal on all ranks: nothing here waits for the GPU.

    Attributes:
        loss: float32 0-d, the weighted loss over the full batch.
        terms: the unscaled mean of each loss term, by name.
        grad_norm: float32 0-d, before clipping.
        finite: bool 0-d; where false, the step changed nothing.
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
    """Events of one's own can be emitted from now on.

    Attributes:
        emit: calls the handlers of an :class:`~d9d_core.subscriber.OwnEvent`.
    """

    emit: Callable[[OwnEvent], None]


@dataclass(frozen=True, slots=True)
class JobConfigured:
    """The job is validated; nothing is built."""

    job: BaseJob


@dataclass(frozen=True, slots=True)
class ModelPlanned:
    """The model is assembled on the meta device, with all strategies; nothing is allocated or read."""

    job: BaseJob


@dataclass(frozen=True, slots=True)
class DataReady:
    """The data stream is open."""

    stream: DataStream


@dataclass(frozen=True, slots=True)
class ModelReady:
    """The model is built and initialised.

    Attributes:
        stage: what this rank has of it: the full model, or its pipeline stages as one module.
        stage_holders: which pipeline rank holds which tensor, as
            :class:`d9d_weights.sharding.stage_holders.StageHolders`; ``None`` if each
            holds all.
    """

    stage: nn.Module
    stage_holders: Any = None


@dataclass(frozen=True, slots=True)
class OptimizerReady:
    """The optimizer and its state exist."""

    optimizer: Optimizer


@dataclass(frozen=True, slots=True)
class ForwardReady:
    """The model can run forward on data of one's own between steps.

    That is in handlers of ``TrainingStarts`` and ``StepEnds``, and of what lies between two steps.

    Attributes:
        forward: runs it, without a trace in the training; collective over all ranks.
        topology: this process among others.
    """

    forward: ForwardPass
    topology: Topology


@dataclass(frozen=True, slots=True)
class TrainingStarts:
    """Training starts or continues; ``step`` steps are done already.

    Attributes:
        step: steps that are done.
        total_steps: of the whole run.
        log: takes values of the subscriber's own from now on, until training ends.
    """

    step: int
    total_steps: int
    log: RunLog


@dataclass(frozen=True, slots=True)
class StepStarts:
    """Step ``step`` (0-based) begins."""

    step: int
    pack: Pack


@dataclass(frozen=True, slots=True)
class ForwardBackwardStarts:
    """The program of the step begins."""

    step: int


@dataclass(frozen=True, slots=True)
class ForwardBackwardEnds:
    """Every backward was issued; gradients are not reduced or clipped yet."""

    step: int


@dataclass(frozen=True, slots=True)
class OptimizerStepStarts:
    """Gradients are final and clipped; the optimizer steps next.

    Where nobody subscribes to this event or the next, the optimizer may clip inside of its step instead.
    """

    step: int


@dataclass(frozen=True, slots=True)
class OptimizerStepEnds:
    """Parameters are updated; gradients still exist."""

    step: int


@dataclass(frozen=True, slots=True)
class StepEnds:
    """Step ``step`` (0-based) is done."""

    step: int
    result: StepResult


@dataclass(frozen=True, slots=True)
class ValuesLogged:
    """Host values after ``step`` steps (1-based), as the trackers get them."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvaluationStarts:
    """An evaluation starts after ``step`` steps."""

    step: int


@dataclass(frozen=True, slots=True)
class EvaluationEnds:
    """An evaluation ended, with the measured values."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointStarts:
    """A save starts after ``step`` steps."""

    step: int


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The checkpoint exists; if it was written beside the training, some steps later.

    Attributes:
        report: which step, where, how large, how long training waited and how long writing took.
    """

    report: SaveReport


@dataclass(frozen=True, slots=True)
class SleepStarts:
    """Sleep begins after ``step`` steps: what the tags stand for is about to leave the device."""

    step: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SleepEnds:
    """Sleep has begun: so many bytes of tensors have left the device, and nobody may use them."""

    step: int
    tags: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class WakeStarts:
    """Waking begins: what the tags stand for is about to return."""

    step: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WakeEnds:
    """Waking has ended: so many bytes of tensors are on the device again, as they were."""

    step: int
    tags: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class TrainingFinished:
    """All steps are done, saved and exported."""

    step: int


@dataclass(frozen=True, slots=True)
class TrainingStopped:
    """The run was interrupted after ``step`` steps; the state is saved."""

    step: int


@dataclass(frozen=True, slots=True)
class TrainingFailed:
    """The run ends with ``error``."""

    step: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class InferenceStarts:
    """Inference starts or continues; the first ``samples`` of ``total_samples`` are done already."""

    samples: int
    total_samples: int


@dataclass(frozen=True, slots=True)
class PackStarts:
    """The pack that begins with sample number ``first`` is on the device."""

    first: int
    pack: Pack


@dataclass(frozen=True, slots=True)
class PackEnds:
    """All forwards of the pack that begins with sample number ``first`` were issued."""

    first: int


@dataclass(frozen=True, slots=True)
class RowsWritten:
    """Rows of the first ``samples`` samples are on the disk; told on the first rank only."""

    samples: int


@dataclass(frozen=True, slots=True)
class InferenceFinished:
    """All rows are written and joined."""

    samples: int


@dataclass(frozen=True, slots=True)
class InferenceStopped:
    """Inference was interrupted after ``samples`` samples; their rows are written."""

    samples: int


@dataclass(frozen=True, slots=True)
class InferenceFailed:
    """The run ends with ``error``; rows of the first ``samples`` samples are written."""

    samples: int
    error: BaseException


#: Types of all events, in the order in which a run emits them first.
CATALOGUE: tuple[type[Any], ...] = (
    EventsReady,
    JobConfigured,
    ModelPlanned,
    DataReady,
    ModelReady,
    OptimizerReady,
    ForwardReady,
    TrainingStarts,
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
