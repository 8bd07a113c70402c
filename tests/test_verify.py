"""``d9d verify`` on a user's own job, in processes of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_engine.api import Job, own_layout, parse_layout, verify
from d9d_engine.testing import Measurement, compare
from d9d_engine.verify.layouts import layout_values, scaled_values
from hypothesis import given
from hypothesis import strategies as st

Write = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]

#: A strategy as a third party might get it wrong: gradients come out as many times too long as there are ranks.
TWICE = '''
from d9d_core.config.base import PluginConfig
from d9d_core.plugin import Ref, StrategySpec, hookimpl
from d9d_core.protocols.strategy import Applied
from typing import Literal

D9D_API = 1

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


@pytest.mark.thorough
def test_sound_layouts_pass_and_a_wrong_strategy_fails(verified: Any) -> None:
    status, (good, bad, staged) = verified("dp_shard=2:fsdp", "dp_shard=2:fsdp,twice", "pp=2")
    assert status == 1
    assert good["passed"], good
    assert staged["passed"], staged
    assert_twice_as_long(bad)


def test_a_wrong_strategy_fails(verified: Any) -> None:
    status, (bad,) = verified("dp_shard=2:fsdp,twice")
    assert status == 1
    assert_twice_as_long(bad)


def assert_twice_as_long(bad: dict[str, Any]) -> None:
    assert not bad["passed"]
    assert bad["diverged"][0] == 0
    assert bad["norm"][0] == pytest.approx(0.5, abs=0.01)  # twice as long
    assert bad["angle"][0] < 1e-8  # in the right direction


def test_a_model_that_differs_between_layouts_by_its_nature_says_so(
    small_job: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job.load(small_job(model={**EXPERTS, "capacity": 1.5, "balancing": [{"name": "bias_update"}]}))
    nothing = Measurement([1.0], [1.0], {}, [{}])
    monkeypatch.setattr("d9d_engine.verify.run._run", lambda *_: nothing)
    notes: list[str] = []
    verify(job, [parse_layout("dp_shard=2:fsdp", job)], 1, notes.append)
    assert [note for note in notes if "by its nature" in note] == [
        "this model differs between layouts by its nature: capacity drops tokens of each microbatch on each rank by "
        "itself"
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


def test_a_large_job_is_scaled_to_its_familys_tiny_model_as_far_as_its_data_allows(small_job: Write) -> None:
    job = Job.load(small_job(model=LARGE, mesh={"dp_shard": 64}, parallel=["fsdp"], batch={"size": 128}))
    layout = own_layout(job, max_ranks=8)
    assert (layout.mesh, layout.ranks) == ({"dp_shard": 2}, 2)
    values = scaled_values(job, [layout], steps=3)
    model = values["model"]
    assert model["hidden_size"] < 256
    assert model["num_layers"] <= 4
    assert model["vocab_size"] == 257  # the tokens are still the data's
    assert values["gradient_clipping"]["max_norm"] is None
    assert values["batch"]["size"] % (2 * values["batch"]["microbatch"]) == 0


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


def test_a_layout_that_needs_too_many_processes_says_so(small_job: Write) -> None:
    job = Job.load(small_job(mesh={"dp_replicate": 2, "dp_shard": 4}, parallel=["hsdp"], batch={"size": 16}))
    with pytest.raises(Exception, match="needs at least 4 processes to be itself, more than the 2 that are allowed"):
        own_layout(job, max_ranks=2)


def test_a_layout_takes_the_strategies_settings_from_the_job(small_job: Write) -> None:
    strategy = {"name": "fsdp", "defer": "everything"}
    job = Job.load(small_job(mesh={"dp_shard": 2}, parallel=[strategy]))
    layout = parse_layout("dp_shard=4:fsdp,compile", job)
    assert layout.ranks == 4
    assert layout.parallel[0]["defer"] == "everything"
    assert layout.parallel[1] == "compile"
    with pytest.raises(Exception, match="write axis=size"):
        parse_layout("shard=4:fsdp", job)


def measured(scale: float = 1.0, noise: float = 0.0) -> Measurement:
    generator = torch.Generator().manual_seed(0)
    gradients = [{"a": torch.randn(8, generator=generator), "b": torch.randn(4, 3, generator=generator)} for _ in "ab"]
    for step in gradients:
        step["b"] = step["b"] * scale + noise * torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    weights = {"a": torch.ones(8), "b": torch.ones(4, 3)}
    return Measurement([2.0, 1.5], [1.0, 0.9], weights, gradients)


def test_what_is_equal_passes() -> None:
    verdict = compare("x", measured(), measured(), torch.float32)
    assert verdict.passed
    assert (verdict.loss, verdict.angle[0], verdict.norm[0]) == (0.0, 0.0, 0.0)


@given(st.sampled_from([0.5, 0.999, 1.001, 2.0, -1.0, 0.0, float("nan")]))
def test_a_gradient_of_another_length_or_direction_fails_and_is_named(scale: float) -> None:
    verdict = compare("x", measured(scale), measured(), torch.float32)
    assert not verdict.passed
    assert verdict.norm[1] == "b" or verdict.angle[1] == "b"
    assert verdict.diverged is not None
    assert verdict.diverged[0] == 0
    json.dumps(verdict.to_json(), allow_nan=False)


@pytest.mark.parametrize("change", ["loss", "norm", "weights", "names", "nan"])
def test_every_other_difference_fails(change: str) -> None:
    other = measured()
    if change == "loss":
        other.losses[1] *= 1.01
    elif change == "norm":
        other.grad_norms[0] *= 1.01
    elif change == "weights":
        other.weights["a"] = other.weights["a"] + 1e-7
    elif change == "names":
        del other.gradients[0]["a"]
    else:
        other.losses[0] = float("nan")
    verdict = compare("x", other, measured(), torch.float32)
    assert not verdict.passed
    assert verdict.diverged is not None
    assert verdict.diverged[0] == (1 if change == "loss" else 0)


def test_a_measurement_survives_its_files(tmp_path: Path) -> None:
    first = measured()
    first.losses[0] = float("inf")
    first.write(tmp_path)
    again = Measurement.read(tmp_path)
    assert again.losses == first.losses
    assert all(torch.equal(again.gradients[1][name], gradient) for name, gradient in first.gradients[1].items())
