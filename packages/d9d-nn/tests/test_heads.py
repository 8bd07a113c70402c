from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.strategy import StepShape
from d9d_core.traits import LateInit, TensorStyle, modules_with
from d9d_nn.embedding import SplitTokenEmbedding, TokenEmbedding, token_embedding
from d9d_nn.heads.causal_lm import CausalLMHead
from d9d_nn.heads.choice import observed_states
from d9d_nn.heads.classification import ClassificationHead
from d9d_nn.heads.config import (
    CausalLMHeadConfig,
    ClassificationHeadConfig,
    EmbeddingHeadConfig,
    HeadConfig,
    HiddenStatesHeadConfig,
)
from d9d_nn.heads.embedding import EmbeddingHead
from d9d_nn.heads.heads import Heads
from d9d_nn.heads.layer_mean import LayerSums, sums_begun
from d9d_nn.heads.pooling import pool
from d9d_nn.rms_norm import RMSNorm
from d9d_testing.tolerances import assert_close_values
from torch import Tensor
from torch.nn import functional


@pytest.fixture(autouse=True)
def same_numbers_in_every_run() -> None:
    torch.manual_seed(0)


# --- causal_lm


@pytest.mark.thorough
def test_head_returns_losses_with_targets_and_logits_without() -> None:
    head = CausalLMHead(8, 20, std=0.5)
    hidden, targets = torch.randn(2, 3, 8), torch.randint(20, (2, 3))
    logits = head(hidden)["logits"]
    loss = head(hidden, targets)["token_loss"]
    assert_close_values(loss, -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1))


def test_tied_head_has_no_parameter_and_needs_the_weight() -> None:
    tied, hidden, weight = CausalLMHead(8, 20, std=0.5, tied=True), torch.randn(2, 3, 8), torch.randn(20, 8)
    tied.reset_parameters()
    assert not list(tied.parameters())
    assert not list(CausalLMHead(8, 20, std=0.5, tied=True, added_tokens=3).parameters())
    assert_close_values(tied(hidden, tied_weight=weight)["logits"], hidden @ weight.T)
    with pytest.raises(ValueError, match="tied_weight"):
        tied(hidden)
    with pytest.raises(ValueError, match="tied_weight"):
        CausalLMHead(8, 20, std=0.5)(hidden, tied_weight=weight)
    with pytest.raises(ValueError, match="tied_weight"):
        CausalLMHead(8, 20, std=0.5, added_tokens=3)(hidden, tied_weight=weight)


def test_a_split_head_computes_what_its_parts_in_a_row_do() -> None:
    split, whole = CausalLMHead(8, 20, std=0.5, added_tokens=3), CausalLMHead(8, 20, std=0.5)
    assert {name: tuple(p.shape) for name, p in split.named_parameters()} == {
        "regular.weight": (17, 8),
        "added.weight": (3, 8),
    }
    with torch.no_grad():
        whole.weight.copy_(torch.cat(list(split.parameters())))
    hidden, targets = torch.randn(2, 5, 8), torch.tensor([[0, 16, 17, 19, -100], [1, 2, 3, 4, 5]])
    for head in (split, whole):
        head(hidden, targets)["token_loss"].sum().backward()
    assert torch.equal(split(hidden, targets)["token_loss"], whole(hidden, targets)["token_loss"])
    assert torch.equal(torch.cat([p.grad for p in split.parameters()]), whole.weight.grad)


# --- embedding table


def test_a_split_embedding_looks_up_what_its_parts_in_a_row_do() -> None:
    split, whole = SplitTokenEmbedding(10, 4, 3, std=1.0), TokenEmbedding(10, 3, std=1.0)
    with torch.no_grad():
        whole.weight.copy_(split.vocabulary_weight())
    tokens, upstream = torch.arange(10).view(2, 5), torch.randn(2, 5, 3)
    for embedding in (split, whole):
        embedding(tokens).backward(upstream)
    assert torch.equal(split(tokens), whole(tokens))
    assert torch.equal(torch.cat([split.regular.weight.grad, split.added.weight.grad]), whole.weight.grad)


def test_a_vocabulary_has_any_number_of_named_parts() -> None:
    added = {"images": 2, "tools": 1, "voices": 3}
    split, whole = SplitTokenEmbedding(10, added, 3, std=1.0), TokenEmbedding(10, 3, std=1.0)
    shapes = {"regular.weight": (4, 3), "images.weight": (2, 3), "tools.weight": (1, 3), "voices.weight": (3, 3)}
    assert {name: tuple(p.shape) for name, p in split.named_parameters()} == shapes
    with torch.no_grad():
        whole.weight.copy_(split.vocabulary_weight())
    tokens, upstream = torch.arange(10).view(2, 5), torch.randn(2, 5, 3)
    for embedding in (split, whole):
        embedding(tokens).backward(upstream)
    assert torch.equal(split(tokens), whole(tokens))
    assert torch.equal(torch.cat([p.grad for p in split.parameters()]), whole.weight.grad)
    for token in (-1, 10):
        with pytest.raises(IndexError):
            split(torch.tensor([[token]]))
    head = CausalLMHead(8, 10, std=0.5, added_tokens=added)
    assert [name for name, _ in head.named_parameters()] == list(shapes)
    hidden = torch.randn(1, 2, 8)
    assert_close_values(head(hidden)["logits"], hidden @ torch.cat(list(head.parameters())).T)
    for build in (
        lambda: SplitTokenEmbedding(10, {"train": 1}, 3, std=1.0),
        lambda: CausalLMHead(8, 10, std=1.0, added_tokens={"weight": 1}),
    ):
        with pytest.raises(BuildError, match="is an attribute of modules; give the part another name"):
            build()


def test_both_parts_of_a_split_embedding_get_a_gradient_from_any_text() -> None:
    split = SplitTokenEmbedding(10, 4, 3, std=1.0)
    split(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    assert split.added.weight.grad is not None
    assert not split.added.weight.grad.any()


@pytest.mark.parametrize("token", [-1, 10])
def test_a_token_outside_of_a_split_vocabulary_is_an_error(token: int) -> None:
    with pytest.raises(IndexError):
        SplitTokenEmbedding(10, 4, 3, std=1.0)(torch.tensor([[token]]))


def test_a_rank_looks_up_its_own_positions_in_both_parts() -> None:
    embedding = SplitTokenEmbedding(10, 4, 3, std=1.0)
    tokens = torch.tensor([[1, 9, 5, 6], [0, 2, 8, 3]])
    whole = embedding(tokens)
    assert torch.equal(whole, embedding.vocabulary_weight()[tokens])
    embedding.see_sequence(SimpleNamespace(own=lambda tensor: tensor[:, 2:]))  # type: ignore[arg-type]
    assert torch.equal(embedding(tokens), whole[:, 2:])
    assert embedding.forward_collectives(StepShape((), 1, 1, 2)) == ()


def test_an_embedding_without_added_tokens_is_in_one_piece() -> None:
    assert {name for name, _ in token_embedding(10, 0, 3, std=1.0).named_parameters()} == {"weight"}
    assert {name for name, _ in token_embedding(10, 1, 3, std=1.0).named_parameters()} == {
        "regular.weight",
        "added.weight",
    }


# --- pooling


@pytest.mark.parametrize("pooling", ["last", "first", "mean"])
def test_padding_does_not_change_a_pooled_sample(pooling: str) -> None:
    texts = [torch.randn(1, length, 6) for length in (1, 4, 3)]
    padded = torch.full((3, 4, 6), float("nan"))
    for sample, text in zip(padded, texts, strict=True):
        sample[: text.shape[1]] = text[0]
    alone = torch.cat([pool(text, None, pooling) for text in texts])
    assert_close_values(pool(padded, torch.tensor([1, 4, 3]), pooling), alone)


def test_pooling_takes_the_last_position_or_the_mean() -> None:
    hidden = torch.tensor([[[1.0], [2.0], [6.0]]])
    lengths = torch.tensor([2])
    assert pool(hidden, None, "last").item() == 6
    assert pool(hidden, None, "mean").item() == 3
    assert pool(hidden, lengths, "last").item() == 2
    assert pool(hidden, lengths, "mean").item() == 1.5
    assert pool(hidden, lengths, "first").item() == 1


def test_masked_pooling_averages_the_marked_positions_of_a_sample_or_row() -> None:
    hidden = torch.tensor([[[1.0], [2.0], [6.0], [8.0]], [[3.0], [torch.nan], [5.0], [7.0]]])
    mask = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 1]])
    assert pool(hidden, None, "masked", mask=mask).flatten().tolist() == [5, 5]
    assert pool(hidden, torch.tensor([2, 3]), "masked", mask=mask.bool()).flatten().tolist() == [2, 4]
    assert not pool(hidden[:1], None, "masked", mask=torch.zeros(1, 4)).any()
    ends = torch.tensor([[1, 4, 0]])
    assert pool(hidden[:1], None, "masked", ends, mask[:1])[0, :2].flatten().tolist() == [0, 5]
    assert pool(hidden[:1], None, "first", ends)[0, :2].flatten().tolist() == [1, 2]
    assert pool(hidden[:1], None, "mean", ends)[0, :2].flatten().tolist() == pytest.approx([1, 16 / 3])
    for wrong in (None, mask[:, :3]):
        with pytest.raises(ValueError, match=r"needs pooling_mask \[2, 4\] in the microbatch, and got .*; give it in"):
            pool(hidden, None, "masked", mask=wrong)


def test_dropout_of_a_classifier_acts_in_training_only_and_says_that_it_depends_on_the_layout() -> None:
    head, hidden = ClassificationHead(64, 3, pooling="first", std=0.5, dropout=0.5), torch.randn(2, 4, 64)
    plain = hidden[:, 0] @ head.weight.T
    assert not torch.allclose(head(hidden)["class_logits"], plain)
    assert_close_values(head.eval()(hidden)["class_logits"], plain)
    assert head.layout_dependence() == ["dropout of a head draws random numbers per microbatch"]
    assert ClassificationHead(6, 3, pooling="last", std=0.5).layout_dependence() == []


def test_an_embedding_is_projected_before_it_is_cut() -> None:
    head = EmbeddingHead(pooling="mean", normalize=True, dim=3, hidden_size=6, projection=5, std=0.5)
    hidden = torch.randn(2, 4, 6)
    assert head.weight is not None
    assert head.weight.shape == (5, 6)
    assert head.weight.std().item() == pytest.approx(0.5, rel=0.5)
    expected = functional.normalize((hidden.mean(1) @ head.weight.T)[:, :3], dim=-1)
    assert_close_values(head(hidden)["embedding"], expected)


def test_heads_get_the_mask_of_the_microbatch() -> None:
    masked = heads(vector=EmbeddingHeadConfig(pooling="masked", normalize=False))
    hidden, mask = torch.randn(2, 3, 8), torch.tensor([[0, 1, 0], [1, 0, 0]])
    found = masked(hidden, {}, pooling_mask=mask)["embedding"]
    assert_close_values(found, torch.stack([hidden[0, 1], hidden[1, 0]]))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_sample_without_tokens_is_finite_forward_and_backward(pooling: str) -> None:
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    pooled = pool(hidden, torch.tensor([0, 2]), pooling)
    pooled.sum().backward()
    assert pooled.isfinite().all()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("lengths", [torch.tensor([2]), torch.tensor([[2], [3]])], ids=["one for all", "a column"])
def test_lengths_are_one_per_sample(lengths: Tensor, pooling: str) -> None:
    with pytest.raises(ValueError, match=r"give \(2,\), one length for each sample"):
        pool(torch.randn(2, 3, 4), lengths, pooling)


def test_a_mean_of_narrow_numbers_is_summed_wide() -> None:
    hidden = torch.ones(1, 1024, 1, dtype=torch.bfloat16)
    for lengths in (None, torch.tensor([1024])):
        pooled = pool(hidden, lengths, "mean")
        assert pooled.dtype == torch.bfloat16
        assert pooled.item() == 1


# --- classification and embedding


def test_a_classifier_projects_the_pooled_sample_in_at_least_float32() -> None:
    head, hidden = ClassificationHead(6, 3, pooling="mean", std=0.5), torch.randn(2, 4, 6)
    assert_close_values(head(hidden)["class_logits"], hidden.mean(1) @ head.weight.T)
    narrow = head.to(torch.bfloat16)(hidden.to(torch.bfloat16))["class_logits"]
    assert (narrow.shape, narrow.dtype) == ((2, 3), torch.float32)


def test_an_embedding_is_cut_before_it_is_normalised() -> None:
    hidden = torch.randn(2, 4, 6)
    lengths = torch.tensor([4, 2])
    cut = EmbeddingHead(pooling="last", normalize=True, dim=3)(hidden, lengths)["embedding"]
    assert_close_values(cut, functional.normalize(torch.stack([hidden[0, 3, :3], hidden[1, 1, :3]]), dim=-1))
    plain = EmbeddingHead(pooling="last", normalize=False, dim=None)(hidden, lengths)["embedding"]
    assert torch.equal(plain, torch.stack([hidden[0, 3], hidden[1, 1]]))


# --- several heads

CONFIGS = {
    "words": CausalLMHeadConfig(),
    "topic": ClassificationHeadConfig(num_classes=3),
    "vector": EmbeddingHeadConfig(layers=[0, -1]),
}


def heads(**configs: HeadConfig) -> Heads:
    return Heads(configs, hidden_size=8, vocabulary=20, num_layers=3, std=0.5)


def test_an_only_head_answers_by_plain_names_and_several_by_their_own() -> None:
    hidden, targets = torch.randn(2, 3, 8), torch.randint(20, (2, 3))
    assert heads(topic=CONFIGS["topic"])(hidden, {}).keys() == {"class_logits"}
    assert heads(words=CONFIGS["words"])(hidden, {}).keys() == {"logits"}
    several, means = heads(**CONFIGS), {(0, 2): torch.randn(2, 3, 8)}
    assert several(hidden, means, targets=targets).keys() == {
        "words/token_loss",
        "topic/class_logits",
        "vector/embedding",
    }
    assert several(hidden, means).keys() == {"topic/class_logits", "vector/embedding"}, "no task asked for logits"


def test_a_head_reads_the_layers_it_names() -> None:
    final, mean = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    outputs = heads(**CONFIGS)(final, {(0, 2): mean})
    assert_close_values(outputs["vector/embedding"], functional.normalize(mean[:, -1], dim=-1))


def test_heads_say_what_may_be_split_and_can_be_filled_late() -> None:
    several = heads(**CONFIGS)
    whole = TensorStyle.WHOLE
    assert several.tensor_parallel_plan() == {"words": TensorStyle.VOCAB, "topic": whole, "vector": whole}
    assert modules_with(several, LateInit).keys() == {"words", "topic", "vector"}
    split = Heads({"words": CONFIGS["words"]}, hidden_size=8, vocabulary=20, num_layers=3, std=0.5, added_tokens=2)
    assert split.tensor_parallel_plan() == {"words": TensorStyle.WHOLE}


def test_a_head_cannot_be_called_like_an_attribute_of_modules() -> None:
    with pytest.raises(BuildError, match="'train' is an attribute of modules"):
        heads(train=CONFIGS["topic"])


def test_hidden_states_are_an_output_with_a_gradient_as_a_mean_or_layer_by_layer() -> None:
    states = HiddenStatesHeadConfig(layers=[-1, 0])
    several = heads(topic=CONFIGS["topic"], mean=states, each=HiddenStatesHeadConfig(layers=[2, 0], aggregation="none"))
    final, mean = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    layers = [torch.randn(2, 3, 8, requires_grad=True) for _ in range(2)]
    outputs = several(final, {(0, 2): mean, (0,): layers[0], (2,): layers[1]})
    assert torch.equal(outputs["mean/hidden_states"], mean)
    assert torch.equal(outputs["each/hidden_states"], torch.stack(layers, dim=2))
    outputs["each/hidden_states"].sum().backward()
    assert layers[0].grad is not None
    assert torch.equal(heads(states=HiddenStatesHeadConfig())(final, {})["hidden_states"], final)
    observed = observed_states(outputs)
    assert torch.equal(observed["hidden_states"], mean)
    assert observed_states({"logits": final}) == {}
    assert not observed_states({"hidden_states": layers[0] * 1})["hidden_states"].requires_grad


# --- means of layers


def normalised(norm: RMSNorm, outputs: list[Tensor], layers: tuple[int, ...]) -> Tensor:
    return torch.stack([norm(outputs[layer]) for layer in layers]).mean(0)


def test_a_mean_of_layers_is_that_of_their_normalised_outputs_over_any_stages() -> None:
    norm, outputs = RMSNorm(8, eps=1e-3), [torch.randn(2, 3, 8) * scale for scale in (1, 5, 0.1, 20)]
    torch.nn.init.normal_(norm.weight)
    wanted = [(0, 2), (2, 3), (3,)]
    for cuts in ([4], [1, 4], [2, 3, 4]):
        sent: dict[str, Tensor] = {}
        for start, stop in zip([0, *cuts], cuts, strict=False):
            sums = LayerSums(wanted, 1e-3, sent, range(start))
            for layer in range(start, stop):
                sums.add(layer, outputs[layer])
            sent = sums.to_send()
            assert sent.keys() == set(sums_begun(wanted, range(stop)))
        for layers, mean in sums.means(norm.weight).items():
            assert_close_values(mean, normalised(norm, outputs, layers))


def test_an_input_that_is_no_sum_is_refused() -> None:
    with pytest.raises(TypeError, match="the model has no input 'tokes'"):
        LayerSums([(0, 1)], 1e-6, {"tokes": torch.zeros(1)}, range(0))


def test_exactly_the_sums_that_earlier_stages_began_are_taken() -> None:
    state = torch.zeros(1, 2, 3)
    with pytest.raises(
        ValueError, match="a head needs the input 'layer_sum_0_2'; pass all outputs of the previous pipeline stage"
    ):
        LayerSums([(0, 2), (2,)], 1e-6, {}, range(1))
    with pytest.raises(TypeError, match="the model has no input 'layer_sum_2'"):
        LayerSums([(0, 2), (2,)], 1e-6, {"layer_sum_0_2": state, "layer_sum_2": state}, range(1))
