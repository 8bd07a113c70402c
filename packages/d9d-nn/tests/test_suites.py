"""Tasks, metrics and kernels keep what holds for every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import pytest
import torch
from d9d_core.config import PluginConfig
from d9d_core.kernel import OpSignature
from d9d_core.types import Microbatch
from d9d_nn.causal_lm.config import CausalLMConfig
from d9d_nn.causal_lm.task import CausalLM
from d9d_nn.heads.config import ClassificationHeadConfig, EmbeddingHeadConfig, TokenClassificationHeadConfig
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.suites.metric import MetricSuite
from d9d_testing.suites.support import observations
from d9d_testing.suites.support.calls import Call
from d9d_testing.suites.task import TaskSuite
from torch import Tensor


class Teacher(PluginConfig):
    """Config of a model that no plugin declares."""

    name: Literal["teacher"] = "teacher"
    pretrained: str = "nowhere"
    vocab_size: int = 8


TEACHER = Teacher()


@pytest.mark.thorough
class TestPerplexity(MetricSuite):
    target = "perplexity"


class TestCausalLM(TaskSuite):
    target = "causal_lm"
    observes = ("token_loss", "targets")
    accepts = ({"vocab_size": 8, "max_positions": 4}, {"vocab_size": 8, "sequence_length": 4})
    rejects = (
        ({"vocab_size": 8}, {"vocab_size": 9}),
        ({"max_positions": 4}, {"sequence_length": 5}),
    )


class TestWeightedCausalLM(TaskSuite):
    target = "causal_lm"
    observes = ("token_loss", "targets", "weights")

    def microbatch(self, samples: slice, *, counted: bool = True) -> Mapping[str, Tensor]:
        found = dict(super().microbatch(samples, counted=counted))
        return {**found, "weights": (found["tokens"] % 4) / 2}


def test_each_token_counts_with_its_weight() -> None:
    task = CausalLM(CausalLMConfig())
    loss = torch.tensor([[1.0, 2.0, 4.0, 0.0]])
    batch = {"targets": torch.tensor([[3, 4, 5, -100]]), "weights": torch.tensor([[1.0, 0.5, 0.0, 7.0]])}
    assert task.losses({"token_loss": loss}, batch)["cross_entropy"] == 2
    assert task.weights(batch)["cross_entropy"] == 1.5
    assert torch.equal(task.observations({"token_loss": loss}, batch)["token_loss"], loss)
    same = batch | {"weights": torch.ones(1, 4)}
    del batch["weights"]
    assert task.weights(same) == task.weights(batch)
    assert task.losses({"token_loss": loss}, same) == task.losses({"token_loss": loss}, batch)


class TestClassification(TaskSuite):
    target = "classification"
    observes = ("class_logits", "labels")
    accepts = ({"heads": {"topic": ClassificationHeadConfig(num_classes=3)}}, {"num_classes": 3})
    rejects = (
        ({"heads": {"topic": ClassificationHeadConfig(num_classes=3)}}, {"num_classes": 4}),
        ({"heads": {"words": EmbeddingHeadConfig()}}, {}),
    )


class TestDpo(TaskSuite):
    target = "dpo"
    observes = ("chosen_rewards", "rejected_rewards")
    accepts = TestCausalLM.accepts
    rejects = TestCausalLM.rejects
    samples = 6

    def microbatch(self, samples: slice, *, counted: bool = True) -> Mapping[str, Tensor]:
        rows = observations.microbatch(slice(2 * samples.start, 2 * samples.stop), counted=counted)
        reference = torch.linspace(-1, 1, 2 * self.samples).view(-1, 2)
        return {**rows, "samples": torch.arange(self.samples)[samples], "reference_logps": reference[samples]}


class TestDistillation(TaskSuite):
    target = "distillation"
    config: ClassVar[Mapping[str, Any]] = {"teacher": TEACHER, "temperature": 2.0, "hard_weight": 0.5}
    observes = ("targets",)
    accepts = TestCausalLM.accepts
    rejects = (*TestCausalLM.rejects, ({"vocab_size": 9}, {}))

    def microbatch(self, samples: slice, *, counted: bool = True) -> Mapping[str, Tensor]:
        rows = observations.microbatch(samples, counted=counted)
        weights = (rows["tokens"] % 3).float()
        return {**rows, "teacher_logits": _logits(rows["tokens"] + 1), "weights": weights}

    def outputs(self, microbatch: Microbatch, scale: Tensor) -> Mapping[str, Tensor]:
        return {"logits": _logits(microbatch["tokens"]) * scale}


class TestEmbedding(TaskSuite):
    """Second pass of the task; the first one is tested with the loss."""

    target = "embedding"
    observes = ("contrastive_loss", "retrieval_hits")
    accepts = ({"heads": {"words": EmbeddingHeadConfig()}}, {})
    rejects = (({"heads": {"topic": ClassificationHeadConfig(num_classes=3)}}, {}),)
    samples = 6

    def microbatch(self, samples: slice, *, counted: bool = True) -> Mapping[str, Tensor]:
        rows = observations.microbatch(slice(2 * samples.start, 2 * samples.stop))
        numbers = torch.arange(self.samples)[samples]
        weight = float(counted)
        return {
            **rows,
            "lengths": rows["lengths"] * int(counted),
            "samples": numbers,
            "contrastive_loss": (1 + numbers) * weight,
            "retrieval_hits": numbers > 2,
            "embedding_gradient": rows["x"].cos() * weight,
        }

    def outputs(self, microbatch: Microbatch, scale: Tensor) -> Mapping[str, Tensor]:
        return {"embedding": microbatch["x"] * scale}


class TestPreference(MetricSuite):
    target = "preference"

    def observations(self, samples: slice) -> Mapping[str, Tensor]:
        rewards = torch.linspace(-2, 3, self.samples)
        return {"chosen_rewards": rewards[samples], "rejected_rewards": rewards.sin()[samples]}


def _logits(tokens: Tensor) -> Tensor:
    return (tokens.unsqueeze(-1) * torch.arange(1.0, 14)).sin()


class TestTokenClassification(TaskSuite):
    target = "token_classification"
    observes = ("class_logits", "labels")
    accepts = ({"heads": {"tags": TokenClassificationHeadConfig(num_classes=3)}}, {"num_classes": 3})
    rejects = (
        ({"heads": {"tags": TokenClassificationHeadConfig(num_classes=3)}}, {"num_classes": 4}),
        ({"heads": {"topic": ClassificationHeadConfig(num_classes=3)}}, {}),
    )

    def microbatch(self, samples: slice, *, counted: bool = True) -> Mapping[str, Tensor]:
        found = dict(super().microbatch(samples, counted=counted))
        return {**found, "labels": torch.where(found["targets"] >= 0, found["targets"] % 5, -100)}

    def outputs(self, microbatch: Microbatch, scale: Tensor) -> Mapping[str, Tensor]:
        classes = torch.arange(1.0, 6)
        return {"class_logits": (microbatch["tokens"].float()[..., None] * classes).sin() * scale}


@pytest.mark.thorough
class TestSdpa(KernelSuite):
    target = "attention.sdpa"
    dtypes = ("float64", "float32", "bfloat16", "float16")
    refused = ({"dtype": "int8"}, {"causal": False})


@pytest.mark.thorough
class TestFlexWithoutItsCompiler(KernelSuite):
    """Its forward; on the CPU it has no backward."""

    pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

    target = "attention.flex"
    asked = "cuda"
    dtypes = ("float32",)
    gradients = False
    refused = ({"dtype": "int8"}, {"device": "cpu"}, {"causal": False}, {"head_dim": 8})

    def function(self, signature: OpSignature) -> Callable[..., Any]:
        return super().function(replace(signature, device="cpu"))


class TestSdpaBlocks(KernelSuite):
    target = "attention_block.sdpa"
    dtypes = ("float64", "float32", "bfloat16")
    refused = ({"dtype": "int8"}, {"device": "mps"}, {"causal": False}, {"window": 8})


class TestGatedDeltaRuleInChunks(KernelSuite):
    target = "gated_delta_rule.chunked"
    dtypes = ("float64", "float32", "bfloat16", "float16")
    refused = ({"dtype": "int8"}, {"device": "mps"})


class TestStateSpaceRuleInChunks(KernelSuite):
    target = "state_space_rule.chunked"
    dtypes = ("float64", "float32", "bfloat16", "float16")
    refused = ({"dtype": "int8"},)


class TestTorchRmsNorm(KernelSuite):
    target = "rms_norm.torch"
    asked = "cuda"
    refused = ({"device": "cpu"},)


class TestGroupedMM(KernelSuite):
    target = "grouped_linear.grouped_mm"
    dtypes = ("float32", "bfloat16")
    refused = ({"dtype": "int8"}, {"device": "mps"}, {"out_features": 23})


@pytest.mark.gpu
class TestFlex(KernelSuite):
    pytestmark = pytest.mark.filterwarnings("default")  # torch's own, inside Inductor

    target = "attention.flex"
    device = "cuda"
    refused = ({"dtype": "float64"}, {"device": "cpu"}, {"causal": False}, {"head_dim": 8})


@pytest.mark.gpu
class TestSdpaBlocksOnCuda(KernelSuite):
    target = "attention_block.sdpa"
    device = "cuda"
    refused = ({"dtype": "float32"}, {"device": "mps"}, {"causal": False}, {"window": 8}, {"head_dim": 12})


@pytest.mark.gpu
class TestFlexBlocks(KernelSuite):
    pytestmark = pytest.mark.filterwarnings("default")  # torch's own, inside Inductor

    target = "attention_block.flex"
    device = "cuda"
    refused = ({"dtype": "float64"}, {"device": "cpu"}, {"causal": False}, {"head_dim": 8})


@pytest.mark.gpu
class TestSdpaFlash(KernelSuite):
    target = "attention.sdpa_flash"
    device = "cuda"
    refused = ({"dtype": "float32"}, {"device": "cpu"}, {"window": 8}, {"head_dim": 512})


@pytest.mark.gpu
class TestSdpaCudnn(KernelSuite):
    target = "attention.sdpa_cudnn"
    device = "cuda"
    refused = ({"dtype": "float32"}, {"device": "cpu"}, {"head_dim": 136})

    def takes(self, call: Call) -> bool:
        return call.inputs["query"].shape[1] > 1  # cuDNN has no kernel for one position


@pytest.mark.gpu
class TestSdpaEfficient(KernelSuite):
    target = "attention.sdpa_efficient"
    device = "cuda"
    refused = ({"dtype": "float64"}, {"device": "cpu"}, {"head_dim": 60})
