"""Fields of a job that a model card publishes: no directory, user, host or signature."""

from __future__ import annotations

from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.job import JobFile
from d9d_core.registry.registry import Registry
from d9d_weights.model_card import public_job as module
from d9d_weights.model_card.public_job import base_name, changed_fields, last_component, public_job, without_paths
from pydantic import BaseModel, field_serializer


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain words", "plain words"),
        ("/home/someone/data.jsonl", "data.jsonl"),
        ("data/", "data"),
        ("~/a b/c d", "c d"),
        ("../x", "x"),
        ("org/model", "model"),
        ("/", "/"),
        ("C:\\Users\\me\\file", "file"),
        ("\\\\server\\share", "share"),
        ("a\\b", "a\\b"),
        ("s3://bucket/run/model?signature=1#part", "model"),
        ("s3://bucket/run/", "run"),
        ("s3://bucket", "s3://..."),
        ("s3://bucket/", "s3://..."),
        ("zip::https://host", "https://..."),
        ("zip://a::https://host/x/y.bin", "y.bin"),
        ("either this/or that", "(text of 19 characters)"),
        ("{{ a }}/b", "(text of 9 characters)"),
        ("/a/{% b %}", "(text of 10 characters)"),
        ("/a/{# b #}", "(text of 10 characters)"),
        ("/a\n/b", "(text of 5 characters)"),
    ],
)
def test_a_path_is_cut_to_its_last_component(text: str, found: str) -> None:
    assert last_component(text) == found


def test_paths_are_cut_in_names_and_lists_too() -> None:
    assert without_paths({"/a/b": ["/c/d", 3, {"x": "/e/f"}], "y": (None, "./g/h")}) == {
        "b": ["d", 3, {"x": "f"}], "y": [None, "h"],
    }  # fmt: skip


def test_only_fields_that_affected_the_model_are_public() -> None:
    job = {
        "run": {"dir": "/home/me"},
        "trackers": ["wandb"],
        "model": {"name": "m", "pretrained": "/home/me/weights"},
        "batch": {"size": 4, "microbatch": 2},
        "gradients": {"bucket_mib": 3},
        "loading": {"threads": 2, "read": "once", "weights": False},
        "seed": 0,
        "peft": None,
        "heads": [],
        "deterministic": False,
    }
    assert public_job(job) == {
        "model": {"name": "m", "pretrained": "weights"},
        "batch": {"size": 4},
        "loading": {"weights": False},
        "seed": 0,
        "deterministic": False,
    }


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("/home/me/weights", "weights"),
        ("weights", "weights"),
        ("/runs/mine/model", "mine"),
        ("/runs/mine/checkpoints/step-100", "mine"),
        ("/runs/mine/step-x", "step-x"),
        ("model", "model"),
        ("s3://bucket/mine/model/?key=1", "mine"),
        ("s3://bucket", None),
        ("s3://bucket/x", "x"),
        (".", None),
        ("/", None),
        ("a/..", None),
        ("C:\\models\\mine\\adapter", "mine"),
    ],
)
def test_pretrained_weights_are_named_by_their_run(location: str, name: str | None) -> None:
    assert base_name(location) == name


def test_changed_fields_are_those_that_differ_from_their_defaults_and_the_names() -> None:
    values: dict[str, Any] = {
        "steps": 3, "model": {"name": "toy_model", "blocks": 7}, "data": "toy_data", "task": "toy_task",
        "optimizer": "toy_optimizer", "batch": {"size": 16, "microbatch": 4}, "metrics": ["toy_metric"],
        "seed": 0, "run": {"tags": ["a"]},
    }  # fmt: skip
    assert changed_fields(JobFile.from_values(values, registry=Registry.of(toy))) == {
        "steps": 3,
        "model": {"name": "toy_model", "blocks": 7},
        "data": {"name": "toy_data"},
        "task": {"name": "toy_task"},
        "optimizer": {"name": "toy_optimizer"},
        "batch": {"microbatch": 4},
        "metrics": [{"name": "toy_metric"}],
        "run": {"tags": ["a"]},
    }


class Inner(BaseModel):
    """Config inside of another."""

    number: int = 1


class Written(BaseModel):
    """Config that writes some of its values in another form."""

    words: tuple[str, ...] = ()
    pairs: tuple[int, ...] = ()
    inner: Inner = Inner()
    table: dict[str, int] = {}
    plain: tuple[int, ...] = ()

    @field_serializer("words")
    def _joined(self, words: tuple[str, ...]) -> str:
        return " ".join(words)

    @field_serializer("pairs")
    def _twice(self, numbers: tuple[int, ...]) -> list[int]:
        return [number for number in numbers for _ in range(2)]

    @field_serializer("inner")
    def _named(self, _inner: Inner) -> str:
        return "an inner config"

    @field_serializer("table")
    def _listed(self, table: dict[str, int]) -> list[str]:
        return list(table)


def test_values_that_a_config_writes_in_another_form_are_published_in_that_form() -> None:
    value = Written(words=("ab", "c"), pairs=(1, 2), inner=Inner(number=2), table={"x": 1}, plain=(3, 4))
    assert module._changed(value, value.model_dump(mode="json")) == {
        "words": "ab c", "pairs": [1, 1, 2, 2], "inner": "an inner config", "table": ["x"], "plain": [3, 4],
    }  # fmt: skip
