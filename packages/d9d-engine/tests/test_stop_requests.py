"""Requests to stop a run that is not in the main thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from d9d_core.events import StepEnds
from d9d_core.subscriber import subscribe
from d9d_engine.job import Job
from d9d_engine.run.interrupt import Interrupts
from d9d_testing.toy.runs import assert_identical, final_tensors, quiet


def test_a_run_in_a_thread_stops_on_request_saves_and_continues_with_equal_bits(job: Callable[..., Job]) -> None:
    straight, stopped = job("run.name=straight"), job("run.name=stopped")
    quiet(straight).train()
    interrupts, reached, asked = Interrupts(), threading.Event(), threading.Event()

    @subscribe(StepEnds)
    def wait_in_step_5(event: StepEnds) -> None:
        if event.step == 4:
            reached.set()
            assert asked.wait(30)

    outcomes: list[Any] = []
    trainer = stopped.build(note=lambda _: None, observers=[wait_in_step_5], interrupts=interrupts)
    thread = threading.Thread(target=lambda: outcomes.append(trainer.train()))
    thread.start()
    assert reached.wait(30)
    interrupts.request("preemption")
    asked.set()
    thread.join(30)
    (outcome,) = outcomes
    told = json.loads((stopped.run.directory / "stopped.json").read_text())
    assert (outcome.status, told["request"], told["step"]) == ("stopped", "preemption", outcome.step)
    assert 5 <= outcome.step < 12
    quiet(stopped).train()
    assert_identical(final_tensors(straight), final_tensors(stopped))
