"""Inference tasks keep what holds for every one, for padded and for packed samples."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.types import Microbatch, State
from d9d_nn.heads.config import ClassificationHeadConfig, EmbeddingHeadConfig, TokenClassificationHeadConfig
from d9d_nn.heads.pooling import pool
from d9d_nn.inference.classes import Classes, Rewards
from d9d_nn.inference.config import ClassesConfig, GenerationsConfig, HiddenStatesConfig, RewardsConfig
from d9d_nn.inference.generations import Generations
from d9d_nn.inference.hidden_states import HiddenStates
from d9d_testing.suites.inference.task import InferenceTaskSuite
from d9d_testing.tolerances import assert_close_values
from torch import Tensor

LENGTHS = torch.tensor([4, 6, 2, 5])
#: Rows of packed samples: where each ends, and which it is.
ENDS = torch.tensor([[1, 4, 0], [6, 0, 0], [1, 2, 0], [2, 3, 5]])
DOCUMENTS = torch.tensor([[0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0], [0, 1, 2, 2, 2, 2], [0, 0, 1, 2, 2, 3]])
PADDED: Microbatch = {"tokens": torch.arange(24).view(4, 6), "lengths": LENGTHS, "rows": torch.tensor([3, 0, 1, 2])}
PACKED: Microbatch = {
    **PADDED, "rows": torch.tensor([3, 5, 6, 0]), "ends": ENDS, "documents": DOCUMENTS,
}  # fmt: skip
TARGETS = torch.arange(24).view(4, 6).masked_fill(torch.arange(6) >= LENGTHS.unsqueeze(1), -100)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class TestLogProbsOfRows(InferenceTaskSuite):
    target = "log_probs"

    def case(self) -> tuple[Mapping[str, Tensor], Microbatch]:
        return {"token_loss": drawn(4, 6).abs()}, {**PADDED, "targets": TARGETS}


class TestLogProbsOfTokensOfPackedRows(InferenceTaskSuite):
    target = "log_probs"
    config: ClassVar[Mapping[str, Any]] = {"per": "token"}
    facts: ClassVar[State] = {"packed": True}

    def case(self) -> tuple[Mapping[str, Tensor], Microbatch]:
        return {"token_loss": drawn(4, 6).abs()}, {**PACKED, "targets": TARGETS}


class TestPerplexity(InferenceTaskSuite):
    target = "perplexity"
    facts: ClassVar[State] = {"packed": True}

    def case(self) -> tuple[Mapping[str, Tensor], Microbatch]:
        return {"token_loss": drawn(4, 6).abs()}, {**PACKED, "targets": TARGETS}


class TestGenerations(InferenceTaskSuite):
    target = "generations"

    def case(self) -> tuple[Mapping[str, Tensor], Microbatch]:
        new = torch.tensor([[5, 6, -1], [7, 8, 9], [1, -1, -1], [2, 3, 4]])
        return {"new_tokens": new, "ended": torch.tensor([True, False, True, True])}, PADDED


class TestClasses(InferenceTaskSuite):
    target = "classes"
    facts: ClassVar[State] = {"labels": ["a", "b", "c"]}
    model = SimpleNamespace(heads={"c": ClassificationHeadConfig(num_classes=3)})

    def case(self) -> tuple[Mapping[str, Tensor], Microbatch]:
        return {"class_logits": drawn(4, 3)}, PADDED


class TestClassesOfTokens(InferenceTaskSuite):
    target = "token_classes"
    facts: ClassVar[State] = {"packed": True}
    model = SimpleNamespace(heads={"c": TokenClassificationHeadConfig(num_classes=3)})

    def case(self) -> tuple[Mapping[str, Tensor], Microbatch]:
        return {"class_logits": drawn(4, 6, 3)}, PACKED


class TestRewardsOfPackedRows(InferenceTaskSuite):
    target = "rewards"
    facts: ClassVar[State] = {"packed": True}
    model = SimpleNamespace(heads={"c": ClassificationHeadConfig(num_classes=1)})

    def case(self) -> tuple[Mapping[str, Tensor], Microbatch]:
        return {"class_logits": drawn(4, 3, 1)}, PACKED


class TestEmbeddingsOfPackedRows(InferenceTaskSuite):
    target = "embeddings"
    facts: ClassVar[State] = {"packed": True}
    model = SimpleNamespace(heads={"e": EmbeddingHeadConfig()})

    def case(self) -> tuple[Mapping[str, Tensor], Microbatch]:
        return {"embedding": drawn(4, 3, 5)}, PACKED


class TestHiddenStates(InferenceTaskSuite):
    target = "hidden_states"
    config: ClassVar[Mapping[str, Any]] = {"layers": [0, -1], "pooling": "mean"}
    facts: ClassVar[State] = {"packed": True}

    def ready(self) -> Any:
        task = super().ready()
        task.modules(["layers.0", "layers.0.ffn", "layers.1"])
        return task

    def case(self) -> tuple[Mapping[str, Tensor], Microbatch]:
        return {"module/layers.0": drawn(4, 6, 5), "module/layers.1": drawn(4, 6, 5) + 1}, PACKED


# --- rows of packed samples


@pytest.mark.thorough
def test_pooled_rows_of_packed_samples_are_those_of_each_alone() -> None:
    hidden = drawn(4, 6, 5)
    for pooling in ("last", "mean"):
        pooled = pool(hidden, LENGTHS, pooling, ENDS)  # type: ignore[arg-type]
        for sample, ends in enumerate(ENDS.tolist()):
            for index, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                if end:
                    alone = pool(hidden[sample : sample + 1, begin:end], None, pooling)  # type: ignore[arg-type]
                    assert_close_values(pooled[sample, index], alone[0])


def test_labels_must_be_one_for_each_class() -> None:
    model = SimpleNamespace(heads={"c": ClassificationHeadConfig(num_classes=3)})
    with pytest.raises(JobError, match="2 names for a head of 3 classes"):
        Classes(ClassesConfig(labels=("a", "b"))).check(model, {})
    with pytest.raises(JobError, match="rewards need a classification head of one class, this one has 3"):
        Rewards(RewardsConfig()).check(model, {})


def test_layers_that_a_model_lacks_are_refused() -> None:
    names = ["embedding", "layers.0", "layers.1", "layers.1.ffn"]
    assert HiddenStates(HiddenStatesConfig(layers=(-2, 1))).modules(names) == ["layers.0", "layers.1"]
    for layer in (2, -3):
        with pytest.raises(JobError, match=f"there is no layer {layer} in a model of 2"):
            HiddenStates(HiddenStatesConfig(layers=(layer,))).modules(names)


def test_the_finished_fraction_of_generations_is_a_share_of_the_rows() -> None:
    task = Generations(GenerationsConfig())
    rows = {"row": [0, 1, 2, 3], "tokens": [[1], [], [2, 3], [4]], "finished": [True, False, False, True]}
    sums = task.tally(rows)
    assert sums == {"rows": 4.0, "tokens": 4.0, "finished": 2.0}
    assert task.finalize(sums) == {"rows": 4.0, "new_tokens": 4.0, "finished": 0.5}
    assert task.finalize({"rows": 0.0, "tokens": 0.0, "finished": 0.0})["finished"] == 0.0


def test_rewards_are_read_from_the_named_head() -> None:
    several = {"a/class_logits": torch.zeros(4, 1), "b/class_logits": torch.ones(4, 1)}
    assert Rewards(RewardsConfig(head="b")).process(several, PADDED)["values"].equal(torch.ones(4, 1))
