"""Backends keep what holds for every one: interpreted here, compiled where there is a GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.tolerances import TOLERANCES


@pytest.mark.thorough
class TestCce(KernelSuite):
    """On the CPU. Triton's interpreter multiplies no matrices of bfloat16."""

    target = "linear_cross_entropy.cce"
    asked = "cuda"
    dtypes = ("float16",)
    refused = ({"dtype": "float32"}, {"device": "cpu"}, {"features": 2**14, "vocabulary": 2**17})


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("cut_cross_entropy") is None, reason="needs cut-cross-entropy")
class TestCceOnCuda(TestCce):
    device = "cuda"
    dtypes = ("float16", "bfloat16")

    def test_values_are_those_of_the_reference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The library rounds the label's logit to the dtype of the hidden states; in bfloat16, one below 16 by 2^-5."""
        near = replace(TOLERANCES[torch.bfloat16], atol=2**-5)
        monkeypatch.setattr(type(self), "tolerances", {**TOLERANCES, torch.bfloat16: near})
        super().test_values_are_those_of_the_reference()
