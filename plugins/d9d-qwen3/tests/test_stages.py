"""Qwen3 as pipeline stages: which layers, and an embedding that is tied over two of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_core.traits import TensorStyle
from d9d_core.types import TensorSpec
from d9d_engine.compose.initialise import initialise
from d9d_nn.decoder.stages import layers_of
from d9d_qwen3.config import Qwen3Config, tiny
from d9d_qwen3.model import Qwen3
from d9d_qwen3.moe_config import Qwen3MoeConfig
from d9d_testing.suites.support.models import microbatch
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from torch import Tensor


def changed(**fields: Any) -> Qwen3Config:
    return Qwen3Config.model_validate(tiny().model_dump() | fields)


def counts(config: Qwen3Config | Qwen3MoeConfig, stages: int) -> list[int]:
    return [len(layers_of(config, Stage(index, stages))) for index in range(stages)]


def test_a_head_counts_as_the_layers_that_cost_as_much() -> None:
    # Layers of 8b have 193 M matmul parameters and its head 622 M: 3.2 layers.
    assert counts(Qwen3Config(preset="8b"), 4) == [10, 10, 10, 6]
    assert counts(Qwen3Config(preset="8b", heads={"v": {"kind": "embedding"}}), 4) == [9, 9, 9, 9]


def test_a_tied_head_costs_what_an_untied_one_does() -> None:
    tied, untied = (Qwen3Config(preset="0.6b", tie_embeddings=tie) for tie in (True, False))
    assert counts(tied, 4) == counts(untied, 4) == [9, 9, 9, 1]


def test_only_the_experts_of_a_token_count() -> None:
    # 40 M matmul parameters a layer that one token uses, of 604 M; the head has 311 M: 7.8 layers.
    sizes = counts(Qwen3MoeConfig(preset="30b-a3b"), 4)
    assert sum(sizes) == 48
    assert sizes[-1] in (7, 8)
    assert max(sizes[:-1]) - sizes[-1] >= 5


def test_an_embedding_counts_a_little() -> None:
    sizes = {"hidden_size": 64, "num_layers": 9, "vocab_size": 20_000, "heads": {"v": {"kind": "embedding"}}}
    # A sixteenth of 1.28 M, and layers of 15,360: 5.2 layers.
    assert counts(changed(**sizes), 2) == [2, 7]


@pytest.mark.thorough
def test_the_jobs_split_is_followed_by_layers_boundaries_and_sums() -> None:
    config = changed(num_layers=4, heads={"v": {"kind": "embedding", "layers": [1, 3]}})
    stages = [Qwen3(config, Stage(index, 2, (3, 1))) for index in range(2)]
    assert [list(stage.layers) for stage in stages] == [["0", "1", "2"], ["3"]]
    sent = stages[0].boundary({"tokens": TensorSpec((2, 5), torch.int64)})
    assert sent.keys() == {"hidden", "layer_sum_1_3"}
    whole = Qwen3(config)
    for stage in stages:
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
    tokens = torch.randint(64, (2, 5))
    assert_close_values(stages[1](**stages[0](tokens=tokens))["embedding"], whole(tokens=tokens)["embedding"])


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(BuildError, match=r"2 layers cannot be split over 3 pipeline stages.* lower mesh\.pp"):
        Qwen3(tiny(), Stage(0, 3))
    with pytest.raises(BuildError, match=r"pipeline\.layers is \[2, 1\], 3 in all, but the model has 2 layers"):
        Qwen3(tiny(), Stage(0, 2, (2, 1)))


def initialised(config: Qwen3Config, stage: Stage) -> Qwen3:
    with torch.device("meta"):
        model = Qwen3(config, stage)
    model.to_empty(device="cpu")
    initialise(model, 7, torch.device("cpu"))
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("added", [0, 5])
def test_a_tied_embedding_has_an_equal_copy_on_the_last_stage(added: int) -> None:
    """Gradients of the two copies add up to the gradient of the one parameter, also over a stage that has neither."""
    config = changed(tie_embeddings=True, added_tokens=added, num_layers=3)
    whole = initialised(config, Stage())
    stages = [initialised(config, Stage(index, 3)) for index in range(3)]
    names = [{name for name, _ in stage.named_parameters() if name.startswith("embedding")} for stage in stages]
    assert names[0] == names[2] == {name for name, _ in whole.named_parameters() if name.startswith("embedding")}
    assert names[1] == set()
    assert not [name for name, _ in stages[2].named_parameters() if name.startswith("heads")]
    for name in names[0]:
        assert torch.equal(stages[0].get_parameter(name), stages[2].get_parameter(name))

    batch = microbatch(config)
    shared = {name: tensor for name, tensor in batch.items() if name != "tokens"}
    loss = whole(**batch)["token_loss"]
    loss.sum().backward()
    found = stages[2](**stages[1](**stages[0](**batch), **shared), **shared)["token_loss"]
    found.sum().backward()
    assert_close_values(found, loss)
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None
            gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert_close_gradients(gradients, expected)


def test_both_copies_of_a_tied_embedding_may_be_split_over_the_vocabulary() -> None:
    first, last = (Qwen3(changed(tie_embeddings=True), Stage(index, 2)) for index in range(2))
    assert first.tensor_parallel_plan()["embedding"] == last.tensor_parallel_plan()["embedding"] == TensorStyle.VOCAB
    assert "embedding" not in Qwen3(tiny(), Stage(1, 2)).tensor_parallel_plan()
