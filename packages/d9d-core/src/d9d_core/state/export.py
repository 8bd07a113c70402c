"""Writing a model in Hugging Face layout: safetensors shards, their index, config.json, tokenizer files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from d9d_core.state.files import published, sync, write_json

SHARD_BYTES = 5 * 10**9


def export_model(
    directory: Path,
    tensors: Mapping[str, Tensor],
    config_json: Mapping[str, Any],
    save_assets: Callable[[Path], None],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model directory that appears by one rename.

    Args:
        directory: replaced if it exists.
        tensors: by Hugging Face name.
        config_json: contents of ``config.json``.
        save_assets: writes further files, such as the tokenizer's, into the directory it is given.
        shard_bytes: largest size of a shard; a larger tensor gets a shard of its own.
    """
    shards = _shards(tensors, shard_bytes)
    with published(directory) as temporary:
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            part = {name: tensors[name].detach().cpu().contiguous() for name in names}
            save_file(part, temporary / file, metadata={"format": "pt"})
            sync(temporary / file)
            weight_map |= dict.fromkeys(names, file)
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_json(
            temporary / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
        write_json(temporary / "config.json", config_json)
        save_assets(temporary)


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards
