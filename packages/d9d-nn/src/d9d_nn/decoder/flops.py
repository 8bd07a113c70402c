"""Floating point operations of a training step."""

from __future__ import annotations

from d9d_nn.decoder.config import DecoderConfig
from d9d_nn.heads.config import ClassificationHeadConfig, EmbeddingHeadConfig, TokenClassificationHeadConfig


def training_flops_per_token(config: DecoderConfig, sequence_length: int) -> float:
    """FLOPs per token, forward and backward: ``6 x matmul parameters + 12 x layers x heads x head_dim x keys``.

    A matmul parameter takes one multiplication and one addition, once in the forward and twice in the backward. The
    embedding look-up is not a matmul; each causal_lm or token_classification head is one, tied or not. In the
    feed-forward part of a layer with experts, the router and the experts that one token uses count, shared ones too. A
    classification head and the projection of an embedding head count once per sample. The second term counts attention
    scores and the mixing of values (Chowdhery et al. 2022, "PaLM", appendix B); if values have another size than keys,
    head_dim is the mean of both. keys is the average number of keys that a token attends to: half of the sequence, all
    of it if attention is bidirectional, or less with a sliding window; see :meth:`DecoderConfig.attended_keys`. A layer
    without attention has another second term, see :meth:`DecoderConfig.mixing_flops`. Recomputation is not counted. If
    the model has several output heads, all of them are assumed to be trained. Each depth of multi-token prediction adds
    a layer, its projection, and the head once more.
    """
    layers = range(config.num_layers + config.multi_token().depths)
    matmul_parameters = layer_parameters(config) + head_parameters(config, sequence_length) + further_parameters(config)
    mixing = sum(config.mixing_flops(layer, sequence_length) for layer in layers)
    return 6.0 * matmul_parameters + mixing


def layer_parameters(config: DecoderConfig) -> int:
    """Matmul parameters of all layers that one token uses, without layers of multi-token prediction."""
    return _in_layers(config, range(config.num_layers))


def further_parameters(config: DecoderConfig) -> int:
    """Matmul parameters that multi-token prediction uses for a token: layers, projections, and the head per depth."""
    depths, hidden = config.multi_token().depths, config.hidden_size
    layers = range(config.num_layers, config.num_layers + depths)
    return _in_layers(config, layers) + depths * hidden * (2 * hidden + config.vocab_size)


def _in_layers(config: DecoderConfig, layers: range) -> int:
    return sum(config.mixer_parameters(layer) + config.feed_forward_parameters(layer) for layer in layers)


def head_parameters(config: DecoderConfig, sequence_length: int) -> float:
    """Matmul parameters of all heads per token; heads that run once per sample count proportionally."""
    words = sum(config.vocab_size for head in config.heads.values() if head.kind == "causal_lm")
    classes = sum(head.num_classes for head in config.heads.values() if isinstance(head, ClassificationHeadConfig))
    tags = sum(head.num_classes for head in config.heads.values() if isinstance(head, TokenClassificationHeadConfig))
    mapped = sum(head.projection or 0 for head in config.heads.values() if isinstance(head, EmbeddingHeadConfig))
    return config.hidden_size * (words + tags + (classes + mapped) / sequence_length)
