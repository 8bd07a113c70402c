"""Use of private parts of FSDP2, and reducers of a stage's gradients. Units and reducers are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_engine import compat
from d9d_engine.distributed.mesh import Topology
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.ownership import Ownership, _is_sharded
from torch import nn


class Parameter:
    """Parameter of an FSDP2 unit; ``did`` has its calls."""

    def __init__(
        self, grad: bool = False, waited: bool = False, trains: bool = True, wide: Any = torch.float32
    ) -> None:
        self.did: list[str] = []
        self.orig_dtype = torch.bfloat16
        self.reduce_dtype = None
        self.sharded_param = SimpleNamespace(requires_grad=trains, grad_dtype=wide)
        self.unsharded_param = torch.ones(2)
        self.unsharded_param.grad = torch.full((2,), 3.0) if grad else None
        self._unsharded_param = self.unsharded_param
        self.unsharded_accumulated_grad = torch.ones(2) if waited else None

    def accumulate_unsharded_grad_if_needed(self) -> None:
        self.did.append("accumulated")

    def to_accumulated_grad_if_needed(self) -> None:
        self.did.append("converted")


def test_gradients_computed_outside_of_a_backward_are_accumulated(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, bare, newer = Parameter(), Parameter(), Parameter(), SimpleNamespace(_unsharded_param=1)
    del bare._unsharded_param
    groups = [SimpleNamespace(fsdp_params=[one, newer]), SimpleNamespace(fsdp_params=[bare, other])]
    monkeypatch.setattr(compat, "_fsdp_groups", lambda _root: groups)
    root: Any = None
    compat.keep_fsdp_gradients(root)
    assert [parameter.did for parameter in (one, other, bare)] == [["accumulated", "converted"]] * 2 + [[]]


@pytest.mark.parametrize("newer", [False, True])
def test_accumulated_gradients_are_reduced_as_at_the_end_of_a_backward(newer: bool) -> None:
    ended: list[bool] = []
    shared = SimpleNamespace(**({"manual_backward_finalization_active": True} if newer else {}))
    state = SimpleNamespace(
        _state_ctx=shared, _root_post_backward_final_callback=lambda: ended.append(torch.is_grad_enabled())
    )
    root: Any = SimpleNamespace(_get_fsdp_state=lambda: state)
    compat.reduce_fsdp_gradients(root)
    assert ended == [False]
    assert vars(shared) == ({"manual_backward_finalization_active": False} if newer else {})


@pytest.mark.parametrize("before", [None, "earlier"])
def test_a_reduction_is_waited_for_before_the_next_one(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    monkeypatch.setattr(_fsdp_param_group, "ReduceScatterState", lambda *given: given)
    waited: list[Any] = []
    current = SimpleNamespace(wait_event=waited.append)
    shared = SimpleNamespace(reduce_scatter_state=None if before is None else SimpleNamespace(event=before))
    group: Any = SimpleNamespace(comm_ctx=shared, device_handle=SimpleNamespace(current_stream=lambda: current))
    event: Any = "event"
    compat.settle_fsdp_reduction(group, "kept", event, "stream")
    assert (group._post_reduce_event, shared.reduce_scatter_state) == ("event", ("kept", "event"))
    assert waited == ([] if before is None else ["earlier"])
    several = SimpleNamespace(
        reduce_scatter_states=[SimpleNamespace(event="a"), SimpleNamespace(event="b")], _last_post_reduce_events={}
    )
    waited.clear()
    group.comm_ctx, group._post_backward_pending = several, True
    states = several.reduce_scatter_states
    compat.settle_fsdp_reduction(group, "kept", event, "stream")
    assert waited == ["a", "b"]
    assert states == [("kept", "event", current, group)]
    assert (several._last_post_reduce_events, group._post_backward_pending) == ({"stream": "event"}, False)


def test_units_are_prepared_by_the_public_call_or_by_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[Any] = []

    class Unit(nn.Module):
        def _get_fsdp_state(self) -> Any:
            return SimpleNamespace(_fsdp_param_group="group")

    class Newer(Unit):
        def set_reduce_scatter_unused_params(self, on: bool, recurse: bool) -> None:
            did.append((on, recurse))

    monkeypatch.setattr(compat, "FSDPModule", Unit)
    monkeypatch.setattr(compat, "_patch_fsdp_group", did.append)
    compat.prepare_fsdp_gradients(nn.Sequential(Unit(), nn.Linear(1, 1), Newer()))
    assert did == ["group", (True, False)]


def test_a_patched_unit_reduces_in_the_dtype_of_gradients_and_counts_missing_ones() -> None:
    compat._patch_fsdp_group(None)
    did: list[Any] = []
    wide, same, frozen = Parameter(), Parameter(wide=torch.bfloat16), Parameter(trains=False)
    group: Any = SimpleNamespace(
        fsdp_params=[same, frozen],
        mp_policy=SimpleNamespace(reduce_dtype=None),
        reduce_grads=True,
        _init_mp_dtypes=lambda: did.append("dtypes"),
        post_backward=lambda *given: did.append(given),
        _reduce_dtype="own",
        _orig_dtype="own",
    )
    compat._patch_fsdp_group(group)
    group._init_mp_dtypes()
    assert (group._reduce_dtype, group._orig_dtype) == ("own", "own")
    group.fsdp_params = [same, wide, frozen]
    group._init_mp_dtypes()
    assert [one.reduce_dtype for one in (wide, same, frozen)] == [torch.float32, None, None]
    assert (group._reduce_dtype, group._orig_dtype) == (torch.float32, torch.float32)
    group.mp_policy.reduce_dtype = torch.float16
    group._init_mp_dtypes()
    assert (group._reduce_dtype, group._orig_dtype) == (torch.float16, torch.float32)
    group.post_backward("unused")
    assert did == ["dtypes"] * 3 + [("unused",)]
    assert wide.unsharded_param.grad is not None
    assert wide.unsharded_param.grad.tolist() == [0.0, 0.0]
    assert frozen.unsharded_param.grad is None


@pytest.mark.parametrize(
    ("reduces", "waited", "converted"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_missing_gradients_are_zeros_in_the_dtype_of_accumulated_ones(
    reduces: bool, waited: bool, converted: bool
) -> None:
    did: list[Any] = []
    missing, present, accumulated = Parameter(), Parameter(grad=True), Parameter(waited=waited)
    group: Any = SimpleNamespace(fsdp_params=[missing, present, accumulated], reduce_grads=reduces)
    compat._with_zeros(group, lambda *given: did.append(given), 1)
    assert did == [(1,)]
    assert (missing.unsharded_param.grad is None) == (not reduces)
    assert present.unsharded_param.grad is not None
    assert present.unsharded_param.grad.tolist() == [3.0, 3.0]
    assert (missing.did, present.did) == ((["converted"], ["converted"]) if converted else ([], []))
    assert (accumulated.unsharded_param.grad is None) == (waited or not reduces)


def test_a_unit_that_never_ran_reduces_nothing() -> None:
    did: list[Any] = []
    never = Parameter()
    del never._unsharded_param
    group: Any = SimpleNamespace(fsdp_params=[Parameter(), never], reduce_grads=True)
    compat._with_zeros(group, did.append)
    assert did == []


class Reducer:
    def __init__(self, did: list[Any], name: str) -> None:
        self._did, self._name = did, name

    def before_backward(self, last: bool, complete: bool = True) -> None:
        self._did.append((self._name, "before", last, complete))

    def after_weights(self) -> None:
        self._did.append((self._name, "weights"))

    def reduce(self) -> None:
        self._did.append((self._name, "reduce"))


def test_reducers_of_a_stage_are_told_of_its_backwards_and_reduce_split_ones() -> None:
    did: list[Any] = []
    parameter = nn.Parameter(torch.ones(2))
    reducers: Any = {0: [Reducer(did, "a")], 1: [Reducer(did, "b"), Reducer(did, "c")]}
    gradients = Gradients({"p": parameter}, Ownership({}), Topology(), reducers)
    gradients.before_backward(last=False, stage=0)
    gradients.before_backward(last=True, stage=1, complete=False)
    gradients.after_weights(1)
    gradients.reduce(0)
    assert did == [
        ("a", "before", False, True), ("b", "before", True, False), ("c", "before", True, False), ("b", "weights"),
        ("c", "weights"),
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match=r"has no Reduce for the stage\(s\) \[1\]"):
        gradients.finish()
    did.clear()
    gradients.reduce(1)
    assert did == [("b", "reduce"), ("c", "reduce")]
    gradients.finish()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0, 0.0]
    gradients.reset()
    assert parameter.grad is None
    did.clear()
    gradients.reduce(1)
    assert did == []
    with pytest.raises(RuntimeError, match=r"stage\(s\) \[0\]"):
        gradients.finish()


def test_a_parameter_is_sharded_along_the_dimensions_that_do_not_replicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_engine.step.ownership.is_dtensor", lambda tensor: not isinstance(tensor, torch.Tensor))
    placements = [SimpleNamespace(is_replicate=lambda: True), SimpleNamespace(is_replicate=lambda: False)]
    mesh = SimpleNamespace(mesh_dim_names=("dp_replicate", "dp_shard"))
    parameter: Any = SimpleNamespace(device_mesh=mesh, placements=placements)
    assert [_is_sharded(parameter, axis) for axis in ("dp_replicate", "dp_shard", "tp")] == [False, True, False]
    assert not _is_sharded(torch.ones(1), "dp_shard")
