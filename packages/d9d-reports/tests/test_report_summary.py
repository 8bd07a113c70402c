"""Tests of the first card of a report and of its tiles."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from d9d_reports.report import summary
from d9d_reports.report.markup import number, table
from d9d_reports.runs.record import RunRecord

JOB: Mapping[str, Any] = {
    "steps": 5000,
    "model": {"name": "qwen3", "pretrained": "./base", "num_layers": 4, "hidden_size": 128},
    "peft": {"name": "lora", "r": 4, "alpha": 8, "modules": []},
    "task": {"name": "causal_lm", "head": None},
    "data": {"name": "text", "sources": ["a", "b", "c", "d", "e"], "sequence_length": 128},
    "optimizer": {"name": "adamw", "lr": 0.003, "betas": [0.9, 0.95], "amsgrad": False, "eps": 1e-8},
    "lr_schedule": {"name": "cosine", "warmup_steps": 30},
    "batch": {"size": 16, "microbatch": 8, "prefetch": 2},
    "precision": {"parameters": "float32", "autocast": "bfloat16"},
    "mesh": {"pp": 2, "dp_shard": 4, "tp": 1},
    "parallel": [{"name": "fsdp", "reshard": True}],
    "pipeline": {"name": "1f1b"},
}
LINES = (
    {"step": 1, "loss": 4.0, "tokens": 500, "tokens_per_second": 100.0, "eval/loss": 3.0, "mfu": 0.25},
    {"step": 900, "loss": 2.0},
    {"step": 1200, "loss": 2.51234, "tokens": 7500, "tokens_per_second": 2.0, "eval/loss": 3.5},
)


def record(directory: Path, lines: Any = LINES, job: Mapping[str, Any] = JOB, **given: Any) -> RunRecord:
    return RunRecord(directory, job, lines, given.pop("saved", 1000), **given)


def shown(page: str) -> dict[str, str]:
    """Rows of a table of pairs."""
    return {name: unescape(value) for name, value in re.findall(r"<th scope=.row.>(.*?)</th><td>(.*?)</td>", page)}


def values(run: RunRecord) -> dict[str, tuple[str, str]]:
    """Title of a tile -> its value and its further text."""
    found = re.findall(
        r'"weak">(.*?)</div><div class="value">(.*?)</div><div class="weak">(.*?)</div>', summary.tiles(run)
    )
    return {title: (value, rest) for title, value, rest in found}


def test_the_first_card_says_what_was_trained_on_what_and_how(tmp_path: Path) -> None:
    amounts = {"documents": 9, "samples": 5451, "tokens": 697746, "skipped": 0}
    facts = {"device": "NVIDIA H200", "parameters": 2000, "trained_parameters": 50, "data": amounts}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    start = {"command": "d9d train job.yaml --set 'a=<b>'", "processes": 8, "environment": {"torch": "2.13.0"}}
    (tmp_path / "startup.json").write_text(json.dumps(start))
    page = summary.trained({"a": record(tmp_path)})
    found = shown(page)
    assert found.pop("last start", None) is None  # the directory has no job.yaml
    assert found == {
        "model": "qwen3, from ./base, 2,000 parameters, 50 trained (2.50%), layers 4, hidden size 128",
        "fine-tuning": "lora, r 4, alpha 8",
        "task": "causal_lm",
        "data": "text, a b c and 2 more, sequences of 128, 9 documents, 5,451 samples, 697,746 tokens",
        "optimizer": "adamw, lr 0.003, betas 0.9 0.95",
        "schedule": "cosine, warmup steps 30",
        "batch": "16 samples, microbatches of 8, float32, autocast bfloat16",
        "layout": "8 processes, pp 2 dp_shard 4, fsdp, 1f1b",
        "device": "NVIDIA H200, torch 2.13.0",
        "trained": "1,200 of 5,000 steps, 7,500 tokens",
        "checkpoint": "step 1,000",
    }
    command = page.rpartition('<code class="command">')[2]
    assert "<b>" not in command
    assert unescape(re.sub("<[^>]*>", "", command)) == start["command"]


def test_a_model_that_trains_whole_says_so(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(json.dumps({"parameters": 2000, "trained_parameters": 2000}))
    page = summary.trained({"a": record(tmp_path, job={"model": {"name": "m"}})})
    assert shown(page)["model"] == "m, 2,000 parameters, all trained"


@pytest.mark.parametrize(
    "content", [None, "[", "[]", '{"parameters": "x", "data": 3, "environment": [], "command": null}']
)
def test_missing_and_damaged_facts_leave_their_rows_out(tmp_path: Path, content: str | None) -> None:
    for name in ("facts.json", "startup.json") if content else ():
        (tmp_path / name).write_text(content or "")
    job = {"model": "m", "data": 3, "mesh": 4, "batch": [], "parallel": None, "optimizer": None}
    found = summary.trained({"a": record(tmp_path, lines=(), job=job, saved=0)})
    assert shown(found) == {"model": "m"}
    assert "command" not in found


def test_tiles_show_key_values_with_their_units_and_leave_out_unknown_ones(tmp_path: Path) -> None:
    assert values(record(tmp_path)) == {
        "loss": ("4 → 2.512", "best 2 at step 900"),
        "evaluation loss": ("3.5", "best 3 at step 1"),
        "tokens/s": ("2", "mean 2.14, MFU 25.0%"),
        "training time": ("58 min 25 s", "without start-up and saves"),
    }
    lines = [{"step": 2, "memory/allocated_gib": 5.0, "memory/reserved_gib": 4.0}, {"step": 3, "eval/a<b/loss": 6.0}]
    lines += [{"step": 4, "memory/reserved_gib": 3.0, "eval/a<b/accuracy": 1.0}]
    assert values(record(tmp_path, lines)) == {
        "evaluation loss on a&lt;b": ("6", "best 6 at step 3"),
        "peak memory": ("4 GiB", "reserved, first process"),
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59.4, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"), (3600, "1 h 00 min"), (90_061, "25 h 01 min")],
)
def test_durations_have_two_units(tmp_path: Path, seconds: float, text: str) -> None:
    lines = [{"step": 1, "tokens": seconds, "tokens_per_second": 1.0}]
    assert values(record(tmp_path, lines))["training time"][0] == text


def test_numbers_are_whole_from_a_thousand_on() -> None:
    values = (None, 0.0, 0.123456, -999.4, 1000.0, -1000.0, 1234567.8)
    assert [number(value) for value in values] == ["", "0", "0.1235", "-999.4", "1,000", "-1,000", "1,234,568"]


def test_several_runs_are_columns_with_the_error_of_the_one_that_failed(tmp_path: Path) -> None:
    runs = {
        "first": record(
            tmp_path / "a", [{"step": 2, "loss": 1.0}], job={"steps": 10, "task": "x"}, saved=0, error="no <space>"
        ),
        "second": record(
            tmp_path / "b", [{"step": 3, "memory/resident_gib": 6.0}], job={"steps": 9}, saved=0, ending={"steps": 9}
        ),
    }
    rows = [("task", "x", ""), ("trained", "2 of 10 steps", "3 of 9 steps")]
    assert summary.trained(runs) == table(rows, ("", "first", "second"))
    rows = [
        ("status", "failed", "finished"), ("loss", "1, best 1 at step 2", ""), ("peak memory", "", "6 GiB"),
        ("error", "no <space>", ""),
    ]  # fmt: skip
    assert summary.results(runs) == table(rows, ("", "first", "second"))
