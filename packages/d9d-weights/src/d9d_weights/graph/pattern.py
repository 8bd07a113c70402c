"""Patterns of names with placeholders: ``layers.{layer}.norm.weight`` stands for every layer's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_PLACE = re.compile(r"\{(\w+)(\*?)\}")


@dataclass(frozen=True)
class Pattern:
    """Pattern: a name in which ``{word}`` stands for one component and ``{word*}`` for one or more of them.

    Attributes:
        text: the name.
    """

    text: str

    @property
    def placeholders(self) -> frozenset[str]:
        """Placeholders: the words in braces."""
        return frozenset(word for word, _ in _PLACE.findall(self.text))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts, end = [], 0
        seen: set[str] = set()
        for match in _PLACE.finditer(self.text):
            parts.append(re.escape(self.text[end : match.start()]))
            word, long = match.groups()
            parts.append(f"(?P={word})" if word in seen else f"(?P<{word}>{'.+' if long else '[^.]+'})")
            seen.add(word)
            end = match.end()
        return re.compile("".join([*parts, re.escape(self.text[end:])]))

    def match(self, name: str) -> dict[str, str] | None:
        """Words that the placeholders stand for in this name, if it fits."""
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, placeholders: dict[str, str]) -> str:
        """Name with words in place of the placeholders."""
        return _PLACE.sub(lambda match: placeholders[match[1]], self.text)
