"""Preparation of a corpus: documents as token ids on disk, tokenised once for all runs with the same settings."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from d9d_core.data import DataContext, TextInputs
from d9d_core.errors import DataError
from d9d_core.untrusted import parse_json, read_regular

from d9d_data.config import (
    CorpusConfig,
    DocumentsConfig,
    LabelledConfig,
    ModelTextConfig,
    PaddedConfig,
    PreparedConfig,
    TextConfig,
    TokenizedConfig,
)
from d9d_data.corpus.cache import cached_directory, file_digests, find_damage
from d9d_data.corpus.encoding import TEXTS, Encoding, check_cut, encoding_of, limit_of, no_inputs_of
from d9d_data.corpus.fit import NONE, Limit, Tally, losses, readings, stops
from d9d_data.corpus.format import with_format
from d9d_data.corpus.identity import corpus_key
from d9d_data.corpus.plan import plan_shards
from d9d_data.corpus.tokenise import FACTS, SPLITS, Split, tokenise
from d9d_data.corpus.work import work_directory
from d9d_data.sources.document import STRUCTURED, Piece, check_field, check_structured
from d9d_data.sources.find import find_files
from d9d_data.sources.opening import SourceFile
from d9d_data.tokenizer.of_model import with_tokenizer


@dataclass(frozen=True, slots=True)
class Ends:
    """Rules by which a stream treats the last tokens of documents.

    Attributes:
        no_inputs: number of tokens at the end of a document that are not inputs.
        keep: whether truncation keeps the last input of a document.
        from_end: whether truncation keeps the end of a document and removes its beginning.
    """

    no_inputs: int = 0
    keep: bool = False
    from_end: bool = False


#: Every token of a document is an input.
WHOLE = Ends()
#: The last token of a document is a target only.
PREDICTED = Ends(1)
C = TypeVar("C", bound=TokenizedConfig | ModelTextConfig)
#: Number of files at and above which a printed note announces that they are being read.
_MANY = 10_000


@dataclass(frozen=True, slots=True)
class Corpus:
    """One split of a prepared corpus: its tokens and the boundaries of its documents.

    Attributes:
        tokens: token ids [N], memory-mapped.
        starts: index of the first token of each document, then N: [D + 1], memory-mapped.
        vocab_size: largest token id plus 1.
        tokenizer: description of the tokenizer for messages.
        unigram_entropy: entropy in nats per token of the train split's token frequencies: the loss of a model that
            knows only the frequencies.
        digest: identifier of tokens, boundaries, and values per token such as weights and labels.
        assets: directory with the tokenizer's files; ``None`` if they are the pretrained model's, which an export
            copies anyway.
        skipped: number of malformed records left out, over both splits.
        weights: bool [N], whether each token is learned, memory-mapped; ``None`` if all tokens are learned.
        learned: number of learned tokens, if there are weights.
        first_skipped: file and line of the first malformed record, and its problem.
        tally: counts of the records of both splits.
        encoding: encoding of the records.
        labels: int32 [N], class of each token or -100, memory-mapped; the label of a text is at its first token.
            ``None`` if there are no labels.
        num_classes: number of classes.
        label_names: names of the classes, if they have names.
        lost: int64 [D], number of tokens that each document lost to truncation when it was prepared, memory-mapped;
            ``None`` if no document lost tokens.
        limit: token limit of a document, applied by the stream; ``None`` if the stream reads whole documents.
        ends: treatment of document ends.
        predicts: whether a stream gives targets; otherwise it gives only inputs.
        stop_token_ids: ids of the special tokens with which the learned text of records ends, the most frequent first;
            empty for plain texts.
        scales: float32 [N], loss weight of each learned token, memory-mapped; ``None`` if all weights are 1.
    """

    tokens: npt.NDArray[np.integer[Any]]
    starts: npt.NDArray[np.int64]
    vocab_size: int
    tokenizer: str
    unigram_entropy: float
    digest: str
    assets: Path | None
    skipped: int = 0
    first_skipped: str = ""
    weights: npt.NDArray[np.bool_] | None = None
    tally: Tally = NONE
    encoding: Encoding = TEXTS
    labels: npt.NDArray[np.int32] | None = None
    num_classes: int = 0
    label_names: tuple[str, ...] | None = None
    lost: npt.NDArray[np.int64] | None = None
    limit: Limit | None = None
    learned: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ends: Ends = PREDICTED
    predicts: bool = True
    scales: npt.NDArray[np.float32] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of the consecutive documents that form one sample, if a sample has several documents."""
        return self.encoding.texts

    @property
    def documents_per_sample(self) -> int:
        """Number of consecutive documents that form one sample."""
        return len(self.texts) or 1

    @property
    def samples(self) -> int:
        """Number of samples: documents, or groups of documents that form one sample."""
        return (len(self.starts) - 1) // self.documents_per_sample

    def documents_of(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Indices of the documents of samples [B], grouped by sample: [B * documents_per_sample]."""
        together = np.arange(self.documents_per_sample)
        return (samples[:, None] * self.documents_per_sample + together).reshape(-1)

    def lost_of(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Number of tokens that documents [D] lost to truncation, in preparation and in the stream: [D]."""
        lost: npt.NDArray[np.int64]
        lost = np.zeros(len(documents), dtype=np.int64) if self.lost is None else self.lost[documents]
        if self.limit is not None:
            lost = lost + np.maximum(self.starts[documents + 1] - self.starts[documents] - self.limit.longest, 0)
        return lost

    def losses(self) -> Tally:
        """Counts of truncated and dropped records, for this split if the stream truncates, else for both splits."""
        if self.limit is None or self.tally.cut:
            return self.tally
        lengths = np.diff(self.starts)
        cut = int(np.count_nonzero(lengths > self.limit.longest))
        if not cut:
            return self.tally
        return replace(self.tally, records=self.samples, longest=int(lengths.max()), cut=cut)

    def positions_of(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Number of input tokens of each document, [D], for document indices [D]."""
        return self.starts[documents + 1] - self.starts[documents] - self.ends.no_inputs

    def __reduce__(self) -> tuple[Callable[..., Corpus], tuple[object, ...]]:
        """Pickle the names of memory-mapped files instead of their contents; the other process maps them again."""
        values = [getattr(self, field.name) for field in fields(self)]
        return _rebuilt, tuple(_Mapped(Path(str(v.filename))) if isinstance(v, np.memmap) else v for v in values)

    def save_assets(self, directory: Path) -> None:
        """Copy the tokenizer's files to the directory of an export."""
        if self.assets is None:
            return
        directory.mkdir(parents=True, exist_ok=True)
        for file in self.assets.iterdir():
            shutil.copyfile(file, directory / file.name)


@dataclass(frozen=True, slots=True)
class _Mapped:
    """File name that is pickled in place of a memory-mapped array."""

    file: Path


def _rebuilt(*values: Any) -> Corpus:
    arguments: list[Any] = [map_array(value.file) if isinstance(value, _Mapped) else value for value in values]
    return Corpus(*arguments)


def map_array(file: Path) -> npt.NDArray[Any]:
    """Memory-map the array in a ``.npy`` file."""
    array: npt.NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    return array


def prepare_for(config: C, context: DataContext) -> tuple[C, Corpus]:
    """Prepare the corpus of a config for a job; a config without a tokenizer gets the pretrained model's tokenizer.

    Returns:
        The config with its tokenizer, and the corpus.

    Raises:
        DataError: see :func:`prepare` and :func:`~d9d_data.tokenizer.of_model.with_tokenizer`.
    """
    resolved = with_tokenizer(config, context.pretrained)
    corpus = prepare(resolved, context.cache_dir, context.note, context.one_pass, context.inputs)
    own = config.tokenizer is None and context.pretrained is not None
    return resolved, replace(corpus, assets=None) if own else corpus


def _read_limit(config: PreparedConfig, one_pass: bool) -> Limit | None:
    """Token limit of a document for the stream of a config."""
    if one_pass and isinstance(config, TextConfig) and config.packing == "best_fit":
        return Limit(config.sequence_length + 1)  # see d9d_data.stream.binned
    return limit_of(config)


def _lines(corpus: Corpus, config: PreparedConfig) -> Iterator[str]:
    """Yield lines about records that were left out or truncated, and about records that can be read in two ways."""
    encoding = corpus.encoding
    if corpus.skipped:
        yield f"left out {corpus.skipped:,} malformed {encoding.plural}; the first: {corpus.first_skipped}"
    if corpus.limit is not None:
        yield from losses(corpus.losses(), corpus.limit, encoding.words, isinstance(config, PaddedConfig))
    yield from readings(corpus.tally, encoding.words, config.special_tokens)
    # Records of token ids need not end with an answer.
    if corpus.weights is not None and (corpus.tally.stopped or encoding.encoder != "tokens"):
        yield stops(corpus.tally, encoding.words)


def prepare(
    config: C,
    cache_dir: Path,
    note: Callable[[str], None],
    one_pass: bool = False,
    inputs: TextInputs = "own",
) -> Corpus:
    """Find the corpus of a config in the cache, or prepare it; report truncated, dropped and ambiguous records.

    Args:
        config: config of a dataset.
        cache_dir: directory of prepared data.
        note: function that prints a line.
        one_pass: whether the stream makes a single pass, in which some streams read less of each document.
        inputs: which tokens of a text the model gets as inputs, see :data:`~d9d_core.data.TextInputs`.

    Raises:
        DataError: sources, tokenizer or cache directory cannot be used, there is no text, or the split has no document.
        TrainingError: a tokenising process died.
    """
    config = with_tokenizer(config, None)
    corpus, adds_end, adds_after = _found(config, cache_dir, note)
    no_inputs = no_inputs_of(corpus.encoding, inputs, adds_end)
    limit = _read_limit(config, one_pass)
    if limit is not None:
        limit = replace(limit, longest=limit.longest - int(corpus.encoding.targets) + no_inputs)
    predicts = corpus.encoding.targets and inputs == "own"
    from_end = limit is not None and limit.too_long == "cut_start"
    ends = Ends(no_inputs, inputs == "with_end" or (inputs == "as_encoded" and adds_after > 0), from_end)
    corpus = replace(corpus, limit=limit, ends=ends, predicts=predicts)
    check_cut(corpus.encoding, inputs, limit, corpus.losses().cut)
    for line in _lines(corpus, config):
        note(line)
    return corpus


def _found(config: C, cache_dir: Path, note: Callable[[str], None]) -> tuple[Corpus, bool, int]:
    """Corpus of a config, whether its tokenizer adds an end of text, and the number of tokens added after a text."""
    encoding = encoding_of(config)
    files = find_files(config.sources, note)
    pieces = [Piece(file, _field_of(config, file)) for file in files]
    for piece in pieces:
        if encoding.encoder != "text":
            check_structured(piece.file, encoding.plural)
        else:
            check_field(piece.file, piece.field)
    config = with_format(config, files, note)
    encoding = encoding_of(config)
    amount = _amount(files)
    if len(files) >= _MANY:
        note(f"reading {amount} from {', '.join(config.sources)}, to find prepared data")
    key = corpus_key(config, pieces)

    required = [FACTS, *(name for split in SPLITS for name in _files_of(split, encoding))]
    full = config.digest == "full"
    if find_damage(cache_dir / key, required, full) is None:
        return _open(cache_dir / key, config.split, encoding)
    shards = plan_shards(pieces)

    with work_directory(cache_dir, key, keep=len(shards) > 1, note=note) as work:

        def build(directory: Path) -> None:
            begin = time.perf_counter()
            note(f"preparing {amount} from {', '.join(config.sources)}; this happens once")
            if done := sum((work / shard.name).is_dir() for shard in shards):
                note(f"found {done:,} of {len(shards):,} shards from an interrupted start; continuing with the rest")
            facts = tokenise(config, shards, work, directory)
            if corpus_key(config, pieces) != key:
                shutil.rmtree(work)
                raise DataError(
                    "data.sources: a file changed while it was being read; start again when no file changes any more"
                )
            note(f"tokenised in {time.perf_counter() - begin:.1f} s with {facts['tokenizer']}")

        return _open(cached_directory(cache_dir, key, build, note, required, full), config.split, encoding)


def _field_of(config: PreparedConfig, file: SourceFile) -> str | None:
    if isinstance(config, LabelledConfig):  # the texts are needed to train a tokenizer
        return config.text_field
    if file.format not in STRUCTURED or not isinstance(config, CorpusConfig):
        return None
    return config.field or ("text" if file.format == "jsonl" and isinstance(config, DocumentsConfig) else None)


def _amount(files: Sequence[SourceFile]) -> str:
    """Number of documents, for printed lines; the number of files if the documents are not counted yet."""
    kind = "document" if all(file.format == "text" for file in files) else "file"
    return f"{len(files):,} {kind}{'' if len(files) == 1 else 's'}"


def _files_of(split: Split, encoding: Encoding) -> list[str]:
    return [f"{split}.{name}.npy" for name in ("tokens", "starts", *encoding.columns)]


def _open(directory: Path, split: Split, encoding: Encoding) -> tuple[Corpus, bool, int]:
    facts = parse_json(read_regular(directory / FACTS))
    digests = file_digests(directory)
    files = _files_of(split, encoding)
    names = encoding.columns
    if f"{split}.scales.npy" in digests:
        files, names = [*files, f"{split}.scales.npy"], (*names, "scales")
    lost = directory / f"{split}.lost.npy"
    tokens, starts, *columns = (map_array(directory / file) for file in files)
    more: dict[str, Any] = dict(zip(names, columns, strict=True))
    corpus = Corpus(
        tokens=tokens,
        starts=starts,
        vocab_size=facts["vocab_size"],
        tokenizer=facts["tokenizer"],
        unigram_entropy=facts["unigram_entropy"],
        digest=hashlib.sha256("".join(digests[file] for file in files).encode()).hexdigest(),
        assets=directory / "tokenizer",
        skipped=facts["skipped"],
        first_skipped=facts["first_skipped"],
        tally=Tally.of(facts["tally"]),
        encoding=encoding,
        num_classes=facts.get("num_classes", 0),
        label_names=None if facts.get("labels") is None else tuple(facts["labels"]),
        lost=map_array(lost) if lost.name in digests else None,
        learned=facts["learned"][split],
        stop_token_ids=tuple(facts["stop_token_ids"]),
        **more,
    )
    return corpus, facts["adds_end"], facts["adds_after"]
