"""Plan of a model's weight files, from shapes and dtypes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec

from d9d_weights.hugging_face.layout import MODEL_FILES, FileNames


def plan_files(
    specs: Mapping[str, TensorSpec], shard_bytes: int, names: FileNames = MODEL_FILES
) -> dict[str, dict[str, TensorSpec]]:
    """Assign a model's tensors to weight files, in the given order.

    Args:
        specs: specs of the model's tensors.
        shard_bytes: maximum bytes of tensors in a file; a larger tensor gets a file of its own.
        names: names of the files.

    Returns:
        Specs of the tensors of each file, by file name; widest dtype first, so that all tensors are aligned.

    Raises:
        CheckpointError: there are no tensors, or the limit is not positive.
    """
    if not specs:
        raise CheckpointError("a model without tensors cannot be written: check the selection of tensors")
    if shard_bytes < 1:
        raise CheckpointError(f"the size of weight files is {shard_bytes} bytes; choose a size above 0")
    shards: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        size = spec_bytes(spec)
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += size
    count = len(shards)
    numbered = [f"{names.stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    ordered = [dict(sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize)) for shard in shards]
    return dict(zip(numbered if count > 1 else [names.weights], ordered, strict=True))


def spec_bytes(spec: TensorSpec) -> int:
    """Size of a tensor in bytes."""
    return math.prod(spec.shape) * spec.dtype.itemsize
