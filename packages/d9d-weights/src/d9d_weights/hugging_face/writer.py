"""Writer of models in Hugging Face layout, for one or several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec

from d9d_weights.files.atomic import json_bytes
from d9d_weights.files.open import open_draft
from d9d_weights.files.safetensors import Layout, plan_layout
from d9d_weights.hugging_face.blocks import BlockBuffer
from d9d_weights.hugging_face.layout import MODEL_FILES, SAFETENSORS, FileNames, is_plain_name, some, still_valid
from d9d_weights.hugging_face.plan import plan_files, spec_bytes
from d9d_weights.hugging_face.shard import ShardWriter

__all__ = ["ModelWriter"]

#: Largest size of a weight file in bytes, by default; the default of older releases of transformers.
SHARD_BYTES = 5 * 10**9
#: Header entry that transformers requires.
_NOTES = {"format": "pt"}


class ModelWriter:
    """Writer of a model directory whose tensors are known in advance. Several ranks may write, each its own files.

    One rank calls :meth:`start`; then every rank writes files with :meth:`open_shard`; then one rank calls
    :meth:`publish`. The caller separates these phases, for example by barriers.

    Args:
        directory: local path, replaced atomically, or fsspec address.
        specs: specs of all tensors of the model, equal on all ranks.
        shard_bytes: maximum bytes of tensors in a file; a larger tensor gets a file of its own.
        on_bytes: called after each write, with its number of bytes.
        names: names of the files.

    Raises:
        CheckpointError: there are no tensors, a dtype is not supported, or the kind of address is unknown.
    """

    def __init__(
        self,
        directory: str | Path,
        specs: Mapping[str, TensorSpec],
        shard_bytes: int = SHARD_BYTES,
        on_bytes: Callable[[int], None] | None = None,
        names: FileNames = MODEL_FILES,
    ) -> None:
        self._directory = directory
        self._names = names
        self._draft = open_draft(directory, partial(_of_a_model, config=names.config))
        self._on_bytes = on_bytes
        self._buffer = BlockBuffer()
        self._plan = plan_files(specs, shard_bytes, names)
        self._layouts: dict[str, Layout] = {file: plan_layout(part, _NOTES) for file, part in self._plan.items()}
        self._file_of = {name: file for file, part in self._plan.items() for name in part}
        #: Names of the weight files.
        self.files: Sequence[str] = tuple(self._plan)

    def file_of(self, name: str) -> str:
        """Name of the weight file to which a tensor is written.

        Raises:
            CheckpointError: the model has no such tensor.
        """
        if name not in self._file_of:
            raise CheckpointError(f"'{name}' is not a tensor of the model that is written to {self._directory}")
        return self._file_of[name]

    def tensors_of(self, file: str) -> Mapping[str, TensorSpec]:
        """Specs of the tensors of a file by name, in the order of their offsets.

        Raises:
            CheckpointError: the model has no such file.
        """
        if file not in self._plan:
            raise CheckpointError(f"'{file}' is not a weight file of {self._directory}: it has {some(self.files)}")
        return self._plan[file]

    def start(self) -> None:
        """Prepare the directory. Called by one rank, before any file is opened."""
        self._draft.start()

    @contextmanager
    def open_shard(self, file: str) -> Iterator[ShardWriter]:
        """Open a weight file for writing; at the end of the ``with`` block, the file is on disk.

        Args:
            file: one of :attr:`files`; no other rank opens it.

        Raises:
            CheckpointError: the file does not exist in the plan, or some of its tensors were not written.
        """
        specs = self.tensors_of(file)
        with self._draft.create(file) as out:
            shard = ShardWriter(out, file, specs, self._layouts[file], self._buffer, self._on_bytes)
            yield shard
            shard.check_complete()

    def publish(
        self,
        config_json: Mapping[str, Any],
        files: Mapping[str, bytes],
        save_assets: Callable[[Path], None] | None = None,
    ) -> None:
        """Add the other files and publish the directory. Called by one rank, when all weight files are written.

        Args:
            config_json: contents of the config file.
            files: further small files, by name, such as files of the pretrained model.
            save_assets: function that writes further files, such as the tokenizer's, into a directory. Its files
                replace files of the same name in ``files``; if it writes a tokenizer, no tokenizer file of ``files``
                is kept.

        Raises:
            CheckpointError: a weight file is missing, or a further file's name is invalid or taken.
        """
        taken = [
            name
            for name in files
            if not is_plain_name(name) or name in {self._names.config, self._names.index, *self.files}
        ]
        if taken:
            raise CheckpointError(
                f"files named {some(taken)} cannot be added to {self._directory}: a name is invalid or in use; "
                "rename them"
            )
        for file, layout in self._layouts.items():
            if (size := self._draft.size(file)) != layout.bytes:
                raise CheckpointError(
                    f"{self._directory} is not complete: {file} has {size or 'no'} bytes of {layout.bytes}; "
                    "every file must be written, and all processes must see the same directory"
                )
        last = {self._names.config: _json(self._names.config, config_json)}
        if len(self.files) > 1:
            total = sum(spec_bytes(spec) for part in self._plan.values() for spec in part.values())
            last[self._names.index] = _json(
                self._names.index, {"metadata": {"total_size": total}, "weight_map": self._file_of}
            )
        own = set() if save_assets is None else self._draft.add(save_assets)
        self._draft.publish({**still_valid(files, own), **last})

    def discard(self) -> None:
        """Remove an unpublished directory. Called by one rank, once no other rank writes; never raises."""
        self._draft.discard()


def _of_a_model(names: list[str], config: str) -> list[str]:
    """Files of an earlier model, config and index first, so that an interrupted removal leaves no loadable model."""
    ours = [name for name in names if name == config or name.endswith((SAFETENSORS, f"{SAFETENSORS}.index.json"))]
    return sorted(ours, key=lambda name: name.endswith(SAFETENSORS))


def _json(file: str, value: Any) -> bytes:
    try:
        return json_bytes(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be written: {error}") from error
