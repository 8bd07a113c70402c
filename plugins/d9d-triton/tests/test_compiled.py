"""Every kernel of the package compiles for the GPUs that it is for; without a GPU, in a process that interprets none.

A new kernel fails here until something in ``LAUNCHES`` launches it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
from d9d_testing.ahead_of_time import compile_launches
from torch import Tensor, nn

pytestmark = pytest.mark.full

DTYPES = ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32))


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(*shape, dtype=dtype, requires_grad=True)


def backward(out: Tensor) -> None:
    out.backward(torch.ones_like(out))


def rms_norm() -> None:
    from d9d_triton.rms_norm import rms_norm

    for features in (2048, 128, 16384):
        backward(rms_norm(ones(6, features), ones(features), 1e-6))
    for dtype, of_weight in DTYPES:
        backward(rms_norm(ones(6, 33, dtype=dtype), ones(33, dtype=of_weight), 1e-6))
    backward(rms_norm(ones(6, 2048), ones(2048).detach(), 1e-6))
    backward(rms_norm(ones(6, 2048).detach(), ones(2048), 1e-6))


def add_rms_norm() -> None:
    from d9d_triton.add_rms_norm import add_rms_norm

    for features in (2048, 8192, 16384):
        for added in (ones(6, features), None):
            torch.autograd.backward(
                add_rms_norm(ones(6, features), added, ones(features), 1e-6), [ones(6, features)] * 2
            )
    for dtype, of_weight in DTYPES:
        backward(add_rms_norm(ones(6, 33, dtype=dtype), ones(6, 33), ones(33, dtype=of_weight), 1e-6)[0])
    torch.autograd.backward(add_rms_norm(ones(6, 64), ones(6, 64), ones(64).detach(), 1e-6), [ones(6, 64)] * 2)


def silu_mul() -> None:
    from d9d_triton.silu_mul import silu_mul

    for of_gate, of_up in DTYPES:
        backward(silu_mul(ones(4, 6144, dtype=of_gate), ones(4, 6144, dtype=of_up)))
    backward(silu_mul(*ones(4, 2 * 768).chunk(2, dim=1)))
    backward(silu_mul(ones(3, 33), ones(33, 3).T))


def swiglu() -> None:
    from d9d_triton.joint.swiglu import swiglu

    for features in (6144, 33):
        for dtype in (torch.bfloat16, torch.float32):
            weights = [ones(features, 8, dtype=dtype) for _ in range(2)]
            backward(swiglu(ones(4, 8, dtype=dtype), *weights, ones(8, features, dtype=dtype)))


def low_rank_linear() -> None:
    from d9d_triton.low_rank_linear import low_rank_linear

    # The tiles of float32 and the highest ranks come closest to the shared memory of GPUs.
    for dtype, ranks in ((torch.bfloat16, (16, 32, 128)), (torch.float16, (5,)), (torch.float32, (8, 32, 128))):
        for rank in ranks:
            bias = ones(300, dtype=dtype) if rank == 8 else None
            layer = ones(300, 32, dtype=dtype), bias, ones(rank, 32, dtype=dtype), ones(300, rank, dtype=dtype)
            backward(low_rank_linear(ones(6, 32, dtype=dtype), *([part] for part in layer), [2.0])[0])


def rope() -> None:
    from d9d_triton.rope import rope

    for query_heads, key_heads, features in ((16, 8, 128), (5, 3, 80), (64, 8, 256)):
        query, key = (ones(2, 5, heads, features) for heads in (query_heads, key_heads))
        angles = torch.ones(1, 5, features // 2)
        backward(torch.cat(rope(query, key, angles, angles), dim=2))


def normed_rope() -> None:
    from d9d_triton.normed_rope import normed_rope

    for query_heads, key_heads, features in ((16, 8, 128), (5, 3, 80), (64, 8, 256)):
        query, key = (ones(2, 5, heads, features) for heads in (query_heads, key_heads))
        angles = torch.ones(1, 5, features // 2)
        for of_weight in (torch.bfloat16, torch.float32):
            weights = (ones(features, dtype=of_weight) for _ in range(2))
            backward(torch.cat(normed_rope(query, key, *weights, angles, angles, 1e-6), dim=2))


def attention_inputs() -> None:
    from d9d_triton.joint.attention_inputs import attention_inputs

    for query_heads, key_heads, features in ((16, 8, 128), (5, 3, 80)):
        angles = torch.ones(1, 5, features // 2)
        for dtype, of_norm in DTYPES:
            weights = [ones(heads * features, 8, dtype=dtype) for heads in (query_heads, key_heads, key_heads)]
            norms = (ones(features, dtype=of_norm) for _ in range(2))
            backward(torch.cat(attention_inputs(ones(2, 5, 8, dtype=dtype), *weights, *norms, angles, angles, 1e-6), 2))


def gradient_power() -> None:
    from d9d_triton.gradient_power import SumOfSquares

    for dtype in (torch.bfloat16, torch.float32):
        SumOfSquares()([torch.ones(70_000, dtype=dtype), torch.ones(9, dtype=dtype)[1:]], torch.device("cpu"))


def adamw() -> None:
    from d9d_triton.adamw import FusedAdamW

    config, plain, rounding = (
        import_module(f"d9d_optim.optimizer.{name}") for name in ("config", "adamw", "stochastic_adamw")
    )
    for dtype, of_gradient in DTYPES:
        for stochastic in (False, True) if dtype == torch.bfloat16 else (False,):
            weight = nn.Parameter(torch.ones(3000, dtype=dtype))
            weight.grad_dtype = of_gradient
            weight.grad = torch.ones(3000, dtype=of_gradient)
            named = {"weight": weight}
            optimizer: Any = plain.AdamW(config.AdamWConfig(), named)
            if stochastic:
                optimizer = rounding.StochasticAdamW(config.StochasticAdamWConfig(), named)
            (slot,) = optimizer.op_slots().values()
            slot.bind("triton", FusedAdamW(stochastic=stochastic))
            optimizer.init_state()
            optimizer.divide_gradients(torch.tensor(2.0))
            optimizer.step(torch.tensor(True))


def gated_delta_rule() -> None:
    from d9d_triton.gated_delta_rule import gated_delta_rule

    # float32 heads of 128 and more features take half a minute each
    for dtype, key_dim, value_dim, shared, separate in (
        (torch.bfloat16, 128, 128, 2, True),
        (torch.bfloat16, 128, 128, 1, False),
        (torch.float16, 64, 96, 1, True),
        (torch.bfloat16, 256, 256, 1, False),
        (torch.float32, 16, 16, 1, True),
    ):
        query, key = (ones(1, 130, 2, key_dim, dtype=dtype) for _ in range(2))
        value, beta = ones(1, 130, 2 * shared, value_dim, dtype=dtype), ones(1, 130, 2 * shared, dtype=dtype)
        decay = ones(1, 130, 2 * shared, dtype=torch.float32)
        documents = torch.zeros(1, 130, dtype=torch.int64) if separate else None
        backward(gated_delta_rule(query, key, value, decay, beta, documents))


def permutation() -> None:
    from d9d_triton.permutation import permute, unpermute

    for choices, features in ((8, 2048), (6, 33)):
        slots = torch.arange(4 * choices)
        places = slots.view(4, choices)
        backward(permute(ones(4, features), slots, places))
        backward(unpermute(ones(4 * choices, features), slots, places, ones(4, choices, dtype=torch.float32)))
        backward(unpermute(ones(4 * choices, features).detach(), slots, places, ones(4, choices)))
        backward(unpermute(ones(4 * choices, features), slots, places, ones(4, choices).detach()))


def linear_cross_entropy() -> None:
    from d9d_triton.linear_cross_entropy.backend import LinearCrossEntropy, LinearCrossEntropyByWords

    targets = torch.tensor([1, -100, 0])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for words in (20_000, 50_257, 2):  # several blocks, their last one in part, and none that is whole
            loss, _ = LinearCrossEntropy().with_ranks(ones(3, 8, dtype=dtype), ones(words, 8, dtype=dtype), targets)
            backward(loss)
            inputs = ones(3, 8, dtype=dtype), ones(words, 8, dtype=dtype), targets
            backward(LinearCrossEntropyByWords().with_ranks(*inputs, size=11_712)[0])
    LinearCrossEntropy()(ones(3, 8), ones(20_000, 8), targets)


LAUNCHES: Mapping[str, Callable[[], None]] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "silu_mul": silu_mul,
    "swiglu": swiglu,
    "low_rank_linear": low_rank_linear,
    "rope": rope,
    "normed_rope": normed_rope,
    "attention_inputs": attention_inputs,
    "gradient_power": gradient_power,
    "gated_delta_rule": gated_delta_rule,
    "permutation": permutation,
    "adamw": adamw,
    "linear_cross_entropy": linear_cross_entropy,
}


def launch_everything() -> None:
    for launch in LAUNCHES.values():
        launch()


@pytest.mark.parametrize("capability", [90, 86, 80])
def test_every_kernel_compiles(capability: int) -> None:
    compiled = compile_launches("d9d_triton", __file__, "launch_everything", (capability,))
    missing = [name for name, capabilities in compiled.items() if not capabilities]
    assert compiled
    assert not missing, f"nothing in LAUNCHES launches {missing}"
