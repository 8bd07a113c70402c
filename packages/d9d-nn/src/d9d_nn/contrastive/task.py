"""Task ``embedding``: makes embeddings of texts that belong together similar, and of other texts dissimilar.

The negatives of a query are the texts of all other queries of the step, over all ranks and microbatches. The loss of a
microbatch therefore depends on all other microbatches, and there are two passes (Gao et al. 2021, "Scaling Deep
Contrastive Learning Batch Size under Memory Limited Setup"): the first pass, without gradients, computes all embeddings
and the gradient of the loss with respect to each embedding; the second pass backpropagates these gradients through the
model. The result equals one backward over the whole batch, with the memory of one microbatch, in every layout.

Shapes: B queries, N texts for each (the first belongs to it, the others are negatives), S positions, D features. Row
``(1 + N) i`` of a microbatch is query i, followed by its texts. A row of length zero is absent; without a query or its
own text, the query is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from d9d_core.errors import JobError
from d9d_core.first_pass import DataRanks, FirstPass
from d9d_core.model import PositionShare
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch
from torch import Tensor

from d9d_nn.contrastive.config import EmbeddingConfig
from d9d_nn.contrastive.loss import contrast
from d9d_nn.heads.choice import read_output
from d9d_nn.microbatch import (
    check_fields,
    counts_samples,
    own_positions_of_samples,
)
from d9d_nn.text_task import TextTask

_TERM = "contrastive"
#: Names of the tensors that the first pass adds to a microbatch: loss of each query, gradient of each embedding, and
#: whether a query's own text is the most similar one.
_LOSS, _GRADIENT, _HITS = "contrastive_loss", "embedding_gradient", "retrieval_hits"


class Embedding(TextTask):
    """Task of contrastive training with one loss term, ``contrastive``: the mean over the queries.

    Microbatches have ``tokens`` int64 [B (1 + N), S], right-padded, and ``samples`` int64 [B]; optional are ``lengths``
    int64 [B (1 + N)], ``positions``, ``documents`` and ``pooling_mask``. The model's last stage returns ``embedding``
    float32 [B (1 + N), D].

    Args:
        config: temperature and direction.
    """

    term = _TERM
    head_kind = "embedding"
    further_inputs = ("pooling_mask",)
    reads_targets = False

    def __init__(self, config: EmbeddingConfig) -> None:
        self.config = config

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Weight of the loss term: the number of queries that have tokens and whose own (first) text has tokens.

        Zero on a rank of ``cp`` that does not count samples.
        """
        present = _present(microbatch)
        counted = (present[:, 0] & present[:, 1]).sum(dtype=torch.float32)
        return {_TERM: counted if counts_samples(microbatch) else torch.zeros_like(counted)}

    def split_positions(self, microbatch: Microbatch, share: PositionShare) -> Microbatch:
        """This rank's positions of the microbatch; the head pools over all ranks, so only one rank counts the queries.

        Raises:
            ValueError: the positions cannot be divided evenly over the ranks.
            JobError: the model needs ``attention_blocks`` and the data gives none, or the reverse.
        """
        return own_positions_of_samples(self._with_blocks(microbatch), share)

    @property
    def first_pass(self) -> FirstPass:
        """Choice of the model for the first pass: the trained model."""
        return FirstPass("model")

    def first_inputs(self, microbatch: Microbatch) -> StageInputs:
        """Model inputs of the first pass, the same as in the second pass.

        Raises:
            JobError: the dataset does not give queries with texts, or the ``attention_blocks`` that the model needs.
        """
        check_fields(microbatch, self.config.name, "samples")
        rows, samples = len(microbatch["tokens"]), len(microbatch["samples"])
        if not samples or rows < 2 * samples or rows % samples:
            raise JobError(
                f"data: task 'embedding' needs a query and its texts per sample, but the dataset gives {rows} rows for "
                f"{samples} samples; use a dataset of queries with texts"
            )
        return self.inputs(microbatch)

    def first_outputs(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Embeddings by sample, float32 [B, 1 + N, D], and whether each row has tokens: bool [B, 1 + N].

        Raises:
            JobError: the model did not return ``embedding``.
        """
        embedding = read_output(outputs, "embedding", self.config.head).detach()
        present = _present(microbatch)
        return {"embedding": embedding.view(*present.shape, embedding.shape[-1]), "present": present}

    def complete(self, kept: Sequence[Mapping[str, Tensor]], ranks: DataRanks) -> Sequence[Mapping[str, Tensor]]:
        """Compute each query's loss [B], whether its own text is the most similar, [B], and gradients [B (1 + N), D].

        The gradients are with respect to the embeddings. Collective over ``ranks``.
        """
        sizes = [len(one["embedding"]) for one in kept]
        embeddings = torch.cat([one["embedding"] for one in kept])
        present = torch.cat([one["present"] for one in kept])
        config = self.config
        found = contrast(embeddings[:, 0], embeddings[:, 1:], ranks, config.temperature, config.symmetric, present)
        gradient = torch.cat([found.query_gradient.unsqueeze(1), found.text_gradient], dim=1)
        parts = zip(*(torch.split(tensor, sizes) for tensor in (found.losses, found.hits, gradient)), strict=True)
        return [{_LOSS: loss, _HITS: hits, _GRADIENT: grad.flatten(0, 1)} for loss, hits, grad in parts]

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Sum of the queries' losses; its gradient for the embeddings is the gradient computed after the first pass.

        Raises:
            JobError: the model did not return ``embedding``.
        """
        embedding = read_output(outputs, "embedding", self.config.head)
        surrogate = (embedding * microbatch[_GRADIENT]).sum()
        loss = microbatch[_LOSS].sum() + (surrogate - surrogate.detach())
        # Ranks that do not count queries return zero with zero gradients: all ranks must run the collective backward.
        return {_TERM: loss if counts_samples(microbatch) else 0 * loss}

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Loss of each query, and whether its own text is the most similar text in the step, [B] each.

        Both are empty on a rank of ``cp`` that does not count samples.
        """
        counted = slice(None) if counts_samples(microbatch) else slice(0)
        return {"contrastive_loss": microbatch[_LOSS][counted], "retrieval_hits": microbatch[_HITS][counted]}


def _present(microbatch: Microbatch) -> Tensor:
    """Whether each row (query or text) of each sample has tokens: bool [B, 1 + N]."""
    samples, tokens = len(microbatch["samples"]), microbatch["tokens"]
    if "lengths" not in microbatch:
        return torch.ones(samples, len(tokens) // samples, dtype=torch.bool, device=tokens.device)
    return (microbatch["lengths"] > 0).view(samples, -1)
