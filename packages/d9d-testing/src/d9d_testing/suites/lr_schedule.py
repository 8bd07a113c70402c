"""Conformance suite of learning-rate schedules, which are pure functions of the step."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from d9d_core.errors import D9dError

from d9d_testing.suites.support.component import ComponentSuite


class LrScheduleSuite(ComponentSuite):
    """Conformance suite of learning-rate schedules (:class:`d9d_core.optimizer.LrSchedule`).

    Subclass it and name the schedule::

        class TestMySchedule(LrScheduleSuite):
            target = "my_schedule"
            config = {"warmup_steps": 10}

    Attributes:
        totals: total numbers of steps to try; the config must fit all of them.
    """

    kind = "lr schedule"

    totals: ClassVar[Sequence[int]] = (20, 101)

    def test_every_step_has_a_finite_factor_that_is_not_negative(self) -> None:
        """All factors from the first step to the last are finite and not negative, and some factor is above zero."""
        for total in self.totals:
            factors = self.factors(total)
            for step, factor in enumerate(factors):
                where = f"{total} steps, step {step}: the factor is {factor!r}"
                assert type(factor) in (float, int), f"{where}, a {type(factor).__name__}; return a float"
                assert math.isfinite(factor), f"{where}; it must be finite"
                assert factor >= 0, f"{where}; a negative factor would increase the loss"
            assert any(factors), f"{total} steps: every factor is zero, so nothing is trained"

    def test_a_run_of_one_step_has_a_factor_or_is_refused(self) -> None:
        """The shortest run has a finite factor, unless the config needs a longer run and says so."""
        try:
            factor = self.build(1)(0)
        except D9dError:
            return
        except Exception as error:
            raise AssertionError(
                f"a run of one step raises {error!r}; return a factor, or raise a BuildError with the fewest steps"
            ) from error
        assert math.isfinite(factor), f"in a run of one step, the factor is {factor!r}; it must be finite"
        assert factor >= 0, f"in a run of one step, the factor is {factor!r}; a negative one would increase the loss"

    def test_a_factor_depends_on_the_step_alone(self) -> None:
        """A factor does not depend on earlier calls, because a resumed run starts in the middle."""
        for total in self.totals:
            expected = self.factors(total)
            schedule = self.build(total)
            shuffled = random.Random(0).sample(range(total), total)  # noqa: S311 - no secret
            for order in (shuffled, range(total - 1, -1, -1), [total // 2] * 3):
                for step in order:
                    found = schedule(step)
                    assert found == expected[step], (
                        f"{total} steps: step {step} has factor {found!r}, but {expected[step]!r} in a fresh schedule; "
                        "compute it from the step alone, without state"
                    )

    def test_a_factor_is_the_same_in_every_process(self) -> None:
        """Factors use no random numbers, because each rank computes them without communication."""
        for total in self.totals:
            found = []
            kept = random.getstate()
            for seed in (1, 2):
                random.seed(seed)
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    found.append(self.factors(total))
            random.setstate(kept)
            assert found[0] == found[1], f"{total} steps: factors depend on the state of a random number generator"

    def test_steps_past_the_end_have_factors_too(self) -> None:
        """Steps after the end have finite factors that are not negative, because a run may be extended."""
        for total in self.totals:
            schedule = self.build(total)
            for step in (total, total + 1, 2 * total, 1000 * total):
                try:
                    factor = schedule(step)
                except Exception as error:
                    raise AssertionError(
                        f"{total} steps: step {step}, past the end, raises {error!r}; return the last factor"
                    ) from error
                real = isinstance(factor, float | int)
                assert real, f"{total} steps: step {step}, past the end, has factor {factor!r}; return a float"
                assert math.isfinite(factor), f"{total} steps: step {step}, past the end, has factor {factor!r}"
                assert factor >= 0, f"{total} steps: step {step}, past the end, has factor {factor!r}"

    # --- helpers for subclasses

    def factors(self, total: int) -> list[Any]:
        """Factors of all steps of a run, from a new schedule."""
        schedule = self.build(total)
        return [schedule(step) for step in range(total)]
