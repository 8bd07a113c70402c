"""Data that a task cannot read is refused with what it gives and what the task reads."""

from __future__ import annotations

import pytest
import torch
from d9d_core.extend import JobError
from d9d_nn.causal_lm.config import CausalLMConfig
from d9d_nn.causal_lm.task import CausalLM
from d9d_nn.classification.config import ClassificationConfig, TokenClassificationConfig
from d9d_nn.classification.task import Classification, TokenClassification
from d9d_nn.contrastive.config import EmbeddingConfig
from d9d_nn.contrastive.task import Embedding
from torch import Tensor


def microbatch(**others: Tensor) -> dict[str, Tensor]:
    return {"tokens": torch.zeros(4, 3, dtype=torch.int64), **others}


def test_tokens_without_targets_are_none_of_a_language_model() -> None:
    with pytest.raises(JobError, match="^data: task 'causal_lm' reads targets, and the dataset gives samples, tokens;"):
        CausalLM(CausalLMConfig()).weights(microbatch(samples=torch.arange(2)))


def test_labels_of_texts_are_none_of_tokens() -> None:
    texts, words = microbatch(labels=torch.zeros(4)), microbatch(labels=torch.zeros(4, 3))
    per_text, per_word = Classification(ClassificationConfig()), TokenClassification(TokenClassificationConfig())
    with pytest.raises(JobError, match=r"reads labels \[B, S\], and the dataset gives labels of shape \[4\]"):
        per_word.weights(texts)
    with pytest.raises(JobError, match=r"reads labels \[B\], and the dataset gives labels of shape \[4, 3\]"):
        per_text.weights(words)
    with pytest.raises(JobError, match="reads labels, and the dataset gives tokens"):
        per_text.weights(microbatch())
    assert per_text.weights(texts)["cross_entropy"] == 4
    assert per_word.weights(words)["cross_entropy"] == 12


def test_single_texts_are_no_queries_with_texts() -> None:
    task = Embedding(EmbeddingConfig())
    for samples in (3, 4):
        with pytest.raises(JobError, match=f"4 rows for {samples} samples"):
            task.first_inputs(microbatch(samples=torch.arange(samples)))
    task.first_inputs(microbatch(samples=torch.arange(2)))
