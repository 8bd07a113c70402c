"""Names with places: ``layers.{layer}.norm.weight`` stands for every layer's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_PLACE = re.compile(r"\{(\w+)(\*?)\}")


@dataclass(frozen=True)
class Pattern:
    """A name in which ``{word}`` stands for one component and ``{word*}`` for one or more of them.

    Attributes:
        text: the name.
    """

    text: str

    @property
    def places(self) -> frozenset[str]:
        """The words in braces."""
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
        """What the places stand for in this name, if it fits."""
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, places: dict[str, str]) -> str:
        """The name with words put in the places."""
        return _PLACE.sub(lambda match: places[match[1]], self.text)
