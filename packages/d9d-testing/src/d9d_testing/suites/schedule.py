"""Conformance suite of pipeline schedules: complete programs, bounded memory, no deadlocks."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from d9d_core.plugin import ScheduleSpec
from d9d_core.program.text import diff_programs, format_programs, parse_programs
from d9d_core.program.validation import placement, validate
from d9d_core.registry.registry import Registry
from d9d_core.registry.single_file import file_plugin
from d9d_core.schedule import Backward, Forward, Program, Schedule, WeightBackward, compute_parts, count_stages

from d9d_testing.suites.fresh import import_fresh

Case = tuple[int, int, Mapping[str, Any], Sequence[Program]]


class ScheduleSuite:
    """Conformance suite of pipeline schedules.

    Subclass it, name the schedule, and state its memory limit::

        class TestMySchedule(ScheduleSuite):
            plugin = "my_plugin.plugin"
            target = "my_schedule"
            settings = ({}, {"stages_per_rank": 3})

            def most_held(self, ranks, microbatches, settings):
                return min(microbatches, ranks)

    Each test runs over all ``ranks``, all ``settings``, and numbers of microbatches from the smallest supported one up
    to three more per rank.

    Attributes:
        plugin: declaration module, or path of a single-file plugin.
        target: name of the schedule.
        settings: config fields, one mapping for each variation to test.
        ranks: numbers of pipeline ranks to try.
    """

    pytestmark = pytest.mark.smoke

    plugin: ClassVar[str]
    target: ClassVar[str]
    settings: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    ranks: ClassVar[Sequence[int]] = (1, 2, 3, 4)

    # --- for subclasses to override

    def most_held(self, ranks: int, microbatches: int, settings: Mapping[str, Any]) -> float:
        """Largest number of microbatches whose activations a rank holds at a time.

        A microbatch in one stage counts as one divided by the number of stages on the rank.
        """
        raise NotImplementedError(f"{type(self).__name__}.most_held: return the schedule's largest memory use")

    def least_microbatches(self, ranks: int, settings: Mapping[str, Any]) -> int:  # noqa: ARG002 - for subclasses
        """Smallest number of microbatches that the schedule supports."""
        return 1

    # --- tests

    def test_every_stage_computes_each_microbatch_once_and_in_order(self) -> None:
        """Each stage computes each microbatch once and in order; sends match receives; reductions come last."""
        for ranks, microbatches, settings, programs in self.cases():
            where = _where(ranks, microbatches, settings)
            assert len(programs) == ranks, f"{where}: {len(programs)} programs; return one per rank"
            idle = [rank for rank, stages in enumerate(placement(programs)) if not stages]
            assert not idle, f"{where}: ranks {idle} have no stage"
            problems = validate(programs, count_stages(programs), microbatches, buffers=None)
            assert not problems, f"{where}: {'; '.join(problems[:5])}"

    def test_nobody_waits_forever(self) -> None:
        """There is no deadlock, even if only one tensor at a time can be in transit from one rank to another."""
        for ranks, microbatches, settings, programs in self.cases():
            problems = validate(programs, count_stages(programs), microbatches, buffers=1)
            assert not problems, f"{_where(ranks, microbatches, settings)}: {'; '.join(problems[:5])}"

    def test_no_rank_holds_more_than_promised(self) -> None:
        """No rank holds activations of more microbatches than ``most_held`` returns, and some rank holds as many."""
        reached = False
        for ranks, microbatches, settings, programs in self.cases():
            held = max(map(_most_held, programs))
            promised = self.most_held(ranks, microbatches, settings)
            where = _where(ranks, microbatches, settings)
            assert held <= promised + 1e-9, (
                f"{where}: a rank holds {held:g} microbatches, but most_held says {promised:g}"
            )
            reached |= held > promised - 1e-9
        assert reached, f"no rank ever holds what {type(self).__name__}.most_held says; lower it"

    def test_the_same_numbers_give_the_same_programs(self) -> None:
        """Programs are deterministic, because every rank generates all programs itself."""
        for ranks, microbatches, settings, programs in self.cases():
            again = self.schedule(settings)(ranks, microbatches)
            difference = diff_programs(programs, again)
            assert not difference, f"{_where(ranks, microbatches, settings)}: {'; '.join(difference[:5])}"

    def test_too_few_microbatches_are_refused(self) -> None:
        """The error about too few microbatches has the smallest supported number, so that users know what to set."""
        for settings in self.settings:
            for ranks in self.ranks:
                least = self.least_microbatches(ranks, settings)
                where = _where(ranks, least - 1, settings)
                with pytest.raises(ValueError, match=rf"\b{least}\b") as refusal:
                    self.schedule(settings)(ranks, least - 1)
                assert type(refusal.value) is ValueError, f"{where}: raise a ValueError"

    def test_programs_survive_being_printed(self) -> None:
        """The text form of programs, also stored as JSON lines, parses to equal programs."""
        for ranks, microbatches, settings, programs in self.cases():
            lines = json.loads(json.dumps(format_programs(programs).split("\n")))
            difference = diff_programs(programs, parse_programs("\n".join(lines)))
            assert not difference, f"{_where(ranks, microbatches, settings)}: {'; '.join(difference[:5])}"

    def test_ranks_compute_at_the_same_time(self) -> None:
        """With several ranks and microbatches, a simulated step is shorter than the ranks' work in sequence."""
        simulate = pytest.importorskip("d9d_pipeline.simulator.run").simulate
        for ranks, microbatches, settings, programs in self.cases():
            step = simulate(programs, buffers=1)
            work, where = sum(step.busy), _where(ranks, microbatches, settings)
            if min(ranks, microbatches) > 1:
                assert step.makespan < work - 1e-6, f"{where}: no two ranks ever compute at the same time"

    def test_it_is_made_without_torch(self) -> None:
        """The config and the builder of a schedule import no torch, because machines without torch inspect programs.

        Single-file plugins may import torch.
        """
        if self.plugin.endswith(".py"):
            pytest.skip("a single-file plugin")
        spec = self.spec()
        references = {reference: reference.target.partition(":")[0] for reference in (spec.config, spec.build)}
        facts = import_fresh(*dict.fromkeys(references.values()))
        for reference, module in references.items():
            assert "torch" not in facts[module].modules, (
                f"{self.target}: {reference} imports torch, which is not needed"
            )

    # --- helpers for subclasses

    def spec(self) -> ScheduleSpec:
        """Record of the schedule under test."""
        file = self.plugin.endswith(".py")
        module = file_plugin(Path(self.plugin))[1]() if file else importlib.import_module(self.plugin)
        spec = Registry.of(module).find("schedule", self.target).spec
        assert isinstance(spec, ScheduleSpec), f"{self.target} is declared with a {type(spec).__name__}"
        return spec

    def schedule(self, settings: Mapping[str, Any]) -> Schedule:
        """Schedule with these config fields."""
        spec = self.spec()
        config = spec.config.load().model_validate({"name": self.target, **settings})
        made: Schedule = spec.build.load()(config)
        return made

    def cases(self) -> Iterator[Case]:
        """Yield ranks, microbatches, settings and programs."""
        for settings in self.settings:
            schedule = self.schedule(settings)
            for ranks in self.ranks:
                least = self.least_microbatches(ranks, settings)
                for microbatches in range(least, least + 3 * ranks + 1):
                    yield ranks, microbatches, settings, schedule(ranks, microbatches)


def _where(ranks: int, microbatches: int, settings: Mapping[str, Any]) -> str:
    return f"{ranks} ranks, {microbatches} microbatches, {dict(settings)}"


def _most_held(program: Program) -> float:
    stages = {action.stage for action in program}
    held = most = 0
    for action in program:
        parts = compute_parts(action)
        held += sum(isinstance(part, Forward) for part in parts)
        most = max(most, held)
        held -= sum(isinstance(part, Backward | WeightBackward) for part in parts)
    return most / max(1, len(stages))
