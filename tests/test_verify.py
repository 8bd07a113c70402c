"""``d9d verify`` on a user's own job, in processes of its own."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_engine.distributed.mesh import Topology
from d9d_engine.job import Job
from d9d_verify.command import verify_job
from d9d_verify.compare import Verdict
from d9d_verify.layouts import (
    REFERENCE_LAYOUT,
    Layout,
    layout_dependence,
    layout_values,
    ops_of,
    own_layout,
    parse_layout,
    scaled_model,
    scaled_values,
)
from d9d_verify.measure import probe

Write = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]

#: A strategy as a third party might get it wrong: gradients come out as many times too long as there are ranks.
TWICE = '''
from d9d_core.config import PluginConfig
from d9d_core.plugin import Ref, StrategySpec, hookimpl
from d9d_core.strategy import Applied
from typing import Literal

D9D_API = 2

class TwiceConfig(PluginConfig):
    """Sums twice."""
    name: Literal["twice"] = "twice"
    """Selects it."""

class Twice:
    def __init__(self, config):
        pass

    def apply(self, stage, topology):
        ranks = topology.sizes["dp_shard"]
        stage.register_forward_hook(
            lambda module, inputs, out: {name: t.detach() + ranks * (t - t.detach()) for name, t in out.items()}
        )
        return Applied(modules=("",))

@hookimpl
def d9d_strategies():
    yield StrategySpec(name="twice", summary="Sums twice.", config=Ref(f"{__name__}:TwiceConfig"),
                       build=Ref(f"{__name__}:Twice"), anchor="checkpointing")
'''


@pytest.fixture
def verified(small_job: Write, tmp_path: Path, d9d: Command) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """Exit status and verdicts of ``d9d verify`` on a large job with a wrong strategy, in these layouts."""
    plugin = tmp_path / "twice.py"
    plugin.write_text(TWICE)
    job = small_job(
        mesh={"dp_shard": 16}, parallel=["fsdp", "twice"], batch={"size": 64}, model=LARGE, pipeline="dual_pipe_v"
    )

    def run(*layouts: str) -> tuple[int, list[dict[str, Any]]]:
        chosen = [word for layout in layouts for word in ("--layout", layout)]
        status, out, err = d9d("verify", str(job), "--plugin", str(plugin), "--steps", "2", "--json", *chosen)
        assert out, err
        return status, json.loads(out)

    return run


@pytest.mark.full
def test_sound_layouts_pass_and_a_wrong_strategy_fails(verified: Any) -> None:
    status, (good, bad, staged) = verified("dp_shard=2:fsdp", "dp_shard=2:fsdp,twice", "pp=2")
    assert status == 1
    assert good["passed"], good
    assert staged["passed"], staged
    assert not bad["passed"]
    assert bad["diverged"][0] == 0
    assert bad["norm"][0] == pytest.approx(0.5, abs=0.01)  # twice as long
    assert bad["angle"][0] < 1e-8  # in the right direction


@pytest.mark.thorough
def test_a_model_that_differs_between_layouts_by_its_nature_says_so(small_job: Write) -> None:
    job = Job.load(small_job(model={**EXPERTS, "capacity": 1.5, "balancing": [{"name": "bias_update"}]}))
    values = scaled_values(job, [parse_layout("dp_shard=2:fsdp", job)], steps=1)
    assert layout_dependence(scaled_model(job, values)) == [
        "capacity drops tokens of each microbatch on each rank separately"
    ]


EXPERTS = {
    "name": "qwen3_moe", "vocab_size": 257, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_positions": 64, "num_experts": 4, "experts_per_token": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
LARGE = {
    "name": "qwen3", "vocab_size": 257, "hidden_size": 4096, "intermediate_size": 11008, "num_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_positions": 4096,
}  # fmt: skip


@pytest.mark.thorough
def test_a_large_job_is_scaled_to_its_familys_tiny_model_as_far_as_its_data_allows(small_job: Write) -> None:
    job = Job.load(small_job(model=LARGE, mesh={"dp_shard": 64}, parallel=["fsdp"], batch={"size": 128}))
    layout = own_layout(job, max_ranks=8)
    assert (layout.mesh, layout.ranks) == ({"dp_shard": 2}, 2)
    values = scaled_values(job, [layout], steps=3)
    model = values["model"]
    assert model["hidden_size"] < 256
    assert model["num_layers"] <= 4
    assert model["vocab_size"] == 257  # the tokens are still the data's
    assert values["batch"]["size"] % (2 * values["batch"]["microbatch"]) == 0


@pytest.mark.parametrize(("layouts", "meshes"), [([], [{"dp_shard": 2}]), (["pp=2"], [{"pp": 2}])])
def test_a_jobs_own_layout_is_verified_unless_others_are_given(
    small_job: Write, monkeypatch: pytest.MonkeyPatch, layouts: list[str], meshes: list[dict[str, int]]
) -> None:
    verified: list[dict[str, int]] = []

    def verify(_job: Job, chosen: Sequence[Layout], *_: object) -> list[Verdict]:
        verified.extend(dict(layout.mesh) for layout in chosen)
        return []

    monkeypatch.setattr("d9d_verify.run.verify", verify)
    job = Job.load(small_job(mesh={"dp_shard": 4}, parallel=["fsdp"], batch={"size": 8}))
    assert verify_job(job, layouts, steps=1, max_ranks=8, as_json=True)
    assert verified == meshes


@pytest.mark.thorough
def test_a_scaled_job_has_layers_and_microbatches_for_its_pipeline(small_job: Write) -> None:
    pipeline = {"name": "dual_pipe_v", "layers": [2, 5, 5, 5, 5, 5, 5, 8]}
    sections = {"mesh": {"pp": 4, "dp_shard": 16}, "parallel": ["fsdp"], "pipeline": pipeline, "batch": {"size": 256}}
    job = Job.load(small_job(model=LARGE, **sections))
    layouts = [own_layout(job, max_ranks=8), parse_layout("dp_shard=2:fsdp", job)]
    assert layouts[0].mesh == {"pp": 2, "dp_shard": 2}
    values = scaled_values(job, layouts, steps=3)
    piped, flat = (layout_values(values, layout, []) for layout in layouts)
    assert flat["pipeline"] is None
    assert values["model"]["num_layers"] >= 4
    assert values["model"]["hidden_size"] < 256
    assert values["batch"]["size"] // values["batch"]["microbatch"] // 2 >= 4
    small = small_job("scaled", **{key: piped[key] for key in ("mesh", "parallel", "pipeline", "model", "batch")})
    Job.load(small).plan()  # can run


@pytest.mark.parametrize(
    ("sections", "layers"),
    [
        ({}, 2),
        ({"kernels": {"attention": [{"backend": "sdpa", "match": ["layers.4"]}]}}, 5),
        ({"kernels": {"attention": [{"backend": "sdpa", "match": ["layers.1"]}]}}, 2),
        ({"mesh": {"dp_shard": 2}, "parallel": [{"name": "fsdp", "match": ["layers.*"]}]}, 2),
        ({"mesh": {"dp_shard": 2}, "parallel": [{"name": "fsdp", "match": ["layers.0", "layers.3"]}]}, 5),
    ],
)
def test_a_scaled_model_keeps_the_layers_that_patterns_name(
    small_job: Write, sections: dict[str, Any], layers: int
) -> None:
    job = Job.load(small_job(model=LARGE | {"num_layers": 5}, **sections))
    layout = own_layout(job, max_ranks=8)
    values = scaled_values(job, [layout], steps=3)
    assert (values["model"]["num_layers"], values["model"]["hidden_size"] < 256) == (layers, True)


def test_the_reference_layout_runs_the_references_of_model_and_optimizer(small_job: Write) -> None:
    job = Job.load(small_job(mesh={"dp_shard": 2}, parallel=["fsdp"]))
    values = scaled_values(job, [REFERENCE_LAYOUT], steps=1)
    ops = ops_of(job, values)
    assert layout_values(values, REFERENCE_LAYOUT, ops)["kernels"] == dict.fromkeys(ops, "reference")
    assert {"attention", "linear_cross_entropy", "adamw"} <= set(ops)


def test_a_layout_that_needs_too_many_processes_says_so(small_job: Write) -> None:
    job = Job.load(small_job(mesh={"dp_replicate": 2, "dp_shard": 4}, parallel=["hsdp"], batch={"size": 16}))
    with pytest.raises(Exception, match="needs at least 4 processes, more than the 2 that are allowed"):
        own_layout(job, max_ranks=2)


def test_a_layout_takes_the_strategies_settings_from_the_job(small_job: Write) -> None:
    strategy = {"name": "fsdp", "defer": "everything"}
    job = Job.load(small_job(mesh={"dp_shard": 2}, parallel=[strategy]))
    layout = parse_layout("dp_shard=4:fsdp,compile", job)
    assert layout.ranks == 4
    assert layout.parallel[0]["defer"] == "everything"
    assert layout.parallel[1] == {"name": "compile"}
    layout = parse_layout("cp=2: context_parallel(method=ulysses, x=[1, {y: 2}]) , fsdp(defer=nothing)", job)
    assert layout.parallel[0] == {"name": "context_parallel", "method": "ulysses", "x": [1, {"y": 2}]}
    assert layout.parallel[1] == {**job.parallel[0].model_dump(mode="json"), "defer": "nothing"}
    with pytest.raises(Exception, match="write axis=size"):
        parse_layout("shard=4:fsdp", job)


@pytest.mark.parametrize(
    "text", ["pp=2:fsdp(defer", "pp=2:fsdp(defer)", "pp=2:1f1b,gpipe", "dp_shard=2:1f1b", "pp=2:fsdp(=1)"]
)
def test_a_malformed_layout_is_refused_with_its_text(small_job: Write, text: str) -> None:
    with pytest.raises(JobError, match=re.escape(f"--layout {text}: ")):
        parse_layout(text, Job.load(small_job()))


def test_a_layout_names_its_schedule_which_decides_about_stages_and_microbatches(small_job: Write) -> None:
    pipeline = {"name": "interleaved_1f1b", "stages_per_rank": 2}
    job = Job.load(small_job(mesh={"pp": 2}, pipeline=pipeline, model=LARGE))
    layouts = [parse_layout(text, job) for text in ("pp=2:1f1b", "pp=2:dual_pipe_v", "pp=2:interleaved_1f1b", "pp=2")]
    assert [layout.pipeline for layout in layouts] == [
        {"name": "1f1b"}, {"name": "dual_pipe_v"}, job.resolved()["pipeline"], None,
    ]  # fmt: skip
    values = scaled_values(job, layouts, steps=1)
    assert values["batch"]["size"] == 4 * values["batch"]["microbatch"]  # dual_pipe_v needs twice its ranks
    assert values["model"]["num_layers"] >= 4
    names = [layout_values(values, layout, [])["pipeline"]["name"] for layout in layouts]
    assert names == ["1f1b", "dual_pipe_v", "interleaved_1f1b", "interleaved_1f1b"]


def test_a_size_that_the_data_states_too_is_kept(small_job: Write, tmp_path: Path) -> None:
    plugin = tmp_path / "unchecked.py"
    plugin.write_text(UNCHECKED)
    job = Job.load(small_job(model=LARGE | {"vocab_size": 300}, task="unchecked", plugins=[str(plugin)]))
    values = scaled_values(job, [own_layout(job, max_ranks=8)], steps=1)
    assert values["model"]["vocab_size"] == 300
    assert values["model"]["hidden_size"] < 256


#: A task that compares nothing, like the task of examples/d9d-hello.
UNCHECKED = '''
from d9d_core.config import PluginConfig
from d9d_core.plugin import Ref, TaskSpec, hookimpl
from typing import Literal

D9D_API = 2

class UncheckedConfig(PluginConfig):
    """Compares nothing."""
    name: Literal["unchecked"] = "unchecked"
    """Selects it."""

class Unchecked:
    coefficients = {"a": 1.0}
    def __init__(self, config): pass
    def check(self, model, facts): pass
    def count(self, microbatch): return 1
    def weights(self, microbatch): ...
    def inputs(self, microbatch): ...
    def losses(self, outputs, microbatch): ...
    def observations(self, outputs, microbatch): ...

@hookimpl
def d9d_tasks():
    yield TaskSpec(name="unchecked", summary="Compares nothing.", config=Ref(f"{__name__}:UncheckedConfig"),
                   build=Ref(f"{__name__}:Unchecked"))
'''


def test_the_learning_rate_of_a_measurement_is_beyond_the_warm_up_and_shows(small_job: Write) -> None:
    job = Job.load(
        small_job(steps=100, lr_schedule={"name": "cosine", "warmup_steps": 20}, optimizer={"name": "sgd", "lr": 1e-6})
    )
    rate, norm = probe(job, Topology(), steps=4)
    assert rate.first == 9  # half of the way up
    assert rate.factor > 1000
    assert norm > 0
    schedule = rate.on(lambda step: step + 1.0, 100)
    assert [schedule(step) / rate.factor for step in range(3)] == pytest.approx([10, 11, 12])


# --- faults and sound jobs: tools/verify_table.py runs all of them


@pytest.fixture(scope="module")
def campaign(tool: Callable[[str], ModuleType]) -> ModuleType:
    """The tool that runs verify on jobs with seeded faults, and on sound ones."""
    return tool("verify_table")


#: At least one of each kind. Faults of clipping, replicas and updates passed when only gradients were compared.
SHOWN = (
    "dropped_boundary_gradient",
    "heavier_rank", "unclipped_rank", "clipped_by_own_norm", "no_decay", "forgotten_moments", "late_schedule",
    "one_wrong_target", "repeated_heads_apart", "drifting_replica", "evaluated_alone", "lost_observations",
    "unloaded_weights",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seeded_fault_is_caught_behind_a_warm_up(campaign: ModuleType, tmp_path: Path, dtype: str) -> None:
    faults = {name: campaign.FAULTS[name] for name in SHOWN}
    found = {fault: v for _, _, fault, v in campaign.run(tmp_path, campaign.fault_cases(), faults, [dtype])}
    assert found.keys() == faults.keys()
    assert [fault for fault, verdict in found.items() if not campaign.is_caught(verdict)] == []


@pytest.mark.full
@pytest.mark.parametrize("case", ["dense, documents", "dense, noisy signs"])
def test_a_sound_job_passes(campaign: ModuleType, tmp_path: Path, case: str) -> None:
    cases = {case: campaign.sound_cases()[case]}
    found = [verdict for *_, verdict in campaign.run(tmp_path, cases, None, ["float32", "bfloat16"])]
    assert len(found) == 2 * len(cases[case].layouts)
    assert [(verdict.layout, verdict.diverged) for verdict in found if not verdict.passed] == []


def positions(function: Any) -> int:
    """Number of arguments that a caller may give by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds for one in inspect.signature(function).parameters.values())


class Checked(pytest.MonkeyPatch):
    """Replaces functions only by functions that take the same optional arguments, by name and by position."""

    def setattr(self, target: Any, name: Any, value: Any = None, raising: bool = True) -> None:
        """Compare the signatures, and replace."""
        old = getattr(target, name)
        if callable(old) and not isinstance(old, type):
            optional = {
                one.name
                for one in inspect.signature(old).parameters.values()
                if one.kind is one.KEYWORD_ONLY or one.default is not one.empty
            }
            taken = inspect.signature(value).parameters
            if not any(one.kind is one.VAR_POSITIONAL for one in taken.values()):
                assert positions(value) >= positions(old), f"{value.__qualname__} takes fewer than {old.__qualname__}"
            if not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
                assert optional <= taken.keys(), f"{value.__qualname__} lacks arguments of {old.__qualname__}"
        super().setattr(target, name, value, raising)


def test_what_faults_replace_is_still_there_and_takes_the_same_arguments(campaign: ModuleType) -> None:
    """Else they break a job in another way than they say; their changes of a trainer show when they run."""
    for name in campaign.FAULTS:
        with Checked.context() as patch:
            campaign.fault_named(name)(None, patch)


def test_the_tables_show_every_fault_and_every_sound_job(campaign: ModuleType) -> None:
    assert len(campaign.FAULTS) >= 40
    assert campaign.shown(campaign.FAULT_MARKS) == set(campaign.FAULTS)
    sound = {(name, layout) for name, case in campaign.sound_cases().items() for layout in case.layouts}
    assert 2 * len(sound) >= 60
    assert {row["job"] for row in campaign.layout_table.recorded()["sound jobs"]} == {name for name, _ in sound}
