"""Tasks of whole samples count each sample on one rank of ``cp``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_engine.distributed.positions import ZigzagPositions
from d9d_nn.classification.config import ClassificationConfig, TokenClassificationConfig
from d9d_nn.classification.task import Classification, TokenClassification
from d9d_nn.contrastive.config import EmbeddingConfig
from d9d_nn.contrastive.task import Embedding
from d9d_nn.preference.config import DpoConfig
from d9d_nn.preference.task import Dpo

ROWS, LENGTH, RANKS = 6, 12, 3
TOKENS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
LENGTHS = torch.tensor([12, 1, 5, 7, 12, 3])
#: Of two texts of the second pair nothing is predicted.
TARGETS = TOKENS.where(
    (torch.arange(LENGTH) < LENGTHS.unsqueeze(1)) & (torch.arange(ROWS) // 2 != 1).unsqueeze(1), -100
)


def parts(task: Any, **fields: torch.Tensor) -> tuple[Any, list[Any]]:
    """Microbatch, and the microbatches of all ranks."""
    whole = {"tokens": TOKENS, "lengths": LENGTHS, **fields}
    return whole, [task.split_positions(whole, ZigzagPositions(RANKS, rank)) for rank in range(RANKS)]


def assert_counted_once(task: Any, whole: Any, of_ranks: list[Any]) -> None:
    (term,) = task.coefficients
    found = [task.weights(own)[term] for own in of_ranks]
    assert sum(found) == task.weights(whole)[term] > 0
    assert sum(task.count(own) for own in of_ranks) == task.count(whole)


def test_labels_of_samples_count_on_one_rank() -> None:
    task = Classification(ClassificationConfig(name="classification"))
    whole, of_ranks = parts(task, labels=torch.tensor([1, 0, -100, 2, 1, 1]))
    assert_counted_once(task, whole, of_ranks)
    observed = [task.observations({"class_logits": torch.zeros(ROWS, 3)}, own)["labels"] for own in of_ranks]
    assert sum(int((labels != -100).sum()) for labels in observed) == ROWS - 1


def test_labels_of_tokens_count_where_their_tokens_are() -> None:
    task = TokenClassification(TokenClassificationConfig(name="token_classification"))
    whole, of_ranks = parts(task, labels=TARGETS)
    assert_counted_once(task, whole, of_ranks)
    assert all(
        torch.equal(own["labels"][own["labels"] != -100], own["tokens"][own["labels"] != -100]) for own in of_ranks
    )


def test_pairs_count_on_one_rank_and_all_their_targets_do() -> None:
    task = Dpo(DpoConfig(name="dpo", loss="ipo"))
    whole, of_ranks = parts(task, targets=TARGETS, samples=torch.arange(ROWS // 2))
    assert_counted_once(task, whole, of_ranks)
    # Sum over the ranks: of each text as many nats as targets, of the whole sample on every rank.
    losses = (TARGETS != -100).float()
    reference = {"reference_logps": torch.zeros(ROWS // 2, 2)}
    expected = task.losses({"token_loss": losses}, {**whole, **reference})["dpo"]
    found = [task.losses({"token_loss": losses.sum(1, keepdim=True)}, {**own, **reference})["dpo"] for own in of_ranks]
    assert sum(found) == expected > 0
    rewards = [task.observations({"token_loss": losses}, {**own, **reference})["chosen_rewards"] for own in of_ranks]
    assert sum(map(len, rewards)) == ROWS // 2


def test_queries_count_on_one_rank() -> None:
    task = Embedding(EmbeddingConfig(name="embedding"))
    whole, of_ranks = parts(task, samples=torch.arange(ROWS // 2))
    assert_counted_once(task, whole, of_ranks)
    found = {"contrastive_loss": torch.ones(ROWS // 2), "retrieval_hits": torch.ones(ROWS // 2)}
    found["embedding_gradient"] = torch.ones(ROWS, 4)
    vectors = [torch.ones(ROWS, 4, requires_grad=True) for _ in of_ranks]
    for own, vector in zip(of_ranks, vectors, strict=True):
        task.losses({"embedding": vector}, {**own, **found})["contrastive"].backward()
    assert torch.equal(sum(vector.grad for vector in vectors), found["embedding_gradient"])
    assert sum(len(task.observations({}, {**own, **found})["contrastive_loss"]) for own in of_ranks) == ROWS // 2


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_length_that_ranks_cannot_share_is_an_error(rank: int) -> None:
    task = Embedding(EmbeddingConfig(name="embedding"))
    with pytest.raises(ValueError, match="does not divide the 10 positions"):
        task.split_positions({"tokens": TOKENS[:, :10]}, ZigzagPositions(RANKS, rank))
