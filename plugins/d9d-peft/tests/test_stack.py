"""Several methods on one model."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, JobError
from d9d_core.job_file.schema import job_schema
from d9d_core.peft import SwitchesOff
from d9d_core.registry.registry import Registry
from d9d_peft.ia3.method import Ia3
from d9d_peft.lora.method import Lora
from d9d_testing.layouts import job_of
from d9d_weights.graph.graph import map_tensors
from d9d_weights.hugging_face.adapter import MergesTensors
from torch import nn

PLUGINS = ("d9d_testing.toy.plugin", "d9d_parallel.plugin", "d9d_peft.plugin")
ATTENTION = {"name": "lora", "r": 2, "targets": ["layers.0*"]}
REST = {"name": "lora", "r": 3, "alpha": 1, "targets": "all-linear", "exclude": ["layers.0*", "layers.2*"]}
SCALES = {"name": "ia3", "targets": ["layers.2*"], "feedforward": []}
TUNED = {"name": "full_tune", "match": ["layers.2*"]}


def job(*methods: Any, **sections: Any) -> Any:
    values = {
        "steps": 2,
        "device": "cpu",
        "batch": {"size": 4, "microbatch": 2},
        "model": {"name": "toy_linears", "features": 6, "blocks": 3},
        "data": {"name": "toy_data", "features": 6},
        "task": "toy_task",
        "optimizer": "toy_optimizer",
        "trackers": [],
        "export": False,
        "peft": {"name": "stack", "methods": methods},
        **sections,
    }
    return job_of(values, PLUGINS)


def injected(*methods: Any) -> tuple[nn.Module, Any, frozenset[str]]:
    spec: Any = Registry.of(*map(importlib.import_module, PLUGINS)).find("peft method", "stack").spec
    kinds = {"lora": Lora, "ia3": Ia3}
    config = job(*methods).peft
    method = spec.build.load()(config, lambda one: kinds[one.name](one))
    torch.manual_seed(0)
    stage = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
    named = method.inject(stage)
    for name in sorted(named):
        nn.init.normal_(stage.get_parameter(name), std=0.5)
    return stage, method, named


def test_each_method_merges_its_own_tensors_of_a_checkpoint() -> None:
    stage, method, named = injected(ATTENTION, REST, SCALES)
    assert named == {
        *(f"layers.{n}.lora_{factor}.weight" for n in (0, 1) for factor in "AB"),
        "layers.2.ia3_l.weight",
    }
    tensors = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
    assert isinstance(method, MergesTensors)
    merged = map_tensors(method.merger(tensors.keys()), tensors)
    method.merge(stage)
    own = stage.state_dict()
    assert merged.keys() == own.keys()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in own.items())
    assert not torch.equal(own["layers.1.weight"], tensors["layers.1.weight"])


def test_it_can_be_switched_off_if_all_of_it_can() -> None:
    assert isinstance(injected(ATTENTION, SCALES)[1], SwitchesOff)
    trainer = job(ATTENTION, TUNED).build(lambda _: None)
    assert {n for n, p in trainer.stage.named_parameters() if p.requires_grad} == {
        "layers.0.linear.lora_A.weight", "layers.0.linear.lora_B.weight", "layers.2.linear.weight",
        "layers.2.linear.bias",
    }  # fmt: skip


def test_methods_stay_in_the_job_that_is_written_down() -> None:
    one = job(ATTENTION, {"name": "stack", "methods": ["lora", SCALES]})
    written = one.resolved()["peft"]
    assert [method["name"] for method in written["methods"]] == ["lora", "stack"]
    assert written["methods"][1]["methods"][1]["targets"] == ["layers.2*"]
    again = job_of({**one.resolved(), "trackers": []}, PLUGINS)
    assert again.peft == one.peft


def test_editors_know_the_methods_inside_of_a_stack() -> None:
    schema = job_schema(Registry.of(*map(importlib.import_module, PLUGINS)))
    (stack,) = (definition for key, definition in schema["$defs"].items() if key.endswith(":stack"))
    names = stack["properties"]["methods"]["items"]["anyOf"][0]["enum"]
    assert {"lora", "ia3", "full_tune", "stack"} <= set(names)


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ([ATTENTION], "peft: methods has fewer than two"),
        ([ATTENTION, "lorra"], r"peft.methods\[1\].*lorra"),
        ([ATTENTION, {**REST, "rank": 3}], r"peft.methods\[1\].rank.*not a field of 'lora'"),
        ([ATTENTION, {**REST, "init_from": "x"}], r"methods\[1\].init_from: a stack cannot start from adapter files"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(methods: Sequence[Any], text: str) -> None:
    with pytest.raises(JobError, match=text):
        job(*methods)


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ([ATTENTION, {**TUNED, "match": "lyers.9"}], r"peft.methods\[1\].match: no modules or parameters match"),
        (
            [ATTENTION, {"name": "stack", "methods": [SCALES, {**REST, "targets": "k"}]}],
            r"peft.methods\[1\].methods\[1\].targets: no layers match 'k'",
        ),
        (
            [ATTENTION, {**SCALES, "targets": "layers.0.linear"}],
            r"peft.methods\[1\]: it adds to 'layers.0.linear', as does methods\[0\]; exclude that layer",
        ),
        ([ATTENTION, {**REST, "exclude": []}], r"peft.methods\[1\].targets: 'layers.0.linear' is adapted by another"),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_place(methods: Sequence[Any], text: str) -> None:
    with pytest.raises(BuildError, match=text):
        job(*methods).plan()
