"""Parts of decoders with norms around each branch, factors of 1 + weight, GeGLU and two kinds of layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from d9d_core.cost import Share
from d9d_core.errors import CheckpointError
from d9d_core.kernel import OpSignature
from d9d_core.model import Stage
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.decoder.block import SandwichBlock, geglu, grouped_query_attention
from d9d_nn.decoder.config import AlternatingConfig
from d9d_nn.decoder.config_json import kinds_of_rope_json, layer_types, layer_types_json, merge_kinds_of_rope
from d9d_nn.decoder.costs import dense_cost
from d9d_nn.decoder.model import DecoderModel
from d9d_nn.ops.add_rms_norm import add_rms_norm
from d9d_nn.ops.gelu_mul import gelu_mul, recomputed_build
from d9d_nn.ops.normed_rope import normed_rope
from d9d_nn.ops.rope import rope
from d9d_nn.rms_norm import OffsetRMSNorm, RMSNorm
from d9d_nn.rope.rotary_embedding import LayerRotations, RotaryEmbedding
from d9d_nn.rope.scaling import LinearScaling, Rope
from pydantic import ValidationError
from torch import Tensor, nn

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 11, "hidden_size": 8, "num_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 6, "sliding_window": 3, "max_positions": 16,
}  # fmt: skip


class Config(AlternatingConfig):
    name: Literal["alternating"] = "alternating"


def config(**fields: Any) -> Config:
    return Config.model_validate(SIZES | fields)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- norms --------------------------------------------------------------------------------------------------------


def offset_norm(dtype: torch.dtype = torch.float32, **more: bool) -> OffsetRMSNorm:
    norm = OffsetRMSNorm(8, eps=1e-6, **more).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(normal(8, seed=3))
    return norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_factors_are_one_plus_the_weight_and_not_rounded(dtype: torch.dtype) -> None:
    norm, x = offset_norm(dtype), normal(2, 3, 8, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = x.to(wide) * (x.to(wide).square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1.0 + norm.weight.to(wide))
    assert norm.factor().dtype == wide
    assert torch.equal(norm(x), expected.to(dtype))
    (gradient,) = torch.autograd.grad(norm(x).sum(), norm.weight)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), norm.weight)[0])


def test_a_norm_of_offsets_starts_as_the_identity_of_unit_rows() -> None:
    norm = offset_norm()
    norm.reset_parameters()
    assert not norm.weight.any()
    assert not OffsetRMSNorm(8, eps=1e-6).weight.any()
    assert (RMSNorm(8, eps=1e-6).weight == 1).all()
    torch.testing.assert_close(norm(torch.ones(2, 8)), torch.ones(2, 8))


def test_kernels_get_the_factors() -> None:
    norm, x = offset_norm(residual=True), normal(2, 3, 8)
    expected = norm.branch(x, x)
    norm.add_rms_norm.bind("noting", add_rms_norm)
    norm.rms_norm.bind("never", lambda *_: pytest.fail("the whole branch is one op"))
    assert all(map(torch.equal, norm.branch(x, x), expected))

    sizes: dict[str, Any] = {"query_heads": 2, "key_value_heads": 1, "head_dim": 4, "std": 0.1, "output_std": 0.1}
    layer = GroupedQueryAttention(8, head_norm_eps=1e-6, norm=OffsetRMSNorm, **sizes)
    assert isinstance(layer.q_norm, OffsetRMSNorm)
    assert isinstance(layer.k_norm, OffsetRMSNorm)
    rotation = RotaryEmbedding(4, theta=100.0)(torch.arange(3).unsqueeze(0))
    plain = layer(x, rotation, None)
    layer.normed_rope.bind("same", normed_rope)
    torch.testing.assert_close(layer(x, rotation, None), plain)


# --- feed-forward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [gelu_mul, recomputed_build(OpSignature("gelu_mul", "cpu", "float32", {}))])
def test_the_gate_of_geglu_is_its_formula(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    gate, up = (normal(3, 5, seed=seed, dtype=torch.float64).requires_grad_() for seed in range(2))
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    expected = 0.5 * gate * (1 + torch.tanh(inner)) * up
    found = function(gate, up)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.sum(), (gate, up))
    for a, b in zip(torch.autograd.grad(found.sum(), (gate, up)), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_geglu_is_three_products_with_a_gate() -> None:
    made = config(initialization={"std": 0.5})
    layer, x = geglu(made, 7), normal(2, 3, 8)
    assert (layer.gate_proj.std, layer.down_proj.std) == (0.5, made.initialization.output_std(4))
    assert list(layer.op_slots()) == ["gelu_mul"]
    assert {name: style.name for name, style in layer.tensor_parallel_plan().items()} == {
        "gate_proj": "COLUMN", "up_proj": "COLUMN", "down_proj": "ROW",
    }  # fmt: skip
    gate, up, down = (one.weight for one in (layer.gate_proj, layer.up_proj, layer.down_proj))
    torch.testing.assert_close(layer(x), gelu_mul(x @ gate.T, x @ up.T) @ down.T)


# --- blocks and models --------------------------------------------------------------------------------------------


def test_a_sandwich_block_normalises_each_branch_before_and_after() -> None:
    class Doubles(nn.Module):
        def forward(self, rows: Tensor, *_: Any) -> Tensor:
            return 2 * rows

    doubles: Any = Doubles()
    block = SandwichBlock(config(rms_norm_eps=1e-12), doubles, doubles, norm=OffsetRMSNorm)
    for number, norm in enumerate((block.post_attention_norm, block.post_ffn_norm)):
        assert isinstance(norm, OffsetRMSNorm)
        nn.init.constant_(norm.weight, number + 1.0)
    for norm in (block.attention_norm, block.ffn_norm):
        assert isinstance(norm, OffsetRMSNorm)
        norm.reset_parameters()
    # Each branch is 1, doubled to 2, normalised to 1, times 1 + weight: 4 + 2 = 6, and 6 + 3 = 9.
    assert block(torch.full((1, 1, 8), 4.0), None, None).tolist() == [[[pytest.approx(9.0)] * 8]]
    assert {name: style.name for name, style in block.tensor_parallel_plan().items()} == dict.fromkeys(
        ("attention_norm", "ffn_norm", "post_attention_norm", "post_ffn_norm"), "SEQUENCE"
    )


def test_attention_passes_its_soft_cap_to_the_core() -> None:
    layer = grouped_query_attention(config(), 0, softcap=2.0)
    assert layer.core.softcap == 2.0
    assert layer.core.attention.op == "capped_attention"
    assert layer.core.attention.static["window"] == 3


class Twice(DecoderModel):
    def embed(self, tokens: Tensor) -> Tensor:
        return 2 * super().embed(tokens)


def test_a_model_has_the_embedding_norm_and_soft_cap_of_its_family() -> None:
    def block(made: Any, layer: int) -> SandwichBlock:
        return SandwichBlock(made, grouped_query_attention(made, layer), geglu(made, 6), norm=OffsetRMSNorm)

    made = config(tie_embeddings=True)
    kinds = (Twice, DecoderModel)
    twice, once = (kind(made, Stage(), block, norm=OffsetRMSNorm, logit_softcap=0.5) for kind in kinds)
    once.load_state_dict(twice.state_dict())
    tokens = torch.arange(8).unsqueeze(0)
    assert isinstance(twice.norm, OffsetRMSNorm)
    assert twice.heads["causal_lm"].softcap == 0.5
    assert not torch.allclose(twice(tokens=tokens)["logits"], once(tokens=tokens)["logits"])
    with torch.no_grad():
        once.embedding.weight.mul_(2)
        weight = twice.embedding.weight
        final = twice.norm(_before_the_norm(once, tokens))
    expected = 0.5 * torch.tanh(final @ weight.T / 0.5)
    torch.testing.assert_close(twice(tokens=tokens)["logits"], expected)


def _before_the_norm(model: DecoderModel, tokens: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(tokens=tokens)
    handle.remove()
    return seen[0]


def test_the_mean_of_layers_is_scaled_by_the_factors_of_the_final_norm() -> None:
    heads = {"embedding": {"kind": "embedding", "layers": [0], "pooling": "last", "normalize": False}}

    def block(made: Any, layer: int) -> SandwichBlock:
        return SandwichBlock(made, grouped_query_attention(made, layer), geglu(made, 6))

    model = DecoderModel(config(num_layers=1, heads=heads), Stage(), block, norm=OffsetRMSNorm)
    nn.init.normal_(model.norm.weight)
    tokens = torch.arange(8).unsqueeze(0)
    last = model.norm(_before_the_norm(model, tokens))[:, -1]
    torch.testing.assert_close(model(tokens=tokens)["embedding"], last)


# --- rotary positions ---------------------------------------------------------------------------------------------


def test_the_square_of_the_magnitude_multiplies_the_scores() -> None:
    positions, query, key = torch.arange(5).unsqueeze(0), normal(1, 5, 2, 4), normal(1, 5, 2, 4, seed=1)

    def scores(**more: float) -> Tensor:
        found = RotaryEmbedding(4, theta=100.0, **more)(positions)
        return torch.einsum("bsnd,btnd->bnst", *rope(query, key, found.cos, found.sin))

    torch.testing.assert_close(scores(magnitude=3.0), 9 * scores())


def test_layers_with_equal_settings_share_a_rotation() -> None:
    near, far = Rope(100.0), Rope(1000.0, LinearScaling(factor=2.0))
    rotations = LayerRotations(4, [near, far, Rope(100.0)])
    positions = torch.arange(5).unsqueeze(0)
    found = rotations(positions)
    assert len(found) == 3
    assert found[0] is found[2]
    for layer, expected in (
        (0, RotaryEmbedding(4, theta=100.0)),
        (1, RotaryEmbedding(4, theta=1000.0, scaling=LinearScaling(factor=2.0))),
    ):
        assert torch.equal(found[layer].cos, expected(positions).cos)
        assert torch.equal(found[layer].sin, expected(positions).sin)


# --- config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "given", "pattern"),
    [
        (4, (SLIDING, FULL), (SLIDING, FULL)),
        (4, (SLIDING, FULL, SLIDING, FULL), (SLIDING, FULL)),
        (3, (SLIDING, FULL, SLIDING), (SLIDING, FULL)),
        (2, (SLIDING,) * 5 + (FULL,), (SLIDING,)),
        (1, (FULL, SLIDING), (FULL,)),
        (5, (SLIDING, SLIDING, FULL), (SLIDING, SLIDING, FULL)),
        (4, (FULL, FULL, FULL, SLIDING), (FULL, FULL, FULL, SLIDING)),
        (3, (FULL, SLIDING, SLIDING), (FULL, SLIDING, SLIDING)),
    ],
)
def test_the_pattern_of_layers_is_repeated_and_stored_in_its_shortest_form(
    layers: int, given: tuple[str, ...], pattern: tuple[str, ...]
) -> None:
    made = config(num_layers=layers, layer_types=given)
    assert made.layer_types == pattern
    kinds = [given[layer % len(given)] for layer in range(layers)]
    assert layer_types_json(made) == kinds == layer_types({"num_hidden_layers": layers, "layer_types": kinds}, 1)
    assert [made.window(layer) for layer in range(layers)] == [3 if kind == SLIDING else None for kind in kinds]


def test_sliding_layers_may_have_another_base() -> None:
    scaling = LinearScaling(factor=2.0)
    made = config(rope_theta=1e6, local_rope_theta=1e4, rope_scaling=scaling)
    assert [made.rope(layer) for layer in range(2)] == [Rope(1e4), Rope(1e6, scaling)]
    alike = config(rope_theta=1e6, rope_scaling=scaling)
    assert {alike.rope(layer) for layer in range(4)} == {Rope(1e6, scaling)}
    assert config(rope_theta=1e6, local_rope_theta=1e6).local_rope_theta is None
    assert config(rope_theta=1e6, local_rope_theta=1e6, rope_scaling=scaling).local_rope_theta == 1e6
    assert made.feed_forward_parameters(0) == 3 * 8 * 6
    with pytest.raises(ValidationError, match="layer_types"):
        config(layer_types=())


def test_layer_types_of_files_are_one_for_each_layer_and_by_default_a_pattern() -> None:
    assert layer_types({"num_hidden_layers": 5}, 2) == [SLIDING, FULL, SLIDING, FULL, SLIDING]
    with pytest.raises(CheckpointError, match="layer_types has 1 entries for 2 layers"):
        layer_types({"num_hidden_layers": 2, "layer_types": [FULL]}, 2)


LINEAR = {"rope_type": "linear", "factor": 2.0}
BASED = LINEAR | {"rope_theta": 5.0}
PLAIN = {"rope_type": "default"}


@pytest.mark.parametrize(
    ("data", "full", "local"),
    [
        ({}, PLAIN | {"rope_theta": 1e6}, 1e4),
        ({"rope_theta": 5.0, "rope_local_base_freq": 6.0, "rope_scaling": LINEAR}, BASED, 6.0),
        ({"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_theta": 6.0}}}, LINEAR | {"rope_theta": 1e6}, 6.0),
        ({"rope_parameters": {FULL: BASED}, "rope_theta": 7.0}, BASED, 1e4),
        ({"rope_parameters": {FULL: BASED, SLIDING: BASED}}, BASED, None),
    ],
)
def test_rotary_fields_of_kinds_are_read_in_both_spellings(
    data: dict[str, Any], full: dict[str, Any], local: float | None
) -> None:
    found = merge_kinds_of_rope(data, 1e6, 1e4)
    assert (found["rope_scaling"], found["rope_theta"]) == (full, full["rope_theta"])
    assert (found["rope_local_base_freq"], found["rope_parameters"]) == (local, None)


@pytest.mark.parametrize("local", [None, 1e4])
def test_rotary_fields_of_kinds_are_written_as_they_are_read(local: float | None) -> None:
    scaling = LinearScaling(factor=2.0)
    written = kinds_of_rope_json(config(rope_theta=1e6, local_rope_theta=local, rope_scaling=scaling))
    assert written["rope_parameters"][FULL] == LINEAR | {"rope_theta": 1e6}
    found = merge_kinds_of_rope(written, 1.0, 2.0)
    assert (found["rope_theta"], found["rope_local_base_freq"]) == (1e6, local)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"rope_parameters": {SLIDING: LINEAR}}, "d9d supports scaling only in full_attention"),
        ({"rope_parameters": LINEAR}, f"rope_parameters must be a mapping of {FULL} and {SLIDING}"),
        ({"rope_parameters": "linear"}, "rope_parameters is 'linear'"),
        ({"rope_scaling": 3}, "rope_scaling is 3"),
    ],
)
def test_rotary_fields_that_no_model_has_are_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        merge_kinds_of_rope(data, 1e6, 1e4)


# --- costs --------------------------------------------------------------------------------------------------------


def test_norms_of_outputs_cost_as_much_as_norms_of_inputs() -> None:
    share = Share(1, 12)
    plain = dense_cost(config(), Stage(), share, head_norms=False).blocks[1]
    more = dense_cost(config(), Stage(), share, head_norms=False, output_norms=True).blocks[1]
    assert more.parameters == plain.parameters + 2 * 8
    names = [op.name for op in more.ops]
    assert [name for name in names if name.endswith("_norm")] == [
        "attention_norm", "post_attention_norm", "ffn_norm", "post_ffn_norm",
    ]  # fmt: skip
    assert names.index("output") + 1 == names.index("post_attention_norm")
    assert names[-1] == "post_ffn_norm"
    assert more.ops[-1].kept == more.ops[0].kept


def test_a_plain_norm_has_its_weight_as_factor() -> None:
    norm = RMSNorm(8, eps=1e-6)
    assert norm.factor() is norm.weight


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_default_pattern_is_as_short_as_a_written_one(layers: int) -> None:
    found = config(num_layers=layers)
    assert len(found.layer_types) == min(layers, 2)
    assert Config.model_validate(found.model_dump()) == found
