"""The harness that compares training steps with steps of other projects."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.tools

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "tools" / "bench" / "compare"
NAMES = ("records", "settings", "microbatches", "contender", "ours", "rounds", "record", "tables")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The harness's modules, which are a script's: each is found by its bare name."""
    monkeypatch.syspath_prepend(str(ROOM.parent))
    monkeypatch.syspath_prepend(str(ROOM))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in NAMES:
        sys.modules.pop(name, None)


def answer(seconds: float, **more: Any) -> dict[str, Any]:
    hardware = {"device": "NVIDIA H200", "versions": {"torch": "2.11.0"}}
    found = {"seconds": seconds, "losses": [6.0], "start_seconds": 1.0, "process_seconds": 2.0, "parameters": 127_360}
    return {**found, "versions": {"rival": "1.2"}, "remarks": "", "hardware": hardware, **more}


@pytest.mark.slow
def test_the_whole_harness_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOM), "--tiny", "--folder", str(tmp_path), "--contenders", "d9d", "transformers"]
    done = subprocess.run([*command, "nobody_has:this"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("tiny-64-random--*.json")
    result = json.loads(path.read_text())
    assert set(result["contenders"]) == {"d9d", "transformers", "nobody_has:this"}
    assert "No module named 'nobody_has'" in result["contenders"]["nobody_has:this"]["failed"]
    ours, theirs = (result["contenders"][name] for name in ("d9d", "transformers"))
    assert len(ours["ms"]) == len(theirs["ms"]) == len(theirs["times_ours"]) == 2
    assert ours["parameters"] == theirs["parameters"]
    assert abs(ours["losses"][0] - theirs["losses"][0]) < 0.2
    assert sum(ours["ms_by_kind"].values()) > 0
    assert "| transformers, SDPA" in done.stdout


def test_all_contenders_see_the_same_microbatches(room: SimpleNamespace) -> None:
    setting = room.settings.Setting("tiny", 64, 3, "packed")
    first, again = (room.microbatches.microbatch_of(setting, 0) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["tokens"], room.microbatches.microbatch_of(setting, 1)["tokens"])
    stream = room.microbatches.Compared(
        room.microbatches.ComparedConfig(model="tiny", sequence_length=64, samples=3, data="packed"), None
    )
    packs = [stream.next_pack() for _ in range(room.microbatches.DIFFERENT + 1)]
    assert torch.equal(packs[0][0]["tokens"], first["tokens"])
    assert torch.equal(packs[-1][0]["tokens"], first["tokens"])


def test_packed_documents_end_with_a_token_of_their_own_and_begin_at_position_zero(room: SimpleNamespace) -> None:
    setting = room.settings.Setting("tiny", 4096, 4, "packed")
    found = room.microbatches.microbatch_of(setting, 2)
    tokens, documents, positions = (found[name] for name in ("tokens", "documents", "positions"))
    changes = documents[:, 1:] != documents[:, :-1]
    assert changes.sum() > 8
    assert torch.equal(tokens[:, :-1] == 511, changes)
    assert torch.equal(positions[:, 1:] == 0, changes)
    assert (positions[:, 1:] - positions[:, :-1] == 1)[~changes].all()
    assert torch.equal(found["targets"][:, :-1] == -100, changes)
    assert torch.equal(found["targets"][:, :-1][~changes], tokens[:, 1:][~changes])
    assert room.microbatches.ComparedConfig(
        model="tiny", sequence_length=8, samples=1, data="packed"
    ).packs_documents  # so that ours chooses its kernels as for any packed data


def test_models_have_the_sizes_that_their_names_say(room: SimpleNamespace) -> None:
    setting = room.settings.Setting("dense-2b", 4096, 4)
    assert setting.name == "dense-2b-4k-random"
    attention = 2 * (16 + 8) * 128 * 2048
    matmul = 28 * (attention + 3 * 2048 * 6144) + 2048 * 151_936
    assert setting.flops_per_token() == 6 * matmul + 6 * 28 * 16 * 128 * 4096
    for name in room.settings.MODELS:
        room.settings.Setting(name, 64, 1).config()
    assert room.settings.Setting.of("dense-2b", 65_536).checkpointed
    assert room.settings.Setting.from_json(setting.as_json()) == setting


def test_float8_has_tables_of_its_own(room: SimpleNamespace) -> None:
    setting = room.settings.Setting("dense-2b", 4096, 4, precision="fp8")
    assert setting.name == "dense-2b-4k-random-fp8"
    assert [room.settings.Setting("tiny", 64, 2, precision=name).width for name in ("bfloat16", "autocast", "fp8")] == [
        2, 4, 2,
    ]  # fmt: skip


def test_lora_has_tables_of_its_own_and_no_weight_gradients_of_frozen_weights(room: SimpleNamespace) -> None:
    setting = room.settings.Setting("dense-2b", 4096, 4, lora=True)
    assert setting.name == "dense-2b-4k-random-lora"
    whole = dataclasses.replace(setting, lora=False)
    assert setting.matmul_flops_per_token() == whole.matmul_flops_per_token() * 4 / 6
    attention = 6 * 28 * 16 * 128 * 4096
    assert setting.flops_per_token() == setting.matmul_flops_per_token() + attention


@pytest.mark.filterwarnings("default")  # of Dynamo
def test_contenders_with_lora_train_the_same_numbers_of_parameters(room: SimpleNamespace) -> None:
    setting = room.settings.Setting("tiny", 64, 2, lora=True, backend="eager")
    found = [room.contender.builder_of(name)(setting, torch.device("cpu")) for name in ("d9d", "transformers")]
    assert found[0].trained == found[1].trained == 2 * 16 * sum((64 + 64, 2 * (64 + 32), 64 + 64, 3 * (64 + 96)))
    assert found[0].parameters == found[1].parameters
    assert abs(found[0].step().item() - found[1].step().item()) < 0.2


@pytest.mark.slow
def test_float8_is_measured_with_ours_alone_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOM), "--tiny", "--precision", "fp8", "--folder", str(tmp_path)]
    done = subprocess.run([*command, "--rounds", "1"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("tiny-64-random-fp8--*.json")
    result = json.loads(path.read_text())["contenders"]
    assert set(result) == {"d9d", "torchtitan"}
    assert len(result["d9d"]["ms"]) == 1
    assert "skipped" in result["torchtitan"]


@pytest.mark.filterwarnings("default")  # of Dynamo
def test_master_weights_train_float32_weights_in_bfloat16_parameters(room: SimpleNamespace) -> None:
    build, cpu = room.contender.builder_of("d9d-masters"), torch.device("cpu")
    tiny = room.settings.Setting("tiny", 64, 2, backend="eager")
    with pytest.raises(room.contender.NotHereError, match="give --precision autocast"):
        build(tiny, cpu)
    wide = dataclasses.replace(tiny, precision="autocast")
    masters, autocast = (maker(wide, cpu) for maker in (build, room.contender.builder_of("d9d")))
    assert (masters.optimizer_bytes, autocast.optimizer_bytes) == (26, None)
    assert masters.step().item() == pytest.approx(autocast.step().item(), abs=0.05)


def test_rounds_alternate_and_those_who_fail_are_not_asked_again(room: SimpleNamespace) -> None:
    asked: list[tuple[str, bool]] = []
    said: list[str] = []

    def ask(name: str, _setting: Any, profiled: bool, _seconds: float | None) -> dict[str, Any]:
        asked.append((name, profiled))
        return {"a": answer(1.0), "b": answer(2.0), "c": {"skipped": "c is not installed"}}[name]

    setting = room.settings.Setting("tiny", 64, 2)
    answers = room.rounds.run(setting, ("a", "c", "b"), 3, None, said.append, ask)
    assert asked == [
        ("a", True), ("c", True), ("b", True), ("b", False), ("a", False), ("a", False), ("b", False),
    ]  # fmt: skip
    assert [len(answers[name]) for name in "abc"] == [3, 3, 1]
    assert "round 1: c: skipped: c is not installed" in said


def test_a_round_that_would_not_fit_is_left_out(room: SimpleNamespace) -> None:
    given: list[float | None] = []

    def ask(_name: str, _setting: Any, _profiled: bool, seconds: float | None) -> dict[str, Any]:
        given.append(seconds)
        return answer(1.0, process_seconds=40.0)

    said: list[str] = []
    answers = room.rounds.run(room.settings.Setting("tiny", 64, 2), ("a", "b"), 3, 70.0, said.append, ask)
    assert [len(found) for found in answers.values()] == [1, 1]
    assert said[-1].startswith("1 of 3 rounds: another one would take longer")
    assert all(seconds is not None and seconds <= 70 for seconds in given)


def result_of(room: SimpleNamespace) -> dict[str, Any]:
    kinds = {"matmul": 60.0, "attention": 10.0, "other": 20.0, "optimizer": 5.0, "communication": 0.0, "idle": 5.0}
    rates = {"matmul_tflops": 700.0, "attention_tflops": 400.0, "optimizer_tbps": 2.5}
    answers = {
        "d9d": [answer(0.1, peak_gib=40.0, ms_by_kind=kinds, roofline=rates, remarks="attention flex"), answer(0.2)],
        "transformers": [answer(0.2, peak_gib=80.5, parameters=5), answer(0.2)],
        "liger": [{"skipped": "liger-kernel is not installed"}],
        "torchtitan": [{"failed": "out of memory"}],
    }
    setting = room.settings.Setting("dense-2b", 4096, 4)
    found: dict[str, Any] = room.record.summary(setting, answers, "python tools/bench/compare dense-2b", "2026-11-23")
    return found


def test_a_result_has_what_is_needed_to_judge_it(room: SimpleNamespace, tmp_path: Path) -> None:
    result = result_of(room)
    ours, theirs = result["contenders"]["d9d"], result["contenders"]["transformers"]
    assert theirs["times_ours"] == [0.5, 1.0]  # round by round
    assert ours["tokens_per_second"] == round(4 * 4096 / 0.15)
    assert ours["mfu"] == pytest.approx(4 * 4096 / 0.15 * result["flops_per_token"] / 989e12, abs=1e-4)
    assert theirs["peak_gib"] == 80.5
    assert result["contenders"]["liger"] == {"skipped": "liger-kernel is not installed"}
    assert result["setting"]["length"] == 4096
    assert result["hardware"]["versions"] == {"torch": "2.11.0"}
    path = room.records.write(result, tmp_path)
    assert path.name == "dense-2b-4k-random--nvidia-h200.json"
    (tmp_path / "other.json").write_text('{"kernels": []}')
    assert room.records.read(tmp_path, room.record.KIND) == [result]


def test_tables_are_written_between_the_marks_and_nothing_around_them_changes(
    room: SimpleNamespace, tmp_path: Path
) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"# Title\n\n{room.tables.MARKS[0]}\nold\n{room.tables.MARKS[1]}\nafter\n")
    for results in ([result_of(room)], []):
        room.tables.write(page, results)
        text = page.read_text()
        assert text.startswith(f"# Title\n\n{room.tables.MARKS[0]}\n")
        assert text.endswith(f"\n{room.tables.MARKS[1]}\nafter\n")
        assert "old" not in text
        if results:
            assert "| transformers, SDPA 1.2 | 81,920 | " in text
            assert "| 0.750 (0.500 to 1.000) |" in text
            assert "| d9d | 60.0 | 10.0 | 20.0 | 5.0 | 0.0 | 5.0 | 700 | 400 | 2.50 |" in text
            assert "transformers + Liger: left out: liger-kernel is not installed" in text
            assert "torchtitan: failed: out of memory" in text
            assert "transformers, SDPA: its model has 5 parameters, ours 127,360" in text
            assert "d9d: attention flex" in text
    assert room.tables.NONE_YET in page.read_text()


def test_the_page_has_the_tables_of_the_files_beside_it(room: SimpleNamespace) -> None:
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text()
    expected = room.records.fill(
        page, room.tables.text_of(room.records.read(folder, room.record.KIND)), room.tables.MARKS
    )
    assert page == expected, "run: uv run python tools/bench/compare --tables"
    front = (ROOT / "README.md").read_text()
    shown = [result for result in room.records.read(folder, room.record.KIND) if result["table"] in room.tables.SHOWN]
    assert {result["table"] for result in shown} == set(room.tables.SHOWN)
    assert front == room.records.fill(front, room.tables.summary_of(shown), room.tables.MARKS), "run the same"


def test_the_summary_says_how_many_times_as_fast_ours_was(room: SimpleNamespace) -> None:
    result = result_of(room)
    assert room.tables.summary_of([]) == room.tables.NONE_YET
    (row,) = room.tables.summary_of([result]).splitlines()[2:]
    assert row.endswith("| 81,920 (1.33x) |")
    ours = result["contenders"]["d9d"]
    result["contenders"]["d9d-masters"] = {**ours, "times_ours": [1.5 for _ in ours["ms"]]}
    _, row = room.tables.summary_of([result]).splitlines()[2:]
    assert row.startswith(f"| {result['table']}, master weights, ")
    assert row.endswith("| 81,920 (2.00x) |")
    result["contenders"] = {"d9d": result["contenders"]["d9d"]}
    assert room.tables.summary_of([result]) == room.tables.NONE_YET


@pytest.mark.full
def test_a_comparison_in_which_nothing_was_measured_writes_nothing_and_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOM), "--tiny", "--contenders", "nobody_has:this", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nobody_has:this: failed: ModuleNotFoundError" in done.stderr
    last = "compare: nothing was measured, for the reasons above; nothing was written"
    assert done.stderr.strip().splitlines()[-1] == last
    assert not list(tmp_path.iterdir())


def test_a_wrong_name_is_refused_before_anything_runs() -> None:
    command = [sys.executable, str(ROOM), "dense-2b", "--contenders", "d9d", "tranformers"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown contender 'tranformers'; known: d9d, d9d-eager, d9d-masters, d9d-attention-kept" in done.stderr
