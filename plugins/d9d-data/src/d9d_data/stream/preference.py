"""Stream of preference pairs, for the dataset ``preference``."""

from __future__ import annotations

from d9d_core.extend import DataContext, State

from d9d_data.chat.preference import SIDES
from d9d_data.config import PreferenceConfig
from d9d_data.corpus.prepare import prepare_for
from d9d_data.stream.chat import learned_facts, warn_of_dates
from d9d_data.stream.documents import DocumentStream


def build_preference(config: PreferenceConfig, context: DataContext) -> PreferenceStream:
    """Prepare the pairs (once, then from the cache) and open their stream.

    Raises:
        DataError: the data, the template or the sizes cannot be used; the text says what to change.
    """
    config, corpus = prepare_for(config, context)
    warn_of_dates(config, context.note)
    return PreferenceStream(config, context, corpus)


class PreferenceStream(DocumentStream):
    """Stream of pairs, each a sample of two rows: chosen and rejected. A pack has pairs of similar length.

    Microbatches of b pairs have ``tokens``, ``targets``, ``positions`` and ``documents`` int64 [2b, S] and ``lengths``
    int64 [2b], as :func:`~d9d_data.stream.padding.pad` returns them; row 2i is the chosen text of the i-th pair, row
    2i + 1 the rejected one. ``samples`` int64 [b] numbers the pairs in the split, the same in every run and layout.
    """

    @property
    def facts(self) -> State:
        """Sizes of this split, and how much of it is learned."""
        unused = {"documents", "cut_documents", "unigram_entropy"}
        facts = {name: fact for name, fact in super().facts.items() if name not in unused}
        return {**facts, "texts": list(SIDES), **learned_facts(self._corpus)}
