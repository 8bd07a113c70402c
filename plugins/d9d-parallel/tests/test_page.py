"""The page of parallel strategies names every field of every strategy with its default, and its arithmetic is right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from d9d_parallel.activation_checkpointing.config import ActivationCheckpointingConfig
from d9d_parallel.compile.config import CompileConfig
from d9d_parallel.data_parallel.config import FsdpConfig, HsdpConfig, ReplicateConfig

PAGE = (Path(__file__).parents[3] / "docs" / "parallelism.md").read_text()
TABLES = {
    title: dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.MULTILINE))
    for title, text in re.findall(r"^#+ ([^\n]+)\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE)
}


def fields(config: Any) -> dict[str, str]:
    defaults = {name: info.default for name, info in config.model_fields.items() if name != "name"}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in plain.items()}


@pytest.mark.parametrize(
    ("title", "config"),
    [
        ("replicate, fsdp, hsdp", FsdpConfig),
        ("replicate, fsdp, hsdp", HsdpConfig),
        ("activation_checkpointing", ActivationCheckpointingConfig),
        ("compile", CompileConfig),
    ],
)
def test_every_field_is_there_with_its_default(title: str, config: Any) -> None:
    assert TABLES[title] == fields(config)


def test_replicate_has_all_but_what_the_page_says() -> None:
    assert fields(FsdpConfig).keys() - fields(ReplicateConfig).keys() == {"reshard_after_forward"}
    assert "| `reshard_after_forward` | `true` | not for `replicate`:" in PAGE


def test_the_example_of_deferring_is_calculated_from_the_table() -> None:
    shards, replicas, microbatches, giga = 8, 2, 8, 4.0  # bytes per element times 10^9 parameters, in GB
    scatter = giga * (shards - 1) / shards
    reduce = 2 * giga / shards * (replicas - 1) / replicas
    text = " ".join(PAGE.split())
    for name, scatters, reduces, held in (
        ("nothing", microbatches, microbatches, giga / shards),
        ("all_reduce", microbatches, 1, giga / shards),
        ("everything", 1, 1, giga),
    ):
        sent = f"{scatter * scatters:g} + {reduce * reduces:g} GB"
        assert f"`{name}` sends {sent} and holds {held:g} GB" in text
