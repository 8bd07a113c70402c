"""Conformance suite of routers of a mixture of experts.

Shapes: T tokens, H features, E experts, k experts per token.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from d9d_testing.suites.moe.factory import load_factory
from d9d_testing.tolerances import assert_close_values

_HIDDEN, _EXPERTS, _TOP_K, _TOKENS = 24, 8, 3, 40


class RouterSuite:
    """Conformance suite of routers.

    Subclass it, name the factory, and give settings to try::

        class TestMyRouter(RouterSuite):
            factory = "my_package.my_router:MyRouter"
            settings = {"plain": {}, "dropping": {"capacity": 1.0}}

    A router is called with tokens [T, H], and optionally with ``samples``, their number of samples (default 1); it
    returns a :class:`d9d_moe.router.routing.TopKRouting` or an object with the same attributes.

    Attributes:
        factory: ``module:attribute`` or ``file.py:attribute`` of ``(H, E, k, **settings) -> nn.Module``.
        settings: name -> arguments. ``groups`` and ``top_groups`` are the number of groups of neighbouring experts and
            the number of groups that a token may use; with ``capacity``, rows may be dropped.
        sums: name of settings -> sum of a token's weights, if it is fixed.
        dropped: name of a dropping router's tally of dropped rows.
    """

    pytestmark = pytest.mark.smoke

    factory: ClassVar[str]
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({"plain": MappingProxyType({})})
    sums: ClassVar[Mapping[str, float]] = MappingProxyType({})
    dropped: ClassVar[str] = "dropped"

    def test_it_gives_what_dispatchers_need(self) -> None:
        """Outputs have the shapes and dtypes that dispatchers need, for many tokens, one, and none.

        Routers with ``capacity`` set ``limit``, and no others do.
        """
        for name, router in self.routers():
            for tokens in (_TOKENS, 1, 0):
                routing = router(_tokens(tokens), samples=1)
                shapes = {"indices": (tokens, _TOP_K), "weights": (tokens, _TOP_K), "scores": (tokens, _EXPERTS)}
                for field, shape in (*shapes.items(), ("counts", (_EXPERTS,))):
                    tensor = getattr(routing, field)
                    dtype = torch.float32 if field in ("weights", "scores") else torch.int64
                    what = f"{name}, {tokens} tokens: {field}"
                    assert tuple(tensor.shape) == shape, f"{what} are {tuple(tensor.shape)}, expected {shape}"
                    assert tensor.dtype == dtype, f"{what} are {tensor.dtype}, expected {dtype}"
                drops = "capacity" in self.settings[name]
                assert (routing.limit is not None) == drops, f"{name}: limit is {routing.limit}"

    def test_counts_are_those_of_the_indices(self) -> None:
        """Counts are the numbers of rows of each expert; the index E, for dropped rows, is not counted."""
        for name, router in self.routers():
            routing = router(_tokens())
            assert int(routing.indices.min()) >= 0, f"{name}: negative indices"
            assert int(routing.indices.max()) <= _EXPERTS - ("capacity" not in self.settings[name]), (
                f"{name}: an index names no expert"
            )
            expected = routing.indices.flatten().bincount(minlength=_EXPERTS + 1)[:_EXPERTS]
            assert routing.counts.tolist() == expected.tolist(), name

    def test_a_token_goes_to_different_experts(self) -> None:
        """A token never has the same expert twice."""
        for name, router in self.routers():
            for row in router(_tokens()).indices.tolist():
                kept = [expert for expert in row if expert < _EXPERTS]
                assert len(set(kept)) == len(kept), f"{name}: {row}"

    def test_weights_are_shares_of_the_scores(self) -> None:
        """Weights are proportional to scores, positive, zero for dropped rows, and sum to a stated value, if any."""
        for name, router in self.routers():
            routing = router(_tokens())
            kept = routing.indices < _EXPERTS
            scores = routing.scores.gather(1, routing.indices.clamp(max=_EXPERTS - 1))
            assert (routing.weights[kept] > 0).all(), name
            assert not routing.weights[~kept].any(), f"{name}: dropped rows have weights"
            ratio = (routing.weights / scores).masked_fill(~kept, 0)
            typical = ratio.amax(1, keepdim=True).expand_as(ratio).masked_fill(~kept, 0)
            assert_close_values(ratio, typical, what=f"{name}: weight / score")
            if name in self.sums:
                whole = routing.weights.sum(1)[kept.all(1)]
                assert len(whole), f"{name}: every token lost an expert; raise the capacity"
                assert_close_values(whole, torch.full_like(whole, self.sums[name]), what=f"{name}: sums of weights")

    def test_scores_are_float32_whatever_the_model_is(self) -> None:
        """In bfloat16 and under autocast, scores are float32, and the same experts are chosen as in float32."""
        for name, router in self.routers():
            narrow, tokens = copy.deepcopy(router).bfloat16(), _tokens().bfloat16()
            exact = copy.deepcopy(narrow).float()(tokens.float())
            with torch.autocast("cpu", torch.bfloat16):
                cast = copy.deepcopy(narrow).float()(tokens.float())
            for how, routing in (("bfloat16", narrow(tokens)), ("autocast", cast)):
                assert routing.scores.dtype == routing.weights.dtype == torch.float32, f"{name}, {how}"
                assert_close_values(routing.scores, exact.scores, what=f"{name}, {how}: scores")
                assert torch.equal(routing.indices, exact.indices), f"{name}, {how}: other experts"

    def test_of_equal_scores_the_lower_expert_wins(self) -> None:
        """Ties are broken equally on all devices and releases: the lower index wins."""
        for name, router in self.routers():
            with torch.no_grad():
                for parameter in router.parameters():
                    parameter.zero_()
            routing = router(_tokens(1))
            kept = routing.indices[routing.indices < _EXPERTS].tolist()
            assert kept == list(range(len(kept))), f"{name}: {kept}"

    def test_extreme_tokens_give_finite_weights(self) -> None:
        """Scores, weights and gradients are finite even if all scores, or all but one, underflow."""
        for name, router in self.routers():
            for factor in (1e4, -1e4, 0.0):
                tokens = (_tokens() * factor).requires_grad_()
                routing = router(tokens)
                assert routing.scores.isfinite().all(), f"{name}: scores of tokens times {factor}"
                assert routing.weights.isfinite().all(), f"{name}: weights of tokens times {factor}"
                routing.weights.square().sum().backward()
                assert tokens.grad is not None
                assert tokens.grad.isfinite().all(), f"{name}: gradients of tokens times {factor}"

    def test_gradients_reach_tokens_and_every_parameter(self) -> None:
        """Gradients of the weights reach tokens and every parameter, because a router learns through them."""
        for name, router in self.routers():
            tokens = _tokens().requires_grad_()
            weights = router(tokens).weights
            (weights * torch.arange(_TOP_K)).sum().backward()
            for what, tensor in (("tokens", tokens), *router.named_parameters()):
                assert tensor.grad is not None, f"{name}: no gradient for {what}"
                assert tensor.grad.any(), f"{name}: a gradient of zeros for {what}"

    def test_a_token_uses_few_groups(self) -> None:
        """A token uses at most ``top_groups`` groups."""
        tried = 0
        for name, router in self.routers():
            groups = self.settings[name].get("groups", 1)
            if groups > 1:
                tried += 1
                size, rows = _EXPERTS // groups, router(_tokens()).indices.tolist()
                most = max(len({expert // size for expert in row if expert < _EXPERTS}) for row in rows)
                assert most <= self.settings[name]["top_groups"], f"{name}: a token uses {most} groups"
        if not tried:
            pytest.skip("no settings with groups")

    def test_no_expert_takes_more_than_its_capacity(self) -> None:
        """Equal tokens choose the same experts; rows above the capacity are dropped and counted."""
        tried = 0
        for name, router in self.routers():
            if "capacity" not in self.settings[name]:
                continue
            tried += 1
            routing = router(_tokens(1).expand(_TOKENS, -1))
            assert int(routing.counts.max()) <= routing.limit, f"{name}: {routing.counts.tolist()} of {routing.limit}"
            nobody = int((routing.indices == _EXPERTS).sum())
            assert nobody > 0, f"{name}: no row was dropped; lower the capacity in these settings"
            assert nobody + int(routing.counts.sum()) == routing.indices.numel(), name
            assert int(router.tallies()[self.dropped]) == nobody, f"{name}: tally '{self.dropped}'"
        if not tried:
            pytest.skip("no settings with a capacity")

    def test_the_same_tokens_choose_alike(self) -> None:
        """The chosen experts do not depend on the split of tokens into samples, nor on saving and loading the state."""
        for name, router in self.routers():
            torch.manual_seed(1)
            loaded = self.make(name)
            loaded.load_state_dict(router.state_dict())
            first = router(_tokens(), samples=1)
            for routing in (router(_tokens(), samples=4), loaded(_tokens(), samples=1)):
                for field in ("indices", "weights", "scores", "counts"):
                    assert torch.equal(getattr(routing, field), getattr(first, field)), f"{name}: {field}"

    # --- helpers for subclasses

    def make(self, name: str) -> nn.Module:
        """Router with the named settings."""
        router: nn.Module = load_factory(self.factory)(_HIDDEN, _EXPERTS, _TOP_K, **self.settings[name])
        return router

    def routers(self) -> Iterator[tuple[str, Any]]:
        """Yield a router for each of the settings."""
        for name in self.settings:
            torch.manual_seed(0)
            yield name, self.make(name)


def _tokens(count: int = _TOKENS) -> Tensor:
    return torch.randn(count, _HIDDEN, generator=torch.Generator().manual_seed(3))
