"""Devices, times of collectives, sizes of layouts, updates, and texts about predictions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import BuildError, JobError
from d9d_core.job_file.job import Mesh
from d9d_core.program.text import parse_programs
from d9d_planner import calibrate, search
from d9d_planner.costs.update import Update
from d9d_planner.device import Device
from d9d_planner.layout import Layout, axis_group
from d9d_planner.links import worker
from d9d_planner.live import Moment, moments
from d9d_planner.network import Group, seconds
from d9d_planner.options import divisors
from d9d_planner.prediction import Prediction
from d9d_planner.report import largest, memory_line, plan_table, time_line
from d9d_planner.search import Found

GIB = 2**30
DEVICE = Device.named("h200").model_copy(
    update={"link": 100.0, "network": 10.0, "link_latency": 0.5, "network_latency": 0.25}
)


@pytest.mark.parametrize(
    ("operation", "group", "taken"),
    [
        ("send", Group(2, 4), 0.5 + 8 / 100),  # neighbours on one machine
        ("send", Group(2, 8), 0.5 + 0.25 + 8 / 10),
        ("all_gather", Group(4), 0.5 + 8 * 3 / 4 / 100),
        ("reduce_scatter", Group(4), 0.5 + 8 * 3 / 4 / 100),
        ("all_reduce", Group(4), 0.5 + 2 * 8 * 3 / 4 / 100),
        ("all_gather", Group(16), 0.5 + 0.25 + max(8 * 15 / 16 / 100, 8 / 2 / 8 / 10)),
        ("all_gather", Group(4, 8), 0.5 + 3 * 0.25 + 8 * 3 / 4 / 10),
        ("all_to_all", Group(8), 0.5 + 8 * 7 / 8 / 100),
        ("all_to_all", Group(16), 0.5 + 0.25 + 8 * 8 / 16 / 10),
    ],
)
def test_the_time_of_a_collective_has_latency_and_the_slower_of_links_and_network(
    operation: Any, group: Group, taken: float
) -> None:
    assert seconds(operation, 8.0, group, DEVICE) == pytest.approx(taken)


def test_nothing_takes_no_time() -> None:
    assert seconds("all_gather", 0.0, Group(4), DEVICE) == 0.0
    assert seconds("all_gather", 8.0, Group(1), DEVICE) == 0.0


@pytest.mark.parametrize(
    ("group", "inside"), [(Group(4), 4), (Group(16), 8), (Group(4, 4), 2), (Group(4, 16), 1), (Group(3, 8), 1)]
)
def test_ranks_of_a_machine_are_those_whose_numbers_lie_close(group: Group, inside: int) -> None:
    assert group.on_one_machine(8) == inside


def test_groups_of_inner_axes_are_neighbours() -> None:
    mesh = Mesh(pp=2, dp_shard=3, cp=5, tp=7)
    assert axis_group(mesh, "tp") == Group(7, 1)
    assert axis_group(mesh, "cp") == Group(5, 7)
    assert axis_group(mesh, "pp") == Group(2, 3 * 5 * 7)


def test_a_device_is_known_by_name_or_read_from_a_file(tmp_path: Path) -> None:
    assert Device.named("h100").memory == 79.1 * GIB
    assert Device.named("b200").product > Device.named("h200").product
    assert Device.named("h200").node == 8
    path = tmp_path / "mine.yaml"
    values = Device.named("h100").model_dump()
    path.write_text("\n".join(f"{name}: {value}" for name, value in values.items()))
    assert Device.named(str(path)) == Device.named("h100")
    path.write_text(path.read_text() + "\nnode: 0\nlink_latency: 2\n")
    with pytest.raises(JobError, match=r"mine.yaml: link_latency: .*; node: |mine.yaml: node: .*; link_latency: "):
        Device.named(str(path))
    for text, said in (
        ("[1]", "is not a mapping of a device's fields, which docs/planning.md lists"),
        ("a: [", "is neither a known device"),
    ):
        path.write_text(text)
        with pytest.raises(JobError, match=said):
            Device.named(str(path))
    with pytest.raises(JobError, match=r"'h300' is neither a known device \(h200, h100, b200\)"):
        Device.named("h300")


@pytest.mark.parametrize(
    ("number", "all_of"), [(1, [1]), (12, [1, 2, 3, 4, 6, 12]), (16, [1, 2, 4, 8, 16]), (7, [1, 7])]
)
def test_divisors_ascend(number: int, all_of: list[int]) -> None:
    assert divisors(number) == all_of
    assert search._divisors_up_to(number, 4) == [one for one in all_of if one <= 4]


def test_parameters_are_sharded_over_one_rank_a_machine_a_few_or_all() -> None:
    assert search._shards(1024, 8) == [1, 8, 32, 128, 1024]
    assert search._shards(24, 8, replicas=4) == [6]
    assert search._shards(24, 8, replicas=5) == []
    assert search._shards(16, 8) == [1, 8, 16]
    assert search._shards(6, 4) == [1, 6]


def test_no_step_has_more_microbatches_than_a_job_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MAX_MICROBATCHES", 4)
    options: Any = SimpleNamespace(
        expert_groups=lambda _mesh: [1],
        parallel=lambda _mesh, waits: [(f"waits {waits}",)],
        recomputing=[],
        kept=("k",),
    )
    found = list(search._layouts_on(Mesh(dp_shard=2), options, 12))
    assert [(one.microbatch, one.size, one.parallel) for one in found] == [
        (3, 24, ("k", "waits True")), (4, 24, ("k", "waits True")), (6, 24, ("k", "waits True")),
        (12, 24, ("k", "waits False")),
    ]  # fmt: skip


def test_activations_are_held_until_their_backward_or_weight_gradients_end() -> None:
    (program,) = parse_programs("F0.0 F0.1 B0.0 B0.1 R0\n")
    assert moments(program) == [
        Moment(((0, 2),), 0, frozenset()),
        Moment(((0, 1),), 0, frozenset({0})),
    ]
    (split,) = parse_programs("F0.0 I0.0 F0.1 W0.0 I0.1 W0.1 R0\n")
    assert moments(split) == [Moment(((0, 1),), 0, frozenset({0}))]
    (held,) = parse_programs("F0.0 I0.0 F0.1 I0.1 W0.0 W0.1 R0\n")
    assert moments(held) == [Moment(((0, 2),), 0, frozenset())]


def test_states_that_hold_no_more_than_another_are_left_out() -> None:
    (program,) = parse_programs("F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 R0\n")
    assert moments(program) == [Moment(((0, 2),), 0, frozenset({0}))]
    (stages,) = parse_programs("F0.0 F1.0 B1.0 B0.0 R0 R1\n")
    assert moments(stages) == [
        Moment(((0, 1), (1, 1)), 1, frozenset()),
        Moment(((0, 1), (1, 0)), 0, frozenset({1})),
    ]


def test_a_state_covers_no_state_with_activations_of_a_further_stage() -> None:
    (program,) = parse_programs("F0.0 B0.0 F0.1 F0.2 B0.1 F1.0 B0.2 B1.0 R0 R1\n")
    assert moments(program) == [
        Moment(((0, 2),), 0, frozenset({0})),
        Moment(((0, 1), (1, 1)), 0, frozenset({0})),
        Moment(((0, 0), (1, 1)), 1, frozenset({0})),
    ]


def test_updates_add_up_field_by_field() -> None:
    assert Update(1, 2, 3, 4, 5) + Update(10, 20, 30, 40, 50) == Update(11, 22, 33, 44, 55)


def layout(microbatch: int = 2, size: int = 24, pipeline: Any = None, parallel: Any = (), **axes: int) -> Layout:
    return Layout(Mesh(**axes), parallel, pipeline, size, microbatch)


class Config:
    """Stand-in of a strategy's config."""

    def __init__(self, selector: str, **changed: Any) -> None:
        self.selector, self.changed = selector, changed

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return self.changed


def test_a_layout_is_told_by_its_axes_strategies_and_schedule() -> None:
    full = layout(
        parallel=(Config("fsdp", defer="everything"), Config("compile"), Config("tp")),
        pipeline=Config("1f1b"),
        pp=2,
        dp_shard=3,
    )
    assert str(full) == "pp=2 dp_shard=3, fsdp(defer=everything) tp 1f1b"
    assert str(layout()) == "one device, no strategy"
    assert full.microbatches == 24 // 3 // 2


def memory(needed: float, **parts: float) -> Any:
    names = (
        "parameters", "gradients", "optimizer", "activations", "logits", "workspace", "communication", "outside",
        "fragmentation",
    )  # fmt: skip
    return SimpleNamespace(**{name: parts.get(name, 0.0) * GIB for name in names}, needed=needed * GIB)


def predicted(*memories: Any, total: float = 2.0, of: Layout | None = None, **parts: float) -> Prediction:
    """Prediction with given memory of each pipeline rank and time."""
    workload: Any = SimpleNamespace(texts=2, length=100)
    found = Prediction(workload, layout() if of is None else of, Device.named("h100"))
    vars(found)["ranks"] = list(memories)
    vars(found)["time"] = SimpleNamespace(total=total, parts=parts, bound="memory traffic")
    return found


def test_the_line_about_memory_names_parts_and_the_fullest_rank() -> None:
    first, second = (
        memory(20.0, parameters=9.96, logits=0.04),
        memory(30.04, activations=21.0, outside=1.0, fragmentation=2.0),
    )
    assert memory_line(predicted(second)) == "30.0 GiB (activations 21.0, driver and gaps 3.0)"
    assert memory_line(predicted(first, second)) == (
        "30.0 GiB on pipeline rank 1, 20.0 on the emptiest (activations 21.0, driver and gaps 3.0)"
    )
    assert memory_line(predicted(first)) == "20.0 GiB (parameters 10.0)"


def test_the_largest_parts_of_memory_are_those_that_a_layout_chooses() -> None:
    found = memory(30.0, workspace=9.0, outside=9.0, logits=1.0, optimizer=4.0, gradients=2.0, parameters=3.0)
    assert largest(predicted(found)) == "optimizer 4.0, parameters 3.0, gradients 2.0"
    assert largest(predicted(memory(0.71, outside=0.7, optimizer=0.01))) == "driver and gaps 0.7"


def test_parts_are_told_from_a_twentieth_of_a_gib_on_and_the_libraries_above_a_half() -> None:
    small = predicted(memory(0.75, outside=0.7, optimizer=0.05))
    assert memory_line(small) == "0.8 GiB (optimizer 0.1, driver and gaps 0.7)"
    assert largest(small) == "optimizer 0.1, driver and gaps 0.7"
    assert largest(predicted(memory(2.0, outside=1.0, optimizer=0.5))) == "optimizer 0.5"


def test_memory_bounds_a_layout_if_more_than_nine_tenths_are_full() -> None:
    most = Device.named("h100").memory_gib
    found = [predicted(memory(part * most)) for part in (0.9, 0.95)]
    bound = list(plan_table(Found(found, 2, None), found).columns[-1].cells)
    assert bound == ["memory traffic", "memory traffic, memory 95% full"]


def test_the_line_about_time_has_tokens_of_a_device_and_large_parts() -> None:
    found = predicted(memory(1.0), total=2.0, of=layout(dp_shard=3), products=1.5, copies=0.02, sends=0.48)
    assert found.tokens_per_second == 24 * 2 * 100 / 2.0 / 3
    assert time_line(found) == "2 s, 800 tokens/s on each device (products 75%, sends 24%)"


def test_the_pareto_front_has_layouts_that_no_other_one_beats() -> None:
    ranked = [
        predicted(memory(size), total=at)
        for at, size in ((1.0, 50.0), (2.0, 60.0), (3.0, 50.0), (4.0, 72.0), (5.0, 7.0))
    ]
    found = Found(ranked, 9, None)
    assert [one.time.total for one in found.pareto] == [1.0, 5.0]
    table = plan_table(found, ranked)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["1", "2", "3", "4", "5"]
    assert cells[1][0] == "1.000"
    assert cells[2][0] == "4,800"
    assert cells[3] == ["50.0", "60.0", "50.0", "72.0", "7.0"]
    assert cells[4] == ["*", "", "", "", "*"]
    assert (cells[5][0], cells[6][0], cells[7][0]) == ("one device", "no strategy", "12 x 2")
    assert cells[8] == ["memory traffic"] * 3 + ["memory traffic, memory 91% full", "memory traffic"]
    assert [column.justify for column in table.columns] == ["right"] * 4 + ["right"] + ["left"] * 4


def test_a_layout_fits_if_its_fullest_rank_does() -> None:
    most = Device.named("h100").memory_gib
    assert predicted(memory(1.0), memory(most)).fits
    assert not predicted(memory(most + 0.1), memory(1.0)).fits


def test_an_invalid_schedule_needs_infinite_memory() -> None:
    class Invalid:
        @property
        def memory(self) -> Any:
            raise BuildError("no such schedule")

    assert search._needed(cast("Prediction", Invalid())) == float("inf")
    assert search._needed(predicted(memory(3.0))) == 3.0 * GIB


def test_small_microbatches_have_their_most_thrifty_layout_for_each_number_of_stages() -> None:
    def legal(least: float, microbatch: int, pp: int) -> Any:
        return SimpleNamespace(layout=layout(microbatch, pp=pp), least_memory=least)

    found = [legal(3.0, 1, 1), legal(2.0, 1, 1), legal(9.0, 2, 1), legal(1.0, 4, 1), legal(5.0, 1, 2)]
    assert [one.least_memory for one in search._smallest_layouts(cast("Any", found))] == [2.0, 9.0, 5.0]


def test_rates_that_are_not_measured_keep_their_ratio_to_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measured(name: str, value: float) -> Any:
        def run(*given: Any) -> float:
            asked.append((name, given[-1]))
            return value

        return run

    known = Device.named("h200")
    monkeypatch.setattr(calibrate, "_product", measured("product", known.product / 2))
    monkeypatch.setattr(calibrate, "_attention", measured("attention", 5.0))
    monkeypatch.setattr(calibrate, "_copy", measured("copy", known.copy_bytes / 4))
    monkeypatch.setattr(calibrate, "measured_link", lambda kind, devices: {"link": 7.0 * devices, "link_latency": 0.1})
    alone, names = calibrate.calibrated(torch.device("cpu"), known, 1)
    assert names == ["product", "product_float32", "attention", "copy_bytes"]
    assert alone.grouped_product == pytest.approx(known.grouped_product / 2)
    assert alone.elementwise_bytes == pytest.approx(known.elementwise_bytes / 4)
    assert (alone.link, alone.attention, alone.memory_gib) == (known.link, 5.0, known.memory_gib)
    assert asked == [("product", 256), ("product", 256), ("attention", 128), ("copy", 1 << 24)]
    several, names = calibrate.calibrated(torch.device("cpu"), known, 2)
    assert names[-2:] == ["link", "link_latency"]
    assert (several.link, several.link_latency) == (14.0, 0.1)


def test_an_accelerator_is_measured_with_large_tensors_and_tells_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for name in ("_product", "_attention", "_copy"):
        monkeypatch.setattr(calibrate, name, lambda *given, name=name: asked.append((name, given[-1])) or 1.0)
    monkeypatch.setattr(calibrate.torch.cuda, "mem_get_info", lambda _device: (GIB, 3 * GIB))
    monkeypatch.setattr(calibrate.torch.cuda, "empty_cache", lambda: asked.append("freed"))
    monkeypatch.setattr(calibrate, "measured_link", lambda kind, devices: asked.append((kind, devices)) or {})
    found, names = calibrate.calibrated(torch.device("cuda"), Device.named("h200"), 2)
    assert (found.memory_gib, names[-1]) == (3.0, "memory_gib")
    sizes = [("_product", 8192), ("_product", 4096), ("_attention", 4096), ("_copy", 1 << 30)]
    assert asked == [*sizes, "freed", ("cuda", 2)]


@pytest.mark.thorough
def test_rates_count_operations_and_bytes_in_the_median_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def seconds_of(_device: object, run: Any) -> float:
        run()
        ran.append(1)
        return 0.5

    monkeypatch.setattr(calibrate, "_seconds", seconds_of)
    cpu = torch.device("cpu")
    assert calibrate._product(cpu, torch.float32, 8) == 10 * 2 * 8**3 / 0.5
    assert calibrate._copy(cpu, 100) == 2 * 100 / 0.5
    assert calibrate._attention(cpu, 8) == 7 * 2 * 4 * 16 * 128 * 8**2 / 2 / 0.5
    assert len(ran) == 3


def test_attention_is_measured_with_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[tuple[int, ...]]] = []
    grad = torch.autograd.grad

    def backward(out: Any, inputs: Any, gradient: Any) -> Any:
        gradients = grad(out, inputs, gradient)
        found.append([tuple(one.shape) for one in gradients])
        return gradients

    monkeypatch.setattr(calibrate, "_seconds", lambda _device, run: run() or 0.5)
    monkeypatch.setattr(torch.autograd, "grad", backward)
    assert calibrate._attention(torch.device("cpu"), 8) == 7 * 2 * 4 * 16 * 128 * 8**2 / 2 / 0.5
    assert found == [[(4, 16, 8, 128)] * 3]


def test_the_median_of_seven_runs_after_two_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [100.0, 100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 70.0]
    clock = iter([at for number, span in enumerate(spans) for at in (1000.0 * number, 1000.0 * number + span)])
    ran: list[str] = []
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(calibrate, "_wait", lambda device: ran.append(f"wait for {device}"))
    assert calibrate._seconds(torch.device("cpu"), lambda: ran.append("run")) == 4.0
    assert ran == ["wait for cpu", "run", "wait for cpu"] * 9


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("cuda", 1)])
def test_the_work_of_an_accelerator_is_waited_for(device: str, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for module in (calibrate, worker):
        module._wait(torch.device(device))
    assert waited == [torch.device(device)] * 2 * waits
