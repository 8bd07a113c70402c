"""Inputs and targets of multi-token prediction stay inside documents and count only where the targets count."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from d9d_core.errors import JobError
from d9d_nn.causal_lm.config import CausalLMConfig
from d9d_nn.causal_lm.task import CausalLM
from d9d_nn.decoder.multi_token_config import MultiTokenPrediction
from d9d_nn.distillation.config import DistillationConfig
from d9d_nn.distillation.task import Distillation
from d9d_nn.further_targets import further_targets
from d9d_nn.heads.config import CausalLMHeadConfig
from d9d_nn.preference.config import DpoConfig
from d9d_nn.preference.task import Dpo
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

Row = tuple[list[int], int]  # lengths of the documents, padding after them


def rows(draw: st.DrawFn) -> list[Row]:
    documents = st.lists(st.integers(1, 5), min_size=1, max_size=4)
    found = [draw(documents) for _ in range(draw(st.integers(1, 3)))]
    longest = max(map(sum, found)) + draw(st.integers(0, 2))
    return [(lengths, longest - sum(lengths)) for lengths in found]


def batch_of(given_rows: list[Row]) -> dict[str, Tensor]:
    """Tokens 1, 2, ... in each row; the last token of a document and every fourth other token have no target."""
    batch: dict[str, list[list[int]]] = {"tokens": [], "targets": [], "documents": []}
    for lengths, padding in given_rows:
        size = sum(lengths)
        tokens = list(range(1, size + 1)) + [0] * padding
        documents = [number for number, length in enumerate(lengths) for _ in range(length)] + [99] * padding
        inside = [place + 1 < size and documents[place] == documents[place + 1] for place in range(size)]
        targets = [place + 2 if inside[place] and place % 4 != 3 else -100 for place in range(size)] + [-100] * padding
        for name, values in (("tokens", tokens), ("targets", targets), ("documents", documents)):
            batch[name].append(values)
    lengths_of = {"lengths": torch.tensor([sum(lengths) for lengths, _ in given_rows])}
    return {name: torch.tensor(values) for name, values in batch.items()} | lengths_of


@given(st.composite(rows)(), st.integers(1, 6))
def test_each_depth_reads_and_predicts_later_tokens_of_the_same_document(given_rows: list[Row], depths: int) -> None:
    batch = batch_of(given_rows)
    found = further_targets(**batch, depths=depths)
    for row, (lengths, _) in enumerate(given_rows):
        first = 0
        for length in lengths:
            for place, depth in ((place, depth) for place in range(length) for depth in range(1, depths + 1)):
                later, at = first + place + depth, (row, first + place, depth - 1)
                inside = place + depth < length
                assert found["mtp_tokens"][at] == (batch["tokens"][row, later] if inside else -1)
                assert found["mtp_targets"][at] == (batch["targets"][row, later] if inside else -100)
                if place >= length - depth - 1:  # the last depth + 1 tokens of a document
                    assert found["mtp_targets"][at] == -100
            first += length
        assert (found["mtp_tokens"][row, first:] == -1).all()
        assert (found["mtp_targets"][row, first:] == -100).all()


def test_a_sample_is_one_document_without_documents_and_lengths() -> None:
    tokens = torch.tensor([[5, 6, 7]])
    found = further_targets(tokens, torch.tensor([[6, 7, 8]]), 4)
    assert found["mtp_tokens"][0].T.tolist() == [[6, 7, -1], [7, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert found["mtp_targets"][0].T.tolist() == [[7, 8, -100], [8, -100, -100], [-100] * 3, [-100] * 3]


class Model:
    """Config of a model that predicts two further tokens."""

    heads: ClassVar = {"causal_lm": CausalLMHeadConfig()}
    mtp: ClassVar = MultiTokenPrediction(depths=2)


class Inner:
    """Positions of the second of two ranks, which has the inner quarters."""

    ranks = 2

    def own(self, tensor: Tensor) -> Tensor:
        quarter = tensor.shape[1] // 4
        return tensor[:, quarter : 3 * quarter]


def task_of(model: object = Model) -> CausalLM:
    task = CausalLM(CausalLMConfig())
    task.check(model, {})
    return task


def test_the_task_shifts_whole_samples_before_they_are_split() -> None:
    batch = {name: tensor for name, tensor in batch_of([([5, 3], 0)]).items() if name != "lengths"}
    whole = further_targets(**batch, depths=2)
    assert task_of().inputs(batch).shared["mtp_tokens"].equal(whole["mtp_tokens"])
    own = task_of().split_positions(batch, Inner())
    given = task_of().inputs(own).shared
    for name, tensor in whole.items():
        assert given[name].equal(tensor[:, 2:6]), name


def test_a_model_without_further_tokens_gets_no_such_inputs() -> None:
    class Plain:
        heads: ClassVar = Model.heads

    assert set(task_of(Plain).inputs(batch_of([([4], 0)])).shared) == {"documents", "lengths", "targets"}


def test_weights_of_targets_are_refused_with_further_tokens() -> None:
    batch = batch_of([([4], 0)])
    with pytest.raises(JobError, match=r"model.mtp: the dataset gives weights of targets.*model.mtp.depths to 0"):
        task_of().inputs({**batch, "weights": torch.ones(1, 4)})


def tasks_of_next_tokens() -> list[Any]:
    teacher = DistillationConfig.model_construct(name="distillation", teacher=Model(), head=None)
    return [Distillation(teacher), Dpo(DpoConfig())]


@pytest.mark.parametrize("task", tasks_of_next_tokens(), ids=lambda task: type(task).__name__)
def test_tasks_that_train_next_tokens_alone_refuse_the_model(task: Any) -> None:
    with pytest.raises(JobError, match="model.mtp: depths is 2, but task '.*' trains no further tokens"):
        task.check(Model, {})


def test_a_weight_without_depths_is_refused() -> None:
    assert MultiTokenPrediction(depths=1, weight=0.1).terms() == ("mtp_loss",)
    assert MultiTokenPrediction(depths=2).terms() == ("mtp_loss_1", "mtp_loss_2")
    with pytest.raises(
        ValidationError, match=r"weight has no effect without depths; set depths to 1 or more, or remove weight"
    ):
        MultiTokenPrediction(weight=0.1)
