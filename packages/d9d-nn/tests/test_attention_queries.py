"""Attention from queries at some positions, and by a function in the place of a backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSignature
from d9d_nn.attention.core import AttentionCore
from d9d_nn.attention.masks import prepare_masks
from d9d_nn.ops.attention import flex, queries, sdpa
from d9d_nn.ops.attention.block_mask import BLOCK, queries_block_mask
from d9d_nn.ops.attention.queries import QueryRectangles
from d9d_nn.ops.attention.reference import attention, visible
from d9d_nn.ops.attention.sdpa import Sdpa
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [pytest.mark.smoke, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]
CPU = torch.device("cpu")
LENGTH = 300
BUILDS: dict[str, Callable[[OpSignature], Any]] = {"sdpa": sdpa.build, "flex": flex.build}


class Some:
    """Share of two runs of positions, as ranks of cp have."""

    ranks = 2
    places = torch.cat([torch.arange(60, 150), torch.arange(230, 290)])

    def own(self, tensor: Tensor) -> Tensor:
        return tensor[:, self.places]

    def gather(self, tensor: Tensor) -> Tensor:
        raise AssertionError


def packed(samples: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 4, (samples, LENGTH), generator=generator).sort(dim=1).values


def heads(count: int) -> Tensor:
    return torch.randn(2, LENGTH, count, 16, generator=torch.Generator().manual_seed(count))


def core(backend: str, window: int | None) -> AttentionCore:
    made = AttentionCore(query_heads=4, key_value_heads=2, head_dim=16, window=window)
    made.see_queries(Some())
    made.attention.bind(backend, BUILDS[backend](OpSignature("attention", "cpu", "float32", {"window": window})))
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BUILDS)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("documents", [None, packed()], ids=["one document", "packed"])
def test_queries_at_some_positions_see_what_they_see_among_all(
    backend: str, window: int | None, documents: Tensor | None
) -> None:
    query, key, value = heads(4), heads(2), heads(2) + 1
    expected = attention(query, key, value, documents, window=window)[:, Some.places]
    layer = core(backend, window)
    masks = prepare_masks([layer.attention], documents, LENGTH, CPU)
    with torch.no_grad():
        for given_documents in (masks, documents):
            out = layer(query[:, Some.places], key, value, given_documents)
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


class Every:
    """Share of all positions but some at the end, which makes one run."""

    ranks = 1

    def own(self, tensor: Tensor) -> Tensor:
        return tensor[:, :200]

    def gather(self, tensor: Tensor) -> Tensor:
        raise AssertionError


@pytest.mark.thorough
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
@pytest.mark.parametrize("share", [Some(), Every()], ids=["some", "the first"])
def test_in_rectangles_queries_and_gradients_are_those_among_all(share: Some | Every) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, LENGTH, count, 16) for count in (4, 2, 2)]
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    grad = torch.zeros(shapes[0], dtype=torch.float64)
    places = share.own(torch.arange(LENGTH)[None])[0]
    grad[:, places] = torch.randn(2, len(places), 4, 16, generator=generator, dtype=torch.float64)
    expected = attention(*whole)
    expected.backward(grad)
    layer = AttentionCore(query_heads=4, key_value_heads=2, head_dim=16)
    layer.see_queries(share)
    layer.attention.bind("sdpa", Sdpa(None, grouped_with_mask=True, of_one=True, in_rectangles=True))
    padding = (torch.arange(LENGTH) > 290).long()[None].expand(2, -1)  # which no query sees
    masks = prepare_masks([layer.attention], padding, LENGTH, CPU)
    assert isinstance(masks.prepared[layer.attention.mask_key], QueryRectangles)
    attend: Callable[..., Tensor]
    for attend in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        mine = [tensor.detach().requires_grad_() for tensor in (whole[0][:, places], *whole[1:])]
        out = attend(*mine, masks)
        torch.testing.assert_close(out, expected[:, places])
        out.backward(grad[:, places])
        for one, other in zip(mine, (whole[0].grad[:, places], whole[1].grad, whole[2].grad), strict=True):  # type: ignore[index]
            torch.testing.assert_close(one.grad, other)


def test_the_ops_of_a_rectangle_are_what_torch_wants_of_ops() -> None:
    query, key, grad = torch.randn(2, 8, 4, 8), torch.randn(2, 16, 2, 8), torch.randn(2, 8, 4, 8)
    for numbers in QueryRectangles([range(4, 8), range(12, 16)], 16).numbers:
        torch.library.opcheck(queries.forward, (query, key, key, [*numbers]))
        _, total = queries.forward(query, key, key, numbers)
        torch.library.opcheck(queries.backward, (grad, query, key, key, query, total, [*numbers]))


@pytest.mark.parametrize("runs", [1, 2, 3, 4])
def test_gradients_that_rectangles_share_are_rounded_once(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    rectangles = QueryRectangles([range(32 * run, 32 * run + 16) for run in range(runs)], 160)
    query, grad = (torch.randn(2, 16 * runs, 4, 16, generator=generator).bfloat16() for _ in range(2))
    key, value = (torch.randn(2, 160, 2, 16, generator=generator).bfloat16() for _ in range(2))
    exact = [torch.zeros(one.shape) for one in (query, key, value)]
    backward, calls = queries.backward, 0

    def followed(*inputs: Any) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        parts = backward(*inputs)
        rows, columns = slice(*inputs[-1][:2]), slice(*inputs[-1][2:4])
        for of, place, part in zip(exact, (rows, columns, columns), parts, strict=True):
            of[:, place] += part.float()
        return parts

    monkeypatch.setattr(queries, "backward", followed)
    mine = [one.requires_grad_() for one in (query, key, value)]
    rectangles.attend(*mine).backward(grad)
    assert calls == 2 * runs - 1
    for one, other in zip(mine, exact, strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.bfloat16())


class Moved(TorchDispatchMode):
    """Counts the elements that ops write, except elements of attention itself."""

    written = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.namespace != "d9d_nn" and not function.is_view and isinstance(out, Tensor):
            self.written += out.numel()
        return out


def test_around_rectangles_little_is_copied() -> None:
    # The first of two ranks of cp, in units of its queries: half of them see keys in two rectangles, of which outputs
    # are widened, subtracted, weighted, and rounded, and gradients added. All are then put into one tensor.
    query, key = torch.randn(1, 128, 4, 32), torch.randn(1, 256, 2, 32)
    mine = [one.bfloat16().requires_grad_() for one in (query, key, key)]
    rectangles = QueryRectangles([range(64), range(192, 256)], 256)
    with Moved() as forward:
        out = rectangles.attend(*mine)
    grad = torch.randn_like(out)
    with Moved() as backward:
        out.backward(grad)
    small = 0.1  # logarithms of sums
    assert 0 < forward.written / out.numel() - (1 + 4 / 2) < small
    of_keys = 1 + 1 / 4
    assert 0 <= backward.written / out.numel() - (1 + 1 / 2 + 2 * of_keys) < small


def test_rectangles_compute_in_what_autocast_says() -> None:
    rectangles = QueryRectangles([range(LENGTH)], LENGTH)
    inputs = heads(4), heads(2), heads(2) + 1
    with torch.autocast("cpu", torch.bfloat16):
        out = rectangles.attend(*inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), attention(*inputs), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("facts", "documents", "chosen"),
    [
        ({}, False, True),
        ({}, None, False),
        ({}, True, False),
        ({"window": 9}, False, False),
        ({"dtype": "float32"}, False, False),
        ({"head_dim": 20}, False, False),
    ],
)
def test_sdpa_is_chosen_where_queries_attend_in_rectangles(
    facts: dict[str, Any], documents: bool | None, chosen: bool
) -> None:
    facts = {"window": None, "head_dim": 16, "causal": True, "own_queries": True} | facts
    dtype = facts.pop("dtype", "bfloat16")
    asked = OpSignature("attention", "cuda", dtype, facts, documents=documents)
    one, other = sdpa.supports(asked), flex.supports(asked)
    assert (one.priority > other.priority) == chosen
    mask = sdpa.build(asked).prepare_queries(packed(), [range(60, 150), range(230, 290)], LENGTH, CPU)
    assert isinstance(mask, QueryRectangles) == chosen
    assert chosen or mask.shape[-2:] == (150, LENGTH)


@given(window=st.none() | st.integers(1, 400), start=st.integers(0, 200), few=st.booleans(), is_packed=st.booleans())
def test_no_block_that_a_query_sees_is_left_out_of_a_block_mask(
    window: int | None, start: int, few: bool, is_packed: bool
) -> None:
    places = torch.cat([torch.arange(start, start + (5 if few else 100)), torch.arange(210, 300)])
    documents = packed() if is_packed else None
    runs = [range(start, start + (5 if few else 100)), range(210, 300)]
    mask = queries_block_mask(documents, runs, LENGTH, window, CPU)
    seen = visible(LENGTH, documents, CPU, window, places).expand(2, -1, -1)
    samples = mask.kv_num_blocks.shape[0]
    for sample in range(samples):
        for block in range(-(-len(places) // BLOCK)):
            rows = seen[sample, block * BLOCK : (block + 1) * BLOCK]
            listed = _listed(mask.kv_num_blocks, mask.kv_indices, sample, block)
            whole = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, sample, block)
            assert not listed & whole
            for column in range(-(-LENGTH // BLOCK)):
                part = rows[:, column * BLOCK : (column + 1) * BLOCK]
                assert column in listed | whole or not part.any()
                assert column not in whole or part.all()


def _listed(counts: Tensor | None, places: Tensor | None, sample: int, block: int) -> set[int]:
    assert counts is not None
    assert places is not None
    return set(places[sample, 0, block, : int(counts[sample, 0, block])].tolist())


def test_a_mask_of_all_queries_is_the_mask() -> None:
    documents, everywhere = packed(), torch.arange(LENGTH)
    for window in (None, 7):
        for numbers in (None, documents):
            whole = visible(LENGTH, numbers, CPU, window)
            assert torch.equal(visible(LENGTH, numbers, CPU, window, everywhere), whole)


def test_a_backend_that_attends_from_all_positions_only_is_refused() -> None:
    made = AttentionCore(query_heads=4, key_value_heads=2, head_dim=16)
    made.see_queries(Some())
    said = "kernels.attention: 'mine' needs queries of all positions of a sample.*choose sdpa or flex.*ulysses"
    with pytest.raises(BuildError, match=said):
        made.attention.bind("mine", attention)
    other = AttentionCore(query_heads=4, key_value_heads=2, head_dim=16)
    other.attention.bind("mine", attention)
    with pytest.raises(BuildError, match=said):
        other.see_queries(Some())


def test_a_function_in_the_place_of_a_backend_gets_documents_and_window_and_no_mask_is_made() -> None:
    made = AttentionCore(query_heads=4, key_value_heads=2, head_dim=16, window=9)
    given_to: list[Any] = []

    def mine(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
        given_to.extend([documents, window])
        return query

    made.attend_by(mine)
    masks = prepare_masks([made.attention], packed(), LENGTH, CPU)
    assert set(masks.prepared.values()) == {None}
    query = heads(4)
    assert made(query, heads(2), heads(2), masks) is query
    assert torch.equal(given_to[0], packed())
    assert given_to[1] == 9
    assert made.op_slots() == {}
    assert made.attention_heads() == (4, 2)


def test_gradients_of_several_rectangles_are_added_in_their_places_and_rounded_once() -> None:
    first, second, third = (torch.full((1, 2, 1, 1), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0))
    places = [slice(0, 2), slice(0, 2), slice(1, 3)]
    pieces = queries._pieces(places, 5)
    assert pieces == (
        (1, ((0, 0), (1, 0))), (1, ((0, 1), (1, 1), (2, 0))), (1, ((2, 1),)), (2, ()),
    )  # fmt: skip
    found = queries._added([first, second, third], pieces)
    assert (found.dtype, found.shape) == (torch.bfloat16, (1, 5, 1, 1))
    # Halves are rounded to even: 257 to 256; each 1 alone would be lost in 256.
    assert found.flatten().tolist() == [256.0, 258.0, 1.0, 0.0, 0.0]


def test_two_parts_of_attention_are_weighed_by_their_sums() -> None:
    ones, threes = torch.full((1, 1, 1, 2), 1.0), torch.full((1, 1, 1, 2), 5.0)
    total, other = torch.zeros(1, 1, 1), torch.full((1, 1, 1), math.log(3.0))
    out, both = queries._merged((ones, total), (threes, other))
    assert out.flatten().tolist() == pytest.approx([4.0, 4.0])  # a quarter of 1 and three of 5
    assert both.item() == pytest.approx(math.log(4.0))
