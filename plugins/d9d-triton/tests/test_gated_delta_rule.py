"""Triton backend of the gated delta rule: values and all gradients against float64, at document borders too.

Shapes: B samples, S positions, K key heads, N value heads, D_k and D_v features of a key and value head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops.gated_delta_rule import EPS, chunked
from d9d_nn.ops.gated_delta_rule import gated_delta_rule as reference
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients, assert_close_values
from d9d_triton import support
from d9d_triton.gated_delta_rule import CHUNK, build, chunked_rule, gated_delta_rule
from d9d_triton.kernels import gated_delta_rule as kernels
from torch import Tensor

pytestmark = pytest.mark.usefixtures("loops_that_count")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("query", "key", "value", "decay", "beta")
Rule = Callable[..., Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call."""

    samples: int = 1
    length: int = 70
    keys: int = 1
    values: int = 2
    key_dim: int = 8
    value_dim: int = 20

    def inputs(self, dtype: torch.dtype = torch.float32, decays: float = 1.0) -> dict[str, Tensor]:
        """Random tensors; decays in float32, as a layer computes them."""
        generator = torch.Generator().manual_seed(self.length)

        def normal(*shape: int) -> Tensor:
            return torch.randn(self.samples, self.length, *shape, generator=generator)

        found = {
            "query": normal(self.keys, self.key_dim),
            "key": normal(self.keys, self.key_dim),
            "value": normal(self.values, self.value_dim),
            "decay": -decays * normal(self.values).square(),
            "beta": normal(self.values).sigmoid(),
        }
        return {name: x.to(DEVICE, torch.float32 if name == "decay" else dtype) for name, x in found.items()}


def numbered(length: int, *starts: int) -> Tensor:
    """Documents [1, S] that start at position 0 and at the given positions."""
    numbers = torch.zeros(1, length, dtype=torch.int64, device=DEVICE)
    numbers[:, list(starts)] = 1
    return numbers.cumsum(1)


def results(rule: Rule, tensors: dict[str, Tensor], documents: Tensor | None) -> dict[str, Tensor]:
    """Output, and the gradients of a random weighted sum of it."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out = rule(*leaves.values(), documents)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).bfloat16().to(out.device, out.dtype)
    return {
        "out": out.detach(),
        **dict(zip(NAMES, torch.autograd.grad(out, list(leaves.values()), weights), strict=True)),
    }


def check(tensors: dict[str, Tensor], documents: Tensor | None = None) -> dict[str, Tensor]:
    """Compare values and gradients with those of the rule in chunks in float64, which its own tests compare."""
    found = results(gated_delta_rule, tensors, documents)
    exact = results(chunked, {name: x.double() for name, x in tensors.items()}, documents)
    assert {name: found[name].dtype for name in NAMES} == {name: x.dtype for name, x in tensors.items()}
    assert_close_gradients(found, exact, TOLERANCES[tensors["value"].dtype])
    return found


BORDERS = {
    "one document": (),
    "inside of chunks": (5, 30, 100),
    "at borders of chunks": (64, 128),
    "around borders of chunks": (63, 65, 127),
    "of one token": (10, 11, 64, 65, 149),
}


@pytest.mark.thorough
@pytest.mark.parametrize("starts", BORDERS.values(), ids=BORDERS.keys())
def test_documents_are_separate(starts: tuple[int, ...]) -> None:
    tensors = Sizes(length=150).inputs()
    documents = numbered(150, *starts) if starts else None
    found = check(tensors, documents)
    # the first token of a document reads no state, so no decay has an effect there
    assert not found["decay"][:, [0, *starts]].any()


@pytest.mark.thorough
def test_a_document_that_returns_with_the_same_number_starts_anew() -> None:
    tensors = Sizes(length=12).inputs()
    numbers = torch.tensor([[1] * 4 + [2] * 4 + [1] * 4], device=DEVICE)
    found, expected = (results(gated_delta_rule, tensors, each) for each in (numbers, numbered(12, 4, 8)))
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.thorough
@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_the_last_chunk_may_be_partial(length: int) -> None:
    tensors = Sizes(length=length, samples=2).inputs()
    check(tensors)
    assert_close_values(gated_delta_rule(*tensors.values()), reference(*tensors.values()))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_have_narrow_gradients(dtype: torch.dtype) -> None:
    check(Sizes(keys=2, values=6).inputs(dtype), numbered(70, 31))


@pytest.mark.thorough
def test_large_decays_do_not_round_the_decays_of_another_document() -> None:
    tensors, documents = Sizes(length=60).inputs(), numbered(60, 30)
    plain = results(gated_delta_rule, tensors, documents)
    tensors["decay"][:, :30] = -80
    strong = results(gated_delta_rule, tensors, documents)
    for name, each in strong.items():
        assert_close_values(each[:, 30:], plain[name][:, 30:], what=name)
    assert_close_gradients(
        strong, results(chunked, {n: x.double() for n, x in tensors.items()}, documents), TOLERANCES[torch.float32]
    )


@pytest.mark.thorough
def test_a_large_gradient_of_one_document_does_not_reach_the_decays_of_another() -> None:
    tensors, documents = Sizes(length=60).inputs(), numbered(60, 30)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    weights = torch.zeros(1, 60, 2, 20, device=DEVICE)
    weights[:, 30:] = 1e8
    grads = torch.autograd.grad(gated_delta_rule(*leaves.values(), documents), list(leaves.values()), weights)
    assert not any(grad[:, :30].any() for grad in grads)


@pytest.mark.thorough
@pytest.mark.parametrize("decay", [-1e4, -1e38, float("-inf")])
def test_a_decay_that_underflows_empties_the_state_and_has_no_gradient(decay: float) -> None:
    tensors = Sizes(length=20).inputs()
    gentle = results(gated_delta_rule, tensors, numbered(20, 7))
    tensors["decay"][:, [0, 7]] = decay
    strong = results(gated_delta_rule, tensors, None)
    assert_close_gradients(strong, gentle, TOLERANCES[torch.float32])


@pytest.mark.thorough
def test_strides_do_not_matter() -> None:
    sizes = Sizes(keys=2, values=4)
    tensors = sizes.inputs()
    expected = results(gated_delta_rule, tensors, None)
    moved = {name: x.movedim(2, 1).contiguous().movedim(1, 2) for name, x in tensors.items()}
    found = results(gated_delta_rule, moved, None)
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.thorough
def test_queries_and_keys_are_read_in_the_dtype_of_the_values() -> None:
    narrow = Sizes().inputs(torch.bfloat16)
    mixed = narrow | {name: narrow[name].float() for name in ("query", "key", "beta")}
    found, expected = (results(gated_delta_rule, each, None) for each in (mixed, narrow))
    assert found["query"].dtype == found["key"].dtype == found["beta"].dtype == torch.float32
    assert_close_gradients(found, expected, TOLERANCES[torch.bfloat16])


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [Sizes(samples=0), Sizes(length=0)])
def test_empty_inputs_have_empty_results(sizes: Sizes) -> None:
    found = results(gated_delta_rule, sizes.inputs(), None)
    assert [x.numel() for x in found.values()] == [0] * 6


@pytest.mark.thorough
def test_the_op_is_sound_and_compiles_into_one_graph() -> None:
    tensors, documents = Sizes(length=20).inputs(), numbered(20, 7)
    arguments = (*(x.requires_grad_() for x in tensors.values()), documents)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(chunked_rule, arguments, test_utils=tests)
    compiled = torch.compile(gated_delta_rule, backend="aot_eager", fullgraph=True)
    found, expected = (results(rule, tensors, documents) for rule in (compiled, gated_delta_rule))
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.thorough
def test_inputs_that_do_not_fit_are_errors() -> None:
    tensors = Sizes(keys=2, values=4).inputs()
    for changes in (
        {"value": tensors["value"][:, :, :3]}, {"decay": tensors["decay"][:, :5]}, {"query": tensors["query"][..., :4]},
        {"beta": tensors["beta"][:, :, :1]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="query and key must be \\[B, S, K, D_k\\]"):
            gated_delta_rule(*(tensors | changes).values())
    with pytest.raises(ValueError, match="documents \\[B, S\\]"):
        gated_delta_rule(*tensors.values(), numbered(5))
    with pytest.raises(TypeError, match="gated_delta_rule.triton: decay is torch.float64"):
        gated_delta_rule(*(tensors | {"decay": tensors["decay"].double()}).values())
    wide = Sizes(length=1, key_dim=257).inputs()
    with pytest.raises(ValueError, match="key_dim is 257, but a program holds at most 256 features"):
        gated_delta_rule(*wide.values())


def test_the_kernels_share_the_constants_of_the_op() -> None:
    assert kernels._EPS.value == EPS
    assert CHUNK % kernels._ROWS.value == 0
    assert kernels._LEAST.value == pytest.approx(torch.tensor(torch.finfo(torch.float32).tiny).log().item(), rel=1e-7)


def test_heads_of_at_most_256_features_are_accepted() -> None:
    def asked(device: str = "cuda", dtype: str = "bfloat16", **static: Any) -> tuple[bool, int, str]:
        decision = support.gated_delta_rule(OpSignature("gated_delta_rule", device, dtype, static))
        return decision.accept, decision.priority, decision.reason

    assert asked(key_dim=256, value_dim=256)[:2] == (True, 15)
    assert asked(dtype="float64")[:2] == (False, 0)
    for name in ("key_dim", "value_dim"):
        assert asked(**{name: 257}) == (False, 0, f"a program holds at most 256 features of a head; {name} is 257")
    signature = OpSignature("gated_delta_rule", "cuda", "bfloat16", {})
    assert build(signature) is gated_delta_rule


#: Sizes of models and odd ones.
LARGE = [
    Sizes(2, 1000, 2, 4, 64, 64), Sizes(2, 1000, 2, 4, 128, 128), Sizes(1, 4096, 2, 4, 128, 128),
    Sizes(2, 500, 1, 1, 256, 256), Sizes(1, 130, 1, 3, 96, 48), Sizes(2, 63, 1, 2, 64, 128),
    Sizes(1, 300, 2, 2, 16, 32),
]  # fmt: skip


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("starts", [None, 0.005, 0.3], ids=["one document", "documents", "short documents"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_on_a_gpu_values_and_gradients_agree_with_float64(
    sizes: Sizes, dtype: torch.dtype, starts: float | None
) -> None:
    generator = torch.Generator().manual_seed(7)
    drawn = torch.rand(sizes.samples, sizes.length, generator=generator)
    documents = None if starts is None else (drawn < starts).long().cumsum(1).to(DEVICE)
    tensors = sizes.inputs(dtype, decays=0.1)
    first, again = check(tensors, documents), results(gated_delta_rule, tensors, documents)
    assert all(torch.equal(first[name], again[name]) for name in first), "bits differ between two calls"


@on_gpu
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_the_host_never_waits() -> None:
    tensors, documents = Sizes(2, 200, 2, 4, 128, 128).inputs(torch.bfloat16), numbered(200, 70).expand(2, -1)
    leaves = [x.requires_grad_() for x in tensors.values()]
    weights = torch.ones_like(tensors["value"])

    def step() -> None:
        torch.autograd.grad(gated_delta_rule(*leaves, documents), leaves, weights)

    step()  # the first call compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
