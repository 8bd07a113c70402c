"""Training loops of one's own compute the same in every layout as in one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, TrainingError
from d9d_engine.own_loop import OwnLoop, Stages, build_schedule, build_stages, topology_of
from d9d_moe.balancing.config import AuxiliaryLossConfig
from d9d_moe.expert_parallel.config import ExpertParallelConfig
from d9d_moe.expert_parallel.strategy import ExpertParallel
from d9d_nn.causal_lm.config import CausalLMConfig
from d9d_nn.causal_lm.task import CausalLM
from d9d_parallel.functions import (
    activation_checkpointing,
    compile_blocks,
    context_parallel,
    fsdp,
    hsdp,
    replicate,
    tensor_parallel,
)
from d9d_pipeline.config import OneForwardOneBackwardConfig, Zb1pConfig
from d9d_qwen3.model import Qwen3
from d9d_qwen3.moe_config import Qwen3MoeConfig
from d9d_testing.world import World
from torch import Tensor
from torch import distributed as dist

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_loop" / "train.py"
CONFIG = Qwen3MoeConfig(
    vocab_size=64, hidden_size=16, num_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
    experts_per_token=2, moe_intermediate_size=8, tie_embeddings=True, max_positions=16,
    balancing=(AuxiliaryLossConfig(scope="sequence", coefficient=0.01),),
)  # fmt: skip
Apply = Callable[[Stages], object]


def parts(stages: Stages) -> None:
    fsdp(stages, match=["layers.*"], defer="everything")
    replicate(stages, match=["embedding", "norm"])


def experts(stages: Stages) -> None:
    stages.apply(ExpertParallel(ExpertParallelConfig()), "expert_parallel")
    fsdp(stages)


def recomputed(stages: Stages) -> None:
    activation_checkpointing(stages)
    compile_blocks(stages, backend="aot_eager")
    replicate(stages)


def alone(_stages: Stages) -> None:
    pass


#: Name -> mesh, strategies, config of the schedule.
LAYOUTS: dict[str, tuple[dict[str, int], Apply, Any]] = {
    "parts": ({"dp_shard": 2}, parts, None),
    "experts": ({"dp_shard": 2, "ep": 2}, experts, None),
    "recomputed and compiled": ({"dp_replicate": 2}, recomputed, None),
    "tensor": ({"tp": 2}, tensor_parallel, None),
    "context": ({"cp": 2}, context_parallel, None),
    "pipeline": ({"pp": 2}, replicate, Zb1pConfig()),
}
MIXES: dict[str, tuple[dict[str, int], Apply, Any]] = {
    "pipeline of parts": ({"pp": 2, "dp_shard": 2}, parts, OneForwardOneBackwardConfig()),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, hsdp, None),
}


def steps(mesh: Mapping[str, int], apply: Apply, schedule: Any) -> list[float]:
    """Losses and gradient norms of three steps on eight samples."""
    topology = topology_of(**mesh)
    made = None if schedule is None else build_schedule(schedule, topology, 2)
    stages = build_stages(lambda stage: Qwen3(CONFIG, stage), topology, made)
    apply(stages)
    loop = OwnLoop(stages, CausalLM(CausalLMConfig()), max_norm=0.5)
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.5, foreach=False)
    found = []
    for step in range(3):
        tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(step))
        tokens[:, 9] = -100 if step == 1 else tokens[:, 9]
        own = tokens.chunk(topology.data_parallel_size)[topology.data_parallel_rank].chunk(2)
        pack = [{"tokens": one[:, :-1].clamp(min=0), "targets": one[:, 1:]} for one in own]
        result = loop.step(pack)
        optimizer.step()
        loop.end_step()
        found += [result.loss.item(), result.grad_norm.item()]
    seen: list[Tensor] = []
    loop.evaluate(pack, lambda outputs, _microbatch: seen.append(outputs["token_loss"].sum()))
    assert len(seen) == (2 if 1 in {index + 1 - len(stages.outlines) for index in stages.here} else 0)
    return found


def all_of(names: list[str]) -> dict[str, list[float]]:
    return {name: steps(*(LAYOUTS | MIXES)[name]) for name in names}


@pytest.mark.thorough
def test_every_layout_computes_what_one_process_does() -> None:
    expected = pytest.approx(steps({}, alone, None), rel=2e-5)
    for found in World(2).run(all_of, list(LAYOUTS)):
        assert found == dict.fromkeys(LAYOUTS, expected)


@pytest.mark.full
def test_a_mix_of_layouts_computes_what_one_process_does() -> None:
    expected = pytest.approx(steps({}, alone, None), rel=2e-5)
    for found in World(4).run(all_of, list(MIXES)):
        assert found == dict.fromkeys(MIXES, expected)


@pytest.mark.thorough
def test_the_example_learns() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(EXAMPLE)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    losses = [float(line.split()[3].strip(",")) for line in ran.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.5
    assert len(EXAMPLE.read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    ("mesh", "error"),
    [
        ({"dp_shard": 2}, r"the mesh has 2 rank\(s\), but the default process group has 1; call torch.distributed"),
    ],
)
def test_a_mesh_of_another_size_is_refused(mesh: dict[str, int], error: str) -> None:
    with pytest.raises(BuildError, match=error):
        topology_of(**mesh)


def loop_of(stages: Stages | None = None, **arguments: Any) -> OwnLoop:
    stages = stages or build_stages(lambda stage: Qwen3(CONFIG, stage), topology_of())
    return OwnLoop(stages, CausalLM(CausalLMConfig()), **arguments)


def test_a_step_is_refused_before_the_last_one_has_ended_or_without_microbatches() -> None:
    loop, tokens = loop_of(), torch.zeros(1, 8, dtype=torch.long)
    pack = [{"tokens": tokens, "targets": tokens}]
    with pytest.raises(TrainingError, match="empty pack"):
        loop.step([])
    first = loop.step(pack).grad_norm.item()
    with pytest.raises(TrainingError, match="called twice without end_step"):
        loop.step(pack)
    loop.end_step()
    assert loop.step(pack).grad_norm.item() == first


def test_stages_take_no_strategy_and_no_second_loop_after_their_loop() -> None:
    stages = build_stages(lambda stage: Qwen3(CONFIG, stage), topology_of())
    loop_of(stages)
    with pytest.raises(BuildError, match=r"strategy 'activation_checkpointing' came after OwnLoop\(\)"):
        activation_checkpointing(stages)
    with pytest.raises(BuildError, match=r"another OwnLoop\(\) has allocated these stages"):
        loop_of(stages)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_norm": 0.0}, "max_norm is 0.0; give a positive number"),
        (
            {"kernels": {"attention": [{"backend": "sdpa", "match": ["layers.0"]}]}},
            "give the name of a backend; rules",
        ),
        ({"kernels": {"nope": "reference"}}, "kernels.nope: the job calls no op 'nope'"),
    ],
)
def test_a_setting_without_effect_is_refused(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(BuildError, match=error):
        loop_of(**arguments)


def refused() -> list[str]:
    """Errors of a pipeline without a schedule, of patterns without a match, of a wrong order and of an unused axis."""
    texts = []
    topology = topology_of(pp=2)
    with pytest.raises(BuildError) as caught:
        build_stages(lambda stage: Qwen3(CONFIG, stage), topology)
    texts.append(str(caught.value))
    topology = topology_of(dp_shard=2)
    stages = build_stages(lambda stage: Qwen3(CONFIG, stage), topology)
    with pytest.raises(BuildError) as caught:
        fsdp(stages, match=["layer.0"])
    texts.append(str(caught.value))
    topology = topology_of(pp=2)
    schedule = build_schedule(OneForwardOneBackwardConfig(), topology, 2)
    stages = build_stages(lambda stage: Qwen3(CONFIG, stage), topology, schedule)
    replicate(stages, match=["layers.0"])  # a module of one stage
    with pytest.raises(BuildError) as caught:
        replicate(stages, match=["layers.7"])
    texts.append(str(caught.value))
    stages = build_stages(lambda stage: Qwen3(CONFIG, stage), topology_of(dp_replicate=2))
    replicate(stages)
    activation_checkpointing(stages)
    with pytest.raises(BuildError) as caught:
        loop_of(stages)
    texts.append(str(caught.value))
    with pytest.raises(BuildError) as caught:
        loop_of(build_stages(lambda stage: Qwen3(CONFIG, stage), topology_of(cp=2)))
    texts.append(str(caught.value))
    stages = build_stages(lambda stage: Qwen3(CONFIG, stage), topology_of(dp_shard=2))
    fsdp(stages, match=["layers.*"], compute_dtype="bfloat16")
    with pytest.raises(BuildError) as caught:
        loop_of(stages)
    texts.append(str(caught.value))
    topology = topology_of(dp_shard=2)
    stages = build_stages(lambda stage: Qwen3(CONFIG, stage), topology)
    fsdp(stages, compute_dtype="bfloat16")
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(TrainingError) as uneven:
        loop_of(stages).step([{"tokens": tokens, "targets": tokens}] * (1 + topology.rank))
    texts.append(str(uneven.value))
    assert dist.get_world_size() == 2
    return texts


@pytest.mark.thorough
def test_bad_input_of_a_loop_is_refused() -> None:
    for first, second, third, fourth, fifth, sixth, seventh in World(2).run(refused):
        assert first == "mesh.pp is 2, but there is no schedule; give one by build_schedule()"
        assert second.startswith("strategy 'fsdp': the pattern 'layer.0' in 'match' matches no module; modules with")
        assert third.startswith(
            "strategy 'replicate': the pattern 'layers.7' in 'match' matches no module; modules with"
        )
        assert fourth.startswith("strategy 'activation_checkpointing' was applied after 'replicate'; apply 'activation")
        assert fifth.startswith("mesh.cp is 2, but no strategy of these stages uses that axis; apply a strategy")
        assert sixth.startswith(
            "strategy 'fsdp': compute_dtype is bfloat16, but 'embedding.weight' is computed in another"
        )
        assert sixth.endswith("or set autocast of OwnLoop() instead")
        assert "microbatch(es) on this rank, and 1 to 2 over all ranks; give each rank the same number" in seventh
