"""Example calls of ops: shapes, facts and numbers for given sizes, and the range of random sizes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from d9d_testing.suites.support import calls
from d9d_testing.suites.support.calls import Call, draw
from d9d_testing.suites.support.ops import KNOWN_OPS


def shapes(call: Call) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in call.inputs.items()}


def test_numbers_are_normal_and_equal_for_a_seed() -> None:
    assert torch.equal(draw(3, 2, seed=1), draw(3, 2, seed=1))
    assert not torch.equal(draw(3, 2, seed=1), draw(3, 2, seed=2))


def test_calls_of_attention_know_their_documents_and_facts() -> None:
    packed = calls.attention(2, 7, 4, 1, 8, 5, True)
    assert shapes(packed) == {
        "query": (2, 7, 4, 8), "key": (2, 7, 1, 8), "value": (2, 7, 1, 8), "documents": (2, 7),
    }  # fmt: skip
    assert packed.inputs["documents"].tolist() == [[0, 0, 1, 1, 1, 1, 1]] * 2
    assert packed.static == {"causal": True, "query_heads": 4, "key_value_heads": 1, "head_dim": 8, "window": 5}
    assert packed.name == "query [2, 7, 4, 8], key [2, 7, 1, 8], window 5, several documents"
    blocks = calls.attention(2, 7, 4, 1, 8, None, False, "blocks")
    assert (blocks.static["causal"], blocks.static["mask"], blocks.name[-8:]) == (False, "blocks", ", blocks")
    assert set(blocks.inputs["blocks"].flatten().tolist()) <= {-1, 0, 1}
    one = calls.attention(1, 3, 2, 2, 4, None, False)
    assert ("documents" in one.inputs, packed.documents, one.documents) == (False, True, None)
    assert one.name == "query [1, 3, 2, 4], key [1, 3, 2, 4], window None, one document"


def test_calls_of_rotations_share_their_angles_or_not() -> None:
    for shared, samples in ((True, 1), (False, 2)):
        call = calls.normed_rope(2, 3, 4, 5, 8, shared)
        assert shapes(call) == {
            "query": (2, 3, 4, 8), "key": (2, 3, 5, 8), "query_weight": (8,), "key_weight": (8,),
            "cos": (samples, 3, 4), "sin": (samples, 3, 4),
        }  # fmt: skip
        assert call.static == {"head_dim": 8, "query_heads": 4, "key_heads": 5}
        torch.testing.assert_close(call.inputs["cos"] ** 2 + call.inputs["sin"] ** 2, torch.ones(samples, 3, 4))
        assert tuple(call.constants) == ("cos", "sin")
    call = calls.attention_inputs(2, 3, 4, 5, 8, True)
    assert shapes(call) == {
        "x": (2, 3, 24), "query_weight": (32, 24), "key_weight": (40, 24), "value_weight": (40, 24),
        "query_norm": (8,), "key_norm": (8,), "cos": (1, 3, 4), "sin": (1, 3, 4),
    }  # fmt: skip
    assert call.static == {"head_dim": 8, "query_heads": 4, "key_heads": 5, "hidden": 24}


def test_calls_of_layers_have_the_shapes_of_their_sizes() -> None:
    call = calls.swiglu((3, 5), 16, 24)
    assert shapes(call) == {"x": (3, 5, 16), "gate_weight": (24, 16), "up_weight": (24, 16), "down_weight": (16, 24)}
    assert torch.equal(call.inputs["gate_weight"], draw(24, 16, seed=1) / 4)
    assert torch.equal(call.inputs["up_weight"], draw(24, 16, seed=2) / 4)
    torch.testing.assert_close(call.inputs["down_weight"], draw(16, 24, seed=3) / 24**0.5)
    assert (call.name, call.static) == ("x [3, 5, 16], 24 inside", {"hidden": 16, "features": 24})
    for adds, said in ((True, "as much"), (False, "nothing")):
        call = calls.add_rms_norm(2, 7, adds=adds)
        assert call.name == f"x [2, 7], {said} added"
        assert shapes(call) == {"x": (2, 7), "weight": (7,)} | ({"added": (2, 7)} if adds else {})
    assert calls.rms_norm(2, 7).static == {"features": 7}
    call = calls.grouped_linear([3, 0, 2], 4, True, 8, 16)
    assert (shapes(call)["x"], shapes(call)["bank"]) == ((9, 8), (3, 8, 16))
    assert call.inputs["counts"].tolist() == [3, 0, 2]
    assert call.static == {"in_features": 8, "out_features": 16, "experts": 3}


def test_every_fourth_target_is_ignored() -> None:
    call = calls.linear_cross_entropy((2, 5), 8, 33)
    targets = call.inputs["targets"]
    assert [place for place in range(10) if targets.flatten()[place] == -100] == [1, 5, 9]
    assert targets.max() < 33
    assert (shapes(call)["hidden"], shapes(call)["weight"], targets.shape) == ((2, 5, 8), (33, 8), (2, 5))
    half = calls.linear_cross_entropy((2, 5), 8, 33, spread=0.5)
    assert torch.equal(half.inputs["hidden"], 0.5 * call.inputs["hidden"])


def test_places_of_a_permutation_are_the_inverse_of_its_slots() -> None:
    call = calls.permutation(3, 2, 4, 8, back=False)
    places, slots = call.inputs["places"].flatten(), call.inputs["slots"]
    assert sorted(places.tolist()) == list(range(6))
    assert [int(places[slot]) for slot in slots] == [0, 1, 2, 3]
    assert (tuple(call.inputs["places"].shape), call.options) == ((3, 2), {"absent": True})
    assert calls.permutation(3, 2, 6, 8, back=False).options == {"absent": False}
    assert shapes(call).keys() == {"tokens", "slots", "places"}
    assert calls.permutation(3, 2, 4, 8, back=False, weighted=False).name == call.name
    for weighted in (True, False):
        call = calls.permutation(3, 2, 4, 8, back=True, weighted=weighted)
        assert (shapes(call)["rows"], "weights" in call.inputs) == ((4, 8), weighted)
        assert call.name == "3 tokens of 8 features, 2 choices, 4 rows" + ("" if weighted else ", no weights")


def test_parameters_of_an_update_have_other_numbers_than_gradients() -> None:
    call = calls.adamw((3, 2), (7,))
    assert list(call.inputs) == ["parameter 0", "parameter 1", "gradient 0", "gradient 1"]
    assert tuple(call.constants) == tuple(call.inputs)
    assert call.static == {"amsgrad": False, "maximize": False, "master_weights": False}
    flat = [tensor.flatten()[:6].tolist() for tensor in call.inputs.values()]
    assert len({tuple(values) for values in flat}) == 4


def ranges(name: str, of: dict[str, Any], count: int = 400) -> dict[str, tuple[int, int]]:
    """Least and largest of some facts over random calls."""
    make, random = KNOWN_OPS[name].at_random, Random(0)
    assert make is not None
    made = [make(random) for _ in range(count)]
    return {fact: (min(map(get, made)), max(map(get, made))) for fact, get in of.items()}


def test_random_calls_cover_their_range() -> None:
    query: Any = lambda dim: lambda call: call.inputs["query"].shape[dim]  # noqa: E731
    found = ranges("attention", {
        "samples": query(0), "length": query(1), "features": query(3),
        "heads": lambda call: call.static["key_value_heads"],
        "shared": lambda call: call.static["query_heads"] // call.static["key_value_heads"],
        "packed": lambda call: "documents" in call.inputs,
    })  # fmt: skip
    assert found == {
        "samples": (1, 3), "length": (2, 40), "features": (8, 40), "heads": (1, 3), "shared": (1, 3),
        "packed": (False, True),
    }  # fmt: skip
    found = ranges("attention_block", {"length": query(1), "parts": lambda call: call.inputs["query"].shape[1] % 4})
    assert found == {"length": (8, 40), "parts": (0, 0)}
    found = ranges("rope", {"samples": query(0), "length": query(1), "heads": query(2), "features": query(3)})
    assert found == {"samples": (1, 2), "length": (1, 5), "heads": (1, 5), "features": (4, 258)}
    assert ranges("attention_inputs", {"d": lambda call: call.static["head_dim"]})["d"][0] == 14
    facts = {
        "dims": lambda call: call.inputs["x"].ndim,
        "leading": lambda call: max(call.inputs["x"].shape[:-1], default=1),
        "features": lambda call: call.inputs["x"].shape[-1],
    }
    assert ranges("rms_norm", facts) == {"dims": (1, 4), "leading": (1, 6), "features": (2, 129)}
    assert ranges("add_rms_norm", {"adds": lambda call: "added" in call.inputs}) == {"adds": (False, True)}


def test_random_calls_of_experts_and_losses_cover_their_range() -> None:
    spare: Any = lambda call: len(call.inputs["x"]) - int(call.inputs["counts"].sum())  # noqa: E731
    found = ranges("grouped_linear", {
        "experts": lambda call: len(call.inputs["counts"]), "rows": lambda call: int(call.inputs["counts"].max()),
        "spare": spare, "unsaid": lambda call: spare(call) > 0 and not call.options["spare_rows"],
        "said": lambda call: spare(call) == 0 and call.options["spare_rows"],
        "in": lambda call: call.static["in_features"], "out": lambda call: call.static["out_features"],
    })  # fmt: skip
    assert found == {
        "experts": (1, 9), "rows": (0, 40), "spare": (0, 9), "unsaid": (False, False),
        "said": (False, True), "in": (8, 48), "out": (8, 48),
    }  # fmt: skip
    found = ranges("permute", {
        "tokens": lambda call: call.inputs["places"].shape[0], "choices": lambda call: call.inputs["places"].shape[1],
        "all": lambda call: len(call.inputs["slots"]) == call.inputs["places"].numel(),
        "rows": lambda call: len(call.inputs["slots"]),
    })  # fmt: skip
    assert found["tokens"] == (1, 20)
    assert found["choices"] == (1, 8)
    assert found["all"] == (False, True)
    assert found["rows"][0] == 1
    found = ranges("unpermute", {"weighted": lambda call: "weights" in call.inputs})
    assert found == {"weighted": (False, True)}
    found = ranges("linear_cross_entropy", {
        "words": lambda call: call.inputs["weight"].shape[0], "features": lambda call: call.inputs["weight"].shape[1],
        "dims": lambda call: call.inputs["targets"].ndim, "size": lambda call: max(call.inputs["targets"].shape),
    })  # fmt: skip
    assert found == {"words": (2, 1025), "features": (8, 48), "dims": (1, 2), "size": (0, 9)}
    found = ranges("swiglu", {"hidden": lambda call: call.static["hidden"], "in": lambda c: c.static["features"]})
    assert found == {"hidden": (8, 48), "in": (8, 48)}
    found = ranges("adamw", {"parameters": lambda call: len(call.inputs) // 2})
    assert found == {"parameters": (1, 5)}


@pytest.mark.parametrize("name", KNOWN_OPS)
def test_odd_calls_have_different_names(name: str) -> None:
    names = [call.name for call in KNOWN_OPS[name].calls()]
    assert len(set(names)) == len(names) > 1


def test_odd_calls_have_the_sizes_that_kernels_get_wrong() -> None:
    def listed(name: str, *facts: str) -> list[tuple[Any, ...]]:
        return [tuple(call.static[fact] for fact in facts) for call in KNOWN_OPS[name].calls()]

    def queries(name: str) -> list[tuple[Any, ...]]:
        made = KNOWN_OPS[name].calls()
        return [(*call.inputs["query"].shape[:2], call.static["window"], bool(call.documents)) for call in made]

    assert queries("attention") == [
        (2, 7, None, False), (2, 7, None, True), (1, 1, None, False), (1, 17, 5, False), (3, 9, 4, True),
        (1, 150, None, False), (2, 140, None, True), (1, 130, 70, True),
        *2 * [(2, 7, None, False), (2, 9, 3, False), (2, 150, None, True), (2, 140, 70, True)],
    ]  # fmt: skip
    assert queries("attention_block") == [
        (2, 8, None, False), (1, 20, None, False), (2, 28, None, True), (1, 20, 7, False), (3, 12, 4, True),
        *2 * [(2, 20, None, False), (2, 28, None, True), (3, 20, 4, True)],
    ]  # fmt: skip
    assert listed("attention", "query_heads", "key_value_heads", "head_dim") == [
        (4, 2, 8), (4, 2, 8), (2, 2, 8), (3, 1, 16), (6, 3, 8), (2, 1, 64), (4, 2, 32), (2, 2, 32),
        *2 * [(4, 2, 8), (4, 2, 16), (2, 1, 32), (2, 2, 32)],
    ]  # fmt: skip
    kinds = [call.static.get("mask", "causal") for call in KNOWN_OPS["attention"].calls()]
    assert kinds == ["causal"] * 8 + ["bidirectional"] * 4 + ["blocks"] * 4
    assert listed("attention_inputs", "head_dim") == [(8,), (8,), (20,), (16,), (8,), (8,)]
    assert listed("rope", "head_dim") == [(8,), (8,), (2,), (20,), (16,), (8,), (8,)]
    assert listed("linear_cross_entropy", "features", "vocabulary") == [(16, 33), (8, 64), (24, 1), (16, 130), (8, 16)]
    losses = KNOWN_OPS["linear_cross_entropy"].calls()
    assert [tuple(call.inputs["targets"].shape) for call in losses] == [(2, 7), (5,), (1, 1), (3,), (0,)]
    assert listed("swiglu", "hidden", "features") == [(16, 24)] * 4
    grouped = [(len(call.inputs["x"]), call.options["spare_rows"]) for call in KNOWN_OPS["grouped_linear"].calls()]
    assert grouped == [
        (10, True), (10, False), (13, True), (7, True), (7, False), (8, True), (4, True), (4, False), (1, True),
        (1, False), (0, True), (0, False),
    ]  # fmt: skip
    rows = [call.inputs["slots"].numel() for call in KNOWN_OPS["permute"].calls()]
    assert rows == [10, 7, 1, 10, 0, 0]
    assert ["weights" in call.inputs for call in KNOWN_OPS["unpermute"].calls()] == [True] * 6 + [False] * 6


def test_an_update_is_two_steps_of_the_asked_function() -> None:
    """Compared with torch's own optimizer; gradients of the second step are halved."""
    optimizers = pytest.importorskip("d9d_optim.optimizer.config")
    op, call = KNOWN_OPS["adamw"], calls.adamw((2, 3), (4,))
    slot = op.slot(call.static)
    plain, asked = slot.function, list[Any]()
    slot.bind("mine", lambda batch, **options: asked.append(batch) or plain(batch, **options))
    found = op.invoke(slot, call)
    leaves = [torch.nn.Parameter(call.inputs[f"parameter {number}"].clone()) for number in (0, 1)]
    betas = tuple(optimizers.AdamWConfig().betas)
    groups = [{"params": [leaf], "weight_decay": 0.1 if leaf.ndim > 1 else 0.0} for leaf in leaves]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=betas, eps=0.1)
    for share in (1.0, 0.5):
        for number, leaf in enumerate(leaves):
            leaf.grad = share * call.inputs[f"gradient {number}"]
        reference.step()
    torch.testing.assert_close(found, torch.cat([leaf.detach().flatten() for leaf in leaves]))
    assert len(asked) == 4  # two steps of two groups: vectors do not decay


@pytest.mark.parametrize("make", [calls.gated_delta_rule, calls.gated_delta_rule_from, calls.state_space_rule])
def test_documents_of_recurrences_begin_at_random_positions(make: Any) -> None:
    packed, one = make(3, 40, 2, 2, 4, True), make(3, 40, 2, 2, 4, False)
    starts = (draw(3, 40, seed=5) > 1).tolist()
    expected = [[sum(row[: place + 1]) for place in range(40)] for row in starts]
    assert packed.inputs["documents"].tolist() == expected
    assert min(row[-1] - row[0] for row in expected) >= 2
    assert ("documents" in one.inputs, packed.documents, one.documents) == (False, True, None)
    assert packed.name == f"{one.name}, several documents"


def test_every_op_has_its_odd_shapes() -> None:
    def first(name: str) -> list[tuple[int, ...]]:
        return [tuple(next(iter(call.inputs.values())).shape) for call in KNOWN_OPS[name].calls()]

    assert first("rms_norm") == [(3, 5, 16), (1, 2), (7, 33), (2, 3, 1, 8), (0, 8), (3000, 8)]
    *_, many = KNOWN_OPS["rms_norm"].calls()
    assert torch.equal(many.inputs["x"], draw(3000, 8, seed=0) + 2)
    assert many.inputs["weight"].shape == (8,)
    assert first("add_rms_norm") == [shape for shape in ((3, 5, 16), (1, 2), (7, 33), (0, 8)) for _ in range(2)]
    assert ["added" in call.inputs for call in KNOWN_OPS["add_rms_norm"].calls()] == [True, False] * 4
    assert first("silu_mul") == first("gelu_mul") == [(3, 5, 16), (1,), (7, 33), (0, 8)]
    assert first("swiglu") == [(3, 5, 16), (16,), (7, 16), (2, 0, 16)]
    assert first("permute") == [(5, 16), (3, 33), (1, 8), (2, 2), (2, 8), (0, 8)]
    assert first("unpermute") == 2 * [(10, 16), (7, 33), (1, 8), (10, 2), (0, 8), (0, 8)]
    assert [call.inputs["places"].shape[1] for call in KNOWN_OPS["permute"].calls()] == [2, 3, 1, 5, 2, 2]
    queries = [(2, 3, 4, 8), (2, 3, 4, 8), (1, 1, 1, 2), (1, 5, 5, 20), (2, 1, 1, 16), (0, 5, 4, 8), (2, 0, 4, 8)]
    assert first("rope") == first("normed_rope") == queries
    assert [call.inputs["key"].shape[2] for call in KNOWN_OPS["rope"].calls()] == [2, 2, 1, 3, 4, 2, 2]
    assert [len(call.inputs["cos"]) for call in KNOWN_OPS["rope"].calls()] == [2, 1, 1, 1, 2, 1, 2]
    counts = [call.inputs["counts"].tolist() for call in KNOWN_OPS["grouped_linear"].calls()]
    assert counts == [
        [3, 0, 5, 2], [3, 0, 5, 2], [3, 0, 5, 2], [0, 0, 7], [0, 0, 7], [7, 0, 0], [4], [4], [0, 1, 0], [0, 1, 0],
        [0, 0], [0, 0],
    ]  # fmt: skip
    updates = [[tuple(tensor.shape) for tensor in call.inputs.values()] for call in KNOWN_OPS["adamw"].calls()]
    assert updates == [2 * [(3, 5), (7,), (), (0, 4)], 2 * [(33, 17)]]


def test_ops_are_in_their_packages_and_have_random_calls() -> None:
    of_other = {
        "attention_block": "d9d_parallel", "permute": "d9d_moe", "unpermute": "d9d_moe", "adamw": "d9d_optim",
    }  # fmt: skip
    assert {name: op.package for name, op in KNOWN_OPS.items() if op.package != "d9d_nn"} == of_other
    assert all(op.at_random is not None for op in KNOWN_OPS.values())


@pytest.mark.parametrize("name", KNOWN_OPS)
def test_a_slot_is_that_of_its_op_and_has_facts_of_its_calls(name: str) -> None:
    pytest.importorskip(KNOWN_OPS[name].package)
    call = KNOWN_OPS[name].calls()[0]
    slot = KNOWN_OPS[name].slot(call.static)
    assert slot.op == name
    assert {fact: slot.static[fact] for fact in call.static if fact in slot.static}.items() <= call.static.items()


def test_random_shapes_cover_all_sizes() -> None:
    def drawn(name: str, get: Any) -> set[Any]:
        make, random = KNOWN_OPS[name].at_random, Random(3)
        assert make is not None
        return {get(make(random)) for _ in range(900)}

    sizes = {1, 2, 3, 7, 8, 16, 17, 31, 64, 65, 100, 129}
    assert drawn("silu_mul", lambda call: call.inputs["gate"].shape[-1]) == sizes
    assert drawn("rms_norm", lambda call: call.inputs["x"].shape[-1]) == sizes - {1}
    assert drawn("permute", lambda call: call.inputs["tokens"].shape[-1]) == sizes
    assert drawn("rope", lambda call: call.inputs["query"].shape[-1]) == {2 * size for size in sizes - {1}}
    assert drawn("adamw", lambda call: call.inputs["parameter 0"].shape[0]) == sizes
    assert drawn("adamw", lambda call: call.inputs["parameter 0"].ndim) == {1, 2, 3, 4}
    assert drawn("linear_cross_entropy", lambda call: call.inputs["weight"].shape[0]) == (sizes | {1025}) - {1}
    assert drawn("attention", lambda call: call.static.get("mask", "causal")) == {"causal", "bidirectional", "blocks"}
    assert drawn("attention", lambda call: call.static["window"] is None) == {True, False}
    windows = drawn("attention", lambda call: (call.static["window"] or 1, call.inputs["query"].shape[1]))
    assert all(1 <= window <= length for window, length in windows)
    assert any(window == length > 1 for window, length in windows)
    assert drawn("rope", lambda call: len(call.inputs["cos"]) == len(call.inputs["query"])) == {True, False}
    spread = KNOWN_OPS["linear_cross_entropy"].at_random
    assert spread is not None
    call = spread(Random(5))
    features = call.inputs["hidden"].shape[-1]
    drawn_hidden = draw(*call.inputs["hidden"].shape, seed=0) * features**-0.5
    torch.testing.assert_close(call.inputs["hidden"], drawn_hidden)
