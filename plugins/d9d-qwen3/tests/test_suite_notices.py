"""The model suite finds defects: each test here breaks Qwen3 in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from d9d_core.model import Stage
from d9d_core.plugin import ModelSpec, Ref
from d9d_core.traits import TensorStyle
from d9d_core.types import TensorSpec
from d9d_nn.linear import Linear
from d9d_qwen3.config import Qwen3Config, tiny
from d9d_qwen3.hugging_face.dense import Qwen3HuggingFace
from d9d_qwen3.model import Qwen3
from d9d_qwen3.plugin import d9d_models
from d9d_testing.suites.model import ModelSuite
from d9d_testing.suites.support.models import initialised
from d9d_weights.graph.base import Mapper
from d9d_weights.graph.compute import Compute

SPEC = next(iter(d9d_models()))


def broken(build: Callable[..., Any], **changes: Any) -> tuple[ModelSpec, Qwen3Config]:
    class Builder(Ref):
        def load(self) -> Any:
            return build

    return replace(SPEC, build=Builder("x:x"), **changes), tiny()


class OnCpu(Qwen3):
    def __init__(self, config: Qwen3Config, stage: Stage) -> None:
        super().__init__(config, stage)
        self.register_buffer("table", torch.zeros(3, device="cpu"))


class Unfilled(Qwen3):
    def __init__(self, config: Qwen3Config, stage: Stage) -> None:
        super().__init__(config, stage)
        self.register_buffer("table", torch.zeros(3))


class FillsChildren(Qwen3):
    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.norm.weight)


class Idle(Qwen3):
    def __init__(self, config: Qwen3Config, stage: Stage) -> None:
        super().__init__(config, stage)
        self.unused = Linear(2, 2, std=1.0)


class SeesTheFuture(Qwen3):
    def forward(self, **inputs: Any) -> Any:
        outputs = super().forward(**inputs)
        return {name: tensor + tensor.mean(dim=1, keepdim=True) for name, tensor in outputs.items()}


class IgnoresDocuments(Qwen3):
    def forward(self, *, documents: Any = None, **inputs: Any) -> Any:
        return super().forward(**inputs)


class MixesSamples(Qwen3):
    def forward(self, **inputs: Any) -> Any:
        return {name: tensor + tensor.mean(dim=0) for name, tensor in super().forward(**inputs).items()}


class Waits(Qwen3):
    def forward(self, *, tokens: Any = None, **inputs: Any) -> Any:
        assert tokens.max().item() < self.config.vocab_size
        return super().forward(tokens=tokens, **inputs)


class WrongBoundary(Qwen3):
    def boundary(self, microbatch: Any) -> Any:
        return {}


class BoundaryInFloat32(Qwen3):
    def boundary(self, microbatch: Any) -> Any:
        sent = super().boundary(microbatch)
        return {name: TensorSpec(tensor.shape, torch.float32) for name, tensor in sent.items()}


class SplitsANorm(Qwen3):
    def tensor_parallel_plan(self) -> Any:
        return {**super().tensor_parallel_plan(), "norm": TensorStyle.COLUMN}


class CountsLayersFromZero(Qwen3):
    def __init__(self, config: Qwen3Config, stage: Stage) -> None:
        super().__init__(config, stage)
        self.layers = torch.nn.ModuleDict({str(i): layer for i, layer in enumerate(self.layers.values())})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "check"),
    [
        (OnCpu, "test_builds_on_the_meta_device_without_memory"),
        (Unfilled, "test_initialisation_fills_every_parameter_and_buffer"),
        (FillsChildren, "test_reset_parameters_fills_own_parameters_only"),
        (Waits, "test_a_step_never_waits_for_the_device"),
    ],
)
def test_notices_a_defect_of_building(model: type[Qwen3], check: str) -> None:
    spec, config = broken(model)
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        getattr(ModelSuite(), check)(spec, config)


@pytest.mark.parametrize(
    ("model", "check"),
    [
        (Idle, "test_every_parameter_gets_a_gradient"),
        (SeesTheFuture, "test_later_tokens_do_not_change_earlier_logits"),
        (IgnoresDocuments, "test_packed_documents_do_not_see_each_other"),
        (MixesSamples, "test_samples_are_independent"),
        (SeesTheFuture, "test_loss_has_one_value_per_token_and_none_for_ignored_targets"),
    ],
)
def test_notices_a_defect_of_computing(model: type[Qwen3], check: str) -> None:
    spec, config = broken(model)
    with pytest.raises(AssertionError):
        getattr(ModelSuite(), check)(initialised(spec, config), config)


class IgnoresTheJobsSplit(Qwen3):
    def __init__(self, config: Qwen3Config, stage: Stage) -> None:
        super().__init__(config, Stage(stage.index, stage.count))


class DrawsByStage(Qwen3):
    def __init__(self, config: Qwen3Config, stage: Stage) -> None:
        super().__init__(config, stage)
        for layer in self.layers.values():
            layer.attention.q_proj.std *= stage.count


class EmbedsTwice(Qwen3):
    def __init__(self, config: Qwen3Config, stage: Stage) -> None:
        super().__init__(config, stage)
        if not stage.is_first:
            self.embedding = Qwen3(config).embedding


@pytest.mark.parametrize(
    ("model", "check"),
    [
        (IgnoresTheJobsSplit, "test_layers_are_split_as_the_job_says"),
        (DrawsByStage, "test_stages_start_as_the_whole_does"),
        (EmbedsTwice, "test_two_stages_compute_what_the_whole_does"),
        (WrongBoundary, "test_boundary_predicts_what_crosses_it"),
        (BoundaryInFloat32, "test_boundary_predicts_what_crosses_it"),
        (CountsLayersFromZero, "test_two_stages_compute_what_the_whole_does"),
    ],
)
def test_notices_a_defect_of_stages(model: type[Qwen3], check: str) -> None:
    spec, config = broken(model)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(ModelSuite(), check)(spec, config, initialised(spec, config))


def test_notices_a_vector_that_cannot_be_split() -> None:
    spec, config = broken(SplitsANorm)
    with pytest.raises(AssertionError, match="norm: a vector cannot be column"):
        ModelSuite().test_traits_name_modules_that_exist(initialised(spec, config))


def test_notices_false_claims() -> None:
    spec, _ = broken(Qwen3)
    with pytest.raises(AssertionError, match="claimed, but no module implements it: .*model:blocks"):
        ModelSuite().test_claims_agree_with_traits(spec, torch.nn.Linear(2, 2))


def test_a_model_may_claim_fewer_traits_than_its_blocks_have() -> None:
    spec, config = broken(Qwen3, provides=SPEC.provides - {"model:blocks", "model:split_backward"})
    ModelSuite().test_claims_agree_with_traits(spec, initialised(spec, config))


def test_notices_a_lossy_export() -> None:
    class Transposed(Qwen3HuggingFace):
        def exporter(self, config: Any) -> Mapper:
            doubled = Compute(("lm_head.weight",), lambda t: {"lm_head.weight": t["lm_head.weight"] * 2}, dict)
            return super().exporter(config) >> doubled

    class Format(Ref):
        def load(self) -> Any:
            return Transposed

    spec, config = broken(Qwen3, hugging_face=Format("x:x"))
    with pytest.raises(AssertionError):
        ModelSuite().test_hugging_face_round_trip_is_bitwise(spec, config, initialised(spec, config))
