"""Roles of the files of a model directory, determined from their names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from d9d_core.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SAFETENSORS = ".safetensors"
_INDEX_END = ".safetensors.index.json"
#: Suffixes of pickle files; reading such a file runs code from it.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_TOKENIZER = (
    "tokenizer*.json", "tokenizer*.model", "tokenizer*.txt", "*.jinja", "chat_template.json",
    "vocab*.json", "vocab*.txt", "merges*.txt", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
#: Files that are copied unchanged: the tokenizer's, and the generation config.
_PASSED_THROUGH = ("generation_config.json", *_TOKENIZER)


@dataclass(frozen=True, slots=True)
class FileNames:
    """Names of the files in a directory with weights.

    Attributes:
        config: name of the config file.
        stem: prefix of the names of weight files and of their index.
    """

    config: str
    stem: str

    @property
    def weights(self) -> str:
        """Name of a single weight file."""
        return f"{self.stem}{SAFETENSORS}"

    @property
    def index(self) -> str:
        """Name of the index of several weight files."""
        return f"{self.stem}{_INDEX_END}"


MODEL_FILES = FileNames(CONFIG, "model")


def is_plain_name(name: str) -> bool:
    """Whether a name denotes a file directly in a directory: ``..``, ``a/b`` and ``/a`` do not."""
    return name not in {"", ".", ".."} and PurePosixPath(name).name == name and "\\" not in name and "\0" not in name


def passed_through(names: Iterable[str]) -> list[str]:
    """Names of the files that a conversion copies unchanged."""
    return sorted(name for name in names if _fits(name, _PASSED_THROUGH))


def still_valid(files: Mapping[str, bytes], own: Collection[str]) -> dict[str, bytes]:
    """Select the files of another model to copy to a model: no names that the model has, and no second tokenizer.

    Args:
        files: contents of the other model's files, by name.
        own: names of the model's own files.
    """
    has_tokenizer = any(_fits(name, _TOKENIZER) for name in own)
    return {
        name: content
        for name, content in files.items()
        if name not in own and not (has_tokenizer and _fits(name, _TOKENIZER))
    }


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def refuse_pickles(where: str, files: Sequence[str]) -> None:
    """Refuse pickle files, with an explanation.

    Raises:
        CheckpointError: there are pickle files.
    """
    found = [file for file in files if file.endswith(PICKLES)]
    if found:
        raise CheckpointError(
            f"{where} has its weights in {some(found)}: such a file is a pickle, and reading it runs code from it. "
            "If you trust the file, convert it with transformers: load the model, call "
            "save_pretrained(..., safe_serialization=True), and use the directory that this writes"
        )


def find_index(where: str, names: Sequence[str]) -> str | None:
    """Find the index file, which maps tensors to files; returns ``None`` if there is no index.

    Raises:
        CheckpointError: there are several index files, or an index and also a model in a single file.
    """
    found = [name for name in names if name.endswith(_INDEX_END)]
    if len(found) > 1:
        raise CheckpointError(f"{where} has several index files ({some(found)}): keep one model in a directory")
    if found and WEIGHTS in names:
        raise CheckpointError(
            f"{where} has both {WEIGHTS} and {found[0]}, so it is unclear which one is the model: remove one of them"
        )
    return found[0] if found else None


def find_weights(where: str, names: Sequence[str]) -> list[str]:
    """Find the weight files of a directory without an index, in order.

    Raises:
        CheckpointError: there are no weight files, only pickle files, or numbered files are missing.
    """
    found = sorted(name for name in names if name.endswith(SAFETENSORS))
    if not found:
        refuse_pickles(where, names)
        raise CheckpointError(
            f"{where} has no {SAFETENSORS} file: name a directory with a model, or download it; a job with "
            "loading.weights: false reads only its config.json and tokenizer"
        )
    groups: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, found)):
        groups.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (prefix, count), numbers in groups.items():
        if lacking := [number for number in range(1, int(count) + 1) if number not in numbers]:
            files = [f"{prefix}-{number:0{len(count)}d}-of-{count}{SAFETENSORS}" for number in lacking]
            raise CheckpointError(f"{where} lacks {some(files)}: copy or download the rest of the model")
    return found


def some(names: Sequence[str], shown: int = 3) -> str:
    """Text with up to ``shown`` names, and the number of further names."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
