"""Facts about a model directory, records and the machine, from which a job file is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from d9d_core.config import PluginConfig
from d9d_core.errors import DataError, JobError
from d9d_core.job_file.found_model import find_model
from d9d_core.registry.registry import Registry
from d9d_core.untrusted import parse_json, read_regular

from d9d_data.chat.encode import strings_in
from d9d_data.chat.formats import SILENT, Found, chat_format_of, preference_format_of, used_fields
from d9d_data.chat.template import ChatTemplate
from d9d_data.config import PreparedConfig
from d9d_data.corpus.format import with_format
from d9d_data.corpus.worker import Setup
from d9d_data.fields.label_table import Classes, LabelTable
from d9d_data.new_job.kinds import Kind
from d9d_data.sources.document import STRUCTURED, Piece
from d9d_data.sources.find import find_files
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.place import Record, refuse
from d9d_data.sources.records import read_records, value_of
from d9d_data.tokenizer.base import TOKENIZER_FILE
from d9d_data.tokenizer.select import make_tokenizer

#: Number of records of each file whose lengths and fields are read.
_LOOKED_AT = 200
#: Number of records, over all files, up to which records and their labels are counted.
_LABELS_LOOKED_AT = 20_000
#: Largest proposed sample length in positions, and the divisor of every proposed length.
_LONGEST, _MULTIPLE = 4096, 64
#: Fraction of the records that is held out for evaluation.
HELD_OUT = 0.05
#: Usual fields of negatives; the first one needs no line in the job file.
_NEGATIVES = ("negative", "negatives", "neg", "hard_negative", "hard_negatives")
#: Number of files whose first records are read and encoded.
_FILES_LOOKED_AT = 20
_TEXT_FORMATS = frozenset({"text", "topics", "docstrings"})


@dataclass(frozen=True)
class Model:
    """Facts about the directory of a model.

    Attributes:
        directory: the directory.
        selector: name of the model plugin that reads the directory.
        type: ``model_type`` of its ``config.json``; empty for a checkpoint.
        size: bytes of its safetensors files.
        positions: longest sequence, if its ``config.json`` states one.
        tied: whether the head shares the embedding's weight.
        predicts_further: whether a job that starts from this model trains layers of multi-token prediction (``mtp``).
        tokenizer: directory of its tokenizer, if it has one.
        template: whether it has a chat template.
    """

    directory: str
    selector: str
    type: str
    size: int
    positions: int | None
    tied: bool
    predicts_further: bool
    tokenizer: Path | None
    template: bool


@dataclass(frozen=True)
class Records:
    """Facts about the records to train on.

    Attributes:
        sources: values of ``data.sources``.
        count: number of records; -1 for plain text, or if there are more than can be counted quickly.
        fields: values for fields of the dataset's config: names of fields of the records, and for ``format`` a format.
        longest: number of tokens of the longest record among the first records; ``None`` without a tokenizer.
        classes: number of classes: of different names, or the largest class number plus 1.
        unused: fields of the first records that the dataset does not read.
        few: whether the fraction :data:`HELD_OUT` is less than one record (for text files: less than one file).
    """

    sources: tuple[str, ...]
    count: int
    fields: Mapping[str, str]
    longest: int | None
    classes: int = 0
    unused: tuple[str, ...] = ()
    few: bool = False


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
        predicts_further=_predicts_further(fields.get("d9d")),
        tokenizer=tokenizer,
        template=tokenizer is not None and ChatTemplate.find(path) is not None,
    )


def _predicts_further(own: object) -> bool:
    """Whether d9d's own section of a ``config.json`` turns multi-token prediction on."""
    further = own.get("mtp") if isinstance(own, dict) else None
    return isinstance(further, dict) and bool(further.get("depths"))


def look_at_records(sources: Sequence[str], kind: Kind, tokenizer: Path | None) -> Records:
    """Facts about the records to train on.

    Raises:
        DataError: there are no records, or they lack a field of the kind.
    """
    files = find_files(sources)
    if all(file.format in _TEXT_FORMATS for file in files):
        if kind.dataset != "text":
            raise DataError(f"--data: {files[0].name} is plain text without fields; give records such as {kind.record}")
        few = all(file.format == "text" for file in files) and len(files) * HELD_OUT < 1
        return Records(tuple(sources), -1, {}, None, few=few)
    first = next(iter(read_records(files[0])), None)
    if first is None:
        raise DataError(f"--data: {files[0].name} has no records; give records such as {kind.record}")
    _check_kind(first, kind)
    form = _format_of(first, kind)
    fields = _fields_of(first, kind) | _negatives_of(first, kind)
    some = [record for file in files[:_FILES_LOOKED_AT] for record in islice(read_records(file), _LOOKED_AT)]
    longest = None
    if tokenizer is not None:
        texts = [" ".join(strings_in(record.values)) for record in some]
        longest = max(map(len, make_tokenizer(str(tokenizer), None, ()).encode(texts)))
    named = {name: theirs for name, theirs in fields.items() if theirs != name or name == "field"}
    if form is not None and form.name not in SILENT:
        named["format"] = form.name
    used = {*fields.values()} if form is None else {*used_fields(form.fields), form.fields.tools}
    present = dict.fromkeys(field for record in some for field, value in record.values.items() if value is not None)
    unused = tuple(field for field in present if field not in used)
    count = _count(files)
    few = 0 <= count * HELD_OUT < 1
    return Records(tuple(sources), count, named, longest, _classes(files, fields), unused, few)


def check_records(config: PluginConfig, tokenizer: Path | None) -> None:
    """Encode the first records of each of the first files as the dataset of a job does.

    Args:
        config: config of the dataset.
        tokenizer: directory of the model's tokenizer, for a config that names none.

    Raises:
        DataError: a record is malformed, has another format than the first one, or is refused by the chat template.
    """
    assert isinstance(config, PreparedConfig)
    choice = getattr(config, "tokenizer", None) or (str(tokenizer) if tokenizer else "bytes")
    # Training a tokenizer reads all texts; any tokenizer shows whether records are malformed.
    choice = choice if isinstance(choice, str) else "bytes"
    files = find_files(config.sources)
    config = with_format(config.model_copy(update={"tokenizer": choice}), files, lambda _line: None)
    encoder, _ = Setup.of(config, Path()).make_encoder()
    for file in files[:_FILES_LOOKED_AT]:
        field = getattr(config, "field", None) if file.format in STRUCTURED else None
        next(iter(encoder.encode([Piece(file, field)], refuse)), None)  # a batch of some hundred records


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
    """Field of the dataset's config -> name of the record's field that it stands for."""
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


def _check_kind(record: Record, kind: Kind) -> None:
    """Raise if a record is of another kind of job, and name that kind."""

    def has(*fields: str) -> bool:
        return all(value_of(record, field) is not None for field in fields)

    if kind.dataset == "chat" and has("chosen", "rejected"):
        raise DataError(f"--data: {record.place} has the fields chosen and rejected; use 'd9d new job dpo'")
    if kind.dataset == "preference" and not has("rejected"):
        try:
            chat_format_of(record)
        except DataError:
            return  # the error about preference formats says more
        raise DataError(
            f"--data: {record.place} is a conversation without a rejected answer; use 'd9d new job sft', or give "
            f"records such as {kind.record}"
        )
    if kind.dataset == "labelled":
        names = (*kind.fields["field"], "tokens", "words")
        words = next((name for name in names if isinstance(value_of(record, name), list)), None)
        if words is not None:
            raise DataError(
                f"--data: {record.place} has a list of words in {words}, but classification reads one text with one "
                "label; for a label per word, write a job from examples/classification with 'task: "
                "token_classification', a head of that kind, and 'per: word' in data"
            )
        label = next((name for name in kind.fields["label"] if isinstance(value_of(record, name), list)), None)
        if label is not None:
            raise DataError(
                f"--data: {record.place} has a list of labels in {label}, but classification learns one label per "
                "text; write one record per text with a single label"
            )


def _negatives_of(record: Record, kind: Kind) -> dict[str, str]:
    """Values of the config's fields ``negative`` and ``negatives`` for a record; empty if it has no negatives."""
    if kind.dataset != "pairs":
        return {}
    field = next((name for name in _NEGATIVES if value_of(record, name)), None)
    if field is None:
        return {}
    value = value_of(record, field)
    return {"negative": field, "negatives": str(len(value) if isinstance(value, list) else 1)}


def _format_of(record: Record, kind: Kind) -> Found[Any] | None:
    """Format of a record; ``None`` for datasets without formats."""
    finds: Mapping[str, Callable[[Record], Found[Any]]] = {"chat": chat_format_of, "preference": preference_format_of}
    if kind.dataset not in finds:
        return None
    try:
        return finds[kind.dataset](record)
    except DataError as error:
        raise DataError(f"--data: {error}") from error


def _count(files: Sequence[SourceFile]) -> int:
    """Number of records in all files; -1 if it is above :data:`_LABELS_LOOKED_AT`."""
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
    table, field, seen = LabelTable(None), fields["label"], 0
    for file in files:
        for record in islice(read_records(file), _LABELS_LOOKED_AT - seen):
            table.id_of(table.check(value_of(record, field), f"--data: {record.place}: {field}"))
            seen += 1
    return Classes([table.labels], None).count
