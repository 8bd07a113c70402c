from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from d9d_nn.distillation import divergence as module
from d9d_nn.distillation.config import DistillationConfig
from d9d_nn.distillation.divergence import divergence
from d9d_nn.distillation.task import Distillation
from d9d_nn.distillation.vocabularies import check_vocabularies
from torch import Tensor
from torch.nn import functional

COUNTED = torch.tensor([True, False, True, True, True, True])


def tensors(words: int = 11, other: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(6, words, generator=generator, dtype=torch.float64)
    return logits.float().requires_grad_(), 3 * torch.randn(6, other, generator=generator)


def expected(logits: Tensor, other: Tensor, temperature: float) -> Tensor:
    """torch's own divergence, of probabilities over all words."""
    p = torch.softmax(other / temperature, -1)
    p = functional.pad(p, (0, logits.shape[1] - p.shape[1]))
    each = functional.kl_div(torch.log_softmax(logits / temperature, -1), p, reduction="none").sum(-1)
    return each * temperature**2 * COUNTED


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("other_words", [11, 7])
@pytest.mark.parametrize("elements", [1, 1 << 20])
def test_divergence_and_its_gradient_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, temperature: float, other_words: int, elements: int
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", elements)
    logits, other = tensors(other=other_words)
    factors = torch.arange(1.0, 7.0)
    found = divergence(logits, other, None, COUNTED, temperature)
    (gradient,) = torch.autograd.grad((found * factors).sum(), logits)
    right = expected(logits, other, temperature)
    (right_gradient,) = torch.autograd.grad((right * factors).sum(), logits)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, right_gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("elements", "rows"), [(33, [3, 3]), (43, [3, 3]), (44, [4, 2]), (66, [6]), (5, [1] * 6)])
def test_divergence_is_computed_from_as_many_logits_as_fit_into_a_chunk(
    monkeypatch: pytest.MonkeyPatch, elements: int, rows: list[int]
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", elements)
    logits, other = tensors()
    found: list[int] = []
    for name in ("log_softmax", "softmax"):  # forward and backward
        function = getattr(functional, name)
        monkeypatch.setattr(
            module.functional, name, lambda x, dim, of=function: (found.append(len(x)), of(x, dim=dim))[1]
        )
    losses = divergence(logits, other, None, COUNTED)
    assert found == [length for length in rows for _ in range(2)]
    found.clear()
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert found == [length for length in rows for _ in range(2)]


def test_divergence_from_some_words_is_that_from_a_distribution_over_them_alone() -> None:
    logits, other = tensors()
    top = other.topk(4, dim=-1)
    alone = torch.full_like(other, -torch.inf).scatter(1, top.indices, top.values)
    found = divergence(logits, top.values, top.indices, COUNTED)
    torch.testing.assert_close(found, divergence(logits, alone, None, COUNTED))
    gradients = [
        torch.autograd.grad(divergence(logits, values, words, COUNTED).sum(), logits)[0]
        for values, words in ((top.values, top.indices), (alone, None))
    ]
    torch.testing.assert_close(*gradients)


def test_divergence_from_one_word_is_its_cross_entropy() -> None:
    logits, _ = tensors()
    words = torch.arange(6)
    found = divergence(logits, torch.zeros(6, 1), words.unsqueeze(1), COUNTED)
    torch.testing.assert_close(found, functional.cross_entropy(logits, words, reduction="none") * COUNTED)


def test_tokens_that_do_not_count_pass_nothing_on_even_if_they_are_nan() -> None:
    logits, other = tensors()
    with torch.no_grad():
        logits[1] = torch.nan
    found = divergence(logits, other, None, COUNTED)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert found.isfinite().all()
    assert gradient.isfinite().all()
    assert not gradient[1].any()


def test_a_narrow_gradient_has_the_dtype_of_the_logits() -> None:
    logits, other = tensors()
    narrow = logits.detach().bfloat16().requires_grad_()
    divergence(narrow, other, None, COUNTED).sum().backward()  # type: ignore[no-untyped-call]
    assert narrow.grad is not None
    assert narrow.grad.dtype == torch.bfloat16


TOKENIZER = '{"model": {"vocab": {"a": 0, "b": %d}}, "added_tokens": [{"content": "<e>", "id": %d}]}'
#: Tokenizers of another structure, which count as absent.
DAMAGED = (
    "[]",
    '{"model": 1}',
    '{"model": {"vocab": {}}, "added_tokens": [{}]}',
    '{"model": {"vocab": {}}, "added_tokens": 1}',
)


@pytest.mark.parametrize(
    ("theirs", "problem"),
    [
        (TOKENIZER % (1, 2), None),
        (TOKENIZER % (2, 1), "'b' is 2 for the teacher, 1 here"),
        ('{"model": {"vocab": {"a": 0, "b": 1}}}', "and lacks '<e>'"),
        ('{"model": {"vocab": [["a", 0.5], ["b", 0.5], ["<e>", 0]]}}', None),
        *((damaged, "the teacher has 16 token ids, the model 8") for damaged in DAMAGED),
    ],
)
def test_padded_matrices_may_differ_where_tokenizers_agree(tmp_path: Path, theirs: str, problem: str | None) -> None:
    for name, content in (("model", TOKENIZER % (1, 2)), ("teacher", theirs)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(content)
    model = SimpleNamespace(vocab_size=8, pretrained=str(tmp_path / "model"))
    teacher = SimpleNamespace(vocab_size=16, pretrained=str(tmp_path / "teacher"))
    found = check_vocabularies(model, teacher)
    assert bool(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_sizes_must_be_equal_where_there_is_no_tokenizer_to_compare(tmp_path: Path) -> None:
    model, teacher = SimpleNamespace(vocab_size=8), SimpleNamespace(vocab_size=9, pretrained=str(tmp_path))
    assert "the teacher has 9 token ids, the model 8" in check_vocabularies(model, teacher)[0]
    assert not check_vocabularies(model, SimpleNamespace(vocab_size=8, pretrained=None))


def test_the_teacher_may_have_another_head_and_terms_have_their_coefficients() -> None:
    teacher = SimpleNamespace(vocab_size=5, pretrained="x", heads={"main": "causal_lm", "draft": "causal_lm"})
    config = SimpleNamespace(
        teacher=teacher, head=None, teacher_head="draft", top_k=None, soft_weight=0.25, hard_weight=0.5
    )
    task = Distillation(cast("DistillationConfig", config))
    assert task.coefficients == {"divergence": 0.25, "cross_entropy": 0.5}
    outputs = {"main/logits": torch.zeros(1, 2, 5), "draft/logits": torch.ones(1, 2, 5)}
    assert task.first_outputs(outputs, {})["teacher_logits"].equal(torch.ones(1, 2, 5))


def test_the_loss_is_that_of_the_named_head() -> None:
    def loss(outputs: dict[str, Tensor], head: str | None) -> Tensor:
        config = SimpleNamespace(head=head, temperature=1.0, soft_weight=1.0, hard_weight=0.0, top_k=None)
        task = Distillation(cast("DistillationConfig", config))
        microbatch = {"targets": torch.tensor([[1, 2]]), "teacher_logits": torch.zeros(1, 2, 5)}
        return task.losses(outputs, microbatch)["divergence"]

    logits = torch.arange(10.0).view(1, 2, 5)
    several = {"main/logits": torch.zeros(1, 2, 5), "draft/logits": logits}
    assert loss(several, "draft") == loss({"logits": logits}, None) > 0
    assert loss(several, "main") == 0


def test_words_beyond_those_of_the_model_are_padding_of_the_teacher() -> None:
    config = SimpleNamespace(teacher_head=None, top_k=2)
    task = Distillation(cast("DistillationConfig", config))
    task._words = 3
    kept = task.first_outputs({"logits": torch.tensor([[[1.0, 7.0, 5.0, 9.0]]])}, {})
    found = {name: one.flatten().tolist() for name, one in kept.items()}
    assert dict(zip(found["teacher_words"], found["teacher_logits"], strict=True)) == {1: 7.0, 2: 5.0}
