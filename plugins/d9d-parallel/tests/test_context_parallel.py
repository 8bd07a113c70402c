"""Attention over ranks that share the positions of samples, by every method, and refusals of the strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.job_file.job import Mesh
from d9d_core.model import ContextShare
from d9d_core.plugin import ViewSpec
from d9d_core.registry.registry import Registry
from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.positions import ZigzagPositions
from d9d_parallel.context_parallel import blocks, ring, strategy
from d9d_parallel.context_parallel.blocks import Block, attend, attend_backward, merge_into
from d9d_parallel.context_parallel.communication import Meeting
from d9d_parallel.context_parallel.config import ContextParallelConfig
from d9d_parallel.context_parallel.forwards import check_heads
from d9d_parallel.context_parallel.ring import PlacedSum, RingAttention
from d9d_parallel.context_parallel.strategy import ContextParallel
from d9d_testing.world import RankFailedError, World
from pydantic import ValidationError
from torch import Tensor, nn
from torch import distributed as dist

VIEWS = {e.spec.key: e.spec for e in Registry.of().entries("view") if isinstance(e.spec, ViewSpec)}
LENGTH = 32
PACKED = [[0] * 5 + [1] * 1 + [2] * 13 + [3] * 13, [0] * 20 + [1] * 12]
METHODS: dict[str, dict[str, Any]] = {
    "ulysses": {"method": "ulysses"},
    "all_gather": {"method": "all_gather"},
    "ring": {"method": "ring"},
    "hybrid": {"method": "hybrid", "head_ranks": 2},
}


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Scores of all pairs at once; a sink [N] is a further score without a value."""
    heads = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(heads, dim=2) for tensor in (key, value))
    scores = torch.einsum("bqnd,btnd->bnqt", query, key) / math.sqrt(query.shape[3])
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bnqt,btnd->bqnd", scores.softmax(-1)[..., : key.shape[1]], value)


class Core(nn.Module):
    """Attention core of its own kind: it makes its mask in each call."""

    def __init__(self, query_heads: int, key_value_heads: int, window: int | None) -> None:
        super().__init__()
        self.heads, self.window = (query_heads, key_value_heads), window
        self.share: ContextShare | None = None
        self.function: Callable[..., Tensor] | None = None

    def attention_heads(self) -> tuple[int, int]:
        return self.heads

    def head_features(self) -> int:
        return 8

    def see_queries(self, share: ContextShare) -> None:
        self.share = share

    def attend_by(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        if self.function is not None:
            return self.function(query, key, value, documents, self.window)
        places = torch.arange(key.shape[1]).unsqueeze(0)
        queries = places if self.share is None else self.share.own(places)
        behind = queries[0][:, None] - places[0]
        seen = (behind >= 0) & (behind < (self.window or key.shape[1]))
        if documents is not None:
            of_queries = documents if self.share is None else self.share.own(documents)
            seen = (seen & (of_queries[:, :, None] == documents[:, None]))[:, None]
        return attention(query, key, value, seen)


class Stage(nn.Module):
    """Stage with one core, which is all that looks across positions."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.share: ContextShare | None = None

    def attention_cores(self) -> Mapping[str, nn.Module]:
        return {"core": self.core}

    def split_context(self, share: ContextShare) -> None:
        self.share = share


def topology(**mesh: int) -> Topology:
    sizes = Mesh(**mesh).sizes()
    return Topology(sizes=sizes, rank=dist.get_rank(), world_size=dist.get_world_size(), views=VIEWS)


def tensors(query_heads: int, key_value_heads: int) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    counts = (query_heads, key_value_heads, key_value_heads, query_heads)
    return [torch.randn(2, LENGTH, count, 8, generator=generator, dtype=torch.float64) for count in counts]


def compared(settings: dict[str, Any], cases: list[tuple[int, int, int | None, list[list[int]] | None]]) -> list[float]:
    """Largest differences of output and gradients from one process, relative to numbers above one."""
    found = []
    for query_heads, key_value_heads, window, packed in cases:
        documents = None if packed is None else torch.tensor(packed)
        stage = Stage(Core(query_heads, key_value_heads, window))
        whole = [tensor.requires_grad_() for tensor in tensors(query_heads, key_value_heads)[:3]]
        grad = tensors(query_heads, key_value_heads)[3]
        expected = stage.core(*whole, documents)
        expected.backward(grad)
        applied = ContextParallel(ContextParallelConfig(**settings)).apply(stage, topology(cp=dist.get_world_size()))
        assert applied.modules == ("", "core")
        assert stage.share is not None
        own = stage.share.own
        mine = [own(tensor.detach()).requires_grad_() for tensor in whole]
        out = stage.core(*mine, documents)
        out.backward(own(grad))
        pairs = [(out.detach(), own(expected.detach()))]
        pairs += [(one.grad, own(other.grad)) for one, other in zip(mine, whole, strict=True)]
        found.append(max(((one - other).abs().max() / other.abs().max().clamp(min=1)).item() for one, other in pairs))
    return found


CASES = [
    (8, 4, None, None),
    (8, 2, None, PACKED),
    (4, 1, 5, PACKED),
    (4, 4, 11, None),
    (4, 1, 1, None),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "name"), [(2, "ulysses"), (2, "all_gather"), (2, "ring"), (4, "hybrid")])
def test_attention_and_its_gradients_are_those_of_one_process(ranks: int, name: str) -> None:
    for differences in World(ranks).run(compared, METHODS[name], CASES):
        assert max(differences) < 1e-12, differences


@pytest.mark.full
@pytest.mark.parametrize("name", ["ulysses", "all_gather", "ring"])
def test_attention_over_four_ranks_is_that_of_one_process(name: str) -> None:
    for differences in World(4).run(compared, METHODS[name], CASES):
        assert max(differences) < 1e-12, differences


@pytest.mark.smoke
@pytest.mark.parametrize("tile", [1, 40, 2**20])
@pytest.mark.parametrize("window", [None, 6, 20])
def test_blocks_of_keys_merge_to_the_whole(monkeypatch: pytest.MonkeyPatch, tile: int, window: int | None) -> None:
    monkeypatch.setattr(blocks, "TILE", tile)
    query, key, value, grad = (tensor.requires_grad_() for tensor in tensors(4, 2))
    documents = torch.tensor(PACKED)
    expected = Core(4, 2, window)(query, key, value, documents)
    expected.backward(grad)
    out, total = torch.zeros_like(query), torch.full(query.shape[:3], -math.inf, dtype=query.dtype)
    cuts = [(start, start + 8) for start in range(0, LENGTH, 8)]
    made = {(a, b): Block(0, a, (documents, documents[:, a:b]), window) for a, b in cuts}
    with torch.no_grad():
        for (a, b), block in made.items():
            merge_into(out, total, *attend(query, key[:, a:b], value[:, a:b], block))
        for (a, b), block in made.items():
            parts = attend_backward(grad, query, key[:, a:b], value[:, a:b], out, total, block)
            torch.testing.assert_close(parts[1], key.grad[:, a:b])  # type: ignore[index]
            torch.testing.assert_close(parts[2], value.grad[:, a:b])  # type: ignore[index]
            query.grad -= parts[0]  # type: ignore[operator]
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(query.grad, torch.zeros_like(query), atol=1e-12, rtol=0)


@pytest.mark.smoke
def test_blocks_that_nobody_sees_are_known_by_their_positions() -> None:
    assert not Block(query=0, key=8).is_seen(8, 8)
    assert Block(query=8, key=8).is_seen(8, 8)
    assert Block(query=8, key=0, window=2).is_seen(8, 8)
    assert not Block(query=9, key=0, window=2).is_seen(8, 8)
    assert Block(query=8, key=0).mask(slice(0, 8), 8, torch.device("cpu")) is None


def rounded() -> float:
    """Largest difference of a ring's output in a context that computes in bfloat16, on float32 inputs."""
    stage = Stage(Core(4, 2, None))
    whole = [tensor.float() for tensor in tensors(4, 2)[:3]]
    expected = stage.core(*whole, None)
    ContextParallel(ContextParallelConfig(method="ring")).apply(stage, topology(cp=2))
    assert stage.share is not None
    own = stage.share.own
    with torch.autocast("cpu", torch.bfloat16):
        out = stage.core(*(own(tensor) for tensor in whole), None)
    return (out - own(expected)).abs().max().item()


def test_gradients_of_parts_add_up_in_memory_of_any_values() -> None:
    parts = [(slice(2, 4), torch.ones(1, 2, 1, 1)), (slice(3, 6), torch.ones(1, 3, 1, 1).bfloat16())]
    for count, expected in ((0, [0.0] * 7), (1, [0.0, 0, 1, 1, 0, 0, 0]), (2, [0.0, 0, 1, 2, 1, 1, 0])):
        sums = PlacedSum(torch.full((1, 7, 1, 1), math.nan))
        for place, part in parts[:count]:
            sums.add(place, part)
        assert sums.finish().flatten().tolist() == expected


@pytest.mark.thorough
def test_a_ring_merges_in_float32_where_products_are_to_be_in_bfloat16() -> None:
    assert max(World(2).run(rounded)) < 1e-5


# --- refusals


@pytest.mark.smoke
@pytest.mark.parametrize(("query_heads", "key_value_heads", "ranks"), [(8, 2, 4), (8, 8, 4), (6, 2, 2), (4, 1, 4)])
def test_heads_that_ranks_can_share_or_repeat_pass(query_heads: int, key_value_heads: int, ranks: int) -> None:
    check_heads(query_heads, key_value_heads, ranks)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("query_heads", "key_value_heads", "ranks", "said"),
    [(6, 2, 4, "does not divide the 6 query heads"), (12, 3, 2, "nor is a multiple of them")],
)
def test_heads_that_ranks_cannot_share_are_refused(
    query_heads: int, key_value_heads: int, ranks: int, said: str
) -> None:
    with pytest.raises(BuildError, match=f"{said}.*or method all_gather"):
        check_heads(query_heads, key_value_heads, ranks)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "hybrid"}, "method hybrid needs head_ranks"),
        ({"method": "ring", "head_ranks": 2}, "head_ranks has no effect with method ring"),
        ({"method": "hybrid", "head_ranks": 1}, "greater than or equal to 2"),
        ({"method": "rings"}, "'ulysses', 'all_gather', 'ring' or 'hybrid'"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises((ValidationError, ValueError), match=said):
        ContextParallelConfig(**settings)


def apply(settings: dict[str, Any], kind: str) -> None:
    plain = nn.Module()
    stage: nn.Module = {
        "no stage": lambda: nn.Linear(2, 2),
        "plain core": lambda: Stage(plain),
        "heads": lambda: Stage(Core(6, 3, None)),
        "core": lambda: Stage(Core(4, 2, None)),
    }[kind]()
    ContextParallel(ContextParallelConfig(**settings)).apply(stage, topology(cp=dist.get_world_size()))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("no stage", {"method": "ring"}, r"Linear lacks split_context\(\)"),
        ("plain core", {"method": "ring"}, "the attention core 'core' computes whole samples only"),
        ("heads", {"method": "ulysses"}, "neither divides the 3 key/value heads nor is a multiple of them"),
        ("core", {"method": "hybrid", "head_ranks": 2}, "head_ranks is 2, but mesh.cp is 2"),
    ],
)
def test_stages_that_cannot_be_split_are_refused(kind: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RankFailedError, match=said):
        World(2).run(apply, settings, kind)


def test_a_core_that_knows_nothing_of_it_gets_some_heads_of_all_positions() -> None:
    World(2).run(plain_core)


def plain_core() -> None:
    seen = SimpleNamespace()

    class Plain(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
            seen.shapes = [tuple(tensor.shape) for tensor in (query, key, value, documents)]
            seen.query = query
            return query

    stage = Stage(Plain())
    ContextParallel(ContextParallelConfig(method="ulysses")).apply(stage, topology(cp=2))
    assert stage.share is not None
    query, key, value, _ = tensors(4, 1)
    own = [stage.share.own(tensor) for tensor in (query, key, value)]
    torch.testing.assert_close(stage.core(*own, torch.tensor(PACKED)), own[0])
    assert seen.shapes == [(2, LENGTH, 2, 8), (2, LENGTH, 1, 8), (2, LENGTH, 1, 8), (2, LENGTH)]
    torch.testing.assert_close(seen.query, query.chunk(2, dim=2)[dist.get_rank()])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_ring_of_threads_computes_the_attention_of_one_rank(
    monkeypatch: pytest.MonkeyPatch, ranks: int, window: int | None, packed: bool, with_sinks: bool
) -> None:
    length = 12 * ranks
    boxes: list[Queue[Tensor]] = [Queue() for _ in range(ranks)]

    class Passing:
        """Tensor that goes to the next thread."""

        def __init__(self, tensor: Tensor, own: Any) -> None:
            boxes[(own.rank + 1) % own.size].put(tensor.clone())
            self.box = boxes[own.rank]

        def wait(self) -> Tensor:
            return self.box.get(timeout=20)

    monkeypatch.setattr(ring, "Passing", Passing)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, length, heads, 3, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    factors = torch.randn(2, length, 4, 3, generator=generator, dtype=torch.float64)
    places = torch.arange(length)
    documents = torch.stack([places >= length // 3, places >= 5]).long() if packed else None
    sinks = torch.randn(4, generator=generator, dtype=torch.float64) if with_sinks else None

    def work(rank: int) -> tuple[Tensor, list[Tensor], Tensor | None]:
        made, own = RingAttention(SimpleNamespace(rank=rank, size=ranks)), ZigzagPositions(ranks, rank).own  # type: ignore[arg-type]
        leaves = [own(tensor).requires_grad_() for tensor in whole]
        # Masks are made once for all layers, or in the call.
        turns = documents if rank else made.prepare(documents, length, window, torch.device("cpu"))
        of_heads = None if sinks is None else sinks.clone().requires_grad_()
        out = made(*leaves, turns, window, of_heads)
        (out * own(factors)).sum().backward()
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return out.detach(), grads, None if of_heads is None else of_heads.grad

    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(work, range(ranks)))
    behind = places[:, None] - places
    seen = (behind >= 0) & (behind < (window or length))
    if documents is not None:
        seen = (seen & (documents[:, :, None] == documents[:, None]))[:, None]
    leaves = [tensor.requires_grad_() for tensor in whole]
    of_heads = None if sinks is None else sinks.clone().requires_grad_()
    expected = attention(*leaves, seen, of_heads)
    (expected * factors).sum().backward()
    if of_heads is not None:
        torch.testing.assert_close(torch.stack([grad for *_, grad in found if grad is not None]).sum(0), of_heads.grad)
    for rank, (out, grads, _) in enumerate(found):
        own = ZigzagPositions(ranks, rank).own
        torch.testing.assert_close(out, own(expected.detach()))
        for grad, leaf in zip(grads, leaves, strict=True):
            torch.testing.assert_close(grad, own(leaf.grad))


@pytest.mark.parametrize(
    ("ranks", "inner", "heads", "rings"),
    [
        (4, 2, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        (6, 2, [[0, 1], [2, 3], [4, 5]], [[0, 2, 4], [1, 3, 5]]),
        (6, 3, [[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]),
    ],
)
def test_neighbours_swap_heads_and_rings_join_their_equals(
    monkeypatch: pytest.MonkeyPatch, ranks: int, inner: int, heads: list[list[int]], rings: list[list[int]]
) -> None:
    made: list[list[list[int]]] = []
    monkeypatch.setattr(
        strategy, "_ranks", lambda _topology, parts: (made.append([list(part) for part in parts]), len(made))[1]
    )
    share: Any = SimpleNamespace(ranks=ranks, all_ranks="all")
    topology: Any = SimpleNamespace(sizes={"tp": 3})

    def meeting(method: Any, head_ranks: int | None = None) -> Meeting:
        return ContextParallel(ContextParallelConfig(method=method, head_ranks=head_ranks))._meeting(topology, share)

    found: Any = meeting("hybrid", inner)
    assert (found.tp, found.heads, found.ring, found.keys) == (3, 1, 2, None)
    assert made == [heads, rings]
    assert meeting("ulysses") == Meeting(3, heads=share.all_ranks)
    assert meeting("ring") == Meeting(3, ring=share.all_ranks)
    assert meeting("all_gather") == Meeting(3, keys=share)
    for wrong in (ranks, 5):
        with pytest.raises(BuildError, match=rf"head_ranks is {wrong}, but mesh.cp is {ranks}; choose a smaller div"):
            meeting("hybrid", wrong)
