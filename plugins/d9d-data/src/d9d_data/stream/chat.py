"""Streams of conversations and preference pairs, rendered by a chat template, and of records of token ids."""

from __future__ import annotations

from collections.abc import Callable

from d9d_core.data import DataContext

from d9d_data.chat.template import ChatTemplate
from d9d_data.config import ChatConfig, ModelTextConfig, PackableConfig, PreferenceConfig, TokensConfig
from d9d_data.corpus.prepare import Corpus, prepare_for
from d9d_data.stream.binned import BinStream
from d9d_data.stream.documents import DocumentStream, open_documents
from d9d_data.stream.one_pass import OnePassStream
from d9d_data.stream.text import TextStream, open_text
from d9d_data.tokenizer.file import find_tokenizer_file


def build_chat(config: ChatConfig, context: DataContext) -> DocumentStream | TextStream | BinStream | OnePassStream:
    """Prepare the conversations (once, then from the cache) and open their stream.

    Raises:
        DataError: the data, the template or the batch size is invalid; the message says how to correct it.
    """
    config, corpus = prepare_for(config, context)
    _warn_of_dates(config, context.note)
    return _open(config, context, corpus)


def build_tokens(config: TokensConfig, context: DataContext) -> DocumentStream | TextStream | BinStream | OnePassStream:
    """Prepare the records of token ids (once, then from the cache) and open their stream.

    Raises:
        DataError: the data or the sizes are unusable; the message says what to change.
    """
    config, corpus = prepare_for(config, context)
    return _open(config, context, corpus)


def build_preference(config: PreferenceConfig, context: DataContext) -> DocumentStream | OnePassStream:
    """Prepare the pairs (once, then from the cache) and open their stream: two rows per pair, chosen and rejected.

    Raises:
        DataError: the data, the template or the batch size is invalid; the message says how to correct it.
    """
    config, corpus = prepare_for(config, context)
    _warn_of_dates(config, context.note)
    return open_documents(config, context, corpus)


def _open(
    config: PackableConfig, context: DataContext, corpus: Corpus
) -> DocumentStream | TextStream | BinStream | OnePassStream:
    """Stream of a corpus, packed as the config says."""
    if config.packing == "none":
        return open_documents(config, context, corpus)
    return open_text(config, context, corpus)


def _warn_of_dates(config: ModelTextConfig, note: Callable[[str], None]) -> None:
    """Warn if the template renders the current date, so that data prepared on another day differs."""
    assert config.tokenizer is not None
    template = ChatTemplate.find(
        find_tokenizer_file(config.tokenizer, only_files=True), arguments=config.template_arguments
    )
    if template is not None and template.depends_on_date:
        note(f"warning: {template.name} renders today's date; prepared data keeps the date of its preparation")
