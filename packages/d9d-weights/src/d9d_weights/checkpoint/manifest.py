"""Manifest of a checkpoint, ``manifest.json``: written last, with checksums of all files and of itself."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from d9d_core.errors import CheckpointError
from d9d_core.untrusted import parse_json

from d9d_weights.checkpoint.manifest_model import FORMAT, VALUES, VERSION, check_form
from d9d_weights.files.atomic import json_bytes
from d9d_weights.files.directory import MANIFEST, DirectoryStore
from d9d_weights.files.safetensors import Written

#: Limit of the size of a checkpoint's JSON files in bytes, enough for thousands of ranks with thousands of tensors.
MAX_BYTES = 1 << 30
_CHUNK = 1 << 22


def tensors_file(rank: int) -> str:
    """Name of the tensor file that a rank writes."""
    return f"tensors-{rank:05d}.safetensors"


def manifest_bytes(
    step: int, table: Mapping[str, Any], files: Mapping[str, Written], facts: Mapping[str, Any]
) -> bytes:
    """Serialise a manifest.

    Args:
        step: number of optimizer steps done.
        table: for each tensor name, its ``dtype``, ``shape``, and ``pieces`` with ``file``, ``key`` in the file,
            ``offset`` and ``shape``.
        files: size and checksum of each file of the checkpoint except the manifest, by name.
        facts: further top-level JSON values of the manifest, by name.
    """
    described = {name: {"bytes": written.bytes, "sha256": written.sha256} for name, written in files.items()}
    content = {"format": FORMAT, "version": VERSION, "step": step, "tensors": table, "files": described, **facts}
    return json_bytes({**content, "sha256": _digest(content)})


def readable_bytes(values: Mapping[str, Any]) -> bytes:
    """Serialise values as JSON, and check that a resumed run can read them.

    Raises:
        CheckpointError: a value is not a JSON value, is NaN or infinite, or could not be read again.
    """
    try:
        content = json_bytes(values)
        parse_json(content, strict=True, limit=MAX_BYTES)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"a component's state cannot be saved as JSON: {error}; correct its state()") from error
    return content


def with_values(content: bytes, more: Mapping[str, Any]) -> bytes:
    """Add values to a serialised JSON object; raises as :func:`readable_bytes` does."""
    return readable_bytes({**json.loads(content), **more}) if more else content


def read_manifest(storage: DirectoryStore, name: str) -> dict[str, Any]:
    """Read and check a checkpoint's manifest; other files are not read.

    Raises:
        CheckpointError: the manifest is absent, damaged, of another format, or has an invalid value.
    """
    where = f"checkpoint {storage.location(name)}"
    try:
        manifest = read_values(storage, name, MANIFEST)
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} lacks {MANIFEST}: the checkpoint is incomplete or damaged") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{where}: {MANIFEST} cannot be read ({error})") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{where}: {MANIFEST} is not a JSON object")
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        has = f"{str(manifest.get('format'))[:40]} version {str(manifest.get('version'))[:40]}"
        raise CheckpointError(f"{where} has the format {has}; this d9d reads {FORMAT} version {VERSION}")
    if manifest.get("sha256") != _digest(manifest):
        raise CheckpointError(f"{where}: the checksum of {MANIFEST} is wrong, so the file is damaged")
    check_form(manifest, f"{where}: {MANIFEST}")
    return manifest


def read_values(storage: DirectoryStore, name: str, file: str) -> Any:
    """Read a JSON file of a checkpoint.

    Raises:
        FileNotFoundError: the file is absent.
        OSError: the file cannot be read, is not a regular file, or is too large.
        ValueError: the file is not strict JSON.
    """
    with storage.open(name, file) as source:
        content = source.read(MAX_BYTES + 1)
    return parse_json(content, strict=True, limit=MAX_BYTES)


def read_state(storage: DirectoryStore, name: str) -> dict[str, Any]:
    """Read the values of a checkpoint that are not tensors.

    Raises:
        CheckpointError: the file cannot be read, or is not a JSON object.
    """
    where = f"{storage.location(name)}: {VALUES}"
    try:
        values = read_values(storage, name, VALUES)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{where} cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} contains a {type(values).__name__}, not a JSON object")
    return values


def verify_file(storage: DirectoryStore, name: str, file: str, facts: Mapping[str, Any]) -> None:
    """Compare a file's size and checksum with the manifest.

    Raises:
        CheckpointError: the file is absent, damaged or unreadable.
    """
    where = f"checkpoint {storage.location(name)}"
    try:
        with storage.open(name, file) as source:
            size = source.seek(0, 2)
            if size != facts["bytes"]:
                raise CheckpointError(f"{where}: {file} has {size} bytes instead of {facts['bytes']}")
            source.seek(0)
            digest = hashlib.sha256()
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} lacks {file}") from error
    except OSError as error:
        raise CheckpointError(f"{where}: {file} cannot be read ({error})") from error
    if digest.hexdigest() != facts["sha256"]:
        raise CheckpointError(f"{where}: the checksum of {file} is wrong, so the file is damaged")


def _digest(manifest: Mapping[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def are_losses(values: Any) -> bool:
    """Whether a value is a mapping from series names to finite floats."""
    return isinstance(values, dict) and all(type(value) is float and math.isfinite(value) for value in values.values())
