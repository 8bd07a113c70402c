"""Inference jobs on GPUs: rows of the CPU, without waiting for the device, and in every layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.events import PackEnds, PackStarts
from d9d_inference.job import InferenceJob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

Rows = list[dict[str, Any]]
PACKED = {"name": "text", "packing": "best_fit", "field": "text"}


def values_of(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    data = {"name": "documents", "sources": [str(folder / "texts.jsonl")], "sequence_length": 64}
    return {
        "run": {"name": name, "dir": str(folder / "runs")},
        "model": {"name": "qwen3", "pretrained": str(folder / "model")},
        "task": {"name": "log_probs", "per": "token"}, "batch": {"size": 16, "microbatch": 4}, **sections,
        "data": {**data, **sections.get("data", {})},
    }  # fmt: skip


def rows_of(folder: Path, name: str) -> Rows:
    return [json.loads(line) for line in (folder / "runs" / name / "output.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, published: Callable[..., Path]) -> Path:
    path = tmp_path_factory.mktemp("inference")
    published(path / "model")
    texts = [("the quick brown fox " * 3)[: 5 + number % 50] for number in range(70)]
    (path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


class NoWaiting:
    """Lets the host wait for the device outside of packs only."""

    def subscriptions(self) -> Sequence[tuple[type[Any], Callable[[Any], None]]]:
        return [
            (PackStarts, lambda event: torch.cuda.set_sync_debug_mode("error" if event.first else "default")),
            (PackEnds, lambda _event: torch.cuda.set_sync_debug_mode("default")),
        ]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_rows_are_those_of_the_cpu_and_the_host_never_waits_in_a_pack(folder: Path, packed: bool) -> None:
    data = PACKED if packed else {}
    found = {}
    for device in ("cpu", "cuda"):
        name = f"{device}-{packed}"
        job = InferenceJob.from_values(values_of(folder, name, device=device, data=data))
        observers = [NoWaiting()] if device == "cuda" else []
        try:
            job.build(note=lambda _text: None, observers=observers).run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found[device] = rows_of(folder, name)
    assert len(found["cuda"]) == 70
    for row, other in zip(found["cpu"], found["cuda"], strict=True):
        assert row["targets"] == other["targets"]
        assert row["log_probs"] == pytest.approx(other["log_probs"], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("fsdp", {"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]}),
        ("compiled", {"mesh": {"dp_shard": 2}, "parallel": ["compile", "fsdp"]}),
        ("pp", {"mesh": {"pp": 2}, "pipeline": "1f1b"}),
        ("captured", {"mesh": {"pp": 2}, "pipeline": "1f1b", "task": {"name": "hidden_states", "layers": [0, 1]}}),
    ],
)
def test_two_gpus_write_the_rows_of_one(
    folder: Path, d9d: Callable[..., tuple[int, str, str]], name: str, sections: dict[str, Any]
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    task = {"task": sections["task"]} if "task" in sections else {}
    InferenceJob.from_values(values_of(folder, f"{name}-one", **task)).build(note=lambda _text: None).run()
    path = folder / f"{name}.json"
    path.write_text(json.dumps(values_of(folder, f"{name}-two", **sections)))
    status, _, err = d9d("infer", str(path), "--nproc", "2")
    assert status == 0, err
    column = "layer_0" if task else "log_probs"
    for row, other in zip(rows_of(folder, f"{name}-one"), rows_of(folder, f"{name}-two"), strict=True):
        assert row[column] == pytest.approx(other[column], rel=1e-3, abs=1e-3)
