"""Floating point operations of a training step."""

from __future__ import annotations

from d9d_nn.decoder.config import DecoderConfig
from d9d_nn.heads.config import ClassificationHeadConfig, EmbeddingHeadConfig, TokenClassificationHeadConfig


def training_flops_per_token(config: DecoderConfig, sequence_length: int) -> float:
    """FLOPs per token, forward and backward: ``6 x matmul parameters + 12 x layers x heads x head_dim x keys``.

    A matmul parameter takes one multiplication and one addition, once in the forward and twice in the backward. The
    embedding look-up is not a matmul; each causal_lm or token_classification head is one, tied or not. In a layer with
    experts, only the router and the experts of one token count. A classification head and the projection of an
    embedding head count once per sample. The second term counts attention scores and the mixing of values (Chowdhery et
    al. 2022, "PaLM", appendix B); if values have another size than keys, head_dim is the mean of both. keys is the
    average number of keys that a token attends to: half of the sequence, all of it if attention is bidirectional, or
    less with a sliding window; see :meth:`DecoderConfig.attended_keys`. A layer without
    attention has another second term, see :meth:`DecoderConfig.mixing_flops`. Recomputation is not counted. With
    several heads, all heads are assumed to be trained.
    """
    matmul_parameters = layer_parameters(config) + head_parameters(config, sequence_length)
    mixing = sum(config.mixing_flops(layer, sequence_length) for layer in range(config.num_layers))
    return 6.0 * matmul_parameters + mixing


def layer_parameters(config: DecoderConfig) -> int:
    """Matmul parameters of all layers that one token uses."""
    layers = range(config.num_layers)
    return sum(config.mixer_parameters(layer) + config.feed_forward_parameters(layer) for layer in layers)


def head_parameters(config: DecoderConfig, sequence_length: int) -> float:
    """Matmul parameters of all heads per token; heads that run once per sample count proportionally."""
    words = sum(config.vocab_size for head in config.heads.values() if head.kind == "causal_lm")
    classes = sum(head.num_classes for head in config.heads.values() if isinstance(head, ClassificationHeadConfig))
    tags = sum(head.num_classes for head in config.heads.values() if isinstance(head, TokenClassificationHeadConfig))
    mapped = sum(head.projection or 0 for head in config.heads.values() if isinstance(head, EmbeddingHeadConfig))
    return config.hidden_size * (words + tags + (classes + mapped) / sequence_length)
