"""Helpers of the conformance suites: comparisons of collectives, files and tensors, and drawn tensors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.strategy import Collective, Kind
from d9d_engine.distributed.simulate import simulated_world
from d9d_testing.collectives import CollectiveRecorder, differences
from d9d_testing.suites.lr_schedule import LrScheduleSuite
from d9d_testing.suites.support import killed_runs, models, optimizer_ranks, watched_runs
from d9d_testing.suites.support.component import plain_json
from d9d_testing.suites.support.tensors import HostReads, bits, differing, facts, overlapping
from d9d_testing.world import world
from d9d_testing.world.errors import WorldError
from torch import distributed as dist
from torch import nn

PAIR = (0, 1)


def listed(kind: Kind, size: int | None, count: int, **more: bool) -> Collective:
    return Collective(kind, "dp", PAIR, size, count, "parts", **more)


# --- collectives


def test_calls_of_known_size_are_compared_one_by_one() -> None:
    plan = [listed("all_reduce", 8, 2), listed("all_reduce", 16, 1), listed("send", 4, 1)]
    made = [("all_reduce", PAIR, 8), ("all_reduce", PAIR, 16), ("all_reduce", PAIR, 8), ("send", PAIR, 4)]
    assert differences(plan, made) == []
    assert differences(plan, made[1:]) == ["all_reduce of 8 bytes among (0, 1): listed 2 times, made 1 times"]
    assert differences(plan, [*made, ("send", PAIR, 4), ("send", (0, 2), 4)]) == [
        "send among (0, 1): in addition to exactly listed calls, listed 0 times, made 1 times: [4] bytes",
        "send among (0, 2): in addition to exactly listed calls, listed 0 times, made 1 times: [4] bytes",
    ]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([10, 10], None),
        ([5, 5], None),
        ([20, 20], None),
        ([5, 4], "9 bytes, listed 20 to 20"),
        ([20, 21], "41 bytes, listed 20 to 20"),
        ([20], "in addition to exactly listed calls, listed 2 times, made 1 times: [20] bytes"),
        ([7, 7, 6], "in addition to exactly listed calls, listed 2 times, made 3 times: [7, 7, 6] bytes"),
    ],
)
def test_approximate_sizes_may_differ_by_a_factor_of_two(sizes: list[int], said: str | None) -> None:
    made = [("all_to_all", PAIR, size) for size in sizes]
    found = differences([listed("all_to_all", 10, 2, approximate=True)], made)
    assert found == ([] if said is None else [f"all_to_all among (0, 1): {said}"])


def test_upper_bounds_of_counts_may_be_missed_and_unknown_sizes_are_any() -> None:
    plan = [listed("all_gather", 8, 1, approximate=True), listed("all_gather", 8, 2, at_most=True)]
    for sizes, said in (
        ([8], None), ([8] * 3, None), ([16, 16, 16], None), ([4], None),
        ([], "in addition to exactly listed calls, listed 1 to 3 times, made 0 times: [] bytes"),
        ([8] * 4, "in addition to exactly listed calls, listed 1 to 3 times, made 4 times: [8, 8, 8, 8] bytes"),
        ([3], "3 bytes, listed 8 to 24"), ([49], "49 bytes, listed 8 to 24"),
    ):  # fmt: skip
        made = [("all_gather", PAIR, size) for size in sizes]
        assert differences(plan, made) == ([] if said is None else [f"all_gather among (0, 1): {said}"])
    assert differences([listed("all_gather", None, 2)], [("all_gather", PAIR, 1), ("all_gather", PAIR, 999)]) == []


@pytest.mark.thorough
def test_collectives_are_recorded_with_their_ranks_and_bytes() -> None:
    x, parts = torch.zeros(3), torch.zeros(12)
    with simulated_world(4, 1):
        pair, alone = dist.new_group([1, 3]), dist.new_group([1])
        with CollectiveRecorder() as recorder:
            dist.all_reduce(x)
            dist.all_reduce(x.double(), group=pair)
            dist.all_reduce(x, group=alone)
            dist.all_gather_into_tensor(parts, x)
            dist.reduce_scatter_tensor(x, parts)
            dist.all_to_all_single(torch.zeros(12), parts)
            dist.send(x, 3, group=pair)
            dist.recv(x[:1], 0)
    everybody = (0, 1, 2, 3)
    assert [tuple(call) for call in recorder.calls] == [
        ("all_reduce", everybody, 12), ("all_reduce", (1, 3), 24), ("all_gather", everybody, 48),
        ("reduce_scatter", everybody, 48), ("all_to_all", everybody, 48), ("send", (1, 3), 12), ("receive", (0, 1), 4),
    ]  # fmt: skip


# --- files


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (b"loss 2.0\nstep 3\n", None),
        (b"loss 2.0019\nstep 3\n", None),
        (b"loss 2.1\nstep 3\n", "line 1 is 'loss 2.1', expected 'loss 2.0'"),
        (b"loss 2.0\nstep 4\n", "line 2 is 'step 4', expected 'step 3'"),
        (b"loss 2.0\n", "there are 1 lines, expected 2"),
        (b"loss 2.0\nstep 3\nend\n", "there are 3 lines, expected 2"),
        (b"\xff\xfe", "2 bytes differ from 16 bytes"),
    ],
)
def test_texts_may_differ_by_the_rounding_of_fractions_only(found: bytes, said: str | None) -> None:
    assert watched_runs.text_difference(found, b"loss 2.0\nstep 3\n") == said


def test_small_numbers_and_signs_are_compared_too() -> None:
    for one, other, same in (
        (b"1e-7 x", b"9e-7 x", True), (b"-0.5", b"0.5", False), (b"1e-3", b"1.5e-3", False),
        (b"1000.0", b"1001.0005", True), (b"1000.0", b"1001.1", False),  # a thousandth of the larger number
    ):  # fmt: skip
        assert (watched_runs.text_difference(one, other) is None) == same
        assert (watched_runs.text_difference(other, one) is None) == same


def test_contents_are_named_by_relative_path_and_leave_out_the_directory(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text(f"see {tmp_path}/a")
    (tmp_path / "a").write_bytes(b"\x00")
    assert watched_runs.contents(tmp_path) == {"a": b"\x00", "b/x.txt": b"see /a"}


def test_a_run_to_be_killed_flushes_and_reports_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    class Tracker:
        def open(self, run: Any, state: Any) -> Any:
            calls.append((run.directory, run.total_steps, run.resumed_step, state))
            return SimpleNamespace(
                write=lambda *given: calls.append(given), flush=lambda: len(calls), state=lambda: {"id": "x"}
            )

    monkeypatch.setattr(killed_runs, "build_component", lambda *_: Tracker())
    monkeypatch.setattr(os, "kill", lambda *given: calls.append(given))
    killed_runs.killed_run(["tracker"], str(tmp_path), [2, 5])
    assert calls == [
        (tmp_path, 10, 0, None), (2, {"loss": 2.0}), (5, {"loss": 5.0}), (os.getpid(), signal.SIGKILL),
    ]  # fmt: skip
    assert (tmp_path / killed_runs.REPORT).read_text() == '{"flushed": 3, "state": {"id": "x"}}'


def test_values_that_json_changes_are_refused() -> None:
    assert plain_json({"a": (1, [None, {"b": 2.5}])}, "x") == {"a": [1, [None, {"b": 2.5}]]}
    with pytest.raises(AssertionError, match=r"^the state changes in JSON: \{1: 2\} reads back as \{'1': 2\}"):
        plain_json({1: 2}, "the state")
    for value in (float("nan"), {"a": {1}}):
        with pytest.raises(AssertionError, match="^the state must be JSON values, but is"):
            plain_json(value, "the state")


# --- tensors


def test_bits_tell_zeros_apart_and_equate_nan() -> None:
    first = {"nan": torch.tensor([torch.nan]), "zero": torch.tensor([0.0]), "same": torch.tensor([1, 2]).t()}
    second = {"nan": torch.tensor([torch.nan]), "zero": torch.tensor([-0.0]), "same": torch.tensor([1, 2])}
    assert differing(bits(first), bits(second)) == ["zero"]
    assert differing(bits({**first, "more": torch.ones(1)}), bits(first)) == ["more"]
    assert bits({"m": torch.ones(2, device="meta"), "b": torch.ones(3, dtype=torch.bool)}).keys() == {"b"}
    assert facts({"a": torch.ones(2, 3, dtype=torch.int16)}) == {"a": ((2, 3), "torch.int16")}


def test_tensors_overlap_only_where_they_share_memory() -> None:
    whole = torch.zeros(10)
    assert overlapping({"a": whole[:5], "b": whole[5:]}) is None
    assert overlapping({"b": whole[4:], "a": whole[:5]}) == ("a", "b")
    assert overlapping({"a": whole, "one": whole[3:4], "meta": torch.zeros(9, device="meta")}) is None
    assert overlapping({"a": whole[:6].view(2, 3), "strided": whole[::2]}) is None


def test_values_that_the_host_reads_are_recorded() -> None:
    x = torch.tensor([1.0, 0.0])
    with HostReads() as reads:
        total = (x + x).sum(0, keepdim=True)
        float(total)
        x.nonzero()
    assert (total.tolist(), reads.found) == ([2.0], ["aten::_local_scalar_dense", "aten::nonzero"])


def test_calls_that_wait_for_a_device_are_recorded_and_others_are_not() -> None:
    x, counts, mask = torch.tensor([1.0, 0.0]), torch.tensor([1, 2]), torch.tensor([True, False])
    for wait in (
        x.tolist, x.numpy, x.cpu, x.unique, x.nonzero, counts.bincount, lambda: x.to("cpu"), lambda: np.asarray(x),
        lambda: x.to(device="cpu", dtype=torch.float64), lambda: x[mask], lambda: x[:, None][mask, :], lambda: f"{x}",
        lambda: x.masked_select(mask), lambda: x.unique(dim=0), x.unique_consecutive, lambda: range(counts[0]),
        lambda: int(counts[0]), lambda: float(x[0]), lambda: bool(x[0]), lambda: x[: counts[0]], lambda: repr(x),
        lambda: x.repeat_interleave(counts), lambda: torch.where(mask), lambda: x.equal(x), lambda: 1.0 in x,
        lambda: torch.allclose(x, x), lambda: torch.tensor([x[0], x[1]]), lambda: torch.linalg.inv(torch.eye(2)),
        lambda: x.clone().__setitem__(mask, x[:1]), lambda: x.clone().__setitem__(~mask | mask, x),
    ):  # fmt: skip
        with HostReads() as reads:
            wait()
        assert reads.found, wait
    with HostReads() as reads:
        x.clone()[mask] = 0.0
        torch.where(mask, x, 0).masked_fill(mask, 1)
        x.repeat_interleave(counts, output_size=3)
        x.to(torch.float64).to(x.device).to("meta")
        x.to("cpu", non_blocking=True).to("cpu", torch.float32, True)
        x[counts[:1]] + x[0] + torch.tensor([1.0, 2.0])
        assert len(list(x)) == 2
    assert reads.found == []


def test_drawn_parameters_and_gradients_are_equal_in_each_call_and_differ_between_steps() -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    first, second = (optimizer_ranks.draw_parameters(shapes, "bfloat16") for _ in range(2))
    assert differing(bits(first), bits(second)) == []
    assert facts(first) == {"a": ((2, 3), "torch.bfloat16"), "b": ((4,), "torch.bfloat16")}
    gates: list[bool] = []
    seen: list[torch.Tensor] = []

    def step(gate: torch.Tensor) -> None:
        gates.append(bool(gate))
        assert first["a"].grad is not None
        seen.append(first["a"].grad.clone())

    optimizer_ranks.stepped(SimpleNamespace(step=step), first, [0, 1, 0], "cpu")
    assert gates == [True] * 3
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    meta = {"m": nn.Parameter(torch.ones(2, device="meta"))}
    optimizer_ranks.set_gradients(meta, 0)
    assert meta["m"].grad is None


def test_the_example_texts_of_models_have_documents_whose_last_targets_are_ignored() -> None:
    batch = models.microbatch(SimpleNamespace(vocab_size=5))
    assert batch["documents"].tolist() == [[0] * 5 + [1] * 7, [0] + [1] * 8 + [2] * 3]
    assert batch["positions"].tolist() == [[*range(5), *range(7)], [0, *range(8), *range(3)]]
    ignored = [[place for place in range(12) if row[place] == -100] for row in batch["targets"].tolist()]
    assert ignored == [[4, 11], [0, 8, 11]]
    kept = batch["targets"][batch["targets"] != -100]
    for drawn in (batch["tokens"], kept):
        assert (int(drawn.min()), int(drawn.max())) == (0, 4)


def test_poison_shows_until_everything_is_initialised() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(3))
    module.register_buffer("count", torch.zeros(2, dtype=torch.int32))
    module.register_buffer("flag", torch.zeros(1, dtype=torch.bool))
    assert not any(models.is_poisoned(tensor) for _, tensor in models.tensors_of(module))
    models.poison(module)
    assert [models.is_poisoned(tensor) for _, tensor in models.tensors_of(module)] == [True, True, False]
    assert (int(module.get_buffer("count")[0]), bool(module.get_buffer("flag"))) == (-(2**31), True)
    with torch.no_grad():
        module.weight[1:] = 0.0
    assert models.is_poisoned(module.weight)  # one element is enough
    assert models.gradients_of(module) == {}


# --- learning-rate schedules


def schedule_suite(factor: Any) -> Any:
    """Suite of a schedule that is a function of the step and the total number of steps."""
    values = {"totals": (4,), "build": lambda _suite, total: lambda step: factor(step, total)}
    return type("Suite", (LrScheduleSuite,), values)()


@pytest.mark.parametrize(
    ("factor", "fault"),
    [
        (lambda step, _: float(step == 3), None),
        (lambda step, total: 0.5 if step >= total else 1.0 - step / total, None),
        (lambda *_: 0.0, "4 steps: every factor is zero"),
        (lambda step, _: -1e-9 if step == 3 else 1.0, "4 steps, step 3: the factor is -1e-09; a negative factor"),
        (lambda *_: True, "step 0: the factor is True, a bool; return a float"),
        (lambda *_: float("inf"), "it must be finite"),
    ],
)
def test_factors_have_to_be_finite_and_some_above_zero(factor: Any, fault: str | None) -> None:
    suite = schedule_suite(factor)
    if fault is None:
        suite.test_every_step_has_a_finite_factor_that_is_not_negative()
        suite.test_a_run_of_one_step_has_a_factor_or_is_refused()
        suite.test_steps_past_the_end_have_factors_too()
    else:
        with pytest.raises(AssertionError, match=fault):
            suite.test_every_step_has_a_finite_factor_that_is_not_negative()


def test_a_run_of_one_step_may_be_refused_by_an_error_of_d9d_only() -> None:
    def fails(error: Exception) -> Any:
        def factor(_step: int, total: int) -> float:
            if total == 1:
                raise error
            return 1.0

        return schedule_suite(factor)

    fails(BuildError("two or more")).test_a_run_of_one_step_has_a_factor_or_is_refused()
    with pytest.raises(AssertionError, match=r"a run of one step raises ZeroDivisionError\('x'\)"):
        fails(ZeroDivisionError("x")).test_a_run_of_one_step_has_a_factor_or_is_refused()


@pytest.mark.parametrize("late", [4, 5, 8, 4000])
@pytest.mark.parametrize("value", [-1e-9, float("nan"), "1"])
def test_factors_past_the_end_are_checked_up_to_a_thousand_times_the_steps(late: int, value: Any) -> None:
    suite = schedule_suite(lambda step, _: value if step == late else 0.0)
    with pytest.raises(AssertionError, match=f"4 steps: step {late}, past the end, has factor {value!r}"):
        suite.test_steps_past_the_end_have_factors_too()


def test_a_schedule_with_memory_is_noticed() -> None:
    calls: Iterator[int] = iter(range(1000))
    with pytest.raises(AssertionError, match="4 steps: step . has factor"):
        schedule_suite(lambda *_: float(next(calls))).test_a_factor_depends_on_the_step_alone()
    schedule_suite(lambda step, _: 1.0 / (step + 1)).test_a_factor_depends_on_the_step_alone()


# --- worlds


def test_equal_reports_of_ranks_are_shown_once_in_order() -> None:
    error = WorldError("two failed", {2: "same\n", 0: "other", 1: "same\n"})
    assert str(error) == "two failed\n\n--- rank 0 ---\nother\n\n--- ranks 1, 2 ---\nsame"


def test_stacks_are_asked_for_until_they_are_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(world, "LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(os, "kill", lambda *given: asked.append(given))
    launch: Any = SimpleNamespace(stack_file=lambda rank: tmp_path / str(rank))
    ranks: Any = [SimpleNamespace(process=SimpleNamespace(pid=pid)) for pid in (70, 71, 72, None)]
    (tmp_path / "0").write_text("in sleep")
    (tmp_path / "1").write_text("")
    (tmp_path / "3").write_text("in sleep")
    found = [world._stack(rank, ranks, launch, {}) for rank in range(4)]
    assert found == ["in sleep", "did not answer", "had not started", "had not started"]
    assert asked == [(70, signal.SIGUSR1), (71, signal.SIGUSR1)]
    reports: Any = {1: "a report"}
    assert world._stack(1, ranks, launch, reports) == "returned"
