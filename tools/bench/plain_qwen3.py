"""Qwen3 as one writes it in plain PyTorch, with transformers' names of parameters. No part of d9d.

Shapes: B samples, S positions, H features, N heads, D features of a head, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Standard deviation of initial weights, epsilon of norms and theta of rotary positions, as in Qwen3.
STD, EPS, THETA = 0.02, 1e-6, 1_000_000.0


class Attention(nn.Module):
    """Grouped-query attention with a norm of each head's queries and keys."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, self.head_dim = values["hidden_size"], values["head_dim"]
        queries, keys = (values[f"num_{kind}_heads"] * self.head_dim for kind in ("attention", "key_value"))
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=EPS)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=EPS)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H], with cosines and sines [1, S, 1, D]."""
        shape = (*hidden.shape[:2], -1, self.head_dim)
        query = _rotated(self.q_norm(self.q_proj(hidden).view(shape)), cos, sin)
        key = _rotated(self.k_norm(self.k_proj(hidden).view(shape)), cos, sin)
        value = self.v_proj(hidden).view(shape)
        # Called through its module, where torch's context_parallel replaces it.
        out = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inside = values["hidden_size"], values["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inside, bias=False)
        self.up_proj = nn.Linear(hidden, inside, bias=False)
        self.down_proj = nn.Linear(inside, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class Block(nn.Module):
    """Block of attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(values["hidden_size"], eps=EPS)
        self.self_attn = Attention(values)
        self.post_attention_layernorm = nn.RMSNorm(values["hidden_size"], eps=EPS)
        self.mlp = FeedForward(values)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H], with cosines and sines [1, S, 1, D]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Backbone(nn.Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.head_dim = values["head_dim"]
        self.embed_tokens = nn.Embedding(values["vocab_size"], values["hidden_size"])
        self.layers = nn.ModuleList([Block(values) for _ in range(values["num_layers"])])
        self.norm = nn.RMSNorm(values["hidden_size"], eps=EPS)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Map tokens [B, S] at positions [1, S] to [B, S, H]."""
        hidden: Tensor = self.embed_tokens(tokens)
        cos, sin = _angles(positions, self.head_dim, hidden.dtype)
        for block in self.layers:
            hidden = block(hidden, cos, sin)
        out: Tensor = self.norm(hidden)
        return out


class PlainQwen3(nn.Module):
    """Dense Qwen3 with a separate head, without tied embeddings.

    Args:
        values: section ``model`` of a job file.

    Raises:
        ValueError: the section describes another model.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        if values["name"] != "qwen3" or values.get("tie_embeddings"):
            raise ValueError("only a dense Qwen3 without tied embeddings is written here")
        self.model = Backbone(values)
        self.lm_head = nn.Linear(values["hidden_size"], values["vocab_size"], bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=STD)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, S, V] of tokens [B, S] at positions [1, S]."""
        logits: Tensor = self.lm_head(self.model(tokens, positions))
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of logits [B, S, V], in float32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _angles(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, S, 1, D] of positions [1, S]."""
    places = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None] * THETA ** (-places / head_dim)
    angles = torch.cat((angles, angles), -1)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [B, S, N, D] by the angles of their positions."""
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin
