"""Jobs whose layers of one input add up its gradient in products: the numbers stay, and other methods go first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_engine.api import Layout
from d9d_testing.layouts import Harness, assert_passed

Write = Callable[..., Path]
D9d = Callable[..., tuple[int, str, str]]
KERNELS = {"shared_input_linear": "accumulated"}


def test_explain_shows_who_adds_up_gradients_of_the_input_and_why(small_job: Write, d9d: D9d) -> None:
    status, out, err = d9d("explain", str(small_job(kernels=KERNELS)))
    assert status == 0, err
    lines = [line.strip() for line in out.splitlines()]
    chosen = "shared_input_linear: accumulated (d9d-nn 0.1.0), asked for by kernels.shared_input_linear"
    assert sum(line.startswith(chosen) for line in lines) == 2  # of attention and feed-forward
    status, out, err = d9d("explain", str(small_job(device="cuda", parallel=["compile"])))
    assert status == 0, err
    text = " ".join(out.split())
    assert "shared_input_linear: reference at layers.0.attention.shared_input_linear" in text
    assert "accumulated accepts, priority 0, taken by name only: no pass over memory to add gradients" in text


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": ["tensor_parallel"], "mesh": {"tp": 2}},
        {"peft": {"name": "lora", "r": 2, "targets": ["q_proj", "up_proj"]}},
        {"peft": {"name": "ia3", "targets": ["k_proj", "gate_proj"]}},
        {"parallel": [{"name": "fp8", "modules": ["v_proj", "up_proj"], "emulate": True}]},
    ],
    ids=["tensor_parallel", "lora", "ia3", "fp8"],
)
def test_layers_that_something_has_changed_have_no_such_op(
    small_job: Write, d9d: D9d, sections: dict[str, Any]
) -> None:
    status, out, err = d9d("explain", str(small_job("without", **sections)))
    assert status == 0, err
    assert "silu_mul: " in out
    assert "shared_input_linear" not in out
    status, _, err = d9d("explain", str(small_job(kernels=KERNELS, **sections)))
    assert status == 2
    assert "kernels.shared_input_linear: the job calls no op 'shared_input_linear'; its ops are:" in " ".join(
        err.split()
    )


COMPILED = {"name": "compile", "backend": "aot_eager"}
CHECKPOINTED = {"name": "activation_checkpointing", "save": ["aten.mm"]}


@pytest.mark.parametrize(
    "layout",
    [
        Layout("one process", {}, ()),
        Layout("checkpointed, compiled", {}, [CHECKPOINTED, COMPILED]),
        pytest.param(Layout("checkpointed", {}, [CHECKPOINTED]), marks=pytest.mark.thorough),
        pytest.param(Layout("fsdp 2", {"dp_shard": 2}, ["fsdp"]), marks=pytest.mark.thorough),
        pytest.param(
            Layout("fsdp 2, checkpointed, compiled", {"dp_shard": 2}, ["fsdp", CHECKPOINTED, COMPILED]),
            marks=pytest.mark.thorough,
        ),
        pytest.param(Layout("replicate 2", {"dp_replicate": 2}, ["replicate"]), marks=pytest.mark.thorough),
    ],
    ids=lambda layout: layout.name,
)
def test_layouts_compute_what_one_process_does_with_separate_products(
    table: ModuleType, tmp_path: Path, layout: Layout
) -> None:
    asked = table.sized(layout, 1)
    overrides = (*asked.overrides, *(f"kernels.{op}={name}" for op, name in KERNELS.items()))
    values = table.job(tmp_path / "corpus", "float32", model=table.DENSE | {"attention_bias": True})
    made = Harness(values, table.PLUGINS, 2)
    one = table.sized(Layout("reference", {}, ()), 1)
    assert_passed(made.compare([replace(asked, overrides=overrides)], reference=one))


def test_gradients_of_weights_that_a_pipeline_leaves_for_later_are_those_of_one_process(
    table: ModuleType, tmp_path: Path
) -> None:
    asked = tuple(f"kernels.{op}={name}" for op, name in KERNELS.items())
    case = table.Piped("zb1p", 2, 3, overrides=asked)
    assert_passed([verdict for _, _, verdict in table.run_pipelines(tmp_path / "corpus", [case], steps=2)])
