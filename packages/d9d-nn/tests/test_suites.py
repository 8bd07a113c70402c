"""Tasks, metrics and kernels keep what holds for every one."""

from __future__ import annotations

from d9d_nn.heads.config import ClassificationHeadConfig, EmbeddingHeadConfig
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
