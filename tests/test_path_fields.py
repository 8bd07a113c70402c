"""Every field of a job that names a place either takes an address such as s3://bucket or refuses it, in ``check``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from d9d_core.config import Section
from d9d_core.job_file.inference import InferenceConfig
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.lookup import load_config
from d9d_core.registry import hooks
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

Write = Callable[..., Path]
#: A field whose description has such a word names a place.
PLACES = re.compile(r"\b(director(y|ies)|files?|paths?|folder|address(es)?)\b", re.IGNORECASE)
#: Fields that only mention one.
OTHERS = {
    "checkpoint.resume", "data.digest", "data.field", "data.end_of_text", "optimizer.target", "lr_schedule.target",
    "run.name", "lr_schedule.phases.curve",
}  # fmt: skip
#: Fields whose addresses belong to the library behind them.
OF_LIBRARIES = {"trackers.tracking_uri": "mlflow"}


def places() -> Iterator[tuple[str, FieldInfo]]:
    """Fields with a place, of the job's sections and of all installed configs, sections inside them included."""
    seen: set[type] = set()
    yield from _places(JobConfig, "", seen)
    yield from _places(InferenceConfig, "", seen)
    registry = discover(PluginPolicy())
    for kind in hooks.KINDS:
        for entry in registry.entries(kind.name):
            if kind.section and hasattr(entry.spec, "config"):
                yield from _places(load_config(entry), kind.section, seen)


def _places(section: type[Section], where: str, seen: set[type]) -> Iterator[tuple[str, FieldInfo]]:
    if section in seen:
        return
    seen.add(section)
    for name, field in section.model_fields.items():
        place = f"{where}.{name}" if where else name
        types = set(_types(field.annotation))
        sections = [one for one in types if isinstance(one, type) and issubclass(one, Section)]
        if Path in types or (str in types and PLACES.search(field.description or "") and place not in OTHERS):
            yield place, field
        for inner in sections:
            yield from _places(inner, place, seen)


def _types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _types(inner)


FIELDS = dict(places())


def test_the_fields_that_name_a_place_are_found() -> None:
    assert {
        "run.dir", "checkpoint.dir", "plugins.files", "model.pretrained", "data.sources", "data.tokenizer",
        "peft.init_from", "trackers.log_dir", "trackers.dir", "trackers.repo", "subscribers.file",
    } <= FIELDS.keys()  # fmt: skip


@pytest.mark.parametrize("place", sorted(FIELDS.keys() - OF_LIBRARIES.keys()))
def test_no_place_takes_an_address_that_nothing_can_read(place: str) -> None:
    with pytest.raises(ValidationError, match="address"):
        valid(FIELDS[place], "nonsense://bucket/runs")


@pytest.mark.parametrize("place", [place for place, field in FIELDS.items() if Path in set(_types(field.annotation))])
@pytest.mark.parametrize("address", ["s3://bucket/runs", "file:///tmp/runs", "memory://x"])
def test_a_field_for_paths_of_this_machine_refuses_addresses(place: str, address: str) -> None:
    for given in (address, Path(address)):
        with pytest.raises(ValidationError, match="an address is not supported here; give a local path"):
            valid(FIELDS[place], given)
    valid(FIELDS[place], "C:/runs")
    valid(FIELDS[place], "a:b/c")


def valid(field: FieldInfo, value: object) -> None:
    """Read a value for a field, in a section with this field alone."""
    several = {list, tuple} & {getattr(one, "__origin__", None) for one in _types(field.annotation)}
    create_model("One", __base__=Section, value=(field.annotation, field)).model_validate(
        {"value": [value] if several else value}
    )


@pytest.mark.thorough
def test_check_refuses_a_run_directory_that_is_an_address(d9d: Any, small_job: Write, tmp_path: Path) -> None:
    job = small_job("run", run={"name": "run", "dir": "s3://bucket/runs"})
    status, _, error = d9d("check", str(job))
    assert status == 2
    assert "run.dir: an address is not supported here" in error
