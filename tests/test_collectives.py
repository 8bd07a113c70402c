"""Collectives that ``d9d explain`` lists: they are those that a traced step makes, in every kind of layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_core.job_file.job import Mesh
from d9d_testing.collectives import differences, listed_step, recorded_step
from d9d_testing.world import World

D9d = Callable[..., tuple[int, str, str]]
THOROUGH = pytest.mark.full
ASYNCHRONOUS = {"name": "tensor_parallel", "asynchronous": True}
#: Mesh, strategies, whether the model has experts, and other sections of the job.
CASES: dict[str, tuple[Mapping[str, int], Sequence[Any], bool, Mapping[str, Any]]] = {
    "replicate": ({"dp_replicate": 2}, ["replicate"], False, {}),
    "fsdp": ({"dp_shard": 2}, ["fsdp"], False, {}),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, ["hsdp"], False, {}),
    "tp": ({"tp": 2}, ["tensor_parallel"], False, {}),
    "ep": ({"dp_shard": 2, "ep": 2}, ["fsdp", "expert_parallel"], True, {}),
    "pp": ({"pp": 2, "dp_shard": 2}, ["fsdp"], False, {"pipeline": "1f1b"}),
    "fsdp, reduced at the end": ({"dp_shard": 2}, [{"name": "fsdp", "defer": "everything"}], False, {}),
    "hsdp, all-reduced at the end": (
        {"dp_replicate": 2, "dp_shard": 2},
        [{"name": "hsdp", "defer": "all_reduce", "reshard_after_forward": False}],
        False,
        {},
    ),
    "fsdp within pairs": ({"dp_shard": 4}, [{"name": "fsdp", "reshard_after_forward": 2}], False, {}),
    "fsdp, some parameters ignored": ({"dp_shard": 2}, [{"name": "fsdp", "ignore": ["*norm.weight"]}], False, {}),
    "tp, loss by kernels": (
        {"tp": 2},
        ["tensor_parallel"],
        False,
        {"kernels": {"vocabulary_parallel_cross_entropy": "triton"}},
    ),
    "tp, checkpointed": ({"tp": 2}, ["tensor_parallel", "activation_checkpointing"], False, {}),
    "tp x fsdp": ({"tp": 2, "dp_shard": 2}, ["fsdp", "tensor_parallel"], False, {}),
    "experts under tp": (
        {"tp": 2, "dp_shard": 2, "ep": 4},
        ["fsdp", "tensor_parallel", "expert_parallel"],
        True,
        {},
    ),
    "choices of experts apart, checkpointed": (
        {"dp_replicate": 2, "ep": 2},
        ["replicate", {"name": "expert_parallel", "combine": "separate"}, "activation_checkpointing"],
        True,
        {},
    ),
    "pp, forwards first": ({"pp": 2, "dp_shard": 2}, ["fsdp"], False, {"pipeline": "gpipe"}),
    "pp, weights late, tied": ({"pp": 2}, [], False, {"pipeline": "zb1p"}),
    "whole matrices": ({"dp_shard": 2}, ["fsdp"], False, {"optimizer": {"name": "muon", "lr": 0.01}}),
    "maximum norm": ({"dp_shard": 2}, ["fsdp"], False, {"gradient_clipping": {"max_norm": 1.0, "p": "inf"}}),
}
CASES |= {
    "stages without parameters of their own": (
        {"pp": 2, "dp_shard": 2},
        ["fsdp"],
        False,
        {"pipeline": "interleaved_1f1b", "model": {"num_layers": 4}},
    ),
    "stages in a V": (
        {"pp": 2, "dp_shard": 2},
        ["fsdp", "activation_checkpointing"],
        False,
        {"pipeline": "dual_pipe_v", "model": {"num_layers": 4}, "batch": {"size": 16, "microbatch": 2}},
    ),
    "blocks asked for ahead": (
        {"dp_shard": 2},
        [{"name": "fsdp", "backward_prefetch": 2, "forward_prefetch": 1}],
        False,
        {"model": {"num_layers": 4}},
    ),
    "magnitudes under tp": ({"tp": 2}, ["tensor_parallel"], False, {"peft": {"name": "dora", "r": 4}}),
    "low-rank terms under tp": ({"tp": 2}, ["tensor_parallel"], False, {"peft": {"name": "lora", "r": 4}}),
    "bfloat16, gradients in float32": (
        {"dp_shard": 2},
        ["fsdp"],
        False,
        {"precision": {"parameters": "bfloat16"}, "gradients": {"accumulate": "float32"}},
    ),
    "autocast under tp": (
        {"tp": 2},
        ["tensor_parallel"],
        False,
        {"precision": {"parameters": "float32", "autocast": "bfloat16"}},
    ),
}
CASES |= {
    "cp, keys gathered": ({"cp": 2}, [{"name": "context_parallel"}], False, {}),
    "cp, keys gathered, checkpointed": (
        {"cp": 2},
        [{"name": "context_parallel"}, "activation_checkpointing"],
        False,
        {},
    ),
    "cp, heads swapped": ({"cp": 2}, [{"name": "context_parallel", "method": "ulysses"}], False, {}),
    "cp, fewer heads than ranks": (
        {"cp": 2, "dp_shard": 2},
        ["fsdp", {"name": "context_parallel", "method": "ulysses"}],
        False,
        {"model": {"num_key_value_heads": 1}},
    ),
    "cp, ring": ({"cp": 2}, [{"name": "context_parallel", "method": "ring"}], False, {}),
    "cp, ring of four, checkpointed": (
        {"cp": 4},
        [{"name": "context_parallel", "method": "ring"}, "activation_checkpointing"],
        False,
        {},
    ),
    "cp, rings of pairs": (
        {"cp": 4},
        [{"name": "context_parallel", "method": "hybrid", "head_ranks": 2}],
        False,
        {},
    ),
    "cp, ring in bfloat16": (
        {"cp": 2},
        [{"name": "context_parallel", "method": "ring"}],
        False,
        {"precision": {"parameters": "bfloat16"}},
    ),
    "experts over cp": ({"cp": 2, "ep": 2}, ["context_parallel", "expert_parallel"], True, {}),
    "experts over cp, padded": (
        {"cp": 2, "ep": 2},
        ["context_parallel", "expert_parallel", "activation_checkpointing"],
        True,
        {"data": {"name": "documents", "pad_multiple": 8}},
    ),
    "tp x cp": ({"tp": 2, "cp": 2}, ["tensor_parallel", "context_parallel"], False, {}),
    "tp x cp, experts": (
        {"tp": 2, "cp": 2, "ep": 2},
        ["tensor_parallel", {"name": "context_parallel", "method": "ring"}, "expert_parallel"],
        True,
        {},
    ),
    "autocast under cp": (
        {"cp": 2},
        [{"name": "context_parallel", "method": "ring"}],
        False,
        {"precision": {"parameters": "float32", "autocast": "bfloat16"}},
    ),
    "low-rank terms under cp": ({"cp": 2}, ["context_parallel"], False, {"peft": {"name": "lora", "r": 4}}),
    "cp and stages": ({"cp": 2, "pp": 2}, ["context_parallel"], False, {"pipeline": "1f1b"}),
    "cp, samples pooled": (
        {"cp": 2},
        ["context_parallel"],
        False,
        {
            "task": "classification",
            "model": {"heads": {"topic": {"kind": "classification", "num_classes": 2}}},
            "data": {"name": "labelled", "pad_multiple": 24},
        },
    ),
}
CASES |= {
    "tp, asynchronous": ({"tp": 2}, [ASYNCHRONOUS], False, {}),
    "tp of four, asynchronous": ({"tp": 4}, [ASYNCHRONOUS], False, {}),
    "tp, asynchronous, checkpointed": ({"tp": 2}, [ASYNCHRONOUS, "activation_checkpointing"], False, {}),
    "experts under tp, asynchronous": (
        {"tp": 2, "dp_shard": 2, "ep": 4},
        ["fsdp", ASYNCHRONOUS, "expert_parallel"],
        True,
        {},
    ),
    "low-rank terms under tp, asynchronous": ({"tp": 2}, [ASYNCHRONOUS], False, {"peft": {"name": "lora", "r": 4}}),
    "magnitudes under tp, asynchronous, checkpointed": (
        {"tp": 2},
        [ASYNCHRONOUS, "activation_checkpointing"],
        False,
        {"peft": {"name": "dora", "r": 4}},
    ),
    "scales under tp, asynchronous": (
        {"tp": 2},
        [ASYNCHRONOUS],
        False,
        {"peft": {"name": "ia3", "targets": ["k_proj", "o_proj"], "feedforward": ["down_proj"]}},
    ),
    "autocast under tp, asynchronous": (
        {"tp": 2},
        [ASYNCHRONOUS],
        False,
        {"precision": {"parameters": "float32", "autocast": "bfloat16"}},
    ),
    "weights late under tp, asynchronous": ({"pp": 2, "tp": 2}, [ASYNCHRONOUS], False, {"pipeline": "zb1p"}),
}
#: Cases with latent attention, whose model is given as a whole.
LATENT = {
    "latents under tp": ({"tp": 2}, ["tensor_parallel"], True, {}),
    "latents under tp, asynchronous": ({"tp": 2}, [ASYNCHRONOUS], True, {}),
    "latents gathered over cp": ({"cp": 2}, ["context_parallel"], True, {}),
    "latents under tp x cp": ({"tp": 2, "cp": 2}, ["tensor_parallel", "context_parallel"], True, {}),
    "latents under tp x cp, heads swapped": (
        {"tp": 2, "cp": 2},
        ["tensor_parallel", {"name": "context_parallel", "method": "ulysses"}],
        True,
        {},
    ),
    "latents under cp, ring": ({"cp": 2}, [{"name": "context_parallel", "method": "ring"}], True, {}),
    "further tokens under tp": ({"tp": 2}, ["tensor_parallel"], True, {"model": {"mtp": {"depths": 2}}}),
    "further tokens under tp, stages": (
        {"tp": 2, "pp": 2},
        ["tensor_parallel"],
        True,
        {"pipeline": "1f1b", "model": {"mtp": {"depths": 2}}},
    ),
    "further tokens, fsdp, experts over cp": (
        {"dp_shard": 2, "cp": 2, "ep": 2},
        ["fsdp", "context_parallel", "expert_parallel"],
        True,
        {"model": {"mtp": {"depths": 1}}},
    ),
}
CASES |= LATENT
OFTEN = ("latents gathered over cp", "fsdp", "tp", "tp, asynchronous", "ep", "pp", "cp, ring")


def job_of_case(table: ModuleType, directory: Path, case: str) -> dict[str, Any]:
    """Two steps of two microbatches on each rank."""
    mesh, parallel, experts, sections = CASES[case]
    model = dict(table.LATENT if case in LATENT else table.EXPERTS if experts else table.DENSE)
    model |= {"tie_embeddings": "tied" in case}
    model |= sections.get("model", {})
    batch = {"size": 4 * Mesh(**mesh).data_parallel_size, "microbatch": 2}
    job = table.job(directory / "corpus", "float32", model=model)
    changed = {"mesh": dict(mesh), "parallel": list(parallel), "steps": 2, "batch": batch, **sections}
    data = job["data"] | sections.get("data", {})
    if data["name"] == "labelled":
        lines = [json.dumps({"text": f"number {number}", "label": number % 2}) for number in range(16)]
        (directory / "labelled.jsonl").write_text("\n".join(lines))
        data["sources"] = [str(directory / "labelled.jsonl")]
    return {**job, **changed, "model": model, "data": data}


@pytest.mark.thorough
@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in OFTEN else THOROUGH) for name in CASES])
def test_a_traced_step_makes_the_collectives_that_are_listed(table: ModuleType, tmp_path: Path, case: str) -> None:
    values = job_of_case(table, tmp_path, case)
    size = Mesh(**values["mesh"]).world_size
    plugins = [*table.PLUGINS, "d9d_peft.plugin", "d9d_triton.plugin"]
    made = World(size).run(recorded_step, values, plugins)
    for rank in sorted({0, size - 1}):
        listed = listed_step(values, plugins, rank)
        assert differences(listed, made[rank]) == []
        if any(one.at_most for one in listed):
            continue  # there, one call less is within the bounds
        for index, one in enumerate(listed):
            without = [*listed[:index], *listed[index + 1 :]]
            assert differences(without, made[rank]), f"{one.purpose} could be left out"
            fewer = [*without, replace(one, count=one.count - 1)]
            assert differences(fewer, made[rank]), f"{one.purpose} could be one call less"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"count": 3}, "listed 3 times, made 2 times"),
        ({"bytes": 80}, "listed 2 times, made 0 times"),
        ({"ranks": (0, 2)}, r"among \(0, 2\)"),
        ({"kind": "reduce_scatter"}, "reduce_scatter of 96 bytes"),
        ({"count": 3, "approximate": True}, "listed 3 times, made 2 times"),
        ({"bytes": 960, "approximate": True}, "192 bytes, listed 1920 to 1920"),
        ({"count": 1, "at_most": True}, "listed 0 to 1 times, made 2 times"),
    ],
)
def test_differences_are_found_in_kind_ranks_bytes_and_count(changed: dict[str, Any], said: str) -> None:
    from d9d_core.strategy import Collective

    one = Collective("all_gather", "fsdp", (0, 1), 96, 2, "parameters")
    made = [("all_gather", (0, 1), 96)] * 2
    assert differences([one], made) == []
    with pytest.raises(AssertionError, match=said):
        assert not differences([replace(one, **changed)], made)


@pytest.mark.thorough
def test_tensor_parallelism_over_several_nodes_is_priced_when_a_job_is_checked(
    small_job: Callable[..., Path], d9d: D9d, table: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(small_job(mesh={"tp": 4}, parallel=["tensor_parallel"]))
    warned = {}
    for processes in ("2", "3", "4", "8", None):
        if processes is None:
            monkeypatch.delenv("LOCAL_WORLD_SIZE")
        else:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        status, out, err = d9d("check", path)
        assert status == 0, err
        warned[processes] = " ".join(line for line in out.splitlines() if line.startswith("warning"))
    assert {processes for processes, line in warned.items() if line} == {"2", "3"}
    plan = listed_step(json.loads(Path(path).read_text()), table.PLUGINS, 0)
    along = [one for one in plan if one.group == "tp"]
    calls, size = sum(one.count for one in along), sum((one.bytes or 0) * one.count for one in along)
    assert "mesh.tp is 4, wider than the 2 processes of a node" in warned["2"]
    assert f"{calls} calls with {size / 2**20:.1f} MiB ({size:,} bytes) a step and rank" in warned["2"]
    assert "mesh.tp is 4, wider than the 3 processes of a node" in warned["3"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"sequence_length": 30}, "30 (data.sequence_length); use 28 or 32"),
        (
            {"name": "documents", "sequence_length": 36, "pad_multiple": 6},
            "multiples of 6 (data.pad_multiple); use 4 or 8",
        ),
        (
            {
                "name": "mixture",
                "parts": [{"sequence_length": 32}, {"name": "documents", "sequence_length": 32, "pad_multiple": 2}],
            },
            "multiples of 2 (data.pad_multiple); use 4",
        ),
    ],
    ids=["packed", "padded", "mixture"],
)
def test_lengths_that_ranks_cannot_share_are_refused_before_data_is_read(
    small_job: Callable[..., Path], d9d: D9d, tmp_path: Path, data: dict[str, Any], said: str
) -> None:
    text = {"name": "text", "sources": [str(tmp_path / "corpus")]}
    values = text | data
    if "parts" in data:
        values = {"name": "mixture", "parts": [{"data": text | part} for part in data["parts"]]}
    path = str(small_job(mesh={"tp": 4}, parallel=["tensor_parallel"], data=values))
    for command in ("check", "explain"):
        status, _, err = d9d(command, path)
        assert status == 2
        assert "parallel[0]: strategy 'tensor_parallel' splits positions over 4 ranks" in " ".join(err.split())
        assert said in " ".join(err.split())


@pytest.mark.parametrize(
    ("mesh", "data", "said"),
    [
        ({"cp": 2}, {"sequence_length": 30}, "mesh.cp: 2 ranks split each sample into two chunks each"),
        ({"cp": 4}, {"name": "documents", "sequence_length": 36, "pad_multiple": 4}, "mesh.cp: 4 ranks"),
        ({"cp": 2, "tp": 4}, {"sequence_length": 28}, "strategy 'tensor_parallel' splits positions over 4 ranks"),
    ],
    ids=["packed", "padded", "tp"],
)
def test_lengths_that_ranks_of_cp_cannot_share_are_refused_before_data_is_read(
    small_job: Callable[..., Path], d9d: D9d, tmp_path: Path, mesh: Mapping[str, int], data: dict[str, Any], said: str
) -> None:
    strategies = ["context_parallel", *(["tensor_parallel"] if "tp" in mesh else [])]
    values = {"name": "text", "sources": [str(tmp_path / "corpus")]} | data
    status, _, err = d9d("check", str(small_job(mesh=mesh, parallel=strategies, data=values)))
    assert status == 2
    assert said in " ".join(err.split())


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        ({"data": {"sequence_length": 30}}, "30 (evaluation.data.sequence_length); use 28 or 32"),
        (
            {
                "sets": {
                    "good": {"sequence_length": 32},
                    "long": {"name": "documents", "sequence_length": 36, "pad_multiple": 6},
                }
            },
            "multiples of 6 (evaluation.sets.long.pad_multiple); use 4 or 8",
        ),
    ],
    ids=["one", "sets"],
)
@pytest.mark.parametrize(
    ("mesh", "strategy", "who"),
    [
        ({"tp": 4}, "tensor_parallel", "strategy 'tensor_parallel' splits positions over 4 ranks"),
        ({"cp": 2}, "context_parallel", "mesh.cp: 2 ranks split each sample into two chunks each"),
    ],
    ids=["tp", "cp"],
)
def test_lengths_of_evaluations_that_ranks_cannot_share_are_refused_before_the_run(
    small_job: Callable[..., Path],
    d9d: D9d,
    tmp_path: Path,
    mesh: Mapping[str, int],
    strategy: str,
    who: str,
    evaluation: dict[str, Any],
    said: str,
) -> None:
    text = {"name": "text", "sources": [str(tmp_path / "corpus")], "sequence_length": 32}
    sets = {name: text | data for name, data in evaluation.get("sets", {}).items()}
    own = {"sets": sets} if sets else {"data": text | evaluation["data"]}
    path = str(small_job(mesh=mesh, parallel=[strategy], data=text, evaluation={"every": 1, **own}))
    status, _, err = d9d("check", path)
    assert status == 2
    assert who in " ".join(err.split())
    assert said in " ".join(err.split())


@pytest.mark.thorough
def test_explain_shows_placements_and_collectives(small_job: Callable[..., Path], d9d: D9d) -> None:
    path = small_job(
        mesh={"dp_shard": 2, "tp": 2},
        parallel=["tensor_parallel", "fsdp"],
        optimizer={"name": "torch", "target": "torch.optim.SGD", "lr": 0.1},
    )
    status, out, err = d9d("explain", str(path), "--rank", "1")
    assert status == 0, err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "layers.*.ffn.down_proj.weight 2 x [32, 64] dim 0 sharded over fsdp=2, dim 1 sharded over tp=2" in lines
    # Two samples of 32 positions with 32 features of four bytes; both blocks, one microbatch.
    assert "tensor_parallel reduce_scatter tp 2 2 8,192 hidden states at layers.*.ffn.down_proj, forward" in lines
    assert any(line.startswith("fsdp all_gather fsdp 2 2 ") for line in lines)
    assert "not listed: optimizer 'torch' (d9d-optim 0.1.0) does not declare its collectives" in lines
    assert "collectives of a log entry, each 2 step(s) on rank 1" in lines
    status, _, err = d9d("explain", str(path), "--rank", "4")
    assert status == 2
    assert "rank 4 is not in the job; give a rank from 0 to 3" in err
