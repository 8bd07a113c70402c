"""Low-rank terms of embeddings and heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_nn.embedding import TokenEmbedding
from d9d_nn.heads.causal_lm import CausalLMHead
from d9d_peft.config import LoraConfig
from d9d_peft.lora.method import Lora
from d9d_weights.graph.graph import map_tensors
from torch import Tensor, nn
from torch.nn import functional

TOKENS, TARGETS = torch.tensor([[3, 1, 3, 6]]), torch.tensor([[1, -100, 6, 0]])


class Model(nn.Module):
    """An embedding and a head."""

    def __init__(self, tied: bool = False, softcap: float | None = None, embedding: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(7, 5, std=0.5) if embedding is None else embedding
        self.layer = nn.Linear(5, 5)
        self.head = CausalLMHead(5, 7, std=0.5, tied=tied, softcap=softcap)

    def forward(self, targets: Tensor | None = None) -> Tensor:
        (out,) = self.head(self.layer(self.embedding(TOKENS)), targets).values()
        return out


def adapted(**config: Any) -> tuple[Any, Lora, frozenset[str]]:
    torch.manual_seed(0)
    model = Model()
    method = Lora(LoraConfig.model_validate({"r": 2, "alpha": 3, "targets": ["embedding", "head"], **config}))
    named = method.inject(model)
    for name, module in model.named_modules():
        if "lora" in name:
            module.reset_parameters()
    return model, method, named


def randomise(model: nn.Module, named: frozenset[str]) -> None:
    for name in sorted(named):
        nn.init.normal_(model.get_parameter(name), std=0.5)


@pytest.mark.thorough
def test_terms_start_at_nothing() -> None:
    model, _, named = adapted()
    assert {name: tuple(model.get_parameter(name).shape) for name in named} == {
        "embedding.lora_embedding_A.weight": (7, 2),
        "embedding.lora_embedding_B.weight": (5, 2),
        "head.lora_head_A.weight": (2, 5),
        "head.lora_head_B.weight": (7, 2),
    }
    torch.manual_seed(0)
    plain = Model()
    torch.testing.assert_close(model(), plain())
    torch.testing.assert_close(model(TARGETS), plain(TARGETS))


def test_files_have_the_shapes_of_the_library() -> None:
    model, method, named = adapted()
    randomise(model, named)
    own = {name: model.get_parameter(name).detach() for name in named}
    published = {"embedding.weight": "m.words.weight", "head.weight": "lm_head.weight"}
    there = dict(map_tensors(method.adapter_exporter(model, published), own))
    prefix = "base_model.model."
    expected = {
        f"{prefix}m.words.lora_embedding_A": own["embedding.lora_embedding_A.weight"].T,
        f"{prefix}m.words.lora_embedding_B": own["embedding.lora_embedding_B.weight"],
        f"{prefix}lm_head.lora_A.weight": own["head.lora_head_A.weight"],
        f"{prefix}lm_head.lora_B.weight": own["head.lora_head_B.weight"],
    }
    assert there.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(there[name], tensor), name


def test_losses_and_gradients_are_those_of_the_logits_with_the_term() -> None:
    model, _, named = adapted()
    randomise(model, named)
    loss = model(TARGETS)
    loss.sum().backward()
    found = {name: model.get_parameter(name).grad.clone() for name in named}
    model.zero_grad()
    logits = model()
    expected = functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="none").view_as(TARGETS)
    torch.testing.assert_close(loss, expected)
    expected.sum().backward()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def test_merged_and_switched_off_they_compute_the_same_and_a_checkpoint_merges_alike() -> None:
    model, method, named = adapted()
    randomise(model, named)
    torch.manual_seed(0)
    plain, expected, losses = Model(), model(), model(TARGETS)
    assert (expected - plain()).abs().max() > 0.1
    with method.off(model):
        assert torch.equal(model(), plain())
        assert torch.equal(model(TARGETS), plain(TARGETS))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = map_tensors(method.merger(tensors.keys()), tensors)
    method.merge(model)
    assert [type(model.embedding), type(model.head)] == [TokenEmbedding, CausalLMHead]
    torch.testing.assert_close(model(), expected)
    torch.testing.assert_close(model(TARGETS), losses)
    assert made.keys() == model.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(tensor, made[name]) for name, tensor in model.state_dict().items())


def tuned(**parts: Any) -> tuple[Any, Lora]:
    """Model with random low-rank terms of its embedding and its head."""
    torch.manual_seed(0)
    model = Model(**parts)
    method = Lora(LoraConfig(r=2, alpha=3, targets=("embedding", "head")))
    randomise(model, method.inject(model))
    return model, method


def test_a_head_with_a_soft_cap_caps_logits_with_the_term_and_their_losses() -> None:
    model, method = tuned(softcap=0.4)
    assert set(model.head.op_slots()) == {"linear_cross_entropy", "lora_cross_entropy"}
    assert {slot.op for slot in model.head.op_slots().values()} == {"capped_linear_cross_entropy"}
    logits, losses = model(), model(TARGETS)
    assert 0.3 < logits.abs().max() <= 0.4
    expected = functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="none").view_as(TARGETS)
    torch.testing.assert_close(losses, expected)
    method.merge(model)
    torch.testing.assert_close(model(), logits)
    torch.testing.assert_close(model(TARGETS), losses)


class Scaled(nn.Embedding):
    """Embedding that multiplies its rows, as some of transformers do."""

    def __init__(self, factor: float | Tensor) -> None:
        super().__init__(7, 5)
        self.embed_scale = factor

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up and multiply."""
        return super().forward(tokens) * self.embed_scale


class Doubled(nn.Embedding):
    """Embedding that changes its rows in a way that it does not state."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up and multiply."""
        return super().forward(tokens) * 2


@pytest.mark.parametrize("factor", [3.0, torch.tensor(3.0)])
def test_the_term_of_a_scaled_embedding_is_scaled(factor: float | Tensor) -> None:
    model, method = tuned(embedding=Scaled(factor))
    expected = model()
    method.merge(model)
    torch.testing.assert_close(model(), expected)


def test_an_embedding_with_an_unknown_forward_is_refused() -> None:
    with pytest.raises(BuildError, match="the embedding 'embedding' is a Doubled, whose own forward may change"):
        tuned(embedding=Doubled(7, 5))
    Lora(LoraConfig(r=2, targets=("head",))).inject(Model(embedding=Doubled(7, 5)))


def test_the_loss_with_the_term_has_a_slot_of_its_own_size() -> None:
    model, method, _ = adapted()
    assert {n: s.static["features"] for n, s in model.head.op_slots().items()} == {
        "linear_cross_entropy": 5,
        "lora_cross_entropy": 7,
    }
    method.merge(model)
    assert list(model.head.op_slots()) == ["linear_cross_entropy"]


def test_ranks_of_targets_are_those_of_the_logits_with_the_term() -> None:
    model, _, named = adapted()
    randomise(model, named)
    model.head.observe("token_ranks", "training")
    hidden = model.layer(model.embedding(TOKENS))
    logits = model.head(hidden)["logits"]
    own = logits.gather(-1, TARGETS.clamp(min=0).unsqueeze(-1))
    expected = (logits > own).sum(-1).masked_fill(TARGETS < 0, -1)
    assert torch.equal(model.head(hidden, TARGETS)["token_ranks"], expected)


def test_they_are_no_linear_layers_and_a_tied_embedding_has_no_term() -> None:
    assert adapted(targets="all-linear")[2] == {"layer.lora_A.weight", "layer.lora_B.weight"}
    with pytest.raises(
        BuildError, match="the weight of 'embedding' is also the weight of a tied head, which would ignore"
    ):
        Lora(LoraConfig(r=2, targets=("embedding",))).inject(Model(tied=True))
    with pytest.raises(BuildError, match="peft.targets: no layers match 'head'; there are: layer, embedding"):
        Lora(LoraConfig(r=2, targets=("head",))).inject(Model(tied=True))
