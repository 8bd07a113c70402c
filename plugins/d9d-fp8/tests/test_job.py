"""Jobs with the strategy, on the CPU: they train, continue bit for bit, and write what other jobs read."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from torch.distributed.tensor import DTensor

pytest.importorskip("d9d_qwen3")
pytest.importorskip("d9d_parallel")
pytest.importorskip("d9d_moe")

#: Sizes that 16 divides, in the attention too.
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
DENSE = {"name": "qwen3", **SIZES, "intermediate_size": 48, "max_positions": 64}
MOE = {"name": "qwen3_moe", **SIZES, "num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 48,
       "max_positions": 64}  # fmt: skip
FP8 = {"name": "fp8", "emulate": True}


def job(directory: Path, **sections: Any) -> Job:
    modules = ("d9d_fp8", "d9d_moe", "d9d_nn", "d9d_parallel", "d9d_qwen3", "d9d_testing.toy")
    registry = Registry.of(*(importlib.import_module(f"{name}.plugin") for name in modules))
    values = {
        "run": {"dir": str(directory)},
        "device": "cpu",
        "model": DENSE,
        "task": "causal_lm",
        "data": "toy_tokens",
        "optimizer": {"name": "toy_optimizer", "lr": 0.5},
        "batch": {"size": 4, "microbatch": 2},
        "parallel": [FP8],
        "steps": 6,
        "trackers": [],
        "export": False,
        "seed": 5,
        **sections,
    }
    return Job.from_values(values, registry=registry)


def train(directory: Path, **sections: Any) -> Any:
    trainer = job(directory, **sections).build(lambda _: None)
    trainer.train()
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.stage.state_dict().items()}


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "rowwise_gw_hp"])
def test_a_run_learns_other_weights_under_the_same_names(tmp_path: Path, recipe: str) -> None:
    plain = weights(train(tmp_path / "plain", parallel=[]))
    start = weights(job(tmp_path / "start").build(lambda _: None))
    found = weights(train(tmp_path / "fp8", parallel=[{**FP8, "recipe": recipe}]))
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {n: (t.shape, t.dtype) for n, t in plain.items()}
    ours = torch.cat([(found[name] - start[name]).flatten() for name in found])
    theirs = torch.cat([(plain[name] - start[name]).flatten() for name in found])
    assert not torch.equal(ours, theirs)
    # The same direction, but for rounding.
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.98


@pytest.mark.thorough
def test_a_run_continues_bit_for_bit(tmp_path: Path) -> None:
    at_once = weights(train(tmp_path / "a"))
    train(tmp_path / "b", steps=3)
    for name, tensor in weights(train(tmp_path / "b")).items():
        assert torch.equal(tensor, at_once[name]), name


@pytest.mark.thorough
def test_a_checkpoint_goes_on_without_the_strategy_and_the_other_way_round(tmp_path: Path) -> None:
    train(tmp_path, steps=2)
    assert train(tmp_path, steps=4, parallel=[]) is not None
    assert train(tmp_path, steps=6).stage is not None


@pytest.mark.thorough
def test_an_export_has_the_names_and_dtypes_of_one_without_the_strategy(tmp_path: Path) -> None:
    from safetensors import safe_open

    tables = []
    for name, parallel in (("fp8", [FP8]), ("plain", [])):
        train(tmp_path / name, parallel=parallel, export=True, steps=1)
        (file,) = (tmp_path / name).rglob("model*.safetensors")
        with safe_open(file, "pt") as tensors:
            tables.append(
                {key: (tensors.get_tensor(key).shape, tensors.get_tensor(key).dtype) for key in tensors.keys()}  # noqa: SIM118 - no mapping
            )
    assert tables[0] == tables[1]


@pytest.mark.thorough
def test_blocks_are_computed_again_with_it(tmp_path: Path) -> None:
    alone = weights(train(tmp_path / "alone"))
    for name, tensor in weights(train(tmp_path / "both", parallel=["activation_checkpointing", FP8])).items():
        assert torch.equal(tensor, alone[name]), name


def in_ranks(directory: str, mesh: dict[str, int], strategy: str) -> dict[str, torch.Tensor]:
    made = job(Path(directory), mesh=mesh, parallel=[strategy, FP8])
    with made.joined() as topology, made.build(lambda _: None, topology) as trainer:
        trainer.train()
        return {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in trainer.stage.state_dict().items()
        }


@pytest.mark.full
@pytest.mark.parametrize(("axis", "strategy"), [("dp_replicate", "replicate"), ("dp_shard", "fsdp")])
def test_ranks_learn_what_one_process_does(world: Any, tmp_path: Path, axis: str, strategy: str) -> None:
    alone = weights(train(tmp_path / "alone"))
    for found in world(2).run(in_ranks, str(tmp_path / strategy), {axis: 2}, strategy):
        assert found.keys() == alone.keys()
        for name, tensor in found.items():
            # Sums over ranks come in another order; what that changes by a bit, quantisation may round elsewhere.
            torch.testing.assert_close(tensor, alone[name], rtol=1e-2, atol=2e-3)


@pytest.mark.full
def test_shares_of_tensor_parallelism_are_as_near_to_full_precision_as_whole_layers(world: Any, tmp_path: Path) -> None:
    """Not to the same numbers: scales of a share are finer."""
    plain, alone = weights(train(tmp_path / "plain", parallel=[])), weights(train(tmp_path / "alone"))
    found, _ = world(2).run(in_ranks, str(tmp_path / "tp"), {"tp": 2}, "tensor_parallel")
    for name, exact in plain.items():
        off = (found[name] - exact).norm()
        assert 0 < off < 1.5 * (alone[name] - exact).norm(), name


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
def test_blocks_are_compiled_with_it_in_one_graph(tmp_path: Path) -> None:
    torch.compiler.reset()
    compiled = {"name": "compile", "backend": "aot_eager", "fullgraph": True}
    alone = weights(train(tmp_path / "alone"))
    for name, tensor in weights(train(tmp_path / "both", parallel=[compiled, FP8])).items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-4, atol=1e-6)
    torch.compiler.reset()


@pytest.mark.thorough
def test_experts_are_in_float8_if_the_job_asks_for_the_kernel(tmp_path: Path) -> None:
    found = {
        kernel: weights(train(tmp_path / kernel, model=MOE, kernels={"grouped_linear": kernel}))
        for kernel in ("reference", "fp8_emulated")
    }
    experts = [name for name in found["reference"] if ".experts." in name]
    assert experts
    for name in experts:
        assert not torch.equal(found["reference"][name], found["fp8_emulated"][name])
        torch.testing.assert_close(found["reference"][name], found["fp8_emulated"][name], rtol=0.1, atol=0.05)


def test_the_plan_says_what_is_in_float8_and_what_is_not(tmp_path: Path) -> None:
    applied = {chosen.spec.name: outcome for chosen, outcome in job(tmp_path).plan().assembly.applied}["fp8"]
    assert len(applied.modules) == 14
    assert applied.notes == ("recipe rowwise, emulated: 14 linear layers",)


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"the pattern 'qproj' in 'modules' matches no linear layer"):
        job(tmp_path, parallel=[{**FP8, "modules": ["qproj"]}]).build(lambda _: None)


@pytest.mark.thorough
def test_the_strategy_acts_before_blocks_are_wrapped_and_compiled(tmp_path: Path) -> None:
    strategies = ["replicate", {"name": "compile", "backend": "aot_eager"}, "activation_checkpointing", FP8]
    names = [chosen.spec.name for chosen, _ in job(tmp_path, parallel=strategies).plan().assembly.applied]
    assert names == ["fp8", "activation_checkpointing", "compile", "replicate"]
