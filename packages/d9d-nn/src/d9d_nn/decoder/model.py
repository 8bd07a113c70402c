"""Decoder with heads, whole or as one pipeline stage.

Shapes: B samples, S positions, H features, V words of the vocabulary, C classes, D features of an embedding.
"""

from __future__ import annotations

from d9d_core.model import Stage
from torch import Tensor

from d9d_nn.decoder.backbone import BuildBlock, DecoderBackbone, embedding_of
from d9d_nn.decoder.config import DecoderConfig
from d9d_nn.heads.heads import Heads


class DecoderModel(DecoderBackbone):
    """Model of one pipeline stage: its backbone, and the heads on the last.

    Parameters are called ``embedding.weight``, ``layers.<index>...``, ``norm.weight`` and ``heads.<name>.weight``. A
    tied causal_lm head has none: it takes the embedding's. If that is on another stage, the last one has a copy, under
    the same name: whoever trains the stages adds up the gradients of equally named parameters. With ``added_tokens``,
    the embedding and each causal_lm head have ``regular.weight`` and ``added.weight`` in place of ``weight``.

    Args:
        config: config of the whole model.
        stage: pipeline stage to build.
        block: builds the layer of an index in the whole model.

    Raises:
        BuildError: the layers cannot be split over the stages, or not in the way that the job asks for; or a head has a
            name that a module cannot have.
    """

    def __init__(self, config: DecoderConfig, stage: Stage, block: BuildBlock) -> None:
        super().__init__(config, stage, block)
        if stage.is_last and not stage.is_first and config.tie_embeddings:
            self.embedding = embedding_of(config)
        if stage.is_last:
            self.heads = Heads(
                config.heads,
                hidden_size=config.hidden_size,
                vocabulary=config.vocab_size,
                num_layers=config.num_layers,
                std=config.initialization.std,
                tied=config.tie_embeddings,
                added_tokens=config.added_tokens,
            )

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
        **layer_sums: Tensor,
    ) -> dict[str, Tensor]:
        """Run this stage.

        Args:
            tokens: int64 [B, S], for the first stage.
            hidden: [B, S, H], for later stages: what the previous one returned.
            positions: int64 [B, S], position inside the document; counted from the sample's start if ``None``.
            documents: int64 [B, S]; tokens only see their own document. ``None`` if a sample is one document.
            targets: int64 [B, S], -100 where nothing is predicted; only causal_lm heads read them.
            lengths: int64 [B], tokens of each right-padded sample, beyond which experts compute nothing and heads that
                pool see nothing; ``None`` if there is no padding.
            ends: int64 [B, N], where each row of packed samples ends, 0 behind the last; heads that pool then answer
                for each row, [B, N, C] and [B, N, D]. ``None`` pools samples.
            layer_sums: [B, S, H] each, for later stages: what else the previous one returned.

        Returns:
            Before the last stage what :meth:`boundary` names. From the last one, if it has one head:
            ``{"token_loss": float32 [B, S]}`` with targets, else ``{"logits": [B, S, V]}``, or
            ``{"class_logits": float32 [B, C]}``, of a token_classification head [B, S, C], or
            ``{"embedding": float32 [B, D]}``. Several heads answer as ``"<head>/<name>"``, causal_lm heads among them
            only with targets.

        Raises:
            ValueError: the first stage got no tokens, or a later one not all that the previous one returned.
            TypeError: an input is unknown.
        """
        states, means = self.run(tokens, hidden, positions, documents, lengths, layer_sums)
        if not self.stage.is_last:
            return states
        outputs: dict[str, Tensor] = self.heads(
            states["hidden"],
            means,
            targets=targets,
            lengths=lengths,
            ends=ends,
            tied_weight=self.embedding.vocabulary_weight() if self.config.tie_embeddings else None,
        )
        return outputs
