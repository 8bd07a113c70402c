"""Small parts alone: accumulated metrics, pictures, costs, grids, pipelines, op slots, interpreters and errors."""

from __future__ import annotations

import os
import struct
import sys
import threading
import traceback
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import pytest
import torch
from d9d_core import interpreter
from d9d_core.accumulators import AccumulatedMetric, Accumulator
from d9d_core.cost import AdapterCost, AttentionShape, BlockCost, OpCost, Share, StrategyCost, Weight
from d9d_core.errors import BuildError, D9dError, JobError, TrainingError
from d9d_core.failures import _cut, describe, ended_by, exits_are_errors, source_of
from d9d_core.grid import AXES, Grid
from d9d_core.interpreter import children_import_as_here, python_command
from d9d_core.kernel import OpSlot
from d9d_core.metric import Table, Vector
from d9d_core.model import Stage
from d9d_core.plugin import ViewSpec
from d9d_core.program import placement
from d9d_core.program.placement import Pipeline, checked_programs
from d9d_core.program.text import diff_programs, format_programs, parse_programs
from d9d_core.registry.entries import Origin
from d9d_core.schedule import Backward, Forward, Program, Reduce, forward_only, single_stage
from d9d_core.tensors import beside, encode_png, local_numel, wide_dtype
from d9d_core.terminal import tracebacks
from d9d_core.terminal.console import console_for


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


class Metric(AccumulatedMetric):
    def __init__(self) -> None:
        super().__init__(
            total=Accumulator(),
            each=Accumulator(shape=(2,), dtype=torch.int64),
            high=Accumulator("max"),
            low=Accumulator("min", dtype=torch.int64),
            top=Accumulator("max", dtype=torch.int32),
        )


def values(metric: AccumulatedMetric) -> dict[str, Any]:
    return {name: value.tolist() for name, value in metric.state().items()}


EMPTY = {"total": 0.0, "each": [0, 0], "high": -float("inf"), "low": 2**63 - 1, "top": -(2**31)}


def test_accumulators_begin_at_their_neutral_values_and_return_to_them() -> None:
    metric = Metric()
    assert values(metric) == EMPTY
    assert metric.reductions == {"total": "sum", "each": "sum", "high": "max", "low": "min", "top": "max"}
    metric.accumulate(total=2, each=torch.tensor([1, 5]), high=-3.0, low=7, top=4)
    metric.accumulate(total=torch.tensor(0.5), each=torch.tensor(10), high=-4.0, low=9, top=3)
    found = {"total": 2.5, "each": [11, 15], "high": -3.0, "low": 7, "top": 4}
    assert values(metric) == found
    assert (metric["total"].dtype, metric["each"].dtype) == (torch.float64, torch.int64)
    other = Metric()
    other.load_state({**metric.state(), "more": tensor(1)})
    assert values(other) == found
    metric.reset()
    assert values(metric) == EMPTY
    assert values(other) == found
    with pytest.raises(JobError, match=r"^Metric: a value of shape \[3\] does not fit into 'each' of shape \[2\]"):
        metric.accumulate(each=torch.zeros(3))


def test_a_picture_is_a_png_of_its_rows() -> None:
    picture = torch.arange(2 * 3 * 3, dtype=torch.uint8).reshape(2, 3, 3)
    content = encode_png(picture)
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = [], 8
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        kind, data = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        assert struct.unpack(">I", content[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + data),)
        chunks.append((kind, data))
        at += 12 + length
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    assert chunks[0][1] == struct.pack(">II", 3, 2) + b"\x08\x02\0\0\0"  # width before height; 8 bits, true colour
    assert zlib.decompress(chunks[1][1]) == b"\0" + bytes(range(9)) + b"\0" + bytes(range(9, 18))


def test_plain_tensors_need_no_mesh() -> None:
    one, other = tensor(1), tensor(2, 3)
    assert beside(one, other) == (other,)
    assert beside(one, other)[0] is other
    assert local_numel([one, other]) == 3
    assert [wide_dtype(torch.device(name)) for name in ("cpu", "cuda", "mps")] == [
        torch.float64, torch.float64, torch.float32,
    ]  # fmt: skip


def test_names_of_tables_and_vectors_are_for_all_their_values() -> None:
    assert Table(torch.zeros(2, 3), rows=("a", "b")).rows == ("a", "b")
    with pytest.raises(ValueError, match="a table of 2 rows has 3 names for them"):
        Table(torch.zeros(2, 3), rows=("a", "b", "c"))
    Vector(torch.zeros(2), ("a", "b"))
    with pytest.raises(ValueError, match=r"a vector has shape \[2\] and 1 names; give one dimension"):
        Vector(torch.zeros(2), ("a",))
    with pytest.raises(ValueError, match=r"a vector has shape \[2, 2\] and 2 names"):
        Vector(torch.zeros(2, 2), ("a", "b"))
    with pytest.raises(ValueError, match="several values of a vector are named a, b; give each"):
        Vector(torch.zeros(5), ("b", "a", "b", "a", "c"))


def test_costs_of_blocks_are_those_of_their_ops() -> None:
    attention = OpCost("a", "attention", kept=3.0, attention=AttentionShape(5, 2, 1, 8, 2))
    product = OpCost("p", "product", kept=4.0, backward_flops=1.0)
    assert (attention.attended, product.attended) == (5 * 2 * (2 * 8 + 4), 0.0)
    block = BlockCost("b", (attention, product, attention))
    assert (block.kept, block.attended, block.has_backward) == (10.0, 400.0, True)
    assert not BlockCost("b", (attention,)).has_backward
    assert BlockCost("b", (OpCost("m", "memory", backward_traffic=1.0),)).has_backward
    assert Weight("w", (3, 4, 5)).numbers == 60
    assert Weight("w", ()).numbers == 1


def test_effects_of_strategies_and_methods_are_merged() -> None:
    first = StrategyCost(shards=True, gathers="once", recomputed=0.5)
    second = StrategyCost(gathers="twice", compute_width=2)
    both = StrategyCost(shards=True, gathers="twice", compute_width=2, recomputed=0.5)
    assert first | second == both
    assert first | StrategyCost() == StrategyCost() | first == first
    one = AdapterCost(parameters=3, flops=1.0, kept=2.0)
    other = AdapterCost(trains=True, parameters=4, flops=10.0, backward_traffic=5.0)
    assert one + other == AdapterCost(True, 7, flops=11.0, backward_traffic=5.0, kept=2.0)
    assert one + one == AdapterCost(False, 6, flops=2.0, kept=4.0)


GRID = Grid({"pp": 2, "dp": 3, "tp": 4})


def test_ranks_and_coordinates_are_in_row_major_order() -> None:
    assert (GRID.size, str(GRID), str(Grid({"pp": 1}))) == (24, "pp=2 x dp=3 x tp=4", "one process")
    assert GRID.coordinate(17) == {"pp": 1, "dp": 1, "tp": 1}
    assert list(GRID.coordinate(0)) == ["pp", "dp", "tp"]
    assert [GRID.rank(GRID.coordinate(rank)) for rank in range(24)] == list(range(24))
    assert GRID.group(17, ["dp"]) == (13, 17, 21)
    assert GRID.group(17, ["tp", "pp"]) == (4, 5, 6, 7, 16, 17, 18, 19)
    assert GRID.group(17, []) == (17,)
    with pytest.raises(BuildError, match="^this view of the mesh has no dimension 'ep', 'x'; use one of pp, dp, tp$"):
        GRID.group(0, ["x", "dp", "ep"])


def pipeline_of(hosts: Sequence[int], *, least: int = 1, moves_at: int = 99) -> Pipeline:
    """Schedule of one stage per host, from a smallest number of microbatches on; each stage alone on its rank."""

    def schedule(ranks: int, microbatches: int) -> Sequence[Program]:
        if microbatches < least:
            raise ValueError(f"{microbatches} are too few")
        text = ["", ""]
        for rank in range(2):
            sends = [f"F0.{m} S>0.{m}" for m in range(microbatches)] + [f"R<0.{m} B0.{m}" for m in range(microbatches)]
            takes = [f"R>1.{m} F1.{m} B1.{m} S<1.{m}" for m in range(microbatches)]
            place = rank if microbatches < moves_at else 1 - rank
            text[place] = " ".join([*(sends if rank == 0 else takes), f"R{rank}"])
        return parse_programs("\n".join(text[:ranks]))

    return Pipeline(cast("Any", schedule), tuple(hosts), 2)


def test_a_pipeline_places_its_stages_and_asks_its_schedule_once() -> None:
    made = pipeline_of((0, 1))
    assert made.stages == (Stage(0, 2, None), Stage(1, 2, None))
    assert (made.stages_of(0), made.stages_of(1), Pipeline(hosts=(0, 1, 0)).stages_of(0)) == ((0,), (1,), (0, 2))
    assert format_programs([made.program(0, 1), made.program(1, 1)]).splitlines() == [
        "F0.0 S>0.0 R<0.0 B0.0 R0", "R>1.0 F1.0 B1.0 S<1.0 R1",
    ]  # fmt: skip
    assert made.program(0, 1) is made.program(0, 1)
    assert len(made.programs(2)) == 2
    assert Pipeline().programs(2) == []
    assert format_programs([made.forward_program(1, 2)]) == "R>1.0 F1.0 R>1.1 F1.1"
    assert [pipeline_of((0, 1), least=least).least_microbatches(4) for least in (1, 3, 4)] == [1, 3, 4]
    moving = pipeline_of((0, 1), moves_at=3)
    moving.program(0, 2)
    with pytest.raises(BuildError, match=r"with 3 microbatch\(es\), the schedule puts stages on other ranks"):
        moving.program(0, 3)


def test_programs_of_a_schedule_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match="^pipeline: 1 are too few$"):
        checked_programs(pipeline_of((0, 1), least=2).schedule, 2, 1)
    with pytest.raises(BuildError, match=r"microbatch\(es\): 1 programs for 2 rank\(s\); a schedule must make one per"):
        checked_programs(lambda _ranks, count: single_stage(1, count), 2, 1)
    for count, shown in ((5, "0; 1; 2; 3; 4. This is"), (6, "0; 1; 2; 3; 4 (and 1 more). This is")):
        problems = list(map(str, range(count)))
        monkeypatch.setattr(placement, "validate", lambda *_, problems=problems: problems)
        with pytest.raises(BuildError) as caught:
            checked_programs(single_stage, 1, 1)
        assert f"invalid program for 1 microbatch(es): {shown} an error of the schedule" in str(caught.value)


def test_the_program_of_a_single_stage_runs_each_microbatch_in_turn() -> None:
    (program,) = single_stage(1, 2)
    assert program == (Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1), Reduce(0))
    assert forward_only(program) == (Forward(0, 0), Forward(0, 1))


def test_differences_of_programs_are_told_by_rank_and_position() -> None:
    left, right = parse_programs("F0.0 B0.0 R0\nF1.0\nF2.0"), parse_programs("F0.0 F0.1 B0.0\nF1.0")
    assert diff_programs(left, right) == [
        "rank 0, position 1: nothing became F0.1", "rank 0, position 2: R0 became nothing",
        "rank 2: only on the left",
    ]  # fmt: skip
    assert diff_programs(right[:1], left[:2]) == [
        "rank 0, position 1: F0.1 became nothing", "rank 0, position 3: nothing became R0",
        "rank 1: only on the right",
    ]  # fmt: skip
    assert diff_programs(left, left) == []


def test_a_slot_calls_the_bound_function() -> None:
    slot = OpSlot("op", lambda x, y=1: (x, y), parts=["a"], instead=["b"], size=3)
    assert (slot(2, y=5), slot.backend, slot.parts, slot.instead, slot.static) == (
        (2, 5), "reference", ("a",), ("b",), {"size": 3},
    )  # fmt: skip
    assert slot.refusal(print) is None
    slot.bind("mine", max)
    assert (slot(2, 7), slot.backend, slot.function) == (7, "mine", max)


def test_children_import_from_the_working_directory_only_if_this_process_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    assert python_command() == [sys.executable, "-P"]
    with pytest.raises(ValueError, match="x"), children_import_as_here():
        raise ValueError("x" if os.environ["PYTHONSAFEPATH"] == "1" else "not set")
    assert "PYTHONSAFEPATH" not in os.environ
    for entry in ("", str(tmp_path), "."):
        monkeypatch.setattr(sys, "path", ["/elsewhere", entry])
        assert python_command() == [sys.executable]
        with children_import_as_here():
            assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    monkeypatch.setenv("PYTHONSAFEPATH", "own")
    with children_import_as_here():
        assert os.environ["PYTHONSAFEPATH"] == "own"
    assert os.environ["PYTHONSAFEPATH"] == "own"
    assert interpreter._SAFE == "PYTHONSAFEPATH"


def test_an_error_is_told_line_by_line_with_its_notes() -> None:
    error = D9dError("first\nsecond")
    error.add_note("a note")
    assert describe(error) == "error: first\nerror: second\na note"
    made = ended_by("plugin x", SystemExit(3))
    assert isinstance(made, TrainingError)
    assert str(made).startswith("plugin x raised SystemExit")
    assert "which would end the process; a plugin must raise an Exception instead" in str(made)
    assert isinstance(made.origin, SystemExit)
    assert isinstance(ended_by("plugin x", SystemExit(3), JobError), JobError)
    for passing in (KeyboardInterrupt, ValueError):
        with pytest.raises(passing), exits_are_errors():
            raise passing
    with pytest.raises(BuildError, match="raised SystemExit"), exits_are_errors(BuildError):
        raise SystemExit(3)
    assert _cut("x" * 2000) == "x" * 2000
    assert _cut("x" * 2001) == "x" * 2000 + "... (2,001 characters)\n"


def test_consoles_print_texts_literally_and_escape_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    console_for().print("[bold]a\x1b[2J :x:")
    console_for().print("b" * 10_000)
    assert capsys.readouterr().out == r"[bold]a\x1b[2J :x:" + "\n" + "b" * 10_000 + "\n"
    console_for().print("b" * 10_001)
    assert capsys.readouterr().out == "b" * 10_000 + "\n    b\n"


def test_uncaught_exceptions_are_told_with_escapes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ValueError("a\x1b[2J")
    tracebacks._uncaught(ValueError, error, None)
    assert capsys.readouterr().err == "ValueError: a\\x1b[2J\n"
    thread = SimpleNamespace(exc_type=ValueError, exc_value=error, exc_traceback=None, thread=SimpleNamespace(name="t"))
    tracebacks._uncaught_in_thread(cast("Any", thread))
    assert capsys.readouterr().err == "Exception in thread t:\nValueError: a\\x1b[2J\n"
    tracebacks._uncaught_in_thread(cast("Any", SimpleNamespace(**{**vars(thread), "exc_type": SystemExit})))
    assert capsys.readouterr().err == ""
    found = SimpleNamespace(**{**vars(thread), "err_msg": None, "object": 3})
    tracebacks._unraisable(found)
    assert capsys.readouterr().err == "Exception ignored in: 3\nValueError: a\\x1b[2J\n"
    monkeypatch.setattr(sys, "excepthook", print)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    monkeypatch.setattr(sys, "unraisablehook", print)
    tracebacks.make_tracebacks_visible()
    hooks = cast("tuple[Any, ...]", (sys.excepthook, threading.excepthook, sys.unraisablehook))
    assert hooks == (print, tracebacks._uncaught_in_thread, print)


def view(*dims: tuple[str, tuple[str, ...], tuple[str, ...]]) -> Any:
    made = [SimpleNamespace(name=name, axes=axes, over=over) for name, axes, over in dims]
    return cast("ViewSpec", SimpleNamespace(name="v", dims=made))


def test_a_view_cuts_the_ranks_into_other_dimensions() -> None:
    axes = dict.fromkeys(AXES, 1) | {"pp": 2, "dp_shard": 6, "tp": 2}
    flat = view(("pp", ("pp",), ()), ("all", ("dp_replicate", "dp_shard", "cp", "tp"), ()))
    assert Grid.of_view(flat, axes).sizes == {"pp": 2, "all": 12}
    experts = view(
        ("pp", ("pp",), ()), ("rest", ("dp_replicate", "dp_shard", "cp", "tp"), ("ep",)), ("ep", ("ep",), ())
    )
    assert Grid.of_view(experts, {**axes, "ep": 3}).sizes == {"pp": 2, "rest": 4, "ep": 3}
    with pytest.raises(
        JobError, match="view 'v' cannot lay ep=5 over dp_replicate=1 x dp_shard=6 x cp=1 x tp=2; change"
    ):
        Grid.of_view(experts, {**axes, "ep": 5})
    with pytest.raises(JobError, match="^mesh: the view 'v' has all=6 = 6 ranks, but the mesh has 24; "):
        Grid.of_view(view(("all", ("dp_shard",), ())), axes)


def raised_in(**names: str) -> BaseException:
    """Error of a function whose frames are in modules of these names, the outermost first, each in its own file."""
    call: Any = lambda: 1 // 0  # noqa: E731
    for file, name in reversed(names.items()):
        scope: dict[str, Any] = {"__name__": name, "call": call}
        exec(compile("def inner():\n    call()\n", f"/there/{file}.py", "exec"), scope)
        call = scope["inner"]
    try:
        call()
    except ZeroDivisionError as error:
        return error
    raise AssertionError


def test_the_source_of_an_exception_is_the_innermost_plugin_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [SimpleNamespace(origin=Origin(f"acme-{name}", "1.0", f"acme_{name}.plugin")) for name in ("a", "b")]
    monkeypatch.setattr("d9d_core.registry.installed.scan", lambda: found)

    def source(*modules: str) -> str | None:
        """Source of an exception that is raised in the last of these modules, without frames of this file."""
        error = raised_in(**{f"f{number}": name for number, name in enumerate(modules)})
        own = error.__traceback__
        assert own is not None
        trace: Any = None
        for frame, line in reversed([*traceback.walk_tb(own)]):
            if frame.f_code.co_filename.startswith("/there"):
                trace = TracebackType(trace, frame, frame.f_lasti, line)
        return source_of(error.with_traceback(trace))

    assert source("acme_a.code") == "acme-a 1.0 (/there/f0.py:2, in inner)"
    assert source("acme_a.code", "acme_b.code", "numpy") == "acme-b 1.0 (/there/f1.py:2, in inner)"
    assert source("d9d_core.x", "numpy", "scipy") == "/there/f2.py:2, in inner"
    assert source("acme_a.code", "d9d_core.x") is None
    assert source("acme_a.code", "json") == "acme-a 1.0 (/there/f0.py:2, in inner)"


def test_the_positions_of_a_microbatch_are_split_over_context_ranks() -> None:
    assert Share(3, 8, tensor=2, context=4, experts=5).tokens == 6.0
    assert Share(3, 8).tokens == 24.0
