"""Plans of transformers' models agree with plans of d9d's own models, and with the parameters that ranks hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from d9d_core.cost import Share, StageCost
from d9d_core.job import JobFile
from d9d_core.model import Stage
from d9d_engine.job import Job
from d9d_planner.device import Device
from d9d_planner.prediction import predict
from d9d_qwen3.costs import stage_cost as qwen3_cost
from d9d_qwen3.moe_config import Qwen3MoeConfig
from d9d_transformers.config import TransformersConfig, example
from d9d_transformers.costs import stage_cost

from tests.planned_jobs import invoke, values

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96,
}  # fmt: skip
THEIRS = SIZES | {
    "num_hidden_layers": 4, "max_position_embeddings": 64, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}, "parallel": ["tensor_parallel"]},
    "tp, more than key and value heads": {"mesh": {"tp": 4}, "parallel": ["tensor_parallel"]},
    "tp and pp": {"mesh": {"tp": 2, "pp": 2}, "parallel": ["tensor_parallel"], "pipeline": "1f1b"},
    "tp and ep": {
        "mesh": {"tp": 2, "dp_shard": 2, "ep": 2},
        "parallel": ["tensor_parallel", "fsdp", "expert_parallel"],
    },
}
EXPERTS = ("deepseek_v3", "qwen3_moe")


def total(cost: StageCost, field: str) -> float:
    return sum(getattr(op, field) * block.count for block in cost.blocks for op in block.ops)


@pytest.mark.parametrize("share", [Share(2, 4096, compiled=True), Share(2, 4096, 2, 2, 4, compiled=True)])
def test_a_mixture_of_experts_costs_what_the_own_model_costs(share: Share) -> None:
    sizes = {"hidden_size": 1024, "vocab_size": 32_000, "moe_intermediate_size": 384, "num_experts": 64}
    own = SIZES | sizes | {"num_layers": 6, "experts_per_token": 8, "max_positions": 4096}
    del own["intermediate_size"]
    theirs = THEIRS | sizes | {"model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts_per_tok": 8}
    for stage in (Stage(), Stage(0, 3), Stage(1, 3), Stage(2, 3)):
        ours = qwen3_cost(Qwen3MoeConfig(**own), stage, share)
        found = stage_cost(TransformersConfig(config=theirs), stage, share)
        for one, other in zip(found.blocks, ours.blocks, strict=True):
            facts = ("parameters", "expert_parameters", "count", "input", "workspace")
            assert [getattr(one, fact) for fact in facts] == [getattr(other, fact) for fact in facts]
        for field in ("flops", "backward_flops"):
            assert total(found, field) == pytest.approx(total(ours, field), rel=1e-9)
        for field in ("traffic", "backward_traffic", "kept"):  # the router is measured
            assert total(found, field) == pytest.approx(total(ours, field), rel=0.01), field


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "olmo2", "phi3", "gpt_oss", *EXPERTS])
def test_ranks_hold_the_parameters_that_a_plan_counts(kind: str, layout: str) -> None:
    if "ep" in LAYOUTS[layout]["mesh"] and kind not in EXPERTS:
        pytest.skip("no experts that can be split")
    model = {"name": "transformers", "config": example(kind).config | {"vocab_size": 257}}
    job = Job.from_values(
        {
            **values(model, device="cpu", batch={"size": 4, "microbatch": 1}),
            "data": {"name": "text", "sources": ["x"], "tokenizer": "bytes", "sequence_length": 32},
            **LAYOUTS[layout],
        }
    )
    ranks, stages = job.mesh.world_size, job.mesh.pp
    held = [job.plan(ranks, rank).memory.parameters for rank in range(ranks)]
    of_stages = [held[first : first + ranks // stages] for first in range(0, ranks, ranks // stages)]
    found = predict(job, job.registry, job.views(), Device.named("h200")).ranks
    assert [rank.parameters for rank in found] == [max(each) for each in of_stages]


@pytest.mark.thorough
@pytest.mark.parametrize("source", ["config", "pretrained"])
def test_jobs_with_a_model_of_transformers_are_planned(source: str, tmp_path: Path) -> None:
    import transformers

    path, out = tmp_path / "job.yaml", tmp_path / "planned.yaml"
    if source == "config":
        model: dict[str, Any] = {"name": "transformers", "config": {"model_type": "llama", **THEIRS}}
    else:
        config = transformers.Olmo2Config(**THEIRS)
        transformers.Olmo2ForCausalLM(config).save_pretrained(tmp_path / "model")
        model = {"pretrained": str(tmp_path / "model")}  # no plugin of d9d reads olmo2
    data = {"name": "text", "sources": ["x"], "sequence_length": 64}
    path.write_text(yaml.safe_dump(values(model, data=data, batch={"size": 16})))
    status, output = invoke("plan", str(path), "--gpus", "8", "--memory", "80GiB", "--top", "3", "--write", str(out))
    assert status == 0, output
    assert "bound by" in output
    assert JobFile.load(out).mesh.world_size == 8


@pytest.mark.thorough
def test_a_plan_of_a_refused_model_says_why(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    model = {"name": "transformers", "config": {"model_type": "bloom"}}
    path.write_text(yaml.safe_dump(values(model)))
    status, output = invoke("plan", str(path), "--gpus", "8")
    assert status != 0
    assert output.startswith("no layout on 8 devices is valid: model.config: ")
    assert "divisible" not in output
