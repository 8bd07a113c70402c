"""Parts of strategies without other ranks: reductions by microbatch, shards of experts, blocks, kept outputs."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.traits import TensorStyle
from d9d_parallel.activation_checkpointing import operators
from d9d_parallel.activation_checkpointing.operators import (
    KeepOutputs,
    WarnOfUnmet,
    contexts_of,
    find_operators,
    unknown_operators,
)
from d9d_parallel.activation_checkpointing.recompute import Recomputed, checkpoint_module, is_checkpointed
from d9d_parallel.activation_checkpointing.strategy import choose
from d9d_parallel.blocks import blocks_of, find_blocks
from d9d_parallel.compile.strategy import _check_backend, _graph_options
from d9d_parallel.context_parallel import strategy
from d9d_parallel.context_parallel.communication import Heads
from d9d_parallel.context_parallel.config import ContextParallelConfig
from d9d_parallel.context_parallel.strategy import ContextParallel
from d9d_parallel.data_parallel import direct_gather, reducer
from d9d_parallel.data_parallel.experts import ShardDimension, find_banks, is_spread
from d9d_parallel.data_parallel.reducer import FsdpReducer
from d9d_parallel.data_parallel.strategy import _check_group
from d9d_parallel.tensor_parallel.communication import TensorCommunication
from d9d_parallel.tensor_parallel.strategy import _shared, _Split
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy


class Root:
    """Stage of FSDP2 that writes down its settings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any]] = []
        monkeypatch.setattr(reducer, "reduce_fsdp_gradients", lambda root: self.calls.append(("reduce", root is self)))
        monkeypatch.setattr(reducer, "keep_fsdp_gradients", lambda root: self.calls.append(("keep", root is self)))

    def set_is_last_backward(self, last: bool) -> None:
        self.calls.append(("last", last))

    def set_requires_gradient_sync(self, on: bool, *, recurse: bool) -> None:
        assert not recurse
        self.calls.append(("sync", on))

    def set_requires_all_reduce(self, on: bool, *, recurse: bool) -> None:
        assert not recurse
        self.calls.append(("all", on))

    def taken(self) -> list[tuple[str, Any]]:
        taken, self.calls = self.calls, []
        return taken


@pytest.mark.parametrize(
    ("defer", "first", "last", "then"),
    [
        ("nothing", [("last", False)], [("last", True)], [("last", True), ("reduce", True)]),
        (
            "all_reduce",
            [("last", False), ("all", False)],
            [("last", True), ("all", True)],
            [("last", True), ("all", True), ("reduce", True)],
        ),
        (
            "everything",
            [("last", False), ("sync", False)],
            [("last", True), ("sync", True)],
            [("last", True), ("reduce", True)],
        ),
    ],
)
def test_reductions_wait_for_the_last_microbatch(
    monkeypatch: pytest.MonkeyPatch, defer: Any, first: Any, last: Any, then: Any
) -> None:
    root: Any = Root(monkeypatch)
    reduces = FsdpReducer(root)
    reduces.add([root], defer)
    for _ in range(2):  # two steps
        reduces.before_backward(False)
        assert root.taken() == first
        reduces.before_backward(False)
        assert root.taken() == [call for call in first if call[0] != "sync"]
        reduces.before_backward(True)
        assert root.taken() == last
    reduces.after_weights()
    assert root.taken() == [("keep", True)]
    reduces.reduce()
    assert root.taken() == then


@pytest.mark.parametrize("defer", ["nothing", "everything"])
def test_an_incomplete_backward_defers_everything_until_the_reduction(
    monkeypatch: pytest.MonkeyPatch, defer: Any
) -> None:
    root: Any = Root(monkeypatch)
    reduces = FsdpReducer(root)
    reduces.add([root], defer)
    reduces.before_backward(False, complete=False)
    assert root.taken() == [("last", False), ("sync", False)]
    reduces.before_backward(True)
    assert root.taken() == [("last", False)]
    reduces.reduce()
    assert root.taken() == [("last", True), ("sync", True), ("reduce", True)]
    reduces.before_backward(True)
    assert root.taken() == [("last", True)]


def test_entries_of_one_stage_defer_their_own_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    root: Any = Root(monkeypatch)
    other: Any = Root(monkeypatch)
    reduces = FsdpReducer(root)
    reduces.add([root], "nothing")
    reduces.add([other, other], "everything")
    reduces.before_backward(False)
    assert root.taken() == [("last", False)]
    assert other.taken() == [("sync", False)] * 2
    reduces.before_backward(True)
    assert root.taken() == [("last", True)]
    assert other.taken() == [("sync", True)] * 2


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, 2))


class Layer(nn.Module):
    """Layer with a bank of experts, and a block that it shares with its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.bank = nn.Linear(2, 2), Bank()
        self.dispatcher: Any = None

    def expert_banks(self) -> Mapping[str, nn.Module]:
        return {"bank": self.bank}


class Chain(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(count)})
        self.norm = nn.LayerNorm(2)

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"layers.{name}": block for name, block in self.layers.items()}


class Model(nn.Module):
    """Model that returns the blocks of its backbone."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.head, self.backbone = nn.Linear(2, 2), Chain(count)

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"backbone.{name}": block for name, block in self.backbone.blocks().items()}


def test_blocks_and_banks_are_found_once_by_their_whole_names() -> None:
    model = Model(2)
    assert list(blocks_of(model)) == ["backbone.layers.0", "backbone.layers.1"]
    assert find_blocks(model, "s")["backbone.layers.1"] is model.backbone.layers["1"]
    assert list(find_banks(model)) == ["backbone.layers.0.bank", "backbone.layers.1.bank"]
    assert not is_spread(model.backbone.layers["0"])
    assert blocks_of(nn.Linear(1, 1)) == {}
    with pytest.raises(BuildError, match=r"'s' found no block: '' \(Model\), 'backbone' \(Chain\) has none"):
        find_blocks(Model(0), "s")
    with pytest.raises(BuildError, match="'s' needs model trait 'blocks', which no module of Linear has"):
        find_blocks(nn.Linear(1, 1), "s")


@pytest.mark.parametrize(
    ("shape", "ranks", "dimension"),
    [((4, 6, 10), 2, 0), ((4, 6, 10), 4, 0), ((4, 6, 10), 3, 1), ((4, 6, 10), 5, 2), ((1, 4, 4), 4, 1), ((3, 5), 1, 0)],
)
def test_experts_are_sharded_in_the_first_dimension_that_ranks_divide(
    shape: tuple[int, ...], ranks: int, dimension: int
) -> None:
    topology: Any = SimpleNamespace(grid=lambda view: SimpleNamespace(sizes={"expert_fsdp": ranks, view: 99}))
    assert ShardDimension(topology, "s")(nn.Parameter(torch.zeros(shape))) == Shard(dimension)


def test_experts_that_no_dimension_divides_are_refused() -> None:
    topology: Any = SimpleNamespace(grid=lambda _view: SimpleNamespace(sizes={"expert_fsdp": 7}))
    with pytest.raises(BuildError, match=r"'s': experts of shape \[6, 10\], 4 of them on each rank of ep, cannot"):
        ShardDimension(topology, "s")(nn.Parameter(torch.zeros(4, 6, 10)))


def test_every_second_of_the_matched_blocks_is_chosen_from_the_first_on() -> None:
    names = [f"layers.{number}" for number in range(12)]
    assert choose(names, ("*",), 1) == (names, {})
    assert choose(names, ("layers.1?",), 1)[0] == ["layers.10", "layers.11"]
    assert choose(names, ("layers.?",), 3)[0] == ["layers.0", "layers.3", "layers.6", "layers.9"]
    assert choose(names, ("layers.3", "layers.1"), 1)[0] == ["layers.1", "layers.3"]
    assert choose(names, ("LAYERS.3", "layers.1"), 2)[0] == ["layers.1"]
    _, unmatched = choose(names, ("head", "layers.1", "Layers.*"), 1)
    assert list(unmatched) == ["head", "Layers.*"]
    assert unmatched["head"].endswith("blocks: layers.0, layers.1, layers.2, layers.3, ...")
    assert choose(names[:4], ("head",), 1)[1]["head"].endswith("blocks: layers.0, layers.1, layers.2, layers.3")


def slot(op: str, patterns: tuple[str, ...], backend: str = "torch") -> Any:
    return SimpleNamespace(op=op, operators=patterns, backend=backend)


def test_outputs_of_an_op_or_of_a_pattern_are_stored_and_others_recomputed() -> None:
    mm, add = torch.ops.aten.mm.default, torch.ops.aten.add.Tensor
    context: Any = None
    policy = KeepOutputs(("norm", "aten.add"), [slot("norm", ("aten.mm",)), slot("other", ("aten.mul",))])
    assert policy.unmet() == []
    assert policy(context, torch.ops.aten.mul.Tensor) == CheckpointPolicy.PREFER_RECOMPUTE
    assert policy.unmet() == ["norm", "aten.add"]
    assert policy(context, mm, 1, a=2) == CheckpointPolicy.MUST_SAVE
    assert policy.unmet() == ["aten.add"]
    assert policy(context, add) == CheckpointPolicy.MUST_SAVE
    assert policy.unmet() == []
    nothing = KeepOutputs(())
    assert nothing(context, mm) == CheckpointPolicy.PREFER_RECOMPUTE
    assert contexts_of(policy).args == (policy,)  # type: ignore[attr-defined]
    assert isinstance(operators.KEEPING_NOTHING()[0], torch.utils._python_dispatch.TorchDispatchMode)


def test_a_saved_op_needs_a_kernel_with_operators() -> None:
    KeepOutputs(("a",), [slot("a", ("aten.mm",)), slot("b", ())]).check()
    with pytest.raises(BuildError, match="'a' in 'save': its kernel 'fast' has no operators"):
        KeepOutputs(("a",), [slot("a", (), "fast")]).check()


def test_ops_and_names_of_packages_are_known_before_operators_are_registered() -> None:
    assert unknown_operators(("attention", "aten.mm", "torch.later"), {"attention"}) == {}
    unknown = unknown_operators(("attentio",), {"attention", "norm"})
    assert list(unknown) == ["attentio"]
    assert unknown["attentio"].endswith("did you mean 'attention'? (ops of the blocks: attention, norm)")
    with pytest.raises(BuildError, match=r"'no_such_package.op' in 'save' matches no operator"):
        unknown_operators(("no_such_package.op",), ())
    assert torch.ops.aten.mm.default in find_operators("aten.mm")
    assert set(find_operators("aten.m?")) >= {torch.ops.aten.mm.default, torch.ops.aten.mv.default}


def test_the_second_forward_warns_once_of_unmet_entries(caplog: pytest.LogCaptureFixture) -> None:
    policy: Any = SimpleNamespace(unmet=lambda: ["a", "b"])
    hook = WarnOfUnmet(policy)
    counts = []
    for _ in range(4):
        hook(nn.Linear(1, 1), ())
        counts.append(len(caplog.records))
    assert counts == [0, 1, 1, 1]
    assert "stores nothing for 'a', 'b' in 'save'" in caplog.text


def test_a_checkpointed_module_keeps_its_forward_and_settings() -> None:
    layer = nn.Linear(2, 2)
    assert not is_checkpointed(layer)
    checkpoint_module(layer)
    forward: Any = layer.forward
    assert isinstance(forward, Recomputed)
    assert is_checkpointed(layer)
    bound: Any = forward.forward
    assert (forward.preserve_rng_state, forward.contexts, bound.__self__) == (True, None, layer)
    other = nn.Linear(2, 2)
    checkpoint_module(other, preserve_rng_state=False, contexts=operators.KEEPING_NOTHING)
    forward = other.forward
    assert (forward.preserve_rng_state, forward.contexts) == (False, operators.KEEPING_NOTHING)


def test_graphs_are_recorded_or_refused_in_addition_to_the_options_of_a_mode() -> None:
    recorded = {"triton.cudagraphs": True, "triton.cudagraph_or_error": True}
    assert _graph_options(None) == recorded
    most = _graph_options("max-autotune")
    assert most == {**most, **recorded, "max_autotune": True}
    for known in ("inductor", "eager", "aot_eager"):
        _check_backend(known)
    with pytest.raises(BuildError, match="unknown backend 'inducter'; did you mean 'inductor'"):
        _check_backend("inducter")
    with pytest.raises(BuildError, match="unknown backend 'zzzzzzzz'; torch knows: "):
        _check_backend("zzzzzzzz")


class Core(nn.Module):
    """Attention core that shares its attention, with or without a slot."""

    def __init__(self, slots: Mapping[str, Any]) -> None:
        super().__init__()
        self.slots, self.function = slots, None

    def op_slots(self) -> Mapping[str, Any]:
        return self.slots

    def attention_heads(self) -> tuple[int, int]:
        return 4, 2

    def head_features(self) -> int:
        return 8

    def see_queries(self, share: Any) -> None:
        self.function = share

    def attend_by(self, function: Any) -> None:
        self.function = function


class Router(nn.Module):
    """Module that sees the context and may state its collectives."""

    def see_context(self, share: Any) -> None:
        self.share = share


class Stating(Router):
    def context_collectives(self, _step: Any) -> list[Any]:
        return []


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Core({}), Core({"attention_block": None})
        self.router, self.stating = Router(), Stating()
        self.share: Any = None

    def attention_cores(self) -> Mapping[str, nn.Module]:
        return {"a": self.a, "b": self.b}

    def split_context(self, share: Any) -> None:
        self.share = share


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_context_parallelism_tells_what_it_changed_and_what_states_nothing(
    monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    ranks = SimpleNamespace(rank=1, size=2, numbers=(0, 1), group="group", name="ranks")
    monkeypatch.setattr(strategy, "Ranks", lambda _group: ranks)
    topology: Any = SimpleNamespace(axes_group=lambda axis: axis, sizes={"tp": 2})
    stage = Attention()
    applied = ContextParallel(ContextParallelConfig(method=method)).apply(stage, topology)
    assert applied.modules == ("", "a", "b", "router", "stating")
    plain = ("a: declares no slot of attention_block, so it is computed in plain PyTorch",)
    silent = ("router (Router) does not declare its communication: context_collectives()",)
    assert applied.notes == (plain if method == "ring" else ()) + silent
    assert (stage.share.all_ranks, stage.share.ranks, stage.router.share) == (ranks, 2, stage.share)
    communication: Any = applied.collectives
    assert communication.cores == {"a": Heads(2, 1, 8), "b": Heads(2, 1, 8)}
    assert list(communication.alone) == ["stating"]
    functions = [core.function for core in (stage.a, stage.b)]
    replaced = "forward" in vars(stage.a)
    if method == "ring":
        assert [type(function).__name__ for function in functions] == ["RingAttention"] * 2
    else:
        assert functions == [stage.share if method == "all_gather" else None] * 2
    assert replaced == (method != "ring")


def test_ranks_of_a_part_make_the_groups_of_all_parts() -> None:
    made: list[tuple[str, list[int]]] = []

    def group(axis: str, part: Any) -> str:
        made.append((axis, list(part)))
        return f"group {len(made)}"

    topology: Any = SimpleNamespace(coordinate={"cp": 3}, positions_group=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "Ranks", lambda one: one)
        mine: Any = strategy._ranks(topology, [range(2), range(2, 4), range(4, 6)])
    assert mine == "group 2"
    assert made == [("cp", [0, 1]), ("cp", [2, 3]), ("cp", [4, 5])]


def test_parameters_are_gathered_again_among_a_divisor_of_their_ranks() -> None:
    mesh: Any = SimpleNamespace(ndim=2, size=lambda dim: (3, 4)[dim])  # replicas and shards
    for allowed in (True, False):
        _check_group(allowed, mesh, "fsdp", spread=True)
    for number in (1, 2, 4):
        _check_group(number, mesh, "fsdp", spread=False)
    with pytest.raises(BuildError, match="'fsdp': reshard_after_forward 3 does not divide the 4 ranks that share the"):
        _check_group(3, mesh, "fsdp", spread=False)
    with pytest.raises(BuildError, match="'hsdp': reshard_after_forward 2 is not possible with experts that are shard"):
        _check_group(2, mesh, "hsdp", spread=True)


def fsdp_parameter(whole: tuple[int, ...], part: tuple[int, ...], **changes: Any) -> Any:
    """Stand-in of a parameter of an FSDP2 unit that could be gathered directly over two ranks."""
    facts = dict.fromkeys(direct_gather._OF_PARAMETER) | {
        "_orig_size": torch.Size(whole), "padded_sharded_param_size": torch.Size(part),
        "fsdp_placement": Shard(0), "offload_to_cpu": False, "_sharded_local_tensor": torch.zeros(1), **changes,
    }  # fmt: skip
    return SimpleNamespace(**facts)


def test_units_with_even_shards_in_the_first_dimension_gather_directly() -> None:
    even = fsdp_parameter((8, 3), (4, 3))
    others = [
        fsdp_parameter((7, 3), (4, 3)),
        fsdp_parameter((0, 3), (0, 3)),
        fsdp_parameter((8, 3), (4, 3), fsdp_placement=Shard(1)),
        fsdp_parameter((8, 3), (4, 3), offload_to_cpu=True),
        fsdp_parameter((8, 3), (4, 3), _sharded_local_tensor=SimpleNamespace(fsdp_pre_all_gather=None)),
        SimpleNamespace(),  # another release of torch
    ]
    assert direct_gather._is_direct(even, 2)
    assert not direct_gather._is_direct(even, 4)
    assert [direct_gather._is_direct(other, 2) for other in others] == [False] * 6

    def unit(*parameters: Any) -> Any:
        facts = dict.fromkeys(direct_gather._OF_GROUP)
        facts |= {"_all_gather_process_group": SimpleNamespace(size=lambda: 2), "fsdp_params": parameters}
        return SimpleNamespace(**facts)

    assert direct_gather._fits(unit(even, even))
    assert not direct_gather._fits(unit(even, others[0]))
    incomplete = unit(even)
    del incomplete.unshard
    assert not direct_gather._fits(incomplete)


class Tied(nn.Module):
    """Two layers with one weight, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)
        self.second.weight = self.first.weight


def tensor_split(**styles: TensorStyle) -> _Split:
    ranks: Any = SimpleNamespace(size=2, rank=1, group=None)
    mesh: Any = None
    made = _Split(mesh, ranks, "tensor_parallel", TensorCommunication(nn.Module(), (0, 1)))
    made.styles = {name.replace("__", "."): style for name, style in styles.items()}
    return made


def test_a_parameter_has_the_style_of_the_nearest_module_that_a_plan_names() -> None:
    made = tensor_split(a=TensorStyle.COLUMN, a__b=TensorStyle.PARTIAL, c=TensorStyle.WHOLE, d=TensorStyle.ROW)
    found = {
        name: made._style(name)
        for name in ("a.weight", "a.bias", "a.scale", "a.x.weight", "a.b.weight", "a.b.x.y", "c.x.y", "d.weight", "e.f")
    }
    assert found == {
        "a.weight": TensorStyle.COLUMN, "a.bias": TensorStyle.COLUMN,
        "a.scale": None, "a.x.weight": None,  # added to a layer that is split
        "a.b.weight": TensorStyle.PARTIAL, "a.b.x.y": TensorStyle.PARTIAL, "c.x.y": TensorStyle.WHOLE,
        "d.weight": TensorStyle.ROW, "e.f": None,
    }  # fmt: skip


def test_a_weight_of_two_modules_is_not_split_in_one_of_them() -> None:
    stage = Tied()
    assert _shared(stage) == [["first.weight", "second.weight"]]
    styles = {"first": TensorStyle.COLUMN, "second": TensorStyle.PARTIAL, "norm": TensorStyle.SEQUENCE}
    with pytest.raises(BuildError, match="'first.weight' and 'second.weight' are one parameter, which would be split"):
        tensor_split(**styles).check(stage, _shared(stage))
    tensor_split(**styles).check(stage, [])
    tensor_split(**{**styles, "first": TensorStyle.WHOLE}).check(stage, _shared(stage))
    del styles["norm"]
    with pytest.raises(BuildError, match=r"the style of 'norm.weight' over tp is unknown: no tensor_parallel_plan"):
        tensor_split(**styles).check(stage, [])


def test_gradients_of_replicated_parameters_are_summed_unless_all_ranks_compute_the_same() -> None:
    made = tensor_split(first=TensorStyle.WHOLE, second=TensorStyle.PARTIAL, norm=TensorStyle.SEQUENCE)
    assert [(owner.parameter, owner.axis, owner.owner) for owner in made.gradients(Tied())] == [
        ("first.weight", "tp", "none"), ("first.bias", "tp", "none"), ("second.bias", "tp", "sync"),
        ("norm.weight", "tp", "sync"), ("norm.bias", "tp", "sync"),
    ]  # fmt: skip
