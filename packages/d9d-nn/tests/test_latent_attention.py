"""Latent attention is its definition, with every backend, and offers what strategies need."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSignature
from d9d_core.model import ComputesInputs, GathersLatents
from d9d_core.traits import ContextParallelizable, TensorParallelizable, TensorStyle
from d9d_nn.attention.core import AttentionCore
from d9d_nn.attention.latent import LowRankProjection, MultiHeadLatentAttention
from d9d_nn.ops.attention import flex, sdpa
from d9d_nn.ops.attention.reference import visible
from d9d_nn.rope.rotary_embedding import RotaryEmbedding, Rotation
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [0] * 6])
VARIANTS: dict[str, dict[str, Any]] = {
    "latent queries": {},
    "plain queries": {"query_rank": None},
    "biases": {"biases": {"down", "kv_down", "o_proj"}},
    "scaled scores": {"score_factor": 2.5},
    "window": {"window": 2},
    "values as large as keys": {"value_dim": 16},
}
variants = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)


def layer_of(dtype: torch.dtype = torch.float64, **fields: Any) -> MultiHeadLatentAttention:
    torch.manual_seed(0)
    sizes = {"heads": 4, "query_rank": 10, "latent_dim": 7, "nope_dim": 12, "rotary_dim": 4, "value_dim": 6}
    layer = MultiHeadLatentAttention(20, std=0.3, output_std=0.3, **{**sizes, **fields}).to(dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.normal_(mean=1.0, std=0.3)
    return layer


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Rotation]:
    hidden = torch.randn(2, 6, 20, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return hidden.requires_grad_(), RotaryEmbedding(4, theta=100.0)(torch.arange(6).unsqueeze(0))


def turned(pairs: Tensor, rotation: Rotation) -> Tensor:
    """Features of heads [B, S, heads, R] as complex numbers, multiplied by exp(i angle); their parts [..., R]."""
    angle = torch.complex(rotation.cos.double(), rotation.sin.double()).unsqueeze(2)
    return torch.view_as_real(torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous()) * angle).flatten(-2)


def definition(
    layer: MultiHeadLatentAttention, hidden: Tensor, rotation: Rotation, documents: Tensor | None, window: int | None
) -> Tensor:
    """Output by the equations of the paper, head by head."""
    query = layer.q_proj(hidden).unflatten(-1, (4, 16))
    down = layer.kv_down(hidden)
    latent, shared = layer.kv_norm(down[..., :7]), turned(down[..., 7:].unsqueeze(2), rotation)[:, :, 0]
    seen = visible(6, documents, CPU, window)
    outs = []
    for head, rows in enumerate(layer.kv_up.weight.chunk(4)):
        plain, value = (latent @ part.T for part in rows.split([12, rows.shape[0] - 12]))
        asked = query[:, :, head]
        position = turned(asked[..., None, 12:], rotation)[:, :, 0] @ shared.mT
        scores = (asked[..., :12] @ plain.mT + position) * layer.score_factor / math.sqrt(16)
        outs.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ value)
    return layer.o_proj(torch.cat(outs, dim=-1))


@variants
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
def test_output_and_gradients_are_those_of_the_definition(fields: dict[str, Any], documents: Tensor | None) -> None:
    layer, (hidden, rotation) = layer_of(**fields), inputs()
    expected = definition(layer, hidden, rotation, documents, fields.get("window"))
    found = layer(hidden, rotation, documents)
    torch.testing.assert_close(found, expected)
    wanted = [hidden, *layer.parameters()]
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), wanted) for out in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", [sdpa, flex], ids=["sdpa", "flex"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
@torch.no_grad()
def test_backends_compute_values_that_are_smaller_than_keys(backend: Any, documents: Tensor | None) -> None:
    layer, (hidden, rotation) = layer_of(torch.float32), inputs(torch.float32)
    expected = layer(hidden, rotation, documents)
    slot = layer.core.attention
    assert slot.static["value_dim"] == 6
    slot.bind("other", backend.build(OpSignature(slot.op, "cpu", "float32", slot.static)))
    value = torch.ones(2, 6, 4, 6)
    assert layer.core.fit(value).shape[-1] == (16 if backend is sdpa else 6)
    torch.testing.assert_close(layer(hidden, rotation, documents), expected)


def test_flex_pads_values_for_calls_in_which_it_skips_nothing() -> None:
    query = key = torch.randn(1, 4, 2, 16)
    value, widths = torch.randn(1, 4, 2, 6), []

    def plain(_query: Tensor, _key: Tensor, given: Tensor, _mask: None) -> Tensor:
        widths.append(given.shape[-1])
        return given

    found = flex.Flex(None, compiled=False, plain=plain)(query, key, value, None)
    assert widths == [16]
    assert torch.equal(found, value)


def test_values_are_padded_for_strategies_that_exchange_heads_of_one_size() -> None:
    value = torch.ones(1, 2, 4, 6)
    for change in (
        lambda core: core.attend_by(lambda *given: given[2]),
        lambda core: setattr(core, "forward", lambda *given: given[2]),
    ):
        core = AttentionCore(query_heads=4, key_value_heads=4, head_dim=16, value_dim=6)
        assert core.fit(value) is value
        change(core)
        padded = core.fit(value)
        assert padded.shape == (1, 2, 4, 16)
        assert torch.equal(padded[..., :6], value)
        assert not padded[..., 6:].any()


@variants
def test_a_tensor_parallel_rank_may_hold_some_heads(fields: dict[str, Any]) -> None:
    fields = {name: value for name, value in fields.items() if name != "biases"}
    layer, half, (hidden, rotation) = layer_of(**fields), layer_of(**fields), inputs()
    parts, gradients = [], []
    for rank in range(2):
        for name, style in layer.tensor_parallel_plan().items():
            whole = layer.get_submodule(name).weight
            dim = {TensorStyle.COLUMN: 0, TensorStyle.ROW: 1}.get(style)
            part = whole if dim is None else whole.chunk(2, dim=dim)[rank]
            half.get_submodule(name).weight = nn.Parameter(part.detach().clone())
        parts.append(half(hidden, rotation, None))
        gradients.append(torch.autograd.grad(parts[-1].sum(), half.kv_down.weight)[0])
    out = layer(hidden, rotation, None)
    torch.testing.assert_close(parts[0] + parts[1], out)
    # Gradients of replicated layers are partial sums.
    (expected,) = torch.autograd.grad(out.sum(), layer.kv_down.weight)
    torch.testing.assert_close(gradients[0] + gradients[1], expected)


class Doubled:
    """Share of two ranks, of which the other has the negatives of this rank's values."""

    ranks = 2

    def own(self, tensor: Tensor) -> Tensor:
        return tensor[:, : tensor.shape[1] // 2]

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat((tensor, -tensor), dim=1)


def test_a_core_gathers_latents_and_shared_keys_in_one_call() -> None:
    core, (latent, shared) = layer_of().core, (torch.randn(1, 3, 7), torch.randn(1, 3, 1, 4))
    assert core.gathered(latent, shared) == (latent, shared)
    assert isinstance(core, GathersLatents)
    assert core.latent_features() == 11
    core.gather_by(Doubled())
    for found, own in zip(core.gathered(latent, shared), (latent, shared), strict=True):
        assert torch.equal(found, torch.cat((own, -own), dim=1))
    assert core.fit(torch.ones(1, 3, 4, 6)).shape[-1] == 6  # no strategy exchanges values


def test_plans_name_each_layer_and_the_layers_that_read_latents() -> None:
    for rank, query in ((10, "q_proj.up"), (None, "q_proj")):
        layer = layer_of(query_rank=rank)
        assert isinstance(layer, ContextParallelizable)
        assert isinstance(layer, TensorParallelizable)
        assert isinstance(layer, ComputesInputs)
        plan = layer.tensor_parallel_plan()
        assert {name.removesuffix(".weight") for name, _ in layer.named_parameters()} == plan.keys()
        assert layer.tensor_parallel_heads() == {query: 4, "kv_up": 4}
        assert set(layer.computed_inputs()) == {"kv_up", query} - {"q_proj"}
        assert {name for name, style in plan.items() if style is TensorStyle.COLUMN} == {query, "kv_up"}
        assert layer.divisibility() == {"tp": {"query heads": 4}}
        assert list(layer.attention_cores()) == ["core"]


def test_a_low_rank_projection_normalises_between_its_matrices() -> None:
    projection, x = LowRankProjection(6, 2, 5, std=1.0, eps=1e-6, bias=True), torch.randn(3, 6)
    between = x @ projection.down.weight.T + projection.down.bias
    normed = between / (between.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(projection(x), normed @ projection.up.weight.T)
    assert projection.up.bias is None


@pytest.mark.thorough
def test_it_compiles_to_one_graph() -> None:
    layer, (hidden, rotation) = layer_of(), inputs()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden, rotation, DOCUMENTS), layer(hidden, rotation, DOCUMENTS))


def test_values_that_are_larger_than_keys_are_refused() -> None:
    with pytest.raises(BuildError, match="values of 17 features and keys of 16"):
        layer_of(value_dim=17)
