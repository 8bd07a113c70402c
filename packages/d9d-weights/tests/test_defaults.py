"""Limits on untrusted files of weights, and defaults of mappers and calls."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any

import pytest
from d9d_weights.checkpoint import manifest, manifest_model
from d9d_weights.checkpoint.pretrained import Source, open_source
from d9d_weights.files import lock, safetensors
from d9d_weights.files.remote import RemoteDraft
from d9d_weights.graph import base, mappers, merging, select
from d9d_weights.hugging_face import adapter_bounds, directory, tokenizer_bounds, writer
from d9d_weights.hugging_face.adapter_config import _short
from d9d_weights.hugging_face.layout import some
from d9d_weights.hugging_face.load import load_tensors
from d9d_weights.model_card import markdown
from d9d_weights.model_card.card import ModelCard
from d9d_weights.progress import ByteBar, SampleBar
from d9d_weights.sharding.collectives import gather_objects, gather_tensors
from d9d_weights.templates import process, sandbox


def test_files_of_strangers_are_read_up_to_their_limits() -> None:
    assert (manifest.MAX_BYTES, manifest_model.VERSION) == (2**30, 2)
    assert manifest_model._LARGEST == safetensors._LARGEST == 9_223_372_036_854_775_807
    assert (safetensors._MAX_HEADER, safetensors._MAX_DIMS, safetensors._LENGTH_BYTES) == (100_000_000, 64, 8)
    assert (adapter_bounds._MAX_RANK, adapter_bounds._MAX_NAMES, adapter_bounds._MAX_NAME) == (16_384, 16_384, 256)
    assert directory._LFS_BYTES == 1024
    assert (tokenizer_bounds._MOST_STEPS, tokenizer_bounds._MOST_ADDED) == (128, 1024)
    assert (tokenizer_bounds._LONGEST_TEXT, tokenizer_bounds._LONGEST_PATTERN) == (256, 65_536)
    assert (tokenizer_bounds._MOST_GROWTH, tokenizer_bounds._MOST_TABLE) == (64, 4_194_304)
    assert tokenizer_bounds._LONGEST_REPLACEMENT == 256
    assert (sandbox.MAX_SIZE, sandbox._MAX_BITS, process._MAX_ANSWER) == (2**24, 4096, 2**27)
    assert writer.SHARD_BYTES == 5_000_000_000
    assert (base.SHOWN, markdown._LONGEST, lock._NAME) == (20, 300, 200)
    assert (_short("x" * 300), _short("x" * 301)) == ("x" * 300, "x" * 300 + "...")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Source.graph, {"duplicates": True}),
        (open_source, {"weights": True}),
        (RemoteDraft.__init__, {"positioned": False}),
        (some, {"shown": 3}),
        (load_tensors, {"threads": 4, "once": False}),
        (gather_tensors, {"dst": 0}),
        (gather_objects, {"dst": 0}),
        (ByteBar.__init__, {"shown": True}),
        (SampleBar.__init__, {"shown": True}),
        (directory.ModelDirectory.open, {"weights": True}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_calls_that_leave_out_an_argument_mean_the_documented_one(function: Any, expected: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert {one.name: one.default for one in parameters if isinstance(one.default, int)} == expected


def test_mappers_need_their_inputs_and_act_on_the_first_dimension_unless_told_otherwise() -> None:
    found: dict[str, set[Any]] = {"optional": set(), "dim": set()}
    for module in (mappers, merging, select):
        for record in vars(module).values():
            if (
                isinstance(record, type)
                and record.__module__ == module.__name__
                and hasattr(record, "__dataclass_fields__")
            ):
                for one in fields(record):
                    if one.name in found and one.default is not MISSING:
                        found[one.name].add((type(one.default), one.default))
    assert found == {"optional": {(bool, False)}, "dim": {(int, 0)}}


def test_a_template_may_take_a_number_of_steps_and_bytes() -> None:
    given = [one for record in vars(process).values() if isinstance(record, type) for one in _numbers(record)]
    assert ("steps", 2**22) in given
    assert ("memory", 2**29) in given
    assert ("step", 0) in _numbers(ModelCard)


def _numbers(record: type[Any]) -> list[tuple[str, Any]]:
    if not hasattr(record, "__dataclass_fields__"):
        return []
    return [(one.name, one.default) for one in fields(record) if isinstance(one.default, int)]
