"""A job is resolved and judged once, and its circumstances are found out once, whatever it is built for."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from d9d_core.job_file import resolve
from d9d_core.layout import report
from d9d_core.registry.capabilities import Judge
from d9d_engine.compose import root
from d9d_engine.job import Job
from d9d_inference.job import InferenceJob

ONCE = {
    "names": resolve.select_parts,
    "layout": report.check_layout,
    "records": resolve.resolve,
    "judge": Judge.__init__,
    "circumstances": root.circumstances,
}


def calls(function: Callable[[], object]) -> Counter[str]:
    """Calls of each of the functions above."""
    names = {once.__code__: name for name, once in ONCE.items()}
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code in names:
            found[names[frame.f_code]] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found


def silent(_text: str) -> None:
    """Drop a note."""


@pytest.fixture
def values(tmp_path: Path, published: Callable[[Path], Path]) -> dict[str, Any]:
    """Sections that jobs of both kinds have."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"the quick brown fox {number}"}) + "\n" for number in range(8)))
    return {
        "run": {"name": "once", "dir": str(tmp_path / "runs")},
        "device": "cpu",
        "model": {"name": "qwen3", "pretrained": str(published(tmp_path / "model"))},
        "data": {"name": "documents", "sources": [str(texts)], "sequence_length": 32},
        "batch": {"size": 2, "microbatch": 2},
    }


@pytest.mark.thorough
def test_planning_and_training_resolve_and_judge_their_job_once(values: dict[str, Any]) -> None:
    job = Job.from_values({**values, "steps": 1, "task": "causal_lm", "optimizer": {"name": "adamw", "lr": 0.1}})
    assert calls(job.plan) == dict.fromkeys(ONCE, 1)
    assert calls(lambda: job.build(silent)) == dict.fromkeys(ONCE, 1)


def test_inference_resolves_and_judges_its_job_once(values: dict[str, Any]) -> None:
    job = InferenceJob.from_values({**values, "task": "log_probs"})
    assert calls(lambda: job.build(silent)) == dict.fromkeys(ONCE, 1)
