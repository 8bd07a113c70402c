"""Facts about a model directory, records and the machine, from which a job file is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from d9d_core.errors import DataError, JobError
from d9d_core.job_file.found_model import find_model
from d9d_core.registry.registry import Registry
from d9d_core.untrusted import parse_json, read_regular

from d9d_data.chat.encode import strings_in
from d9d_data.chat.formats import SILENT, Found, chat_format_of, preference_format_of
from d9d_data.chat.template import ChatTemplate
from d9d_data.new_job.kinds import Kind
from d9d_data.sources.find import find_files
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.place import Record
from d9d_data.sources.records import read_records, value_of
from d9d_data.tokenizer.base import TOKENIZER_FILE
from d9d_data.tokenizer.select import make_tokenizer

#: Records whose lengths and labels are looked at.
_LOOKED_AT = 200
_LABELS_LOOKED_AT = 20_000
#: Longest samples that are proposed, and the divisor of their length.
_LONGEST, _MULTIPLE = 4096, 64
_TEXT_FORMATS = frozenset({"text", "topics", "docstrings"})


@dataclass(frozen=True)
class Model:
    """Facts about the directory of a model.

    Attributes:
        directory: the directory.
        selector: name of the model plugin that reads it.
        type: ``model_type`` of its ``config.json``; empty for a checkpoint.
        size: bytes of its safetensors files.
        positions: longest sequence, if its ``config.json`` states one.
        tied: whether the head is the embedding.
        tokenizer: directory of its tokenizer, if it has one.
        template: whether it has a chat template.
    """

    directory: str
    selector: str
    type: str
    size: int
    positions: int | None
    tied: bool
    tokenizer: Path | None
    template: bool


@dataclass(frozen=True)
class Records:
    """Facts about the records to train on.

    Attributes:
        sources: values of ``data.sources``.
        count: number of records, or -1 if there are more than could be counted quickly.
        fields: field of the dataset's config -> name of the field in the records, or of the records' format.
        longest: tokens of the longest looked-at record; ``None`` without a tokenizer.
        classes: number of different labels.
    """

    sources: tuple[str, ...]
    count: int
    fields: Mapping[str, str]
    longest: int | None
    classes: int = 0


def look_at_model(directory: str, registry: Registry) -> Model:
    """Facts about the directory of a model.

    Raises:
        CheckpointError: it has no readable ``config.json``.
        JobError: it does not exist, or no installed model reads it.
    """
    path = Path(directory)
    if not path.exists():
        name = directory.strip("/").rpartition("/")[2]
        download = f"; download it: hf download {directory} --local-dir ./{name}" if _is_hub_name(directory) else ""
        raise JobError(f"--model: {directory} does not exist{download}")
    selector, _ = find_model(directory, registry)
    file = path / "config.json"
    data = parse_json(read_regular(file, links="near")) if file.is_file() else {}  # a checkpoint has none
    inner = data.get("text_config")
    fields = {**(inner if isinstance(inner, dict) else {}), **data}
    positions = fields.get("max_position_embeddings")
    tokenizer = path if (path / TOKENIZER_FILE).is_file() else None
    return Model(
        directory=directory,
        selector=selector,
        type=str(data.get("model_type", "")),
        size=sum(file.stat().st_size for file in path.glob("*.safetensors")),
        positions=positions if isinstance(positions, int) and positions > 0 else None,
        tied=fields.get("tie_word_embeddings") is not False,
        tokenizer=tokenizer,
        template=tokenizer is not None and ChatTemplate.find(path) is not None,
    )


def look_at_records(sources: Sequence[str], kind: Kind, tokenizer: Path | None) -> Records:
    """Facts about the records to train on.

    Raises:
        DataError: there are no records, or they lack a field of the kind.
    """
    files = find_files(sources)
    if all(file.format in _TEXT_FORMATS for file in files):
        if kind.dataset != "text":
            raise DataError(f"--data: {files[0].name} is plain text without fields; give records such as {kind.record}")
        return Records(tuple(sources), -1, {}, None)
    first = next(iter(read_records(files[0])), None)
    if first is None:
        raise DataError(f"--data: {files[0].name} has no records; give records such as {kind.record}")
    fields = _fields_of(first, kind) | _format_of(first, kind)
    some = list(islice(read_records(files[0]), _LOOKED_AT))
    longest = None
    if tokenizer is not None:
        texts = [" ".join(strings_in(record.values)) for record in some]
        longest = max(map(len, make_tokenizer(str(tokenizer), None, ()).encode(texts)))
    named = {name: theirs for name, theirs in fields.items() if theirs != name or name == "field"}
    return Records(tuple(sources), _count(files), named, longest, _classes(files, fields))


def proposed_length(records: Records, model: Model | None) -> int:
    """Number of positions of a sample that holds most records; at most the positions that the model supports."""
    wanted = _LONGEST if records.longest is None else int(records.longest * 1.2) + _MULTIPLE
    limit = min(_LONGEST, (model and model.positions) or _LONGEST)
    return min(-(-wanted // _MULTIPLE) * _MULTIPLE, limit)


def gpus() -> tuple[int, str]:
    """Number and name of this machine's GPUs; 0 and an empty text without one."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, torch.cuda.get_device_name(0) if count else ""


def _is_hub_name(text: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None


def _fields_of(record: Record, kind: Kind) -> dict[str, str]:
    """Names of the record's fields that the dataset reads."""
    found = {}
    for name, candidates in dict(kind.fields).items():
        present = [field for field in candidates if value_of(record, field) is not None]
        if not present:
            has = ", ".join(map(str, record.values)) or "no fields"
            raise DataError(
                f"--data: {record.place} has none of the fields {', '.join(candidates)} for the {name} of a record (it "
                f"has {has}); rename one, or name it in the job file: data.{name}"
            )
        found[name] = present[0]
    return found


def _format_of(record: Record, kind: Kind) -> dict[str, str]:
    """Format of a record by the field that names it; empty for the formats of the examples, and without formats."""
    finds: Mapping[str, Callable[[Record], Found[Any]]] = {"chat": chat_format_of, "preference": preference_format_of}
    if kind.dataset not in finds:
        return {}
    try:
        name = finds[kind.dataset](record).name
    except DataError as error:
        raise DataError(f"--data: {error}") from error
    return {} if name in SILENT else {"format": name}


def _count(files: Sequence[SourceFile]) -> int:
    """Number of records in small files; -1 for files that take long to read."""
    total = 0
    for file in files:
        for _ in islice(read_records(file), _LABELS_LOOKED_AT - total + 1):
            total += 1
        if total > _LABELS_LOOKED_AT:
            return -1
    return total


def _classes(files: Sequence[SourceFile], fields: Mapping[str, str]) -> int:
    if "label" not in fields:
        return 0
    labels: set[Any] = set()
    seen = 0
    for file in files:
        for record in islice(read_records(file), _LABELS_LOOKED_AT - seen):
            labels.add(str(value_of(record, fields["label"])))
            seen += 1
    return len(labels)
