"""Plugin declaration of the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import KernelSpec, Ref, hookimpl

D9D_API = 2

_TRITON = frozenset({"import:triton"})


@hookimpl
def d9d_kernels() -> Iterator[KernelSpec]:
    """Declare the backends ``triton`` of d9d's ops, and variants such as ``triton_sum``."""
    by_itself = "by itself on CUDA where nothing compiles it"
    for op, supports, build, summary in (
        (
            "linear_cross_entropy",
            "support:linear_cross_entropy",
            "linear_cross_entropy.backend:build",
            "Two passes over the logits, which are overwritten with their gradient; exact.",
        ),
        (
            "vocabulary_parallel_cross_entropy",
            "support:vocabulary_parallel_cross_entropy",
            "linear_cross_entropy.shares:build",
            "The loss with the vocabulary sharded over ranks: two passes over a rank's logits; exact.",
        ),
        (
            "adamw",
            "support:adamw",
            "adamw:build",
            "AdamW in one launch for all tensors of a group, which reads and writes each byte once.",
        ),
        (
            "stochastic_adamw",
            "support:stochastic_adamw",
            "adamw:build_stochastic",
            "AdamW with stochastic rounding in one launch for all tensors of a group.",
        ),
        (
            "gradient_power",
            "support:gradient_power",
            "gradient_power:build",
            "Squares of all gradients for their norm, in one launch per dtype.",
        ),
        ("rms_norm", "rules:rms_norm", "rms_norm:build", f"RMSNorm in one pass each way; {by_itself}."),
        (
            "add_rms_norm",
            "rules:rms_norm",
            "add_rms_norm:build",
            "Residual addition and RMSNorm in one pass each way; by itself on CUDA, in compiled blocks, too.",
        ),
        ("silu_mul", "rules:by_rule", "silu_mul:build", f"SiLU-mul of SwiGLU in one pass each way; {by_itself}."),
        (
            "swiglu",
            "rules:joint",
            "joint.swiglu:build",
            "SwiGLU layer; one product for the gradient of its input, one for the gate and up weight gradients.",
        ),
        ("rope", "rules:by_rule", "rope:build", f"Rotations of queries and keys in one launch; {by_itself}."),
        (
            "normed_rope",
            "rules:by_rule",
            "normed_rope:build",
            "Head norms and rotations in one pass each way; by itself on CUDA, in compiled blocks, too.",
        ),
        (
            "attention_inputs",
            "rules:joint",
            "joint.attention_inputs:build",
            "Projections, head norms and rotations; one product each for row and weight gradients.",
        ),
        (
            "low_rank_linear",
            "rules:low_rank_linear",
            "low_rank_linear:build",
            "Linear layers with LoRA: products add in place; layers on the same input are computed together.",
        ),
        (
            "gated_delta_rule",
            "support:gated_delta_rule",
            "gated_delta_rule:build",
            "Gated delta rule in chunks of 64 positions; by itself on CUDA, in compiled blocks, too.",
        ),
        (
            "gated_delta_rule_from",
            "support:gated_delta_rule",
            "gated_delta_rule:build_from",
            "Gated delta rule from a given state, for context parallelism; by itself on CUDA.",
        ),
        ("permute", "rules:by_rule", "permutation:build_permute", f"Copies of tokens for their experts; {by_itself}."),
        (
            "unpermute",
            "rules:by_rule",
            "permutation:build_unpermute",
            f"Weighted sums of experts' rows in one pass; {by_itself}.",
        ),
    ):
        yield KernelSpec(
            name="triton",
            summary=summary,
            op=op,
            supports=Ref(f"d9d_triton.{supports}"),
            build=Ref(f"d9d_triton.{build}"),
            requires=_TRITON,
        )
    for name, supports, build, summary in (
        (
            "triton_sum",
            "linear_cross_entropy_sum",
            "build_sum",
            "Unweighted sum of losses over tokens, in memory for one chunk of logits; never chosen by itself.",
        ),
        (
            "triton_sum_narrow",
            "linear_cross_entropy_sum_narrow",
            "build_sum_narrow",
            "As triton_sum in the least memory; rounds weight gradients in each chunk; never chosen by itself.",
        ),
        (
            "triton_words",
            "linear_cross_entropy_words",
            "build_words",
            "Any loss in the least memory, for one more product; exact; never chosen by itself.",
        ),
    ):
        yield KernelSpec(
            name=name,
            summary=summary,
            op="linear_cross_entropy",
            supports=Ref(f"d9d_triton.support:{supports}"),
            build=Ref(f"d9d_triton.linear_cross_entropy.backend:{build}"),
            requires=_TRITON,
        )
