"""Evaluations and checkpoints that are due after a step, retries of a failed save, and phases of a start-up."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_engine.launch import start as start_module
from d9d_engine.run.open_run import OpenRun


class Run:
    """An open run of nine steps; ``did`` has what happened, by step."""

    def __init__(
        self,
        evaluates: int | None = None,
        saves: int | None = None,
        fails: tuple[int, ...] = (),
        reason: str | None = None,
    ) -> None:
        self.did: list[Any] = []
        self.fails = fails
        evaluation = None if evaluates is None else SimpleNamespace(every=evaluates)
        store = SimpleNamespace(failures=0)
        self.parts: Any = SimpleNamespace(
            job=SimpleNamespace(evaluation=evaluation, checkpoint=SimpleNamespace(every=saves)),
            topology=SimpleNamespace(watchdog=SimpleNamespace(phase=lambda *given: self.did.append(given))),
            profiler=SimpleNamespace(
                before=lambda step: self.did.append(("before", step)),
                after=lambda step: self.did.append(("after", step)),
                ranges=lambda _name: nullcontext(),
            ),
            prefetcher=SimpleNamespace(next=lambda: "pack"),
            step=lambda step, pack: self.did.append(("step", step, pack)) or "result",
            evaluator="evaluator" if evaluates else None,
            total_steps=9,
            reason_to_end=reason,
            checkpointer=SimpleNamespace(store=store),
        )
        run: Any = OpenRun.__new__(OpenRun)
        run.parts, run.progress, run._retry, run._between_steps = self.parts, SimpleNamespace(step=0), None, True
        run.clock, run._attempts = SimpleNamespace(paused=nullcontext), None
        run.compilation = SimpleNamespace(after=lambda _step: None)
        run.collection = SimpleNamespace(after_step=lambda step: self.did.append(("collect", step)))
        run._record = lambda result: self.did.append(("recorded", result))
        run._announce = lambda: None
        run.evaluate = lambda: self.did.append(("evaluated", run.progress.step))
        run._save = self._save
        self.run = run

    def _save(self) -> bool:
        step, store = self.run.progress.step, self.parts.checkpointer.store
        self.did.append(("saved", step))
        store.failures = store.failures + 1 if step in self.fails else 0
        return step not in self.fails

    def steps_of(self, what: str, count: int = 9) -> list[int]:
        for _ in range(count):
            assert self.run.advance() == "result"
        return [one[1] for one in self.did if one[0] == what]


def test_a_step_is_watched_recorded_and_followed_by_what_is_due() -> None:
    made = Run(evaluates=1, saves=1)
    made.run.advance()
    assert made.did == [
        ("step", 0), ("before", 0), ("step", 0, "pack"), ("recorded", "result"), ("evaluated", 1), ("saved", 1),
        ("collect", 1), ("after", 1),
    ]  # fmt: skip


def test_evaluations_are_at_multiples_and_at_the_end() -> None:
    assert Run(evaluates=4).steps_of("evaluated") == [4, 8, 9]
    assert Run(evaluates=3).steps_of("evaluated") == [3, 6, 9]
    assert Run().steps_of("evaluated") == []


def test_checkpoints_are_at_multiples_but_the_last_one_is_saved_when_the_run_ends() -> None:
    assert Run(saves=4).steps_of("saved") == [4, 8]
    assert Run(saves=3).steps_of("saved") == [3, 6]
    assert Run().steps_of("saved") == []
    assert Run(saves=3, reason="early stop").steps_of("saved") == []


def test_a_failed_save_is_retried_after_growing_pauses() -> None:
    # After the first failure one step later, after the second two, after the third four.
    assert Run(saves=20).steps_of("saved") == []
    assert Run(saves=1, fails=(1,)).steps_of("saved", 3) == [1, 2, 3]
    made = Run(saves=8, fails=(8,))
    made.parts.total_steps = 99
    assert made.steps_of("saved", 12) == [8, 9]
    made = Run(saves=8, fails=(8, 9, 11))
    made.parts.total_steps = 99
    assert made.steps_of("saved", 15) == [8, 9, 11, 15]


def test_an_error_of_a_step_names_the_step_unless_it_names_its_place() -> None:
    for error, noted in ((ValueError("x"), ["raised in step 1"]), (JobError("x"), [])):
        made = Run()

        def fails(*_: object, error: Exception = error) -> None:
            raise error

        made.parts.step = fails
        with pytest.raises(type(error)):
            made.run.advance()
        assert getattr(error, "__notes__", []) == noted
        assert not made.run._between_steps
        assert made.run.progress.step == 0


@pytest.mark.parametrize(("launcher", "phases"), [
    (None, [("plugins", "job"), ("job", "torch"), ("torch", "modules"), ("modules", "plan")]),
    ("d9d", [("plugins", "job"), ("job", "torch"), ("torch", "modules"), ("modules", "processes"),
             ("processes", "plan")]),
])  # fmt: skip
def test_each_phase_of_a_start_up_ends_once_and_names_the_next(
    monkeypatch: pytest.MonkeyPatch, launcher: str | None, phases: list[tuple[str, str]]
) -> None:
    did: list[Any] = []

    class StartUp:
        def __init__(self, *given: Any, **more: Any) -> None:
            did.append(more)

        def __enter__(self) -> StartUp:
            return self

        def __exit__(self, *_: object) -> None: ...

        def ends(self, phase: str, following: str) -> None:
            did.append((phase, following))

    monkeypatch.setattr(start_module, "StartUp", StartUp)
    monkeypatch.setattr(start_module, "typed_command", lambda *_: "d9d train a.yaml")
    notes: list[str] = []
    monkeypatch.setattr(start_module, "print_note", notes.append)
    watchdog = SimpleNamespace(failed_elsewhere=lambda: "asks the watchdog", interrupted=lambda: None)
    loaded = SimpleNamespace(
        check=did.append,
        source=SimpleNamespace(note="a layout was added"),
        mesh=SimpleNamespace(sizes=lambda: {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "ep": 1}),
        joined=lambda _env, reporter: nullcontext(SimpleNamespace(reporter=reporter, watchdog=watchdog)),
    )
    env = SimpleNamespace(rank=0, world_size=2, launcher=launcher)
    process: Any = SimpleNamespace(env=env, repeats=False, reporter=lambda name: f"reporter of {name[:6]}")
    interrupts: Any = SimpleNamespace(raised=nullcontext)
    monkeypatch.setattr(start_module, "start_up", lambda *_, **__: nullcontext())

    @contextmanager
    def joined() -> Any:
        with start_module.joined_process(process, interrupts, lambda: loaded, lambda: None, "trained") as found:  # type: ignore[arg-type, return-value]
            yield found

    with joined() as (job, topology, _, alone):
        assert job is loaded
        assert topology.reporter == (None if launcher is None else "reporter of rank 0")  # type: ignore[attr-defined]
        assert process.failed_elsewhere() == "asks the watchdog"
        assert alone == (launcher is None)
    begun = {"shown": True, "processes": 2, "command": "d9d train a.yaml"}
    assert did == [begun, phases[0], 2, *phases[1:]]
    assert notes == ["a layout was added"]
    process.repeats = True
    with joined():
        pass
    assert len(notes) == 1
