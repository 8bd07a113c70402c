"""Words of other training tools, each with the word of d9d; refusals of unknown names give them as hints.

The table, ``words.json``, is data about names: it is read only after a word was refused, and no plugin is imported.
``tools/word_page.py`` writes it as a page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

__all__ = ["Row", "find"]

#: Entry of :attr:`Row.words` that stands for any text or number.
ANY = "*"
#: Characters that distinguish a piece of a job file, such as ``parallel: [fsdp]``, from the name of a field.
_PIECE = re.compile(r"[\[{ ]")
#: Beginnings of commands and options.
_COMMANDS = ("d9d ", "--")


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the table: spellings of other tools and the word of d9d.

    Attributes:
        words: spellings as in the other tools; ``*`` stands for any text or number.
        ours: place in the job file, piece of a job file, name of a component, or command; ``None`` if there is none.
        note: further explanation; if ``ours`` is ``None``, advice on what to do instead.
        at: place where the words are typed: ``field`` of any section, ``field of SECTION``, ``field of a component``,
            ``value of FIELD``, a kind of component such as ``strategy``, ``command``, ``command GROUP``, ``option``,
            ``option COMMAND``, or ``kind of new job``.
        tools: tools that use the words.
    """

    words: tuple[str, ...]
    ours: str | None
    note: str = ""
    at: str = "field"
    tools: tuple[str, ...] = ()

    def hint(self, word: object) -> str:
        """Hint for the end of an error message, given the refused word."""
        if self.ours is None:
            return f"there is none in d9d: {self.note}"
        answer = self._answer(self.ours, word)
        return f"{answer} ({self.note})" if self.note else answer

    @property
    def section(self) -> str | None:
        """First section of the job file that :attr:`ours` names; ``None`` if :attr:`ours` is a command or absent."""
        if self.ours is None or self.ours.startswith(_COMMANDS):
            return None
        return re.split(r"\W", self.ours)[0]

    def _answer(self, ours: str, word: object) -> str:
        if ours.startswith(_COMMANDS):
            return f"use {ours}"
        if _PIECE.search(ours):
            return f"write {ours}"
        section, _, last = ours.rpartition(".")
        if self.at == "field" and last == normalised(word):
            return f"it belongs to {section}: {ours}"
        return f"d9d calls it {ours}"


def normalised(word: object) -> str:
    """Spelling of a word without differences of case, hyphens and leading dashes: ``--Train-Iters`` is ``train_iters``.

    A value of a job file is spelled as in YAML: ``true``.
    """
    return re.sub(r"[-\s]+", "_", str(word).strip().lstrip("-").lower())


def topics() -> Iterator[tuple[str, list[Row]]]:
    """Read the table: topics, each with its rows."""
    for topic in json.loads(files("d9d_core").joinpath("words.json").read_text("utf-8"))["topics"]:
        yield (
            topic["topic"],
            [
                Row(tuple(row["words"]), row["ours"], row.get("note", ""), row.get("at", "field"), tuple(row["tools"]))
                for row in topic["rows"]
            ],
        )


def find(word: object, places: Iterable[str], nested: bool = False) -> Row | None:
    """Row of a refused word.

    Args:
        word: word as the user typed it.
        places: places as in :attr:`Row.at`, the most specific one first.
        nested: whether the word is a field inside a section. A spelling of a single word, such as ``rank``, means
            something else in each section, so only rows for the section, or with the same field of d9d, fit it.

    Returns:
        The row, or ``None`` if the table does not have the word at any of the places.
    """
    spelling, table = normalised(word), _index()
    for place in places:
        row = table.get((place, spelling)) or (table.get((place, ANY)) if isinstance(word, str | int | float) else None)
        if row is None:
            continue
        same = row.ours is not None and row.ours.rpartition(".")[2] == spelling
        if place != "field" or not nested or "_" in spelling or same:
            return row
    return None


@cache
def _index() -> Mapping[tuple[str, str], Row]:
    """Place and normalised spelling -> row."""
    rows = [row for _, some in topics() for row in some]
    return MappingProxyType({(row.at, normalised(word)): row for row in rows for word in row.words})
