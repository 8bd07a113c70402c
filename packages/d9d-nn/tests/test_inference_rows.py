"""Rows and totals of the inference tasks, computed by hand, for padded and for packed samples."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.inference import ROW
from d9d_nn.distillation.config import DistillationConfig
from d9d_nn.distillation.task import Distillation
from d9d_nn.heads.config import ClassificationHeadConfig, TokenClassificationHeadConfig
from d9d_nn.inference.classes import Classes, Rewards, TokenClasses, label_problems, labels_of
from d9d_nn.inference.config import (
    ClassesConfig,
    EmbeddingsConfig,
    GenerationsConfig,
    HiddenStatesConfig,
    LogProbsConfig,
    PerplexityRowsConfig,
    RewardsConfig,
    TokenClassesConfig,
)
from d9d_nn.inference.embeddings import Embeddings
from d9d_nn.inference.generations import Generations
from d9d_nn.inference.hidden_states import HiddenStates
from d9d_nn.inference.log_probs import LogProbs, PerplexityRows, _exp
from d9d_nn.inference.rows import row_places

#: Two samples of three positions; the second has one position of padding.
MICROBATCH = {
    "tokens": torch.zeros(2, 3, dtype=torch.int64),
    "targets": torch.tensor([[7, -100, 8], [9, 1, -100]]),
    "lengths": torch.tensor([3, 2]),
    "documents": torch.tensor([[0, 0, 1], [0, 1, 1]]),
}
LOSSES = {"token_loss": torch.tensor([[0.5, 1.0, 2.0], [3.0, 4.0, 5.0]])}
FIRSTS = torch.tensor([4, 6])  # numbers of the first row of each sample


def ready(task: Any, packed: bool) -> Any:
    task._packed = packed
    return task


def kept(task: Any, outputs: Any, microbatch: Any = MICROBATCH) -> dict[str, Any]:
    return {**task.process(outputs, microbatch), "rows": FIRSTS}


def listed(columns: Any) -> dict[str, list[Any]]:
    return {name: [one.tolist() if hasattr(one, "tolist") else one for one in of] for name, of in columns.items()}


def test_rows_are_whole_samples_without_padding_or_documents_of_samples() -> None:
    def places(packed: bool, **tensors: Any) -> list[tuple[int, int, int, int, int]]:
        found = row_places({"rows": FIRSTS, **tensors}, 3, packed)
        return [(one.row, one.sample, one.index, one.positions.start, one.positions.stop) for one in found]

    lengths, documents = ({name: MICROBATCH[name]} for name in ("lengths", "documents"))
    assert places(False) == [(4, 0, 0, 0, 3), (6, 1, 0, 0, 3)]
    assert places(False, **lengths, **documents) == [(4, 0, 0, 0, 3), (6, 1, 0, 0, 2)]
    assert places(True, **documents) == [(4, 0, 0, 0, 2), (5, 0, 1, 2, 3), (6, 1, 0, 0, 1), (7, 1, 1, 1, 3)]
    assert places(True, **lengths, **documents)[2:] == [(6, 1, 0, 0, 1), (7, 1, 1, 1, 2)]


@pytest.mark.parametrize(
    ("packed", "rows", "targets", "log_probs"),
    [
        (False, [4, 6], [[7, 8], [9, 1]], [[-0.5, -2.0], [-3.0, -4.0]]),
        (True, [4, 5, 6, 7], [[7], [8], [9], [1]], [[-0.5], [-2.0], [-3.0], [-4.0]]),
    ],
)
def test_log_probabilities_are_those_of_the_targets_that_count(
    packed: bool, rows: list[int], targets: list[list[int]], log_probs: list[list[float]]
) -> None:
    per_token, per_row = (ready(LogProbs(LogProbsConfig(per=per)), packed) for per in ("token", "row"))
    found = listed(per_token.rows(kept(per_token, LOSSES)))
    sums = [sum(of) for of in log_probs]
    of_rows = {ROW: rows, "tokens": [len(of) for of in targets], "log_prob": sums}
    assert found == {**of_rows, "targets": targets, "log_probs": log_probs}
    assert listed(per_row.rows(kept(per_row, LOSSES))) == of_rows
    assert list(per_token.columns) == list(found)
    assert list(per_row.columns) == list(of_rows)
    assert per_row.tally(of_rows) == {"tokens": 4.0, "log_prob": -9.5}
    assert per_row.finalize({"tokens": 4.0, "log_prob": -9.5}) == {"tokens": 4.0, "mean_log_prob": -2.375}
    assert per_row.finalize({"tokens": 0.0, "log_prob": 0.0}) == {"tokens": 0.0, "mean_log_prob": 0.0}


def test_a_perplexity_is_that_of_the_mean_loss_of_all_targets() -> None:
    task = ready(PerplexityRows(PerplexityRowsConfig()), False)
    targets = torch.tensor([[7, -100, 8], [-100, -100, -100]])
    found = listed(task.rows(kept(task, LOSSES, {**MICROBATCH, "targets": targets})))
    assert found == {ROW: [4, 6], "tokens": [2, 0], "loss": [1.25, 0.0], "perplexity": [math.exp(1.25), 1.0]}
    assert list(task.columns) == list(found)
    assert task.tally({"tokens": [2, 3], "loss": [1.25, 2.0]}) == {"tokens": 5.0, "loss": 8.5}
    assert task.finalize({"tokens": 5.0, "loss": 8.5}) == {"tokens": 5.0, "loss": 1.7, "perplexity": math.exp(1.7)}
    assert task.finalize({"tokens": 0.0, "loss": 0.0}) == {"tokens": 0.0, "loss": 0.0, "perplexity": 1.0}
    assert (_exp(699.0), _exp(700.0)) == (math.exp(699.0), math.inf)


def test_likelihoods_and_teachers_need_targets() -> None:
    model = SimpleNamespace(vocab_size=5)
    teacher = Distillation(DistillationConfig.model_construct(name="distillation", teacher=model))
    for inputs, name in (
        (LogProbs(LogProbsConfig()).inputs, "log_probs"),
        (PerplexityRows(PerplexityRowsConfig()).inputs, "perplexity"),
        (teacher.first_inputs, "distillation"),
    ):
        with pytest.raises(JobError, match=f"^data: task '{name}' reads targets, but the dataset gives tokens; use a"):
            inputs({"tokens": MICROBATCH["tokens"]})
    assert set(LogProbs(LogProbsConfig()).inputs(MICROBATCH).shared) == {"targets", "documents", "lengths"}


LOGITS = torch.tensor([[0.0, math.log(3.0)], [math.log(3.0), 0.0]])


def test_classes_have_names_or_numbers_and_probabilities() -> None:
    task, named = (ready(Classes(ClassesConfig(labels=labels)), False) for labels in (None, ("no", "yes")))
    found = named.rows(kept(named, {"class_logits": LOGITS}))
    assert [one.tolist() for one in found.pop("probabilities")] == [
        pytest.approx([0.25, 0.75]),
        pytest.approx([0.75, 0.25]),
    ]
    assert found == {ROW: [4, 6], "class": [1, 0], "label": ["yes", "no"]}
    assert task.rows(kept(task, {"class_logits": LOGITS}))["label"] == ["1", "0"]
    assert list(task.columns) == [ROW, "class", "label", "probabilities"]
    packed = ready(Classes(ClassesConfig()), True)
    several = torch.stack([LOGITS, LOGITS.flip(0)])  # two rows of each sample
    assert packed.rows(kept(packed, {"class_logits": several}))["class"] == [1, 0, 0, 1]
    task.check(SimpleNamespace(heads={"c": ClassificationHeadConfig(num_classes=2)}), {"labels": ["no", "yes"]})
    assert task.rows(kept(task, {"class_logits": LOGITS}))["label"] == ["yes", "no"]
    assert task.tally({ROW: [1, 2, 3]}) == {"rows": 3.0}
    assert task.finalize({"rows": 3.0}) == {"rows": 3.0}


def test_names_of_classes_come_from_the_job_or_else_from_the_data() -> None:
    assert labels_of(("a",), {"labels": ["b"]}) == ("a",)
    assert labels_of(None, {"labels": ["b", 3]}) == ("b", "3")
    assert labels_of(None, {"labels": "b"}) is None
    head = SimpleNamespace(num_classes=2)
    assert label_problems(("a", "b"), head) == label_problems(None, head) == label_problems(("a",), object()) == []
    assert label_problems(("a",), head) == [
        "task.labels: 1 names for a head of 2 classes; give one name for each class, or none"
    ]


def test_a_token_has_a_class_and_a_row_a_score() -> None:
    tokens = ready(TokenClasses(TokenClassesConfig(labels=("x", "y"))), True)
    logits = torch.stack([LOGITS[[1, 0, 0]], LOGITS[[0, 1, 0]]])
    assert tokens.rows(kept(tokens, {"class_logits": logits})) == {
        ROW: [4, 5, 6, 7], "tokens": [2, 1, 1, 1], "labels": [["x", "y"], ["y"], ["y"], ["x"]],
    }  # fmt: skip
    assert list(tokens.columns) == [ROW, "tokens", "labels"]
    named = TokenClasses(TokenClassesConfig())
    model = SimpleNamespace(heads={"c": TokenClassificationHeadConfig(num_classes=2)})
    named.check(model, {"labels": ["no", "yes"], "packed": True})
    assert named.rows(kept(named, {"class_logits": logits}))["labels"] == [["no", "yes"], ["yes"], ["yes"], ["no"]]
    rewards = ready(Rewards(RewardsConfig()), False)
    assert rewards.rows(kept(rewards, {"class_logits": torch.tensor([[0.5], [-2.0]])})) == {
        ROW: [4, 6], "reward": [0.5, -2.0],
    }  # fmt: skip
    assert rewards.tally({ROW: [4, 6, 7], "reward": [0.5, -2.0, 3.0]}) == {"rows": 3.0, "reward": 1.5}
    assert rewards.finalize({"rows": 3.0, "reward": 1.5}) == {"rows": 3.0, "mean_reward": 0.5}
    assert rewards.finalize({"rows": 0.0, "reward": 0.0}) == {"rows": 0.0, "mean_reward": 0.0}


def test_embeddings_are_vectors_of_the_rows() -> None:
    task = ready(Embeddings(EmbeddingsConfig()), False)
    vectors = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    found = task.rows(kept(task, {"embedding": vectors}))
    assert listed(found) == {ROW: [4, 6], "embedding": [[1.0, 2.0], [3.0, 4.0]]}
    assert found["embedding"][0].dtype == "float32"
    assert list(task.columns) == [ROW, "embedding"]


def test_generations_are_listed_up_to_their_end() -> None:
    task = Generations(GenerationsConfig(max_new_tokens=3, temperature=0.5, seed=7, stop=(2, 5)))
    new = {"new_tokens": torch.tensor([[5, -1, -1], [0, 8, 9]]), "ended": torch.tensor([True, False])}
    expected = {
        ROW: [4, 6], "prompt_tokens": [3, 2], "tokens": [[5], [0, 8, 9]], "text": [None, None],
        "finished": [True, False],
    }  # fmt: skip
    assert task.rows(kept(task, new)) == expected
    assert list(task.columns) == list(expected)
    whole = {"tokens": MICROBATCH["tokens"]}
    assert task.rows(kept(task, new, whole))["prompt_tokens"] == [3, 3]
    task.use_text_of(lambda tokens: "-".join(map(str, tokens)))
    assert task.rows(kept(task, new))["text"] == ["5", "0-8-9"]
    chosen = task.continuation
    assert (chosen.max_new_tokens, chosen.temperature, chosen.seed, chosen.stop) == (3, 0.5, 7, {2, 5})
    assert task.logits({"logits": LOGITS}) is LOGITS
    assert task.logits({}) is None


def test_new_tokens_need_positions_behind_a_whole_sample() -> None:
    task = Generations(GenerationsConfig(max_new_tokens=3))
    model = SimpleNamespace(max_positions=10, vocab_size=5)
    task.check(model, {"sequence_length": 7})
    task.check(SimpleNamespace(), {"sequence_length": 70})
    with pytest.raises(
        JobError, match=r"^task.max_new_tokens: prompts of 8 positions .* and 3 new tokens are more than"
    ):
        task.check(model, {"sequence_length": 8})
    with pytest.raises(JobError, match="^data: a sample holds several rows, and only whole samples can be continued"):
        task.check(model, {"packed": True})
    with pytest.raises(JobError, match="'generations' continues texts with causal attention, but .* is prefix; use"):
        task.check(SimpleNamespace(attention_mask="prefix"), {})


@pytest.mark.parametrize(
    ("pooling", "first", "second"),
    [("last", [5.0], [9.0]), ("mean", [3.0], [8.0]), ("none", [[1.0], [3.0], [5.0]], [[7.0], [9.0]])],
)
def test_hidden_states_are_pooled_over_the_positions_of_a_row(pooling: Any, first: Any, second: Any) -> None:
    task = ready(HiddenStates(HiddenStatesConfig(layers=(0, -1), pooling=pooling)), False)
    assert task.modules(["model.layers.0", "model.layers.1", "model.layers.1.ffn"]) == [
        "model.layers.0", "model.layers.1",
    ]  # fmt: skip
    states = torch.tensor([[[1.0], [3.0], [5.0]], [[7.0], [9.0], [11.0]]])
    outputs = {"module/model.layers.0": states, "module/model.layers.1": 2 * states.bfloat16()}
    found = listed(task.rows(kept(task, outputs)))
    assert found.pop("layer_minus_1") == [(2 * torch.tensor(one)).tolist() for one in (first, second)]
    assert found == {ROW: [4, 6], "tokens": [3, 2], "layer_0": [first, second]}
    assert list(task.columns) == [ROW, "tokens", "layer_0", "layer_minus_1"]
    assert task.of_positions == {"layer_0", "layer_minus_1"}
    assert task.tally({ROW: [4, 6], "tokens": [3, 2]}) == {"rows": 2.0, "tokens": 5.0}
    one = HiddenStates(HiddenStatesConfig(layers=(1, -1)))
    assert one.modules(["layers.0", "layers.1"]) == ["layers.1"]
    with pytest.raises(JobError, match=r"^task.layers: there is no layer 1 in a model of 0 layers"):
        one.modules(["embedding"])
