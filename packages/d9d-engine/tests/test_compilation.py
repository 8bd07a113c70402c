"""The log of compilation: its messages, their times and their number."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from d9d_engine.supervision.compilation import ARTIFACT, FREE_STEPS, LOGGER, CompilationLog, Recompiled
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch._logging._internal import log_state

pytestmark = [
    pytest.mark.smoke,
    # Dynamo itself looks at the gradients of inputs that are no leaves.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: int = 1) -> Tensor:
        return self.linear(x) * scale


class Listened(SimpleNamespace):
    """A model of two blocks that are compiled, with what its log told."""

    def __init__(self, dynamic: bool | None = None) -> None:
        super().__init__(notes=[], events=[])
        self.model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])})
        for block in self.model["layers"]:
            block.compile(backend="eager", dynamic=dynamic)
        self.log = CompilationLog(self.model, self.events.append, self.notes.append)

    def __call__(self, rows: int, **more: int) -> None:
        x = torch.ones(rows, 4, requires_grad=torch.is_grad_enabled())
        for block in self.model["layers"]:
            x = block(x, **more)


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin as a process does that has compiled nothing, and in which no other test's training listens."""
    torch.compiler.reset()  # forgets callbacks, too
    monkeypatch.setattr(logging.getLogger(LOGGER), "handlers", [])
    monkeypatch.setattr(log_state, "artifact_names", set())
    yield
    torch.compiler.reset()


@pytest.mark.thorough
def test_the_first_steps_are_told_by_their_seconds_alone() -> None:
    run = Listened()
    with run.log.listening():
        run(3)
        assert [note.split(":")[0] for note in run.notes] == ["compiling ..."]
        run.log.after(1)
        run(5)
        run.log.after(FREE_STEPS)
    assert run.notes[1].startswith("step 1: torch.compile took 0.")
    assert run.notes[1].endswith(" s since the last report")
    assert run.notes[2].startswith(f"step {FREE_STEPS}: torch.compile took ")
    assert not run.events


def test_a_later_recompilation_is_told_with_block_cause_and_advice_once(capfd: pytest.CaptureFixture[str]) -> None:
    run = Listened(dynamic=False)
    with run.log.listening():
        run(3)
        run.log.after(1)
        for step, rows in enumerate((5, 7, 9), FREE_STEPS + 1):
            run(rows)
            run.log.after(step)
    (event,) = run.events
    assert isinstance(event, Recompiled)
    assert (event.step, event.block, event.function) == (FREE_STEPS + 1, "layers.0", "Block")
    assert "size mismatch at index 0. expected 3, actual 5" in event.cause
    assert "dynamic: true" in event.advice
    assert event.seconds > 0
    assert not capfd.readouterr().err  # torch's own lines are off
    assert len(run.notes) == 3
    expected = f"warning: step {FREE_STEPS + 1}: 'layers.0' (Block) was compiled again ({event.seconds:.1f} s): "
    assert run.notes[2] == f"{expected}{event.cause}; {event.advice}"


def test_another_cause_is_told_for_itself() -> None:
    run = Listened()
    with run.log.listening():
        run(3)
        run(5)
        run.log.after(1)
        run(5, scale=2)
        run.log.after(FREE_STEPS + 1)
        with torch.no_grad():
            run(5)
        run.log.after(FREE_STEPS + 2)
    value, mode = run.events
    assert "scale" in value.cause
    assert "a Python value" in value.advice
    assert "nothing to do" in mode.advice


def test_the_last_version_is_told_as_such() -> None:
    run = Listened(dynamic=False)
    with run.log.listening(), torch._dynamo.config.patch(recompile_limit=2):
        run(3)
        run(5)
        run.log.after(1)
        run(7)
        run.log.after(FREE_STEPS + 1)
    (event,) = run.events
    assert event.advice.startswith("last recompilation: from 3 versions on this code runs uncompiled; ")


def test_steps_without_compilation_are_silent() -> None:
    run = Listened()
    with run.log.listening():
        for step in range(6):
            run.log.after(step)
    assert not run.notes


def test_what_the_user_has_switched_on_is_as_it_was() -> None:
    logger = logging.getLogger(LOGGER)
    logger.propagate = True
    before = (logger.level, logger.propagate, tuple(logger.handlers), len(callback_handler.start_callbacks))
    first, second = Listened(), Listened()
    with first.log.listening():
        with second.log.listening():
            torch.compiler.reset()  # forgets the callbacks
        assert ARTIFACT in log_state.artifact_names
        assert not logger.propagate
    assert ARTIFACT not in log_state.artifact_names
    after = (logger.level, logger.propagate, tuple(logger.handlers), len(callback_handler.start_callbacks))
    assert after == before
    log_state.artifact_names.add(ARTIFACT)
    with first.log.listening():
        assert logger.propagate
    assert ARTIFACT in log_state.artifact_names


def test_nothing_is_imported_where_nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    run, logger = Listened(), logging.getLogger(LOGGER)
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "torch._dynamo")
        with run.log.listening():
            found, handlers = set(sys.modules), list(logger.handlers)
    assert "torch._dynamo" not in found
    assert not handlers


@pytest.mark.parametrize(("step", "free"), [(100 + FREE_STEPS, True), (101 + FREE_STEPS, False)])
def test_first_steps_of_a_resumed_run_compile_without_a_warning(step: int, free: bool) -> None:
    notes: list[str] = []
    log = CompilationLog(nn.Linear(1, 1), lambda _event: None, notes.append, done=100)
    log._seconds = 2.5
    log.after(step)
    assert notes == ([f"step {step}: torch.compile took 2.5 s since the last report"] if free else [])
