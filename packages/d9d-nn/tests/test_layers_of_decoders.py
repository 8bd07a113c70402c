"""Slots, plans and collectives of the layers of decoders, and sizes that a distillation refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.kernel import OpSignature
from d9d_core.strategy import StepShape
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.decoder.block import DecoderBlock, grouped_query_attention, swiglu
from d9d_nn.decoder.config import DenseConfig
from d9d_nn.distillation import task as distillation
from d9d_nn.embedding import TokenEmbedding
from d9d_nn.heads.causal_lm import RANKS, CausalLMHead
from d9d_nn.linear import Linear, is_plain
from d9d_nn.ops import attention_inputs, normed_rope
from d9d_nn.ops import swiglu as swiglu_op
from d9d_nn.ops.attention.sdpa_pinned import CUDNN, FLASH, PinnedKernel
from d9d_nn.rope.rotary_embedding import RotaryEmbedding
from d9d_nn.swiglu import SwiGLU
from torch import Tensor, nn


def attention(**more: Any) -> GroupedQueryAttention:
    return GroupedQueryAttention(8, query_heads=4, key_value_heads=2, head_dim=4, std=0.02, output_std=0.01, **more)


def test_a_layer_is_plain_unless_it_has_a_bias_or_was_replaced() -> None:
    assert is_plain(Linear(2, 3, std=0.1))
    assert not is_plain(Linear(2, 3, std=0.1, bias=True))
    replaced = Linear(2, 3, std=0.1)
    replaced.forward = lambda rows: rows  # type: ignore[method-assign]
    assert not is_plain(replaced)
    other: Any = type("Other", (Linear,), {})(2, 3, std=0.1)
    assert not is_plain(other)


def test_attention_offers_the_ops_before_it_as_one_if_its_heads_are_normalised() -> None:
    plain = attention()
    assert list(plain.op_slots()) == ["rope"]
    assert plain.adjacent_weights() == []
    normed = attention(head_norm_eps=1e-6)
    assert list(normed.op_slots()) == ["rope", "normed_rope", "attention_inputs"]
    assert normed.adjacent_weights() == [("q_proj.weight", "k_proj.weight", "v_proj.weight")]
    normed.k_proj = Linear(8, 8, std=0.1, bias=True)
    assert list(normed.op_slots()) == ["rope", "normed_rope"]
    assert normed.adjacent_weights() == []
    assert list(normed.attention_cores()) == ["core"]


def test_an_output_gate_multiplies_each_head_and_has_its_rows_in_the_query_projection() -> None:
    gated, plain = attention(head_norm_eps=1e-6, output_gate=True), attention(head_norm_eps=1e-6)
    assert gated.q_proj.weight.shape == (2 * 4 * 4, 8)
    assert list(gated.op_slots()) == ["rope", "normed_rope"]
    assert gated.adjacent_weights() == []
    rows = gated.q_proj.weight.detach().view(4, 2, 4, 8)  # heads, query and gate, features
    nn.init.normal_(rows)
    state = {name: tensor for name, tensor in gated.state_dict().items() if name != "q_proj.weight"}
    plain.load_state_dict(state | {"q_proj.weight": rows[:, 0].reshape(16, 8)})
    hidden, rotation = torch.randn(2, 5, 8), RotaryEmbedding(4, theta=100.0)(torch.arange(5)[None])
    mixed: list[Tensor] = []
    plain.core.register_forward_hook(lambda _module, _inputs, out: mixed.append(out))
    plain(hidden, rotation, None)
    gates = torch.einsum("bsh,ndh->bsnd", hidden, rows[:, 1]).sigmoid()
    expected = plain.o_proj((mixed[0] * gates).flatten(2))
    torch.testing.assert_close(gated(hidden, rotation, None), expected)


def test_a_swiglu_offers_the_whole_layer_unless_a_projection_was_changed() -> None:
    layer = SwiGLU(4, 6, std=0.02, output_std=0.01)
    assert list(layer.op_slots()) == ["silu_mul", "swiglu"]
    assert layer.adjacent_weights() == [("gate_proj.weight", "up_proj.weight")]
    assert [tuple(one.weight.shape) for one in (layer.gate_proj, layer.up_proj, layer.down_proj)] == [
        (6, 4), (6, 4), (4, 6),
    ]  # fmt: skip
    layer.up_proj = Linear(4, 6, std=0.1, bias=True)
    assert list(layer.op_slots()) == ["silu_mul"]
    assert layer.adjacent_weights() == []


def test_arguments_of_whole_ops_are_weights_in_the_order_of_the_op() -> None:
    def layer(value: float) -> Any:
        return SimpleNamespace(weight=torch.full((1,), value), factor=lambda: torch.full((1,), value), eps=0.5)

    module = SimpleNamespace(
        gate_proj=layer(1), up_proj=layer(2), down_proj=layer(3), q_proj=layer(4), k_proj=layer(5), v_proj=layer(6),
        q_norm=layer(7), k_norm=layer(8),
    )  # fmt: skip
    hidden, rotation = torch.zeros(1), SimpleNamespace(cos="cos", sin="sin")
    found = swiglu_op._arguments(module, hidden)
    assert [one.item() for one in found] == [0.0, 1.0, 2.0, 3.0]
    inputs = attention_inputs._arguments(module, hidden, rotation)
    assert [one.item() for one in inputs[:6]] == [0.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert inputs[6:] == ("cos", "sin", 0.5)
    both: Any = ("query", "key")
    normed = normed_rope._arguments(module, *both, rotation)
    assert normed[:2] == both
    assert [one.item() for one in normed[2:4]] == [7.0, 8.0]
    assert normed[4:] == ("cos", "sin", 0.5)
    plain, hooked = Linear(1, 1, std=0.1), Linear(1, 1, std=0.1)
    hooked.register_forward_hook(lambda *_: None)
    for names, fits in (
        (("gate_proj", "up_proj", "down_proj"), swiglu_op._fits),
        (("q_proj", "k_proj", "v_proj"), attention_inputs._fits),
    ):
        assert fits(SimpleNamespace(**dict.fromkeys(names, plain)))
        for name in names:
            assert not fits(SimpleNamespace(**{**dict.fromkeys(names, plain), name: hooked}))


def test_queries_keys_and_values_are_rows_of_their_weights() -> None:
    x = torch.arange(6.0).reshape(1, 2, 3)
    found = attention_inputs.project(x, torch.eye(3).repeat(2, 1)[:4], 2)
    assert found.shape == (1, 2, 2, 2)
    assert found.tolist() == [[[[0.0, 1.0], [2.0, 0.0]], [[3.0, 4.0], [5.0, 3.0]]]]


class Config(DenseConfig):
    name: Literal["dense"] = "dense"


SIZES: dict[str, Any] = {
    "vocab_size": 11, "hidden_size": 8, "num_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 6, "rms_norm_eps": 0.25, "sliding_window": 3, "sliding_from_layer": 2,
}  # fmt: skip


def test_layers_have_the_sizes_and_deviations_of_their_config() -> None:
    config = Config(**SIZES, attention_bias=True, initialization={"std": 0.5})
    layer = grouped_query_attention(config, 2, head_norm_eps=0.125)
    assert (layer.q_proj.weight.shape, layer.k_proj.weight.shape, layer.o_proj.weight.shape) == ((8, 8), (4, 8), (8, 8))
    assert layer.q_proj.bias is not None
    assert layer.q_norm is not None
    assert layer.q_norm.eps == 0.125
    assert layer.q_proj.std == 0.5
    assert layer.o_proj.std == config.initialization.output_std(4) < 0.5
    feed_forward = swiglu(config, 7)
    assert feed_forward.gate_proj.weight.shape == (7, 8)
    assert (feed_forward.up_proj.std, feed_forward.down_proj.std) == (0.5, config.initialization.output_std(4))
    block = DecoderBlock(config, layer, feed_forward)
    assert (block.attention_norm.eps, block.ffn_norm.eps, block.routes) == (0.25, 0.25, False)
    assert {name: style.name for name, style in block.tensor_parallel_plan().items()} == {
        "attention_norm": "SEQUENCE", "ffn_norm": "SEQUENCE",
    }  # fmt: skip


def test_a_block_adds_attention_and_feed_forward_to_the_residual_stream() -> None:
    class Doubles(nn.Module):
        def forward(self, rows: torch.Tensor, *_: Any) -> torch.Tensor:
            return 2 * rows

    config = Config(**{**SIZES, "rms_norm_eps": 1e-12})
    attention_layer: Any = Doubles()
    block = DecoderBlock(config, attention_layer, Doubles())
    hidden = torch.full((1, 1, 8), 4.0)
    # The norm of equal features is 1: 4 + 2 = 6, and again 6 + 2 = 8.
    found = block(hidden, None, None)
    assert found.tolist() == [[[pytest.approx(8.0)] * 8]]


def test_a_loss_over_shares_of_the_words_has_two_reductions_and_one_for_ranks() -> None:
    head = CausalLMHead(4, 8, std=0.1)
    narrow, wide = StepShape((), 2, 3, 2), StepShape((), 2, 3, 8)
    assert list(head.forward_collectives(narrow)) == [("all_reduce", 24), ("all_reduce", 72)]
    assert list(head.forward_collectives(wide)) == [("all_reduce", 48), ("all_reduce", 144)]
    head.observe(RANKS, "evaluation")
    head.observe("other", "training")
    assert len(list(head.forward_collectives(narrow))) == 2
    head.observe(RANKS, "training")
    assert list(head.forward_collectives(narrow))[2] == ("all_reduce", 48)


@pytest.mark.parametrize(
    ("top_k", "pretrained", "problems"),
    [
        (None, "there", []),
        (11, "there", []),
        (12, "there", ["task.top_k: 12 exceeds the teacher's 11 token ids; use null for all"]),
        (None, None, ["task.teacher: the teacher has no trained weights to learn from; set pretrained"]),
    ],
)
def test_a_teacher_has_trained_weights_and_enough_words(
    monkeypatch: pytest.MonkeyPatch, top_k: int | None, pretrained: str | None, problems: list[str]
) -> None:
    for name, value in (
        ("choose_head", lambda *_: None), ("exceeded", lambda *_: []), ("check_vocabularies", lambda *_: []),
    ):  # fmt: skip
        monkeypatch.setattr(distillation, name, value)
    teacher = SimpleNamespace(vocab_size=11, pretrained=pretrained)
    config = SimpleNamespace(name="distillation", head=None, teacher=teacher, teacher_head=None, top_k=top_k)
    (task_class,) = [
        value for value in vars(distillation).values()
        if isinstance(value, type) and value.__module__ == distillation.__name__ and hasattr(value, "first_pass")
    ]  # fmt: skip
    task: Any = task_class.__new__(task_class)
    task.config = config
    if not problems:
        task.check(None, {})
        return
    with pytest.raises(JobError) as caught:
        task.check(None, {})
    assert str(caught.value).splitlines() == problems


def signature(documents: bool | None, dtype: str = "bfloat16") -> OpSignature:
    static = {"head_dim": 64, "window": None, "query_heads": 8, "key_heads": 8}
    return OpSignature("attention", "cuda", dtype, static, documents=documents)


@pytest.mark.parametrize(
    ("kernel", "documents", "warns"),
    [(FLASH, None, True), (FLASH, False, False), (CUDNN, None, False), (CUDNN, False, False)],
)
def test_a_kernel_without_masks_says_that_documents_are_an_error_where_they_may_come(
    monkeypatch: pytest.MonkeyPatch, kernel: PinnedKernel, documents: bool | None, warns: bool
) -> None:
    monkeypatch.setattr(PinnedKernel, "_refusal", lambda *_: None)
    found = kernel.supports(signature(documents))
    assert found.accept
    assert found.reason.startswith(
        f"only {kernel.name}; used only if the job names it, because sdpa chooses among all kernels"
    )
    assert ("; a call with documents is an error, as it has no mask" in found.reason) == warns


def test_an_embedding_has_a_row_for_each_token_id() -> None:
    made = TokenEmbedding(11, 3, std=0.5)
    assert (made.weight.shape, made.num_embeddings, made.embedding_dim) == ((11, 3), 11, 3)
    assert made(torch.tensor([[10, 0]])).shape == (1, 2, 3)
