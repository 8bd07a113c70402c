"""Document of a job file: its values with their line numbers, and overrides."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from d9d_core.config import Location, dotted
from d9d_core.errors import D9dError, JobError
from d9d_core.job_file.reading import READERS, read_yaml
from d9d_core.untrusted import Links, read_regular

__all__ = ["Document"]

#: Largest accepted size of a job file in bytes, about a hundred times the usual size.
MAX_BYTES = 1 << 20
#: Pattern of a field at the beginning of a message: a path of several parts, or a section before a colon.
_FIELD = re.compile(r"[a-z_]\w*(?:(?:\.\w[\w-]*|\[\d+\])+|(?=:))")


@dataclass(frozen=True)
class Document:
    """Values of a job file, with the line number of each value.

    Attributes:
        values: mappings, lists and scalars.
        source: name of the file in messages.
        lines: location of a value -> its line in the file, from 1; only of values whose line is known.
        overrides: locations that ``--set`` replaced.
    """

    values: dict[str, Any]
    source: str = "job"
    lines: Mapping[Location, int] = field(default_factory=dict)
    overrides: frozenset[Location] = frozenset()

    @classmethod
    def read(cls, path: Path, links: Links = "any") -> Document:
        """Read YAML, TOML or JSON, by the file's suffix.

        Args:
            path: path of the file.
            links: symbolic links that ``path`` may be; see :data:`d9d_core.untrusted.Links`.

        Raises:
            JobError: the file cannot be read or is malformed.
        """
        reader = READERS.get(path.suffix.lower())
        if reader is None and path.is_dir():
            hint = f"{path / 'job.yaml'} of this run" if (path / "job.yaml").is_file() else f"a file in {path}"
            raise JobError(f"{path} is a directory; a job is a file: give {hint}")
        if reader is None:
            raise JobError(f"{path}: the suffix of a job file must be one of {', '.join(READERS)}")
        try:
            text = read_regular(path, MAX_BYTES, links).decode("utf-8")
        except FileNotFoundError:
            raise JobError(f"{path}: no such job file; to write one: d9d new job --help") from None
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
        values, lines = reader(text, str(path))
        if not isinstance(values, dict):
            kind = {list: "a list", type(None): "empty"}.get(type(values), "a single value")
            raise JobError(f"{path}: a job file is a mapping of sections (model: ..., data: ...), this one is {kind}")
        return cls(values, str(path), lines)

    def override(self, assignments: Sequence[str]) -> Document:
        """Apply ``section.field=value`` assignments; values are YAML. An index equal to a list's length appends.

        Raises:
            JobError: an assignment has no field or no ``=``, its value is not YAML, or its path does not fit.
        """
        values = copy.deepcopy(self.values)
        given = set(self.overrides)
        for assignment in assignments:
            path, equals, text = assignment.partition("=")
            parts = location_of(path)
            if not equals or not parts:
                raise JobError(f"--set {assignment}: write section.field=value, for example --set optimizer.lr=3e-4")
            value = read_yaml(text, f"--set {path}")[0]
            try:
                _assign(values, parts, value)
            except LookupError as error:
                raise JobError(f"--set {assignment}: cannot set {dotted(parts)}: {error.args[0]}") from None
            given.add(parts)
        # Overridden values have no line in the file any more.
        lines = {
            location: line for location, line in self.lines.items() if not any(location[: len(g)] == g for g in given)
        }
        return Document(values, self.source, lines, frozenset(given))

    def where(self, location: Location, whole: bool = False) -> str:
        """``file:line`` or ``--set FIELD`` of a value, or of the nearest enclosing value with a known origin.

        Args:
            location: location of the value.
            whole: whether the error is about the value as a whole, so that an override of any of its fields is named.
        """
        if (*location, "name") in self.overrides:  # --set replaced the whole component by selecting another name
            return f"--set {dotted((*location, 'name'))}"
        for length in range(len(location), 0, -1):
            part = location[:length]
            given = sorted(dotted(one) for one in self.overrides if one[:length] == part)
            if part in self.lines and not (given and whole and length == len(location)):
                return f"{self.source}:{self.lines[part]}"
            if given:
                return ", ".join(f"--set {one}" for one in given)
        return self.source

    def placed(self, text: str) -> str:
        """Text of an error, with ``file:line`` or ``--set FIELD`` before each line that begins with a field."""
        return "\n".join(map(self._placed, text.split("\n")))

    def _placed(self, line: str) -> str:
        field = _FIELD.match(line)
        location = location_of(field[0]) if field else ()
        where = self.where(location) if location and location[0] in self.values else self.source
        return line if where == self.source or line.startswith(self.source) else after_place(where, line)

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Add places to the message of a :class:`D9dError` raised inside the block; see :meth:`placed`."""
        try:
            yield
        except D9dError as error:
            error.args = (self.placed(str(error)),)
            raise


def after_place(where: str, text: str) -> str:
    """Error text with its place (``file:line`` or ``--set FIELD``) in front.

    If the text begins with the field that ``--set`` names, the field is not repeated.
    """
    field = where.removeprefix("--set ")
    if field != where:
        for said in (field, field.removesuffix(".name")):
            if text.startswith(f"{said}:"):
                return f"{where}{text.removeprefix(said)}"
    return f"{where}: {text}"


def location_of(path: str) -> Location:
    """Location of a dotted path: ``parallel[0].every`` becomes ``("parallel", 0, "every")``."""
    words = [word for word in re.split(r"\.|\[|\]\.?", path.strip()) if word]
    return tuple(int(word) if word.isdecimal() else word for word in words)


def _assign(values: dict[str, Any], parts: Location, value: Any) -> None:
    target: Any = values
    for depth, (part, following) in enumerate(pairwise(parts)):
        _put(target, parts[:depth], part, _entered(target, parts[: depth + 1], following))
        target = target[part]
    _put(target, parts[:-1], parts[-1], value)


#: Sections that list components, and sections that are one component. In these sections, and in ``data`` and ``sets``
#: of ``evaluation``, a bare word is the name of a component.
_LISTS = ("parallel", "metrics", "trackers", "subscribers")
_NAMED = ("model", "task", "data", "optimizer", "lr_schedule", "pipeline", "peft")


def _entered(target: Any, location: Location, following: int | str) -> Any:
    """Value at ``location``; an absent value or bare name becomes a container that ``following`` can index."""
    part, inner = location[-1], None
    if isinstance(target, dict):
        inner = target.get(part)
    elif isinstance(target, list) and isinstance(part, int) and part < len(target):
        inner = target[part]
    if isinstance(inner, str) and isinstance(following, str):
        # With `optimizer: adamw` in the file, --set optimizer.lr=... keeps the word as the component's name; in other
        # sections, the fields replace the word.
        entry = isinstance(part, int) and len(location) in (2, 3)  # in `metrics`, or in a list of a model's config
        named = location[1:] in [(), ("data",)] or location[1:2] == ("sets",) or entry
        return {"name": inner} if named and location[0] in (*_NAMED, *_LISTS, "evaluation") else {}
    if inner is None:
        return [] if isinstance(following, int) else {}
    return inner


def _put(target: Any, location: Location, part: int | str, value: Any) -> None:
    name = dotted(location) or "the job file"
    if isinstance(target, list) and isinstance(part, int) and part <= len(target):
        target[part : part + 1] = [value]
        return
    if isinstance(target, dict) and isinstance(part, str):
        target[part] = value
        return
    reason = "is not a list" if isinstance(part, int) else "has no fields"
    if isinstance(target, list):
        reason = f"is a list; its next entry is [{len(target)}]"
    raise LookupError(f"{name} {reason}")
