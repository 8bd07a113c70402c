"""The bench of kernels: measurements on a CPU, and the page that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.tools

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "tools" / "bench"
NAMES = ("records", "timing", "optimizer_step", "kernel_parts", "kernel_block", "kernels")


@pytest.mark.slow
def test_the_whole_bench_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "kernels.py"), "--tiny", "--folder", str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("kernels--*.json")
    result = json.loads(path.read_text())
    found = result["kernels"]
    both = {"forward", "backward"}
    assert {(row["op"], row["pass"]) for row in found["ops"] if row["backend"] == "triton"} == {
        (op, way)
        for op in ("rms_norm", "add_rms_norm", "silu_mul", "rope", "normed_rope", "permute", "unpermute")
        for way in both
    }
    assert any(row["op"].startswith("adamw triton") for row in found["optimizers"])
    assert any(row["op"].startswith("stochastic_adamw triton") for row in found["optimizers"])
    assert {row["backend"] for row in found["loss"]["backends"]} >= {
        *("reference", "triton", "triton_sum", "triton_sum_narrow", "triton_words"),
        *("triton, frozen weight", "triton_sum_narrow, frozen weight", "triton_words, frozen weight"),
    }
    assert {"as written", "kernels", "compiled"} <= set(found["block"]["ms"])
    assert len(result["copy_tbps"]) == 2
    assert {"torch", "triton"} <= set(result["hardware"]["versions"])
    assert result["commit"]
    assert "| rms_norm | 8 x 16 | forward | triton |" in done.stdout


def test_bytes_are_the_fewest(room: SimpleNamespace) -> None:
    """Of shapes of which one can count them by hand: bfloat16 has two bytes, angles four."""
    bench = room.kernel_parts.Bench(room.kernel_parts.TINY, "cpu")
    found = {(case.op, case.shape.split(",")[0]): case.bytes for case in room.kernel_parts.cases(bench)}
    assert found["rms_norm", "8 x 16"] == (2 * 8 * 16 * 2, 3 * 8 * 16 * 2)
    assert found["add_rms_norm", "8 x 16"] == (4 * 8 * 16 * 2, 4 * 8 * 16 * 2)
    assert found["silu_mul", "8 x 24"] == (3 * 8 * 24 * 2, 5 * 8 * 24 * 2)
    turned = 2 * (2 * 4 * (4 + 2) * 8) * 2 + 2 * 4 * 4 * 4
    assert found["rope", "2 x 4"] == (turned, turned)
    heads = 2 * (2 * 4 * (4 + 2) * 8)
    assert found["normed_rope", "2 x 4"] == (turned, turned + heads)
    few, many = 4 * 16 * 2, 4 * 2 * 16 * 2
    assert found["permute", "4 x 16"] == (few + many, few + many)
    assert found["unpermute", "4 x 16"] == (few + many, few + 2 * many)


def result_of(room: SimpleNamespace) -> dict[str, Any]:
    row = {"op": "rope", "shape": "2 x 4", "pass": "forward", "backend": "triton"}
    numbers = {"ms": 0.5, "gigabytes": 2.0, "share_of_copy": 0.955}
    return {
        "table": "kernels", "taken": "2026-11-23", "command": "python tools/bench/kernels.py", "commit": "abc",
        "hardware": {"device": "NVIDIA H200", "versions": {"torch": "2.11.0"}}, "copy_tbps": [4.2, 4.3],
        room.kernels.KIND: {
            "ops": [{**row, **numbers}],
            "optimizers": [{"op": "adamw", "shape": "2 G parameters", **numbers}],
            "loss": {
                "shape": "8 x 2 x 4", "products_ms": 10.0,
                "backends": [{"backend": "triton", "ms": 11.0, "times_products": 1.1, "extra_gib": 0.25}],
            },
            "block": {"shape": "1 x 4 x 16", "ms": {"compiled": 9.876}},
        },
    }  # fmt: skip


def test_tables_show_what_was_measured(room: SimpleNamespace) -> None:
    text = room.kernels.text_of([result_of(room)])
    assert "A copy moves 4.20 and 4.30 TB/s" in text
    assert "| rope | 2 x 4 | forward | triton | 0.500 | 2.00 | 96% |" in text
    assert "| adamw | 2 G parameters | 0.500 | 2.00 | 96% |" in text
    assert "| triton | 11.0 | 1.10 | 0.25 |" in text
    assert "| compiled | 9.88 |" in text
    assert room.kernels.text_of([]) == room.kernels.NONE_YET


def test_the_page_has_the_tables_of_the_files_beside_it(room: SimpleNamespace) -> None:
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text()
    text = room.kernels.text_of(room.records.read(folder, room.kernels.KIND))
    assert page == room.records.fill(page, text, room.kernels.MARKS), (
        "run: uv run python tools/bench/kernels.py --tables"
    )
