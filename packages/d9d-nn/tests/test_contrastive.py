from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from d9d_nn.contrastive import loss as module
from d9d_nn.contrastive.config import EmbeddingConfig
from d9d_nn.contrastive.loss import contrast
from d9d_nn.contrastive.task import Embedding
from torch import Tensor
from torch.nn import functional

Q, N, D = 6, 3, 5


@dataclass
class Alone:
    """One rank."""

    rank: int = 0

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor


class OneOfTwo:
    """Rank of two that receives prepared tensors."""

    def __init__(self, rank: int, *others: Tensor) -> None:
        self.rank, self.others, self.reduced = rank, list(others), torch.zeros(0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        both = [tensor, self.others.pop(0)]
        return torch.cat(both[::-1] if self.rank else both)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.reduced = tensor.clone()
        return tensor + self.others.pop(0)


def embeddings() -> Tensor:
    return functional.normalize(torch.randn(Q, 1 + N, D, generator=torch.Generator().manual_seed(1)), dim=-1)


def expected(samples: Tensor, temperature: float, symmetric: bool) -> Tensor:
    """Losses of all queries, by autograd through all similarities."""
    queries, texts = samples[:, 0], samples[:, 1:].flatten(0, 1)
    losses = functional.cross_entropy(queries @ texts.T / temperature, torch.arange(Q) * N, reduction="none")
    if symmetric:
        back = functional.cross_entropy(samples[:, 1] @ queries.T / temperature, torch.arange(Q), reduction="none")
        losses = (losses + back) / 2
    return losses


@pytest.mark.thorough
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("elements", [1, 1 << 20])
def test_losses_and_gradients_are_those_of_one_backward(
    monkeypatch: pytest.MonkeyPatch, symmetric: bool, elements: int
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", elements)
    samples = embeddings().requires_grad_()
    found = contrast(samples[:, 0].detach(), samples[:, 1:].detach(), Alone(), 0.1, symmetric)
    right = expected(samples, 0.1, symmetric)
    (gradient,) = torch.autograd.grad(right.sum(), samples)
    torch.testing.assert_close(found.losses, right.detach())
    torch.testing.assert_close(torch.cat([found.query_gradient.unsqueeze(1), found.text_gradient], 1), gradient)


def test_ranks_share_the_texts_and_each_has_the_gradients_of_its_own() -> None:
    samples = embeddings().requires_grad_()
    right = expected(samples, 0.1, symmetric=False)
    (gradient,) = torch.autograd.grad(right.sum(), samples)
    halves = [half.detach() for half in samples.split(Q // 2)]
    sent = [(half[:, 1:].flatten(0, 1), torch.ones(Q // 2 * N, dtype=torch.bool)) for half in halves]
    first = OneOfTwo(0, *sent[1], torch.zeros(Q * N, D))
    contrast(halves[0][:, 0], halves[0][:, 1:], first, 0.1, symmetric=False)
    second = OneOfTwo(1, *sent[0], first.reduced)
    found = contrast(halves[1][:, 0], halves[1][:, 1:], second, 0.1, symmetric=False)
    torch.testing.assert_close(found.losses, right.detach()[Q // 2 :])
    torch.testing.assert_close(found.query_gradient, gradient[Q // 2 :, 0])
    torch.testing.assert_close(found.text_gradient, gradient[Q // 2 :, 1:])


@pytest.mark.parametrize(("elements", "rows"), [(53, [2, 2, 2]), (54, [3, 3]), (108, [6]), (1, [1] * 6)])
def test_losses_are_computed_from_as_many_similarities_as_fit_into_a_chunk(
    monkeypatch: pytest.MonkeyPatch, elements: int, rows: list[int]
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", elements)
    found: list[tuple[int, ...]] = []
    softmax = functional.log_softmax
    monkeypatch.setattr(
        module.functional, "log_softmax", lambda x, dim: (found.append(tuple(x.shape)), softmax(x, dim=dim))[1]
    )
    samples = embeddings()
    contrast(samples[:, 0], samples[:, 1:], Alone(), 0.1, symmetric=False)
    assert found == [(length, Q * N) for length in rows]


def test_what_is_absent_is_compared_with_nothing() -> None:
    present = torch.ones(Q, 1 + N, dtype=torch.bool)
    present[2], present[3, 2] = False, False
    samples = embeddings()
    found = contrast(samples[:, 0], samples[:, 1:], Alone(), 0.1, symmetric=True, present=present)
    similarities = samples[:, 0] @ samples[:, 1:].flatten(0, 1).T / 0.1
    left = present[:, 1:].flatten()
    places = (left.cumsum(0) - 1)[torch.arange(Q) * N]
    right = functional.cross_entropy(similarities[:, left], places, reduction="none")
    queries = [n for n in range(Q) if n != 2]
    back = functional.cross_entropy(
        (samples[:, 1] @ samples[queries, 0].T / 0.1)[queries], torch.arange(Q - 1), reduction="none"
    )
    torch.testing.assert_close(found.losses[queries], (right[queries] + back) / 2)
    assert found.losses[2] == 0
    for gradient in (found.query_gradient[2], found.text_gradient[2], found.text_gradient[3, 1]):
        assert not gradient.any()


def test_a_hit_is_a_query_whose_own_text_is_the_most_similar() -> None:
    samples = embeddings()
    samples[::2, 1] = samples[::2, 0]
    samples[1::2, 1] = -samples[1::2, 0]
    found = contrast(samples[:, 0], samples[:, 1:], Alone(), 0.1, symmetric=False)
    assert found.hits.tolist() == [True, False] * (Q // 2)


def test_the_second_pass_carries_the_gradient_of_the_whole_batch() -> None:
    """Microbatches have different sizes, each with the embeddings that the model gives again."""
    task = Embedding(EmbeddingConfig(temperature=0.1))
    samples = embeddings().requires_grad_()
    sizes = (4, 2)
    packs = [
        {"tokens": torch.zeros(size * (1 + N), 2, dtype=torch.long), "samples": torch.arange(size)} for size in sizes
    ]
    outputs = [{"embedding": part.flatten(0, 1)} for part in samples.split(sizes)]
    kept = [task.first_outputs(output, microbatch) for output, microbatch in zip(outputs, packs, strict=True)]
    complete = [{**mb, **added} for mb, added in zip(packs, task.complete(kept, Alone()), strict=True)]
    total = sum(task.losses(output, mb)["contrastive"] for output, mb in zip(outputs, complete, strict=True))
    assert isinstance(total, Tensor)
    right = expected(samples, 0.1, symmetric=False).sum()
    torch.testing.assert_close(total, right)
    torch.testing.assert_close(torch.autograd.grad(total, samples), torch.autograd.grad(right, samples))
