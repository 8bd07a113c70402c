"""How much arithmetic training takes."""

from __future__ import annotations

from d9d_nn.heads.config import ClassificationHeadConfig

from d9d_qwen3.config import Qwen3Config


def training_flops_per_token(config: Qwen3Config, sequence_length: int) -> float:
    """Forward and backward of one token: ``6 x matmul parameters + 12 x layers x heads x head_dim x keys``.

    A matmul parameter costs one multiply and one add, once forward and twice backward. The embedding look-up is no
    matmul; each causal_lm head is one, tied or not. A classification head works once per sample, an embedding head has
    no matmul. The second term is the scores and the mixing of values (Chowdhery et al. 2022, "PaLM", appendix B); keys
    are what a token sees on average: half of the sequence, less with a sliding window. Recomputation is not counted.
    With several heads, the count is that of a step that trains them all.
    """
    attention = config.num_attention_heads * config.head_dim
    projections = config.hidden_size * (2 * attention + 2 * config.num_key_value_heads * config.head_dim)
    ffn = 3 * config.hidden_size * config.intermediate_size
    matmul_parameters = config.num_layers * (projections + ffn) + _heads(config, sequence_length)
    return 6.0 * matmul_parameters + 12.0 * attention * _keys(config, sequence_length)


def _keys(config: Qwen3Config, sequence_length: int) -> float:
    """Keys that one token sees on average, over all layers together."""
    full = min(config.sliding_from_layer, config.num_layers) if config.sliding_window else config.num_layers
    # The triangle of causal attention, without the smaller one that lies beyond the window.
    beyond = max(sequence_length - (config.sliding_window or sequence_length), 0)
    triangle = sequence_length / 2
    return full * triangle + (config.num_layers - full) * (triangle - beyond**2 / (2 * sequence_length))


def _heads(config: Qwen3Config, sequence_length: int) -> float:
    """Matmul parameters of all heads that one token uses."""
    words = sum(config.vocab_size for head in config.heads.values() if head.kind == "causal_lm")
    classes = sum(head.num_classes for head in config.heads.values() if isinstance(head, ClassificationHeadConfig))
    return config.hidden_size * (words + classes / sequence_length)
