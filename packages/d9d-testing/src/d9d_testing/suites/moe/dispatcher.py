"""Conformance suite of token dispatchers, on any number of ranks.

Needs d9d-moe and hypothesis: install ``d9d-testing[moe]``.

Shapes: T tokens of a rank, H features, E experts, k experts per token, R rows received by the experts of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from d9d_testing.suites.moe.dispatcher_steps import Case, inputs_of, steps
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients, assert_close_values
from d9d_testing.world import World

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
#: Numbers of tokens of the ranks if they differ; the second rank has none.
_LENGTHS = (5, 0, 9, 1, 4, 3, 7, 2)


class DispatcherSuite:
    """Conformance suite of token dispatchers.

    Subclass it and name the factory::

        class TestMyDispatcher(DispatcherSuite):
            factory = "my_package.my_dispatcher:build"

    Every step, experts and overlapped computation included, is compared with a float64 reference that sums all experts
    of each token in one process.

    Attributes:
        factory: ``module:attribute`` or ``file.py:attribute`` of ``(group, experts) -> Dispatcher``, loaded by every
            rank.
        ranks: sizes of the worlds.
        dtypes: dtypes of tokens and experts; weights are at least float32.
        hidden: H, the number of features.
        device: ``cpu``, or ``cuda`` with one GPU per rank.
    """

    pytestmark = pytest.mark.smoke

    factory: ClassVar[str]
    ranks: ClassVar[Sequence[int]] = (1, 2, 4)
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16")
    hidden: ClassVar[int] = 16
    device: ClassVar[str] = "cpu"

    def test_tokens_meet_their_experts_wherever_those_are(self) -> None:
        """Outputs and gradients match the reference in all corner cases of routing."""
        for ranks in self.ranks:
            self.check(ranks, [replace(case, name=name) for name, case in _corners(ranks).items()])

    @given(data=st.data())
    # Failing examples are not shrunk, because each attempt would start a world.
    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), phases=_PHASES)
    def test_any_routing_gives_the_sum_of_its_experts(self, data: Any) -> None:
        """Outputs and gradients match the reference for random experts of tokens.

        The numbers of tokens, experts and experts per token, and the limits are random too.
        """
        ranks = data.draw(st.sampled_from([size for size in self.ranks if size > 1] or list(self.ranks)))
        self.check(ranks, data.draw(st.lists(_cases(ranks), min_size=8, max_size=16)))

    def test_the_same_input_gives_the_same_bits(self) -> None:
        """Repeated steps in one process give the same bits in outputs and gradients, also with recomputation."""
        ranks = max(self.ranks)
        case = _drawn(ranks, experts=4 * ranks, top_k=5, tokens=[40] * ranks)
        again = Case(case.indices, case.experts, checkpointed=True)
        for dtype, results in self.run(ranks, [case, case, again]).items():
            for first, second, recomputed in results:
                for name, tensor in first.items():
                    assert torch.equal(tensor, second[name]), f"{dtype}: {name} differs"
                    assert torch.equal(tensor, recomputed[name]), f"{dtype}: {name} differs when recomputed"

    # --- helpers for subclasses

    def check(self, ranks: int, cases: Sequence[Case]) -> None:
        """Run each case on a world, and compare it with the sum over experts in one process."""
        for dtype, results in self.run(ranks, cases).items():
            within = TOLERANCES[getattr(torch, dtype)]
            # The gradient of a routing weight is a sum over all features of a row, whose terms may nearly cancel.
            within = replace(within, atol=self.hidden**0.5 * within.atol)
            for number, case in enumerate(cases):
                mine = [result[number] for result in results]
                expected = _expected(case, ranks, self.hidden, getattr(torch, dtype))
                found = _whole(mine, expected)
                for name in sorted(found, key=lambda name: (not name.startswith("out"), name)):
                    what = f"{ranks} ranks, {dtype}, {case.name or case}: {name}"
                    if name.startswith(("out", "weights")):
                        assert_close_values(found[name], expected[name], within, what)
                    else:
                        assert_close_gradients({what: found[name]}, {what: expected[name]}, within)

    def run(self, ranks: int, cases: Sequence[Case]) -> dict[str, list[list[dict[str, Tensor]]]]:
        """Run the cases on all ranks of a world; return tensors by dtype, rank and case."""
        plain = [asdict(case) for case in cases]
        world = World(ranks, backend=_BACKENDS[self.device])
        results = world.run(steps, self.factory, plain, list(self.dtypes), self.hidden, self.device)
        return {dtype: [result[dtype] for result in results] for dtype in self.dtypes}


def _corners(ranks: int) -> dict[str, Case]:
    experts, equal = 2 * ranks, [6] * ranks
    lengths = list(_LENGTHS[:ranks])
    last = [torch.full((length, 2), experts - 1) for length in lengths]
    own = [torch.full((4, 1), rank * 2) for rank in range(ranks)]
    few = [torch.tensor([[rank % experts, (rank + 1) % experts]] if rank == 0 else []) for rank in range(ranks)]
    spread = _drawn(ranks, experts, top_k=3, tokens=lengths).indices
    return {
        "spread": Case(spread, experts),
        "all tokens to one expert": Case(last, experts),
        "no token leaves its rank": Case(own, experts),
        "one token in all": Case([rows.view(-1, 2).long() for rows in few], experts),
        "no token at all": Case([torch.zeros(0, 2, dtype=torch.int64)] * ranks, experts),
        "all experts for each token": Case([torch.arange(experts).repeat(n, 1) for n in lengths], experts),
        "one expert for each rank": _drawn(ranks, ranks, top_k=4, tokens=lengths),
        "some rows are dropped": _drawn(ranks, experts, top_k=3, tokens=equal, limit=2),
        "some tokens are padding": Case([_padded(rows, experts) for rows in spread], experts),
        "all tokens are padding": Case([torch.full_like(rows, experts) for rows in spread], experts),
        "padding and a limit": _limited(
            [_padded(rows, experts) for rows in _drawn(ranks, experts, top_k=3, tokens=equal).indices], experts, 2
        ),
        "no row is dropped": _drawn(ranks, experts, top_k=2, tokens=equal, limit=100),
        "no token and a limit": _drawn(ranks, experts, top_k=2, tokens=[0] * ranks, limit=3),
        "all but one are dropped": _limited([torch.zeros(6, 3, dtype=torch.int64)] * ranks, experts, 1),
        "only experts learn": Case(spread, experts, learns=("bank",)),
        "only tokens learn": Case(spread, experts, learns=("tokens",)),
        "only weights learn": Case(spread, experts, learns=("weights",)),
        "no gradients at all": Case(spread, experts, learns=()),
        "another microbatch between dispatch and combine": Case(spread, experts, interleaved=True),
        "computed again": Case(spread, experts, checkpointed=True),
        "dropped and computed again": Case(
            _drawn(ranks, experts, top_k=3, tokens=equal, limit=2).indices, experts, limit=2, checkpointed=True
        ),
    }


@st.composite
def _cases(draw: st.DrawFn, ranks: int) -> Case:
    experts, top_k = ranks * draw(st.integers(1, 4)), draw(st.integers(1, 4))
    limit = draw(st.none() | st.integers(1, 8))
    lengths = st.integers(0, 12)
    tokens = draw(st.lists(lengths, min_size=ranks, max_size=ranks)) if limit is None else [draw(lengths)] * ranks
    favourites = draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=experts))
    case = _drawn(ranks, experts, top_k, tokens, limit, favourites, seed=draw(st.integers(0, 999)))
    return Case(case.indices, experts, limit, checkpointed=draw(st.booleans()))


def _drawn(
    ranks: int,
    experts: int,
    top_k: int,
    tokens: Sequence[int],
    limit: int | None = None,
    favourites: Sequence[int] = (),
    seed: int = 0,
) -> Case:
    """Draw experts at random from ``favourites``; an expert may occur several times in a token."""
    among = torch.tensor(favourites or range(experts))
    generator = torch.Generator().manual_seed(seed)
    return _limited(
        [among[torch.randint(len(among), (tokens[rank], top_k), generator=generator)] for rank in range(ranks)],
        experts,
        limit,
    )


def _padded(indices: Tensor, experts: int) -> Tensor:
    """Replace the experts of every third token, a padding token, by the index E (dropped)."""
    padding = torch.arange(len(indices)) % 3 == 1
    return indices.masked_fill(padding.unsqueeze(1), experts)


def _limited(indices: list[Tensor], experts: int, limit: int | None) -> Case:
    """Keep the first ``limit`` rows of each expert on each rank; replace other rows by the index E (dropped)."""
    if limit is None:
        return Case(indices, experts)
    kept = []
    for chosen in indices:
        taken, rows = [0] * (experts + 1), []
        for row in chosen.tolist():
            for place, expert in enumerate(row):
                taken[expert] += 1
                if taken[expert] > limit:
                    row[place] = experts
            rows.append(row)
        kept.append(torch.tensor(rows, dtype=torch.int64).view_as(chosen))
    return Case(kept, experts, limit)


def _expected(case: Case, ranks: int, hidden: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Reference results: every expert computes every token in float64; dropped rows (index E) get no weight."""
    inputs = [{name: x.double() for name, x in inputs_of(case, rank, hidden, dtype).items()} for rank in range(ranks)]
    bank = inputs[0]["bank"].requires_grad_("bank" in case.learns)
    found: dict[str, Tensor] = {}
    for rank, chosen in enumerate(case.indices):
        values = inputs[rank]
        tokens, weights = (values[name].requires_grad_(name in case.learns) for name in ("tokens", "weights"))
        everything = torch.tanh(torch.einsum("th,ehi->tei", tokens, bank))
        share = torch.zeros(len(chosen), case.experts + 1, dtype=torch.float64).scatter_add(1, chosen, weights)
        out = torch.einsum("te,tei->ti", share[:, :-1], everything) + tokens.sin()
        if out.requires_grad:
            torch.autograd.backward(out, values["grad"])
        found[f"out {rank}"] = out.detach()
        for name, tensor in (("tokens", tokens), ("weights", weights)):
            if name in case.learns:
                found[f"{name} {rank}"] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    if "bank" in case.learns:
        found["bank"] = torch.zeros_like(bank) if bank.grad is None else bank.grad
    return found


def _whole(results: Sequence[Mapping[str, Tensor]], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Results of all ranks in one mapping, with the ranks' shards of the bank (the experts' weights) concatenated."""
    found = {f"{name} {rank}": x for rank, result in enumerate(results) for name, x in result.items() if name != "bank"}
    if "bank" in expected:
        found["bank"] = torch.cat([result["bank"] for result in results])
    assert found.keys() == expected.keys(), f"gradients of {sorted(found)}, expected {sorted(expected)}"
    return found
