"""Jobs whose batches differ in length: each kind of block is compiled twice at most, and later ones are explained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.subscriber import subscribe
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer
from d9d_engine.supervision.compilation import Recompiled
from torch._dynamo.utils import counters

Write = Callable[..., Path]
#: Dynamo itself looks at the gradients of inputs that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def cut(trainer: Trainer, lengths: Sequence[int]) -> None:
    """Cut the packs of a run to these lengths, one after the other."""
    following, left = trainer.prefetcher.next, iter(lengths)

    def next_pack() -> list[dict[str, torch.Tensor]]:
        length = next(left)
        return [
            {name: value[:, :length].contiguous() if value.ndim == 2 else value for name, value in microbatch.items()}
            for microbatch in following()
        ]

    trainer.prefetcher.next = next_pack  # type: ignore[method-assign]


def run(write: Write, lengths: Sequence[int], **sections: Any) -> tuple[list[str], list[Recompiled]]:
    """Train one step for each length; returns the lines about compilation, and the events."""
    notes: list[str] = []
    events: list[Recompiled] = []
    fixed = {"trackers": [], "metrics": [], "export": False, "checkpoint": {"every": None}, "steps": len(lengths)}
    job = Job.load(write(**{**fixed, "parallel": [{"name": "compile", "backend": "eager"}], **sections}))
    trainer = job.build(
        notes.append,
        observers=[subscribe(Recompiled)(lambda event: events.append(event))],  # noqa: PLW0108 - to be marked
    )
    cut(trainer, lengths)
    trainer.train()
    return [note for note in notes if "compil" in note], events


@pytest.mark.full
@pytest.mark.parametrize(
    "parallel",
    [
        [{"name": "compile", "backend": "eager"}],
        ["activation_checkpointing", {"name": "compile", "backend": "eager"}],
    ],
    ids=["plain", "checkpointing"],
)
def test_batches_of_any_length_compile_twice(small_job: Write, parallel: list[Any]) -> None:
    notes, events = run(small_job, [32, 24, 17, 30, 8, 31, 12], parallel=parallel)
    assert counters["stats"]["unique_graphs"] == 2
    assert not events
    assert notes[0].startswith("compiling ...: ")
    assert [note.split(" took ")[0] for note in notes[1:]] == ["step 1: torch.compile", "step 2: torch.compile"]


@pytest.mark.thorough
def test_batches_of_one_length_compile_once(small_job: Write) -> None:
    run(small_job, [32] * 5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.thorough
def test_with_dynamic_true_one_version_fits_all_lengths(small_job: Write) -> None:
    # None of them is a size of the model: torch takes equal sizes for one.
    run(small_job, [24, 17, 30, 29], parallel=[{"name": "compile", "backend": "eager", "dynamic": True}])
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.thorough
def test_a_second_length_after_the_first_steps_is_explained_once(small_job: Write) -> None:
    notes, events = run(small_job, [32, 32, 32, 32, 24, 17, 30, 8])
    assert counters["stats"]["unique_graphs"] == 2
    (event,) = events
    assert event.step == 5
    assert event.block.endswith("layers.0")
    assert event.function == "Qwen3Block"
    assert "size mismatch at index 1. expected 32, actual 24" in event.cause
    assert notes[-1].startswith(f"warning: step 5: '{event.block}' (Qwen3Block) was compiled again (")
    assert notes[-1].endswith(f"{event.cause}; {event.advice}")


def test_an_evaluation_is_compiled_for_itself_and_nobody_has_to_act(small_job: Write) -> None:
    notes, events = run(
        small_job, [32] * 8, evaluation={"every": 4, "packs": 1, "data": json.loads(small_job().read_text())["data"]}
    )
    assert counters["stats"]["unique_graphs"] == 2
    assert [event.step for event in events] == [4]
    assert "nothing to do" in events[0].advice
    assert "step 4" in notes[-1]
