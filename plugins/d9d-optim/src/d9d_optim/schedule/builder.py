"""Builder of piecewise learning-rate schedules in Python, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass, replace

from d9d_core.errors import JobError
from d9d_core.optimizer import LrSchedule
from pydantic import ValidationError

from d9d_optim.schedule.config import Phase, PiecewiseConfig
from d9d_optim.schedule.schedules import piecewise


@dataclass(frozen=True)
class PiecewiseBuilder:
    """Builder of a piecewise schedule, made by :func:`piecewise_schedule`.

    A method that adds a phase returns a new builder with this phase.

    Attributes:
        initial: factor at which the first phase starts.
        total_steps: length of the run, if known.
        phases: phases added so far.
    """

    initial: float = 0.0
    total_steps: int | None = None
    phases: tuple[Phase, ...] = ()

    def for_steps(self, steps: int, to: float, curve: str = "linear", **options: float) -> PiecewiseBuilder:
        """Add a phase of ``steps`` steps that reaches ``to`` in its last step.

        Args:
            steps: length of the phase.
            to: factor on the base learning rate.
            curve: name or import path of the curve.
            options: ``power`` or ``floor`` of the curve.

        Raises:
            JobError: a value is invalid, or the previous phase covers the rest of the run.
        """
        return self._with(steps=steps, to=to, curve=curve, **options)

    def until_fraction(self, fraction: float, to: float, curve: str = "linear", **options: float) -> PiecewiseBuilder:
        """Add a phase that ends at ``fraction`` of all steps; for other arguments and errors see :meth:`for_steps`."""
        return self._with(until=fraction, to=to, curve=curve, **options)

    def fill_rest(self, to: float, curve: str = "linear", **options: float) -> PiecewiseBuilder:
        """Add a phase for all remaining steps; for arguments and errors see :meth:`for_steps`."""
        return self._with(to=to, curve=curve, **options)

    def config(self) -> PiecewiseConfig:
        """Return the config of the schedule, for the section ``lr_schedule`` of a job.

        Raises:
            JobError: the phases do not fit together.
        """
        try:
            return PiecewiseConfig(start=self.initial, phases=self.phases)
        except ValidationError as error:
            raise _job_error("piecewise_schedule", error) from error

    def build(self, total_steps: int | None = None) -> LrSchedule:
        """Build the schedule, for your own training loop.

        Args:
            total_steps: length of the run; by default the length given to :func:`piecewise_schedule`.

        Raises:
            JobError: the phases do not cover the run exactly, or its length is unknown.
        """
        total = total_steps or self.total_steps
        if total is None:
            raise JobError("piecewise_schedule: the length of the run is unknown; call build(total_steps=...)")
        return piecewise(self.config(), total)

    def _with(self, **fields: object) -> PiecewiseBuilder:
        where = f"piecewise_schedule, phase {len(self.phases)}"
        try:
            longer = replace(self, phases=(*self.phases, Phase.model_validate(fields)))
        except ValidationError as error:
            raise _job_error(where, error) from error
        if self.phases and self.phases[-1].steps is None and self.phases[-1].until is None:
            raise JobError(f"{where}: the previous phase covers the rest of the run, so no phase may follow it")
        return longer


def piecewise_schedule(initial: float = 0.0, total_steps: int | None = None) -> PiecewiseBuilder:
    """Begin a piecewise schedule.

    Example::

        piecewise_schedule().for_steps(100, 1.0).until_fraction(0.8, 1.0).fill_rest(0.1, "cosine").config()

    Args:
        initial: factor at which the first phase starts.
        total_steps: length of the run for :meth:`PiecewiseBuilder.build`; a job uses its own length.
    """
    return PiecewiseBuilder(initial, total_steps)


def _job_error(where: str, error: ValidationError) -> JobError:
    lines = [f"{'.'.join(map(str, line['loc']))}: {line['msg']}" for line in error.errors(include_url=False)]
    return JobError(f"{where}: {'; '.join(line.removeprefix(': ') for line in lines)}")
