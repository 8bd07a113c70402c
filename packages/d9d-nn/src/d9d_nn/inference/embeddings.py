"""Inference task ``embeddings``: output of an embedding head for each row."""

from __future__ import annotations

from collections.abc import Mapping

from d9d_core.inference import ROW, Columns
from torch import Tensor

from d9d_nn.inference.classes import HeadReader


class Embeddings(HeadReader):
    """Inference task of embeddings, pooled and normalised by the head."""

    kind = "embedding"
    output = "embedding"
    #: Texts get an end-of-text token, because the head is trained with the texts of pairs, which have one.
    text_inputs = "with_end"

    @property
    def columns(self) -> Mapping[str, str]:
        return {ROW: "number of the row in the input, from 0", "embedding": "vector of the row, float32"}

    def rows(self, kept: Mapping[str, Tensor]) -> Columns:
        """Make the output rows of a microbatch from the tensors that :meth:`process` returned for it."""
        numbers, values = self._each(kept)
        return {ROW: numbers, "embedding": list(values.numpy())}
