"""Linear layers with low-rank updates whose products add in place, compared with products and passes that add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops.low_rank_linear import low_rank_linear as reference
from d9d_nn.swiglu import SwiGLU
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients
from d9d_triton import rules
from d9d_triton.low_rank_linear import differentiate_layers, low_rank_linear, multiply_layers
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SCALES = [2.0, 0.75, 1.0]


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype).requires_grad_()


def layers(
    rows: int,
    inputs: int,
    features: Sequence[int],
    ranks: Sequence[int],
    dtype: torch.dtype = torch.float32,
    biased: int = 0,
) -> dict[str, Tensor]:
    """Tensors of layers on the same input, which all need gradients; the layer with index ``biased`` has a bias."""
    found = {"x": normal(rows, inputs, seed=0, dtype=dtype)}
    found[f"bias {biased}"] = normal(features[biased], seed=1, dtype=dtype)
    for place, (count, rank) in enumerate(zip(features, ranks, strict=True)):
        shapes = {"weight": (count, inputs), "down": (rank, inputs), "up": (count, rank)}
        for seed, (name, shape) in enumerate(shapes.items()):
            drawn = normal(*shape, seed=3 * place + seed + 2, dtype=dtype).detach() / shape[1] ** 0.5
            found[f"{name} {place}"] = drawn.requires_grad_()
    return found


def results(op: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs, and the gradients of all tensors that need one."""
    leaves = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
    count = sum(name.startswith("weight") for name in leaves)
    groups = [[leaves.get(f"{name} {place}") for place in range(count)] for name in ("weight", "bias", "down", "up")]
    outs = op(leaves["x"], *groups, SCALES[:count])
    grads = [
        torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE, torch.bfloat16).to(out.dtype)
        for out in outs
    ]
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))
    found = {f"out {place}": out.detach() for place, out in enumerate(outs)}
    return found | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize(
    ("rows", "features", "ranks", "biased"),
    [
        (70, (80, 66), (3, 3), 0),
        (70, (80, 66), (32, 33), 1),
        (530, (20, 8), (4, 5), 1),  # several tiles of a program
        (9, (6, 5), (130, 129), 1),
        (9, (6, 5), (3, 129), 0),
        (0, (6, 5), (2, 3), 1),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_reference_for_every_rank(
    rows: int, features: Sequence[int], ranks: Sequence[int], biased: int
) -> None:
    tensors = layers(rows, 144, features, ranks, biased=biased)
    assert_close_gradients(results(low_rank_linear, tensors), results(reference, tensors))


@pytest.mark.parametrize("rank", [8, 33])
def test_products_are_scaled_before_they_are_rounded_to_float16(rank: int) -> None:
    x, weight = torch.ones(2, 4, device=DEVICE), torch.zeros(64, 4, device=DEVICE)
    down, up = torch.zeros(rank, 4, device=DEVICE), torch.full((64, rank), 30.0, device=DEVICE)
    narrow = [tensor.half().requires_grad_() for tensor in (x, weight, down, up)]
    rows, *others = narrow
    (out,) = low_rank_linear(rows, [others[0]], [None], [others[1]], [others[2]], [1 / 16])
    out.backward(torch.full_like(out, 100.0))  # the sum before scaling is 192,000, more than float16 holds
    assert others[1].grad is not None
    assert torch.equal(others[1].grad, torch.full_like(down, 24_000.0).half())


def test_an_input_that_was_changed_after_the_forward_is_noticed() -> None:
    for name in ("x", "weight 0", "up 0"):
        tensors = layers(9, 8, (6,), (2,))
        changed = {**tensors, name: tensors[name] * 1}
        groups = [[changed[f"{part} 0"]] for part in ("weight", "bias", "down", "up")]
        (out,) = low_rank_linear(changed["x"], *groups, [2.0])  # type: ignore[arg-type]
        with torch.no_grad():
            changed[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_two_calls_give_the_same_bits() -> None:
    tensors = layers(300, 24, (20, 8), (4, 4))
    first, again = results(low_rank_linear, tensors), results(low_rank_linear, tensors)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("trained", ["x", "down 1", "up 0", "weight 0", "bias 0"])
def test_only_gradients_that_are_needed_are_computed(trained: str) -> None:
    tensors = layers(9, 8, (6, 5), (2, 2))
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == trained)
    found = results(low_rank_linear, tensors)
    assert [name for name in found if "out" not in name] == [trained]
    assert_close_gradients(found, results(reference, tensors))


def test_a_second_derivative_is_an_error() -> None:
    tensors = layers(4, 8, (6,), (2,))
    groups = [[tensors[f"{name} 0"]] for name in ("weight", "bias", "down", "up")]
    (out,) = low_rank_linear(tensors["x"], *groups, [1.0])  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(out.square().sum(), tensors["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="low_rank_linear_backward.default has no gradient formula"):
        grad.sum().backward()


def test_tensors_of_several_dtypes_are_refused() -> None:
    tensors = layers(4, 8, (6,), (2,))
    tensors["up 0"] = tensors["up 0"].double()
    with pytest.raises(TypeError, match=r"of one dtype, not torch\.float32, torch\.float64"):
        results(low_rank_linear, tensors)


@pytest.mark.parametrize(
    ("name", "shape"), [("bias 0", (3,)), ("bias 0", (1,)), ("down 1", (3, 8)), ("up 1", (5, 3)), ("weight 1", (4, 8))]
)
def test_shapes_that_do_not_fit_are_refused(name: str, shape: Sequence[int]) -> None:
    tensors = layers(4, 8, (6, 5), (2, 2))
    tensors[name] = torch.ones(shape, device=DEVICE)
    with pytest.raises(ValueError, match=r"must have the shapes \[\.\.\., I\], \[O, I\], \[O\], \[r, I\] and \[O, r\]"):
        results(low_rank_linear, tensors)


def test_a_small_update_is_not_rounded_away() -> None:
    """The product is added to the update before it is rounded, as a fused kernel would do."""
    x, weight = torch.ones(1, 256, device=DEVICE), torch.ones(1, 256, device=DEVICE)
    x[0, 1:], weight[0, 1:] = 2.0**-8, 2.0**-8
    down, up = torch.zeros(1, 256, device=DEVICE), torch.full((1, 1), 2.0**-8, device=DEVICE)
    down[0, 0] = 1.0
    narrow = [tensor.bfloat16() for tensor in (x, weight, down, up)]

    def by(op: Any) -> float:
        rows, *others = narrow
        (out,) = op(rows, [others[0]], [None], [others[1]], [others[2]], [1.0])
        return float(out.item())

    exact = 1 + 255 * 2.0**-16 + 2.0**-8
    assert abs(by(low_rank_linear) - exact) < abs(by(reference) - exact)


def test_torch_accepts_the_operators() -> None:
    tensors = {name: tensor.detach() for name, tensor in layers(5, 8, (6, 7), (2, 2)).items()}
    weights, ups = ([tensors[f"{name} {place}"] for place in (0, 1)] for name in ("weight", "up"))
    x, down, scales = tensors["x"], torch.cat([tensors["down 0"], tensors["down 1"]]), SCALES[:2]
    torch.library.opcheck(multiply_layers.overload, (x, weights, [tensors["bias 0"], None], down, ups, scales))
    low, *outs = multiply_layers(x, weights, [None, None], down, ups, scales)
    for of_x in (True, False):
        torch.library.opcheck(differentiate_layers.overload, (outs, low, weights, down, ups, scales, of_x))


def test_a_compiled_layer_is_one_graph() -> None:
    method, config = pytest.importorskip("d9d_peft.lora.method"), pytest.importorskip("d9d_peft.config")
    torch.manual_seed(0)
    module: Any = SwiGLU(16, 24, std=0.3, output_std=0.3).to(DEVICE)
    module.requires_grad_(False)
    added = method.Lora(config.LoraConfig(r=4)).inject(module)
    for name, parameter in module.named_parameters():
        if name in added:
            torch.nn.init.normal_(parameter.requires_grad_(), std=0.3)

    def step(function: Any) -> dict[str, Tensor]:
        module.zero_grad()
        x = normal(2, 5, 16, seed=1, dtype=torch.float32)
        function(x).square().sum().backward()
        return {"x": x.grad, **{name: module.get_parameter(name).grad for name in added}}  # type: ignore[dict-item]

    expected = step(module)
    for layer in (module.gate_proj, module.up_proj, module.down_proj):
        layer.lora_linear.bind("triton", low_rank_linear)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close_gradients(step(compiled), expected)
    x = torch.ones(3, 16, device=DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("storing", [False, True])
def test_jobs_on_a_gpu_use_it_unless_checkpointed_blocks_store_products(compiled: bool, storing: bool) -> None:
    signature = OpSignature("low_rank_linear", "cuda", "bfloat16", {}, compiled, None, True, storing)
    decision = rules.low_rank_linear(signature)
    assert decision.accept
    assert (decision.priority > 0) == (not storing)
    assert not rules.low_rank_linear(OpSignature("low_rank_linear", "xpu", "bfloat16", storing=storing)).accept


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [8, 16, 64])
def test_on_a_gpu_values_and_gradients_of_large_layers_agree_with_float64(dtype: torch.dtype, rank: int) -> None:
    tensors = layers(2500, 1024, (2048, 520, 520), (rank,) * 3, dtype)
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    assert_close_gradients(results(low_rank_linear, tensors), results(reference, exact), TOLERANCES[dtype])


@on_gpu
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_the_host_never_waits() -> None:
    tensors = layers(300, 64, (128, 96), (16, 16), torch.bfloat16)
    groups = [[tensors.get(f"{name} {place}") for place in (0, 1)] for name in ("weight", "bias", "down", "up")]

    def step() -> None:
        outs = low_rank_linear(tensors["x"], *groups, SCALES[:2])  # type: ignore[arg-type]
        torch.autograd.grad(outs, list(tensors.values()), [torch.ones_like(out) for out in outs])

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
