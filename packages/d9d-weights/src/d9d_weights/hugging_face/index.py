"""Index of a sharded model, which maps tensor names to files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from d9d_core.errors import CheckpointError
from d9d_core.untrusted import parse_json

from d9d_weights.hugging_face.layout import SAFETENSORS, is_plain_name, refuse_pickles, some

_AGAIN = "copy or download the model again"


def read_object(file: str, content: bytes) -> dict[str, Any]:
    """Parse a file that contains a JSON object.

    Args:
        file: name of the file in errors.
        content: contents of the file.

    Raises:
        CheckpointError: the content is not a JSON object.
    """
    try:
        value = parse_json(content)
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON ({error}): {_AGAIN}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object but a {type(value).__name__}: {_AGAIN}")
    return value


def weight_map(file: str, content: bytes, names: Iterable[str]) -> dict[str, str]:
    """Read the weight map of an index file, and check that its weight files exist.

    Args:
        file: name of the index in errors.
        content: contents of the index.
        names: names of the files in the directory.

    Raises:
        CheckpointError: the index is damaged, leaves the directory, or names files that do not exist or are pickles.
    """
    table = read_object(file, content).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(shard, str) for shard in table.values()):
        raise CheckpointError(f"{file} has no weight_map from tensor names to files: {_AGAIN}")
    shards = sorted(set(table.values()))
    for shard in shards:
        if not is_plain_name(shard):
            raise CheckpointError(f"{file} names '{shard}', which is not a file in the same directory: {_AGAIN}")
    refuse_pickles(file, shards)
    if others := [shard for shard in shards if not shard.endswith(SAFETENSORS)]:
        raise CheckpointError(f"{file} names {some(others)}, which is not a {SAFETENSORS} file: {_AGAIN}")
    if missing := sorted(set(shards) - set(names)):
        raise CheckpointError(f"{file} names {some(missing)}, which does not exist: {_AGAIN}")
    return table


def check_index(file: str, table: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Compare an index with the contents of its files.

    Args:
        file: name of the index in errors.
        table: file of each tensor according to the index.
        held: file of each tensor according to the files' contents.

    Raises:
        CheckpointError: index and files differ.
    """
    if wrong := [f"'{name}' in {shard}" for name, shard in table.items() if held.get(name) != shard]:
        raise CheckpointError(f"{file} lists {some(wrong)}, but that file does not contain it: {_AGAIN}")
    if extra := [f"'{name}' in {shard}" for name, shard in held.items() if name not in table]:
        raise CheckpointError(
            f"{file} does not list {some(extra)}, so it may not belong to the model: "
            "add it to the index, or write the file again without it"
        )
