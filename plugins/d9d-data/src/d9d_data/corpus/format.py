"""Format of a dataset's records, decided once by its first record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from d9d_core.errors import DataError

from d9d_data.chat.formats import CHAT_FORMATS, PREFERENCE_FORMATS, SILENT, chat_format_of, preference_format_of, told
from d9d_data.config import ChatConfig, MessageFormat, PreferenceConfig, PreparedConfig, TokensConfig
from d9d_data.fields.learned import learned_field
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.place import Record, refuse
from d9d_data.sources.records import read_records

C = TypeVar("C", bound=PreparedConfig)
# Number of records to search for a record of a known format, if malformed records are left out.
_LOOKED_AT = 1000


def with_format(config: C, files: Sequence[SourceFile], note: Callable[[str], None]) -> C:
    """Dataset config with the format of its records: as named in the config, or else determined by the first record.

    Args:
        config: config of a dataset.
        files: files of the dataset, in order.
        note: called with a line about a format that was found.

    Raises:
        DataError: with ``malformed: error``, the first record has no known format, several formats, or another format
            than the named one.
    """
    if isinstance(config, TokensConfig):
        decided = (config.labels, config.mask) != (None, None)
    else:
        decided = not isinstance(config, ChatConfig | PreferenceConfig) or isinstance(config.format, MessageFormat)
    if decided:
        return config
    for record in _first_records(files, config.malformed):
        try:
            fields, line = _of(config, record)
        except DataError:
            if config.malformed == "error":
                raise
        else:
            # The train split prints the line; the held-out split of the same sources has the same format.
            if line and config.split == "train":
                note(line)
            return config.model_copy(update=fields)
    return config


def _of(config: PreparedConfig, record: Record) -> tuple[dict[str, Any], str]:
    """Values of the config's fields that a record determines, and a line to print about them; empty for no line."""
    if isinstance(config, TokensConfig):
        labels, mask = learned_field(record)
        learned = f"the tokens to learn are in {labels or mask}" if labels or mask else "all tokens are learned"
        return {"labels": labels, "mask": mask}, f"tokens: {learned}, by the first record, {record.place}"
    assert isinstance(config, ChatConfig | PreferenceConfig)
    formats: Mapping[str, Any] = CHAT_FORMATS if isinstance(config, ChatConfig) else PREFERENCE_FORMATS
    assert config.format is None or isinstance(config.format, str)
    names = tuple(formats) if config.format is None else (config.format,)
    found: Any
    try:
        find: Any = chat_format_of if isinstance(config, ChatConfig) else preference_format_of
        found = find(record, names)
    except DataError as error:
        raise DataError(f"data.format: {error}") from error
    line = told(found, record, config.selector) if config.format is None and found.name not in SILENT else ""
    return {"format": found.fields}, line


def _first_records(files: Sequence[SourceFile], malformed: str) -> Iterator[Record]:
    """Yield the first record; if malformed records are left out, the first :data:`_LOOKED_AT` parseable records."""
    reject = refuse if malformed == "error" else lambda _place, _problem: None
    records = (record for file in files for record in read_records(file, reject=reject))
    yield from islice(records, 1 if malformed == "error" else _LOOKED_AT)
