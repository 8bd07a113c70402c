"""Task wrapper that checks returned values at first use; errors name the task's distribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, Protocol, TypeVar

from d9d_core.components.contract import check_mapping, check_returned, subject, type_of
from d9d_core.errors import BuildError, JobError
from d9d_core.metric import Metric
from d9d_core.model import PositionShare
from d9d_core.plugin import TaskSpec
from d9d_core.registry.capabilities import Chosen
from d9d_core.task import (
    FinishesTraining,
    HasHparams,
    OwnsMetrics,
    SeesSteps,
    SplitsPositions,
    StageInputs,
    Task,
    WeighsOutputs,
)
from d9d_core.types import Microbatch, State
from torch import Tensor

Returned = TypeVar("Returned")


class LossTask(Task, Protocol):
    """Interface of a task for the training step, with a loss weight that may depend on outputs."""

    @property
    def late(self) -> bool:
        """Whether the weight of the loss depends on outputs (:class:`~d9d_core.task.WeighsOutputs`)."""
        ...

    def weigh(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Term -> its weight in this microbatch, which may depend on the outputs; call it after ``losses``."""
        ...


class CheckedTask:
    """Task that checks each method's value at the first call; later calls go straight to the wrapped task.

    Args:
        chosen: plugin record of the task.
        task: wrapped task.

    Attributes:
        late: whether the weight of the loss depends on outputs (:class:`~d9d_core.task.WeighsOutputs`).

    Raises:
        BuildError: the task weighs outputs, but has several loss terms or none.
    """

    def __init__(self, chosen: Chosen, task: Task) -> None:
        self._chosen = chosen
        self._task = task
        # Checked once: isinstance with a protocol takes 15 µs.
        self.late = isinstance(task, WeighsOutputs)
        self._steps = task if isinstance(task, SeesSteps) else None
        if self.late and len(task.coefficients) != 1:
            terms = ", ".join(task.coefficients) or "none"
            raise BuildError(
                f"{subject(chosen)} has weight(), which allows exactly one loss term, but coefficients has: {terms}; "
                "the "
                "gradients of several terms cannot be separated once their weights are known"
            )

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Loss term -> its coefficient."""
        return self._task.coefficients

    def check(self, model: Any, facts: State) -> None:
        """Call the task's check of the model's config against the facts of the data."""
        self._task.check(model, facts)

    def count(self, microbatch: Microbatch) -> int | Tensor:
        """Number of tokens (or samples) in this microbatch."""
        return self._checked("count", self._task.count(microbatch), self._check_count)

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        return self._checked("weights", self._task.weights(microbatch), self._check_terms)

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Keyword arguments of the model."""
        return self._checked("inputs", self._task.inputs(microbatch), self._check_inputs)

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Term -> its sum over this microbatch."""
        return self._checked("losses", self._task.losses(outputs, microbatch), self._check_terms)

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Observation -> detached tensor that metrics may read."""
        return self._checked("observations", self._task.observations(outputs, microbatch), self._check_observations)

    def weigh(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Term -> its weight in this microbatch, which may depend on the outputs; call it after ``losses``."""
        if not self.late:
            return self.weights(microbatch)
        assert isinstance(self._task, WeighsOutputs)
        (term,) = self.coefficients
        weight: object = self._task.weight(outputs, microbatch)
        if not isinstance(weight, Tensor) or weight.ndim:
            found = f"a tensor {list(weight.shape)}" if isinstance(weight, Tensor) else type_of(weight)
            raise BuildError(f"{subject(self._chosen)}: weight() returned {found}; return a 0-d tensor")
        return {term: weight}

    def begin_step(self, step: int) -> None:
        """Tell the task the number (0-based) of the step that begins, if the task uses it."""
        if self._steps is not None:
            self._steps.begin_step(step)

    def split(self, share: PositionShare) -> Callable[[Microbatch], Microbatch]:
        """Return the function that selects a rank's positions of a microbatch under context parallelism.

        Raises:
            JobError: the task has no ``split_positions``: its losses need all positions of a sample.
        """
        if not isinstance(self._task, SplitsPositions):
            raise JobError(
                f"mesh.cp is {share.ranks}, but task '{self._chosen.spec.name}' needs all positions of a sample on one "
                "rank: it has no split_positions(); remove mesh.cp, or use a task that has it, such as causal_lm"
            )
        task = self._task
        return lambda microbatch: task.split_positions(microbatch, share)

    def finalize(self) -> None:
        """Call the task's hook for the end of training, if it has one."""
        if isinstance(self._task, FinishesTraining):
            self._task.finalize()

    def hparams(self) -> State:
        """Additional hyperparameters of the task, for the trackers."""
        return self._task.hparams() if isinstance(self._task, HasHparams) else {}

    def own_metrics(self) -> Mapping[str, Metric]:
        """Metrics of the task, newly made, by name."""
        return self._task.metrics() if isinstance(self._task, OwnsMetrics) else {}

    def _checked(self, method: str, value: Returned, check: Callable[[str, object], None]) -> Returned:
        check(f"{method}()", value)
        setattr(self, method, getattr(self._task, method))  # later calls go straight to the task
        return value

    def _check_count(self, call: str, value: object) -> None:
        if isinstance(value, Tensor) and value.ndim:
            raise BuildError(
                f"{subject(self._chosen)}: {call} returned a tensor {list(value.shape)}; return a 0-d tensor"
            )
        if not isinstance(value, Tensor):
            check_returned(self._chosen, call, value, Integral)

    def _check_inputs(self, call: str, value: object) -> None:
        check_returned(self._chosen, call, value, StageInputs)

    def _check_terms(self, call: str, value: object) -> None:
        check_mapping(self._chosen, call, value, Tensor)
        assert isinstance(value, Mapping)
        if missing := sorted(self.coefficients.keys() - value.keys()):
            text = f"{call} lacks the loss terms {', '.join(missing)}, which are in its coefficients"
            raise BuildError(f"{subject(self._chosen)}: {text}")
        for term in self.coefficients:
            if value[term].ndim:
                shape = list(value[term].shape)
                raise BuildError(
                    f"{subject(self._chosen)}: {call} gives '{term}' of shape {shape}; return a 0-d tensor"
                )

    def _check_observations(self, call: str, value: object) -> None:
        check_mapping(self._chosen, call, value, Tensor)
        assert isinstance(value, Mapping)
        spec = self._chosen.spec
        declared = spec.observes if isinstance(spec, TaskSpec) else None
        if declared is not None and (missing := sorted(declared - value.keys())):
            text = f"{call} lacks {', '.join(missing)}, which its record declares with 'observes'"
            raise BuildError(f"{subject(self._chosen)}: {text}")
