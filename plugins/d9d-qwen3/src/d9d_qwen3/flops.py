"""How much arithmetic training takes."""

from __future__ import annotations

from d9d_qwen3.config import Qwen3Config


def training_flops_per_token(config: Qwen3Config, sequence_length: int) -> float:
    """Forward and backward of one token: ``6 x matmul parameters + 6 x layers x heads x head_dim x sequence``.

    A matmul parameter costs one multiply and one add, once forward and twice backward. The embedding look-up is no
    matmul, the head is one, tied or not. The second term is the scores and the mixing of values; causal attention does
    half of the square, so 12 becomes 6 (Chowdhery et al. 2022, "PaLM", appendix B). Recomputation is not counted.
    """
    attention = config.num_attention_heads * config.head_dim
    projections = config.hidden_size * (2 * attention + 2 * config.num_key_value_heads * config.head_dim)
    ffn = 3 * config.hidden_size * config.intermediate_size
    matmul_parameters = config.num_layers * (projections + ffn) + config.vocab_size * config.hidden_size
    return 6.0 * matmul_parameters + 6.0 * config.num_layers * attention * sequence_length
