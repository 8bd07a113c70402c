"""Decoder with heads, whole or as one pipeline stage.

Shapes: B samples, S positions, H features, V vocabulary size, C classes, D features of an embedding, T depths of
multi-token prediction (depth t predicts the token t after the next one).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from d9d_core.attention import DocumentBlocks, Documents
from d9d_core.errors import BuildError
from d9d_core.model import ContextShare, Stage
from d9d_core.traits import TensorStyle
from d9d_core.types import TensorSpec
from torch import Tensor, nn

from d9d_nn.attention.masks import AttentionMasks, prepare_masks, separated_padding
from d9d_nn.decoder.block import DecoderBlock
from d9d_nn.decoder.config import DecoderConfig
from d9d_nn.decoder.multi_token import MultiTokenLayers, lookup_ids
from d9d_nn.decoder.stages import layers_of
from d9d_nn.embedding import SplitTokenEmbedding, TokenEmbedding, token_embedding
from d9d_nn.further_targets import MTP_TARGETS, MTP_TOKENS, further_targets
from d9d_nn.heads.config import head_reads
from d9d_nn.heads.heads import Heads
from d9d_nn.heads.layer_mean import Layers, LayerSums, sums_begun
from d9d_nn.rms_norm import RMSNorm
from d9d_nn.rope.rotary_embedding import LayerRotations, Rotation

#: Function of the config and a layer's index in the whole model that builds the layer.
BuildBlock = Callable[[Any, int], DecoderBlock]


class DecoderModel(nn.Module):
    """Decoder model of one stage: layers, on the first stage the embedding, on the last stage final norm and heads.

    Parameters are called ``embedding.weight``, ``layers.<index>...``, ``norm.weight`` and ``heads.<name>.weight``, with
    the index in the whole model, so that names do not depend on the stages. A tied causal_lm head has no parameter: it
    uses the embedding's weight. If the embedding is on another stage, the last stage has a copy under the same name,
    and training adds up the gradients of parameters with equal names. With ``added_tokens``, the embedding and each
    causal_lm head have ``regular.weight`` and a weight for each group of added tokens, such as ``added.weight``, in
    place of ``weight``.

    With multi-token prediction, the last stage also has ``mtp.<depth>...`` and, like a tied head, the embedding. These
    layers run in training only, with targets, and add their own loss terms
    (:class:`~d9d_nn.decoder.multi_token.MultiTokenLayers`).

    Args:
        config: config of the whole model.
        stage: pipeline stage to build.
        block: function that builds the layer with an index in the whole model.
        heads: whether the last stage has the heads; otherwise it returns the output of the final norm.
        norm: class of the final norm.
        logit_softcap: soft cap of the logits of causal_lm heads; ``None`` for no cap.

    Raises:
        BuildError: the layers cannot be split over the stages in the requested way; a head has a name that a module
            cannot have, or its plugin is not installed; or NTK scaling is used for heads with a single rotary pair.
    """

    def __init__(
        self,
        config: DecoderConfig,
        stage: Stage,
        block: BuildBlock,
        *,
        heads: bool = True,
        norm: type[RMSNorm] = RMSNorm,
        logit_softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.stage = stage
        self.has_heads = heads and stage.is_last
        self._sequence_ranks = 1
        self._context: ContextShare | None = None
        read = (head_reads(head, config.num_layers) for head in config.heads.values())
        self.layer_means: tuple[Layers, ...] = tuple(sorted({layers for sets in read for layers in sets}))
        if stage.is_first:
            self.embedding = _embedding(config)
        self.layer_indices = layers_of(config, stage)
        further = range(config.num_layers, config.num_layers + (config.multi_token().depths if self.has_heads else 0))
        indices = (*self.layer_indices, *further)
        self.rotary = LayerRotations(config.head_dim, [config.rope(index) for index in indices])
        self.layers = nn.ModuleDict({str(index): block(config, index) for index in self.layer_indices})
        self._routes = any(layer.routes for layer in self.layers.values())
        if stage.is_last:
            self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        if self.has_heads and not stage.is_first and (config.tie_embeddings or further):
            self.embedding = _embedding(config)
        self.mtp = MultiTokenLayers(config, [block(config, index) for index in further], norm=norm) if further else None
        if self.has_heads:
            self.heads = Heads(
                config.heads,
                hidden_size=config.hidden_size,
                vocabulary=config.vocab_size,
                num_layers=config.num_layers,
                std=config.initialization.std,
                tied=config.tie_embeddings,
                added_tokens=config.added_tokens,
                softcap=logit_softcap,
            )

    def blocks(self) -> Mapping[str, nn.Module]:
        """Layers of this stage, and on the last stage the layers of multi-token prediction."""
        further = {} if self.mtp is None else {f"mtp.{depth}": layer for depth, layer in self.mtp.items()}
        return {f"layers.{index}": layer for index, layer in self.layers.items()} | further

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Styles of the embedding (split over the vocabulary, unless tokens were added) and of the final norm."""
        plan = {}
        if hasattr(self, "embedding"):
            whole = isinstance(self.embedding, TokenEmbedding)
            plan["embedding"] = TensorStyle.VOCAB if whole else TensorStyle.SEQUENCE
        if self.stage.is_last:
            plan["norm"] = TensorStyle.SEQUENCE
        return plan

    def row_factors(self) -> Mapping[str, int]:
        """Factor by which multi-token prediction multiplies the rows of the embedding and of the heads.

        Both compute all depths in one call, as further samples; empty without multi-token prediction.
        """
        if self.mtp is None:
            return {}
        depths = len(self.mtp)
        heads = {f"heads.{name}": 1 + depths for name in self.heads}
        return {"embedding": depths + int(self.stage.is_first), **heads}

    def split_sequence(self, ranks: int) -> None:
        """Prepare for tensor parallelism, under which each rank has S / ``ranks`` positions of the hidden states."""
        self._sequence_ranks = ranks

    def split_context(self, share: ContextShare) -> None:
        """Prepare for inputs with only this rank's positions; ``documents`` still cover all positions.

        Raises:
            BuildError: the rotation depends on the length of samples.
        """
        scaling = self.config.rope_scaling
        if scaling is not None and scaling.type == "dynamic":
            raise BuildError(
                "context_parallel: model.rope_scaling is dynamic, so rotations depend on the length of whole samples, "
                "which are split over cp; choose another scaling, such as yarn, or leave mesh.cp out"
            )
        self._context = share

    def boundary(self, microbatch: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """Spec of ``hidden`` [B, S, H] in the dtype of this stage's parameters; empty on the last stage.

        If a head reads the mean of several layers, the stage also sends their sum so far, of the same shape and dtype.
        If the ranks of ``tp`` split the positions, S is the number of this rank's positions; if the ranks of ``cp``
        split them, the microbatch holds only this rank's positions.
        """
        if self.stage.is_last:
            return {}
        dtype = next(self.parameters()).dtype
        samples, length = microbatch["tokens"].shape
        state = TensorSpec((samples, length // self._sequence_ranks, self.config.hidden_size), dtype)
        done = range(self.layer_indices.stop)
        return dict.fromkeys(("hidden", *sums_begun(self.layer_means, done)), state)

    def embed(self, tokens: Tensor) -> Tensor:
        """Map token ids int64 [B, S] to the residual stream before the first layer, [B, S, H]."""
        return self.embedding(tokens)  # type: ignore[no-any-return]

    def forward(
        self,
        *,
        tokens: Tensor | None = None,
        hidden: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        lengths: Tensor | None = None,
        ends: Tensor | None = None,
        pooling_mask: Tensor | None = None,
        mtp_tokens: Tensor | None = None,
        mtp_targets: Tensor | None = None,
        attention_blocks: Tensor | None = None,
        **layer_sums: Tensor,
    ) -> dict[str, Tensor]:
        """Run this stage.

        Args:
            tokens: int64 [B, S], for the first stage.
            hidden: [B, S, H], for later stages: returned by the previous stage.
            positions: int64 [B, S], position inside the document; counted from the sample's start if ``None``.
            documents: int64 [B, S]; tokens attend only within their own document. ``None`` if a sample is one document.
            targets: int64 [B, S], -100 where nothing is predicted; only causal_lm heads read them.
            lengths: int64 [B], tokens of each right-padded sample; experts and heads that pool leave out the padding
                after these tokens. ``None`` if there is no padding.
            ends: int64 [B, N], where each row of packed samples ends, 0 after the last row; heads that pool then return
                a result for each row, [B, N, C] and [B, N, D]. ``None`` pools samples.
            pooling_mask: bool or integers [B, S], of all positions; heads with masked pooling average the positions
                with other values than zero.
            mtp_tokens: int64 [B, S, T], for multi-token prediction in training, see
                :func:`~d9d_nn.further_targets.further_targets`. A model that has all stages and all positions computes
                both inputs itself if they are ``None``.
            mtp_targets: int64 [B, S, T], targets of the depths; given together with ``mtp_tokens``.
            attention_blocks: int64 [B, S], of all positions, for ``attention_mask`` prefix and blocks: tokens of a
                document with equal numbers attend to each other in both directions; negative outside of blocks.
            layer_sums: [B, S, H] each, for later stages: the other outputs of the previous stage.

        Returns:
            Before the last stage, the tensors named by :meth:`boundary`. From the last stage without heads, the
            normalised ``{"hidden": [B, S, H]}``. With one head: ``{"token_loss": float32 [B, S]}`` with targets, else
            ``{"logits": [B, S, V]}``, or ``{"class_logits": float32 [B, C]}`` ([B, S, C] from a token_classification
            head), ``{"embedding": float32 [B, D]}``, or ``{"hidden_states": [B, S, H]}`` ([B, S, L, H] of L layers).
            Outputs of several heads are called ``"<head>/<name>"``; with several heads,
            causal_lm heads run only with targets.

        Raises:
            ValueError: the first stage got no tokens, a later stage did not get all outputs of the previous stage, or
                the last stage needs ``mtp_tokens`` and ``mtp_targets`` and did not get them; or ``attention_blocks`` is
                missing, or given to a model that has no such blocks.
            TypeError: an input is unknown.
        """
        further = self._further(tokens, targets, documents, lengths, mtp_tokens, mtp_targets)
        ahead = None
        if self.stage.is_first:
            if tokens is None:
                raise ValueError(f"the first pipeline stage of {self.config.name} needs the input 'tokens'")
            if further is None:
                hidden = self.embed(tokens)
            else:
                # One look-up of all depths, because hooks and wrappers of the embedding expect one call per forward.
                ids = torch.cat((tokens, lookup_ids(further.tokens)))
                sizes = [len(tokens), len(ids) - len(tokens)]
                # Split without views, because compiled layers guard on views, and would be compiled twice.
                hidden, ahead = torch.unsafe_split_with_sizes(self.embed(ids), sizes)
        if hidden is None:
            name = self.config.name
            raise ValueError(
                f"pipeline stage {self.stage.index} of {name} needs 'hidden', an output of the previous stage"
            )
        context = self._context
        length = hidden.shape[1] * self._sequence_ranks * (1 if context is None else context.ranks)
        places = torch.arange(length, device=hidden.device).unsqueeze(0)
        if context is not None:
            places = context.own(places)  # [1, S / cp]
        counted = None if positions is not None else length
        positions = places if positions is None else positions
        done = range(self.layer_indices.start)
        sums = LayerSums(self.layer_means, self.config.rms_norm_eps, layer_sums, done)
        rotations = self.rotary(positions, lengths, counted)
        blocks = (layer for layer in self.layers.values() if isinstance(layer, DecoderBlock))
        slots = [slot for layer in blocks for slot in layer.attention_slots()]
        if further is not None:
            slots += further.layers.attention_slots()
        masks = prepare_masks(slots, self._masked(documents, lengths, attention_blocks, length), length, hidden.device)
        padding = None
        if lengths is not None and self._routes:
            padding = places >= lengths.unsqueeze(1)
        for (index, layer), rotation in zip(self.layers.items(), rotations, strict=self.mtp is None):
            hidden = layer(hidden, rotation, masks, padding)
            sums.add(int(index), hidden)
        if not self.stage.is_last:
            return {"hidden": hidden, **sums.to_send()}
        final = self.norm(hidden)
        if not self.has_heads:
            return {"hidden": final}
        tied_weight = self.embedding.vocabulary_weight() if self.config.tie_embeddings else None
        if further is not None:
            return self._predict_further(final, ahead, rotations[len(self.layers) :], masks, further, tied_weight)
        outputs: dict[str, Tensor] = self.heads(
            final,
            sums.means(self.norm.factor()),
            targets=targets,
            lengths=lengths,
            ends=ends,
            pooling_mask=pooling_mask,
            tied_weight=tied_weight,
        )
        return outputs

    def _further(
        self,
        tokens: Tensor | None,
        targets: Tensor | None,
        documents: Tensor | None,
        lengths: Tensor | None,
        mtp_tokens: Tensor | None,
        mtp_targets: Tensor | None,
    ) -> _Further | None:
        """Layers and inputs of multi-token prediction; ``None`` if this forward predicts only the next tokens.

        Raises:
            ValueError: the inputs are missing, and this stage cannot compute them.
        """
        if self.mtp is None or targets is None or not self.training:
            return None
        if mtp_tokens is not None and mtp_targets is not None:
            return _Further(self.mtp, targets, mtp_tokens, mtp_targets)
        if tokens is None or self._context is not None:
            raise ValueError(
                f"the last stage of {self.config.name} predicts further tokens (mtp), so it needs '{MTP_TOKENS}' and "
                f"'{MTP_TARGETS}'; compute them from whole samples by further_targets()"
            )
        found = further_targets(tokens, targets, len(self.mtp), documents=documents, lengths=lengths)
        return _Further(self.mtp, targets, found[MTP_TOKENS], found[MTP_TARGETS])

    def _predict_further(
        self,
        final: Tensor,
        ahead: Tensor | None,
        rotations: Sequence[Rotation],
        masks: AttentionMasks,
        further: _Further,
        tied_weight: Tensor | None,
    ) -> dict[str, Tensor]:
        """Outputs of the head. Only the backward of ``token_loss`` includes the losses of multi-token prediction.

        The values of ``token_loss`` [B, S] are the losses of the next tokens alone.

        Args:
            final: normalised output of the last layer, [B, S, H].
            ahead: embeddings of ``further.tokens``, [T * B, S, H], if they were looked up already.
            rotations: rotation of each depth.
            masks: attention masks, shared by all layers.
            further: layers and inputs of multi-token prediction.
            tied_weight: [V, H] for a tied head.
        """
        if ahead is None:
            ahead = self.embed(lookup_ids(further.tokens))
        states = torch.cat(
            (final, *further.layers(final, ahead, rotations, masks, further.tokens))
        )  # [(1 + T) B, S, H]
        targets = torch.cat((further.next, *further.targets.unbind(-1)))  # [(1 + T) B, S]
        # One call for all depths: a sharded vocabulary, deferred gradients and wrappers of the head expect one call.
        joined = self.heads(states, {}, targets=targets, tied_weight=tied_weight)
        samples = len(further.next)
        outputs = {name: tensor[:samples] for name, tensor in joined.items()}
        loss = further.layers.add_losses(outputs["token_loss"], joined["token_loss"][samples:])
        return {**outputs, "token_loss": loss}

    def _masked(
        self, documents: Tensor | None, lengths: Tensor | None, blocks: Tensor | None, length: int
    ) -> Documents:
        """Documents for attention, with blocks if given; unless attention is causal, padding is a separate document.

        Raises:
            ValueError: the model needs blocks and gets none, or the reverse.
        """
        kind = self.config.attention_mask
        if (blocks is not None) != (kind in ("prefix", "blocks")):
            problem = "has no use for" if blocks is not None else "needs"
            raise ValueError(
                f"{self.config.name} with attention_mask {kind} {problem} the input 'attention_blocks', the block of "
                "each position; see the field attention_mask"
            )
        if kind != "causal" and lengths is not None:
            documents = separated_padding(documents, lengths, length)
        return documents if blocks is None else DocumentBlocks(documents, blocks)


class _Further(NamedTuple):
    """Layers and inputs of multi-token prediction.

    Attributes:
        layers: layers of all depths.
        next: targets of the main model, int64 [B, S].
        tokens, targets: inputs and targets of the depths, int64 [B, S, T].
    """

    layers: MultiTokenLayers
    next: Tensor
    tokens: Tensor
    targets: Tensor


def _embedding(config: DecoderConfig) -> TokenEmbedding | SplitTokenEmbedding:
    """Embedding of a model; it has the same name and initial weights on every stage."""
    return token_embedding(config.vocab_size, config.added_tokens, config.hidden_size, std=config.initialization.std)
