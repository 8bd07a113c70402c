"""Samples of a stream as text that shows which tokens are learned. Shapes: S, positions of a sample."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from d9d_core.data import DataStream
from d9d_core.errors import DataError
from rich.text import Text

from d9d_data.stream.reader import Lost, TellsLosses
from d9d_data.tokenizer.base import TOKENIZER_FILE
from d9d_data.tokenizer.file import read_tokenizer

Int64 = npt.NDArray[np.int64]
_LEARNED, _MASKED, _BETWEEN = "bold green", "dim", "bold red"


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample that ``d9d data show`` shows, without its padding.

    Attributes:
        tokens: token ids ``[S]``.
        targets: next tokens ``[S]``; -100 where no token is learned. ``None`` if the task predicts no tokens.
        marks: whether each token has a label, ``[S]``; ``None`` if the dataset labels no tokens.
        documents: index of each token's document in the sample, ``[S]``.
        name: name of the text, such as ``chosen``, if a sample has several texts.
        label: class of the sample, if it has one.
        lost: number of tokens that each document of the sample lost to truncation.
    """

    tokens: Int64
    targets: Int64 | None
    documents: Int64
    name: str = ""
    label: str = ""
    marks: npt.NDArray[np.bool_] | None = None
    lost: Sequence[int] = ()


def names_of_texts(stream: DataStream) -> list[str]:
    """Names of the texts in each sample of a stream; a single empty name if a sample is one text."""
    names = stream.facts.get("texts")
    return [str(name) for name in names] if isinstance(names, list) else [""]


def samples_of(stream: DataStream) -> Iterator[Sample]:
    """Yield the samples of a stream without end, pack (the microbatches of one step) by pack.

    Each text of a sample is yielded separately.

    Raises:
        DataError: the stream gives no tokens, or fails.
    """
    texts = names_of_texts(stream)
    while True:
        lost = _lost_of(stream)
        for index, microbatch in enumerate(stream.next_pack()):
            rows: dict[str, Any] = {name: np.asarray(tensor) for name, tensor in microbatch.items()}
            if "tokens" not in rows:
                raise DataError(f"data: samples have no tokens to show; they have {', '.join(rows)}")
            count, length = rows["tokens"].shape
            lengths = rows.get("lengths", np.full(count, length))
            documents = rows.get("documents", np.zeros((count, length), dtype=np.int64))
            targets, labels = rows.get("targets"), rows.get("labels")
            for row in range(count):
                kept = slice(int(lengths[row]))
                label, marks = "", None
                if labels is not None and labels.ndim == 1:
                    label = _class_name(stream, int(labels[row]))
                elif labels is not None:
                    marks = labels[row, kept] >= 0
                yield Sample(
                    rows["tokens"][row, kept],
                    None if targets is None else targets[row, kept],
                    documents[row, kept],
                    texts[row % len(texts)],
                    label,
                    marks,
                    lost[index][row] if lost else (),
                )


def _lost_of(stream: DataStream) -> Sequence[Lost]:
    """Numbers of tokens that the documents of the next pack lost to truncation; empty if the stream has no counts."""
    source, consumed = getattr(stream, "source", None), stream.state().get("consumed")
    return source.lost_at(consumed) if isinstance(source, TellsLosses) and isinstance(consumed, int) else ()


def _class_name(stream: DataStream, number: int) -> str:
    names = stream.facts.get("labels")
    return str(names[number]) if isinstance(names, list) and number >= 0 else str(number)


def tokenizer_for(assets: Path, pretrained: str | None) -> tokenizers.Tokenizer | None:
    """Tokenizer that the stream saves with exports, or else the tokenizer of the pretrained model."""
    beside = [] if pretrained is None else [Path(pretrained) / TOKENIZER_FILE, Path(pretrained).parent / TOKENIZER_FILE]
    file = next((file for file in (assets / TOKENIZER_FILE, *beside) if file.is_file()), None)
    return None if file is None else read_tokenizer(file)


def cut_off(lost: Sequence[int]) -> str:
    """Note on the number of tokens lost to truncation; an empty text if no tokens are lost."""
    return f", cut: {sum(lost):,} tokens are lost" if sum(lost) else ""


def spoken(ids: Sequence[int], tokenizer: tokenizers.Tokenizer) -> str:
    """Decode token ids; put ordinary text that spells a special token between ⟨ and ⟩."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
    special = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    spelled = re.compile("|".join(map(re.escape, sorted(special.values(), key=len, reverse=True))) or r"(?!)")
    if len(spelled.findall(text)) <= sum(number in special for number in ids):
        return text
    parts = []
    for is_special, run in groupby(ids, key=special.__contains__):
        part = tokenizer.decode(list(run), skip_special_tokens=False)
        parts.append(part if is_special else spelled.sub(lambda found: f"⟨{found.group()}⟩", part))
    return "".join(parts)


def marked(sample: Sample, tokenizer: tokenizers.Tokenizer, brackets: bool = False) -> Text:
    """Styled text of a sample: learned tokens are highlighted, other tokens are dim, and a line separates documents.

    A token is learned if it is the target of the position before it or has a label; the first token of a document is
    never a target.

    Args:
        sample: sample to show.
        tokenizer: tokenizer of the sample.
        brackets: put learned tokens between « and ».

    Ordinary text that spells a special token is marked, see :func:`spoken`.
    """
    text, before = Text(), None
    for (document, is_learned), run in groupby(_tokens(sample), key=itemgetter(1, 2)):
        if before is not None and document != before:
            text.append(f"\n--- document{cut_off(sample.lost[document : document + 1])} ---\n", style=_BETWEEN)
        before = document
        words = spoken([token for token, _, _ in run], tokenizer)
        words = f"«{words}»" if brackets and is_learned else words
        text.append(words, style=_LEARNED if is_learned else _MASKED)
    return text


def _tokens(sample: Sample) -> Iterator[tuple[int, int, bool]]:
    """Yield each token id of a sample with the index of its document and whether the token is learned.

    The last target of a document is not among the document's inputs; it is yielded after them.
    """
    documents = sample.documents.tolist()
    targets = [-1] * len(documents) if sample.targets is None else sample.targets.tolist()
    marks = [False] * len(documents) if sample.marks is None else sample.marks.tolist()
    is_target = False
    for place, (token, document) in enumerate(zip(sample.tokens.tolist(), documents, strict=True)):
        yield token, document, is_target if sample.targets is not None else bool(marks[place])
        is_target = targets[place] >= 0
        if is_target and documents[place + 1 : place + 2] != [document]:
            yield targets[place], document, True
            is_target = False
