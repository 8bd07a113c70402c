"""Job files found in a directory: read as data, without running code, because the user may not know their author.

A job file that the user names is trusted like a script. A job file that a command finds in a directory (of a run, a
model, an adapter) may be malicious: its plain fields and names of installed components are used, and fields that would
import code or open an address are refused, in an error with the command that trusts the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from d9d_core.config import LoadsCode, Location, Section, dotted
from d9d_core.errors import JobError
from d9d_core.job_file.document import Document
from d9d_core.job_file.job import BaseJob

#: Sections that are ignored, because a command that reads the directory does not train: it writes to no tracker, has no
#: subscribers, sets no learning rate and profiles no step.
_LEFT_OUT = ("trackers", "subscribers", "lr_schedule", "profiling")
#: Sections of free text, which is never opened as an address.
_TEXT = (("run",),)
_SHOWN = 60


@dataclass(frozen=True)
class SavedJob:
    """Job file that a command finds in a directory.

    Attributes:
        path: path of the job file.
        trust: command, for messages, in which the user names the file and so trusts it.
        files: single-file plugins that are trusted because the user named them on the command line.
    """

    path: Path
    trust: str
    files: Sequence[Path] = field(default=())

    def read(self, overrides: Sequence[str] = ()) -> Document:
        """Read the file, and refuse plugin files and addresses before names are resolved.

        Args:
            overrides: assignments ``section.field=value`` of the command line, which are trusted.

        Raises:
            JobError: the file is invalid, or names a plugin file or an address; one line per field.
        """
        found = Document.read(self.path, "near")
        values = {name: value for name, value in found.values.items() if name not in _LEFT_OUT}
        document = Document(values, found.source, found.lines).override(overrides)
        refused = [*self._plugin_files(document), *_addresses(document)]
        self._refuse(document, refused)
        return document

    def check(self, job: BaseJob, document: Document) -> None:
        """Refuse fields of the validated job that would import code.

        Raises:
            JobError: a field would import code; one line per field.
        """
        found = ((where, f"names code to import, {_short(value)}") for where, value in _imports(job, (), None))
        self._refuse(document, [(where, what) for where, what in found if not _is_given(where, document)])

    def _plugin_files(self, document: Document) -> Iterator[tuple[Location, str]]:
        section = document.values.get("plugins")
        files = section.get("files") if isinstance(section, Mapping) else section
        trusted = {os.path.realpath(path) for path in self.files}
        for index, file in enumerate(files if isinstance(files, list) else [] if files is None else [files]):
            where: Location = ("plugins", "files", index) if isinstance(section, Mapping) else ("plugins", index)
            path = os.path.realpath(self.path.absolute().parent / str(file))
            if path not in trusted and not _is_given(where, document):
                yield where, f"names a plugin file, {_short(file)}"

    def _refuse(self, document: Document, refused: Sequence[tuple[Location, str]]) -> None:
        if refused:
            lines = [f"{document.where(where)}: {dotted(where)} {what}" for where, what in refused[:_SHOWN]]
            raise JobError(
                "\n".join(lines) + "\n"
                "a job file found in a directory runs no code and opens no address; "
                f"read {self.path}, and if you trust it, name it: {self.trust}"
            )


def _addresses(document: Document) -> Iterator[tuple[Location, str]]:
    for where, value in _texts(document.values, ()):
        if "://" in value and not any(where[: len(text)] == text for text in _TEXT) and not _is_given(where, document):
            yield where, f"is an address, {_short(value)}"


def _texts(value: Any, where: Location) -> Iterator[tuple[Location, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, (*where, str(name)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*where, index))


def _is_given(where: Location, document: Document) -> bool:
    """Whether the command line set a field with ``--set``."""
    return any(where[: len(given)] == given for given in document.overrides)


def _imports(value: Any, where: Location, mark: LoadsCode | None) -> Iterator[tuple[Location, str]]:
    """Values of fields whose annotation has the marker :class:`LoadsCode`, including fields of nested configs."""
    if isinstance(value, Section):
        for name, info in type(value).model_fields.items():
            inner = code_mark((*info.metadata, info.annotation))
            yield from _imports(getattr(value, name), (*where, name), inner)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _imports(item, (*where, str(name)), mark)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _imports(item, (*where, index), mark)
    elif isinstance(value, str) and mark is not None and mark.imports(value):
        yield where, value


def code_mark(annotations: tuple[Any, ...]) -> LoadsCode | None:
    """:class:`LoadsCode` marker in the metadata or the nested annotations of a field; ``None`` if there is none."""
    for annotation in annotations:
        if isinstance(annotation, LoadsCode):
            return annotation
        if mark := code_mark((*getattr(annotation, "__metadata__", ()), *get_args(annotation))):
            return mark
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
