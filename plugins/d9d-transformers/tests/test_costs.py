"""Costs of transformers' models agree with the models that are built, and with the costs of d9d's own decoders."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar, Literal

import pytest
import torch
from d9d_core.cost import OpCost, Share, StageCost
from d9d_core.errors import BuildError, CheckpointError
from d9d_core.model import Stage
from d9d_nn.attention.core import AttentionCore
from d9d_nn.decoder.config import DenseConfig
from d9d_nn.decoder.costs import dense_cost
from d9d_nn.decoder.presets import Presets
from d9d_transformers import anatomy
from d9d_transformers.build import build
from d9d_transformers.config import TransformersConfig, example
from d9d_transformers.costs import stage_cost
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48,
}  # fmt: skip
#: Tried in each run of the quick tests; the others are tried in .ci/run.
FIRST = ["gemma2", "gpt_oss"]
OTHERS = ["llama", "olmo2", "phi3", "deepseek_v3", "qwen3_moe", "qwen3_next", "lfm2", "olmo"]
kinds = pytest.mark.parametrize("kind", [*FIRST, *(pytest.param(kind, marks=pytest.mark.thorough) for kind in OTHERS)])


class Dense(DenseConfig):
    """Config of a decoder of d9d-nn with the sizes of a model of transformers."""

    presets: ClassVar[Presets] = {}
    name: Literal["dense"] = "dense"


def dense(layers: int = 6, **fields: Any) -> Dense:
    return Dense(**SIZES | {"num_layers": layers, "max_positions": 64} | fields)


def of_type(kind: str, layers: int = 6, **fields: Any) -> TransformersConfig:
    sizes = {"num_hidden_layers": layers, "max_position_embeddings": 64, "tie_word_embeddings": False}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return TransformersConfig(config={"model_type": kind, **SIZES, **sizes, **tokens, **fields})


def parameters(cost: StageCost) -> int:
    return sum((block.parameters + block.expert_parameters) * block.count for block in cost.blocks)


def total(cost: StageCost, field: str) -> float:
    return sum(getattr(op, field) * block.count for block in cost.blocks for op in block.ops)


def ops(cost: StageCost, name: str) -> list[OpCost]:
    return [op for block in cost.blocks for op in block.ops if op.name == name]


@kinds
def test_weights_have_the_names_and_shapes_of_the_stages_that_are_built(kind: str) -> None:
    config = TransformersConfig(config=example(kind).config | {"tie_word_embeddings": kind in ("gemma2", "olmo2")})
    for index, count in ((0, 1), (0, 2), (1, 2)):
        with torch.device("meta"):
            model = build(config, Stage(index, count))
        cost = stage_cost(config, Stage(index, count), Share(2, 64))
        own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        described = {
            f"{name}.{weight.name}" if name else weight.name: weight.shape
            for block in cost.blocks
            for name in block.names or ("",)
            for op in block.ops
            for weight in op.weights
        }
        if model.head_facts.tied:  # one name on all stages
            own.setdefault("model.embed_tokens.weight", (config.vocab_size, 32))
        assert described == own
        assert parameters(cost) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "share",
    [Share(2, 64, compiled=True), Share(2, 64, 4, 2, compiled=True), Share(2, 64, 2, width=4, compiled=True)],
    ids=["alone", "tp and cp", "float32"],
)
@pytest.mark.parametrize(("kind", "head_norms"), [("llama", False), ("qwen3", True)])
def test_compiled_models_cost_what_decoders_of_d9d_cost(kind: str, head_norms: bool, share: Share) -> None:
    for stage in (Stage(), Stage(0, 3), Stage(1, 3), Stage(2, 3)):
        ours, theirs = dense_cost(dense(), stage, share, head_norms=head_norms), stage_cost(of_type(kind), stage, share)
        assert parameters(theirs) == parameters(ours)
        assert theirs.boundary == ours.boundary
        for field in ("flops", "backward_flops", "traffic", "backward_traffic", "kept"):
            assert total(theirs, field) == pytest.approx(total(ours, field), rel=1e-9), field
        for one, other in zip(theirs.blocks, ours.blocks, strict=True):
            facts = ("count", "input", "workspace", "is_block")
            assert [getattr(one, fact) for fact in facts] == [getattr(other, fact) for fact in facts]
            for exchanges in ("exchanges", "backward_exchanges"):
                assert Counter(getattr(one, exchanges)) == Counter(getattr(other, exchanges))


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi3"])
def test_without_a_compiler_a_layer_keeps_the_tensors_that_autograd_saves(kind: str, width: int) -> None:
    config = of_type(kind, 1, hidden_size=256, intermediate_size=512, head_dim=32)
    positions = 64
    with torch.device("meta"):
        model = build(config, Stage()).to({2: torch.bfloat16, 4: torch.float32}[width])
        (layer,) = model.blocks().values()
        for core in (module for module in model.modules() if isinstance(module, AttentionCore)):
            core.forward = anatomy.fused_attention
        saved: dict[int, Any] = {}
        inside: list[bool] = []

        def pack(tensor: Tensor) -> Tensor:
            if inside:
                saved[id(tensor.untyped_storage())] = tensor.untyped_storage()
            return tensor

        layer.register_forward_pre_hook(lambda *_: inside.append(True))
        layer.register_forward_hook(lambda *_: inside.clear())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens=torch.zeros(1, positions, dtype=torch.int64))
    weights = {id(parameter.untyped_storage()) for parameter in model.parameters()}
    kept = sum(memory.nbytes() for key, memory in saved.items() if key not in weights)
    (block,) = (one for one in stage_cost(config, Stage(), Share(1, positions, width=width)).blocks if one.is_block)
    # Sines and cosines are of all layers.
    assert block.kept == pytest.approx(kept, rel=0.03)


def test_an_activation_without_a_gate_reads_and_writes_its_features() -> None:
    for share, kept in ((Share(1, 64, width=2), 2), (Share(1, 64, width=2, compiled=True), 1)):
        cost = stage_cost(of_type("starcoder2", 1), Stage(), share)
        (activation,) = ops(cost, "activation")
        size = 2 * 64 * 48  # bytes of the features of all positions
        assert activation.traffic == 2 * size
        assert activation.backward_traffic == 4 * size
        assert activation.kept == kept * size  # without a compiler the input too
        assert not ops(cost, "silu_mul")


def test_stages_have_layers_by_the_parameters_that_a_token_uses() -> None:
    experts = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = of_type("qwen3_moe", 12, vocab_size=2000, **experts)
    counts = [
        sum(block.count for block in stage_cost(config, Stage(index, 3), Share(2, 64)).blocks if block.is_block)
        for index in range(3)
    ]
    # A token uses 17,000 of the 160,000 parameters of a layer, and all 64,000 of the head.
    assert counts == [5, 5, 2]


def test_experts_are_spread_over_ep_and_tokens_are_sent() -> None:
    alone, spread = (stage_cost(example("deepseek_v3"), Stage(), Share(2, 64, experts=ep)) for ep in (1, 4))
    numbers = [sum(block.expert_parameters * block.count for block in cost.blocks) for cost in (alone, spread)]
    assert numbers[0] == 4 * numbers[1]
    sent = [{exchange.axis for block in cost.blocks for exchange in block.exchanges} for cost in (alone, spread)]
    assert sent == [set(), {"ep"}]


def test_parts_that_are_whole_on_every_rank_gather_positions_or_compute_their_own() -> None:
    alone, split = (stage_cost(of_type("phi3"), Stage(), Share(2, 64, tp)) for tp in (1, 4))
    assert [op.rows for op in ops(split, "qkv_proj")] == [op.rows for op in ops(alone, "qkv_proj")]
    assert [4 * op.rows for op in ops(split, "gate_up_proj")] == [op.rows for op in ops(alone, "gate_up_proj")]
    (layer,) = (block for block in split.blocks if block.is_block)
    assert [exchange.operation for exchange in layer.exchanges] == ["all_gather"]
    assert [exchange.operation for exchange in layer.backward_exchanges] == ["reduce_scatter"]


def test_more_ranks_than_key_and_value_heads_hold_their_weights_whole() -> None:
    (op,) = ops(stage_cost(of_type("llama"), Stage(), Share(2, 64, 8)), "q_proj, k_proj, v_proj")
    assert [weight.shape for weight in op.weights] == [(16, 32), (32, 32), (32, 32)]
    assert op.flops == 2 * 2 * 64 * 32 * (16 + 16 + 16)  # each rank computes one of the two heads


def test_windows_and_soft_caps_and_sinks_are_those_of_the_layers() -> None:
    cost = stage_cost(example("gpt_oss"), Stage(), Share(1, 64))
    flops = [op.flops for op in ops(cost, "attention")]
    assert flops[0] < flops[1]  # every second layer has a window
    sinks = [weight.name for op in ops(cost, "self_attn") for weight in op.weights]
    assert sinks == ["self_attn.sinks"] * 2


def test_experts_that_are_not_replaced_are_measured() -> None:
    config = example("gpt_oss")
    op, *_ = ops(stage_cost(config, Stage(), Share(1, 64)), "mlp.experts")
    # Two of four experts for each token, with three matrices.
    assert op.flops == 64 * 2 * (2 * 3 * 32 * 48)
    assert op.kind == "grouped_product"


@pytest.mark.parametrize(
    ("kind", "share", "text"),
    [
        ("llama", Share(1, 15, 3), "mesh.tp is 3, which does not divide the 8 query heads"),
        ("llama", Share(1, 18, 4), "mesh.tp x mesh.cp = 4 x 1 does not divide the 18 positions"),
        ("llama", Share(1, 64, 32), "mesh.tp is 32, which does not divide the 8 query heads"),
        ("phi3", Share(1, 64, experts=2), "mesh.ep is 2, but the model has no experts that can be split"),
        ("qwen3_moe", Share(1, 64, experts=5), "mesh.ep is 5, which does not divide 4 experts"),
    ],
)
def test_shares_that_cannot_be_are_refused(kind: str, share: Share, text: str) -> None:
    config = of_type(kind, 2) if kind in ("llama", "phi3") else example(kind)
    with pytest.raises(BuildError, match=text):
        stage_cost(config, Stage(), share)


def test_positions_of_a_model_with_other_token_mixers_are_not_split() -> None:
    layers = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
    config = TransformersConfig(config=example("lfm2").config | layers)
    with pytest.raises(BuildError, match="mesh.cp is 2, but model.layers.0.conv mixes tokens"):
        stage_cost(config, Stage(), Share(1, 64, context=2))
    (mixer, *_) = ops(stage_cost(config, Stage(), Share(1, 64)), "conv")
    assert {weight.name for weight in mixer.weights} == {
        "conv.conv.weight", "conv.in_proj.weight", "conv.out_proj.weight"
    }  # fmt: skip


def test_features_that_tp_does_not_divide_are_refused() -> None:
    with pytest.raises(BuildError, match="mesh.tp is 8, which does not divide 44 features of mlp.gate_proj"):
        stage_cost(of_type("llama", 2, intermediate_size=44), Stage(), Share(1, 64, 8))


def test_a_model_is_built_once_for_all_layouts_even_if_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def count(config: TransformersConfig, stage: Stage) -> Any:
        built.append(config)
        return build(config, stage)

    monkeypatch.setattr(anatomy, "build", count)
    for config in (of_type("llama", 3), TransformersConfig(config={"model_type": "no such type"})):
        built.clear()
        for index in range(3):
            try:
                stage_cost(config, Stage(index, 3), Share(1 + index, 64))
            except CheckpointError as error:
                assert "no such type" in str(error)  # noqa: PT017 - the first config is no error
        assert len(built) == 1
