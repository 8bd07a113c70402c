from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, PluginError
from d9d_core.loop.kernels import KernelChoice, bind_kernels
from d9d_core.ops import Decision, OpSignature, OpSlot
from d9d_core.plugin import KernelSpec, Ref, Registry, hookimpl
from torch import nn


class Square(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.op = OpSlot("square", torch.square, width=width)

    def op_slots(self) -> dict[str, OpSlot]:
        return {"op": self.op}


class Backends:
    """What the records refer to; looked up by attribute."""

    @staticmethod
    def wide_only(signature: OpSignature) -> Decision:
        wide = signature.static["width"] >= 8
        return Decision(
            wide, "wide enough" if wide else f"needs width >= 8, not {signature.static['width']}", priority=5
        )

    @staticmethod
    def always(_signature: OpSignature) -> Decision:
        return Decision(True, "takes everything", priority=1)

    @staticmethod
    def make(signature: OpSignature) -> Any:
        return lambda x: x * x + signature.static["width"]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    import sys

    monkeypatch.setitem(sys.modules, "backends_for_this_test", SimpleNamespace(B=Backends))

    def spec(name: str, supports: str) -> KernelSpec:
        ref = "backends_for_this_test:B."
        return KernelSpec(name=name, op="square", summary="x", supports=Ref(ref + supports), build=Ref(ref + "make"))

    @hookimpl
    def d9d_kernels() -> list[KernelSpec]:
        absent = Ref("a_module_that_is_not_there:supports")
        other = KernelSpec(name="wide", op="other", summary="x", supports=absent, build=absent)
        broken = KernelSpec(name="broken", op="square", summary="x", supports=absent, build=absent)
        return [spec("wide", "wide_only"), spec("plain", "always"), other, broken]

    return Registry.of(SimpleNamespace(d9d_kernels=d9d_kernels, __name__="acme"))


def choose(registry: Registry, stage: nn.Module, **requested: str) -> list[KernelChoice]:
    return bind_kernels(stage, registry, requested, "cpu", "float32")


def test_the_accepting_backend_with_the_highest_priority_is_bound_per_signature(registry: Registry) -> None:
    stage = nn.Sequential(Square(4), Square(16), Square(16))
    narrow, wide = choose(registry, stage)
    assert (narrow.backend, narrow.sites) == ("plain", ("0.op",))
    assert (wide.backend, wide.sites) == ("wide", ("1.op", "2.op"))
    assert stage[1].op(torch.tensor(2.0)).item() == 20  # type: ignore[operator, union-attr]
    assert narrow.considered["wide"].reason == "needs width >= 8, not 4"
    assert "cannot be imported" in narrow.considered["broken"].reason


def test_a_backend_asked_for_by_name_is_taken(registry: Registry) -> None:
    assert [c.backend for c in choose(registry, Square(16), square="plain")] == ["plain"]
    assert [c.backend for c in choose(registry, Square(16), square="acme/plain")] == ["plain"]
    assert [c.backend for c in choose(registry, Square(16), square="reference")] == ["reference"]


def test_a_backend_asked_for_by_name_that_cannot_run_is_an_error(registry: Registry) -> None:
    with pytest.raises(BuildError, match=r"kernels.square: 'wide' \(acme\) cannot run here: needs width >= 8, not 4"):
        choose(registry, Square(4), square="wide")


def test_an_unknown_backend_or_op_is_an_error(registry: Registry) -> None:
    with pytest.raises(PluginError, match="unknown kernel 'square.wied'; did you mean 'square.wide'"):
        choose(registry, Square(4), square="wied")
    with pytest.raises(BuildError, match="kernels.sqare: the model calls no op 'sqare'; its ops are: square"):
        choose(registry, Square(4), sqare="wide")
