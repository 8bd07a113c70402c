"""Tokenizer of a run, from its data or from its pretrained weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from d9d_core.config import ModelConfig
from d9d_core.data import DataStream
from d9d_core.errors import DataError
from d9d_core.job_file.job import BaseJob
from d9d_core.untrusted import Place, parse_json, read_regular
from d9d_weights.hugging_face.tokenizer_bounds import check_tokenizer

from d9d_inference.generation.library import load_library

_FILE = "tokenizer.json"


def tokenizer_of(job: BaseJob, stream: DataStream, user: str) -> Any | None:
    """Load the tokenizer of a run with the library ``tokenizers``; ``None`` if the run has none.

    Args:
        job: job with the location of pretrained weights.
        stream: data stream, which can write the data's tokenizer.
        user: component that needs the tokenizer, for messages.

    Raises:
        PluginError: the library is not installed.
        DataError: the tokenizer's file is not valid.
    """
    with tempfile.TemporaryDirectory(prefix="d9d-tokenizer-") as temporary:
        stream.save_assets(Path(temporary))
        for directory in (Path(temporary), *_directories(job)):
            if (directory / _FILE).is_file():
                content = read_regular(directory / _FILE, links="near")
                try:
                    check_tokenizer(parse_json(content))
                    return load_library("tokenizers", user).Tokenizer.from_str(content.decode())
                except ValueError as error:
                    raise DataError(
                        f"{user}: {directory / _FILE} is not a valid tokenizer: {error}; use the model's own file"
                    ) from error
    return None


def ends_of_text(job: BaseJob, facts: Mapping[str, Any]) -> frozenset[int]:
    """Token ids that end a text; the exported model would stop at the same tokens.

    Args:
        job: job with the location of pretrained weights.
        facts: facts that the data stream states; ``eos_token_id`` and ``stop_token_ids`` are used.

    Raises:
        DataError: a config file of the pretrained model cannot be read.
    """
    candidates = [facts.get("eos_token_id")]
    for directory in _directories(job):
        candidates = [*_stated(directory), *candidates]
    found: Any = next((one for one in candidates if one is not None), [])
    learned: Any = facts.get("stop_token_ids") or []
    ids = [*(found if isinstance(found, list) else [found]), *learned]
    return frozenset(one for one in ids if isinstance(one, int))


def _stated(directory: Path) -> Iterator[Any]:
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file():
            try:
                values = parse_json(read_regular(directory / name, links="near"))
            except (OSError, ValueError) as error:
                raise DataError(f"{directory / name} cannot be read: {error}; use the model's own file") from error
            yield values.get("eos_token_id") if isinstance(values, dict) else None


def _directories(job: BaseJob) -> list[Path]:
    """Local directories with tokenizer files of the pretrained weights: their own directory, or their run's export."""
    location = job.model.pretrained if isinstance(job.model, ModelConfig) else None
    found = () if location is None else Place.of(location).of_the_model()
    return [directory for directory in found if directory.is_dir()]
