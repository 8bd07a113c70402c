"""Fit of records into samples: the treatment of records that are too long, and counts of lost tokens and records.

All datasets over a corpus count lost tokens and records with this module, in the encoder or in the stream that
truncates documents. The facts of the stream and a line at each start state the counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from d9d_core.errors import DataError

#: Treatment of a record that is too long, as ``data.too_long`` names it.
Policy = Literal["cut_end", "cut_start", "drop", "error"]
#: Fraction of the records beyond which losses are reported as a warning.
TOLERATED = 0.01


class TooLongError(DataError):
    """A record is longer than the limit under ``too_long: error``; ``malformed: skip`` does not skip such records."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Token limit of a text, and the treatment of longer texts.

    Attributes:
        longest: maximum number of tokens.
        too_long: treatment of longer texts.
    """

    longest: int
    too_long: Policy = "cut_end"

    def kept(self, count: int, where: str) -> slice | None:
        """Slice of the tokens to keep of a text with ``count`` tokens; ``None`` if its record must be left out.

        Args:
            count: number of tokens of the text.
            where: name of the text in error messages.

        Raises:
            TooLongError: the text is longer, and ``too_long`` is ``error``.
        """
        if count <= self.longest:
            return slice(0, count)
        if self.too_long == "drop":
            return None
        if self.too_long == "error":
            raise TooLongError(
                f"{where} has {count:,} tokens, but a sequence at most {self.longest:,}; use longer sequences, "
                "leave out the record, or set data.too_long to cut_end, cut_start or drop"
            )
        return slice(0, self.longest) if self.too_long == "cut_end" else slice(count - self.longest, count)


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of how records fit the token limit; malformed records are not counted.

    Attributes:
        records: number of records, including dropped records.
        longest: number of tokens of the longest text of a record, before truncation.
        cut: number of records that lost tokens.
        incomplete: number of records that lost tokens to learn.
        dropped: number of records left out because they are too long or have no token to learn.
        needed: smallest limit, in tokens, at which one of the dropped records would have a token to learn; 0 if no
            dropped record has such a token.
        spelled: number of records with a text that spells a special token.
        spelling: the first special token that a text spells.
        parsed: number of records with tool arguments that are JSON strings.
        stops: for each special token, the number of records whose last learned token it is.
    """

    records: int = 0
    longest: int = 0
    cut: int = 0
    incomplete: int = 0
    dropped: int = 0
    needed: int = 0
    spelled: int = 0
    spelling: str = ""
    parsed: int = 0
    stops: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Tally) -> Tally:
        """Add the counts of two tallies."""
        numbers = ("records", "cut", "incomplete", "dropped", "spelled", "parsed")
        stops = [(name, count) for tally in (self, other) for name, count in tally.stops.items()]
        return Tally(
            longest=max(self.longest, other.longest),
            needed=min((count for count in (self.needed, other.needed) if count), default=0),
            spelling=self.spelling or other.spelling,
            stops={one: sum(count for name, count in stops if name == one) for one, _ in stops},
            **{name: getattr(self, name) + getattr(other, name) for name in numbers},
        )

    @property
    def stopped(self) -> int:
        """Number of records whose last learned token is special, so that the model learns to stop."""
        return sum(self.stops.values())

    def written(self) -> dict[str, Any]:
        """Write the counts as a JSON object."""
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"stops": dict(self.stops)}

    @classmethod
    def of(cls, value: Any) -> Self:
        """Make a tally from a JSON object made by :meth:`written`."""
        return cls(**value)


@dataclass(frozen=True, slots=True)
class Words:
    """Terms for a dataset's records in messages.

    Attributes:
        plural: name of the records, in the plural.
        lost: text after the number in the message "in 3 ..." about records that lost tokens to learn, such as "the last
            answer is incomplete"; empty for no such message.
    """

    plural: str
    lost: str = ""


#: Names for datasets of plain texts.
DOCUMENTS = Words("documents")
#: Tally without records.
NONE = Tally()


def losses(tally: Tally, limit: Limit, words: Words, choosable: bool = True) -> Iterator[str]:
    """Yield lines about the records of a corpus that are truncated or left out; no line if all records are complete.

    Args:
        tally: counts of the corpus.
        limit: token limit of a text.
        words: names of the dataset's records in messages, such as ``conversations``.
        choosable: whether the dataset has the field ``too_long``.
    """
    advice = "use a larger sequence_length"
    advice += ", or choose their treatment with the dataset's field too_long" if choosable else ""
    plural, most = words.plural, f"{limit.longest:,} tokens"
    if tally.cut:
        lost = f"; in {tally.incomplete:,} {words.lost}" if tally.incomplete and words.lost else ""
        line = f"cut {tally.cut:,} of {tally.records:,} {plural} to {most}, longest {tally.longest:,}{lost}"
        yield _weighed(line, tally.cut, tally.records, advice)
    if tally.dropped:
        line = f"left out {tally.dropped:,} of {tally.records:,} {plural} that are too long, or have no token to learn"
        yield _weighed(f"{line} in {most}, longest {tally.longest:,}", tally.dropped, tally.records, advice)


def readings(tally: Tally, words: Words, special_tokens: Literal["text", "token"]) -> Iterator[str]:
    """Yield a line about texts that spell a special token, and a line about tool-call arguments that are strings.

    Args:
        tally: counts of the corpus.
        words: names of the dataset's records in messages, such as ``conversations``.
        special_tokens: treatment of special tokens spelled in texts.
    """
    of = f"of {tally.records:,} {words.plural}"
    if tally.spelled:
        line = f"{tally.spelled:,} {of} spell special tokens, such as {tally.spelling}, which are read as "
        if special_tokens == "token":
            yield f"{line}these tokens"
        else:
            yield f"{line}ordinary text; 'special_tokens: token' in data reads them as these tokens"
    if tally.parsed:
        yield (
            f"{tally.parsed:,} {of} have tool arguments that are JSON strings; they are parsed unless data has "
            "'tool_arguments: keep'"
        )


def stops(tally: Tally, words: Words) -> str:
    """Line about the special tokens that end the learned text of records; a warning if no learned text has one."""
    samples = tally.records - tally.dropped
    found = f"stop token learned in {tally.stopped:,} of {samples:,} {words.plural}"
    if not tally.stopped:
        return (
            f"warning: {found}: the model does not learn when to stop; use a chat template that ends the assistant's "
            "turns with a special token inside the learned text, or longer sequences"
        )
    return f"{found}: {', '.join(sorted(tally.stops, key=lambda token: -tally.stops[token]))}"


def _weighed(line: str, count: int, records: int, advice: str) -> str:
    return line if count <= TOLERATED * records else f"warning: {line}; {advice}"


def nothing_left(tally: Tally, limit: Limit, words: Words) -> DataError:
    """Make the error for a corpus whose records are all left out."""
    plural = words.plural
    if limit.too_long == "drop" or not tally.needed:
        reason = f"all {tally.dropped:,} {plural} are too long for {limit.longest:,} tokens, or have no token to learn"
        advice = f"use a sequence_length of up to {tally.longest - 1:,}, or data.too_long: cut_end or cut_start"
    else:
        reason = (
            f"none of the {tally.dropped:,} {plural} has a token to learn in its first {limit.longest:,} tokens: "
            f"their prompts alone have {tally.needed - 1:,} tokens and more"
        )
        advice = f"use a sequence_length of more than {tally.needed - 1:,}, or data.too_long: cut_start"
    return DataError(f"data.sequence_length: {reason} (the longest has {tally.longest:,}); {advice}")
