"""Qwen3 dense, whole or as one pipeline stage.

Shapes: B samples, S positions, H features, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.errors import BuildError
from d9d_core.protocols import Stage
from d9d_core.traits import TensorSpec, TensorStyle
from d9d_nn.embedding import TokenEmbedding
from d9d_nn.head import CausalLMHead
from d9d_nn.rms_norm import RMSNorm
from d9d_nn.rope import RotaryEmbedding
from d9d_nn.stages import stage_layers
from torch import Tensor, nn

from d9d_qwen3.block import Qwen3Block
from d9d_qwen3.config import Qwen3Config


class Qwen3(nn.Module):
    """The layers of one stage, with the embedding on the first and the final norm and head on the last.

    Layers are keyed by their index in the whole model, so parameter names do not depend on the stages.

    Args:
        config: of the whole model.
        stage: which part of it.

    Raises:
        BuildError: there are more stages than layers, or tied embeddings would be on two stages.
    """

    def __init__(self, config: Qwen3Config, stage: Stage = Stage()) -> None:  # noqa: B008 - Stage is frozen
        super().__init__()
        if config.tie_embeddings and stage.count > 1:
            raise BuildError(
                f"qwen3: tied embeddings would be on the first and the last of {stage.count} pipeline stages; "
                "set model.tie_embeddings to false, or mesh.pp to 1"
            )
        self.config = config
        self.stage = stage
        std = config.initialization.std
        if stage.is_first:
            self.embedding = TokenEmbedding(config.vocab_size, config.hidden_size, std=std)
        self.rotary = RotaryEmbedding(config.head_dim, theta=config.rope_theta)
        layers = stage_layers(config.num_layers, stage)
        self.layers = nn.ModuleDict({str(index): Qwen3Block(config) for index in layers})
        if stage.is_last:
            self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.head = CausalLMHead(config.hidden_size, config.vocab_size, std=std, tied=config.tie_embeddings)

    def blocks(self) -> Mapping[str, nn.Module]:
        """The layers of this stage."""
        return {f"layers.{index}": layer for index, layer in self.layers.items()}

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Embedding and head are split over the vocabulary, the final norm sees split tokens."""
        plan = {"embedding": TensorStyle.VOCAB} if self.stage.is_first else {}
        if self.stage.is_last:
            plan |= {"norm": TensorStyle.SEQUENCE, "head": TensorStyle.VOCAB}
        return plan

    def boundary(self, microbatch: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """``hidden`` [B, S, H] in the dtype of this stage's parameters; nothing on the last stage."""
        if self.stage.is_last:
            return {}
        dtype = next(self.parameters()).dtype
        return {"hidden": TensorSpec((*microbatch["tokens"].shape, self.config.hidden_size), dtype)}

    def forward(
        self,
        *,
        tokens: Tensor | None = None,
        hidden: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run this stage.

        Args:
            tokens: int64 [B, S], for the first stage.
            hidden: [B, S, H], for later stages: what the previous one returned.
            positions: int64 [B, S], position inside the document; counted from the sample's start if ``None``.
            documents: int64 [B, S]; tokens only see their own document. ``None`` if a sample is one document.
            targets: int64 [B, S], -100 where nothing is predicted; only the last stage reads them.

        Returns:
            ``{"hidden": [B, S, H]}``; from the last stage ``{"token_loss": float32 [B, S]}`` with targets, else
            ``{"logits": [B, S, V]}``.

        Raises:
            ValueError: the first stage got no tokens, or a later one no hidden states.
        """
        if self.stage.is_first:
            if tokens is None:
                raise ValueError("the first stage of qwen3 needs tokens")
            hidden = self.embedding(tokens)
        if hidden is None:
            raise ValueError(f"stage {self.stage.index} of qwen3 needs hidden, what the previous stage returned")
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotation = self.rotary(positions)
        for layer in self.layers.values():
            hidden = layer(hidden, rotation, documents)
        if not self.stage.is_last:
            return {"hidden": hidden}
        tied_weight = self.embedding.weight if self.config.tie_embeddings else None
        outputs: dict[str, Tensor] = self.head(self.norm(hidden), targets, tied_weight)
        return outputs
