"""What d9d-nn offers: the task causal_lm, its metric, and backends of the ops that PyTorch itself has fused."""

from __future__ import annotations

from collections.abc import Iterable

from d9d_core.plugin import CapabilitySpec, KernelSpec, MetricSpec, Ref, TaskSpec, hookimpl

D9D_API = 1


@hookimpl
def d9d_tasks() -> Iterable[TaskSpec]:
    """Next-token prediction."""
    yield TaskSpec(
        name="causal_lm",
        summary="Next-token prediction; one loss term, cross_entropy.",
        config=Ref("d9d_nn.causal_lm.config:CausalLMConfig"),
        build=Ref("d9d_nn.causal_lm.task:CausalLM"),
        requires=frozenset({"model:causal_lm"}),
    )


@hookimpl
def d9d_metrics() -> Iterable[MetricSpec]:
    """Perplexity."""
    yield MetricSpec(
        name="perplexity",
        summary="Exponential of the mean token loss.",
        config=Ref("d9d_nn.causal_lm.config:PerplexityConfig"),
        build=Ref("d9d_nn.causal_lm.perplexity:Perplexity"),
    )


@hookimpl
def d9d_kernels() -> Iterable[KernelSpec]:
    """Ops that PyTorch has fused."""
    yield KernelSpec(
        name="sdpa",
        summary="torch scaled_dot_product_attention: fused, grouped heads, documents by a mask.",
        op="attention",
        supports=Ref("d9d_nn.ops.sdpa:supports"),
        build=Ref("d9d_nn.ops.sdpa:build"),
    )
    yield KernelSpec(
        name="torch",
        summary="torch.nn.functional.rms_norm, one fused kernel on CUDA.",
        op="rms_norm",
        supports=Ref("d9d_nn.ops.rms_norm:torch_supports"),
        build=Ref("d9d_nn.ops.rms_norm:torch_build"),
    )


@hookimpl
def d9d_capabilities() -> Iterable[CapabilitySpec]:
    """What the task asks of a model."""
    yield CapabilitySpec(
        token="model:causal_lm",  # noqa: S106 - a capability token
        summary="the model's last stage turns hidden states and targets into token_loss; see d9d_nn.head",
    )
