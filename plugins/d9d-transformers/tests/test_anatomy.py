"""Calls of the modules of small models, stated one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.traits import TensorStyle
from d9d_transformers import anatomy as module
from d9d_transformers.anatomy import Anatomy, Call, Core, Measured, Parameter, anatomy, fused_attention
from d9d_transformers.config import TransformersConfig, example

COLUMN, ROW, SEQUENCE, PARTIAL = TensorStyle.COLUMN, TensorStyle.ROW, TensorStyle.SEQUENCE, TensorStyle.PARTIAL
GATHERED, VOCAB = TensorStyle.GATHERED, TensorStyle.VOCAB


def of(kind: str, **fields: Any) -> Anatomy:
    small = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"intermediate_size": 48, "num_hidden_layers": 2, "tie_word_embeddings": False}
    return anatomy(TransformersConfig(config={"model_type": kind, **small, **tokens, **sizes, **fields}), 2)


def norm(path: str, reads: int, features: int = 32, rows: float = 1.0, style: TensorStyle = SEQUENCE) -> Call:
    own = (Parameter("weight", (features,), "other"),)
    return Call(path, "norm", style, rows, features, features, reads, reads + 1, own, "." in path)


def linear(path: str, style: TensorStyle, reads: int, writes: int, *shape: int, heads: int | None = None) -> Call:
    own = (Parameter("weight", shape, "linear"),)
    return Call(path, "linear", style, 1.0, shape[1], shape[0], reads, writes, own, True, heads)


def test_the_calls_of_a_dense_model() -> None:
    found = of("qwen3")
    assert found.kinds == (
        (
            norm("input_layernorm", 0),
            linear("self_attn.q_proj", COLUMN, 1, 2, 64, 32, heads=4),
            Call("self_attn.q_norm", "norm", PARTIAL, 4.0, 16, 16, 2, 3, (Parameter("weight", (16,), "other"),), True),
            linear("self_attn.k_proj", COLUMN, 1, 4, 32, 32, heads=2),
            Call("self_attn.k_norm", "norm", PARTIAL, 2.0, 16, 16, 4, 5, (Parameter("weight", (16,), "other"),), True),
            linear("self_attn.v_proj", COLUMN, 1, 6, 32, 32, heads=2),
            Call("self_attn.d9d_core", "attention", None, 4.0, 16, 16, 7, 8, (), True, core=Core(4, 2, 16, None)),
            linear("self_attn.o_proj", ROW, 8, 9, 32, 64),
            norm("post_attention_layernorm", 10),
            linear("mlp.gate_proj", COLUMN, 11, 12, 48, 32),
            linear("mlp.up_proj", COLUMN, 11, 13, 48, 32),
            linear("mlp.down_proj", ROW, 14, 15, 32, 48),
        ),
    )
    table = (Parameter("weight", (96, 32), "embedding"),)
    assert found.before == (Call("model.embed_tokens", "embedding", VOCAB, 1.0, 256, 32, 0, 1, table),)
    last = (Parameter("weight", (32,), "other"),)
    assert found.after == (Call("model.norm", "norm", SEQUENCE, 1.0, 32, 32, 2, 3, last),)
    numbers = 2 * (2 * 32 + 2 * 16 + 2 * 64 * 32 + 2 * 32 * 32 + 3 * 48 * 32)
    assert (found.layers, found.kind, found.numbers) == ("model.layers", (0, 0), numbers)
    assert (found.mixers, found.refusal, found.head.vocabulary, found.head.features) == ((), None, 96, 32)


def named(calls: tuple[Call, ...], path: str) -> Call:
    (call,) = (one for one in calls if one.path == path)
    return call


def test_the_calls_of_experts_that_d9d_computes() -> None:
    (calls,) = anatomy(example("qwen3_moe"), 2).kinds
    banks = tuple(
        Parameter(f"bank.{name}", shape, "bank")
        for name, shape in (("gate_proj", (4, 32, 24)), ("up_proj", (4, 32, 24)), ("down_proj", (4, 24, 32)))
    )
    router, experts = calls[-2:]
    assert experts == Call("mlp.experts", "experts", SEQUENCE, 1.0, 32, 32, router.reads, 13, banks, True, chosen=2)
    assert (router.path, router.kind, router.outputs, router.parameters) == (
        "mlp.gate", "other", 4, (Parameter("weight", (4, 32), "other"),)
    )  # fmt: skip
    assert (router.measured.flops, router.measured.keeps_input) == (2 * 32 * 4, True)
    assert 0 < router.measured.kept < 2 * 32  # without the input and the weight


def test_the_calls_of_other_experts_and_of_parameters_without_a_call() -> None:
    found = anatomy(example("gpt_oss"), 2)
    assert (found.kind, len(found.kinds)) == ((0, 1, 0, 1), 2)
    windows = [named(calls, "self_attn.d9d_core").core for calls in found.kinds]
    assert windows == [Core(4, 2, 8, 8), Core(4, 2, 8, None)]
    for calls in found.kinds:
        sinks = named(calls, "self_attn")
        assert (sinks.kind, sinks.style, sinks.in_part) == ("idle", GATHERED, False)
        assert sinks.parameters == (Parameter("sinks", (4,), "other"),)
        query = named(calls, "self_attn.q_proj")
        assert (query.style, query.heads) == (GATHERED, None)
        assert query.parameters == (Parameter("weight", (32, 32), "linear"), Parameter("bias", (32,), "other"))
        experts = named(calls, "mlp.experts")
        assert (experts.kind, experts.style, experts.measured.flops) == ("other", SEQUENCE, 2 * 2 * 3 * 32 * 48)
        assert not experts.measured.keeps_input
        assert [one.kind for one in experts.parameters] == ["other"] * 4


def test_the_calls_of_another_token_mixer() -> None:
    found = anatomy(example("lfm2"), 2)
    assert (found.kind, len(found.kept)) == ((0, 0, 1, 0), 2)
    assert found.mixers == ("model.layers.0.conv", "model.layers.1.conv", "model.layers.3.conv")
    paths = ["operator_norm", "conv", "ffn_norm", "feed_forward.w1", "feed_forward.w3", "feed_forward.w2"]
    assert [call.path for call in found.kinds[0]] == paths
    mixer = found.kinds[0][1]
    assert (mixer.kind, mixer.style, mixer.reads, mixer.writes, mixer.in_part) == ("other", GATHERED, 1, 2, False)
    assert set(mixer.parameters) == {
        Parameter("conv.weight", (32, 1, 3), "other"), Parameter("in_proj.weight", (96, 32), "linear"),
        Parameter("out_proj.weight", (32, 32), "linear"),
    }  # fmt: skip
    # Two linear layers, and a convolution of three positions, which is computed for two more positions.
    assert mixer.measured.flops == 2 * 32 * (96 + 32) + 2 * 3 * 32 * 258 / 256
    assert mixer.measured.keeps_input
    assert found.head.tied


def test_widths_of_elements_and_errors() -> None:
    config = example("llama")
    narrow, wide = anatomy(config, 2), anatomy(config, 4)
    assert narrow.kinds == wide.kinds
    assert narrow.kept[0] < wide.kept[0] <= 2 * narrow.kept[0]
    with pytest.raises(BuildError, match="attention_dropout is 0.1"):
        of("llama", attention_dropout=0.1)


def test_a_module_that_cannot_be_measured_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Counter(module.FlopCounterMode):
        def get_total_flops(self) -> int:
            calls.append(self)
            return 256 * 7

        def __enter__(self) -> Any:
            if self.display:
                raise KeyError("table")
            return super().__enter__()

    monkeypatch.setattr(module, "FlopCounterMode", Counter)
    found = anatomy(TransformersConfig(config=example("gpt_oss").config | {"max_position_embeddings": 77}), 2)
    assert named(found.kinds[0], "mlp.router").measured.flops == 7
    assert calls

    def fail(self: Any) -> Any:
        raise KeyError("counter")

    monkeypatch.setattr(Counter, "__enter__", fail)
    config = TransformersConfig(config=example("gpt_oss").config | {"max_position_embeddings": 78})
    with pytest.raises(
        BuildError, match=r"^model\.config: the cost of layers\.0\.mlp\.router cannot be measured: 'counter'$"
    ):
        anatomy(config, 2)


def test_fused_attention_keeps_its_inputs_its_output_and_a_number_per_query() -> None:
    query, key, value = (torch.zeros(2, 5, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    kept: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = fused_attention(query, key, value, None)
    assert (out.shape, out.requires_grad) == (query.shape, True)
    assert kept == [(2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8), (2, 5, 4, 8), (2, 5, 4)]
    with pytest.raises(NotImplementedError, match="only the kept tensors"):
        out.sum().backward()
    assert Measured() == Measured(0.0, 0.0, keeps_input=False)
