"""Upload of an exported model or adapter to the Hugging Face Hub (``d9d state push``)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from d9d_core.errors import CheckpointError
from d9d_core.terminal.console import console_for
from d9d_core.untrusted import parse_json
from rich.table import Table

from d9d_weights.checkpoint.tensors import is_checkpoint
from d9d_weights.hugging_face.adapter import ADAPTER_FILES
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.layout import PICKLES
from d9d_weights.model_card.card import MODEL_CARD
from d9d_weights.progress import size_text

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_Result = TypeVar("_Result")
#: Field of ``adapter_config.json`` that names the base model.
_BASE = "base_model_name_or_path"
_BASE_LINE = re.compile(rb"^base_model: .*$", re.MULTILINE)
#: Text files that are searched for paths of this machine, and their largest size in bytes.
_TEXTS, _LARGEST_TEXT = (".json", ".md", ".txt", ".jinja", ".yaml", ".yml"), 2**20
_ABSOLUTE = re.compile(r"(?<![\w.:/~-])(?:/[\w.@+-]+){2,}")


@dataclass(frozen=True, slots=True)
class Push:
    """Request of an upload.

    Attributes:
        source: model directory, adapter directory, or run with one export.
        repository: name on the Hub, such as ``my-name/my-model``.
        public: whether a new repository is public.
        revision: existing branch to upload to; ``None`` for the main branch.
        message: commit message.
        base_model: the Hub's name of an adapter's base model, written instead of a local directory.
    """

    source: str
    repository: str
    public: bool = False
    revision: str | None = None
    message: str = "Upload with d9d"
    base_model: str | None = None


def push_state(asked: Push, agreed: Callable[[], bool]) -> str | None:
    """List the files of an export, and upload them after consent.

    The library ``huggingface_hub`` finds the token (``hf auth login`` or the variable ``HF_TOKEN``); d9d neither reads
    nor stores it.

    Args:
        asked: request.
        agreed: function that asks for consent; called after the files were listed.

    Returns:
        Address of the commit; ``None`` without consent.

    Raises:
        CheckpointError: the source is no export, a file names a path of this machine, the library is not installed,
            an existing repository is public although a private one was asked for, or the Hub refuses a request.
    """
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", asked.repository, re.ASCII):
        raise CheckpointError(f"{asked.repository!r} is no name of a repository; write OWNER/NAME")
    directory = _export_of(asked.source)
    files, left_out = _files(directory)
    _check_complete(directory, files)
    replaced = _with_base(directory, files, asked.base_model)
    _check_paths(directory, files, replaced)
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise CheckpointError(
            "state push needs the library huggingface_hub; install it with: pip install 'd9d-weights[hub]'"
        ) from error
    _print_files(directory, files, left_out)
    hub = HfApi()
    exists = _requested(lambda: _existing(hub, asked))
    state = "exists" if exists else f"is new and {'public' if asked.public else 'private'}"
    console_for().print(f"to {asked.repository}, which {state}")
    if not agreed():
        return None
    return _requested(lambda: _upload(hub, asked, directory, files, replaced, exists))


def _export_of(source: str) -> Path:
    """Directory with the export: the source itself, or the only export of a run."""
    if "://" in source:
        raise CheckpointError(f"{source}: state push uploads local directories; copy the export to this machine first")
    directory = Path(source)
    exports = [one for one in (directory / "model", directory / "adapter") if _is_export(one)]
    if _is_export(directory):
        return directory
    if len(exports) == 1:
        return exports[0]
    if exports:
        raise CheckpointError(f"{source}: the run has a model and an adapter; give {exports[0]} or {exports[1]}")
    if directory.is_dir() and is_checkpoint(source):
        raise CheckpointError(
            f"{source}: this is a training checkpoint; write a model first: d9d state convert {source} DIRECTORY"
        )
    raise CheckpointError(f"{source}: there is no model directory (with config.json) and no run with an export")


def _is_export(directory: Path) -> bool:
    return (directory / "config.json").is_file() or (directory / ADAPTER_FILES.config).is_file()


def _files(directory: Path) -> tuple[dict[str, int], list[str]]:
    """Sizes in bytes of the files to upload by name, and names of the entries that are left out."""
    files: dict[str, int] = {}
    left_out = []
    for entry in sorted(directory.iterdir()):
        if entry.is_symlink():
            raise CheckpointError(f"{entry}: this is a link; copy the file itself into the directory")
        if entry.is_dir() or entry.name.startswith(".") or entry.suffix in PICKLES:
            left_out.append(entry.name)
        else:
            files[entry.name] = entry.stat().st_size
    return files, left_out


def _check_complete(directory: Path, files: Mapping[str, int]) -> None:
    """Check that the weights are there and readable.

    Raises:
        CheckpointError: a weight file is missing or damaged.
    """
    is_adapter = ADAPTER_FILES.config in files
    with ModelDirectory.open(str(directory / ADAPTER_FILES.weights if is_adapter else directory)):
        pass


def _with_base(directory: Path, files: Mapping[str, int], base_model: str | None) -> dict[str, bytes]:
    """New contents of the files in which the name of the base model is replaced, by file name."""
    if base_model is None:
        return {}
    if ADAPTER_FILES.config not in files:
        raise CheckpointError(f"--base-model: {directory} is no adapter; omit the option")
    config: Any = parse_json((directory / ADAPTER_FILES.config).read_bytes())
    replaced = {ADAPTER_FILES.config: (json.dumps({**config, _BASE: base_model}, indent=2) + "\n").encode()}
    if MODEL_CARD in files:
        line = f"base_model: {json.dumps(base_model)}".encode()
        replaced[MODEL_CARD] = _BASE_LINE.sub(lambda _: line, (directory / MODEL_CARD).read_bytes(), count=1)
    return replaced


def _check_paths(directory: Path, files: Mapping[str, int], replaced: Mapping[str, bytes]) -> None:
    """Check that no text file names a path of this machine.

    Raises:
        CheckpointError: a file names an existing path.
    """
    for name, size in files.items():
        if not name.endswith(_TEXTS) or size > _LARGEST_TEXT:
            continue
        content = replaced.get(name) or (directory / name).read_bytes()
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
            if found := next((path for path in _ABSOLUTE.findall(line) if Path(path).exists()), None):
                where = f"{directory / name}, line {number}"
                raise CheckpointError(f"{where}: {found} is a path of this machine; {_remedy(line)}")
        if name == ADAPTER_FILES.config:
            base = parse_json(content).get(_BASE)
            if isinstance(base, str) and base and Path(base).exists():
                where = f"{directory / name}: {_BASE}"
                raise CheckpointError(f"{where}: {base} is a directory of this machine; {_remedy(_BASE)}")


def _remedy(line: str) -> str:
    is_base = _BASE in line
    return "give the Hub's name of the base model by --base-model" if is_base else "remove the path from the file"


def _existing(hub: HfApi, asked: Push) -> bool:
    """Whether the repository exists.

    Raises:
        CheckpointError: the repository is public, and the request is not.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        found = hub.model_info(asked.repository)
    except RepositoryNotFoundError:
        return False
    if not (found.private or asked.public):
        raise CheckpointError(f"{asked.repository} exists and is public; add --public, or choose another name")
    return True


def _upload(
    hub: HfApi, asked: Push, directory: Path, files: Mapping[str, int], replaced: Mapping[str, bytes], exists: bool
) -> str:
    from huggingface_hub import CommitOperationAdd

    if not exists:
        hub.create_repo(asked.repository, private=not asked.public)
    additions = [CommitOperationAdd(name, replaced.get(name, str(directory / name))) for name in files]
    done = hub.create_commit(
        asked.repository, additions, commit_message=asked.message, revision=asked.revision, num_threads=4
    )
    return str(done.commit_url)


def _requested(request: Callable[[], _Result]) -> _Result:
    """Result of a request to the Hub; a refusal becomes an error that says how to log in."""
    try:
        return request()
    except CheckpointError:
        raise
    except Exception as error:  # errors of the HTTP client, which differs between releases of the library
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise CheckpointError(
            f"the request to the Hub failed: {' '.join(lines)}; check the network and the name, and log in by "
            "'hf auth login' with a token that may write"
        ) from error


def _print_files(directory: Path, files: Mapping[str, int], left_out: list[str]) -> None:
    console = console_for()
    table = Table("file", "size", box=None)
    for name, size in files.items():
        table.add_row(name, size_text(size))
    console.print(f"{directory}: {len(files)} files, {size_text(sum(files.values()))}")
    console.print(table)
    if left_out:
        console.print(f"left out: {', '.join(left_out)}")
