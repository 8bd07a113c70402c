"""First passes: which outputs are kept, how stored results are found again, and when they are computed anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.types import Pack
from d9d_engine.compose.first_pass.build import BuiltFirstPass, _evaluating
from d9d_engine.compose.first_pass.stored import stored_outputs
from d9d_engine.step import first_pass as step_module
from d9d_engine.step.first_pass import FirstForward, GroupRanks, StoredOutputs, no_first_pass
from torch import Tensor, nn


class Stream:
    """Stream of a dataset that visits its samples in the given order, over and over."""

    def __init__(self, packs: Sequence[Sequence[Sequence[int]]], samples: int | None = 5) -> None:
        self.packs = packs
        self.position: dict[str, Any] = {"next": 0, "digest": "data"}
        self.facts: Mapping[str, Any] = {} if samples is None else {"samples": samples}

    def next_pack(self) -> Pack:
        pack = self.packs[self.position["next"] % len(self.packs)]
        self.position["next"] += 1
        return [{"samples": torch.tensor(rows)} if rows else {"tokens": torch.zeros(1)} for rows in pack]

    def state(self) -> Mapping[str, Any]:
        return self.position

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.position = dict(state)


class Forward:
    """Outputs of a sample n: the scalar 10 n, and the row [n, -n]."""

    def __init__(self) -> None:
        self.packs = 0

    def outputs(self, pack: Pack) -> list[Mapping[str, Tensor]]:
        self.packs += 1
        found = [microbatch["samples"] for microbatch in pack]
        return [{"ten": rows * 10.0, "row": torch.stack([rows, -rows], 1)} for rows in found]


class Topology:
    """One process, which counts the signs of life that its watchdog gets."""

    def __init__(self) -> None:
        self.world, self.is_main, self.device, self.beats = None, True, torch.device("cpu"), 0
        self.coordinate = {"pp": 1, "dp_shard": 0, "tp": 0}
        self.watchdog = SimpleNamespace(beat=self.beat, waiting_for=lambda _thread: nullcontext())

    def beat(self) -> None:
        self.beats += 1


EPOCH = [[[3], [0, 1]], [[4, 2]], [[3]]]


class Case:
    """A job with a run's directory, and its stored results."""

    def __init__(self, directory: Path) -> None:
        self.settings: dict[str, Any] = {
            "model": 1,
            "precision": 2,
            "peft": None,
            "seed": 3,
            "task": "t",
            "head": "policy",
            "strategy": "fsdp",
            "data": "data",
        }
        self.directory = directory
        self.forward, self.notes, self.topology = Forward(), list[str](), Topology()
        self.ranks: Any = GroupRanks(0, 1, None)
        self.holds_last = True

    def run(self, stream: Stream | None = None) -> StoredOutputs:
        def dumped(value: object) -> Any:
            return SimpleNamespace(model_dump=lambda mode: {"value": value, "mode": mode})

        settings = self.settings
        stream = stream or Stream(EPOCH)
        stream.position["digest"] = settings["data"]
        job = SimpleNamespace(
            run=SimpleNamespace(directory=self.directory),
            model=dumped(settings["model"]),
            precision=dumped(settings["precision"]),
            peft=None if settings["peft"] is None else dumped(settings["peft"]),
            seed=settings["seed"],
            task=SimpleNamespace(selector=settings["task"], model_dump=dumped(settings["head"]).model_dump),
            parallel=(SimpleNamespace(selector=settings["strategy"]),),
        )
        forward, topology = cast("Any", self.forward), cast("Any", self.topology)
        where, note = "data.dataset", self.notes.append
        return stored_outputs(
            cast("Any", job), forward, cast("Any", stream), where, self.ranks, self.holds_last, topology, note
        )

    @property
    def files(self) -> list[Path]:
        return sorted(self.directory.glob("first-pass-*.safetensors"))


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path / "run")


def test_results_of_an_epoch_are_found_by_the_index_of_their_sample(case: Case) -> None:
    stream = Stream(EPOCH)
    found = case.run(stream)
    assert stream.position["next"] == 0
    assert (case.forward.packs, case.topology.beats) == (2, 2)
    first, second = found([{"samples": torch.tensor([4, 0]), "x": torch.ones(2)}, {"samples": torch.tensor([2])}], None)
    assert first["ten"].tolist() == [40.0, 0.0]
    assert first["row"].tolist() == [[4, -4], [0, 0]]
    assert first["x"].tolist() == [1, 1]
    assert (second["ten"].tolist(), second["row"].tolist()) == ([20.0], [[2, -2]])
    (file,) = case.files
    assert case.notes == [f"data.dataset: the first pass over all samples is stored in {file}"]


def test_stored_results_are_used_again_and_damaged_ones_computed_again(case: Case) -> None:
    case.run()
    (file,) = case.files
    found = case.run()
    assert case.forward.packs == 2
    assert case.notes[1] == f"data.dataset: the first pass over all samples was already stored in {file}"
    assert found([{"samples": torch.tensor([1])}], 7)[0]["ten"].tolist() == [10.0]
    file.write_bytes(b"damaged")
    assert case.run()([{"samples": torch.tensor([1])}], None)[0]["ten"].tolist() == [10.0]
    assert case.forward.packs == 4


@pytest.mark.parametrize("changed", ["model", "precision", "peft", "seed", "task", "head", "strategy", "data"])
def test_results_of_other_settings_are_not_used(case: Case, changed: str) -> None:
    case.run()
    case.settings[changed] = "other"
    case.run()
    assert (len(case.files), case.forward.packs) == (2, 4)


@pytest.mark.parametrize(
    ("packs", "samples", "problem"),
    [
        (EPOCH, None, "the dataset's stream has no 'samples' in its facts"),
        ([[[0], []]], 5, "the dataset does not number its samples"),
        ([[[0, 1], [2, 3]], [[3]]], 5, "an epoch of the dataset does not visit each of its 5 samples"),
    ],
)
def test_a_dataset_whose_samples_are_unknown_is_refused(
    case: Case, packs: list[list[list[int]]], samples: int | None, problem: str
) -> None:
    with pytest.raises(Exception, match=problem) as caught:
        case.run(Stream(packs, samples))
    hint = "results of the reference cannot be stored per sample; run it in every step instead of 'stored'"
    assert f"data.dataset: {problem}; {hint}" in str(caught.value)
    assert case.files == []


def test_ranks_with_other_samples_add_their_results(case: Case) -> None:
    def all_gather(tensor: Tensor) -> Tensor:
        others = {torch.int64: [1, 2]}.get(tensor.dtype, [10.0, 20.0])
        if tensor.ndim == 2:
            return torch.cat([tensor, torch.tensor([[1, -1], [2, -2]])])
        return torch.cat([tensor, torch.tensor(others, dtype=tensor.dtype)])

    case.ranks = SimpleNamespace(rank=0, ranks=2, all_gather=all_gather)
    found = case.run(Stream([[[3], [0]]], 4))
    assert case.forward.packs == 1, "each rank visits its half of the samples"
    assert found([{"samples": torch.arange(4)}], None)[0]["ten"].tolist() == [0, 10, 20, 30]


@pytest.mark.parametrize(("axis", "holds_last"), [("dp_shard", True), ("tp", True), ("cp", True), ("pp", False)])
def test_only_the_first_rank_with_the_last_stage_writes(case: Case, axis: str, holds_last: bool) -> None:
    """Ranks of tp and cp have the same results; together they would remove each other's temporary file."""
    case.topology.coordinate[axis] = 1
    case.holds_last = holds_last
    with pytest.raises(JobError, match=r"set run\.dir to a directory that all machines share"):
        case.run()
    assert case.files == []


class Executor:
    """Calls the receiver of outputs in the reverse order of the microbatches, as a pipeline may."""

    def __init__(self, last: bool = True) -> None:
        self.last, self.steps = last, list[int | None]()

    def evaluate(self, pack: Pack, keep: Callable[[Any, Any], None], step: int | None) -> None:
        self.steps.append(step)
        for microbatch in reversed(pack) if self.last else ():
            keep({"y": microbatch["x"] + 1}, microbatch)


class Task:
    def first_outputs(self, outputs: Mapping[str, Tensor], microbatch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"kept": outputs["y"] * microbatch["x"]}

    def complete(self, kept: Sequence[Mapping[str, Tensor]], ranks: object) -> list[dict[str, Tensor]]:
        assert ranks == "ranks"
        return [{"sum": sum((one["kept"] for one in kept), torch.zeros(())), **one} for one in kept]


@pytest.mark.parametrize("draws", [True, False])
def test_a_first_pass_adds_its_tensors_to_the_microbatches_they_were_made_of(draws: bool) -> None:
    executor, inside = Executor(), list[str]()

    @contextmanager
    def around() -> Any:
        inside.append("in")
        yield
        inside.append("out")

    forward = FirstForward(cast("Any", Task()), cast("Any", executor), around, cast("Any", "ranks"), draws=draws)
    pack: Pack = [{"x": torch.tensor(2.0)}, {"x": torch.tensor(5.0)}]
    found = [{name: value.item() for name, value in mb.items()} for mb in forward(pack, 3)]
    assert found == [{"x": 2.0, "kept": 6.0, "sum": 36.0}, {"x": 5.0, "kept": 30.0, "sum": 36.0}]
    assert executor.steps == [3 if draws else None]
    assert inside == ["in", "out"]


def test_a_rank_without_the_last_stage_gets_its_pack_back() -> None:
    forward = FirstForward(cast("Any", Task()), cast("Any", Executor(last=False)), nullcontext, cast("Any", "ranks"))
    pack: Pack = [{"x": torch.tensor(2.0)}]
    assert forward(pack, 1) is pack
    assert forward.outputs(pack) == []


def test_collectives_of_a_first_pass_reach_the_ranks_with_other_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(into: Tensor, mine: Tensor, group: object) -> None:
        assert group == "group"
        assert mine.is_contiguous()
        into.copy_(torch.cat([mine, mine + 100]))

    def reduce(tensor: Tensor, group: object) -> None:
        assert group == "group"
        tensor += 1

    monkeypatch.setattr(step_module, "dist", SimpleNamespace(all_gather_into_tensor=gather, all_reduce=reduce))
    ranks = GroupRanks(0, 2, cast("Any", "group"))
    rows = torch.tensor([[1, 2], [3, 4]]).t()
    assert ranks.all_gather(rows).tolist() == [[1, 3], [2, 4], [101, 103], [102, 104]]
    total = torch.tensor([1.0])
    assert ranks.all_reduce(total) is total
    assert total.tolist() == [2.0]
    for alone in (GroupRanks(0, 1, cast("Any", "group")), GroupRanks(0, 1, None)):
        assert alone.all_gather(rows) is rows
        assert alone.all_reduce(rows) is rows
    assert rows.tolist() == [[1, 3], [2, 4]]


def test_a_built_first_pass_stores_results_only_if_the_task_asks_for_that() -> None:
    forward: Any = "forward"
    stream = cast("Any", "stream")
    assert BuiltFirstPass().over(stream, "data") is no_first_pass
    pack: Pack = [{}]
    assert no_first_pass(pack, 1) is pack
    assert BuiltFirstPass(cast("Any", forward)).over(stream, "data") is forward
    store: Any = lambda given, where: (given, where)  # noqa: E731
    assert BuiltFirstPass(cast("Any", forward), store).over(stream, "data") == cast("Any", ("stream", "data"))


@pytest.mark.parametrize("training", [True, False])
def test_a_model_evaluates_without_its_adapter_only_inside_of_a_first_pass(training: bool) -> None:
    model, events = nn.Dropout().train(training), list[str]()

    @contextmanager
    def off(given: nn.Module) -> Any:
        assert given is model
        events.append(f"off, training {model.training}")
        yield
        events.append("on")

    with pytest.raises(ValueError, match="inside"), _evaluating(model, cast("Any", SimpleNamespace(off=off))):
        raise ValueError("inside")
    with _evaluating(model):
        events.append(f"training {model.training}")
    assert events == ["off, training False", "training False"]
    assert model.training is training
