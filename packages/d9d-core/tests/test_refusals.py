"""What is wrong with a job's parts is refused before anything is allocated, with the plugin named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.errors import JobError
from d9d_core.job import Job
from d9d_core.plugin import Registry, hookimpl

MakeJob = Callable[..., Job]


def changed(hook: str, **fields: Any) -> Registry:
    """The toy plugin's records; those of one hook come from another plugin, `acme`, with other fields."""
    records = [replace(record, **fields) for record in getattr(toy, hook)()]

    def yields() -> list[Any]:
        return records

    yields.__name__ = hook
    others = {name: value for name, value in vars(toy).items() if name.startswith("d9d_") and name != hook}
    return Registry.of(SimpleNamespace(__name__="acme", **{hook: hookimpl(yields)}), SimpleNamespace(**others))


def test_a_metric_that_reads_what_the_task_does_not_observe_is_refused_by_name(job: MakeJob) -> None:
    run = job().use(changed("d9d_metrics", reads={"absolute", "logits"}))
    with pytest.raises(JobError) as error:
        run.check_names(1)
    assert str(error.value).startswith("metrics[0]: metric 'toy_metric' (acme) reads logits, which task 'toy_task' (")
    assert str(error.value).endswith("does not observe; it observes: absolute")


def test_a_metric_may_read_less_and_a_task_need_not_say_what_it_observes(job: MakeJob) -> None:
    job().use(changed("d9d_tasks", observes={"absolute", "more"})).check_names(1)
    job().use(changed("d9d_tasks", observes=None)).check_names(1)


@pytest.mark.parametrize(("hook", "field"), [("d9d_tasks", "observes"), ("d9d_metrics", "reads")])
def test_a_string_is_no_set_of_observations(hook: str, field: str) -> None:
    with pytest.raises(TypeError, match="expected a set of observations, got the string 'absolute'"):
        changed(hook, **{field: "absolute"})
