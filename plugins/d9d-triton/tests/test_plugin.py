"""The declaration keeps what holds for every plugin, and jobs choose by it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSignature
from d9d_engine.job import Job
from d9d_testing.suites.plugin import PluginSuite
from d9d_triton.rules import RULES, by_rule

JOB: dict[str, Any] = {
    "model": {
        "name": "qwen3",
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "data": "toy_tokens",
    "task": "causal_lm",
    "optimizer": "toy_optimizer",
    "steps": 1,
    "device": "cuda",
}


class TestPlugin(PluginSuite):
    plugin = "d9d_triton.plugin"


@pytest.fixture
def chosen(registry: Any, tmp_path: Path) -> Callable[..., dict[str, tuple[str, ...]]]:
    """Plans a job for a GPU that need not be here: op and backend -> the modules that call it so."""
    others = ("d9d_nn", "d9d_qwen3", "d9d_parallel", "d9d_testing.toy")
    for package in others:
        pytest.importorskip(package)
    offers = registry("d9d_triton.plugin", *(f"{package}.plugin" for package in others))

    def plan(**sections: Any) -> dict[str, tuple[str, ...]]:
        (tmp_path / "job.yaml").write_text(json.dumps(JOB | sections))
        choices = Job.load(tmp_path / "job.yaml", registry=offers).plan(world_size=1).kernels
        return {f"{choice.op}.{choice.backend}": choice.sites for choice in choices if choice.op in RULES}

    return plan


@pytest.mark.thorough
def test_a_job_takes_them_where_it_does_not_compile(chosen: Any) -> None:
    found = chosen()
    assert set(found) == {
        "rms_norm.triton",
        "silu_mul.triton",
        "rope.triton",
        "normed_rope.triton",
        "add_rms_norm.triton",
        "attention_inputs.triton",
        "swiglu.triton",
    }


@pytest.mark.thorough
def test_compiled_blocks_keep_what_the_compiler_fuses(chosen: Any) -> None:
    found = chosen(parallel=["compile"])
    assert found["silu_mul.recomputed"] == ("layers.0.ffn.silu_mul", "layers.1.ffn.silu_mul")
    assert found["rope.reference"] == ("layers.0.attention.rope", "layers.1.attention.rope")
    norms = [f"layers.{layer}.{norm}.add_rms_norm" for layer in (0, 1) for norm in ("attention_norm", "ffn_norm")]
    assert found["add_rms_norm.triton"] == tuple(norms)
    assert found["rms_norm.triton"] == ("norm.rms_norm",), "the norm behind the blocks is not compiled"
    assert found["attention_inputs.triton"] == (
        "layers.0.attention.attention_inputs",
        "layers.1.attention.attention_inputs",
    )
    assert found["swiglu.triton"] == ("layers.0.ffn.swiglu", "layers.1.ffn.swiglu")


@pytest.mark.parametrize("after", [[], ["compile"]])
def test_checkpointed_blocks_have_products_that_can_be_kept_unless_a_kernel_is_named(
    chosen: Any, after: list[str]
) -> None:
    parallel = [{"name": "activation_checkpointing", "save": ["aten.mm"]}, *after]
    found = chosen(parallel=parallel)
    assert {"swiglu.reference", "attention_inputs.reference", "add_rms_norm.triton"} <= set(found)
    assert "swiglu.triton" in chosen(parallel=parallel, kernels={"swiglu": "triton"})


@pytest.mark.parametrize("parallel", [[], ["compile"]])
def test_norms_of_branches_are_apart_where_the_job_names_a_backend_of_norms(chosen: Any, parallel: list[str]) -> None:
    found = chosen(parallel=parallel, kernels={"rms_norm": "reference"})
    assert len(found["add_rms_norm.reference"]) == 4
    assert "add_rms_norm.triton" not in found


def test_a_compiled_job_gets_them_by_name(chosen: Any) -> None:
    found = chosen(parallel=["compile"], kernels={"silu_mul": "triton"})
    assert "silu_mul.triton" in found
    assert "rope.reference" in found


def test_each_rule_has_a_reason_for_compiled_code_and_for_other() -> None:
    for op in RULES:
        plain, compiled = (by_rule(OpSignature(op, "cuda", "bfloat16", {}, compiled)) for compiled in (False, True))
        assert plain.accept
        assert compiled.accept
        assert plain.reason != compiled.reason


def test_without_triton_a_job_that_asks_for_one_is_refused(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "triton" else found(name, *rest)
    )
    with pytest.raises(BuildError, match="needs import:triton: module triton is not installed"):
        chosen(kernels={"rope": "triton"})
