"""``d9d profile`` names the cause of the time of a step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from d9d_planner.profile import measure
from d9d_planner.profile.command import app
from d9d_planner.profile.measure import Measured
from d9d_planner.profile.verdict import Verdict, verdict
from typer.testing import CliRunner

KINDS = ("optimizer", "attention", "matmul", "other", "communication", "idle")


def measured(waits: float = 0.0, tail: float = 0.9, on_device: bool = True, **kinds: float) -> Measured:
    """Times of a step of one second, whose other time is spent in matrix products."""
    shares = dict.fromkeys(KINDS, 0.0) | kinds
    shares["matmul"] += 1.0 - sum(shares.values())
    return Measured(1.0, waits, 1.0 - waits, tail, shares, 1.0, 100.0, None, on_device)


def found(
    *names: str,
    fields: tuple[str, ...] = ("workers",),
    count: int = 4,
    size: int = 1,
    predicted: float | None = None,
    **times: float,
) -> Verdict:
    return verdict(measured(**times), predicted, names, fields, count, size)  # type: ignore[arg-type]


def test_a_wait_for_data_comes_first() -> None:
    slow = found(waits=0.3, idle=0.5, tail=0.0)
    assert slow.cause == "data"
    assert "waits 30% of its time for data" in slow.reason
    assert slow.advice[0].startswith("data.workers: 4")
    assert not any("workers" in text for text in found(waits=0.3, fields=()).advice)
    assert found(waits=0.05).cause == "compute"


def test_an_idle_gpu_that_the_host_does_not_feed_is_host_bound() -> None:
    starved = found(idle=0.4, tail=0.01)
    assert starved.cause == "host"
    assert "the GPU is idle 40% of the time" in starved.reason
    assert any("compile" in text for text in starved.advice)
    assert any("a step has 4 microbatches" in text for text in starved.advice)
    again = found("compile", idle=0.4, tail=0.01, count=1)
    assert not any("compile" in text or "microbatch" in text for text in again.advice)


def test_a_gpu_that_the_host_runs_ahead_of_is_not_host_bound() -> None:
    assert found(idle=0.4, tail=0.9).cause == "compute"


def test_a_processor_needs_more_gaps_to_be_host_bound_than_a_gpu() -> None:
    assert found(idle=0.3, tail=0.0, on_device=False).cause == "compute"
    assert found(idle=0.5, tail=0.0, on_device=False).cause == "host"


def test_a_processor_that_is_much_slower_than_predicted_is_host_bound() -> None:
    assert found(tail=0.0, on_device=False, predicted=0.1).cause == "host"
    assert found(tail=0.0, on_device=False, predicted=0.5).cause == "compute"
    assert found(tail=0.9, predicted=0.1).cause == "compute"


def test_other_causes_are_named_by_their_share() -> None:
    assert found(communication=0.2).cause == "communication"
    assert found(optimizer=0.3).cause == "optimizer"
    assert found(other=0.5).cause == "memory"
    assert found("compile", other=0.5).advice[0].startswith("kernel libraries")
    assert found(other=0.5, on_device=False).cause == "compute"
    assert "take 90%" in found(attention=0.4, other=0.1).reason
    assert any("d9d plan" in text for text in found(size=2).advice)


MODULE = """
import time
from typing import Literal
from d9d_core.plugin import DatasetSpec, Ref, hookimpl
from d9d_testing.toy.config import ToyTokensConfig
from d9d_testing.toy.data import ToyTokens

class SlowConfig(ToyTokensConfig):
    name: Literal["slow"] = "slow"

class SlowTokens(ToyTokens):
    def next_pack(self):
        time.sleep(1)
        return super().next_pack()

@hookimpl
def d9d_datasets():
    config, build = Ref(f"{__name__}:SlowConfig"), Ref(f"{__name__}:SlowTokens")
    yield DatasetSpec(name="slow", summary="Slow data.", config=config, build=build)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("data", "cause"),
    [("slow", "data"), ({"name": "text", "sources": ["python:topics"], "sequence_length": 16}, "host")],
)
def test_the_cause_of_a_job_on_a_cpu_is_found(
    data: Any, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(MODULE)
    job: dict[str, Any] = {
        "plugins": ["./slow.py"], "task": "causal_lm", "optimizer": {"name": "adamw", "lr": 0.01}, "data": data,
        "model": {"name": "qwen3", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2,
                  "num_attention_heads": 2, "num_key_value_heads": 1},
        "batch": {"size": 2 if data == "slow" else 16, "microbatch": 1}, "steps": 5, "device": "cpu",
        "checkpoint": {"every": 1},
    }  # fmt: skip
    Path("job.yaml").write_text(yaml.safe_dump(job))
    result = CliRunner().invoke(app, ["job.yaml", "--steps", "12"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert f"cause: {cause}: " in result.output
    assert re.search(r"step: [\d,.]+ ms, [\d,]+ tokens/s\n", result.output)
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


def test_what_no_kind_of_work_took_of_a_step_on_a_device_is_idle() -> None:
    assert measure._with_idle({"matmul": 0.25, "idle": 9.0}, 1.0) == ({"matmul": 0.25, "idle": 0.75}, 1.0)
    # The profiler slows down what it records.
    assert measure._with_idle({"matmul": 1.5, "communication": 0.5}, 1.0) == (
        {"matmul": 1.5, "communication": 0.5, "idle": 0.0}, 2.0,
    )  # fmt: skip
