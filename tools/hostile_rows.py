"""Hostile records of corpora: datasets read them, and inference writes their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from d9d_core.components.instantiate import instantiate
from d9d_core.config import PluginConfig
from d9d_core.data import DataContext, DataStream, TextInputs
from d9d_core.errors import DataError, JobError
from d9d_core.job_file.open_union import Named
from d9d_core.registry.capabilities import Chosen
from d9d_core.registry.registry import Registry
from d9d_core.untrusted import parse_json
from d9d_inference.config import JsonlWriterConfig, ParquetWriterConfig
from d9d_inference.part_store import PartStore
from d9d_inference.writers.jsonl import JsonlWriter
from d9d_inference.writers.parquet import ParquetWriter
from d9d_testing.hostile.files import Draw
from d9d_testing.hostile.judge import WrongLoad
from d9d_testing.hostile.values import edited, hostile_values
from hostile_sound import ESCAPE, ODD, TEXT, Sound
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

_MESSAGES = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "because"}]
#: Dataset and variant -> its config, and a sound record.
_RECORDS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"name": "text", "field": "text"}, {"text": TEXT, "id": 3}),
    "text, best fit": (
        {"name": "text", "field": "meta.text", "packing": "best_fit"},
        {"meta": {"text": TEXT}, "id": 3},
    ),
    "documents": ({"name": "documents"}, {"text": TEXT[:30], "id": "a"}),
    "documents, drop": ({"name": "documents", "too_long": "drop", "field": "a.b"}, {"a": {"b": "the fox"}}),
    "labelled": ({"name": "labelled"}, {"text": "the fox", "label": "good"}),
    "labelled pairs": ({"name": "labelled", "pair": "other"}, {"text": "the fox", "other": "a dog", "label": 1}),
    "labelled names": ({"name": "labelled", "labels": ["a", ESCAPE]}, {"text": "the fox", "label": ESCAPE}),
    "labelled words": ({"name": "labelled", "per": "word"}, {"tokens": ["the", "fox"], "labels": ["a", -100]}),
    "pairs": ({"name": "pairs", "negatives": 1}, {"query": "the fox", "positive": "runs", "negatives": ["sits"]}),
    "chat": ({"name": "chat"}, {"messages": _MESSAGES, "tools": None}),
    "chat, packed": ({"name": "chat", "packing": "best_fit"}, {"prompt": "why", "completion": "because"}),
    "preference": ({"name": "preference"}, {"prompt": "why", "chosen": "because", "rejected": "no"}),
    "preference of messages": ({"name": "preference"}, {"chosen": _MESSAGES, "rejected": [*_MESSAGES[:1], *_MESSAGES]}),
    "dataset": (
        {"name": "dataset", "build": f"{__name__}:lines_of", "padding": {"tokens": 0}},
        {"tokens": [1, 2], "score": 0.5},
    ),
}
#: Lines that are no valid JSON record.
_LINES = (
    b"", b" ", b"\xff", b"\xef\xbb\xbf{}", b'{"text": "a", "text": "b"}', b'{"text": NaN}',
    b'{"text": 1e999, "label": Infinity}',
    b"[" * 10**4, b'{"text":' * 300 + b"1" + b"}" * 300, b'{"text": "\\ud800"}', b'{"\\udfff": "a", "text": "a"}',
    b'{"text": 1' + b"0" * 5000 + b"}", b"null", b"3", b'"text"', b"{}", b'{"text": "a"}\r', b'{"text": "\0"}',
    b'{"text": "',
    b'{"text": "\\u0000", "label": "\\u001b[2J"}',
)  # fmt: skip
_DATASET: TypeAdapter[PluginConfig] = TypeAdapter(Annotated[PluginConfig, Named("dataset")])


def row_case(sound: Sound, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
    """Corpus records, read by datasets for training or inference; the rows of inference are written."""
    copy.mkdir()
    name = draw(st.sampled_from(sorted(_RECORDS)))
    fields, record = _RECORDS[name]
    lines = [draw(_line(record)) for _ in range(draw(st.integers(1, 5)))]
    file = copy / "a.jsonl"
    file.write_bytes(b"\n".join(lines))
    if draw(st.sampled_from([True, *[False] * 5])):
        file = copy / "a.json"
        file.write_bytes(b"[" + b",".join(lines) + b"]")
    common = {
        "sources": [str(file)], "sequence_length": 32, "malformed": draw(st.sampled_from(["error", "skip"])),
    }  # fmt: skip
    if name in ("chat", "preference"):
        common["tokenizer"] = str(sound.chat_tokenizer)
    elif name == "labelled words":
        common["tokenizer"] = "bytes"
    if name == "dataset":
        data: dict[str, Any] = {**fields, "arguments": {"path": str(file)}}
    else:
        data = {**common, **fields}
    if draw(st.sampled_from([True, *[False] * 5])):
        data = {"name": "mixture", "parts": [{"data": data}, {"data": {**data, "shuffle": False}}]}
    one_pass = draw(st.booleans())
    inputs: TextInputs = "own"
    if one_pass:
        inputs = draw(st.sampled_from(["own", "with_end", "as_encoded", "without_end"]))
    texts = draw(st.lists(st.text(), min_size=20, max_size=20))

    def read() -> None:
        notes: list[str] = []
        context = DataContext(
            0, 2, 1, sound.root / "cache", note=notes.append, one_pass=one_pass, inputs=inputs
        )  # fmt: skip
        stream = open_dataset(sound.registry, data, context)
        if one_pass:
            write_rows(rows_of(stream), texts, copy / "written")
        else:
            for _ in range(3):
                stream.next_pack()
            stream.load_state(json.loads(json.dumps(stream.state())))
            stream.next_pack()
        (copy / "assets").mkdir()
        stream.save_assets(copy / "assets")

    return f"{name}, {json.dumps(data)[-60:]}: {b' '.join(lines)[:200]!r}", read


@st.composite
def _line(draw: st.DrawFn, record: Mapping[str, Any]) -> bytes:
    """Line of a corpus: a sound record, an edited one, one with an odd value in a field, or an invalid line."""
    way = draw(st.sampled_from([*["sound"] * 8, "edited", "edited", "odd", "line"]))
    if way == "line":
        return draw(st.sampled_from(_LINES))
    values: Any = draw(edited(record)) if way == "edited" else dict(record)
    if way == "odd":
        values[draw(st.sampled_from([*record, ESCAPE, "rows", "lengths"]))] = draw(hostile_values() | ODD)
    return json.dumps(values, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


def lines_of(path: str) -> list[Any]:
    """Dataset of the values in a file's lines, as a user-defined function may return it."""
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines() if line.strip()]


def open_dataset(registry: Registry, values: Mapping[str, Any], context: DataContext) -> DataStream:
    """Open a dataset in the same way as a job.

    Raises:
        D9dError: the dataset cannot be opened.
    """
    try:
        config = _DATASET.validate_python(values, context={"registry": registry})
    except ValidationError as error:
        raise JobError(str(error)) from error
    parts = [part.data for part in getattr(config, "parts", ())]
    inner = [(Chosen("data.parts", registry.find("dataset", part.selector)), part) for part in parts]
    stream: DataStream = instantiate(Chosen("data", registry.find("dataset", config.selector), inner), config, context)
    return stream


def rows_of(stream: DataStream) -> list[int]:
    """Row indices of one pass.

    Raises:
        DataError: the dataset cannot make a single pass.
        WrongLoad: a row is missing, or appears twice.
    """
    count, samples = stream.facts.get("rows"), stream.facts.get("samples")
    if not isinstance(count, int) or not isinstance(samples, int):
        raise DataError("no pass can be made over it")
    packed, found = stream.facts.get("packed") is True, list[int]()
    for _ in range(samples // 2 + 2):
        for microbatch in stream.next_pack():
            for place, first in enumerate(microbatch["rows"].tolist()):
                rows = int(microbatch["documents"][place].max()) + 1 if packed else 1
                found += range(first, first + rows) if first >= 0 else ()
    if sorted(found) != list(range(count)):
        raise WrongLoad(f"rows {sorted(found)[:20]} of {count}")
    return found


def write_rows(numbers: Sequence[int], texts: Sequence[str], directory: Path) -> None:
    """Write rows in both formats, as an inference run does, and read them back.

    Raises:
        WrongLoad: a row is missing, appears twice or has other values.
    """
    half = len(numbers) // 2
    for writer in (JsonlWriter(JsonlWriterConfig()), ParquetWriter(ParquetWriterConfig())):
        store = PartStore(directory / writer.suffix, writer)
        with store.opened():
            store.begin({})
            for begin, end in ((0, half), (half, len(numbers))) if half else ((0, len(numbers)),):
                rows = list(range(begin, end))
                store.write(begin, end - begin, _columns(rows, texts), {})
            store.finish(len(numbers), {})
        if writer.suffix == ".jsonl":
            found = [parse_json(line, strict=True) for line in store.output.read_bytes().split(b"\n") if line]
        else:
            import pyarrow.parquet as pq  # type: ignore[import-untyped]

            found = pq.read_table(store.output).to_pylist()
        expected = [text_of(number, texts) for number in range(len(numbers))]
        if [one["row"] for one in found] != list(range(len(numbers))) or [one["text"] for one in found] != expected:
            raise WrongLoad(f"{writer.suffix}: {found[:2]!r}")


def text_of(number: int, texts: Sequence[str]) -> str:
    """Text of a row."""
    return texts[number % len(texts)]


def _columns(rows: Sequence[int], texts: Sequence[str]) -> dict[str, list[Any]]:
    odd = (float("nan"), float("inf"), 1e-320, -0.0, 3.5)
    return {
        "row": list(rows),
        "text": [text_of(row, texts) for row in rows],
        "score": [odd[row % len(odd)] for row in rows],
        "vector": [np.asarray(odd[: row % len(odd)], dtype=np.float32) for row in rows],
        "tokens": [np.arange(row % 3) for row in rows],
    }
