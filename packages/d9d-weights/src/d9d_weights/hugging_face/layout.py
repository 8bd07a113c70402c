"""Roles of the files of a model directory, from their names alone."""

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
#: Reading them runs whatever code they hold.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_TOKENIZER = (
    "tokenizer*.json", "tokenizer*.model", "tokenizer*.txt", "*.jinja", "chat_template.json",
    "vocab*.json", "vocab*.txt", "merges*.txt", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
#: What belongs to a model and is no weight: its tokenizer, and how to generate.
_PASSED_THROUGH = ("generation_config.json", *_TOKENIZER)


@dataclass(frozen=True, slots=True)
class FileNames:
    """Names of files in the layout of a directory with weights.

    Attributes:
        config: what describes them.
        stem: begins the names of the weight files and of their index.
    """

    config: str
    stem: str

    @property
    def weights(self) -> str:
        """Name of the weight file, if there is one only."""
        return f"{self.stem}{SAFETENSORS}"

    @property
    def index(self) -> str:
        """Name of the index of several weight files."""
        return f"{self.stem}{_INDEX_END}"


MODEL_FILES = FileNames(CONFIG, "model")


def is_plain_name(name: str) -> bool:
    """Whether a name is that of a file directly in a directory: ``..``, ``a/b`` and ``/a`` are not."""
    return name not in {"", ".", ".."} and PurePosixPath(name).name == name and "\\" not in name and "\0" not in name


def passed_through(names: Iterable[str]) -> list[str]:
    """Names of the files that a conversion copies as they are."""
    return sorted(name for name in names if _fits(name, _PASSED_THROUGH))


def still_valid(files: Mapping[str, bytes], own: Collection[str]) -> dict[str, bytes]:
    """Files passed through from another model that belong beside a model's own: not its names, nor a second tokenizer.

    Args:
        files: name -> content.
        own: names of the files that the model has.
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
    """Refuse pickle files, if there are any, and explain why.

    Raises:
        CheckpointError: there are.
    """
    found = [file for file in files if file.endswith(PICKLES)]
    if found:
        raise CheckpointError(
            f"{where} holds its weights in {some(found)}: such a file is a pickle, and reading it runs code from it. "
            "Where you trust it, convert it with transformers: load the model and call "
            "save_pretrained(..., safe_serialization=True); then use the directory that this writes"
        )


def find_index(where: str, names: Sequence[str]) -> str | None:
    """Find the index, which says which tensor is in which file, if there is one.

    Raises:
        CheckpointError: there are several, or it stands beside a model in one file.
    """
    found = [name for name in names if name.endswith(_INDEX_END)]
    if len(found) > 1:
        raise CheckpointError(f"{where} has several indices ({some(found)}): keep one model in a directory")
    if found and WEIGHTS in names:
        raise CheckpointError(
            f"{where} has {WEIGHTS} and also {found[0]}, so it is unclear which one is the model: remove one of them"
        )
    return found[0] if found else None


def find_weights(where: str, names: Sequence[str]) -> list[str]:
    """Find the weight files of a directory without an index, in order.

    Raises:
        CheckpointError: there are none, only pickles, or numbers are missing.
    """
    found = sorted(name for name in names if name.endswith(SAFETENSORS))
    if not found:
        refuse_pickles(where, names)
        raise CheckpointError(f"{where} has no {SAFETENSORS} file: name a directory that holds a model, or download it")
    groups: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, found)):
        groups.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (prefix, count), numbers in groups.items():
        if lacking := [number for number in range(1, int(count) + 1) if number not in numbers]:
            files = [f"{prefix}-{number:0{len(count)}d}-of-{count}{SAFETENSORS}" for number in lacking]
            raise CheckpointError(f"{where} lacks {some(files)}: copy or download the rest of the model")
    return found


def some(names: Sequence[str], shown: int = 3) -> str:
    """Spell out a few, count the rest."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
