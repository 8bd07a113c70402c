from __future__ import annotations

import pytest
import torch
from d9d_core.kernel import OpSignature, OpSlot
from d9d_core.model import Stage
from d9d_core.traits import HasOps, modules_with
from d9d_nn.decoder.flops import training_flops_per_token
from d9d_nn.ops.attention import sdpa
from d9d_qwen3.config import Qwen3Config, tiny
from d9d_qwen3.model import Qwen3
from d9d_testing.suites.support.models import microbatch
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode


@pytest.fixture(autouse=True)
def same_weights_in_every_run() -> None:
    torch.manual_seed(0)


def attention_slots(model: Qwen3) -> list[OpSlot]:
    slots = [slot for module in modules_with(model, HasOps).values() for slot in module.op_slots().values()]
    return [slot for slot in slots if slot.op == "attention"]


@pytest.mark.thorough
def test_every_layer_computes_the_same_with_sdpa() -> None:
    reference = Qwen3(tiny())
    fused = Qwen3(tiny())
    fused.load_state_dict(reference.state_dict())
    assert len(attention_slots(fused)) == tiny().num_layers
    for slot in attention_slots(fused):
        slot.bind("sdpa", sdpa.build(OpSignature("attention", "cpu", "float32", slot.static)))
    results = []
    for model in (fused, reference):
        loss = model(**microbatch(tiny()))["token_loss"]
        loss.sum().backward()
        results.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    assert_close_values(results[0][0], results[1][0])
    assert_close_gradients(results[0][1], results[1][1])


def test_positions_may_start_anywhere() -> None:
    model, batch = Qwen3(tiny()), microbatch(tiny())
    shifted = {**batch, "positions": batch["positions"] + 3}
    torch.testing.assert_close(model(**shifted)["token_loss"], model(**batch)["token_loss"], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_tied_embeddings_are_one_parameter_under_the_embeddings_name() -> None:
    tied = Qwen3(tiny().model_copy(update={"tie_embeddings": True}))
    assert {name for name, _ in Qwen3(tiny()).named_parameters()} - {name for name, _ in tied.named_parameters()} == {
        "heads.causal_lm.weight"
    }
    with torch.device("meta"):
        materialised = Qwen3(tied.config).to_empty(device="cpu")
    materialised.load_state_dict(tied.state_dict())
    batch = microbatch(tiny())
    assert_close_values(materialised(**batch)["token_loss"], tied(**batch)["token_loss"])


def test_stages_say_what_they_miss() -> None:
    with pytest.raises(ValueError, match="first pipeline stage of qwen3 needs the input 'tokens'"):
        Qwen3(tiny())()
    with pytest.raises(ValueError, match="stage 1 of qwen3 needs 'hidden'"):
        Qwen3(tiny(), Stage(1, 2))(tokens=torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_what_a_step_executes(tied: bool) -> None:
    config, length = tiny().model_copy(update={"tie_embeddings": tied}), 16
    model, tokens = Qwen3(config), torch.zeros(2, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens=tokens, targets=tokens)["token_loss"].sum().backward()
    # The reference computes the whole square of attention, the formula counts its causal half.
    half = 6 * config.num_layers * config.num_attention_heads * config.head_dim * length
    assert counter.get_total_flops() / tokens.numel() == training_flops_per_token(config, length) + half


def test_output_projections_start_smaller_in_deep_models() -> None:
    config = tiny().model_copy(update={"hidden_size": 128, "num_layers": 8})
    block = Qwen3(config).layers["0"]
    assert block.attention.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert block.attention.o_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert block.ffn.down_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)


SIZES = {"vocab_size": 64, "hidden_size": 30, "intermediate_size": 48, "num_layers": 2, "num_attention_heads": 3}


def test_head_dim_defaults_to_an_even_share() -> None:
    assert Qwen3Config(**SIZES, num_key_value_heads=3).head_dim == 10
    assert Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=64).head_dim == 64


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads", "2 does not divide num_attention_heads = 3"),
        ({"num_attention_heads": 4}, "head_dim", "hidden_size = 30 is not a multiple of num_attention_heads = 4"),
        ({"head_dim": 7}, "head_dim", "7 is odd"),
        ({"hidden_size": 0}, "hidden_size", "greater than 0"),
        ({"num_layers": -1}, "num_layers", "greater than 0"),
        ({"rope_theta": 0.5}, "rope_theta", "greater than 1"),
        ({"hiden_size": 4}, "hiden_size", "did you mean 'hidden_size'?"),
        ({"initialization": {"std": 0}}, "initialization", "greater than 0"),
    ],
)
def test_impossible_configs_are_refused_where_they_are_wrong(changes: dict, field: str, text: str) -> None:
    with pytest.raises(ValidationError) as error:
        Qwen3Config.model_validate({**SIZES, "num_key_value_heads": 1, **changes})
    (line,) = error.value.errors()
    assert line["loc"][0] == field
    assert text in line["msg"]
