"""Backends keep what holds for every one: interpreted here, compiled where there is a GPU."""

from __future__ import annotations

import pytest
from d9d_testing.suites.kernel import KernelSuite


class Interpreted(KernelSuite):
    """On the CPU. Triton's interpreter computes nonsense with bfloat16 that a kernel does not widen first."""

    asked = "cuda"
    dtypes = ("float32", "float16")


@pytest.mark.full
class TestRmsNorm(Interpreted):
    target = "rms_norm.liger"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "cpu"}, {"features": 65537})


@pytest.mark.full
class TestSiluMul(Interpreted):
    target = "silu_mul.liger"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "cpu"})


@pytest.mark.full
class TestRope(Interpreted):
    target = "rope.liger"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "cpu"})


@pytest.mark.thorough
class TestLinearCrossEntropy(Interpreted):
    target = "linear_cross_entropy.liger"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "cpu"})


@pytest.mark.gpu
class TestRmsNormOnCuda(TestRmsNorm):
    device = "cuda"
    dtypes = KernelSuite.dtypes


@pytest.mark.gpu
class TestSiluMulOnCuda(TestSiluMul):
    device = "cuda"
    dtypes = KernelSuite.dtypes


@pytest.mark.gpu
class TestRopeOnCuda(TestRope):
    device = "cuda"
    dtypes = KernelSuite.dtypes


@pytest.mark.gpu
class TestLinearCrossEntropyOnCuda(TestLinearCrossEntropy):
    device = "cuda"
    dtypes = KernelSuite.dtypes
