"""Part of ``tools/bench/kernels.py``: a whole block of Qwen3, as it is written, with kernels, and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from kernel_parts import Bench, Function


def measure_block(bench: Bench) -> dict[str, Any]:
    """Measure a block of Qwen3, forward and backward: eager, with the kernels, and compiled."""
    from d9d_core.kernel import OpSignature
    from d9d_core.traits import HasOps, modules_with
    from d9d_nn.ops.attention import sdpa
    from d9d_nn.ops.rms_norm import torch_build
    from d9d_nn.rope.rotary_embedding import RotaryEmbedding
    from d9d_qwen3.block import Qwen3Block
    from d9d_qwen3.config import Qwen3Config
    from d9d_triton import add_rms_norm, normed_rope, rms_norm, silu_mul

    s = bench.sizes
    config = Qwen3Config(
        vocab_size=64, hidden_size=s.hidden, intermediate_size=s.feed_forward, num_layers=1,
        num_attention_heads=s.heads, num_key_value_heads=s.key_heads, head_dim=s.head_size,
    )  # fmt: skip
    torch.manual_seed(0)

    def block() -> Any:
        made = Qwen3Block(config, 0).to(bench.device, torch.bfloat16)
        for module in modules_with(made, HasOps).values():
            for slot in module.op_slots().values():
                if slot.op == "attention":
                    signature = OpSignature("attention", bench.device, "bfloat16", slot.static)
                    slot.bind("sdpa", sdpa.build(signature))
        return made

    def bound(own: Mapping[str, Function]) -> Any:
        made = block()
        for module in modules_with(made, HasOps).values():
            for slot in module.op_slots().values():
                if slot.op in own:
                    slot.bind("bound", own[slot.op])
        return made

    fused = torch_build(OpSignature("rms_norm", bench.device, "bfloat16"))
    own: dict[str, Function] = {
        "rms_norm": rms_norm.rms_norm, "add_rms_norm": add_rms_norm.add_rms_norm,
        "normed_rope": normed_rope.normed_rope, "silu_mul": silu_mul.silu_mul,
    }  # fmt: skip
    both = "normed_rope", "add_rms_norm"
    hidden = bench.draw(s.samples, s.length, s.hidden)
    rotation = RotaryEmbedding(s.head_size, theta=1e6).to(bench.device)(
        torch.arange(s.length, device=bench.device).unsqueeze(0)
    )
    grad = torch.randn_like(hidden)
    found: dict[str, float] = {}
    for name, made, compiled in (
        ("as written", block(), False),
        ("torch's fused norm", bound({"rms_norm": fused}), False),
        ("kernels", bound(own), False),
        ("compiled", block(), True),
        ("compiled, with kernels", bound(own), True),
        ("compiled, with normed_rope alone", bound({"normed_rope": normed_rope.normed_rope}), True),
        ("compiled, with normed_rope and add_rms_norm", bound({op: own[op] for op in both}), True),
    ):
        torch.compiler.reset()
        if compiled:
            made.compile(backend="inductor" if bench.is_gpu else "aot_eager")

        def run(made: Any = made) -> Any:
            return torch.autograd.grad(made(hidden, rotation, None), (hidden, *made.parameters()), grad)

        found[name] = bench.milliseconds(run, most=100)
        bench.clean()
    return {"shape": f"{s.samples} x {s.length} x {s.hidden}, feed-forward {s.feed_forward}", "ms": found}
