"""Heads on the backbone, a split vocabulary, and means of layers, in the whole model, in stages and under FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.model import Stage
from d9d_core.types import TensorSpec
from d9d_nn.causal_lm.config import CausalLMConfig
from d9d_nn.causal_lm.task import CausalLM
from d9d_nn.classification.config import ClassificationConfig
from d9d_nn.classification.task import Classification
from d9d_nn.decoder.flops import training_flops_per_token
from d9d_nn.microbatch import with_prefixes
from d9d_qwen3.config import Qwen3Config, tiny
from d9d_qwen3.hugging_face.dense import Qwen3HuggingFace
from d9d_qwen3.model import Qwen3
from d9d_testing.suites.model import ModelSuite
from d9d_testing.suites.support.models import microbatch
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from d9d_weights.graph.graph import map_tensors
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

TOPIC = {"kind": "classification", "num_classes": 3}
SEVERAL = {
    "words": {"kind": "causal_lm"},
    "topic": {**TOPIC, "layers": [0, 2]},
    "vector": {"kind": "embedding", "pooling": "mean", "layers": [1, -1]},
    "plain": {"kind": "embedding", "dim": 7},
}


@pytest.fixture(autouse=True)
def same_weights_in_every_run() -> None:
    torch.manual_seed(0)


def config(**changes: Any) -> Qwen3Config:
    return Qwen3Config.model_validate({**tiny().model_dump(), **changes})


def random_model(of: Qwen3Config) -> Qwen3:
    """Weights far from their start, norms included, so that nothing cancels."""
    model = Qwen3(of)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def batch(of: Qwen3Config) -> dict[str, Tensor]:
    made = microbatch(of)
    made["tokens"][0, :3] = of.vocab_size - 1 - torch.arange(3)  # some of the added ones
    return made | {"lengths": torch.tensor([12, 5])}


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def total(outputs: dict[str, Tensor]) -> Tensor:
    """A scalar to which every element of every output contributes differently."""
    return sum((t * torch.linspace(-1, 2, t.numel()).view_as(t)).sum() for t in outputs.values())


# --- heads


def test_heads_change_no_name_of_the_backbone() -> None:
    of = config(heads=SEVERAL, num_layers=3)
    backbone = {name for name, _ in Qwen3(of, heads=False).named_parameters()}
    assert {name for name, _ in Qwen3(of).named_parameters()} - backbone == {"heads.words.weight", "heads.topic.weight"}
    assert {name for name, _ in Qwen3(config(num_layers=3)).named_parameters()} - backbone == {"heads.causal_lm.weight"}
    assert {"embedding.weight", "layers.1.ffn.up_proj.weight", "norm.weight"} <= backbone


def test_the_backbone_alone_gives_what_heads_read() -> None:
    model, inputs = random_model(tiny()), microbatch(tiny())
    backbone = Qwen3(tiny(), heads=False)
    backbone.load_state_dict({name: t for name, t in model.state_dict().items() if not name.startswith("heads.")})
    tokens = inputs["tokens"]
    hidden = backbone(tokens=tokens)["hidden"]
    assert_close_values(model.heads["causal_lm"](hidden)["logits"], model(tokens=tokens)["logits"])


def test_outputs_of_one_head_have_plain_names_and_shapes() -> None:
    inputs = batch(tiny())
    outputs = Qwen3(config(heads={"topic": TOPIC}))(**inputs)
    assert {name: tuple(t.shape) for name, t in outputs.items()} == {"class_logits": (2, 3)}
    outputs = Qwen3(config(heads={"vector": {"kind": "embedding", "dim": 7}}))(**inputs)
    assert {name: tuple(t.shape) for name, t in outputs.items()} == {"embedding": (2, 7)}
    assert_close_values(outputs["embedding"].norm(dim=-1), torch.ones(2))


def test_a_projected_embedding_of_marked_positions_is_the_same_over_two_stages_and_after_an_export() -> None:
    heads = {"vector": {"kind": "embedding", "projection": 9, "dim": 5, "pooling": "masked", "normalize": False}}
    of = config(heads=heads, num_layers=2)
    model, inputs = random_model(of), batch(of)
    inputs["pooling_mask"] = torch.arange(24).view(2, 12) % 3 == 1
    outputs = model(**inputs)
    assert {name: tuple(t.shape) for name, t in outputs.items()} == {"embedding": (2, 5)}
    other = model(**inputs | {"pooling_mask": ~inputs["pooling_mask"]})["embedding"]
    assert not torch.allclose(outputs["embedding"], other)
    stages = [Qwen3(of, Stage(index, 2)) for index in range(2)]
    for stage in stages:
        stage.load_state_dict({name: model.state_dict()[name] for name in stage.state_dict()})
    sent = stages[0](**inputs)
    shared = {name: tensor for name, tensor in inputs.items() if name != "tokens"}
    assert_close_values(stages[1](**sent, **shared)["embedding"], outputs["embedding"])
    layout = Qwen3HuggingFace()
    files = map_tensors(layout.exporter(of), model.state_dict())
    assert "heads.vector.weight" in files
    assert torch.equal(map_tensors(layout.importer(of, of), files)["heads.vector.weight"], model.heads["vector"].weight)
    assert layout.config_from_json(layout.config_json(of, "float32")) == of


def test_hidden_states_of_layers_on_any_stages_are_an_output_in_training() -> None:
    heads = {
        "words": {"kind": "causal_lm"},
        "each": {"kind": "hidden_states", "layers": [0, -1], "aggregation": "none"},
        "mean": {"kind": "hidden_states", "layers": [1, 2]},
    }
    of = config(heads=heads, num_layers=3)
    model, inputs = random_model(of), batch(of)
    seen: dict[str, Tensor] = {}
    for index, layer in model.layers.items():
        layer.register_forward_hook(lambda _module, _args, out, index=index: seen.update({index: out.detach()}))
    outputs = model(**inputs)
    states = [model.norm(seen[index]) for index in ("0", "1", "2")]
    assert_close_values(outputs["each/hidden_states"], torch.stack([states[0], states[2]], dim=2))
    assert_close_values(outputs["mean/hidden_states"], (states[1] + states[2]) / 2)
    observed = CausalLM(CausalLMConfig(head="words")).observations(outputs, inputs)
    assert torch.equal(observed["hidden_states"], outputs["each/hidden_states"])
    total(outputs).backward()
    expected = gradients(model)
    stages = [Qwen3(of, Stage(index, 3)) for index in range(3)]
    for stage in stages:
        stage.load_state_dict({name: model.state_dict()[name] for name in stage.state_dict()})
    sent, shared = {"tokens": inputs["tokens"]}, {name: t for name, t in inputs.items() if name != "tokens"}
    for stage in stages:
        sent = stage(**sent, **shared)
    assert_close_values(sent["each/hidden_states"], outputs["each/hidden_states"])
    total(sent).backward()
    assert_close_gradients({name: g for stage in stages for name, g in gradients(stage).items()}, expected)


def test_several_heads_answer_at_once_by_their_names() -> None:
    of = config(heads=SEVERAL, num_layers=3)
    model, inputs = random_model(of), batch(of)
    outputs = model(**inputs)
    assert {name: tuple(t.shape) for name, t in outputs.items()} == {
        "words/token_loss": (2, 12),
        "topic/class_logits": (2, 3),
        "vector/embedding": (2, 32),
        "plain/embedding": (2, 7),
    }
    alone = Qwen3(of.model_copy(update={"heads": {"words": of.heads["words"]}}))
    alone.load_state_dict({n: t for n, t in model.state_dict().items() if n != "heads.topic.weight"})
    assert_close_values(alone(**inputs)["token_loss"], outputs["words/token_loss"])


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_what_pads_a_sample_changes_nothing(pooling: str, mask: str) -> None:
    heads = {"topic": {**TOPIC, "pooling": pooling}, "vector": {"kind": "embedding", "pooling": pooling, "layers": [0]}}
    model = random_model(config(heads=heads, attention_mask=mask))
    tokens, lengths = torch.randint(64, (2, 9)), torch.tensor([4, 9])
    padded = model(tokens=tokens, lengths=lengths)
    alone = model(tokens=tokens[:1, :4])
    assert_close_values({n: t[:1] for n, t in padded.items()}["topic/class_logits"], alone["topic/class_logits"])
    assert_close_values(padded["vector/embedding"][:1], alone["vector/embedding"])


def test_bidirectional_samples_may_hold_several_documents_and_padding() -> None:
    heads = {"tags": {"kind": "token_classification", "num_classes": 3}}
    model, tokens = random_model(config(heads=heads, attention_mask="bidirectional")), torch.randint(64, (1, 12))
    documents, places = torch.tensor([[0] * 4 + [1] * 8]), torch.tensor([[*range(4), *range(8)]])
    found = model(tokens=tokens, positions=places, documents=documents, lengths=torch.tensor([9]))["class_logits"]
    for part in (slice(4), slice(4, 9)):
        assert_close_values(found[:, part], model(tokens=tokens[:, part])["class_logits"])


def test_a_model_with_prefixes_sees_no_target_and_more_than_a_causal_one() -> None:
    of, targets = config(attention_mask="prefix"), torch.randint(64, (1, 12))
    targets[:, :4], targets[:, 11] = -100, -100
    tokens = torch.cat([torch.randint(64, (1, 5)), targets[:, 4:11]], dim=1)
    model, blocks = random_model(of), with_prefixes({"tokens": tokens, "targets": targets})["attention_blocks"]
    before = model(tokens=tokens, attention_blocks=blocks)["logits"]
    for place in range(12):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 64
        differs = (model(tokens=changed, attention_blocks=blocks)["logits"] != before).any(-1)[0]
        first = 0 if place < 5 else place  # all of the prefix sees all of it
        assert differs.tolist() == [position >= first for position in range(12)]


@pytest.mark.parametrize(
    ("mask", "given", "text"),
    [
        ("prefix", False, "with attention_mask prefix needs the input 'attention_blocks'"),
        ("blocks", False, "with attention_mask blocks needs the input 'attention_blocks'"),
        ("causal", True, "with attention_mask causal has no use for the input 'attention_blocks'"),
    ],
)
def test_blocks_are_given_to_models_that_have_them(mask: str, given: bool, text: str) -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    blocks = {"attention_blocks": tokens} if given else {}
    with pytest.raises(ValueError, match=text):
        Qwen3(config(attention_mask=mask))(tokens=tokens, **blocks)


def test_both_tasks_train_their_own_head() -> None:
    of = config(heads={"words": {"kind": "causal_lm"}, "topic": TOPIC})
    pack = batch(of) | {"labels": torch.tensor([2, 0])}
    for task, trained, idle in (
        (CausalLM(CausalLMConfig(head="words")), "heads.words.weight", "heads.topic.weight"),
        (Classification(ClassificationConfig(head="topic")), "heads.topic.weight", "heads.words.weight"),
    ):
        task.check(of, {"vocab_size": 64, "sequence_length": 12, "num_classes": 3})
        model, inputs = random_model(of), task.inputs(pack)
        task.losses(model(**inputs.first, **inputs.shared), pack)["cross_entropy"].backward()
        assert gradients(model)[trained].any()
        assert gradients(model)["embedding.weight"].any()
        assert idle not in gradients(model)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tie_embeddings": True, "heads": {"topic": TOPIC}}, "tie_embeddings .* the model has no causal_lm head"),
        ({"heads": {"v": {"kind": "embedding", "layers": [2]}}}, "v.layers: there is no layer 2 in a model of 2"),
        ({"heads": {"v": {"kind": "embedding", "dim": 33}}}, "v.dim: 33 is more than hidden_size = 32"),
        ({"added_tokens": 64}, "64 of vocab_size = 64 token ids leaves no regular token"),
        ({"added_tokens": -1}, "greater than or equal to 0"),
    ],
)
def test_impossible_heads_are_refused_where_they_are_wrong(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text) as error:
        config(**changes)
    assert error.value.errors()[0]["loc"][0] in changes


def test_an_unknown_input_is_refused() -> None:
    with pytest.raises(TypeError, match="the model has no input 'tokenz'"):
        Qwen3(tiny())(tokens=torch.zeros(1, 2, dtype=torch.long), tokenz=torch.zeros(1))


@pytest.mark.thorough
@pytest.mark.parametrize("heads", [{"topic": TOPIC}, {"v": {"kind": "embedding", "layers": [0, 2]}}, SEVERAL])
def test_flops_count_what_each_head_executes(heads: dict[str, Any]) -> None:
    of, length = config(heads=heads, num_layers=3), 16
    model, tokens = Qwen3(of), torch.zeros(2, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        total(model(tokens=tokens, targets=tokens)).backward()
    # The reference computes the whole square of attention, the formula counts its causal half.
    half = 6 * of.num_layers * of.num_attention_heads * of.head_dim * length
    assert counter.get_total_flops() / tokens.numel() == training_flops_per_token(of, length) + half


def test_flops_of_a_sliding_window_count_the_keys_it_sees() -> None:
    length, window = 64, 10
    plain, sliding = config(num_layers=3), config(num_layers=3, sliding_window=window, sliding_from_layer=1)
    keys = [min(position + 0.5, window) for position in range(length)]  # half of its own square, as without a window
    fewer = sum(position + 0.5 for position in range(length)) - sum(keys)
    per_key = 12 * plain.num_attention_heads * plain.head_dim
    saved = training_flops_per_token(plain, length) - training_flops_per_token(sliding, length)
    assert saved == pytest.approx(2 * per_key * fewer / length)


# --- a split vocabulary


@pytest.mark.thorough
class TestSplitVocabulary(ModelSuite):
    """Everything that holds for a model holds with added tokens."""

    plugin = "d9d_qwen3.plugin"
    target = "qwen3"
    reference = "transformers:AutoModelForCausalLM"
    # The test of sharded models below covers the effects of a split vocabulary, in a fraction of the time.
    test_every_data_parallel_layout_computes_the_same = None

    @pytest.fixture
    def config(self) -> Any:
        return config(added_tokens=5)


def joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of a split model -> names of the whole model."""
    found = {name: tensor for name, tensor in state.items() if ".regular." not in name and ".added." not in name}
    for name, tensor in state.items():
        if ".regular." in name:
            added = state[name.replace(".regular.", ".added.")]
            found[name.replace(".regular.", ".")] = torch.cat([tensor, added])
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_a_split_vocabulary_computes_what_one_in_one_piece_does(tied: bool) -> None:
    split = random_model(config(added_tokens=5, tie_embeddings=tied))
    whole = Qwen3(config(tie_embeddings=tied))
    parts = {name for name, _ in split.named_parameters() if ".regular." in name or ".added." in name}
    heads = set() if tied else {"heads.causal_lm.regular.weight", "heads.causal_lm.added.weight"}
    assert parts == {"embedding.regular.weight", "embedding.added.weight"} | heads
    whole.load_state_dict(joined(split.state_dict()))
    inputs = batch(split.config)
    losses = []
    for model in (split, whole):
        losses.append(model(**inputs)["token_loss"])
        losses[-1].sum().backward()
    assert_close_values(losses[0], losses[1])
    assert_close_gradients(joined(gradients(split)), gradients(whole))


def test_added_tokens_train_alone() -> None:
    model = random_model(config(added_tokens=5))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".added." in name)
    model(**batch(model.config))["token_loss"].sum().backward()
    assert gradients(model).keys() == {"embedding.added.weight", "heads.causal_lm.added.weight"}
    assert all(gradient.any() for gradient in gradients(model).values())


# --- stages


def run_stages(whole: Qwen3, inputs: dict[str, Tensor], count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gradients of stages with copies of the whole model's weights."""
    stages = [Qwen3(whole.config, Stage(index, count)) for index in range(count)]
    shared = {name: tensor for name, tensor in inputs.items() if name != "tokens"}
    shapes = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in inputs.items()}
    sent: list[dict[str, Tensor]] = []
    received: list[dict[str, Tensor]] = [{"tokens": inputs["tokens"]}]
    for stage in stages:
        state = stage.state_dict()
        stage.load_state_dict({name: whole.state_dict()[name] for name in state})
        sent.append(stage(**received[-1], **shared))
        boundary = stage.boundary(shapes)
        if not stage.stage.is_last:
            assert {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in sent[-1].items()} == dict(boundary)
            received.append({name: tensor.detach().requires_grad_() for name, tensor in sent[-1].items()})
    total(sent[-1]).backward()
    for outputs, next_inputs in zip(sent[-2::-1], received[:0:-1], strict=True):
        torch.autograd.backward(list(outputs.values()), [next_inputs[name].grad for name in outputs])
    return sent[-1], {name: g for stage in stages for name, g in gradients(stage).items()}


@pytest.mark.parametrize("count", [2, 3, 4])
def test_means_of_layers_cross_the_boundary_between_stages(count: int) -> None:
    whole = random_model(config(heads=SEVERAL, num_layers=4, added_tokens=5))
    inputs = batch(whole.config)
    expected = whole(**inputs)
    total(expected).backward()
    outputs, found = run_stages(whole, inputs, count)
    assert outputs.keys() == expected.keys()
    for name, tensor in outputs.items():
        assert_close_values(tensor, expected[name])
    assert_close_gradients(found, gradients(whole))


def test_a_stage_that_lacks_what_the_previous_one_summed_says_so() -> None:
    later = Qwen3(config(heads={"topic": {**TOPIC, "layers": [0, 1]}}), Stage(1, 2))
    with pytest.raises(ValueError, match="a head needs the input 'layer_sum_0_1'; pass all outputs"):
        later(hidden=torch.randn(2, 3, 32))


def test_a_boundary_names_the_sums_that_have_begun() -> None:
    of = config(heads={"a": {**TOPIC, "layers": [0, 3]}, "b": {**TOPIC, "layers": [2, 3]}}, num_layers=4)
    shapes = {"tokens": TensorSpec((2, 12), torch.int64)}
    names = [set(Qwen3(of, Stage(index, 4)).boundary(shapes)) for index in range(4)]
    begun = {"hidden", "layer_sum_0_3"}
    assert names == [begun, begun, begun | {"layer_sum_2_3"}, set()]


def test_a_mean_of_layers_is_that_of_their_states_under_the_final_norm() -> None:
    of = config(heads={"v": {"kind": "embedding", "pooling": "mean", "normalize": False, "layers": [0, -1]}})
    model, inputs, outputs = random_model(of), batch(of), []
    for layer in model.layers.values():
        layer.register_forward_hook(lambda _m, _i, output: outputs.append(output))
    found = model(tokens=inputs["tokens"])["embedding"]
    assert_close_values(found, torch.stack([model.norm(state).mean(1) for state in outputs]).mean(0))


# --- FSDP


CASES = (
    {"added_tokens": 5},
    {"added_tokens": 5, "tie_embeddings": True},
    {"heads": SEVERAL, "num_layers": 4},
)


def sharded_and_whole(cases: list[dict[str, Any]]) -> None:
    """Shards each model over two ranks, which see the same batch, and compares with the whole one."""
    mesh = init_device_mesh("cpu", (2,))
    for changes in cases:
        torch.manual_seed(0)
        whole = random_model(config(**changes))
        sharded = Qwen3(whole.config)
        sharded.load_state_dict(whole.state_dict())
        for layer in sharded.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        outputs = []
        for model in (sharded, whole):
            outputs.append(model(**batch(whole.config)))
            total(outputs[-1]).backward()
        for name, tensor in outputs[1].items():
            assert_close_values(outputs[0][name], tensor)
        found = {name: gradient.full_tensor() for name, gradient in gradients(sharded).items()}
        assert_close_gradients(found, gradients(whole))


@pytest.mark.full
def test_sharded_models_compute_what_whole_ones_do(world: Any) -> None:
    world(2).run(sharded_and_whole, list(CASES))
