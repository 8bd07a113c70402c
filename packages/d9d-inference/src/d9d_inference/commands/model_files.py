"""Model directory behind what a command calls MODEL: an export, a run, a checkpoint, or an adapter on its base."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from d9d_core.errors import CheckpointError, D9dError
from d9d_core.job_file.document import Document
from d9d_core.registry.registry import Registry
from d9d_core.untrusted import Place, read_regular
from d9d_engine.run.directory import JOB, TOKENIZER
from d9d_weights.checkpoint.tensors import CheckpointTensors, is_checkpoint
from d9d_weights.hugging_face.adapter import ADAPTER_FILES
from d9d_weights.hugging_face.index import read_object
from d9d_weights.hugging_face.layout import CONFIG
from d9d_weights.state.tensors import Conversion, convert_state

_SHARD = 5 * 10**9
_THREADS = 4


@dataclass(frozen=True)
class FoundModel:
    """Model in Hugging Face layout on this machine.

    Attributes:
        directory: with ``config.json`` and the weights.
        adapter: directory of an adapter for it, if there is one.
        origin: what it is, for people and to recognise it again.
    """

    directory: Path
    adapter: Path | None
    origin: str


@contextmanager
def found_model(
    location: str, registry: Registry, note: Callable[[str], None], base: str | None = None
) -> Iterator[FoundModel]:
    """Find the files of a command's model; a checkpoint is exported to a temporary directory for the block.

    A run's export is taken if it is there, else its adapter, else its newest checkpoint.

    Args:
        location: a directory in Hugging Face layout, of an adapter, of a run, or of a checkpoint.
        registry: has the model and the fine-tuning method that a checkpoint is of.
        note: prints a line about long work.
        base: model that an adapter belongs to; by default the one that it names.

    Raises:
        CheckpointError: there is no such model, or it cannot be read.
    """
    if "://" in location:
        raise CheckpointError(f"{location} is an address; copy the model to this machine, and name its directory")
    given = Path(location).expanduser()
    for directory in (given, given / "model"):
        if (directory / CONFIG).is_file():
            yield FoundModel(directory, None, _traces(directory))
            return
    for directory in (given, given / "adapter"):
        if (directory / ADAPTER_FILES.config).is_file():
            with found_model(base or _base_of(directory), registry, note) as found:
                if found.adapter is not None:
                    raise CheckpointError(f"{directory} belongs to {found.adapter}, an adapter too; name a full model")
                yield FoundModel(found.directory, directory, f"{_traces(directory)} on {found.origin}")
            return
    if not given.exists():
        raise CheckpointError(f"{given} does not exist (from {Path.cwd()})")
    if (given / CONFIG).exists():
        raise CheckpointError(f"{given / CONFIG} is no regular file; copy the model's own file there")
    if not is_checkpoint(str(given)):
        raise CheckpointError(
            f"{given} has neither a {CONFIG} nor checkpoints; name a directory in Hugging Face layout, of a run, or of "
            "a checkpoint"
        )
    with tempfile.TemporaryDirectory(prefix="d9d-export-") as temporary:
        with CheckpointTensors(str(given)) as tensors:
            origin = tensors.location
        target = Path(temporary) / "model"
        note(f"exporting {origin} to a temporary directory")
        _export(origin, target, registry, note)
        yield FoundModel(target, None, origin)


def _export(checkpoint: str, target: Path, registry: Registry, note: Callable[[str], None]) -> None:
    """Export a checkpoint with the tokenizer of its run: that of the run's export, or of its data."""
    run = Place.of(checkpoint).run
    try:
        exported = None if run is None else run / "model"
        keep_from = str(exported) if exported is not None and (exported / CONFIG).is_file() else _origin(run)
        convert_state(Conversion(checkpoint, str(target), None, _SHARD, _THREADS, keep_from), registry)
        if run is not None:
            _copy_tokenizer(run / TOKENIZER, target, note)
    except D9dError as error:
        raise CheckpointError(f"{checkpoint} cannot be exported: {error}") from error


def _origin(run: Path | None) -> str | None:
    """Directory that a run's weights started from, if it is a model on this machine. The job is read as data."""
    if run is None or not (run / JOB).is_file():
        return None
    model = Document.read(run / JOB, "near").values.get("model")
    origin = model.get("pretrained") if isinstance(model, dict) else None
    return origin if isinstance(origin, str) and Place.of(origin).kind == "model" else None


def _copy_tokenizer(source: Path, target: Path, note: Callable[[str], None]) -> None:
    """Copy the tokenizer files that a run wrote when it started, in place of other ones."""
    if not source.is_dir():
        note(f"no tokenizer from the run's data: {source} is not there; name one with --tokenizer DIR")
        return
    try:
        files = {file.name: read_regular(file, links="none") for file in sorted(source.iterdir())}
    except OSError as error:
        raise CheckpointError(f"{error.filename or source} cannot be read: {error.strerror or error}") from error
    for name, content in files.items():
        (target / name).write_bytes(content)


def _base_of(adapter: Path) -> str:
    file = adapter / ADAPTER_FILES.config
    try:
        name = read_object(str(file), read_regular(file, links="near")).get("base_model_name_or_path")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    if not isinstance(name, str) or not Path(name).expanduser().exists():
        raise CheckpointError(
            f"{adapter} is an adapter of {name!r}, which is not here; name its model with --base MODEL"
        )
    return name


def _traces(directory: Path) -> str:
    """Path of a directory with the sizes and times of its files: another model there has others."""
    files = sorted(file for file in directory.iterdir() if file.is_file())
    facts = [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    return f"{directory.resolve()} {facts}"
