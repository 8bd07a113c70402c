"""Configs of the datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from d9d_core.config import PathOrAddress, PathText, PluginConfig, Section, closest
from d9d_core.data import SampleLengths
from pydantic import Field, field_validator, model_validator

#: Texts that every Python installation brings along.
PYTHON_SOURCES = ("python:topics", "python:docstrings", "python:sources", "python:kinds")

#: Ids of the largest vocabulary: sixty times that of published tokenizers. Tables have an entry for each.
MAX_VOCABULARY = 1 << 24


class BpeTokenizer(Section):
    """Byte-level BPE tokenizer, trained on the corpus."""

    bpe: int = Field(ge=257, le=MAX_VOCABULARY)
    """Size of the vocabulary: 256 bytes, the end-of-text token, and merges."""


class PreparedConfig(PluginConfig):
    """Shared fields of all datasets whose records are tokenised once, and then read from the cache."""

    sources: tuple[PathOrAddress, ...]
    """Files, directories, globs, fsspec addresses; ``hf:DIRECTORY`` that the library datasets saved; ``python:topics``,
    ``python:docstrings``, ``python:sources``, ``python:kinds``. A text file is a document, and so is each record of a
    structured one."""
    malformed: Literal["error", "skip"] = "error"
    """A record without text in ``field``, a line that is no JSON or a text that is not UTF-8: an error, or left out and
    counted."""
    special_tokens: Literal["text", "token"] = "text"
    """Treatment of texts that spell a special token, such as ``<|im_end|>``: as ordinary text, so that no text ends by
    writing so, or as that token, for corpora with marks of their own and for rendered conversations."""
    digest: Literal["sampled", "full"] = "sampled"
    """Identity of a corpus of more than 64 MiB, by which prepared data is found: size, time of change and samples of
    each file, or all bytes."""
    sequence_length: int = Field(ge=1)
    """Positions of a sample."""
    split: Literal["train", "held_out"] = "train"
    """Which documents to read."""
    held_out: float = Field(default=0.0, ge=0, le=0.5)
    """Fraction of the documents that the train split never sees."""
    shuffle: bool = True
    """Visit the samples of each epoch in an order drawn from the seed; false keeps the order of the sources."""
    workers: int = Field(default=0, ge=0)
    """Processes that build packs ahead; 0 builds them where they are asked for. Has no say in what is in them."""
    preparation_workers: int | None = Field(default=None, ge=0, le=1024)
    """Processes that tokenise a corpus of more than 64 MiB, once; 0 tokenises in this process; if absent as many as
    there are cores, and at most 8. Has no say in the tokens."""

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
    """Shared fields of all datasets that can do without a model's tokenizer."""

    tokenizer: PathText | BpeTokenizer | None = None
    """``bytes``, the path of a ``tokenizer.json``, or ``{bpe: 2048}`` to train one on the train split's documents; if
    absent that of the model which training starts from, else ``bytes``."""
    end_of_text: str | None = Field(default=None, min_length=1)
    """Token between documents; if absent ``<|endoftext|>``, and for a tokenizer file what it names or is known for."""

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
    """Field of structured files (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``, ``.arrow``, saved datasets)
    that holds the text; they need it. ``meta.text`` is the field ``text`` in the field ``meta``."""


def check_padding(sequence_length: int, multiple: int) -> None:
    """Refuse a length of samples that padding would exceed.

    Raises:
        ValueError: it does; the text has lengths that would do.
    """
    if sequence_length % multiple:
        below = sequence_length // multiple * multiple
        options = " or ".join(str(length) for length in (below, below + multiple) if length)
        raise ValueError(
            f"sequence_length {sequence_length} is no multiple of pad_multiple {multiple}; "
            f"use a sequence_length of {options}, or another pad_multiple"
        )


class PaddedConfig(PreparedConfig):
    """Shared fields of all datasets whose samples are padded to the longest of their microbatch."""

    bucket_window: int | None = Field(default=None, ge=1)
    """Samples sorted by length at a time, a multiple of the batch size; if absent, as many of up to 64 batches as an
    epoch has. 1 batch: no sorting beyond the pack."""
    pad_multiple: int = Field(default=8, ge=1)
    """A microbatch is as long as its longest sample, rounded up to a multiple of this; divides ``sequence_length``."""
    too_long: Literal["cut_end", "cut_start", "drop", "error"] = "cut_end"
    """Treatment of a text longer than a sample: it loses its end or its beginning, its record is left out, or it is an
    error. Lost tokens and records are counted, and shown at each start."""

    @property
    def packs_documents(self) -> bool:
        """False: a sample is one document, with padding behind it."""
        return False

    @property
    def sample_lengths(self) -> SampleLengths:
        """Lengths of microbatches: multiples of ``pad_multiple``."""
        return SampleLengths(self.pad_multiple, self.sequence_length)

    @model_validator(mode="after")
    def _padding_stays_within_a_sequence(self) -> Self:
        check_padding(self.sequence_length, self.pad_multiple)
        return self


class TextConfig(CorpusConfig):
    """Dataset of text files, tokenised once and packed into sequences of equal length."""

    name: Literal["text"] = "text"
    """Selects the plugin."""
    packing: Literal["concat", "best_fit"] = "concat"
    """Samples cut from all documents in a row, or filled with whole documents (best-fit decreasing), of which those
    longer than a sample are cut. Unpacked documents are the dataset ``documents``."""

    @property
    def packs_documents(self) -> bool:
        """True: a sample has as many documents as fit."""
        return True

    @property
    def sample_lengths(self) -> SampleLengths:
        """Length of all microbatches."""
        return SampleLengths(self.sequence_length, self.sequence_length)


class DocumentsConfig(PaddedConfig, CorpusConfig):
    """Dataset of documents, tokenised once, each a sample of its own, in packs of similar length."""

    name: Literal["documents"] = "documents"
    """Selects the plugin."""
    sources: tuple[PathOrAddress, ...]
    """As for ``text``."""
    field: str | None = Field(default=None, min_length=1)
    """As for ``text``; if absent ``text`` for ``.jsonl`` files."""
    sequence_length: int = Field(ge=1)
    """Most positions of a sample; longer documents are treated as ``too_long`` says."""
    shuffle: bool = True
    """Visit documents, and packs within a window, in an order drawn from the seed; false keeps that of the sources."""


class ModelTextConfig(PaddedConfig):
    """Shared fields of datasets whose records become samples as a model's tokenizer and chat template say."""

    malformed: Literal["error", "skip"] = "error"
    """A record that is malformed, or one that the template refuses: an error, or left out and counted."""
    tokenizer: PathText | None = None
    """Directory of a tokenizer and its chat template, or its ``tokenizer.json``; if absent that of the model which
    training starts from."""
    template_arguments: dict[str, Any] = {}
    """Further variables of the template, such as ``{enable_thinking: false}``."""
    tool_arguments: Literal["parse", "keep"] = "parse"
    """Arguments of tool calls that are JSON strings: parsed, as servers of models do, or kept as strings, which most
    templates quote once more."""
    sequence_length: int = Field(ge=1)
    """Most positions of a sample."""


class ChatConfig(ModelTextConfig):
    """Dataset of conversations, rendered by the model's chat template, of which the assistant's tokens are learned."""

    name: Literal["chat"] = "chat"
    """Selects the plugin."""
    sources: tuple[PathOrAddress, ...]
    """Structured files, as for ``text``: records with ``messages`` (and ``tools``) or ``prompt`` and ``completion``."""
    loss: Literal["assistant", "last_turn", "all"] = "assistant"
    """Tokens that are learned: those that the assistant writes, those of its last turn, or all."""
    packing: Literal["none", "concat", "best_fit"] = "none"
    """Samples of one conversation each, cut from all conversations in a row, or of as many whole ones as fit (best-fit
    decreasing). Conversations in a sample do not see each other."""

    @property
    def packs_documents(self) -> bool:
        """Whether a sample has several conversations."""
        return self.packing != "none"

    @property
    def sample_lengths(self) -> SampleLengths:
        """Lengths of microbatches: packed ones are equally long, others multiples of ``pad_multiple``."""
        return SampleLengths(self.sequence_length if self.packs_documents else self.pad_multiple, self.sequence_length)


class PreferenceConfig(ModelTextConfig):
    """Dataset of pairs: two completions of a prompt, of which one is preferred to the other."""

    name: Literal["preference"] = "preference"
    """Selects the plugin."""
    sources: tuple[PathOrAddress, ...]
    """Structured files, as for ``text``: records with ``chosen`` and ``rejected``, perhaps ``prompt`` and ``tools``."""
    sequence_length: int = Field(ge=1)
    """Most positions of each text of a pair: of the prompt and one completion."""

    @property
    def sample_lengths(self) -> SampleLengths:
        """Lengths of microbatches, of which every pair has two rows."""
        return SampleLengths(self.pad_multiple, self.sequence_length, texts=2)


class LabelledConfig(PaddedConfig, CorpusConfig):
    """Dataset of texts with one label each, or of words with a label for each word."""

    name: Literal["labelled"] = "labelled"
    """Selects the plugin."""
    sources: tuple[PathOrAddress, ...]
    """Structured files, as for ``text``, or ``python:kinds``."""
    per: Literal["text", "word"] = "text"
    """Labels of texts, or of words: records with a list of words and a list of as many labels."""
    field: str | None = Field(default=None, min_length=1)
    """Field of the text; if absent ``text``. Field of the words; if absent ``tokens``."""
    pair: str | None = Field(default=None, min_length=1)
    """Field of a second text, joined to the first as the tokenizer does."""
    label: str | None = Field(default=None, min_length=1)
    """Field of the label; if absent ``label``. Field of the labels of words; if absent ``labels``, or ``ner_tags``."""
    labels: tuple[str, ...] | None = Field(default=None, min_length=2)
    """Names of the classes, in the order of their numbers; if absent those of the data, sorted, or its numbers."""
    sequence_length: int = Field(ge=1)
    """Most positions of a sample; longer texts are treated as ``too_long`` says."""

    @property
    def text_field(self) -> str:
        """Field of the text or the words."""
        return self.field or ("text" if self.per == "text" else "tokens")

    @property
    def gives(self) -> dict[str, int]:
        """Tokens [B, S], and labels [B] of texts or [B, S] of words."""
        return {"tokens": 2, "labels": 1 if self.per == "text" else 2}

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Self:
        if self.labels is not None and len(set(self.labels)) != len(self.labels):
            raise ValueError("labels: a name appears twice; name each class once")
        if self.per == "word" and self.pair is not None:
            raise ValueError("pair: only texts with one label can be joined; leave it out, or use per: text")
        if self.per == "word" and isinstance(self.tokenizer, BpeTokenizer):
            raise ValueError("tokenizer: none is trained on words; use 'bytes' or the path of a tokenizer.json")
        return self


class PairsConfig(PaddedConfig, TokenizedConfig):
    """Dataset of queries, each with a document that answers it, and perhaps with some that do not."""

    name: Literal["pairs"] = "pairs"
    """Selects the plugin."""
    sources: tuple[PathOrAddress, ...]
    """Structured files, as for ``text``."""
    query: str = Field(default="query", min_length=1)
    """Field of the query."""
    positive: str = Field(default="positive", min_length=1)
    """Field of the document that answers it."""
    negatives: int = Field(default=0, ge=0, le=1024)
    """Number of documents of each record that do not answer it, the same for all."""
    negative: str | None = Field(default=None, min_length=1)
    """Field of such a document, or of a list of them; if absent ``negative``, or ``negatives``."""
    query_prefix: str = ""
    """Text before each query, such as an instruction."""
    document_prefix: str = ""
    """Text before each document."""
    sequence_length: int = Field(ge=2)
    """Most positions of each text, its end of text included; longer texts are treated as ``too_long`` says, and keep
    their end of text."""

    @property
    def sample_lengths(self) -> SampleLengths:
        """Lengths of microbatches, which have a row for the query and each document."""
        return SampleLengths(self.pad_multiple, self.sequence_length, texts=2 + self.negatives)

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Self:
        if self.query == self.positive:
            raise ValueError(f"query and positive are both '{self.query}'; name two fields")
        if self.negative is not None and not self.negatives:
            raise ValueError("negative has no effect without negatives; give their number too, such as negatives: 1")
        if isinstance(self.tokenizer, BpeTokenizer):
            raise ValueError("tokenizer: none is trained on pairs; use 'bytes' or a tokenizer.json")  # noqa: TRY004
        return self
