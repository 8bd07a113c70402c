"""Model directory for a command's MODEL argument: an export, a run, a checkpoint, or an adapter with its base."""

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
        directory: directory with ``config.json`` and the weights.
        adapter: directory of an adapter; ``None`` without one.
        origin: text that identifies the model: directory, names, sizes and modification times of its files; or the
            location of the checkpoint that was exported.
    """

    directory: Path
    adapter: Path | None
    origin: str


@contextmanager
def found_model(
    location: str, registry: Registry, note: Callable[[str], None], base: str | None = None
) -> Iterator[FoundModel]:
    """Find the model of a command inside the block; a checkpoint is exported to a temporary directory.

    For a run, the export is used if there is one, else the adapter, else the newest checkpoint.

    Args:
        location: directory of a model in Hugging Face layout, an adapter, a run, or a checkpoint.
        registry: registry with the model and the fine-tuning method of a checkpoint.
        note: prints a line about a long operation.
        base: base model of an adapter; by default the model that the adapter names.

    Raises:
        CheckpointError: the model does not exist or cannot be read.
    """
    if "://" in location:
        raise CheckpointError(f"{location} is a remote address; copy the model to this machine")
    given = Path(location).expanduser()
    for directory in (given, given / "model"):
        if (directory / CONFIG).is_file():
            yield FoundModel(directory, None, _traces(directory))
            return
    for directory in (given, given / "adapter"):
        if (directory / ADAPTER_FILES.config).is_file():
            with found_model(base or _base_of(directory), registry, note) as found:
                if found.adapter is not None:
                    raise CheckpointError(
                        f"the base model of {directory} is {found.adapter}, which is an adapter too; name a full "
                        "model with --base"
                    )
                yield FoundModel(found.directory, directory, f"{_traces(directory)} on {found.origin}")
            return
    if not given.exists():
        raise CheckpointError(f"{given} does not exist (from {Path.cwd()})")
    if (given / CONFIG).exists():
        raise CheckpointError(f"{given / CONFIG} is no regular file; copy the model's own file there")
    if not is_checkpoint(str(given)):
        raise CheckpointError(
            f"{given} has neither a {CONFIG} nor checkpoints; give the directory of a model in Hugging Face layout, "
            "of a run, or of a checkpoint"
        )
    with tempfile.TemporaryDirectory(prefix="d9d-export-") as temporary:
        with CheckpointTensors(str(given)) as tensors:
            origin = tensors.location
        target = Path(temporary) / "model"
        note(f"exporting {origin} to a temporary directory")
        _export(origin, target, registry, note)
        yield FoundModel(target, None, origin)


def _export(checkpoint: str, target: Path, registry: Registry, note: Callable[[str], None]) -> None:
    """Export a checkpoint to ``target``, with the tokenizer of its run's export, pretrained model or data."""
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
    """Directory of the local pretrained model of a run; ``None`` without one. Reads the job file without plugins."""
    if run is None or not (run / JOB).is_file():
        return None
    model = Document.read(run / JOB, "near").values.get("model")
    origin = model.get("pretrained") if isinstance(model, dict) else None
    return origin if isinstance(origin, str) and Place.of(origin).kind == "model" else None


def _copy_tokenizer(source: Path, target: Path, note: Callable[[str], None]) -> None:
    """Copy the tokenizer files that the run wrote at its start to ``target``, over existing ones."""
    if not source.is_dir():
        note(f"no tokenizer from the run's data: {source} does not exist; name one with --tokenizer DIR")
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
        raise CheckpointError(
            f"{file} cannot be read: {error.strerror or error}; name the base model with --base MODEL"
        ) from error
    if not isinstance(name, str) or not Path(name).expanduser().exists():
        raise CheckpointError(
            f"{adapter} is an adapter of the model {name!r}, which this machine lacks; name its directory with --base"
        )
    return name


def _traces(directory: Path) -> str:
    """Text with a directory's path and the names, sizes and modification times of its files; identifies its model."""
    files = sorted(file for file in directory.iterdir() if file.is_file())
    facts = [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    return f"{directory.resolve()} {facts}"
