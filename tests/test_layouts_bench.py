"""The bench of layouts: which rows there are, what their processes answer, and the page that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.tools

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "tools" / "bench"
NAMES = ("records", "traces", "rows", "layout_rows", "rank_processes", "rank_steps", "layouts")


@pytest.mark.slow
def test_layouts_are_measured_and_written(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "layouts.py"), "--tiny", "--only", "dp_shard=2", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("layouts-tiny--*.json")
    found = json.loads(path.read_text())["layouts"]
    assert [answer["name"] for answer in found] == [
        "tiny 2x64 dp_shard=2 fsdp", "tiny-moe 2x64 dp_shard=2 ep=2 fsdp expert_parallel",
    ]  # fmt: skip
    for answer in found:
        assert answer["tokens_per_second"] == pytest.approx(2 * 64 / answer["seconds"])
        assert len(answer["losses"]) == 6
        assert answer["losses"][-1] < answer["losses"][0]
        assert answer["predicted"]["allocated_gib"] > 0
        assert f"| `{answer['name']}` | {answer['tokens_per_second']:,.0f} |" in done.stdout


def test_names_of_rows_say_how_they_are_spread_and_rows_survive_json(room: SimpleNamespace) -> None:
    rows = [row for some in room.layout_rows.ROWS.values() for row in some]
    for some in room.layout_rows.ROWS.values():  # a table has one line of a name
        assert len({row.name for row in some}) == len(some)
    again = [room.rows.Row.from_json(json.loads(json.dumps(asdict(row)))) for row in rows]
    assert again == rows
    row = room.layout_rows.context_row("ring", 2, 16_384)
    assert row.name == "dense-2b 2x16384 compiled cp=2 context_parallel(method=ring) fsdp"
    assert (row.ranks, row.data_parallel, row.tokens) == (2, 1, 32_768)
    assert room.layout_rows.context_row("ring", 1, 32_768).recomputed


def test_every_row_is_a_job_that_is_accepted_for_its_ranks(room: SimpleNamespace, tmp_path: Path) -> None:
    from d9d_engine.job import Job

    known = room.rows.registry()
    for row in (row for some in room.layout_rows.ROWS.values() for row in some):
        Job.from_values(row.values(str(tmp_path), "cpu"), registry=known).check(row.ranks)


def test_a_row_is_compared_with_as_many_tokens_of_one_gpu_or_else_as_many_samples(room: SimpleNamespace) -> None:
    def answer(row: Any, **more: Any) -> dict[str, Any]:
        return {"name": row.name, "row": asdict(row), "seconds": 1.0, **more}

    alone = room.layouts._alone
    dense, context = room.layout_rows.DENSE, room.layout_rows.context_row
    one, long = answer(dense), answer(replace(dense, samples=1, length=16_384))
    whole = answer(replace(dense, samples=8))
    tensor = answer(replace(dense, samples=8, mesh=(("tp", 2),), parallel=("tensor_parallel",)))
    sharded = answer(replace(dense, mesh=(("dp_shard", 2),), parallel=("fsdp",)))
    staged = answer(replace(dense, samples=8, microbatch=1, mesh=(("pp", 2),), schedule="1f1b"))
    for spread in (tensor, sharded, staged):
        assert alone(spread, [whole, long, one]) is one
        assert alone(spread, [long, whole]) is whole
        assert alone(spread, [long]) is None
    assert alone(answer(context("ring", 2, 16_384)), [one, long]) is long
    assert alone(one, [one, whole]) is None
    failed = {"name": dense.name, "row": asdict(dense), "failed": "out of memory"}
    assert alone(tensor, [failed]) is None


def test_rows_behind_one_that_failed_are_measured_in_new_processes(
    room: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = room.layout_rows.DENSE
    spread = [replace(dense, samples=count, mesh=(("dp_shard", 2),), parallel=("fsdp",)) for count in (8, 4, 2)]
    asked: list[tuple[int, list[str]]] = []

    def answers(script: str, questions: Sequence[Mapping[str, Any]], ranks: int, *_: Any) -> list[dict[str, Any]]:
        assert (BENCH / script).exists()
        asked.append((ranks, [question["name"] for question in questions]))
        found: list[dict[str, Any]] = []
        for question in questions:
            told = {"name": question["name"], "hardware": {"device": "NVIDIA H200", "versions": {}}}
            if question["row"]["samples"] == 8:
                return [*found, {**told, "failed": "out of memory"}]
            found.append({**told, "seconds": 1.0, "tokens_per_second": 10.0 * question["row"]["samples"]})
        return found

    monkeypatch.setattr(room.layouts, "answers_of", answers)
    result = room.layouts.measure([*spread, dense], "h200", None, "layouts-scaling")
    names = [row.name for row in spread]
    assert asked == [(2, names), (2, names[1:]), (1, [dense.name])]
    found = {answer["name"]: answer for answer in result[room.layouts.KIND]}
    assert found[names[0]]["failed"] == "out of memory"
    assert "times_alone" not in found[names[0]]
    assert found[names[1]]["times_alone"] == pytest.approx(1.0)
    assert result["hardware"]["device"] == "NVIDIA H200"


WORKER = """
import json, pathlib, sys, time
asked, answered = map(pathlib.Path, sys.argv[1:3])
assert time.time() - float(sys.argv[3]) < 60 and sys.argv[4] == "more"
for question in json.loads(asked.read_text()):
    if question["does"] == "die":
        sys.exit(3)
    if question["does"] == "wait":
        time.sleep(60)
    failed = {"failed": "out of memory"} if question["does"] == "fail" else {}
    with answered.open("a") as file:
        file.write(json.dumps({"name": question["name"], "hardware": {}, **failed}) + "\\n")
    if failed:
        sys.exit(1)
"""


@pytest.mark.parametrize(
    ("does", "seconds", "expected"),
    [
        ("answer", None, [None, None, None]),
        ("fail", None, [None, "out of memory"]),
        ("die", None, [None, "the processes ended with status 3"]),
        ("wait", None, [None, "no answer within 2 s"]),
        ("wait", 1.5, [None]),
    ],
)
def test_processes_answer_until_one_question_is_too_much(
    room: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    does: str,
    seconds: float | None,
    expected: list[str | None],
) -> None:
    monkeypatch.setattr(room.rank_processes, "PATIENCE", 2)
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    questions = [{"name": name, "does": what} for name, what in (("a", "answer"), ("b", does), ("c", "answer"))]
    found = room.rank_processes.answers_of(str(script), questions, 1, seconds, tmp_path, ["more"])
    assert [answer["name"] for answer in found] == ["a", "b", "c"][: len(expected)]
    assert [answer.get("failed") for answer in found] == expected
    assert all("hardware" in answer for answer in found)


def test_what_a_question_raises_is_its_answer(
    room: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    def measure(question: Mapping[str, Any], answer: dict[str, Any]) -> None:
        answer["predicted"] = 1
        if question["name"] == "large":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if question["name"] == "wrong":
            raise ValueError("no such axis")
        answer["seconds"] = 2.0

    asked, answered = tmp_path / "questions.json", tmp_path / "answers.jsonl"
    asked.write_text(json.dumps([{"name": name} for name in ("large", "wrong", "right")]))
    room.rank_steps.answer_all(
        asked, answered, torch.device("cpu"), measure, lambda answer: f"took {answer['seconds']}"
    )
    large, wrong, right = (json.loads(line) for line in answered.read_text().splitlines())
    assert (large["failed"], large["predicted"]) == ("out of memory", 1)
    assert wrong["failed"] == "ValueError: no such axis"
    assert "failed" not in right
    assert right["hardware"]["device"]
    assert capsys.readouterr().out.splitlines() == [
        "large: out of memory",
        "wrong: ValueError: no such axis",
        "took 2.0",
    ]


def test_copies_between_gpus_are_exchanges_and_others_are_nothing_that_runs(room: SimpleNamespace) -> None:
    def event(kind: str, name: str) -> dict[str, Any]:
        return {"cat": kind, "name": name, "ts": 0, "dur": 5, "args": {"correlation": 1}}

    copies = [event("gpu_memcpy", f"Memcpy {way} (Device -> Device)") for way in ("PtoP", "DtoD")]
    found = room.traces.kernels([event("kernel", "matmul"), *copies])
    assert [kernel.kind for kernel in found] == ["compute", "exchange"]


def test_communication_is_exposed_where_no_other_kernel_runs(room: SimpleNamespace) -> None:
    kernel = room.traces.Kernel
    found = room.rank_steps.communication_of(
        [
            kernel("matmul", 0, 4000, 7, "forward"),
            kernel("ncclDevKernel_AllGather_RING_LL(x)", 3000, 6000, 9, "forward"),
            kernel("ncclDevKernel_SendRecv(x)", 5000, 7000, 11, "forward"),  # beside the other
            kernel("norm", 5500, 6500, 7, "forward"),
            kernel("ncclDevKernel_SendRecv(x)", 9000, 9500, 11, "backward"),
        ]
    )
    assert found["communication_ms"] == pytest.approx(4.5)
    assert found["exposed_ms"] == pytest.approx(4.5 - 1 - 1)
    assert found["compute_ms"] == pytest.approx(5.0)
    named = {"ncclDevKernel_AllGather_RING_LL(x)": 3.0, "ncclDevKernel_SendRecv(x)": 2.5}
    assert list(found["longest"].items()) == list(named.items())


def test_tables_show_what_was_measured_and_what_failed(room: SimpleNamespace) -> None:
    measured = {
        "name": "dense-2b 8x4096 compiled tp=2 tensor_parallel", "seconds": 0.4, "tokens_per_second": 40_960.0,
        "times_alone": 0.85, "predicted": {"seconds": 0.38, "allocated_gib": 44.4}, "peak_gib": 45.25,
        "communication_ms": 60.0, "exposed_ms": 50.5, "sixth_step": 33.4, "row": {"document": None},
    }  # fmt: skip
    failed = {"name": "dense-2b 9x4096", "failed": "out of memory", "predicted": {"not_predicted": "no cost"}}
    packed = {**measured, "name": "packed", "row": {"document": 4096}}
    result = {
        "table": "layouts-scaling", "taken": "2026-11-25", "command": "python tools/bench/layouts.py", "commit": "abc",
        "hardware": {"device": "NVIDIA H200", "versions": {"torch": "2.11.0"}},
        room.layouts.KIND: [failed, measured, packed],
    }  # fmt: skip
    text = room.layouts.text_of([result])
    line = (
        "| `dense-2b 8x4096 compiled tp=2 tensor_parallel` | 40,960 | 0.850 | 400.0 | 380 | 45.2 | 44.4 | 60.0 | 50.5 |"
    )
    assert line in text.splitlines()
    # The predicted time covers attention over the whole sample.
    assert "| `packed` | 40,960 | 0.850 | 400.0 |  | 45.2 | 44.4 | 60.0 | 50.5 |" in text.splitlines()
    assert "| `dense-2b 9x4096` | out of memory |  |  |  |  |  |  |  |" in text.splitlines()
    assert "Sixth step of `dense-2b 8x4096 compiled tp=2 tensor_parallel` 33 s after the launch." in text
    assert room.layouts.text_of([]) == room.layouts.NONE_YET


def test_the_page_has_the_tables_of_the_files_beside_it(room: SimpleNamespace) -> None:
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text()
    text = room.layouts.text_of(room.records.read(folder, room.layouts.KIND))
    assert page == room.records.fill(page, text, room.layouts.MARKS), (
        "run: uv run python tools/bench/layouts.py --tables --folder benchmarks"
    )
