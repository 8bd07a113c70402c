"""Stand-in for the library on a CPU: the function that is called, and its demands on arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from d9d_fla import rules
from torch import Tensor


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes one position after another, without documents."""
    reference = pytest.importorskip("d9d_nn.ops.gated_delta_rule").gated_delta_rule
    assert q.dtype == k.dtype == v.dtype
    assert v.dtype in (torch.bfloat16, torch.float16)
    assert g.dtype == torch.float32
    assert scale == k.shape[-1] ** -0.5
    assert use_qk_l2norm_in_kernel
    assert q.shape == k.shape
    assert g.shape == beta.shape == v.shape[:3]
    return reference(q, k, v, g, beta), None


@pytest.fixture
def stand_in() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that takes the place of the library's."""
    return chunk_gated_delta_rule


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Release 0.6 of the library, whatever is installed, and no GPU."""
    package, inside = ModuleType("fla"), ModuleType("fla.ops.gated_delta_rule")
    package.__spec__ = ModuleSpec("fla", None)
    inside.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    for module in (package, ModuleType("fla.ops"), inside):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(rules, "installed", lambda *names: "0.6.0" if names == ("fla-core",) else None)
    monkeypatch.setattr(rules, "capability", lambda: None)
