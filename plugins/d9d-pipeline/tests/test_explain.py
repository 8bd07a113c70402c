"""What ``d9d check`` and ``d9d explain`` say about a job in stages."""

from __future__ import annotations

import pytest
from d9d_engine.cli.report import print_explanation, print_plan
from d9d_engine.cli.stages import handed_on, layers_of
from d9d_engine.job import Job
from d9d_testing.layouts import job_of
from torch import nn

TOY = ["d9d_testing.toy.plugin", "d9d_pipeline.plugin"]
QWEN = ["d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_qwen3.plugin", "d9d_pipeline.plugin"]


def job() -> Job:
    values = {
        "steps": 1,
        "device": "cpu",
        "batch": {"size": 12, "microbatch": 3},
        "model": {"name": "toy_model", "blocks": 5},
        "data": "toy_data",
        "task": "toy_task",
        "optimizer": "toy_optimizer",
        "mesh": {"pp": 2},
        "pipeline": "zero_bubble_v",
    }
    return job_of(values, TOY)


def tied() -> Job:
    sizes = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 16, "num_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    values = {
        "steps": 1,
        "device": "cpu",
        "batch": {"size": 4, "microbatch": 2},
        "model": {"name": "qwen3", **sizes, **heads, "max_positions": 32, "tie_embeddings": True},
        "data": {"name": "text", "sources": ["python:topics"], "sequence_length": 32},
        "task": "causal_lm",
        "optimizer": {"name": "adamw", "lr": 0.1},
        "mesh": {"pp": 2},
        "pipeline": {"name": "1f1b", "layers": [3, 1]},
    }
    return job_of(values, QWEN)


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.thorough
def test_check_says_how_many_stages_there_are_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = job()
    print_plan(loaded, loaded.plan())
    out = lines(capsys.readouterr().out)
    assert "pipeline zero_bubble_v, 4 stage(s) on 2 rank(s), 4 microbatch(es)" in out
    assert any(line.startswith("memory") and "on the first rank" in line for line in out)


def test_explain_lists_the_stages_in_order_with_what_each_has(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = job()
    plan = loaded.plan()
    print_explanation(loaded, plan)
    out = lines(capsys.readouterr().out)
    begin = out.index("stage rank along pp layers parameters sent tensors") + 1
    counts = [sum(p.numel() for p in stage.parameters()) for stage in plan.assembly.all_stages]
    assert sum(counts) == plan.parameters[0]
    assert out[begin - 2] == "stages of zero_bubble_v, 4 stage(s) on 2 rank(s), 4 microbatch(es)"
    assert out[begin : begin + 4] == [
        f"0 0 layers.0 to layers.1 (2) {counts[0]} x",
        f"1 1 layers.2 {counts[1]} x",
        f"2 1 layers.3 {counts[2]} x",
        f"3 0 layers.4 {counts[3]}",
    ]


def test_explain_tells_shapes_and_what_stages_share_where_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("d9d_qwen3", reason="has tied embeddings")
    loaded = tied()
    print_explanation(loaded, loaded.plan())
    out = lines(capsys.readouterr().out)
    (first,) = (line for line in out if line.startswith("0 0 layers.0 to layers.2 (3)"))
    assert first.endswith("hidden [2, 32, 8]")
    assert "embedding.weight is in stages 0 and 1, kept equal" in out


def test_a_job_without_a_pipeline_has_no_such_lines(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = job_of(job().model_dump(mode="json") | {"mesh": {}, "pipeline": None}, TOY)
    print_explanation(loaded, loaded.plan())
    out = capsys.readouterr().out
    assert "stage" not in out
    assert "first rank" not in out


class Curious(nn.Module):
    """Wants to know more of a microbatch than its size."""

    def boundary(self, microbatch: dict[str, object]) -> dict[str, object]:
        return {"x": dict(microbatch)["x"]}


def test_a_boundary_that_needs_real_shapes_does_not_fail() -> None:
    assert handed_on(Curious(), job()) == "known when the data is read"
    assert layers_of(Curious()) == ""
