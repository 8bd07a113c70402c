"""The libraries themselves, where there is a GPU that they are for."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from d9d_core.registry.capabilities import missing_modules
from d9d_flash_attention import rules
from d9d_testing.suites.kernel import KernelSuite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of flash-attn-4 4.0.0b36 with nvidia-cutlass-dsl 4.8; it goes on as before.
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # many, each of one of these two for the other
]


class OnCuda(KernelSuite):
    device = "cuda"
    dtypes = ("bfloat16",)  # each shape and dtype is compiled for itself
    refused = ({"dtype": "float32"}, {"device": "cpu"}, {"head_dim": 12})

    @pytest.fixture(autouse=True)
    def needs_the_library(self) -> None:
        """A machine has those that its users built, and a GPU of one kind."""
        library = rules.LIBRARIES[int(self.target[-1])]
        if missing := missing_modules(self.spec()):
            pytest.skip(f"{', '.join(missing)} is not installed")
        if rules.capability() not in library.capabilities:
            pytest.skip(f"{library.name} is not for this GPU")


class TestFlashAttention2(OnCuda):
    target = "attention.flash_attention_2"


class TestFlashAttention3(OnCuda):
    target = "attention.flash_attention_3"


class TestFlashAttention4(OnCuda):
    target = "attention.flash_attention_4"


def test_a_compiled_block_is_one_graph_around_four() -> None:
    if importlib.util.find_spec("flash_attn") is None or rules.capability() not in rules.LIBRARIES[4].capabilities:
        pytest.skip("needs flash-attn-4 and a GPU that it is for")
    pytest.importorskip("flash_attn.cute")
    from d9d_core.kernel import OpSignature
    from d9d_flash_attention.backend import build_4

    static = {"query_heads": 4, "key_value_heads": 2, "head_dim": 64, "causal": True, "window": None}
    function = build_4(OpSignature("attention", "cuda", "bfloat16", static))
    documents = (torch.arange(256, device="cuda") >= 100).long().expand(2, -1)
    starts = function.prepare(documents, 256, documents.device)
    tensors = [torch.randn(2, 256, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]

    def block(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = (tensor * 2 for tensor in tensors)
        return function(query, key, value, starts) + 1

    found = []
    for run in (block, torch.compile(block, fullgraph=True)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = run(*leaves)
        out.float().square().mean().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=3e-2, atol=1e-3)
