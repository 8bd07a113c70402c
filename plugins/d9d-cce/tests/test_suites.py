"""Backends keep what holds for every one: interpreted here, compiled where there is a GPU."""

from __future__ import annotations

import pytest
from d9d_testing.suites.kernel import KernelSuite


class TestCce(KernelSuite):
    """On the CPU. Triton's interpreter multiplies no matrices of bfloat16."""

    target = "linear_cross_entropy.cce"
    asked = "cuda"
    dtypes = ("float16",)
    refused = ({"dtype": "float32"}, {"device": "cpu"}, {"features": 2**14, "vocabulary": 2**17})


@pytest.mark.gpu
class TestCceOnCuda(TestCce):
    device = "cuda"
    dtypes = ("float16", "bfloat16")
