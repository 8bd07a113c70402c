"""Kernels keep what holds for every one: interpreted here, compiled where there is a GPU."""

from __future__ import annotations

import pytest
from d9d_testing.suites.kernel import KernelSuite


@pytest.mark.thorough
class TestRmsNorm(KernelSuite):
    target = "rms_norm.triton"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "mps"}, {"features": 16385})


@pytest.mark.full
class TestAddRmsNorm(KernelSuite):
    target = "add_rms_norm.triton"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "mps"}, {"features": 16385})


@pytest.mark.full
class TestSiluMul(KernelSuite):
    target = "silu_mul.triton"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "mps"})


@pytest.mark.full
class TestSwiglu(KernelSuite):
    target = "swiglu.triton"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "mps"})


@pytest.mark.thorough
class TestLowRankLinear(KernelSuite):
    target = "low_rank_linear.triton"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "mps"})


@pytest.mark.full
class TestRope(KernelSuite):
    target = "rope.triton"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "mps"})


@pytest.mark.full
class TestNormedRope(KernelSuite):
    target = "normed_rope.triton"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "mps"})


@pytest.mark.full
class TestAttentionInputs(KernelSuite):
    target = "attention_inputs.triton"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "mps"})


@pytest.mark.full
@pytest.mark.usefixtures("loops_that_count")
class TestGatedDeltaRule(KernelSuite):
    target = "gated_delta_rule.triton"
    refused = (
        {"dtype": "int8"}, {"dtype": "float64"}, {"device": "mps"}, {"key_dim": 257}, {"value_dim": 257},
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.usefixtures("loops_that_count")
class TestGatedDeltaRuleFrom(KernelSuite):
    target = "gated_delta_rule_from.triton"
    refused = ({"dtype": "float64"}, {"key_dim": 257}, {"value_dim": 257})


@pytest.mark.full
class TestPermute(KernelSuite):
    target = "permute.triton"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "mps"})


@pytest.mark.full
class TestUnpermute(KernelSuite):
    target = "unpermute.triton"
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "mps"})


@pytest.mark.gpu
class TestRmsNormOnCuda(TestRmsNorm):
    device = "cuda"


@pytest.mark.gpu
class TestAddRmsNormOnCuda(TestAddRmsNorm):
    device = "cuda"


@pytest.mark.gpu
class TestSiluMulOnCuda(TestSiluMul):
    device = "cuda"


@pytest.mark.gpu
class TestSwigluOnCuda(TestSwiglu):
    device = "cuda"


@pytest.mark.gpu
class TestLowRankLinearOnCuda(TestLowRankLinear):
    device = "cuda"


@pytest.mark.gpu
class TestRopeOnCuda(TestRope):
    device = "cuda"


@pytest.mark.gpu
class TestNormedRopeOnCuda(TestNormedRope):
    device = "cuda"


@pytest.mark.gpu
class TestAttentionInputsOnCuda(TestAttentionInputs):
    device = "cuda"


@pytest.mark.gpu
class TestGatedDeltaRuleOnCuda(TestGatedDeltaRule):
    device = "cuda"


@pytest.mark.gpu
class TestGatedDeltaRuleFromOnCuda(TestGatedDeltaRuleFrom):
    device = "cuda"
    dtypes = ("bfloat16",)  # each dtype compiles all kernels for each size


@pytest.mark.gpu
class TestPermuteOnCuda(TestPermute):
    device = "cuda"


@pytest.mark.gpu
class TestUnpermuteOnCuda(TestUnpermute):
    device = "cuda"
