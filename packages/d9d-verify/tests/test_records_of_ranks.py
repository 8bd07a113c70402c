"""Records of ranks, joined into measurements; and what measured runs change: rates, jitter, schedules."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from d9d_core.schedule import Backward, Forward, Reduce
from d9d_verify.measure import LOUD, Jitter, Rate, _backwards, _here, _numbers
from d9d_verify.measurement import Measurement, Record, fill, read_all, when
from torch import nn


def two_steps(**changes: float) -> Measurement:
    """Two steps of a run with a parameter, a buffer and a state."""
    numbers = {f"{step}/{name}": 2.0 for step in range(2) for name in ("loss", "tokens", "grad_norm", "lr")}
    numbers |= {"end/accuracy": 0.5, "end/load[0]": 1.0, "end/load[1]": 1.0}
    tensors = {"start/model/a": torch.ones(2), "start/model/b": torch.ones(1)}
    for step in range(2):
        tensors |= {f"{step}/gradients/{name}": torch.ones(2) for name in ("a",)}
        tensors |= {f"{step}/model/a": torch.full((2,), 0.5 - 0.25 * step), f"{step}/model/b": torch.ones(1)}
        tensors |= {f"{step}/optimizer/a/momentum": torch.ones(2)}
    for name, factor in changes.items():
        key = name.removeprefix("at_").replace("__", "/")
        if key in numbers:
            numbers[key] *= factor
        else:
            tensors[key] = tensors[key] * factor
    return Measurement(numbers, tensors)


def test_records_of_ranks_are_joined_at_their_offsets() -> None:
    first = Record(
        {"0/loss": 1.0, "0/lr": math.nan}, {"0/model/a@0,0": torch.ones(1, 2), "0/model/c@": torch.tensor(3)}
    )
    second = Record({"0/loss": 1.0, "0/lr": math.nan}, {"0/model/a@1,0": torch.full((2, 2), 2.0)})
    merged = Measurement.of([first, second])
    assert merged.tensors["0/model/a"].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert merged.tensors["0/model/c"] == 3
    assert (merged.numbers["0/loss"], merged.disagreements, merged.steps) == (1.0, [], 1)


def test_parts_that_no_rank_has_are_not_numbers() -> None:
    parts = {
        "0/model/a@1": torch.ones(1),
        "0/model/a@3": torch.ones(1),
        "0/model/n@1": torch.ones(1, dtype=torch.int64),
    }
    merged = Measurement.of([Record({}, parts)])
    assert merged.tensors["0/model/a"].isnan().tolist() == [True, False, True, False]
    assert merged.tensors["0/model/n"].tolist() == [0, 1]


def test_disagreements_are_in_the_order_of_computation() -> None:
    names = ["end/x", "1/loss", "0/model/b", "0/optimizer/b/m", "0/lr", "0/gradients/b", "0/grad_norm", "0/loss"]
    first = Record(dict.fromkeys(names, 1.0), {"start/model/a@0": torch.ones(2)})
    second = Record(dict.fromkeys(names, 2.0), {"start/model/a@0": torch.ones(2, dtype=torch.float64)})
    merged = Measurement.of([first, second])
    assert merged.disagreements == [
        "start/model/a", "0/loss", "0/grad_norm", "0/gradients/b", "0/lr", "0/model/b", "0/optimizer/b/m", "1/loss",
        "end/x",
    ]  # fmt: skip
    assert merged.numbers["0/loss"] == 1.0  # the first rank's
    assert when("end/x") == (math.inf, 7)


def test_shards_of_different_sizes_disagree() -> None:
    first, second = (Record({}, {"0/model/a@0": torch.ones(size)}) for size in (2, 3))
    assert Measurement.of([first, second]).disagreements == ["0/model/a"]


def test_series_of_steps_and_tensors_below_a_name() -> None:
    measured = two_steps(at_1__loss=2.0)
    assert measured.series("loss") == [2.0, 4.0]
    assert measured.steps == 2
    assert Measurement({"end/loss": 1.0, "end/eval/loss": 1.0, "0/grad_norm": 1.0}).steps == 0
    assert measured.under("0/model").keys() == {"a", "b"}
    assert measured.under("0/mod") == {}


def test_a_guide_has_gradients_buffers_and_frozen_parameters() -> None:
    guide = two_steps().guide()
    assert guide.tensors.keys() == {
        "start/model/b", "0/gradients/a", "0/model/b", "1/gradients/a", "1/model/b",
    }  # fmt: skip
    assert guide.numbers == {}


def test_later_steps_are_added_and_replace_what_was_measured_at_the_end() -> None:
    first = Measurement({"0/loss": 1.0, "end/x": 1.0}, {"start/model/a": torch.zeros(1)}, ["0/loss"])
    later = Measurement(
        {"1/loss": 2.0, "end/y": 2.0}, {"start/model/a": torch.ones(1), "1/model/a": torch.ones(1)}, ["y"]
    )
    merged = first.with_steps_of(later)
    assert merged.numbers == {"0/loss": 1.0, "1/loss": 2.0, "end/y": 2.0}
    assert merged.tensors["start/model/a"] == 0
    assert "1/model/a" in merged.tensors
    assert merged.disagreements == ["0/loss", "y"]


def test_records_of_all_ranks_are_read_in_order(tmp_path: Path) -> None:
    for rank in range(2):
        Record({"0/loss": float(rank)}, {f"0/model/a@{rank}": torch.full((1,), float(rank))}).write(tmp_path, rank)
    merged = read_all(tmp_path, 2)
    assert merged.tensors["0/model/a"].tolist() == [0.0, 1.0]
    assert (merged.numbers, merged.disagreements) == ({"0/loss": 0.0}, ["0/loss"])


def test_full_tensors_fill_tensors_of_their_names_in_place() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(1)}
    fill(tensors, {"a": torch.arange(6.0).reshape(2, 3), "c": torch.ones(1)})
    assert (tensors["a"].tolist(), tensors["b"].tolist()) == ([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [0.0])


def test_a_record_is_a_copy_in_host_memory() -> None:
    record, tensor = Record(), torch.zeros(2)
    record.take("0/model", {"a": tensor})
    tensor.fill_(1.0)
    assert record.windows["0/model/a@0"].tolist() == [0.0, 0.0]


def test_a_rate_goes_on_from_a_step_of_the_schedule() -> None:
    assert [Rate(2.0, 10).on(float, 4)(step) for step in (3, 4)] == [26.0, 28.0 * LOUD]
    assert Rate().on(float, 4)(3) == 3.0


def test_jitter_moves_outputs_of_layers_by_at_most_half_of_the_last_bit() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity()))
    Jitter()._model_ready(cast("Any", SimpleNamespace(stage=model)))
    inputs = torch.ones(1000)
    moved = (model(inputs) - inputs) / torch.finfo(torch.float32).eps
    assert moved.any()
    assert moved.abs().max() <= 1.0  # two layers, half a bit each
    assert moved.min() < 0
    counts = torch.arange(3)
    assert model(counts) is counts


def test_jitter_moves_gradients_by_at_most_half_of_the_last_bit_and_equal_ones_alike() -> None:
    def moved(seed: int) -> dict[str, torch.Tensor]:
        stage = nn.ParameterDict({name: nn.Parameter(torch.zeros(1000)) for name in ("a", "b", "frozen")})
        for name in ("a", "b"):
            stage[name].grad = torch.ones(1000)
        jitter = Jitter(seed)
        jitter._model_ready(cast("Any", SimpleNamespace(stage=stage)))
        jitter._gradients_final(cast("Any", None))
        assert stage["frozen"].grad is None
        return {name: (cast("Any", stage[name].grad) - 1) / torch.finfo(torch.float32).eps for name in ("a", "b")}

    found = moved(1)
    assert found["a"].abs().max() <= 0.5
    assert found["a"].min() < 0
    assert not torch.equal(found["a"], found["b"])
    assert torch.equal(moved(1)["a"], found["a"])
    assert not torch.equal(moved(2)["a"], found["a"])


def test_a_schedule_backwards_has_the_last_microbatch_first() -> None:
    program = (Forward(0, 0), Forward(0, 2), Backward(0, 1), Reduce(0))
    asked: list[tuple[int, int]] = []

    def schedule(ranks: int, microbatches: int) -> list[Any]:
        asked.append((ranks, microbatches))
        return [program]

    assert _backwards(schedule)(1, 3) == [(Forward(0, 2), Forward(0, 0), Backward(0, 1), Reduce(0))]
    assert asked == [(1, 3)]


def test_the_cells_of_a_table_are_numbered_and_state_of_other_ranks_is_left_out() -> None:
    from d9d_core.metric import Table

    table = Table(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), row="a", column="b", unit="c")
    assert _numbers("x", table) == {"x[0]": 1.0, "x[1]": 2.0, "x[2]": 3.0, "x[3]": 4.0}
    assert _numbers("x", torch.tensor(5.0)) == {"x": 5.0}
    assert _here({"a": torch.zeros(1), "b": torch.zeros(1, device="meta")}).keys() == {"a"}
