"""Costs of stand-in anatomies, call by call, stated by hand or by the formulas of d9d-nn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from d9d_core.cost import BlockCost, Exchange, OpCost, Share, StageCost, Weight
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_core.traits import TensorStyle
from d9d_moe.costs import dispatch, grouped_swiglu, permutation
from d9d_nn.costs import attention, embedding, linear, linear_cross_entropy, rms_norm, rotated_heads, rotation, silu_mul
from d9d_transformers import costs
from d9d_transformers.anatomy import Anatomy, Call, Core, Measured, Parameter
from d9d_transformers.config import TransformersConfig
from d9d_transformers.costs import stage_cost
from d9d_transformers.head import Head

COLUMN, ROW, SEQUENCE = TensorStyle.COLUMN, TensorStyle.ROW, TensorStyle.SEQUENCE
GATHERED, VOCAB, PARTIAL = TensorStyle.GATHERED, TensorStyle.VOCAB, TensorStyle.PARTIAL
CONFIG = TransformersConfig(config={"model_type": "stand_in"})
HEAD = Head("lm_head", "model.embed", 8, 90, 0.02, tied=False, scale=1.0, softcap=None)


def matrix(*shape: int) -> tuple[Parameter, ...]:
    return (Parameter("weight", shape, "linear"),)


EMBED = Call("model.embed", "embedding", VOCAB, 1.0, 1, 8, 0, 1, (Parameter("weight", (90, 8), "embedding"),))
FINAL = Call("model.norm", "norm", SEQUENCE, 1.0, 8, 8, 0, 1, (Parameter("weight", (8,), "other"),))
NORM = Call("norm", "norm", SEQUENCE, 1.0, 8, 8, 0, 1, (Parameter("weight", (8,), "other"),))
QUERY = Call("attn.q", "linear", COLUMN, 1.0, 8, 16, 1, 2, matrix(16, 8), True, heads=4)
KEY = Call("attn.k", "linear", COLUMN, 1.0, 8, 8, 1, 3, matrix(8, 8), True, heads=2)
CORE = Call("attn.core", "attention", None, 4.0, 4, 4, 5, 6, (), True, core=Core(4, 2, 4, None))
OUT = Call("attn.o", "linear", ROW, 1.0, 16, 8, 6, 7, matrix(8, 16), True)
POST = replace(NORM, path="post", reads=29, writes=30)
UP = Call("mlp.up", "linear", COLUMN, 1.0, 8, 24, 1, 8, matrix(24, 8), True)
GATE = Call("mlp.gate", "linear", COLUMN, 1.0, 8, 24, 1, 9, matrix(24, 8), True)
DOWN = Call("mlp.down", "linear", ROW, 1.0, 24, 8, 10, 11, matrix(8, 24), True)
BANKS = tuple(
    Parameter(f"bank.{name}", shape, "bank")
    for name, shape in (("gate_proj", (4, 8, 6)), ("up_proj", (4, 8, 6)), ("down_proj", (4, 6, 8)))
)
EXPERTS = Call("mlp.experts", "experts", SEQUENCE, 1.0, 8, 8, 1, 9, BANKS, True, chosen=2)
MIXER = Call(
    "conv", "other", GATHERED, 1.0, 8, 8, 1, 2, (Parameter("in.weight", (24, 8), "linear"),
    Parameter("conv.weight", (24, 1, 3), "other")), measured=Measured(100.0, 32.0, True),
)  # fmt: skip
OTHER = Call(
    "mlp.grouped", "other", SEQUENCE, 1.0, 8, 10, 1, 2, (Parameter("both", (4, 8, 6), "other"),), True,
    measured=Measured(10.0, 4.0, False),
)  # fmt: skip
IDLE = Call("attn", "idle", None, parameters=(Parameter("sinks", (4,), "other"),))


FEED_FORWARD = NORM, QUERY, KEY, CORE, OUT, POST, replace(UP, reads=30), replace(GATE, reads=30), DOWN


def anatomy_of(*kinds: tuple[Call, ...], kind: tuple[int, ...] | None = None, **fields: Any) -> Anatomy:
    found = Anatomy(
        "model.layers", kinds, tuple(range(len(kinds))) if kind is None else kind, (0.0,) * len(kinds), (EMBED,),
        (FINAL,), HEAD, 10_000 * len(kinds), (), None,
    )  # fmt: skip
    return replace(found, **fields)


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    def of(model: Anatomy, share: Share, stage: Stage = Stage()) -> StageCost:  # noqa: B008 - Stage is frozen
        def known(config: TransformersConfig, width: int) -> Anatomy:
            assert (config, width) == (CONFIG, share.width)
            return model

        monkeypatch.setattr(costs, "anatomy", known)
        return stage_cost(CONFIG, stage, share)

    return of


def layer_of(cost: Any, calls: tuple[Call, ...], share: Share, **fields: Any) -> BlockCost:
    (block,) = (one for one in cost(anatomy_of(calls, **fields), share).blocks if one.is_block)
    assert isinstance(block, BlockCost)
    return block


def weight(name: str, *shape: int, kind: Any = "linear", cut: int | None = None) -> tuple[Weight, ...]:
    return (Weight(name, shape, kind, cut),)


def test_a_dense_layer_on_one_rank(cost: Any) -> None:
    share = Share(2, 6, width=2)
    block = layer_of(cost, FEED_FORWARD, share)
    both = weight("mlp.up.weight", 24, 8, cut=0) + weight("mlp.gate.weight", 24, 8, cut=0)
    pair = weight("attn.q.weight", 16, 8, cut=0) + weight("attn.k.weight", 8, 8, cut=0)
    assert block == BlockCost(
        "layer",
        (
            rms_norm("norm", 12, 8, 2, weights=weight("norm.weight", 8, kind="other")),
            linear("q, k", 12, 8, 24, 2, keeps_input=True, weights=pair),
            rotation(12, 6, 4, 2),
            attention(12, 3.0, 4, 2, 4, 2),
            linear("o", 12, 16, 8, 2, keeps_input=False, weights=weight("attn.o.weight", 8, 16, cut=1)),
            rms_norm("post", 12, 8, 2, weights=weight("post.weight", 8, kind="other")),
            linear("up, gate", 12, 8, 48, 2, keeps_input=True, weights=both),
            silu_mul(12, 24, 2, compiled=False),
            linear("down", 12, 24, 8, 2, keeps_input=False, weights=weight("mlp.down.weight", 8, 24, cut=1)),
        ),
        8 + 8 + 16 * 8 + 8 * 8 + 8 * 16 + 3 * 24 * 8,
        0,
        2 * 12 * 8,
        3 * 2 * 12 * 8 + 2 * 12 * 48,
        count=1,
        names=("model.layers.0",),
    )


def test_a_dense_layer_on_several_ranks(cost: Any) -> None:
    share = Share(2, 8, 4, 2, width=2, compiled=True)
    block = layer_of(cost, FEED_FORWARD, share)
    both = weight("mlp.up.weight", 6, 8, cut=0) + weight("mlp.gate.weight", 6, 8, cut=0)
    # Four ranks share two key heads: each holds the whole weight, and computes one head.
    pair = weight("attn.q.weight", 4, 8, cut=0) + weight("attn.k.weight", 8, 8)
    gather, scatter = Exchange("all_gather", "tp", 2 * 8 * 8), Exchange("reduce_scatter", "tp", 2 * 8 * 8)
    assert block == BlockCost(
        "layer",
        (
            rms_norm("norm", 2, 8, 2, weights=weight("norm.weight", 8, kind="other")),
            linear("q, k", 8, 8, 4 + 4, 2, keeps_input=True, weights=pair),
            rotation(8, 1 + 1, 4, 2),
            attention(8, 4.0, 1, 1, 4, 2),
            linear("o", 8, 4, 8, 2, keeps_input=False, weights=weight("attn.o.weight", 8, 4, cut=1)),
            rms_norm("post", 2, 8, 2, weights=weight("post.weight", 8, kind="other")),
            linear("up, gate", 8, 8, 12, 2, keeps_input=True, weights=both),
            silu_mul(8, 6, 2, compiled=True),
            linear("down", 8, 6, 8, 2, keeps_input=False, weights=weight("mlp.down.weight", 8, 6, cut=1)),
        ),
        8 + 8 + 4 * 8 + 8 * 8 + 8 * 4 + 3 * 6 * 8,
        0,
        2 * 2 * 8,
        3 * 2 * 2 * 8 + 2 * 8 * 12,
        (gather, scatter, gather, scatter),
        (scatter, gather, scatter, gather),
        count=1,
        names=("model.layers.0",),
    )


def test_the_first_stage_has_the_embedding_and_the_last_one_the_head(cost: Any) -> None:
    model = anatomy_of((NORM, UP), (NORM,), kind=(0, 1, 0, 0), numbers=1200)
    for tp in (1, 4):
        share = Share(2, 8, tp, width=2)
        first, last = (cost(model, share, Stage(index, 2)) for index in (0, 1))
        words, size = {1: 90, 4: 23}[tp], 2 * 16 * 8
        table = weight("model.embed.weight", words, 8, kind="embedding", cut=0)
        gather, scatter = (Exchange(kind, "tp", size) for kind in ("all_gather", "reduce_scatter"))  # type: ignore[arg-type]
        split = tp > 1
        assert first.blocks[0] == BlockCost(
            "embedding", (embedding(16, words, 8, 2, weights=table),), words * 8, is_block=False,
            exchanges=(scatter,) * split, backward_exchanges=(gather,) * split,
        )  # fmt: skip
        projection = weight("lm_head.weight", words, 8, kind="head", cut=0)
        ops, workspace = linear_cross_entropy(16, 8, words, 2, share.memory, weights=projection)
        norm = rms_norm("norm", 16 / tp, 8, 2, weights=weight("model.norm.weight", 8, kind="other"))
        assert last.blocks[-1] == BlockCost(
            "norm and heads", (norm, *ops), 8 + words * 8, workspace=workspace, is_block=False,
            exchanges=(gather,) * split, backward_exchanges=(scatter,) * split,
        )  # fmt: skip
        assert (first.boundary, last.boundary) == (2 * 16 * 8 / tp, 0.0)
        assert [block.names for block in first.blocks[1:]] == [
            ("model.layers.0", "model.layers.2"),
            ("model.layers.1",),
        ]
        assert [block.count for block in first.blocks[1:]] == [2, 1]
        assert [block.names for block in last.blocks[:-1]] == [("model.layers.3",)]
    middle = cost(model, Share(2, 8), Stage(1, 3))
    assert [block.is_block for block in middle.blocks] == [True, True]  # neither embedding nor head


@pytest.mark.parametrize(
    ("stage", "tied", "numbers", "name"),
    [
        (Stage(), True, 8, "model.embed"),
        (Stage(), False, 8 + 720, "lm_head"),
        (Stage(1, 2), True, 8 + 720, "model.embed"),
        (Stage(1, 2), False, 8 + 720, "lm_head"),
    ],
)
def test_a_tied_head_has_a_weight_of_its_own_only_on_another_stage(
    cost: Any, stage: Stage, tied: bool, numbers: int, name: str
) -> None:
    model = anatomy_of((NORM,), (UP,), head=replace(HEAD, tied=tied))
    block = cost(model, Share(2, 8), stage).blocks[-1]
    assert block.parameters == numbers
    assert [one.name for op in block.ops for one in op.weights] == ["model.norm.weight", f"{name}.weight"]


def test_experts_on_several_ranks(cost: Any) -> None:
    share = Share(2, 8, 2, experts=2, width=2)
    block = layer_of(cost, (NORM, EXPERTS), share)
    sent = dispatch(8, 4, 2, 8, 2, 2)
    banks = tuple(
        Weight(f"mlp.experts.bank.{name}", shape, "bank")
        for name, shape in (("gate_proj", (2, 8, 6)), ("up_proj", (2, 8, 6)), ("down_proj", (2, 6, 8)))
    )
    state = 2 * 8 * 8
    assert block == BlockCost(
        "layer with experts",
        (
            rms_norm("norm", 8, 8, 2, weights=weight("norm.weight", 8, kind="other", cut=None)),
            OpCost("tokens", "memory", kept=2 * 8 * 8),
            permutation(8, 16, 8, 2),
            *grouped_swiglu(16, 8, 6, 2, 2, compiled=False, weights=banks),
            *sent.ops,
        ),
        8,
        2 * 3 * 8 * 6,
        state,
        3 * state + 2 * 2 * 16 * (8 + 6) + sent.workspace,
        sent.exchanges,
        sent.backward_exchanges,
        count=1,
        names=("model.layers.0",),
    )
    again = layer_of(cost, (replace(UP, reads=1), EXPERTS), Share(2, 8))
    assert not [op for op in again.ops if op.name == "tokens"]  # the linear layer keeps them


def test_modules_of_other_kinds_have_their_measured_costs(cost: Any) -> None:
    block = layer_of(cost, (MIXER, OTHER, IDLE), Share(2, 8, 2, width=2))
    mixer, other, idle = block.ops
    numbers = 24 * 8 + 24 * 3
    traffic = 2 * (16 * (8 + 8) + numbers) + 32 * 16
    weights = weight("conv.in.weight", 24, 8) + weight("conv.conv.weight", 24, 1, 3, kind="other")
    assert mixer == OpCost("conv", "product", 1600.0, 3200.0, traffic, 2 * traffic, 32 * 16 + 2 * 16 * 8, 16, weights)
    traffic = 2 * (8 * (8 + 10) + 4 * 8 * 6) + 4 * 8
    banks = weight("mlp.grouped.both", 4, 8, 6, kind="other")
    assert other == OpCost("mlp.grouped", "grouped_product", 80.0, 160.0, traffic, 2 * traffic, 4 * 8, 8, banks)
    assert idle == OpCost("attn", "memory", weights=weight("attn.sinks", 4, kind="other"))
    assert block.parameters == numbers + 4 * 8 * 6 + 4
    state = 2 * 8 * 8
    assert block.workspace == 3 * state + 32 * 16
    gathered = (Exchange("all_gather", "tp", 2 * 16 * 8),)
    assert (block.exchanges, block.backward_exchanges) == (
        gathered, (Exchange("reduce_scatter", "tp", 2 * 16 * 8),)
    )  # fmt: skip
    kept = layer_of(cost, (UP, MIXER), Share(2, 8)).ops[1]
    assert kept.kept == 32 * 16  # the linear layer keeps the input


def test_parameters_of_a_layer_itself_have_no_path(cost: Any) -> None:
    call = Call("", "idle", SEQUENCE, parameters=(Parameter("scale", (8,), "other"),))
    (op,) = layer_of(cost, (call,), Share(2, 8)).ops
    assert op.weights == weight("scale", 8, kind="other")


@pytest.mark.parametrize("tp", [1, 2])
def test_norms_of_queries_and_keys_include_the_rotation(cost: Any, tp: int) -> None:
    share = Share(2, 8, tp, width=2)
    own = (Parameter("weight", (4,), "other"),)
    queries = Call("attn.q_norm", "norm", PARTIAL, 4.0, 4, 4, 2, 4, own, True)
    keys = Call("attn.k_norm", "norm", PARTIAL, 2.0, 4, 4, 3, 5, own, True)
    core = replace(CORE, reads=20)
    ops = layer_of(cost, (QUERY, KEY, queries, keys, core), share).ops
    assert [op.name for op in ops] == ["q, k", "q_norm", "k_norm", "attention"]
    for op, rows, name in ((ops[1], 4 / tp, "q_norm"), (ops[2], 2 / tp, "k_norm")):
        known = weight(f"attn.{name}.weight", 4, kind="other")
        assert op == replace(rotated_heads(16 * rows, 1, 4, 2, weights=known), name=name)
    alone = layer_of(cost, (QUERY, KEY, queries, core), share).ops
    assert [op.name for op in alone] == ["q, k", "q_norm", "rope", "attention"]  # keys are not normed
    unrotated = layer_of(cost, (QUERY, KEY, replace(core, reads=2)), share).ops
    assert [op.name for op in unrotated] == ["q, k", "attention"]  # attention reads the projection itself


def test_a_norm_of_one_head_for_more_ranks_has_a_row_for_each_rank(cost: Any) -> None:
    keys = Call("attn.k_norm", "norm", PARTIAL, 2.0, 4, 4, 3, 5, (), True)
    (op,) = layer_of(cost, (keys,), Share(2, 8, 4)).ops
    assert op.rows == 16
    (own,) = layer_of(cost, (replace(keys, style=None, rows=0.5),), Share(2, 8, 4)).ops
    assert own.rows == 8


def test_a_norm_after_a_module_of_the_layer_adds_no_residual(cost: Any) -> None:
    share = Share(2, 8)
    after = replace(NORM, path="after", reads=11)
    ops = layer_of(cost, (DOWN, after, replace(NORM, path="next", reads=30)), share).ops
    size = 2 * 16 * 8
    assert [(op.name, op.traffic) for op in ops[1:]] == [("after", 2 * size), ("next", 4 * size)]


def test_a_window_and_repeated_heads_and_gathered_attention(cost: Any) -> None:
    core = replace(CORE, core=Core(4, 2, 4, 4))
    (_, op) = layer_of(cost, (core,), Share(2, 8)).ops
    assert op == attention(16, 4 - 16 / 16, 4, 2, 4, 2)
    (rotated, op) = layer_of(cost, (replace(core, style=GATHERED),), Share(2, 8, 8)).ops
    assert rotated == rotation(16, 6, 4, 2)
    assert op == attention(16, 3, 4, 2, 4, 2)


@pytest.mark.parametrize(("compiled", "kept"), [(False, 2), (True, 1)])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_activation_with_and_without_a_gate(cost: Any, compiled: bool, kept: int, tp: int) -> None:
    share = Share(2, 8, tp, compiled=compiled)
    block = layer_of(cost, (UP, DOWN), share)
    size = 2 * 16 * 24 / tp
    assert block.ops[1] == OpCost("activation", "memory", traffic=2 * size, backward_traffic=4 * size, kept=kept * size)
    assert block.workspace == 3 * 2 * 16 * 8 / tp + size
    fused = replace(UP, path="mlp.both", outputs=48, parameters=matrix(48, 8))
    gated = layer_of(cost, (fused, DOWN), share)
    assert gated.ops[1] == silu_mul(16, 24 / tp, 2, compiled=compiled)
    assert gated.workspace == 3 * 2 * 16 * 8 / tp + 2 * size


def test_linear_layers_without_an_activation_between_them(cost: Any) -> None:
    share = Share(2, 8)
    for second in (replace(DOWN, reads=8), replace(DOWN, reads=0)):  # its output, or the layer's input
        assert [op.name for op in layer_of(cost, (UP, second), share).ops] == ["up", "down"]
    assert [op.name for op in layer_of(cost, (DOWN,), share).ops] == ["down"]
    assert [op.name for op in layer_of(cost, (UP, NORM, DOWN), share).ops] == ["up", "norm", "down"]
    assert [op.name for op in layer_of(cost, (UP, CORE, DOWN), share).ops] == ["up", "rope", "attention", "down"]
    names = [op.name for op in layer_of(cost, (NORM, UP, GATE, replace(KEY, style=None), DOWN), share).ops]
    assert names[1:] == ["up, gate", "k", "activation", "down"]  # another style is another product


def test_rows_of_a_linear_layer_count_its_heads_and_its_style(cost: Any) -> None:
    share = Share(2, 8, 2)
    (op,) = layer_of(cost, (replace(UP, style=SEQUENCE, rows=3.0),), share).ops
    assert op == linear("up", 8 * 3, 8, 24, 2, weights=weight("mlp.up.weight", 24, 8))
    (op,) = layer_of(cost, (replace(DOWN, parameters=(*matrix(8, 24), Parameter("bias", (8,), "other"))),), share).ops
    assert op.weights == (*weight("mlp.down.weight", 8, 12, cut=1), *weight("mlp.down.bias", 8, kind="other"))


@pytest.mark.parametrize(("kept", "extra"), [(100.0, 100 - 36), (36.5, 0.5), (36.0, None), (20.0, None)])
def test_a_layer_without_a_compiler_keeps_more_than_fused_code(cost: Any, kept: float, extra: float | None) -> None:
    # Fused code keeps 2 x 8 + 4 bytes per position for the norm, and 2 x 8 for the linear layer; the bytes of experts
    # are separate.
    calls = NORM, replace(UP, reads=1), replace(EXPERTS, reads=1)
    for share in (Share(2, 8), Share(2, 8, 2, experts=2)):
        block = layer_of(cost, calls, share, kept=(kept,))
        found = [op for op in block.ops if op.name == "unfused kernels"]
        if extra is None:
            assert found == []
        else:
            size = extra * 16 / share.tensor
            assert found == [
                OpCost("unfused kernels", "memory", traffic=2 * size, backward_traffic=2 * size, kept=size)
            ]
        compiled = layer_of(cost, calls, replace(share, compiled=True), kept=(kept,))
        assert not [op for op in compiled.ops if op.name == "unfused kernels"]


@pytest.mark.parametrize(
    ("calls", "fields", "share", "text"),
    [
        ((NORM,), {}, Share(1, 6, 2, 2), "mesh.tp x mesh.cp = 2 x 2 does not divide the 6 positions of a sample"),
        ((NORM,), {"refusal": "a b"}, Share(1, 8, 2), "^mesh.tp is 2, but a b$"),
        ((NORM,), {"mixers": ("c", "d")}, Share(1, 8, 1, 2), "mesh.cp is 2, but c mixes tokens and needs whole"),
        ((NORM,), {}, Share(1, 8, experts=2), "mesh.ep is 2, but the model has no experts that can be split"),
        ((EXPERTS,), {}, Share(1, 8, experts=3), "mesh.ep is 3, which does not divide 4 experts; choose a divisor"),
        ((QUERY, CORE), {}, Share(1, 24, 3), "mesh.tp is 3, which does not divide the 4 query heads of the model"),
        (
            (replace(CORE, core=Core(12, 8, 4, None)),),
            {},
            Share(1, 24, 12),
            "mesh.tp is 12, neither a divisor nor a multiple of the 8 key and value heads; choose one",
        ),
        ((replace(UP, outputs=25),), {}, Share(1, 8, 2), "mesh.tp is 2, which does not divide 25 features of mlp.up"),
        ((replace(DOWN, features=25),), {}, Share(1, 8, 2), "mesh.tp is 2, .* divide 25 features of mlp.down"),
        ((replace(KEY, outputs=9),), {}, Share(1, 8, 2), "mesh.tp is 2, which does not divide 9 features of attn.k"),
    ],
)  # fmt: skip
def test_shares_that_a_model_cannot_have_are_refused(
    cost: Any, calls: tuple[Call, ...], fields: dict[str, Any], share: Share, text: str
) -> None:
    with pytest.raises(BuildError, match=text):
        cost(anatomy_of(calls, **fields), share)


@pytest.mark.parametrize(
    ("calls", "fields", "share"),
    [
        ((NORM,), {"refusal": "a b", "mixers": ("c",)}, Share(1, 8)),
        ((NORM,), {"refusal": "a b"}, Share(1, 8, 1, 2)),
        ((NORM,), {"mixers": ("c",)}, Share(1, 8, 2)),
        ((NORM, EXPERTS), {}, Share(1, 8, experts=4)),
        ((CORE,), {}, Share(1, 8, 4)),
        ((replace(CORE, style=GATHERED),), {}, Share(1, 24, 3)),
        ((replace(UP, outputs=25, style=SEQUENCE),), {}, Share(1, 8, 2)),
        ((replace(KEY, outputs=10),), {}, Share(1, 8, 4)),  # every rank holds it whole
        ((MIXER,), {}, Share(1, 24, 3)),
    ],
)
def test_shares_that_a_model_can_have(cost: Any, calls: tuple[Call, ...], fields: dict[str, Any], share: Share) -> None:
    assert cost(anatomy_of(calls, **fields), share).blocks


def test_parts_exchange_hidden_states_once(cost: Any) -> None:
    share = Share(1, 8, 2)
    gathered = [replace(UP, path=path, style=GATHERED) for path in ("attn.q", "attn.k", "conv")]
    block = layer_of(cost, (*gathered, replace(QUERY, path="mlp.one.q"), replace(QUERY, path="mlp.other.q")), share)
    size = 2 * 8 * 8
    assert block.exchanges == (Exchange("all_gather", "tp", size),) * 4
    assert block.backward_exchanges == (Exchange("reduce_scatter", "tp", size),) * 4
    rows = layer_of(cost, (OUT, replace(OUT, path="attn.p"), EMBED), share)
    assert rows.exchanges == (Exchange("reduce_scatter", "tp", size),) * 3
    assert layer_of(cost, (NORM, CORE, replace(UP, style=PARTIAL)), share).exchanges == ()
    mixed = layer_of(cost, (EXPERTS, OUT), Share(1, 8, 2, experts=2))
    sent = dispatch(4, 4, 2, 8, 2, 2)
    assert mixed.exchanges == (*sent.exchanges, Exchange("reduce_scatter", "tp", size))
    assert mixed.backward_exchanges == (*sent.backward_exchanges, Exchange("all_gather", "tp", size))


def test_nothing_before_the_layers_costs_nothing(cost: Any) -> None:
    model = anatomy_of((NORM,), before=())
    assert cost(model, Share(1, 8, 2)).blocks[0] == BlockCost("embedding", (), 0, is_block=False)
