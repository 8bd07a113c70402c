"""Manifest of a checkpoint, ``manifest.json``: written last, with a checksum of everything, itself included."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from d9d_core.errors import CheckpointError
from d9d_weights.files.atomic import json_bytes
from d9d_weights.files.directory import MANIFEST, DirectoryStore
from d9d_weights.files.safetensors import Written

FORMAT = "d9d-checkpoint"
#: Version 1 had whole tensors in one file; no release ever wrote it.
VERSION = 2
#: Everything that is not a tensor.
VALUES = "state.json"
_CHUNK = 1 << 22


def tensors_file(rank: int) -> str:
    """Name of the file of tensors that a rank writes."""
    return f"tensors-{rank:05d}.safetensors"


def manifest_bytes(
    step: int, table: Mapping[str, Any], files: Mapping[str, Written], facts: Mapping[str, Any]
) -> bytes:
    """Serialise a manifest.

    Args:
        step: optimizer steps done.
        table: tensor name -> ``dtype``, ``shape``, and ``pieces``: ``file``, ``key`` in it, ``offset``, ``shape``.
        files: what lies beside the manifest.
        facts: further JSON values.
    """
    described = {name: {"bytes": written.bytes, "sha256": written.sha256} for name, written in files.items()}
    content = {"format": FORMAT, "version": VERSION, "step": step, "tensors": table, "files": described, **facts}
    return json_bytes({**content, "sha256": _digest(content)})


def read_manifest(storage: DirectoryStore, name: str) -> dict[str, Any]:
    """Read and check a checkpoint's manifest, not the other files.

    Raises:
        CheckpointError: it is absent, damaged, or of another format.
    """
    where = f"checkpoint {storage.location(name)}"
    try:
        with storage.open(name, MANIFEST) as file:
            manifest = json.loads(file.read().decode())
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} lacks {MANIFEST}: it was not finished, or is damaged") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} has no readable {MANIFEST} ({error})") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{where}: {MANIFEST} is damaged")
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        has = f"{manifest.get('format')} version {manifest.get('version')}"
        raise CheckpointError(f"{where} is {has}; this d9d reads {FORMAT} version {VERSION}")
    if manifest.get("sha256") != _digest(manifest):
        raise CheckpointError(f"{where}: the checksum of {MANIFEST} is wrong, the file is damaged")
    return manifest


def verify_file(storage: DirectoryStore, name: str, file: str, facts: Mapping[str, Any]) -> None:
    """Compare a file's size and checksum with what the manifest says.

    Raises:
        CheckpointError: it is absent, damaged or unreadable.
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
        raise CheckpointError(f"{where}: the checksum of {file} is wrong, the file is damaged")


def _digest(manifest: Mapping[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
