"""Tasks: compute model inputs from a microbatch, and loss sums from the model's outputs.

Start here: :class:`Task`, and :class:`StageInputs`, which a task makes from a microbatch. The training loop divides the
summed losses by the summed weights of all microbatches and ranks::

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

All other protocols are optional: the training loop calls their methods if a task has them.
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
        first: arguments of the first stage only; later stages receive the previous stage's outputs instead.
        shared: arguments of every stage.
        kept: tensors that the task's ``inputs`` computed for later use: ``losses`` and ``observations`` receive them
            among the model's outputs, in training, evaluation and inference. The model never receives them.
    """

    first: Mapping[str, Tensor]
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class LanguageModelTask(Protocol):
    """Task with a loss term that is a negative log-likelihood; evaluations report its perplexity."""

    @property
    def likelihood(self) -> str:
        """Name of the loss term whose mean is the negative log-likelihood of a token, in nats."""
        ...


@runtime_checkable
class StatefulTask(Protocol):
    """Task with a state that checkpoints save, such as an adaptive coefficient."""

    def state(self) -> State:
        """Current state as JSON values, equal on all ranks."""
        ...

    def load_state(self, state: State) -> None:
        """Continue from a saved state, before training starts. Ignore parts of the state that no longer apply."""
        ...


@runtime_checkable
class SeesSteps(Protocol):
    """Task that depends on the step number, for example to warm up a coefficient."""

    def begin_step(self, step: int) -> None:
        """Receive the number of the step (0-based) that begins; evaluations after it have the same number.

        Values that follow from the step number need no state. The total number of steps is in
        :class:`~d9d_core.events.TrainingStarts`.
        """
        ...


@runtime_checkable
class UsesTopology(Protocol):
    """Task that needs the process topology, for example to communicate."""

    def attach(self, topology: Topology) -> None:
        """Receive the process topology, once and before anything is built."""
        ...


@runtime_checkable
class OwnsMetrics(Protocol):
    """Task with its own metrics, which read its observations, in addition to the metrics of the job."""

    def metrics(self) -> Mapping[str, Metric]:
        """New metrics by name, for training or for one evaluation set.

        If a metric of the job has the same name, the task's metric gets the prefix ``task/``.
        """
        ...


@runtime_checkable
class HasHparams(Protocol):
    """Task with hyperparameters that are not in the job file, such as values derived from the data."""

    def hparams(self) -> State:
        """Hyperparameters for the trackers; ``run.hparams`` takes precedence if names are equal."""
        ...


@runtime_checkable
class FinishesTraining(Protocol):
    """Task that does some work at the end of training."""

    def finalize(self) -> None:
        """Finish training, after all steps are done and saved, before the export. Called on all ranks."""
        ...


@runtime_checkable
class SplitsPositions(Protocol):
    """Task that supports context parallelism: a rank of ``cp`` computes losses from its own positions of a sample.

    Most losses are sums over positions. A task with a loss per sample uses a head that gathers positions
    (:class:`~d9d_core.model.SeesContext`), or communicates itself, and counts each sample on one rank of ``cp`` only.
    """

    def split_positions(self, microbatch: Microbatch, share: PositionShare) -> Microbatch:
        """This rank's part of a microbatch; all methods of the task receive it instead of the whole microbatch.

        ``documents``, which attention masks need, and ``lengths`` are not split. Called on the host, where microbatches
        are read.

        Raises:
            ValueError: the ranks cannot split the positions evenly.
        """
        ...


@runtime_checkable
class WeighsOutputs(Protocol):
    """Task whose loss weight depends on the model's outputs, for example on the number of accepted tokens.

    The loss of a step is ``(sum of the term) / (sum of the weights)``, over all microbatches and ranks. Because the
    weight is not known before the backward, gradients accumulate unscaled and are scaled after the last backward, in
    one more pass over all gradients. Such a task has one loss term, modules of its model have none, and ``weights`` is
    not called.
    """

    def weight(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Tensor:
        """Weight of the loss term in this microbatch, 0-d; called after ``losses``, on the last stage."""
        ...


class Task(Protocol):
    """Training task: computes model inputs from a microbatch, and loss sums from outputs.

    The loss of a step is the sum over its terms of ``coefficient * (sum of the term) / (global weight of the term)``.
    The global weight is the sum of the term's weights over all microbatches and ranks. Weights depend on the microbatch
    alone, so they are known before the first backward, and gradients need no later scaling. A term of zero weight
    contributes zero.

    Optional protocols: :class:`StatefulTask`, :class:`SeesSteps`, :class:`UsesTopology`, :class:`OwnsMetrics`,
    :class:`HasHparams`, :class:`FinishesTraining`, :class:`WeighsOutputs`, :class:`SplitsPositions`,
    :class:`LanguageModelTask`. A task with ``subscriptions()`` is also a :class:`~d9d_core.subscriber.Subscriber`.

    A class that inherits from this one needs only ``count``, ``inputs`` and ``losses``: it has one loss term ``loss``,
    weighted by ``count``, checks nothing, and has no observations.

    Args:
        config: config of the task.
    """

    def __init__(self, config: Any) -> None: ...

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Loss term -> its coefficient in the total loss."""
        own: Mapping[str, float] = vars(self).get("coefficients", {"loss": 1.0})
        return own

    if not TYPE_CHECKING:  # type checkers see no setter, so that a task may have a read-only property

        @coefficients.setter
        def coefficients(self, value: Mapping[str, float]) -> None:
            vars(self)["coefficients"] = value

    def check(self, model: Any, facts: State) -> None:
        """Check the model's config against the facts of the data, before anything is built.

        Args:
            model: config of the model.
            facts: facts of the data stream; any may be missing, and while a job is planned, most are.

        Raises:
            D9dError: model and data do not fit, for example because the data's vocabulary is larger than the model's.
        """

    def count(self, microbatch: Microbatch) -> int | Tensor:
        """Number of tokens without padding (or of samples) in a microbatch, for the series ``tokens``.

        Computed from shapes alone; or, if there is padding, a 0-d integer tensor on the microbatch's device.
        """
        ...

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Loss term -> its weight in this microbatch, a 0-d tensor on the microbatch's device."""
        import torch

        device = next(iter(microbatch.values())).device
        weight = torch.as_tensor(self.count(microbatch), dtype=torch.float32, device=device)
        return dict.fromkeys(self.coefficients, weight)

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Keyword arguments of the model for a microbatch.

        If there is padding, they include ``lengths`` int64 [B], so that loss terms of the model's modules ignore it.
        """
        ...

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Loss term -> its sum over the microbatch: 0-d float32, differentiable; finite even if no position counts."""
        ...

    def observations(
        self,
        outputs: Mapping[str, Tensor],  # noqa: ARG002 - a default
        microbatch: Microbatch,  # noqa: ARG002
    ) -> Mapping[str, Tensor]:
        """Tensors that metrics may read: name -> detached tensor."""
        return {}
