"""Tasks, metrics and kernels keep what holds for every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from d9d_core.extend import OpSignature
from d9d_nn.heads.config import ClassificationHeadConfig, EmbeddingHeadConfig
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.suites.metric import MetricSuite
from d9d_testing.suites.task import TaskSuite


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


class TestClassification(TaskSuite):
    target = "classification"
    observes = ("class_logits", "labels")
    accepts = ({"heads": {"topic": ClassificationHeadConfig(num_classes=3)}}, {"num_classes": 3})
    rejects = (
        ({"heads": {"topic": ClassificationHeadConfig(num_classes=3)}}, {"num_classes": 4}),
        ({"heads": {"words": EmbeddingHeadConfig()}}, {}),
    )


class TestSdpa(KernelSuite):
    target = "attention.sdpa"
    dtypes = ("float64", "float32", "bfloat16", "float16")
    refused = ({"dtype": "int8"}, {"causal": False})


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


class TestTorchRmsNorm(KernelSuite):
    target = "rms_norm.torch"
    asked = "cuda"
    refused = ({"device": "cpu"},)


class TestGroupedMM(KernelSuite):
    target = "grouped_linear.grouped_mm"
    dtypes = ("float32", "bfloat16")
    refused = ({"dtype": "int8"}, {"device": "mps"}, {"out_features": 23})


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


@pytest.mark.gpu
class TestSdpaEfficient(KernelSuite):
    target = "attention.sdpa_efficient"
    device = "cuda"
    refused = ({"dtype": "float64"}, {"device": "cpu"}, {"head_dim": 60})
