"""Facts about the stages of small models: their plans, boundaries, numbers and inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_core.traits import LateInit, TensorStyle, modules_with
from d9d_core.types import TensorSpec
from d9d_nn.heads.causal_lm import CausalLMHead
from d9d_transformers.balance import Balance
from d9d_transformers.build import build
from d9d_transformers.config import TransformersConfig, example
from d9d_transformers.model import TransformersModel
from torch import Tensor

BALANCING: Any = [{"name": "z_loss"}]


def on_meta(kind: str, stage: Stage = Stage(), *, balancing: Any = None, **fields: Any) -> TransformersModel:  # noqa: B008 - Stage is frozen
    config = TransformersConfig(config={**example(kind).config, **fields}, balancing=balancing)
    with torch.device("meta"):
        return build(config, stage)


def made(kind: str, stage: Stage = Stage(), **given: Any) -> TransformersModel:  # noqa: B008 - Stage is frozen
    torch.manual_seed(0)
    model = on_meta(kind, stage, **given).to_empty(device="cpu")
    for module in modules_with(model, LateInit).values():
        module.reset_parameters()
    return model


def test_a_stage_has_its_blocks_cores_and_head() -> None:
    first, last = (on_meta("llama", Stage(index, 2)) for index in (0, 1))
    names = [f"model.layers.{index}" for index in range(4)]
    assert [*first.blocks(), *last.blocks()] == names
    assert [*first.attention_cores(), *last.attention_cores()] == [f"{name}.self_attn.d9d_core" for name in names]
    assert not hasattr(first, "lm_head")
    assert isinstance(last.lm_head, CausalLMHead)
    assert (first.token_mixers(), first.base_name) == ([], "model")
    layer = 2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    assert first.layer_numbers == last.layer_numbers == 4 * layer


def test_numbers_of_layers_have_the_experts_of_a_token() -> None:
    model = on_meta("qwen3_moe")
    attention = 2 * 32 + 2 * 8 + 2 * 32 * 32 + 2 * 32 * 16
    assert model.layer_numbers == 4 * (attention + 4 * 32 + 2 * 3 * 32 * 24)


@pytest.mark.parametrize(("tied", "last"), [(False, set()), (True, {"model.embed_tokens"})])
def test_a_plan_has_the_modules_of_the_stage(tied: bool, last: set[str]) -> None:
    first, end = (on_meta("llama", Stage(index, 2), tie_word_embeddings=tied) for index in (0, 1))
    norms = [{f"model.layers.{index}.{name}_layernorm" for index in layers for name in ("input", "post_attention")}
             for layers in (first.layer_indices, end.layer_indices)]  # fmt: skip
    own = first.tensor_parallel_plan()
    assert set(own) == {"model.embed_tokens", *norms[0]}
    assert own["model.embed_tokens"] is TensorStyle.VOCAB
    plan = end.tensor_parallel_plan()
    assert set(plan) == {"model.norm", "lm_head", *norms[1], *last}
    assert plan["lm_head"] is TensorStyle.VOCAB
    assert plan["model.norm"] is TensorStyle.SEQUENCE


def test_balances_are_in_the_plan() -> None:
    model = on_meta("qwen3_moe", balancing=BALANCING)
    names = [name for name, module in model.named_modules() if isinstance(module, Balance)]
    assert names == [f"model.layers.{index}.mlp.experts.balance" for index in range(4)]
    plan = model.tensor_parallel_plan()
    assert {plan[name] for name in names} == {TensorStyle.SEQUENCE}
    one = model.get_submodule(names[0])
    assert isinstance(one, Balance)
    assert (one.experts, one.chosen) == (4, 2)


def test_a_stage_sends_its_positions_of_hidden_states() -> None:
    given = {"tokens": TensorSpec((3, 12), torch.int64)}
    first, last = (on_meta("llama", Stage(index, 2)) for index in (0, 1))
    assert last.boundary(given) == {}
    assert first.boundary(given) == {"hidden": TensorSpec((3, 12, 32), torch.float32)}
    first.split_sequence(4)
    assert first.bfloat16().boundary(given) == {"hidden": TensorSpec((3, 3, 32), torch.bfloat16)}


def test_a_stage_asks_for_its_input() -> None:
    first, last = (on_meta("llama", Stage(index, 2)) for index in (0, 1))
    with pytest.raises(ValueError, match="^stage 0 of 2 needs tokens$"):
        first(hidden=torch.zeros(1, 4, 32))
    with pytest.raises(ValueError, match="^stage 1 of 2 needs hidden, returned by the previous stage$"):
        last(tokens=torch.zeros(1, 4, dtype=torch.int64))


class Halves:
    """Share of a rank of two, which has the second half of the positions."""

    ranks = 2

    def own(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(2, dim=1)[1]


def positions_of(model: TransformersModel, **given: Any) -> tuple[Tensor, dict[str, Any]]:
    """Positions and other arguments that the base of a model gets."""
    base: Any = getattr(model, model.base_name)
    calls: list[dict[str, Any]] = []

    def forward(**keywords: Any) -> Any:
        calls.append(keywords)
        first = next(iter(keywords.values()))
        return SimpleNamespace(last_hidden_state=torch.zeros(*first.shape[:2], 32))

    base.forward = forward
    model(**given)
    (call,) = calls
    return call["position_ids"], call


def test_positions_are_counted_over_all_ranks() -> None:
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    model = made("llama")
    positions, call = positions_of(model, tokens=tokens)
    assert positions.tolist() == [list(range(6))]
    assert list(call) == ["input_ids", "position_ids", "use_cache", "d9d_documents"]
    assert call["use_cache"] is False
    stated = torch.arange(12).view(2, 6)
    assert positions_of(model, tokens=tokens, positions=stated)[0] is stated
    model.split_context(Halves())  # type: ignore[arg-type]
    assert positions_of(model, tokens=tokens)[0].tolist() == [list(range(6, 12))]
    last = made("llama", Stage(1, 2))
    last.split_sequence(3)
    positions, call = positions_of(last, hidden=torch.zeros(2, 4, 32))
    assert positions.tolist() == [list(range(12))]
    assert next(iter(call)) == "inputs_embeds"


def test_padding_of_balanced_experts_is_a_mask_of_this_rank() -> None:
    model = made("qwen3_moe", balancing=BALANCING)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    balances = [module for module in model.modules() if isinstance(module, Balance)]
    positions_of(model, tokens=tokens)
    assert [(balance.samples, balance.padding) for balance in balances] == [(2, None)] * 4
    positions_of(model, tokens=tokens, lengths=torch.tensor([4, 1]))
    for balance in balances:
        assert balance.padding is not None
        assert balance.padding.tolist() == [False] * 5 + [True] * 3
    model.split_context(Halves())  # type: ignore[arg-type]
    positions_of(model, tokens=tokens[:1], lengths=torch.tensor([7]))
    for balance in balances:
        assert balance.padding is not None
        assert (balance.padding.tolist(), balance.samples) == ([False] * 3 + [True], 1)
    plain = made("qwen3_moe")
    positions_of(plain, tokens=tokens, lengths=torch.tensor([4, 1]))  # without balancing it has no use


@pytest.mark.parametrize(("kind", "fields", "scale"), [("llama", {}, 1.0), ("granite", {"logits_scaling": 4.0}, 0.25)])
def test_hidden_states_are_multiplied_by_the_factor_of_the_logits(
    kind: str, fields: dict[str, Any], scale: float
) -> None:
    model = made(kind, **fields)
    given: list[Tensor] = []
    head: Any = model.lm_head
    base: Any = getattr(model, model.base_name)
    base.register_forward_hook(lambda *values: given.append(values[-1].last_hidden_state))
    head.register_forward_pre_hook(lambda _, values: given.append(values[0]))
    model(tokens=torch.arange(8).view(1, 8))
    assert model.head_facts.scale == pytest.approx(scale)
    torch.testing.assert_close(given[1], scale * given[0])


def test_a_model_that_cannot_be_split_has_no_plan() -> None:
    model = on_meta("llama")
    model.styles.refusal = "model.x runs before the layers, and is not an embedding"
    with pytest.raises(BuildError, match="^strategy 'tensor_parallel': model.x runs before the layers"):
        model.tensor_parallel_plan()
