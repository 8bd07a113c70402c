"""Configs of the datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from d9d_core.config import PathOrAddress, PathText, PluginConfig, Section, closest
from d9d_core.data import SampleLengths
from pydantic import Field, field_validator, model_validator

#: Sources that need no files: texts of the installed Python, and built-in examples.
PYTHON_SOURCES = ("python:topics", "python:docstrings", "python:sources", "python:kinds")

#: Largest vocabulary, sixty times the largest published ones; tables have an entry for each id.
MAX_VOCABULARY = 1 << 24


class BpeTokenizer(Section):
    """Byte-level BPE tokenizer, trained on the corpus."""

    bpe: int = Field(ge=257, le=MAX_VOCABULARY)
    """Size of the vocabulary: 256 bytes, the end-of-text token, and merges."""


class PreparedConfig(PluginConfig):
    """Shared fields of all datasets whose records are tokenised once and then read from the cache."""

    sources: tuple[PathOrAddress, ...]
    """Files, directories, globs, fsspec addresses; ``hf:DIRECTORY`` saved by the library datasets; ``python:topics``,
    ``python:docstrings``, ``python:sources``, ``python:kinds``. A text file is one document; in a structured file each
    record is one."""
    malformed: Literal["error", "skip"] = "error"
    """Treatment of a record without text in ``field``, a line that is not JSON or a text that is not UTF-8: ``error``,
    or ``skip`` to leave it out and count it."""
    special_tokens: Literal["text", "token"] = "text"
    """Treatment of a special token, such as ``<|im_end|>``, spelled in a text: ``text`` reads it as ordinary text, so
    that a text cannot end a document; ``token`` reads the special token, for corpora with such marks and rendered
    chats."""
    digest: Literal["sampled", "full"] = "sampled"
    """Identity of a corpus above 64 MiB, the key of its prepared data: ``sampled`` uses size, modification time and
    samples of each file; ``full`` uses all bytes."""
    sequence_length: int = Field(ge=1)
    """Positions per sample."""
    split: Literal["train", "held_out"] = "train"
    """Split of the documents to read."""
    held_out: float = Field(default=0.0, ge=0, le=0.5)
    """Fraction of the documents that the train split excludes."""
    shuffle: bool = True
    """Visit the samples of each epoch in a random order drawn from the seed; false keeps the order of the sources."""
    workers: int = Field(default=0, ge=0)
    """Processes that build packs ahead; 0 builds them in this process. The packs do not depend on it."""
    preparation_workers: int | None = Field(default=None, ge=0, le=1024)
    """Processes that tokenise a corpus of more than 64 MiB, once; 0 tokenises in this process; by default the number of
    cores, at most 8. The tokens do not depend on it."""

    @field_validator("sources", mode="before")
    @classmethod
    def _a_list(cls, sources: Any) -> Any:
        if isinstance(sources, str):
            raise ValueError(f"needs a list; write [{sources[:80]}]")  # noqa: TRY004 - pydantic reports ValueErrors
        return sources

    @field_validator("sources")
    @classmethod
    def _known_sources(cls, sources: tuple[str, ...]) -> tuple[str, ...]:
        if not sources:
            raise ValueError(f"needs at least one file, directory, glob, or one of {', '.join(PYTHON_SOURCES)}")
        for source in sources:
            if source.startswith("python:") and source not in PYTHON_SOURCES:
                near = closest(source, PYTHON_SOURCES)
                hint = f"did you mean '{near}'?" if near else f"known: {', '.join(PYTHON_SOURCES)}"
                raise ValueError(f"unknown source '{source}'; {hint}")
            if source.startswith("hf:") and not source.removeprefix("hf:").strip():
                raise ValueError("'hf:' needs the directory of a saved dataset, such as hf:data/train")
            if not source.strip():
                raise ValueError("a source is empty; remove it or give a path")
        return sources

    @model_validator(mode="after")
    def _held_out_documents_exist(self) -> Self:
        if self.split == "held_out" and self.held_out == 0:
            raise ValueError("split 'held_out' needs a held_out fraction above 0, the same as in the training job")
        return self


class TokenizedConfig(PreparedConfig):
    """Shared fields of all datasets that work without a model's tokenizer."""

    tokenizer: PathText | BpeTokenizer | None = None
    """``bytes``, the path of a ``tokenizer.json``, or ``{bpe: 2048}`` to train one on the train split; by default the
    tokenizer of the pretrained model, else ``bytes``."""
    end_of_text: str | None = Field(default=None, min_length=1)
    """Token between documents; by default ``<|endoftext|>``, or with a tokenizer file the token that its files name."""

    @field_validator("tokenizer", mode="before")
    @classmethod
    def _path_or_mapping(cls, tokenizer: Any) -> Any:
        if isinstance(tokenizer, Mapping):
            return BpeTokenizer.model_validate(tokenizer)
        if not isinstance(tokenizer, str | BpeTokenizer | None):
            raise ValueError("use 'bytes', the path of a tokenizer.json, or {bpe: 2048} to train one")  # noqa: TRY004
        return tokenizer


class CorpusConfig(TokenizedConfig):
    """Shared fields of all datasets over a corpus of documents."""

    field: str | None = Field(default=None, min_length=1)
    """Field with the text; required for structured files (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``,
    ``.arrow``, saved datasets). ``meta.text`` is the field ``text`` in the field ``meta``."""


def check_padding(sequence_length: int, multiple: int) -> None:
    """Raise if a sample length is not a multiple of the padding.

    Raises:
        ValueError: the length is no multiple; the message names the nearest multiples.
    """
    if sequence_length % multiple:
        below = sequence_length // multiple * multiple
        options = " or ".join(str(length) for length in (below, below + multiple) if length)
        raise ValueError(
            f"sequence_length {sequence_length} is not a multiple of pad_multiple {multiple}; "
            f"use a sequence_length of {options}, or another pad_multiple"
        )


class PaddedConfig(PreparedConfig):
    """Shared fields of all datasets that pad samples to the longest sample of their microbatch."""

    bucket_window: int | None = Field(default=None, ge=1)
    """Samples sorted by length at a time, a multiple of the batch size; by default up to 64 batches, at most an epoch.
    One batch: no sorting across packs."""
    pad_multiple: int = Field(default=8, ge=1)
    """Divisor of the length of a microbatch: the longest sample is rounded up to a multiple; divides
    ``sequence_length``."""
    too_long: Literal["cut_end", "cut_start", "drop", "error"] = "cut_end"
    """Treatment of a text longer than a sample: cut its end or its beginning, drop its record, or raise an error. Lost
    tokens and records are counted, and shown at each start."""

    @property
    def packs_documents(self) -> bool:
        """Whether a sample holds several documents: false, as a sample is one document with padding after it."""
        return False

    @property
    def sample_lengths(self) -> SampleLengths:
        """Possible sample lengths of a microbatch: the multiples of ``pad_multiple`` up to ``sequence_length``."""
        return SampleLengths(self.pad_multiple, self.sequence_length)

    @model_validator(mode="after")
    def _padding_stays_within_a_sequence(self) -> Self:
        check_padding(self.sequence_length, self.pad_multiple)
        return self


class TextConfig(CorpusConfig):
    """Dataset of texts, tokenised once and packed into sequences of equal length."""

    name: Literal["text"] = "text"
    """Selects the plugin."""
    packing: Literal["concat", "best_fit"] = "concat"
    """``concat`` joins all documents and cuts samples from them; ``best_fit`` fills samples with whole documents
    (best-fit decreasing) and cuts longer ones. The dataset ``documents`` does not pack."""

    @property
    def packs_documents(self) -> bool:
        """Whether a sample holds several documents: true, as documents are packed."""
        return True

    @property
    def sample_lengths(self) -> SampleLengths:
        """Possible sample lengths of a microbatch: only ``sequence_length``."""
        return SampleLengths(self.sequence_length, self.sequence_length)


class DocumentsConfig(PaddedConfig, CorpusConfig):
    """Dataset of documents, tokenised once; each document is a sample, and a step gets documents of similar length."""

    name: Literal["documents"] = "documents"
    """Selects the plugin."""
    sources: tuple[PathOrAddress, ...]
    """As for ``text``."""
    field: str | None = Field(default=None, min_length=1)
    """As for ``text``; if absent ``text`` for ``.jsonl`` files."""
    sequence_length: int = Field(ge=1)
    """Most positions of a sample; ``too_long`` treats longer documents."""
    shuffle: bool = True
    """Visit documents, and packs within a window, in a random order drawn from the seed; false keeps the source
    order."""


class ModelTextConfig(PaddedConfig):
    """Shared fields of datasets that encode records with a model's tokenizer and chat template."""

    malformed: Literal["error", "skip"] = "error"
    """Treatment of a record that is malformed or that the template refuses: ``error``, or ``skip`` to leave it out and
    count it."""
    tokenizer: PathText | None = None
    """Directory of a tokenizer and its chat template, or its ``tokenizer.json``; by default the pretrained model's."""
    template_arguments: dict[str, Any] = {}
    """Further variables of the template, such as ``{enable_thinking: false}``."""
    tool_arguments: Literal["parse", "keep"] = "parse"
    """Treatment of tool arguments that are JSON strings: ``parse`` as inference servers do, or ``keep`` the strings,
    which most templates quote again."""
    sequence_length: int = Field(ge=1)
    """Most positions of a sample."""


class ChatConfig(ModelTextConfig):
    """Dataset of conversations, rendered by the chat template; by default the assistant's tokens are learned."""

    name: Literal["chat"] = "chat"
    """Selects the plugin."""
    sources: tuple[PathOrAddress, ...]
    """Structured files, as for ``text``: records with ``messages`` (and ``tools``) or ``prompt`` and ``completion``."""
    loss: Literal["assistant", "last_turn", "all"] = "assistant"
    """Tokens to learn: all that the assistant writes, only its last turn, or all tokens of the conversation."""
    packing: Literal["none", "concat", "best_fit"] = "none"
    """``none``: one conversation per sample; ``concat``: samples cut from all conversations joined; ``best_fit``: whole
    conversations (best-fit decreasing). Attention stays within a conversation."""

    @property
    def packs_documents(self) -> bool:
        """Whether a sample can have several conversations."""
        return self.packing != "none"

    @property
    def sample_lengths(self) -> SampleLengths:
        """Possible sample lengths of a microbatch: one length if packed, else the multiples of ``pad_multiple``."""
        return SampleLengths(self.sequence_length if self.packs_documents else self.pad_multiple, self.sequence_length)


class PreferenceConfig(ModelTextConfig):
    """Dataset of preference pairs: a prompt with a preferred and a rejected completion."""

    name: Literal["preference"] = "preference"
    """Selects the plugin."""
    sources: tuple[PathOrAddress, ...]
    """Structured files, as for ``text``: records with ``chosen``, ``rejected`` and optional ``prompt`` and
    ``tools``."""
    sequence_length: int = Field(ge=1)
    """Most positions of each text of a pair: the prompt and one completion."""

    @property
    def sample_lengths(self) -> SampleLengths:
        """Possible sample lengths of a microbatch, whose pairs have two rows each."""
        return SampleLengths(self.pad_multiple, self.sequence_length, texts=2)


class LabelledConfig(PaddedConfig, CorpusConfig):
    """Dataset of texts with one label each, or of word lists with one label per word."""

    name: Literal["labelled"] = "labelled"
    """Selects the plugin."""
    sources: tuple[PathOrAddress, ...]
    """Structured files, as for ``text``, or ``python:kinds``."""
    per: Literal["text", "word"] = "text"
    """Labels per ``text``, or per ``word``: records with a list of words and a list of as many labels."""
    field: str | None = Field(default=None, min_length=1)
    """Field of the text, by default ``text``; or of the list of words, by default ``tokens``."""
    pair: str | None = Field(default=None, min_length=1)
    """Field of a second text, joined to the first by the tokenizer's template for pairs."""
    label: str | None = Field(default=None, min_length=1)
    """Field of the label, by default ``label``; or of the labels of words, by default ``labels`` or ``ner_tags``."""
    labels: tuple[str, ...] | None = Field(default=None, min_length=2)
    """Names of the classes in the order of their numbers; by default the labels of the data, sorted, or their
    numbers."""
    sequence_length: int = Field(ge=1)
    """Most positions of a sample; ``too_long`` treats longer texts."""

    @property
    def text_field(self) -> str:
        """Name of the record field with the text or the list of words."""
        return self.field or ("text" if self.per == "text" else "tokens")

    @property
    def gives(self) -> dict[str, int]:
        """Number of dimensions of a microbatch's tensors: tokens [B, S], and labels [B] of texts or [B, S] of words."""
        return {"tokens": 2, "labels": 1 if self.per == "text" else 2}

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Self:
        if self.labels is not None and len(set(self.labels)) != len(self.labels):
            raise ValueError("labels: a name appears twice; name each class once")
        if self.per == "word" and self.pair is not None:
            raise ValueError("pair: only texts with one label can be joined; leave pair out, or use per: text")
        if self.per == "word" and isinstance(self.tokenizer, BpeTokenizer):
            raise ValueError(
                "tokenizer: cannot be trained on lists of words; use 'bytes' or the path of a tokenizer.json"
            )
        return self


class PairsConfig(PaddedConfig, TokenizedConfig):
    """Dataset of queries, each with a relevant document and optional irrelevant documents (negatives)."""

    name: Literal["pairs"] = "pairs"
    """Selects the plugin."""
    sources: tuple[PathOrAddress, ...]
    """Structured files, as for ``text``."""
    query: str = Field(default="query", min_length=1)
    """Field of the query."""
    positive: str = Field(default="positive", min_length=1)
    """Field of the relevant document."""
    negatives: int = Field(default=0, ge=0, le=1024)
    """Number of irrelevant documents in each record; every record has the same number."""
    negative: str | None = Field(default=None, min_length=1)
    """Field of an irrelevant document, or of a list of them; by default ``negative`` or ``negatives``."""
    query_prefix: str = ""
    """Text before each query, such as an instruction."""
    document_prefix: str = ""
    """Text before each document."""
    sequence_length: int = Field(ge=2)
    """Most positions of each text, including its end-of-text token; ``too_long`` treats longer texts, and the
    end-of-text token is kept."""

    @property
    def sample_lengths(self) -> SampleLengths:
        """Possible sample lengths of a microbatch, whose records have one row for the query and one per document."""
        return SampleLengths(self.pad_multiple, self.sequence_length, texts=2 + self.negatives)

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Self:
        if self.query == self.positive:
            raise ValueError(f"query and positive are both '{self.query}'; name two fields")
        if self.negative is not None and not self.negatives:
            raise ValueError("negative has no effect without negatives; give their number too, such as negatives: 1")
        if isinstance(self.tokenizer, BpeTokenizer):
            raise ValueError("tokenizer: cannot be trained on pairs; use 'bytes' or a tokenizer.json")  # noqa: TRY004
        return self
