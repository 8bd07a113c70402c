"""Datasets for single files, chosen by the files' contents."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d9d_core.errors import JobError
from d9d_core.untrusted import open_regular, parse_json

#: Fields of a job's data section that also apply to other files.
_KEPT = (
    "tokenizer", "sequence_length", "end_of_text", "template_arguments", "pad_multiple", "loss", "too_long",
    "special_tokens", "tool_arguments",
)  # fmt: skip
#: Number of bytes that are read of the first record, at most.
_MOST = 64 * 2**20


def dataset_of(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Choose a dataset for a file by its content, and return its section: one sample per conversation or document.

    JSON lines with ``messages``, or with ``prompt`` and ``completion``, are conversations; JSON lines with ``text``,
    and text files, are documents.

    Args:
        path: path of the file.
        like: data section of the job; its fields that apply to any file, such as tokenizer and length, are used.

    Raises:
        JobError: the file cannot be read, is empty, or has records of another kind; or the job trains its tokenizer.
    """
    structured = path.suffix in (".jsonl", ".ndjson")
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            line = next((line for line in iter(lambda: file.readline(_MOST), b"") if line.strip()), b"")
    except OSError as error:
        raise JobError(f"--data: {path} cannot be read: {error.strerror or error}") from error
    if not line:
        raise JobError(f"--data: {path} is empty; give a file with records")
    name, fields = "documents", {"field": "text"} if structured else {}
    if structured:
        try:
            record = parse_json(line)
        except ValueError as error:
            raise JobError(f"--data: {path}: the first record is not JSON: {error}; correct it") from error
        present = record.keys() if isinstance(record, dict) else ()
        if "messages" in present or {"prompt", "completion"} <= set(present):
            name, fields = "chat", {}
        elif "text" not in present:
            has = ", ".join(map(str, list(present)[:20])) or "no fields"
            raise JobError(
                f"--data: the first record of {path} has {has}; give records with text, messages, or prompt and "
                "completion, or describe the data in a job's evaluation section (--like JOB)"
            )
    chat_only = {"template_arguments", "loss", "tool_arguments"}
    kept = {key: like[key] for key in _KEPT if key in like and (name == "chat" or key not in chat_only)}
    if name == "chat":
        kept.pop("end_of_text", None)
        if not isinstance(kept.get("tokenizer"), str) or kept["tokenizer"] == "bytes":
            kept.pop("tokenizer", None)
    if isinstance(kept.get("tokenizer"), Mapping):
        raise JobError(
            f"--data: the job trains a tokenizer on its data, which {path} does not have; describe the data in the "
            "job's evaluation section"
        )
    length = int(kept.get("sequence_length", 0))
    multiple = int(kept.get("pad_multiple", 8))
    if length % multiple:
        kept["pad_multiple"] = 1
    return {"name": name, "sources": [str(path)], **fields, **kept}
