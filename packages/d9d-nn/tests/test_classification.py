from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.registry.registry import Registry
from d9d_nn import plugin
from d9d_nn.causal_lm.config import CausalLMConfig
from d9d_nn.causal_lm.task import CausalLM
from d9d_nn.classification.config import ClassificationConfig
from d9d_nn.classification.task import Classification
from d9d_nn.heads.config import CausalLMHeadConfig, ClassificationHeadConfig, EmbeddingHeadConfig
from torch.nn import functional

TASK = Classification(ClassificationConfig())
LABELS = torch.tensor([2, -100, 0])
MICROBATCH = {"tokens": torch.zeros(3, 4, dtype=torch.long), "labels": LABELS, "lengths": torch.tensor([4, 1, 2])}
LM, TOPIC = CausalLMHeadConfig(), ClassificationHeadConfig(num_classes=3)


def model(**heads: object) -> SimpleNamespace:
    return SimpleNamespace(vocab_size=64, max_positions=32, heads=heads)


def test_weight_is_the_number_of_labels() -> None:
    weight = TASK.weights(MICROBATCH)["cross_entropy"]
    assert (weight.shape, weight.dtype, weight.item()) == ((), torch.float32, 2)
    assert TASK.weights(MICROBATCH).keys() == TASK.coefficients.keys()
    assert TASK.count({"tokens": MICROBATCH["tokens"]}) == 12
    assert TASK.count(MICROBATCH | {"lengths": torch.tensor([4, 1, 2])}) == 7  # padding counts nowhere


@pytest.mark.thorough
def test_loss_is_the_sum_over_samples_that_count() -> None:
    logits = torch.randn(3, 3, requires_grad=True)
    loss = TASK.losses({"class_logits": logits}, MICROBATCH)["cross_entropy"]
    loss.backward()
    expected = sum(functional.cross_entropy(logits[i], LABELS[i]) for i in (0, 2))
    torch.testing.assert_close(loss, expected)
    assert not logits.grad[1].any()


def test_loss_of_narrow_logits_is_computed_in_float32() -> None:
    logits = torch.randn(3, 3).to(torch.bfloat16)
    loss = TASK.losses({"class_logits": logits}, MICROBATCH)["cross_entropy"]
    assert loss.dtype == torch.float32
    assert loss == TASK.losses({"class_logits": logits.float()}, MICROBATCH)["cross_entropy"]


def test_inputs_pass_on_what_the_microbatch_has_but_no_labels() -> None:
    inputs = TASK.inputs({**MICROBATCH, "positions": LABELS})
    assert inputs.first.keys() == {"tokens"}
    assert inputs.shared.keys() == {"lengths", "positions"}


def test_observations_are_those_of_the_record() -> None:
    seen = TASK.observations({"class_logits": torch.ones(3, 3)}, MICROBATCH)
    assert seen.keys() == Registry.of(plugin).find("task", "classification").spec.observes


def test_a_named_head_is_read_with_and_without_a_prefix() -> None:
    task = Classification(ClassificationConfig(head="topic"))
    logits, other = torch.randn(3, 3), torch.randn(3, 3)
    several = task.losses({"other/class_logits": other, "topic/class_logits": logits}, MICROBATCH)
    assert several["cross_entropy"] == task.losses({"class_logits": logits}, MICROBATCH)["cross_entropy"]
    token_loss = {"a/token_loss": torch.ones(1, 2), "b/token_loss": torch.zeros(1, 2)}
    assert CausalLM(CausalLMConfig(head="a")).losses(token_loss, {})["cross_entropy"] == 2
    assert CausalLM(CausalLMConfig(head="b")).losses(token_loss, {})["cross_entropy"] == 0


def test_an_output_that_the_model_did_not_compute_is_named() -> None:
    with pytest.raises(JobError, match="the model did not return 'class_logits'; it returned: token_loss"):
        TASK.losses({"token_loss": torch.zeros(1)}, MICROBATCH)
    with pytest.raises(JobError, match="the model did not return 'token_loss'; it returned: class_logits"):
        CausalLM(CausalLMConfig()).losses({"class_logits": torch.zeros(1)}, {})


def test_check_accepts_the_only_head_or_the_named_one() -> None:
    TASK.check(model(topic=TOPIC), {"num_classes": 3})
    TASK.check(SimpleNamespace(), {"num_classes": 3})
    Classification(ClassificationConfig(head="topic")).check(model(words=LM, topic=TOPIC), {"num_classes": 2})
    CausalLM(CausalLMConfig(head="words")).check(model(words=LM, topic=TOPIC), {})


@pytest.mark.parametrize(
    ("heads", "head", "text"),
    [
        ({"a": LM, "b": TOPIC}, None, r"several heads, name one of kind classification: a \(causal_lm\), b \(class"),
        ({"a": LM, "topic": TOPIC}, "topci", "the model has no head 'topci'; did you mean 'topic'"),
        ({"a": LM, "b": TOPIC}, "a", r"needs a head of kind classification, the model has: a \(causal_lm\)"),
        ({"a": EmbeddingHeadConfig()}, None, "needs a head of kind classification"),
    ],
)
def test_check_names_the_heads_there_are(heads: dict, head: str | None, text: str) -> None:
    with pytest.raises(JobError, match=text):
        Classification(ClassificationConfig(head=head)).check(model(**heads), {})


def test_language_modelling_needs_its_head_too() -> None:
    with pytest.raises(JobError, match="needs a head of kind causal_lm"):
        CausalLM(CausalLMConfig()).check(model(topic=TOPIC), {})
    with pytest.raises(JobError, match="the model lists no heads, so there is no head 'words'"):
        CausalLM(CausalLMConfig(head="words")).check(SimpleNamespace(), {})


def test_check_compares_classes_tokens_and_positions() -> None:
    with pytest.raises(JobError) as error:
        TASK.check(model(topic=TOPIC), {"num_classes": 4, "vocab_size": 65, "sequence_length": 33})
    assert [line.partition(";")[0] for line in str(error.value).splitlines()] == [
        "model.vocab_size: the model has 64 token ids, the data has 65",
        "model.max_positions: the model has 32 positions, the data has 33",
        "model.heads: the head has 3 classes, the data has 4",
    ]


def test_a_head_of_one_class_is_for_scores_and_learns_no_labels() -> None:
    score = ClassificationHeadConfig(num_classes=1)
    with pytest.raises(JobError, match="cannot learn from labels"):
        TASK.check(model(topic=score), {})
