"""Decoding of continuations: prompts, draws, and limits of sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, NonFiniteError
from d9d_core.grid import AXES
from d9d_core.inference import Continuation
from d9d_engine.distributed.mesh import Topology
from d9d_inference.generation.decoder import Decoder, Sequences, padded_prompts
from torch import Tensor
from torch import distributed as dist

VOCABULARY = 200


def successor(seen: list[list[tuple[int, ...]]]) -> Any:
    """A forward whose logits prefer the token after the last one; notes the shapes of its inputs."""

    def forward(pack: Sequence[Mapping[str, Tensor]], outputs: Callable[..., None]) -> None:
        seen.append([tuple(one["tokens"].shape) for one in pack])
        for one in pack:
            outputs({"logits": torch.nn.functional.one_hot((one["tokens"] + 1) % VOCABULARY, VOCABULARY) * 50.0}, one)

    return forward


def decoder(
    forward: Any, new: int, temperature: float = 0.0, stop: Sequence[int] = (), nonfinite: Any = "keep"
) -> Decoder:
    settings = Continuation(new, temperature, 0)
    return Decoder(forward, Topology(), settings, frozenset(stop), lambda found: found.get("logits"), nonfinite)


def pack_of(*prompts: list[int], microbatches: int = 1) -> Any:
    return padded_prompts(prompts, microbatches, torch.device("cpu"))


def test_prompts_are_padded_to_equal_microbatches_with_fillers_at_the_end() -> None:
    first, second = pack_of([5], [6, 7], [8, 9, 10], microbatches=2)
    assert first["tokens"].tolist() == [[5, 0, 0], [6, 7, 0]]
    assert second["tokens"].tolist() == [[8, 9, 10], [5, 0, 0]]
    assert (first["lengths"].tolist(), second["lengths"].tolist()) == ([1, 2], [3, 1])
    assert (first["rows"].tolist(), second["rows"].tolist()) == ([0, 1], [2, -1])


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_sequences_are_continued_until_they_end_or_are_long_enough(temperature: float) -> None:
    seen: list[list[tuple[int, ...]]] = []
    found = decoder(successor(seen), 4, temperature, stop=[8]).continue_all(
        pack_of([5], [1, 2, 20], [7], microbatches=2)
    )
    assert [one.new.tolist() for one in found] == [[[6, 7, 8, -1], [21, 22, 23, 24]], [[8, -1, -1, -1], [-1] * 4]]
    assert [one.ended.tolist() for one in found] == [[True, False], [True, False]]
    assert found[0].lengths.tolist() == [4, 7]
    assert found[0].tokens[0].tolist()[:5] == [5, 6, 7, 8, 0]
    assert len(seen) == 4


def test_decoding_ends_with_the_last_sequence() -> None:
    seen: list[list[tuple[int, ...]]] = []
    decoder(successor(seen), 9, stop=[8]).continue_all(pack_of([5], [6]))
    assert len(seen) == 3


def test_the_width_of_forwards_grows_in_steps_of_64_up_to_what_is_needed() -> None:
    seen: list[list[tuple[int, ...]]] = []
    decoder(successor(seen), 70).continue_all(pack_of(list(range(63))))
    assert [shape[0][1] for shape in seen] == [64] * 2 + [128] * 64 + [133] * 4


def test_the_width_of_forwards_is_that_of_the_longest_sequence() -> None:
    seen: list[list[tuple[int, ...]]] = []
    decoder(successor(seen), 2).continue_all(pack_of([5], list(range(70))))
    assert seen == [[(2, 72)]] * 2


def test_the_width_of_forwards_is_a_multiple_of_what_layouts_need() -> None:
    one = Sequences.of({"tokens": torch.ones(1, 5, dtype=torch.int64), "rows": torch.tensor([3])}, 4, 6)
    assert (one.tokens.shape, one.growth, one.lengths.tolist(), one.longest) == ((1, 12), 192, [5], 5)
    assert (one.numbers, one.active) == ([3], [0])


def test_draws_depend_on_the_row_and_the_place_only_and_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.25, 0.25]).log()

    def forward(pack: Any, outputs: Any) -> None:
        for one in pack:
            outputs({"logits": logits.expand(*one["tokens"].shape, 3)}, one)

    (many,) = decoder(forward, 2, temperature=1.0).continue_all(pack_of(*[[1]] * 400))
    shares = torch.bincount(many.new.flatten(), minlength=3) / 800
    assert torch.allclose(shares, logits.exp(), atol=0.06)
    apart = decoder(forward, 2, temperature=1.0).continue_all(pack_of(*[[1]] * 400, microbatches=4))
    assert torch.equal(torch.cat([one.new for one in apart]), many.new)
    (cold,) = decoder(forward, 2, temperature=0.05).continue_all(pack_of(*[[1]] * 20))
    assert not cold.new.any()


def test_logits_that_are_not_finite_name_the_first_row_of_a_sequence_that_goes_on() -> None:
    def forward(pack: Any, outputs: Any) -> None:
        for one in pack:
            logits = torch.nn.functional.one_hot(one["tokens"], VOCABULARY).float()
            logits[one["tokens"] == 9] = math.nan
            outputs({"logits": logits}, one)

    with pytest.raises(NonFiniteError, match="row 1: the logits of its new token number 0 "):
        decoder(forward, 3, nonfinite="error").continue_all(pack_of([1], [9], [9]))
    assert len(decoder(forward, 3).continue_all(pack_of([1], [9]))) == 1
    # A sequence that has ended is not looked at.
    decoder(forward, 3, stop=[9], nonfinite="keep").continue_all(pack_of([9]))


@pytest.mark.parametrize(("rank", "sent"), [(0, [[6, 2], [8, 8]]), (1, [[-3, -3], [-3, -3]])])
def test_the_first_of_the_ranks_with_the_same_sequences_chooses_tokens(
    rank: int, sent: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    told: list[Any] = []

    def all_reduce(tensor: Tensor, operation: object, group: object) -> None:
        assert operation == dist.ReduceOp.MAX
        told.append((tensor.tolist(), group))
        if group == "same":
            tensor.fill_(7)

    def group_of(*axes: str) -> str:
        asked.append(axes)
        return "world" if set(axes) == set(AXES) else "same"

    monkeypatch.setattr("d9d_inference.generation.decoder.dist.all_reduce", all_reduce)
    topology: Any = SimpleNamespace(
        coordinate=dict.fromkeys(AXES, 0) | {"tp": rank, "dp_shard": 1, "pp": 1},
        sizes=dict.fromkeys(AXES, 1) | {"tp": 2, "dp_shard": 2, "pp": 2}, axes_group=group_of,
    )  # fmt: skip
    seen: list[list[tuple[int, ...]]] = []
    made = Decoder(successor(seen), topology, Continuation(2, 0.0, 0), frozenset(), lambda found: found["logits"])
    (found,) = made.continue_all(pack_of([4, 5], [1]))
    assert asked[0] == tuple(axis for axis in AXES if axis not in ("dp_replicate", "dp_shard"))
    assert told == [(sent[0], "same"), ([1.0], "world"), (sent[1], "same"), ([1.0], "world")]
    assert found.new.tolist() == [[7, 7], [7, 7]]


def test_ranks_stop_when_none_has_a_sequence_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([1.0, 0.0])
    told: list[float] = []

    def all_reduce(active: Tensor, _operation: object, group: object) -> None:
        told.append(active.item())
        active.fill_(next(left))

    monkeypatch.setattr("d9d_inference.generation.decoder.dist.all_reduce", all_reduce)
    topology: Any = SimpleNamespace(
        coordinate=dict.fromkeys(AXES, 0), sizes=dict.fromkeys(AXES, 1) | {"dp_shard": 2}, axes_group=lambda *_: "world"
    )
    seen: list[list[tuple[int, ...]]] = []
    stop = frozenset({6})
    Decoder(successor(seen), topology, Continuation(9, 0.0, 0), stop, lambda found: found["logits"]).continue_all(
        pack_of([5])
    )
    assert (told, len(seen)) == ([0.0, 0.0], 2)


def test_excluded_tokens_are_finite_enough() -> None:
    def forward(pack: Any, outputs: Any) -> None:
        for one in pack:
            logits = torch.full((*one["tokens"].shape, 3), -math.inf)
            logits[..., 2] = 0.0
            outputs({"logits": logits}, one)

    (found,) = decoder(forward, 1, nonfinite="error").continue_all(pack_of([1]))
    assert found.new.tolist() == [[2]]


def test_a_model_without_logits_cannot_continue_a_text() -> None:
    with pytest.raises(BuildError, match="the model returns no logits"):
        decoder(lambda pack, outputs: [outputs({}, one) for one in pack], 1).continue_all(pack_of([1]))
