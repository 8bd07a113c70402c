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
from d9d_nn.delta.chain import ContextChain
from d9d_nn.ops.gated_delta_rule import EPS, chunked, chunked_from
from d9d_nn.ops.gated_delta_rule import gated_delta_rule as reference
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients, assert_close_values
from d9d_triton import gated_delta_rule as module
from d9d_triton import support
from d9d_triton.gated_delta_rule import (
    CHUNK,
    build,
    build_from,
    chunked_rule,
    gated_delta_rule,
    gated_delta_rule_from,
)
from d9d_triton.kernels import gated_delta_rule as kernels
from d9d_triton.kernels import gated_delta_rule_parts as shared
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
    """Compare values and gradients with the rule in chunks in float64, which tests of d9d-nn compare."""
    found = results(gated_delta_rule, tensors, documents)
    exact = results(chunked, {name: x.double() for name, x in tensors.items()}, documents)
    assert {name: found[name].dtype for name in NAMES} == {name: x.dtype for name, x in tensors.items()}
    assert_close_gradients(found, exact, TOLERANCES[tensors["value"].dtype])
    return found


def results_from(
    rule: Callable[..., tuple[Tensor, Tensor]], tensors: dict[str, Tensor], documents: Tensor | None
) -> dict[str, Tensor]:
    """Outputs and last state, and the gradients of a random weighted sum of both; ``tensors`` begin with the state."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    found = rule(*leaves.values(), documents)
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(x.shape, generator=generator).bfloat16().to(x.device, x.dtype) for x in found]
    grads = torch.autograd.grad(found, list(leaves.values()), weights)
    return {"out": found[0].detach(), "last": found[1].detach(), **dict(zip(tensors, grads, strict=True))}


def begun(sizes: Sizes, dtype: torch.dtype = torch.float32, decays: float = 1.0) -> dict[str, Tensor]:
    """Random inputs of the rule from a given state."""
    shape = (sizes.samples, sizes.values, sizes.key_dim, sizes.value_dim)
    state = torch.randn(shape, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    return {"state": state, **sizes.inputs(dtype, decays)}


def check_from(tensors: dict[str, Tensor], documents: Tensor | None = None) -> dict[str, Tensor]:
    """Compare the rule from a given state with the rule in chunks in float64, gradients included."""
    found = results_from(gated_delta_rule_from, tensors, documents)
    exact = results_from(chunked_from, {name: x.double() for name, x in tensors.items()}, documents)
    wanted = {name: x.dtype for name, x in tensors.items()} | dict.fromkeys(("out", "last"), torch.float32)
    assert {name: x.dtype for name, x in found.items()} == wanted
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
    arguments = (None, *(x.requires_grad_() for x in tensors.values()), documents)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(chunked_rule, arguments, test_utils=tests)
    compiled = torch.compile(gated_delta_rule, backend="aot_eager", fullgraph=True)
    found, expected = (results(rule, tensors, documents) for rule in (compiled, gated_delta_rule))
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.thorough
@pytest.mark.parametrize("starts", BORDERS.values(), ids=BORDERS.keys())
def test_a_given_state_is_continued_by_the_first_document(starts: tuple[int, ...]) -> None:
    tensors = begun(Sizes(length=150, samples=2))
    documents = numbered(150, *starts).expand(2, -1) if starts else None
    found = check_from(tensors, documents)
    assert found["decay"][:, 0].all()  # the first token decays the given state
    assert not found["decay"][:, list(starts)].any()
    if starts:  # a later document empties the last state of the given one
        plain = results_from(gated_delta_rule_from, tensors | {"state": -tensors["state"]}, documents)
        assert torch.equal(plain["last"], found["last"])


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_and_outputs_from_a_given_state_are_float32(dtype: torch.dtype) -> None:
    check_from(begun(Sizes(keys=2, values=6), dtype), numbered(70, 31))


@pytest.mark.thorough
def test_two_calls_in_a_row_are_one() -> None:
    tensors = begun(Sizes(length=100))
    state, *inputs = tensors.values()
    whole, last = gated_delta_rule_from(state, *inputs)
    early, middle = gated_delta_rule_from(state, *(x[:, :64] for x in inputs))
    late, end = gated_delta_rule_from(middle, *(x[:, 64:] for x in inputs))
    assert_close_values(torch.cat([early, late], dim=1), whole)
    assert_close_values(end, last)
    assert_close_values(gated_delta_rule_from(torch.zeros_like(state), *inputs)[0], gated_delta_rule(*inputs))


@pytest.mark.thorough
def test_outputs_and_last_state_may_be_used_alone() -> None:
    tensors = begun(Sizes(length=20))

    def gradients(rule: Callable[..., tuple[Tensor, Tensor]], used: int) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors.values()]
        grads = torch.autograd.grad(rule(*leaves)[used].sum(), leaves, allow_unused=True)
        return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)]

    for used in range(2):
        both = gradients(gated_delta_rule_from, used), gradients(chunked_from, used)
        for name, found, expected in zip(tensors, *both, strict=True):
            assert_close_values(found, expected, what=name)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [Sizes(samples=0), Sizes(length=0)])
def test_without_positions_the_given_state_is_the_last_one(sizes: Sizes) -> None:
    tensors = begun(sizes)
    found = results_from(gated_delta_rule_from, tensors, None)
    assert torch.equal(found["last"], tensors["state"])
    assert found["state"].shape == tensors["state"].shape
    assert found["out"].numel() == 0


@pytest.mark.thorough
def test_the_op_from_a_state_is_sound_and_compiles_into_one_graph() -> None:
    tensors, documents = begun(Sizes(length=20)), numbered(20, 7)
    arguments = (*(x.requires_grad_() for x in tensors.values()), documents)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(chunked_rule, arguments, test_utils=tests)
    compiled = torch.compile(gated_delta_rule_from, backend="aot_eager", fullgraph=True)
    found, expected = (results_from(rule, tensors, documents) for rule in (compiled, gated_delta_rule_from))
    assert all(torch.equal(found[name], expected[name]) for name in found)


class Whole:
    """Share of the only rank of context parallelism, whose two chunks are the whole sample."""

    ranks = 1

    def own(self, tensor: Tensor) -> Tensor:
        return tensor

    gather = own


@pytest.mark.thorough
@pytest.mark.parametrize("starts", [(), (40,), (64, 100)], ids=["one document", "inside", "at the border"])
def test_chunks_of_ranks_are_chained_by_the_kernels(starts: tuple[int, ...]) -> None:
    tensors = Sizes(length=128, keys=2, values=4).inputs()
    documents = numbered(128, *starts) if starts else None
    chain = ContextChain(Whole())

    def chained(*inputs: Any) -> Tensor:
        *parts, numbers = inputs
        stacked = [x.unflatten(1, (2, -1)).flatten(0, 1) for x in parts]
        return chain.rule(gated_delta_rule_from, *stacked, numbers).unflatten(0, (-1, 2)).flatten(1, 2)

    found = results(chained, tensors, documents)
    exact = results(chunked, {name: x.double() for name, x in tensors.items()}, documents)
    assert_close_gradients(found, exact, TOLERANCES[torch.float32])


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
    state = torch.zeros(1, 4, 8, 19, device=DEVICE)
    with pytest.raises(ValueError, match="the state is torch.float32 \\[1, 4, 8, 19\\]; it must be float32"):
        gated_delta_rule_from(state, *tensors.values())


def test_the_kernels_share_the_constants_of_the_op() -> None:
    assert shared.EPS.value == EPS
    assert CHUNK % kernels._ROWS.value == 0
    assert shared.LEAST_DECAY.value == pytest.approx(
        torch.tensor(torch.finfo(torch.float32).tiny).log().item(), rel=1e-7
    )


def test_loads_are_stored_ahead_where_shared_memory_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def stages(sizes: Sizes, dtype: torch.dtype = torch.bfloat16, *, room: bool = True) -> list[int]:
        monkeypatch.setattr(module, "_has_room", lambda _value: room)
        call = module._Call.of(None, *sizes.inputs(dtype).values(), None)
        kernels = ("pass_states", "pass_gradients", "differentiate", "solve")
        return [call.launch(kernel)["num_stages"] for kernel in kernels]

    assert stages(Sizes(key_dim=128, value_dim=128)) == [3, 2, 2, 1]
    assert stages(Sizes(key_dim=128, value_dim=256)) == [3, 2, 1, 1]
    assert stages(Sizes(key_dim=256, value_dim=128)) == [1, 1, 1, 1]
    for limited in (stages(Sizes(), torch.float32), stages(Sizes(), room=False)):
        assert limited == [2, 1, 1, 1]
    assert stages(Sizes(), torch.float32, room=False) == [1, 1, 1, 1]


def test_heads_of_at_most_256_features_are_accepted() -> None:
    def asked(device: str = "cuda", dtype: str = "bfloat16", **static: Any) -> tuple[bool, int, str]:
        decision = support.gated_delta_rule(OpSignature("gated_delta_rule", device, dtype, static))
        return decision.accept, decision.priority, decision.reason

    assert asked(key_dim=256, value_dim=256)[:2] == (True, 25)
    assert asked(dtype="float64")[:2] == (False, 0)
    assert asked(dtype="float32", key_dim=128, value_dim=256)[0]
    reason = "a program holds at most 128 features of a float32 head; key_dim is 129"
    assert asked(dtype="float32", key_dim=129) == (False, 0, reason)
    for name in ("key_dim", "value_dim"):
        assert asked(**{name: 257}) == (False, 0, f"a program holds at most 256 features of a head; {name} is 257")
    signature = OpSignature("gated_delta_rule", "cuda", "bfloat16", {})
    assert build(signature) is gated_delta_rule
    assert build_from(signature) is gated_delta_rule_from


def test_gpus_of_amd_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    decision = support.gated_delta_rule(OpSignature("gated_delta_rule", "cuda", "bfloat16", {}))
    assert not decision.accept
    assert "AMD" in decision.reason


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


#: Few sizes, because all kernels are compiled for each; the first has values as under context parallelism.
LARGE_FROM = [
    (Sizes(2, 500, 2, 4, 128, 256), torch.bfloat16, None), (Sizes(2, 500, 2, 4, 128, 256), torch.bfloat16, 0.005),
    (Sizes(1, 300, 1, 2, 64, 128), torch.float32, 0.005),
]  # fmt: skip


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "dtype", "starts"), LARGE_FROM, ids=str)
def test_on_a_gpu_given_and_last_states_agree_with_float64(
    sizes: Sizes, dtype: torch.dtype, starts: float | None
) -> None:
    drawn = torch.rand(sizes.samples, sizes.length, generator=torch.Generator().manual_seed(7))
    documents = None if starts is None else (drawn < starts).long().cumsum(1).to(DEVICE)
    tensors = begun(sizes, dtype, decays=0.1)
    first, again = check_from(tensors, documents), results_from(gated_delta_rule_from, tensors, documents)
    assert all(torch.equal(first[name], again[name]) for name in first), "bits differ between two calls"


@on_gpu
@pytest.mark.gpu
def test_on_a_gpu_the_chain_of_ranks_is_as_precise_as_a_whole_sample() -> None:
    tensors = Sizes(1, 1024, 2, 4, 128, 128).inputs(torch.bfloat16, decays=0.1)
    chain = ContextChain(Whole())

    def chained(*inputs: Any) -> Tensor:
        stacked = [x.unflatten(1, (2, -1)).flatten(0, 1) for x in inputs[:-1]]
        return chain.rule(gated_delta_rule_from, *stacked, None).unflatten(0, (-1, 2)).flatten(1, 2)

    exact = results(chunked, {name: x.double() for name, x in tensors.items()}, None)
    assert_close_gradients(results(chained, tensors, None), exact, TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[on_gpu, pytest.mark.gpu])])
def test_a_decay_that_is_not_a_number_is_not_hidden(device: str) -> None:
    tensors = {name: x.to(device) for name, x in Sizes(1, 80, 1, 1, 16, 16).inputs(torch.float32).items()}
    tensors["decay"][0, 20] = torch.nan
    assert gated_delta_rule(*tensors.values())[0, 21:].isnan().all()


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
