"""Defaults of inference configs and calls, and limits on files that a library reads."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from d9d_core.errors import CheckpointError
from d9d_inference import captures, part_store
from d9d_inference.commands import evaluate, generate, infer, model_files
from d9d_inference.config import ParquetWriterConfig
from d9d_inference.evaluation import content, subject
from d9d_inference.evaluation.compose import Options
from d9d_inference.generation import decoder
from d9d_inference.generation import language_model as module
from d9d_inference.generation.config import SamplesConfig
from d9d_inference.generation.decoder import Sequences
from d9d_inference.generation.language_model import Decoding, _check_sizes
from d9d_inference.job import InferenceJob


def of_call(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if isinstance(one.default, int | float)}


def test_calls_that_leave_out_an_argument_mean_the_documented_one() -> None:
    assert of_call(InferenceJob.build) == {"owning": False}
    assert of_call(Sequences.of) == {"multiple": 1}
    plugins = {"no_plugins": False, "strict_plugins": False}
    assert of_call(infer.infer) == of_call(evaluate.evaluate) == {**plugins, "alone": False}
    assert of_call(generate.generate) == {
        "chat": False, "overwrite": False, "batch": 8, "raw": False, "max_new_tokens": 256, "seed": 0,
        "no_plugins": False,
    }  # fmt: skip
    assert (Decoding().max_new_tokens, Decoding().seed) == (256, 0)
    assert Options() == Options(None, False)


def test_configs_have_the_documented_defaults() -> None:
    assert ParquetWriterConfig().row_group == 4096
    found = {name: field.default for name, field in SamplesConfig.model_fields.items()}
    assert (found["max_new_tokens"], found["seed"], found["rows"], found["show"]) == (32, 0, 8, True)


def test_limits_are_those_of_the_manuals() -> None:
    assert (captures.TOGETHER, part_store._DIGITS) == (4, 12)
    assert (model_files._SHARD, model_files._THREADS) == (5_000_000_000, 4)
    assert (subject._BATCH, subject._LENGTH) == ({"size": 64, "microbatch": 8}, 2048)
    assert decoder._GROWTH == 64
    assert content._MOST == 67_108_864
    assert len({decoder._OTHERS, decoder._NOT_FINITE, decoder._NO_LOGITS, *range(3)}) == 6


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("num_heads", 16_384),
        ("hidden_layers", 16_384),
        ("vocab_size", 16_777_216),
        ("head_dim", 16_777_216),
        ("max_position_embeddings", 134_217_728),
    ],
)
def test_sizes_of_a_model_are_accepted_up_to_their_limit(name: str, most: int) -> None:
    _check_sizes("config.json", {name: most, "other": most * 10, "text": {name: str(most * 10)}})
    for deep in range(8):
        values: dict[str, Any] = {name: most + 1}
        for _ in range(deep):
            values = {"inner": values}
        with pytest.raises(CheckpointError, match=f"^config.json: {name} is {most + 1}, but no model has more than"):
            _check_sizes("config.json", values)
    for _ in range(8 - deep):
        values = {"inner": values}
    _check_sizes("config.json", values)
    assert module._MAX_DEPTH == 8


def test_a_model_may_ask_for_few_beams() -> None:
    assert module._MOST_INHERITED == {"num_beams": 16, "num_return_sequences": 1, "num_beam_groups": 16}
