"""Training FLOPs of a model of transformers."""

from __future__ import annotations

import torch
from d9d_core.model import Stage
from d9d_nn.attention.core import AttentionCore
from torch import nn

from d9d_transformers.build import build
from d9d_transformers.config import TransformersConfig
from d9d_transformers.experts import RoutedExperts


def training_flops_per_token(config: TransformersConfig, sequence_length: int) -> float:
    """Training FLOPs per token, forward and backward: 6 per element of a matrix, 12 per attention score and feature.

    Scores are counted for all positions of a sequence, or of a window, without the causal half, as in Chowdhery et al.
    2022, "PaLM", appendix B.
    """
    with torch.device("meta"):
        model = build(config, Stage())
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    for experts in (module for module in model.modules() if isinstance(module, RoutedExperts)):
        matrices += sum(bank[0].numel() for bank in experts.bank.parameters()) * experts.chosen
    total = 6.0 * (matrices + model.head_facts.features * model.head_facts.vocabulary)
    for core in model.attention_cores().values():
        assert isinstance(core, AttentionCore)
        facts = core.attention.static
        seen = min(sequence_length, facts["window"] or sequence_length)
        total += 12.0 * facts["query_heads"] * facts["head_dim"] * seen
    return total
