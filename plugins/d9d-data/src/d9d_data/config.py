"""Configs of the datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from d9d_core.config import PathOrAddress, PathText, PluginConfig, Section, closest
from d9d_core.data import SampleLengths
from pydantic import Field, field_validator, model_validator

#: Sources that need no files: texts of the installed Python, and built-in examples.
PYTHON_SOURCES = ("python:topics", "python:docstrings", "python:sources", "python:kinds")

#: Packing of the samples of a dataset.
Packing = Literal["none", "concat", "best_fit"]
#: Largest vocabulary in tokens, because tables have an entry per token id; published vocabularies are far smaller.
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
    """Visit the samples of each epoch in a random order drawn from the seed; false keeps the order of the sources,
    except that padded samples are sorted by length in windows (``bucket_window``)."""
    workers: int = Field(default=0, ge=0)
    """Processes that build packs ahead; 0 builds them in this process. The packs do not depend on it."""
    preparation_workers: int | None = Field(default=None, ge=0, le=1024)
    """Processes that tokenise a corpus of more than 64 MiB, once; 0 tokenises in this process; by default the number of
    cores, at most 8. The tokens do not depend on it."""

    @field_validator("sources", mode="before")
    @classmethod
    def _a_list(cls, sources: Any) -> Any:
        if isinstance(sources, str):
            text = f"sources must be a list; write [{sources[:80]}]"
            raise ValueError(text)  # noqa: TRY004 - pydantic reports ValueErrors
        return sources

    @field_validator("sources")
    @classmethod
    def _known_sources(cls, sources: tuple[str, ...]) -> tuple[str, ...]:
        if not sources:
            raise ValueError(f"sources is empty; name a file, directory or glob, or one of {', '.join(PYTHON_SOURCES)}")
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
    """Number of samples sorted by length together, a multiple of the batch size; by default up to 64 batches, at most
    an epoch. A window of one batch sorts only within a step."""
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


class PackableConfig(PaddedConfig):
    """Shared fields of datasets with one record per sample, or with several records packed into each sample."""

    packing: Packing = "none"
    """``none``: one record per sample; ``concat``: samples cut from all records joined; ``best_fit``: whole records
    (best-fit decreasing). Attention stays within a record."""

    @property
    def packs_documents(self) -> bool:
        """Whether a sample can have several records."""
        return self.packing != "none"

    @property
    def sample_lengths(self) -> SampleLengths:
        """Microbatch lengths: ``sequence_length`` if packed, otherwise multiples of ``pad_multiple``."""
        return SampleLengths(self.sequence_length if self.packs_documents else self.pad_multiple, self.sequence_length)


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
    """Sources as for the dataset ``text``."""
    field: str | None = Field(default=None, min_length=1)
    """Field with the text, as for the dataset ``text``; if absent, the field ``text`` of ``.jsonl`` files."""
    sequence_length: int = Field(ge=1)
    """Largest number of positions of a sample; ``too_long`` treats longer documents."""
    shuffle: bool = True
    """Visit documents, and packs within a window, in a random order drawn from the seed; false keeps the order of the
    sources, except that each window is sorted by length."""


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
    """Largest number of positions of a sample."""


#: Roles of messages; the content of a ``function_call`` is a tool call of the assistant as JSON.
Role = Literal["system", "developer", "user", "assistant", "tool", "function_call"]


class MessageFormat(Section):
    """Keys and roles of the messages in records."""

    role: str = Field(default="role", min_length=1)
    """Key of a message's role."""
    content: str = Field(default="content", min_length=1)
    """Key of a message's text."""
    roles: dict[str, Role] = {}
    """Roles by their names in the records, such as ``{customer: user, agent: assistant}``; a role that has its usual
    name needs no entry. ``function_call`` is a message of the assistant whose text is a tool call as JSON."""
    system: str | None = Field(default=None, min_length=1)
    """Field of a system message; a record may lack it."""
    tools: str = Field(default="tools", min_length=1)
    """Field of the tools; a record may lack it."""

    @field_validator("roles", mode="before")
    @classmethod
    def _known_roles(cls, roles: Any) -> Any:
        known = get_args(Role)
        for name, role in roles.items() if isinstance(roles, Mapping) else ():
            if role not in known:
                near = closest(role, known)
                hint = f"did you mean '{near}'?" if near else f"use one of {', '.join(known)}"
                raise ValueError(f"{name}: unknown role {str(role)[:80]!r}; {hint}")
        return roles


class ChatFormat(MessageFormat):
    """Fields of conversations: a list of messages, or a text of the user and one of the assistant."""

    messages: str | None = Field(default=None, min_length=1)
    """Field of a list of messages."""
    user: str | None = Field(default=None, min_length=1)
    """Field of the user's text, or of a list of messages that are given and not learned."""
    context: str | None = Field(default=None, min_length=1)
    """Field of a text that follows the user's on a new line; a record may lack it."""
    history: str | None = Field(default=None, min_length=1)
    """Field of a list of earlier turns, each a pair of a user's and an assistant's text; a record may lack it."""
    assistant: str | None = Field(default=None, min_length=1)
    """Field of the assistant's text, or of a list of messages."""

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Self:
        turns = {name: getattr(self, name) for name in ("user", "context", "history", "assistant")}
        given = [name for name, field in turns.items() if field is not None]
        if self.messages is not None and given:
            raise ValueError(f"{given[0]} does not go with messages; name a list of messages, or user and assistant")
        if self.messages is None and (self.user is None or self.assistant is None):
            raise ValueError("name the field of a list of messages in messages, or two fields in user and assistant")
        if self.user is not None and self.user == self.assistant:
            raise ValueError(f"user and assistant are both '{self.user}'; name two fields")
        return self


class PreferenceFormat(MessageFormat):
    """Fields of preference pairs."""

    prompt: str | None = Field(default=None, min_length=1)
    """Field of the prompt: a text that is used unchanged, or a list of messages; by default the common beginning of
    both completions."""
    user: str | None = Field(default=None, min_length=1)
    """Field of the user's text, which the chat template renders, instead of ``prompt``."""
    context: str | None = Field(default=None, min_length=1)
    """Field of a text that follows the user's on a new line; a record may lack it."""
    chosen: str = Field(default="chosen", min_length=1)
    """Field of the preferred completion: a text, a message, or a list of messages."""
    rejected: str = Field(default="rejected", min_length=1)
    """Field of the other completion."""

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Self:
        if self.prompt is not None and self.user is not None:
            raise ValueError("prompt and user exclude each other; name one")
        if self.context is not None and self.user is None:
            raise ValueError("context has no effect without user")
        if self.chosen == self.rejected:
            raise ValueError(f"chosen and rejected are both '{self.chosen}'; name two fields")
        return self


#: Names of the formats of conversations and of preference pairs.
ChatFormatName = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "question_answer"]
PreferenceFormatName = Literal["prompt", "question", "instruction", "sharegpt", "dialogues"]


def _known_format(value: Any, names: tuple[str, ...], example: str) -> Any:
    """Return the value of a field ``format``; raise if it is neither a known name nor a mapping."""
    if isinstance(value, str) and value not in names:
        near = closest(value, names)
        hint = f"did you mean '{near}'?" if near else f"use one of {', '.join(names)}, or name fields: {example}"
        raise ValueError(f"unknown format {value[:80]!r}; {hint}")
    if not isinstance(value, str | Mapping | MessageFormat | None):
        raise ValueError(  # noqa: TRY004
            f"a format is a name or a mapping of fields; use one of {', '.join(names)}, or name fields: {example}"
        )
    return value


class ChatConfig(ModelTextConfig, PackableConfig):
    """Dataset of conversations, rendered by the chat template; by default the assistant's tokens are learned."""

    name: Literal["chat"] = "chat"
    """Selects the plugin."""
    sources: tuple[PathOrAddress, ...]
    """Structured files, as for ``text``; all records have the fields of one format."""
    format: ChatFormatName | ChatFormat | None = None
    """Format of the records: a name, or a mapping that names their fields, such as ``{user: question, assistant:
    answer}`` or ``{messages: dialogue, role: speaker, content: text}``; by default determined by the first record."""
    loss: Literal["assistant", "last_turn", "all"] = "assistant"
    """Tokens to learn: all that the assistant writes, only its last turn, or all tokens of the conversation."""
    packing: Packing = "none"
    """``none``: one conversation per sample; ``concat``: samples cut from all conversations joined; ``best_fit``: whole
    conversations (best-fit decreasing). Attention stays within a conversation."""

    @field_validator("format", mode="before")
    @classmethod
    def _known_format(cls, value: Any) -> Any:
        return _known_format(value, get_args(ChatFormatName), "{user: question, assistant: answer}")


class PreferenceConfig(ModelTextConfig):
    """Dataset of preference pairs: a prompt with a preferred and a rejected completion."""

    name: Literal["preference"] = "preference"
    """Selects the plugin."""
    sources: tuple[PathOrAddress, ...]
    """Structured files, as for ``text``; all records have the fields of one format."""
    format: PreferenceFormatName | PreferenceFormat | None = None
    """Format of the records: a name, or a mapping that names their fields, such as ``{user: question, chosen: better,
    rejected: worse}``; by default determined by the first record."""
    sequence_length: int = Field(ge=1)
    """Largest number of positions of each text of a pair: the prompt and one completion."""

    @field_validator("format", mode="before")
    @classmethod
    def _known_format(cls, value: Any) -> Any:
        return _known_format(value, get_args(PreferenceFormatName), "{user: question, chosen: a, rejected: b}")

    @property
    def sample_lengths(self) -> SampleLengths:
        """Possible sample lengths of a microbatch, whose pairs have two rows each."""
        return SampleLengths(self.pad_multiple, self.sequence_length, texts=2)


class TokensConfig(PackableConfig, TokenizedConfig):
    """Dataset of records that are tokenised already: token ids, and labels or a mask of the tokens to learn."""

    name: Literal["tokens"] = "tokens"
    """Selects the plugin."""
    sources: tuple[PathOrAddress, ...]
    """Structured files, as for ``text``."""
    malformed: Literal["error", "skip"] = "error"
    """Treatment of a record whose ids, labels or mask are malformed: ``error``, or ``skip`` to leave it out and count
    it."""
    ids: str = Field(default="input_ids", min_length=1)
    """Field of the token ids. A field ``attention_mask`` that ends with zeros marks padding, which is cut."""
    labels: str | None = Field(default=None, min_length=1)
    """Field of the labels: at each position its token id, or -100 if the token is not learned. By default ``labels``,
    if the first record has it."""
    mask: str | None = Field(default=None, min_length=1)
    """Field of a mask, 0 where the token is not learned. By default ``loss_mask``, ``completion_mask`` or
    ``assistant_masks``, if the first record has one; all tokens are learned if it has neither labels nor a mask."""
    tokenizer: PathText | None = None
    """Directory of the tokenizer that made the ids, or its ``tokenizer.json``; by default the pretrained model's. Ids
    outside of its vocabulary are refused."""
    sequence_length: int = Field(ge=1)
    """Largest number of positions of a sample."""

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Self:
        if self.labels is not None and self.mask is not None:
            raise ValueError("labels and mask exclude each other; name one")
        for name in ("special_tokens", "end_of_text"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect on records that are tokenised already; remove it")
        return self


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
    """Names of the classes in the order of their numbers; by default the names in the data, sorted. Labels that are all
    numbers need no names."""
    sequence_length: int = Field(ge=1)
    """Largest number of positions of a sample; ``too_long`` treats longer texts."""

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
    """Largest number of positions of each text, including its end-of-text token; ``too_long`` treats longer texts, and
    the end-of-text token is kept."""

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
