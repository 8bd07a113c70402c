"""Declaration of tasks, inference tasks, metrics, heads, backends of ops in PyTorch, and a capability."""

from __future__ import annotations

from collections.abc import Iterable

from d9d_core.plugin import CapabilitySpec, HeadSpec, InferenceTaskSpec, KernelSpec, MetricSpec, Ref, TaskSpec, hookimpl

D9D_API = 2
#: Operators that compute attention: torch's fused ones, and d9d's op for queries at some positions.
_SDPA = ("aten._scaled_dot_product_*", "d9d_nn.attention_of_queries")


@hookimpl
def d9d_tasks() -> Iterable[TaskSpec]:
    """Declare the tasks of language models."""
    yield TaskSpec(
        name="causal_lm",
        summary="Next-token prediction; one loss term, cross_entropy.",
        config=Ref("d9d_nn.causal_lm.config:CausalLMConfig"),
        build=Ref("d9d_nn.causal_lm.task:CausalLM"),
        reads={"tokens": 2, "targets": 2},
        observes=frozenset({"token_loss", "targets"}),
        on_demand=frozenset({"hidden_states", "token_ranks", "weights"}),
        requires=frozenset({"model:causal_lm"}),
    )
    yield TaskSpec(
        name="classification",
        summary="One label per sample; one loss term, cross_entropy.",
        config=Ref("d9d_nn.classification.config:ClassificationConfig"),
        build=Ref("d9d_nn.classification.task:Classification"),
        reads={"tokens": 2, "labels": 1},
        observes=frozenset({"class_logits", "labels"}),
        on_demand=frozenset({"hidden_states"}),
        # No head is required here: the heads of a model depend on its config, which the task's check reads.
    )
    yield TaskSpec(
        name="dpo",
        summary="Direct preference optimisation over pairs of texts; one loss term, dpo.",
        config=Ref("d9d_nn.preference.config:DpoConfig"),
        build=Ref("d9d_nn.preference.task:Dpo"),
        reads={"tokens": 2, "targets": 2, "samples": 1},
        observes=frozenset({"chosen_rewards", "rejected_rewards"}),
        requires=frozenset({"model:causal_lm"}),
    )
    yield TaskSpec(
        name="distillation",
        summary="Next-token distribution of a teacher in the same job; loss terms divergence and cross_entropy.",
        config=Ref("d9d_nn.distillation.config:DistillationConfig"),
        build=Ref("d9d_nn.distillation.task:Distillation"),
        reads={"tokens": 2, "targets": 2},
        observes=frozenset({"targets"}),
        requires=frozenset({"model:causal_lm"}),
    )
    yield TaskSpec(
        name="embedding",
        summary="Similar embeddings of texts that belong together; one loss term, contrastive.",
        config=Ref("d9d_nn.contrastive.config:EmbeddingConfig"),
        build=Ref("d9d_nn.contrastive.task:Embedding"),
        reads={"tokens": 2, "samples": 1},
        observes=frozenset({"contrastive_loss", "retrieval_hits"}),
    )
    yield TaskSpec(
        name="token_classification",
        summary="One label per token; one loss term, cross_entropy.",
        config=Ref("d9d_nn.classification.config:TokenClassificationConfig"),
        build=Ref("d9d_nn.classification.task:TokenClassification"),
        reads={"tokens": 2, "labels": 2},
        observes=frozenset({"class_logits", "labels"}),
        on_demand=frozenset({"hidden_states"}),
    )


@hookimpl
def d9d_inference_tasks() -> Iterable[InferenceTaskSpec]:
    """Declare the inference tasks of language models."""
    for name, kind, summary in (
        ("log_probs", "LogProbs", "Log-probability of each row, or of each token."),
        ("perplexity", "PerplexityRows", "Loss and perplexity of each row, and of all rows."),
    ):
        yield InferenceTaskSpec(
            name=name,
            summary=summary,
            config=Ref(f"d9d_nn.inference.config:{kind}Config"),
            build=Ref(f"d9d_nn.inference.log_probs:{kind}"),
            reads={"tokens": 2, "targets": 2},
            requires=frozenset({"model:causal_lm"}),
        )
    yield InferenceTaskSpec(
        name="generations",
        summary="Continuation of each row, which is a prompt: greedy or sampled.",
        config=Ref("d9d_nn.inference.config:GenerationsConfig"),
        build=Ref("d9d_nn.inference.generations:Generations"),
        reads={"tokens": 2},
        requires=frozenset({"model:causal_lm"}),
    )
    for name, kind, module, summary in (
        ("classes", "Classes", "classes", "Class of each row, with the probabilities of all classes."),
        ("token_classes", "TokenClasses", "classes", "Class of each token of a row."),
        ("rewards", "Rewards", "classes", "Score of each row from a reward model."),
        ("embeddings", "Embeddings", "embeddings", "Vector of each row from an embedding head."),
        ("hidden_states", "HiddenStates", "hidden_states", "Outputs of chosen layers for each row."),
    ):
        yield InferenceTaskSpec(
            name=name,
            summary=summary,
            config=Ref(f"d9d_nn.inference.config:{kind}Config"),
            build=Ref(f"d9d_nn.inference.{module}:{kind}"),
            reads={"tokens": 2},
        )


@hookimpl
def d9d_metrics() -> Iterable[MetricSpec]:
    """Declare the metrics ``perplexity`` and ``preference``."""
    yield MetricSpec(
        name="perplexity",
        summary="Exponential of the mean token loss.",
        config=Ref("d9d_nn.causal_lm.config:PerplexityConfig"),
        build=Ref("d9d_nn.causal_lm.perplexity:Perplexity"),
        reads=frozenset({"token_loss", "targets"}),
    )
    yield MetricSpec(
        name="preference",
        summary="Implicit rewards of chosen and rejected texts, their margin and accuracy.",
        config=Ref("d9d_nn.preference.config:PreferenceMetricConfig"),
        build=Ref("d9d_nn.preference.metric:PreferenceMetric"),
        reads=frozenset({"chosen_rewards", "rejected_rewards"}),
    )


@hookimpl
def d9d_heads() -> Iterable[HeadSpec]:
    """Declare the kinds of heads."""
    for name, kind, summary in (
        ("causal_lm", "CausalLM", "Projection to the vocabulary, and the loss of each token."),
        ("classification", "Classification", "Classes of each sample."),
        ("token_classification", "TokenClassification", "Classes of each token."),
        ("embedding", "Embedding", "Vector of each sample."),
        ("hidden_states", "HiddenStates", "Outputs of chosen layers."),
    ):
        yield HeadSpec(name=name, summary=summary, config=Ref(f"d9d_nn.heads.config:{kind}HeadConfig"))


@hookimpl
def d9d_kernels() -> Iterable[KernelSpec]:
    """Declare the op backends that need only PyTorch: its fused kernels, and compositions of its operators."""
    yield KernelSpec(
        name="sdpa",
        summary="torch scaled_dot_product_attention: fused, grouped heads; documents and windows with a mask.",
        op="attention",
        supports=Ref("d9d_nn.ops.attention.sdpa:supports"),
        build=Ref("d9d_nn.ops.attention.sdpa:build"),
        operators=_SDPA,
    )
    for name, kernel in (("flash", "FLASH"), ("cudnn", "CUDNN"), ("efficient", "EFFICIENT")):
        yield KernelSpec(
            name=f"sdpa_{name}",
            summary=f"sdpa limited to torch's {name} kernel; CUDA only, never chosen by itself.",
            op="attention",
            supports=Ref(f"d9d_nn.ops.attention.sdpa_pinned:{kernel}.supports"),
            build=Ref(f"d9d_nn.ops.attention.sdpa_pinned:{kernel}.build"),
            deterministic=name != "cudnn",  # as documented by torch
            operators=_SDPA,
        )
    yield KernelSpec(
        name="flex",
        summary="torch flex_attention: skips keys hidden by documents and windows, no mask of S x S; CUDA only.",
        requires=frozenset({"import:triton"}),
        op="attention",
        supports=Ref("d9d_nn.ops.attention.flex:supports"),
        build=Ref("d9d_nn.ops.attention.flex:build"),
    )
    for op, option in (("capped_attention", "a soft cap of the scores"), ("sink_attention", "learned sinks")):
        yield KernelSpec(
            name="flex",
            summary=f"torch flex_attention with {option}: scores are never in memory; CUDA only.",
            requires=frozenset({"import:triton"}),
            op=op,
            supports=Ref("d9d_nn.ops.attention.flex:supports"),
            build=Ref("d9d_nn.ops.attention.flex:build"),
        )
    yield KernelSpec(
        name="sdpa",
        summary="torch scaled_dot_product_attention with sinks as a key, for queries of some positions on a CPU.",
        op="sink_attention",
        supports=Ref("d9d_nn.ops.attention.sdpa_sinks:supports"),
        build=Ref("d9d_nn.ops.attention.sdpa_sinks:build"),
    )
    yield KernelSpec(
        name="sdpa",
        summary="torch's fused kernels for attention to some keys; no documents, no windows.",
        op="attention_block",
        supports=Ref("d9d_nn.ops.attention.block_sdpa:supports"),
        build=Ref("d9d_nn.ops.attention.block_sdpa:build"),
    )
    yield KernelSpec(
        name="flex",
        summary="torch flex_attention to some keys: skips keys hidden by documents and windows; CUDA only.",
        requires=frozenset({"import:triton"}),
        op="attention_block",
        supports=Ref("d9d_nn.ops.attention.block_flex:supports"),
        build=Ref("d9d_nn.ops.attention.block_flex:build"),
    )
    yield KernelSpec(
        name="torch",
        summary="torch.nn.functional.rms_norm, one fused kernel on CUDA.",
        op="rms_norm",
        supports=Ref("d9d_nn.ops.rms_norm:torch_supports"),
        build=Ref("d9d_nn.ops.rms_norm:torch_build"),
    )
    for op, layer in (("silu_mul", "SwiGLU"), ("gelu_mul", "GeGLU")):
        yield KernelSpec(
            name="recomputed",
            summary=f"The gate of {layer}, computed again in the backward of compiled blocks instead of stored.",
            op=op,
            supports=Ref("d9d_nn.ops.silu_mul:recomputed_supports"),
            build=Ref(f"d9d_nn.ops.{op}:recomputed_build"),
        )
    for op in ("gated_delta_rule", "state_space_rule"):
        yield KernelSpec(
            name="chunked",
            summary="Matrix products within chunks of 64 positions, and one step from chunk to chunk.",
            op=op,
            supports=Ref(f"d9d_nn.ops.{op}:supports"),
            build=Ref(f"d9d_nn.ops.{op}:build"),
        )
    yield KernelSpec(
        name="grouped_mm",
        summary="torch.nn.functional.grouped_mm: all experts in one call; on CUDA bfloat16, without host reads.",
        op="grouped_linear",
        supports=Ref("d9d_nn.ops.grouped_linear_torch:supports"),
        build=Ref("d9d_nn.ops.grouped_linear_torch:build"),
        operators=("aten._grouped_mm",),
    )


@hookimpl
def d9d_capabilities() -> Iterable[CapabilitySpec]:
    """Declare the capability of models that predict tokens, which tasks such as ``causal_lm`` need."""
    yield CapabilitySpec(
        token="model:causal_lm",  # noqa: S106 - a capability token
        summary="the model's last stage turns hidden states and targets into token_loss; see d9d_nn.heads.causal_lm",
    )
