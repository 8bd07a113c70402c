"""Data that a task cannot read is refused; the error names the fields of both."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.errors import JobError
from d9d_nn.causal_lm.config import CausalLMConfig
from d9d_nn.causal_lm.task import CausalLM
from d9d_nn.classification.config import ClassificationConfig, TokenClassificationConfig
from d9d_nn.classification.task import Classification, TokenClassification
from d9d_nn.contrastive.config import EmbeddingConfig
from d9d_nn.contrastive.task import Embedding
from d9d_nn.heads.config import (
    CausalLMHeadConfig,
    ClassificationHeadConfig,
    EmbeddingHeadConfig,
    TokenClassificationHeadConfig,
)
from d9d_nn.inference.classes import Classes
from d9d_nn.inference.config import ClassesConfig, EmbeddingsConfig, HiddenStatesConfig, LogProbsConfig
from d9d_nn.inference.embeddings import Embeddings
from d9d_nn.inference.hidden_states import HiddenStates
from d9d_nn.inference.log_probs import LogProbs
from d9d_nn.microbatch import own_positions, with_blocks, with_prefixes
from torch import Tensor


def microbatch(**others: Tensor) -> dict[str, Tensor]:
    return {"tokens": torch.zeros(4, 3, dtype=torch.int64), **others}


def test_tokens_without_targets_are_none_of_a_language_model() -> None:
    with pytest.raises(JobError, match="^data: task 'causal_lm' reads targets, but the dataset gives samples, tokens;"):
        CausalLM(CausalLMConfig()).weights(microbatch(samples=torch.arange(2)))


def test_labels_of_texts_are_none_of_tokens() -> None:
    texts, words = microbatch(labels=torch.zeros(4)), microbatch(labels=torch.zeros(4, 3))
    per_text, per_word = Classification(ClassificationConfig()), TokenClassification(TokenClassificationConfig())
    with pytest.raises(JobError, match=r"reads labels \[B, S\], but the dataset gives labels of shape \[4\]"):
        per_word.weights(texts)
    with pytest.raises(JobError, match=r"reads labels \[B\], but the dataset gives labels of shape \[4, 3\]"):
        per_text.weights(words)
    with pytest.raises(JobError, match="reads labels, but the dataset gives tokens"):
        per_text.weights(microbatch())
    assert per_text.weights(texts)["cross_entropy"] == 4
    assert per_word.weights(words)["cross_entropy"] == 12


def test_single_texts_are_no_queries_with_texts() -> None:
    task = Embedding(EmbeddingConfig())
    for samples in (0, 3, 4):
        with pytest.raises(JobError, match=f"4 rows for {samples} samples"):
            task.first_inputs(microbatch(samples=torch.arange(samples)))
    task.first_inputs(microbatch(samples=torch.arange(2)))
    with pytest.raises(JobError, match="task 'embedding' reads samples, but the dataset gives tokens"):
        task.first_inputs(microbatch())


class Every:
    """Share of every second position, as a rank of two."""

    ranks = 2

    def __init__(self, first: int) -> None:
        self.first = first

    def own(self, tensor: Tensor) -> Tensor:
        return tensor[:, self.first :: 2]


@pytest.mark.thorough
def test_ranks_count_and_weigh_each_position_once() -> None:
    generator = torch.Generator().manual_seed(0)
    task = CausalLM(CausalLMConfig())
    whole = {
        "tokens": torch.randint(0, 9, (3, 8), generator=generator),
        "targets": torch.randint(-1, 9, (3, 8), generator=generator).masked_fill_(torch.eye(3, 8).bool(), -100),
        "weights": torch.rand(3, 8, generator=generator),
        "documents": torch.zeros(3, 8, dtype=torch.int64),
        "samples": torch.arange(3),
    }
    for padding in ({}, {"lengths": torch.tensor([8, 3, 0])}):
        batch = {**whole, **padding}
        parts = [task.split_positions(batch, Every(first)) for first in range(2)]
        assert sum(int(task.count(part)) for part in parts) == int(task.count(batch))
        weight = sum(task.weights(part)["cross_entropy"] for part in parts)
        torch.testing.assert_close(weight, task.weights(batch)["cross_entropy"])
        for first, part in enumerate(parts):
            assert torch.equal(part["targets"], batch["targets"][:, first::2])
            assert torch.equal(part["positions"], torch.arange(first, 8, 2).expand(3, 4))
            assert part["documents"] is batch["documents"]
            assert part["samples"] is batch["samples"]


def test_positions_that_the_data_gives_are_split_as_they_are() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    batch = {"tokens": positions, "positions": positions}
    part = CausalLM(CausalLMConfig()).split_positions(batch, Every(1))
    assert torch.equal(part["positions"], positions[:, 1::2])
    assert list(part) == ["positions", "tokens"]


def test_ends_of_as_many_rows_as_positions_stay_whole() -> None:
    batch = {"tokens": torch.zeros(1, 4, dtype=torch.int64), "ends": torch.tensor([[1, 2, 3, 4]])}
    assert own_positions(batch, Every(0))["ends"] is batch["ends"]


def test_a_mask_of_pooled_positions_stays_whole_because_heads_pool_all_positions() -> None:
    mask = torch.eye(4, 3, dtype=torch.int64)
    own = own_positions(microbatch(pooling_mask=mask), Every(1))
    assert torch.equal(own["pooling_mask"], mask)
    assert own["tokens"].shape == (4, 1)
    task = Classification(ClassificationConfig())
    assert "pooling_mask" in task.inputs(microbatch(pooling_mask=mask)).shared
    assert "pooling_mask" not in task.inputs(microbatch()).shared


def test_a_prefix_ends_with_the_token_before_the_first_target() -> None:
    targets = torch.tensor([[-100, -100, 5, -100, 5, -100], [-100, 5, -100, -100, -100, 5]])
    whole = with_prefixes({"tokens": targets, "targets": targets})
    assert whole["attention_blocks"].tolist() == [[0, 0, 0, -1, -1, -1], [0, 0, -1, -1, -1, -1]]
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 2]])
    packed = with_prefixes({"tokens": targets, "targets": targets, "documents": documents})
    assert packed["attention_blocks"].tolist() == [[0, 0, 0, 0, 0, -1], [0, 0, 0, 0, 0, 0]]
    assert with_prefixes(packed) is packed
    with pytest.raises(JobError, match="model.attention_mask: prefixes are the tokens before a document's first t"):
        with_prefixes(microbatch())


def test_blocks_come_from_the_dataset_and_go_to_models_that_read_them() -> None:
    targets = torch.tensor([[-100, 5, 5]])
    plain = {"tokens": targets, "targets": targets}
    given = {**plain, "attention_blocks": torch.tensor([[0, 0, -1]])}
    assert with_blocks(given) is given  # the masks are not known
    assert with_blocks(given, "blocks") is given
    assert with_blocks(given, "prefix") is given
    assert with_blocks(plain, "causal", "bidirectional") is plain
    assert with_blocks(plain, "causal", "prefix")["attention_blocks"].tolist() == [[0, 0, -1]]
    with pytest.raises(JobError, match=r"attention_mask: blocks are the field attention_blocks of the dataset"):
        with_blocks(plain, "blocks")
    for mask in ("causal", "bidirectional"):
        with pytest.raises(
            JobError, match=f"the dataset gives attention_blocks, which {mask} does not read; set it to bl"
        ):
            with_blocks(given, mask)


@pytest.mark.parametrize("task", [CausalLM(CausalLMConfig()), LogProbs(LogProbsConfig())])
def test_tasks_give_prefixes_to_models_that_need_them(task: CausalLM | LogProbs) -> None:
    class Model:
        attention_mask = "prefix"
        heads: ClassVar = {"causal_lm": CausalLMHeadConfig()}

    targets = torch.tensor([[-100, 5, 5, -100]])
    given = {"tokens": targets, "targets": targets}
    Model.attention_mask = "causal"
    task.check(Model, {})
    assert "attention_blocks" not in task.inputs(given).shared
    Model.attention_mask = "prefix"
    task.check(Model, {})
    assert task.inputs(given).shared["attention_blocks"].tolist() == [[0, 0, -1, -1]]
    own = task.split_positions(given, Every(1))  # type: ignore[arg-type]
    assert task.inputs(own).shared["attention_blocks"].tolist() == [[0, 0, -1, -1]]  # of all positions


@pytest.mark.parametrize(
    ("task", "heads"),
    [
        (Classification(ClassificationConfig()), {"one": ClassificationHeadConfig(num_classes=2)}),
        (TokenClassification(TokenClassificationConfig()), {"one": TokenClassificationHeadConfig(num_classes=2)}),
        (Embedding(EmbeddingConfig()), {"one": EmbeddingHeadConfig()}),
        (Classes(ClassesConfig()), {"one": ClassificationHeadConfig(num_classes=2)}),
        (Embeddings(EmbeddingsConfig()), {"one": EmbeddingHeadConfig()}),
    ],
)
def test_a_task_without_targets_refuses_a_model_with_prefixes_before_its_first_step(
    task: Any, heads: Mapping[str, Any]
) -> None:
    for mask in ("causal", "bidirectional", "blocks"):
        task.check(SimpleNamespace(attention_mask=mask, heads=heads), {})
    with pytest.raises(
        JobError, match=f"^model.attention_mask: .*, but task '{task.config.name}' reads no targets; set it to bidirec"
    ):
        task.check(SimpleNamespace(attention_mask="prefix", heads=heads), {})


def test_hidden_states_are_of_the_prefixes_and_blocks_that_the_model_reads() -> None:
    task, targets = HiddenStates(HiddenStatesConfig(layers=(0,))), torch.tensor([[-100, 5, 5, -100]])
    given = {"tokens": targets, "targets": targets}
    task.check(SimpleNamespace(attention_mask="prefix"), {})
    assert task.inputs(given).shared["attention_blocks"].tolist() == [[0, 0, -1, -1]]
    own = task.split_positions(given, Every(1))  # type: ignore[arg-type]
    assert task.inputs(own).shared["attention_blocks"].tolist() == [[0, 0, -1, -1]]
    task.check(SimpleNamespace(attention_mask="blocks"), {})
    with pytest.raises(JobError, match=r"blocks are the field attention_blocks of the dataset"):
        task.inputs(given)
