from __future__ import annotations

import math

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops.rms_norm import rms_norm, torch_build, torch_supports
from d9d_nn.ops.rope import rope
from d9d_nn.ops.silu_mul import recomputed_build, recomputed_supports, silu_mul
from d9d_nn.rope.rotary_embedding import RotaryEmbedding
from d9d_nn.swiglu import SwiGLU
from d9d_testing.tolerances import assert_close_values
from torch import Tensor

pytestmark = pytest.mark.smoke


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_scales_each_row_to_a_root_mean_square_of_one() -> None:
    out = rms_norm(100 * normal(5, 64), torch.ones(64), 1e-6)
    assert_close_values(out.square().mean(-1).sqrt(), torch.ones(5))


def test_rms_norm_of_zeros_is_zero_with_finite_gradient() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    out = rms_norm(x, torch.ones(8), 1e-6)
    out.sum().backward()
    assert not out.any()
    assert x.grad.isfinite().all()


def test_rms_norm_rounds_bfloat16_once() -> None:
    x, weight = normal(16, 64).bfloat16(), normal(64, seed=1).bfloat16()
    exact = rms_norm(x.double(), weight.double(), 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), exact.to(torch.bfloat16))


def test_torch_rms_norm_fuses_although_the_weight_is_wider() -> None:
    fused = torch_build(OpSignature("rms_norm", "cuda", "bfloat16"))
    x, weight = normal(16, 64).bfloat16(), normal(64, seed=1)
    out = fused(x, weight, 1e-6)  # torch would warn that it cannot, and return another dtype on some devices
    assert out.dtype == torch.bfloat16
    assert_close_values(out, rms_norm(x, weight, 1e-6))


def rotated(query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    rotation = RotaryEmbedding(query.shape[-1], theta=10_000.0)(positions)
    return rope(query, key, rotation.cos, rotation.sin)


def test_rope_leaves_position_zero_alone_and_keeps_lengths() -> None:
    query, key = normal(2, 6, 3, 8), normal(2, 6, 1, 8, seed=1)
    out, out_key = rotated(query, key, torch.arange(6).expand(2, 6))
    assert torch.equal(out[:, 0], query[:, 0])
    assert_close_values(out.norm(dim=-1), query.norm(dim=-1))
    assert out_key.shape == key.shape
    assert not torch.allclose(out[:, 1], query[:, 1])


def test_rope_scores_depend_on_distances_only() -> None:
    query, key, start = normal(1, 6, 2, 8), normal(1, 6, 2, 8, seed=1), torch.arange(6).unsqueeze(0)
    scores = [torch.einsum("bsnd,btnd->bnst", *rotated(query, key, start + shift)) for shift in (0, 1, 100)]
    assert_close_values(scores[1], scores[0], what="shift by 1")
    torch.testing.assert_close(scores[2], scores[0], rtol=1e-4, atol=1e-4)


def test_rope_turns_pair_i_by_position_over_theta_to_the_2i_over_d() -> None:
    query = torch.zeros(1, 1, 1, 4)
    query[..., 1] = 1.0  # first feature of pair 1; its partner is feature 3
    out, _ = rotated(query, query, torch.tensor([[5]]))
    angle = 5 / 10_000 ** (2 / 4)
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0, math.cos(angle), 0.0, math.sin(angle)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rope_keeps_the_dtype_and_computes_in_float32(dtype: torch.dtype) -> None:
    query, positions = normal(1, 6, 2, 8).to(dtype), torch.arange(1000, 1006).unsqueeze(0)
    out, _ = rotated(query, query, positions)
    exact, _ = rotated(query.float(), query.float(), positions)
    assert torch.equal(out, exact.to(dtype))


def test_silu_mul_is_gate_times_sigmoid_times_up() -> None:
    gate, up = normal(4, 8), normal(4, 8, seed=1)
    assert_close_values(silu_mul(gate, up), gate * torch.sigmoid(gate) * up)


def test_compiled_modules_keep_the_reference_of_rms_norm_that_the_compiler_fuses() -> None:
    written, compiled = (
        torch_supports(OpSignature("rms_norm", "cuda", "bfloat16", {}, compiled=compiled)) for compiled in (False, True)
    )
    assert written.priority > 0
    assert (compiled.accept, compiled.priority) == (True, 0)


@pytest.mark.thorough
def test_recomputed_gates_are_not_kept_by_compiled_layers() -> None:
    def kept_and_gradients(backend: str) -> tuple[list[torch.Size], list[torch.Tensor]]:
        torch.compiler.reset()
        layer = SwiGLU(16, 48, std=0.3, output_std=0.3)
        for at, parameter in enumerate(layer.parameters()):
            parameter.data = normal(*parameter.shape, seed=at)
        if backend == "recomputed":
            layer.silu_mul.bind("recomputed", recomputed_build(recomputed_signature()))
        compiled = torch.compile(lambda hidden: hidden + layer(hidden), backend="aot_eager", fullgraph=True)
        hidden = normal(5, 16).requires_grad_()
        with torch.no_grad():
            compiled(hidden)
        out = compiled(hidden)
        kept = [tensor.shape for tensor in out.grad_fn.saved_tensors]
        out.square().sum().backward()
        return kept, [hidden.grad, *(parameter.grad for parameter in layer.parameters())]

    (kept, gradients), (kept_less, same) = kept_and_gradients("reference"), kept_and_gradients("recomputed")
    inside = torch.Size((5, 48))
    assert (kept.count(inside), kept_less.count(inside)) == (3, 2)
    torch.testing.assert_close(gradients, same, rtol=0, atol=0)


def recomputed_signature(device: str = "cuda", **facts: bool) -> OpSignature:
    return OpSignature("silu_mul", device, "bfloat16", {"features": 48}, **{"compiled": True, **facts})


def test_gates_are_recomputed_by_themselves_only_in_compiled_modules_on_cuda() -> None:
    assert recomputed_supports(recomputed_signature()).priority > 0
    on_cpu = recomputed_supports(recomputed_signature("cpu"))
    assert (on_cpu.accept, on_cpu.priority) == (True, 0)
    assert not recomputed_supports(recomputed_signature(compiled=False)).accept
    assert not recomputed_supports(recomputed_signature(checkpointed=True)).accept
