"""Layers of multi-token prediction, and their loss terms.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2. Depth d = 1 ... D predicts the token d positions after
the next token, by a layer of its own. Shapes: B samples, S positions, H features, D depths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from d9d_core.traits import InputTargets, LossTerm, TensorStyle
from torch import Tensor, nn

from d9d_nn.attention.masks import AttentionMasks
from d9d_nn.auxiliary_loss import add_auxiliary_loss
from d9d_nn.decoder.block import DecoderBlock
from d9d_nn.decoder.config import DecoderConfig
from d9d_nn.further_targets import MTP_TARGETS, NO_TOKEN
from d9d_nn.linear import Linear
from d9d_nn.ops.attention.slot import AttentionSlot
from d9d_nn.rms_norm import RMSNorm
from d9d_nn.rope.rotary_embedding import Rotation


class MultiTokenLayer(nn.Module):
    """Layer of one depth: joins a position's hidden state with the embedding of a later token, equations 21 and 22.

    Rotary positions are the positions of the hidden states. The embedding's position is a constant distance away, which
    does not change attention scores.

    Args:
        config: config of the whole model.
        block: decoder block of the model's family.
        norm: class of the norms.
    """

    def __init__(self, config: DecoderConfig, block: DecoderBlock, *, norm: type[RMSNorm] = RMSNorm) -> None:
        super().__init__()
        self.embedding_first = config.multi_token().first == "embedding"
        of_features = partial(norm, config.hidden_size, eps=config.rms_norm_eps)
        self.embedding_norm = of_features()
        self.hidden_norm = of_features()
        self.projection = Linear(2 * config.hidden_size, config.hidden_size, std=config.initialization.std)
        self.block = block
        self.norm = of_features()

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Styles of norms and projection, which compute a share of the positions; the block has its own plan."""
        return dict.fromkeys(("embedding_norm", "hidden_norm", "projection", "norm"), TensorStyle.SEQUENCE)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotation: Rotation,
        documents: AttentionMasks | Tensor | None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Map normalised hidden states of the previous depth to hidden states of this depth, [B, S, H].

        Args:
            hidden: [B, S, H], normalised output of the previous depth; for the first depth, of the main model.
            embedded: [B, S, H], embeddings of the later tokens.
            rotation: rotation of each position.
            documents: indices of documents int64 [B, S], or the attention masks made from them.
            padding: bool [B, S], padded positions, which experts skip; ``None`` if there is no padding.
        """
        embedded, hidden = self.embedding_norm(embedded), self.hidden_norm(hidden)  # [B, S, H] each
        parts = (embedded, hidden) if self.embedding_first else (hidden, embedded)
        joined = self.projection(torch.cat(parts, dim=-1))  # [B, S, 2H] to [B, S, H]
        out: Tensor = self.norm(self.block(joined, rotation, documents, padding))
        return out


class MultiTokenLayers(nn.ModuleDict):
    """Layers of all depths, with the keys ``"0"``, ``"1"``, ...; adds their loss terms by the trait ``AddsLosses``.

    The term of each depth is the mean loss of its own targets, with the coefficient ``weight / depths`` (equations 24
    and 25). A training loop sets the factors of the terms; without one they are zero and do not change gradients.

    Args:
        config: config of the whole model, with at least one depth.
        blocks: decoder block of each depth.
        norm: class of the norms.
    """

    def __init__(self, config: DecoderConfig, blocks: Sequence[DecoderBlock], *, norm: type[RMSNorm] = RMSNorm) -> None:
        layers = {str(depth): MultiTokenLayer(config, block, norm=norm) for depth, block in enumerate(blocks)}
        super().__init__(layers)
        self._routes = [block.routes for block in blocks]
        self._prediction = config.multi_token()
        for term in self._prediction.terms():
            self.register_buffer(f"{term}_factor", torch.empty((), dtype=torch.float32), persistent=False)
            self.register_buffer(f"{term}_sum", torch.empty((), dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the buffers of the loss terms with zeros."""
        for buffer in self.buffers(recurse=False):
            nn.init.zeros_(buffer)

    def loss_terms(self) -> Mapping[str, LossTerm]:
        """Loss term of each depth, over the targets of this depth in the input ``mtp_targets``."""
        coefficient = self._prediction.weight / self._prediction.depths
        terms = enumerate(self._prediction.terms())
        return {term: LossTerm(coefficient, InputTargets(MTP_TARGETS, depth)) for depth, term in terms}

    def loss_factors(self) -> Mapping[str, Tensor]:
        """Buffers with the factors of the loss terms, by the names of the terms."""
        return {term: self.get_buffer(f"{term}_factor") for term in self._prediction.terms()}

    def loss_sums(self) -> Mapping[str, Tensor]:
        """Buffers with the sums of the loss terms over a microbatch, by the names of the terms."""
        return {term: self.get_buffer(f"{term}_sum") for term in self._prediction.terms()}

    def attention_slots(self) -> Iterator[AttentionSlot]:
        """Attention slots of all blocks, for which the model prepares masks."""
        for layer in self.values():
            if isinstance(layer, MultiTokenLayer):
                yield from layer.block.attention_slots()

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotations: Sequence[Rotation],
        documents: AttentionMasks | Tensor | None,
        tokens: Tensor,
    ) -> list[Tensor]:
        """Compute the normalised hidden states of all depths, D times [B, S, H].

        Args:
            hidden: [B, S, H], normalised output of the main model.
            embedded: [D * B, S, H], embeddings of the later tokens, depth by depth.
            rotations: rotation of each depth.
            documents: indices of documents int64 [B, S], or the attention masks made from them.
            tokens: int64 [B, S, D], ids of the later tokens; experts skip positions without one.
        """
        found = []
        parts = embedded.chunk(len(self))
        for depth, (layer, part, rotation) in enumerate(zip(self.values(), parts, rotations, strict=True)):
            padding = tokens[..., depth] == NO_TOKEN if self._routes[depth] else None
            hidden = layer(hidden, part, rotation, documents, padding)
            found.append(hidden)
        return found

    def add_losses(self, token_loss: Tensor, further: Tensor) -> Tensor:
        """Attach the loss terms to ``token_loss``, whose backward then also starts the backward of the terms.

        Args:
            token_loss: float32 [B, S], losses of the next tokens.
            further: float32 [D * B, S], losses of multi-token prediction, depth by depth.

        Returns:
            A copy of ``token_loss`` with unchanged values.
        """
        for term, losses in zip(self._prediction.terms(), further.chunk(len(self)), strict=True):
            total = losses.sum().float()
            with torch.no_grad():
                self.get_buffer(f"{term}_sum").copy_(total)
            token_loss = add_auxiliary_loss(token_loss, total, self.get_buffer(f"{term}_factor"))
        return token_loss.clone()  # a copy, because FSDP2's hooks could get lost on a view


def lookup_ids(tokens: Tensor) -> Tensor:
    """Token ids for the embedding, int64 [D * B, S], from ``mtp_tokens`` [B, S, D]; 0 where there is no token."""
    return torch.cat(tokens.clamp(min=0).unbind(-1))


def tensors_of_layer(
    config: Any, block: Callable[[Any, int], DecoderBlock], depth: int = 0, *, norm: type[RMSNorm] = RMSNorm
) -> tuple[str, ...]:
    """Names, in checkpoints, of the tensors in the layer of one depth, relative to the layer; allocates nothing.

    Args:
        config: config of the whole model.
        block: function that builds the layer with an index in the whole model.
        depth: number of the layer, from 0.
        norm: class of the norms.
    """
    with torch.device("meta"):
        layer = MultiTokenLayer(config, block(config, config.num_layers + depth), norm=norm)
    return tuple(layer.state_dict())
