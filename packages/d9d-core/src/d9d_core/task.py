"""Tasks: model inputs from a microbatch, loss sums from the model's outputs.

Start here: :class:`Task`, and :class:`StageInputs`, which it makes of a microbatch. The loop divides the summed losses
by the summed weights of all microbatches and ranks::

    from d9d_core.task import StageInputs
    from torch.nn.functional import mse_loss

    class Regression:
        coefficients = {"mse": 1.0}

        def __init__(self, config): ...
        def check(self, model, facts): ...
        def count(self, microbatch): return len(microbatch["x"])
        def weights(self, microbatch): return {"mse": microbatch["y"].new_tensor(microbatch["y"].numel())}
        def inputs(self, microbatch): return StageInputs(first={"x": microbatch["x"]})
        def losses(self, outputs, microbatch): return {"mse": mse_loss(outputs["y"], microbatch["y"], reduction="sum")}
        def observations(self, outputs, microbatch): return {}

The other protocols are optional: a task that has their methods gets their calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from d9d_core.types import Microbatch, State

if TYPE_CHECKING:
    from torch import Tensor

    from d9d_core.metric import Metric
    from d9d_core.model import PositionShare
    from d9d_core.topology import Topology

__all__ = [
    "FinishesTraining", "HasHparams", "LanguageModelTask", "OwnsMetrics", "SeesSteps", "SplitsPositions",
    "StageInputs", "StatefulTask", "Task", "UsesTopology", "WeighsOutputs",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class StageInputs:
    """Keyword arguments of a stage's forward.

    Attributes:
        first: for the first stage only; later stages get the previous stage's outputs instead.
        shared: for every stage.
        kept: what is computed here once and needed again: ``losses`` and ``observations`` find these tensors among the
            outputs, in training, evaluation and inference. The model never sees them.
    """

    first: Mapping[str, Tensor]
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class LanguageModelTask(Protocol):
    """Task of which a loss term says how probable the data is; evaluations report its perplexity."""

    @property
    def likelihood(self) -> str:
        """Name of the term whose mean is the negative log-likelihood of a token, in nats."""
        ...


@runtime_checkable
class StatefulTask(Protocol):
    """Task with a state that checkpoints keep, such as a coefficient that it adapts."""

    def state(self) -> State:
        """Present state, which JSON can hold; the same on all ranks."""
        ...

    def load_state(self, state: State) -> None:
        """Continue from a saved state, before training starts; what does not fit any more is to be ignored."""
        ...


@runtime_checkable
class SeesSteps(Protocol):
    """Task that depends on how far the training is, such as one with a coefficient that is warmed up."""

    def begin_step(self, step: int) -> None:
        """Take note of the step (0-based) whose microbatches follow; evaluations are of the step last begun.

        What follows from the step alone needs no state. The number of all steps is in
        :class:`~d9d_core.events.TrainingStarts`.
        """
        ...


@runtime_checkable
class UsesTopology(Protocol):
    """Task that wants to know the process among others, for instance to communicate."""

    def attach(self, topology: Topology) -> None:
        """Take the process topology, once and before anything is built."""
        ...


@runtime_checkable
class OwnsMetrics(Protocol):
    """Task with metrics of its own, besides those of the job; they read its observations."""

    def metrics(self) -> Mapping[str, Metric]:
        """New metrics by name, for training or for one evaluation set; names of the job's metrics get ``task/``."""
        ...


@runtime_checkable
class HasHparams(Protocol):
    """Task with hyperparameters that the job file does not show, such as what it derives from the data."""

    def hparams(self) -> State:
        """Hyperparameters for the trackers, besides ``run.hparams``, which counts where both have a name."""
        ...


@runtime_checkable
class FinishesTraining(Protocol):
    """Task with something to do at the end."""

    def finalize(self) -> None:
        """End the training: all steps are done and saved, the export follows. Called on all ranks."""
        ...


@runtime_checkable
class SplitsPositions(Protocol):
    """Task whose losses ranks of ``cp`` may compute from their own positions of each sample.

    Most are sums over positions. A task of whole samples gets them from a head that gathers positions
    (:class:`~d9d_core.model.SeesContext`), or communicates itself, and lets one of these ranks count each sample.
    """

    def split_positions(self, microbatch: Microbatch, share: PositionShare) -> Microbatch:
        """This rank's part of a microbatch: all methods of the task get it in place of the whole.

        ``documents`` stays whole, for the masks of attention, and so does ``lengths``. Called on the host, where
        microbatches are read.

        Raises:
            ValueError: the ranks cannot share the positions evenly.
        """
        ...


@runtime_checkable
class WeighsOutputs(Protocol):
    """Task whose loss has a weight that only the model's outputs tell, such as the number of tokens it accepts.

    The loss of a step is ``(sum of the term) / (sum of the weights)``, over all microbatches and ranks. Gradients of
    the sums cannot be scaled before the weight is known, so they are scaled after the last backward: one more pass over
    all gradients in each step, and gradients add up unscaled. ``weights`` of such a task are not asked for. It has one
    loss term, and the model's modules have none.
    """

    def weight(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Tensor:
        """Weight of the loss term in this microbatch, 0-d; asked after ``losses``, on the last stage."""
        ...


class Task(Protocol):
    """Task of a training: from a microbatch to model inputs, and from outputs to loss sums.

    The loss of a step is the sum over its terms of ``coefficient * (sum of the term) / (global weight of the term)``.
    Weights depend on the microbatch alone, so they are known before the first backward and no pass over gradients is
    needed. A term of zero weight contributes zero.

    A task may have more: :class:`StatefulTask`, :class:`SeesSteps`, :class:`UsesTopology`, :class:`OwnsMetrics`,
    :class:`HasHparams`, :class:`FinishesTraining`, :class:`WeighsOutputs`, :class:`SplitsPositions`,
    :class:`LanguageModelTask`; and with ``subscriptions()`` it is a
    :class:`~d9d_core.subscriber.Subscriber`, too.
    """

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Coefficients of the loss terms, by term."""
        ...

    def check(self, model: Any, facts: State) -> None:
        """Compare the model's config with the facts of the data, before anything is built.

        Args:
            model: its config.
            facts: what the data stream knows of itself, which may be little; nothing while a job is planned.

        Raises:
            D9dError: they do not go together, for example a vocabulary larger than the model's.
        """
        ...

    def count(self, microbatch: Microbatch) -> int | Tensor:
        """Number of tokens without padding (or of samples) of this microbatch, for the series ``tokens``.

        From shapes alone; or, where some positions are padding, a 0-d integer tensor on the microbatch's device.
        """
        ...

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Weights of the loss terms in this microbatch: 0-d tensors on its device, by term."""
        ...

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Keyword arguments of the model for this microbatch.

        If there is padding, ``lengths`` int64 [B] is among them, and loss terms of the model's modules leave it out.
        """
        ...

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Sums of the loss terms over this microbatch: 0-d float32 with a graph; finite also where nothing counts."""
        ...

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Observations for metrics, by name; detached."""
        ...
