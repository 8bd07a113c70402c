"""The campaign of random shapes tells right kernels from wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature

pytestmark = pytest.mark.full


def test_a_sound_kernel_passes_and_its_table_says_how_often(
    tool: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("kernel_campaign").main(["silu_mul.triton", "permute.triton", "adamw.triton", "--shapes", "2"]) == 0
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:4]]
    assert rows == [[name, "2", "0", "0"] for name in ("silu_mul.triton", "permute.triton", "adamw.triton")]


def test_a_kernel_that_forgets_a_feature_is_found(
    tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forgetful(_signature: OpSignature) -> Any:
        def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            out = torch.nn.functional.silu(gate) * up
            return torch.where(torch.arange(out.shape[-1]) == 16, 0, out)

        return silu_mul

    monkeypatch.setattr("d9d_triton.silu_mul.build", forgetful)
    assert tool("kernel_campaign").main(["silu_mul.triton", "--shapes", "20"]) == 1
    assert "silu_mul.triton, shape" in capsys.readouterr().out
