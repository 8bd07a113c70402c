"""Captures: outputs of named modules, read while a model runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_inference.captures import Captures, groups_of, module_names
from d9d_inference.forwards import ManyForwards
from torch import Tensor, nn


def topology(**coordinate: int) -> Any:
    """Stand-in of a process that is alone, or at a coordinate."""
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    return SimpleNamespace(
        coordinate=dict.fromkeys(axes, 0) | coordinate, sizes=dict.fromkeys(axes, 1), axes_group=lambda *_: None,
        watchdog=SimpleNamespace(beat=lambda: None),
    )  # fmt: skip


@pytest.mark.parametrize(("ranks", "last", "groups"), [(1, True, [1] * 5), (1, False, [1] * 5), (2, True, [5])])
def test_microbatches_are_continued_together_where_stages_need_many(ranks: int, last: bool, groups: list[int]) -> None:
    sizes: list[int] = []

    def made(_forward: object) -> Any:
        def continue_all(pack: Any) -> list[Any]:
            sizes.append(len(pack))
            return [SimpleNamespace(new=one, ended=one + 1) for one in pack]

        return SimpleNamespace(continue_all=continue_all)

    forwards = ManyForwards(cast("Any", None), cast("Any", SimpleNamespace(ranks=ranks)), topology(), made, last)
    found: list[Any] = []
    forwards.run(cast("Any", list(range(5))), lambda outputs, one: found.append((one, outputs)))
    assert sizes == groups
    assert found == ([(one, {"new_tokens": one, "ended": one + 1}) for one in range(5)] if last else [])


@pytest.mark.parametrize(
    ("count", "size", "sizes"), [(5, 2, [2, 3]), (4, 2, [2, 2]), (3, 4, [3]), (9, 4, [4, 5]), (1, 1, [1])]
)
def test_groups_have_at_least_their_size(count: int, size: int, sizes: list[int]) -> None:
    groups = list(groups_of(cast("Any", list(range(count))), size))
    assert [len(group) for group in groups] == sizes
    assert [one for group in groups for one in group] == list(range(count))


class Runs:
    """Stand-in of an executor: runs stages one after another."""

    def __init__(self, model: nn.Module, times: int = 1) -> None:
        self.model, self.times = model, times

    def evaluate(self, pack: Any, outputs: Any) -> None:
        for microbatch in pack:
            for _ in range(self.times):
                found = {"out": self.model(microbatch["x"])}
            outputs(found, microbatch)


def pipeline(ranks: int = 1, stages: int = 1) -> Any:
    return SimpleNamespace(ranks=ranks, hosts=[stage % ranks for stage in range(stages)])


def test_outputs_of_named_modules_are_added_to_those_of_the_model() -> None:
    model = nn.Sequential(nn.Identity(), nn.Tanh(), nn.Identity())
    captures = Captures(["1"], {0: model}, pipeline(), topology())
    found: list[Any] = []
    pack: Any = [{"x": torch.full((2,), float(index))} for index in range(2)]
    captures.run(cast("Any", Runs(model)), pack, lambda outputs, _one: found.append(outputs))
    assert [one.keys() for one in found] == [{"out", "module/1"}] * 2
    assert all(torch.equal(one["module/1"], torch.full((2,), float(index)).tanh()) for index, one in enumerate(found))
    assert module_names([model, nn.Sequential(nn.Identity())]) == ["0", "1", "2"]


def test_stages_of_several_ranks_without_named_modules_only_run() -> None:
    captures = Captures([], {0: nn.Identity()}, pipeline(2, 2), topology())
    found: list[Any] = []
    pack: Any = [{"x": torch.ones(1)}, {"x": torch.zeros(1)}]
    captures.run(cast("Any", Runs(nn.Identity())), pack, lambda outputs, one: found.append((outputs["out"], one)))
    assert [(one is microbatch["x"], microbatch) for one, microbatch in found] == [(True, one) for one in pack]


@pytest.mark.parametrize(("names", "times"), [(["1"], 2), (["0"], 1)])
def test_a_module_that_does_not_run_once_cannot_be_read(names: list[str], times: int) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", nn.Identity())
            self.add_module("1", nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            return cast("Tensor", self.get_submodule("1")(x))

    model = Skips()
    captures = Captures(names, {0: model}, pipeline(), topology())
    with pytest.raises(
        BuildError, match=f"module '{names[0]}' cannot be read, as the module does not run exactly once"
    ):
        captures.run(cast("Any", Runs(model, times)), cast("Any", [{"x": torch.ones(1)}]), lambda *_: None)


def test_a_module_that_returns_no_tensor_cannot_be_read() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x,)

    model = nn.Sequential(Pair())
    captures = Captures(["0"], {0: model}, pipeline(), topology())
    with pytest.raises(BuildError, match=r"module '0' \(Pair\) returns no tensor"):
        captures.run(cast("Any", Runs(model)), cast("Any", [{"x": torch.ones(1)}]), lambda *_: None)


@pytest.mark.parametrize(
    ("names", "ranks", "stages", "sizes"),
    [(["a"], 2, 2, [8, 8]), ([], 2, 2, [16]), (["a"], 1, 1, [16]), (["a"], 1, 2, [4] * 4)],
)
def test_captures_of_stages_are_held_for_a_few_microbatches(
    names: list[str], ranks: int, stages: int, sizes: list[int]
) -> None:
    captures = Captures(names, {}, pipeline(ranks, stages), topology())
    assert [len(group) for group in captures.groups(cast("Any", list(range(16))))] == sizes


@pytest.mark.parametrize("position", [0, 1, 2])
def test_captures_go_from_the_rank_of_their_module_to_that_of_the_last_stage(
    monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    """Module ``near`` is on the last rank, ``far`` on the first, and the second rank has none."""
    model = {0: nn.ModuleDict({"far": nn.Identity()}), 1: nn.ModuleDict(), 2: nn.ModuleDict({"near": nn.Identity()})}
    place = topology(pp=position)
    place.axes_group, place.device = (lambda *_: "group"), torch.device("cpu")
    captures = Captures(["far", "near"], {position: model[position]}, pipeline(3, 3), place)
    shapes = {"far": [([2], "torch.float64")] * 2, "near": [([2], "torch.float32")] * 2}
    told = [{"far": shapes["far"]}, {}, {"near": shapes["near"]}]
    monkeypatch.setattr("d9d_inference.captures.all_gather_objects", lambda _own, _group: told)
    moved: list[Any] = []
    monkeypatch.setattr(
        "d9d_inference.captures.dist.send", lambda one, group, group_dst: moved.append((one.tolist(), group_dst))
    )

    def receive(one: Tensor, group: object, group_src: int) -> None:
        moved.append((one.dtype, group_src))
        one.fill_(7.0)

    monkeypatch.setattr("d9d_inference.captures.dist.recv", receive)

    class Stage:
        def evaluate(self, pack: Any, outputs: Any) -> None:
            for index, one in enumerate(pack):
                for module in model[position].values():
                    module(torch.full((2,), float(index)))
                if position == 2:
                    outputs({"out": one}, one)

    found: list[Any] = []
    captures.run(cast("Any", Stage()), cast("Any", ["first", "second"]), lambda outputs, _one: found.append(outputs))
    assert (
        moved
        == {
            0: [([0.0, 0.0], 2), ([1.0, 1.0], 2)],
            1: [],
            2: [(torch.float64, 0), (torch.float64, 0)],
        }[position]
    )
    if position < 2:
        assert found == []
        return
    assert [one["out"] for one in found] == ["first", "second"]
    assert [one["module/near"].tolist() for one in found] == [[0.0, 0.0], [1.0, 1.0]]
    assert [one["module/far"].tolist() for one in found] == [[7.0, 7.0]] * 2


def test_ranks_tell_shapes_of_their_captures_and_hold_them_for_one_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"near": nn.Identity()})
    place = topology(pp=1)
    place.axes_group = lambda *_: "group"
    captures = Captures(["near"], {1: model}, pipeline(2, 2), place)
    asked: list[Any] = []

    def gathered(own: Any, group: object) -> list[Any]:
        asked.append((own, group))
        return [{}, own]

    monkeypatch.setattr("d9d_inference.captures.all_gather_objects", gathered)

    class Stage:
        times = 1

        def evaluate(self, pack: Any, outputs: Any) -> None:
            for one in pack:
                for _ in range(self.times):
                    model["near"](one.half())
                outputs({}, one)

    found: list[Any] = []
    for value in (1.0, 2.0):
        pack = [torch.full((2, 3), value + index) for index in range(2)]
        captures.run(cast("Any", Stage()), cast("Any", pack), lambda outputs, _one: found.append(outputs))
    assert asked == [({"near": [([2, 3], "torch.float16")] * 2}, "group")] * 2
    assert [one["module/near"][0, 0].item() for one in found] == [1.0, 2.0, 2.0, 3.0]
    twice = Stage()
    twice.times = 2
    with pytest.raises(BuildError, match="module 'near' cannot be read, as the module does not run exactly once"):
        captures.run(cast("Any", twice), cast("Any", [torch.ones(1)]), lambda *_: None)
