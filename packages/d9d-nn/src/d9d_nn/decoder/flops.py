"""Floating point operations of a training step."""

from __future__ import annotations

from d9d_nn.decoder.config import DecoderConfig
from d9d_nn.heads.config import ClassificationHeadConfig, TokenClassificationHeadConfig


def training_flops_per_token(config: DecoderConfig, sequence_length: int) -> float:
    """Operations of one token, forward and backward: ``6 x matmul parameters + 12 x layers x heads x head_dim x keys``.

    A matmul parameter costs one multiply and one add, once forward and twice backward. The embedding look-up is no
    matmul; each causal_lm or token_classification head is one, tied or not. Of the experts of a layer, those of one
    token count, and the router. A classification head works once per sample, an embedding head has no matmul. The
    second term is the scores and the mixing of values (Chowdhery et al. 2022, "PaLM", appendix B); keys are what a
    token sees on average: half of the sequence, less with a sliding window. Recomputation is not counted. With several
    heads, the count is that of a step that trains them all.
    """
    matmul_parameters = layer_parameters(config) + head_parameters(config, sequence_length)
    keys = sum(keys_of(config.window(layer), sequence_length) for layer in range(config.num_layers))
    return 6.0 * matmul_parameters + 12.0 * config.num_attention_heads * config.head_dim * keys


def layer_parameters(config: DecoderConfig) -> int:
    """Matmul parameters of all layers that one token uses."""
    rows = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    feed_forward = sum(map(config.feed_forward_parameters, range(config.num_layers)))
    return config.num_layers * config.hidden_size * rows + feed_forward


def head_parameters(config: DecoderConfig, sequence_length: int) -> float:
    """Matmul parameters of all heads that one token uses; a share of those that work once per sample."""
    words = sum(config.vocab_size for head in config.heads.values() if head.kind == "causal_lm")
    classes = sum(head.num_classes for head in config.heads.values() if isinstance(head, ClassificationHeadConfig))
    tags = sum(head.num_classes for head in config.heads.values() if isinstance(head, TokenClassificationHeadConfig))
    return config.hidden_size * (words + tags + classes / sequence_length)


def keys_of(window: int | None, sequence_length: int) -> float:
    """Number of keys that one token sees on average in a layer."""
    # The triangle of causal attention, without the smaller one that lies beyond the window.
    beyond = max(sequence_length - (window or sequence_length), 0)
    return sequence_length / 2 - beyond**2 / (2 * sequence_length)
