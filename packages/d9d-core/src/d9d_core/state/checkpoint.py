"""Training checkpoints: tensors in safetensors, everything else JSON, no pickle anywhere.

    checkpoints/step-00000100/
        manifest.json            written last: format, step, tensor table, file sizes and checksums, job, plugins
        tensors-00000.safetensors    one file per writing process
        state.json               data position, tracker runs, ...

A checkpoint appears by one rename, so it is there whole or not at all; a file damaged later is found by its checksum.
The tensor table lists, for each tensor, its global shape and the pieces it consists of.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from d9d_core.errors import CheckpointError
from d9d_core.state.files import exclusive, published, remove_leftovers, sha256, sync, write_json

FORMAT = "d9d-checkpoint"
VERSION = 1
_PREFIX = "step-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete, verified checkpoint on disk.

    Attributes:
        path: its directory.
        manifest: the contents of ``manifest.json``.
    """

    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done when it was taken."""
        return int(self.manifest["step"])

    def values(self) -> dict[str, Any]:
        """Everything that is not a tensor."""
        values: dict[str, Any] = json.loads((self.path / "state.json").read_text("utf-8"))
        return values

    def load_into(self, tensors: Mapping[str, Tensor], scope: str = "") -> None:
        """Copy every tensor whose name begins with ``scope`` into the one of the same name.

        Raises:
            CheckpointError: names, shapes or dtypes differ; nothing is copied then.
        """
        self._compare(tensors, scope)
        by_file: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
        for name in tensors:
            for piece in self.manifest["tensors"][name]["pieces"]:
                by_file.setdefault(piece["file"], []).append((name, piece))
        with torch.no_grad():
            for file, pieces in by_file.items():
                with safe_open(self.path / file, framework="pt") as source:
                    for name, piece in pieces:
                        window = tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["shape"], strict=True))
                        tensors[name][window].copy_(source.get_tensor(piece["key"]))

    def _compare(self, tensors: Mapping[str, Tensor], scope: str) -> None:
        table = {name: entry for name, entry in self.manifest["tensors"].items() if name.startswith(scope)}
        problems = [f"'{name}' is not in the checkpoint" for name in tensors if name not in table]
        problems += [f"'{name}' is in the checkpoint only" for name in table if name not in tensors]
        for name, tensor in tensors.items():
            here = (_dtype_name(tensor.dtype), list(tensor.shape))
            there = (table[name]["dtype"], table[name]["shape"]) if name in table else here
            if there != here:
                problems.append(f"'{name}' is {there[0]} {there[1]} there and {here[0]} {here[1]} here")
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise CheckpointError(
                f"{self.path} was taken from something else: {'; '.join(problems[:3])}{more}; "
                "restore that part of the job, or use another run.name"
            )


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: where they lie; created when the first one is saved.
        keep: how many of the newest stay; ``None`` keeps all.
    """

    def __init__(self, directory: Path, keep: int | None) -> None:
        self.directory = directory
        self._keep = keep

    def prepare(self) -> None:
        """Make sure that saving will work, before hours of training.

        Raises:
            CheckpointError: the directory cannot be created or written.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / ".probe.tmp"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be written to {self.directory}: {error.strerror}; "
                "choose another run.dir, or make this one writable"
            ) from error

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Work with the directory alone, and clear up what a killed process left.

        Raises:
            CheckpointError: another process trains this run.
        """
        busy = f"{self.directory} is in use by another training run; stop it, or choose another run.name"
        with exclusive(self.directory / ".lock", busy):
            remove_leftovers(self.directory)
            yield

    def paths(self) -> list[Path]:
        """The checkpoints that exist, newest first, unverified."""
        found = [p for p in self.directory.glob(f"{_PREFIX}*") if p.is_dir() and p.name[len(_PREFIX) :].isdigit()]
        return sorted(found, key=lambda path: int(path.name[len(_PREFIX) :]), reverse=True)

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest usable checkpoint; damaged ones are reported and passed over.

        Raises:
            CheckpointError: there are checkpoints, but all are damaged.
        """
        paths = self.paths()
        problems = []
        for path in paths:
            try:
                return _open(path)
            except CheckpointError as error:
                warn(f"{error}; trying the one before")
                problems.append(str(error))
        if problems:
            raise CheckpointError(
                "no usable checkpoint: " + "; ".join(problems) + f"; remove {self.directory} to start from scratch"
            )
        return None

    def set_aside(self, newer_than: int) -> list[Path]:
        """Rename checkpoints that could not be used, so that they count no more; returns their new paths."""
        moved = []
        for path in self.paths():
            if int(path.name[len(_PREFIX) :]) > newer_than:
                target = path.with_name(f"{path.name}.damaged")
                shutil.rmtree(target, ignore_errors=True)
                moved.append(path.rename(target))
        return moved

    def save(
        self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> Path:
        """Write a checkpoint, then remove the oldest beyond ``keep``.

        Args:
            step: optimizer steps done.
            tensors: by name; they may be on any device.
            values: JSON values for ``state.json``.
            facts: JSON values that identify the job (model config, plugins), for the manifest.

        Raises:
            CheckpointError: the disk is full or not writable; earlier checkpoints are untouched.
        """
        target = self.directory / f"{_PREFIX}{step:08d}"
        try:
            with published(target) as directory:
                _write(directory, step, tensors, values, facts)
        except (OSError, SafetensorError, TypeError, ValueError, RuntimeError) as error:
            # RuntimeError: safetensors found tensors that share memory; TypeError, ValueError: no JSON for a value.
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"checkpoint {target} could not be written: {reason}; earlier ones are untouched"
            ) from error
        others = [path for path in self.paths() if path != target]
        for old in others[self._keep - 1 :] if self._keep else []:
            shutil.rmtree(old, ignore_errors=True)
        return target


def _write(
    directory: Path, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    file = "tensors-00000.safetensors"
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, directory / file)
    sync(directory / file)
    write_json(directory / "state.json", values)
    table = {
        name: {
            "dtype": _dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "pieces": [{"file": file, "key": name, "offset": [0] * tensor.ndim, "shape": list(tensor.shape)}],
        }
        for name, tensor in tensors.items()
    }
    written = [directory / file, directory / "state.json"]
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in written}
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "tensors": table, "files": files, **facts}
    write_json(directory / "manifest.json", {**manifest, "sha256": _digest(manifest)})


def _digest(manifest: Mapping[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _open(path: Path) -> Checkpoint:
    try:
        manifest = json.loads((path / "manifest.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} has no readable manifest.json ({error})") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"checkpoint {path}: manifest.json is damaged")
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        has = f"{manifest.get('format')} version {manifest.get('version')}"
        raise CheckpointError(f"checkpoint {path} is {has}; this d9d reads {FORMAT} version {VERSION}")
    if manifest.get("sha256") != _digest(manifest):
        raise CheckpointError(f"checkpoint {path}: the checksum of manifest.json is wrong, the file is damaged")
    for name, facts in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} lacks {name}")
        if file.stat().st_size != facts["bytes"]:
            raise CheckpointError(
                f"checkpoint {path}: {name} has {file.stat().st_size} bytes instead of {facts['bytes']}"
            )
        if sha256(file) != facts["sha256"]:
            raise CheckpointError(f"checkpoint {path}: the checksum of {name} is wrong, the file is damaged")
    return Checkpoint(path, manifest)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
