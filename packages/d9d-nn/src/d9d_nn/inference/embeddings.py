"""Inference task ``embeddings``: what an embedding head says of each row."""

from __future__ import annotations

from collections.abc import Mapping

from d9d_core.inference import ROW, Columns
from torch import Tensor

from d9d_nn.inference.classes import HeadReader


class Embeddings(HeadReader):
    """Inference task of embeddings, as the head pools and normalises them."""

    kind = "embedding"
    output = "embedding"
    #: The texts of pairs, which the head is trained with, have their end of text.
    text_inputs = "with_end"

    @property
    def columns(self) -> Mapping[str, str]:
        """Columns of the output."""
        return {ROW: "number of the row in the input, from 0", "embedding": "its vector, float32"}

    def rows(self, kept: Mapping[str, Tensor]) -> Columns:
        """Rows of what was kept of a microbatch."""
        numbers, values = self._each(kept)
        return {ROW: numbers, "embedding": list(values.numpy())}
