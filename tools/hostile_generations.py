"""Hostile settings of generations: drawn configs of a model, with which it generates a few tokens."""

from __future__ import annotations

import io
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from d9d_core.untrusted import visible
from d9d_inference.generation.language_model import Decoding, LanguageModel, row_of
from d9d_inference.generation.prompts import Prompt
from d9d_testing.hostile.files import Draw, damage
from d9d_testing.hostile.judge import WrongLoad
from d9d_testing.hostile.values import edited, hostile_values
from hostile_sound import ESCAPE, Sound
from hypothesis import strategies as st

#: Fields of a generation config; only the library has the full list.
_GENERATION_FIELDS = (
    "num_beams", "num_return_sequences", "num_beam_groups", "max_length", "max_new_tokens", "min_length",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "force_words_ids",
    "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id",
    "do_sample", "use_cache", "early_stopping", "cache_implementation", "cache_config", "guidance_scale",
    "watermarking_config", "constraints", "stop_strings", "penalty_alpha", "dola_layers", "diversity_penalty",
    "max_time", "renormalize_logits", "remove_invalid_values", "return_dict_in_generate", "output_scores",
    "output_attentions", "assistant_early_exit", "prompt_lookup_num_tokens", "num_assistant_tokens",
    "prefill_chunk_size", "compile_config", "disable_compile", "low_memory", "token_healing", "transformers_version",
    "trust_remote_code", "custom_generate", "_from_model_config", "x" + ESCAPE,
)  # fmt: skip
_SETTINGS = st.one_of(
    hostile_values(),
    st.integers(-3, 20),
    st.floats(0, 2),
    st.booleans(),
    st.lists(st.integers(-2, 400), max_size=3),
    st.lists(st.lists(st.integers(-2, 400), max_size=3), max_size=3),
    st.sampled_from(
        [ESCAPE, [ESCAPE], {ESCAPE: ESCAPE}, "static", "dynamic", "quantized", "sliding_window", "offloaded"]
    ),
)


def generation_case(sound: Sound, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
    """Generation settings of a model, read as by ``d9d generate``, which then generates a few tokens."""
    shutil.copytree(sound.model, copy)
    changes: dict[str, Any] = {}
    also = draw(st.sampled_from([True, False, False]))
    for name, fields, most in (
        ("generation_config.json", _GENERATION_FIELDS, 2),
        ("config.json", None, 1 if also else 0),
    ):
        values = json.loads((copy / name).read_text()) if (copy / name).exists() else {}
        for field in draw(st.lists(st.sampled_from(fields or sorted(values)), max_size=most, unique=True)):
            changes[field] = values[field] = draw(_SETTINGS)
        if draw(st.sampled_from([True, *[False] * 9])):
            changes[name] = values = draw(edited(values))
        (copy / name).write_text(json.dumps(values), "utf-8")
    if draw(st.sampled_from([True, *[False] * 9])):
        changes["damaged"] = damage(draw, copy, sound.outside)

    def read() -> None:
        with heard() as said:
            generated(copy, number, further)
        if visible(text := said.getvalue()) != text:
            at = next(at for at, letter in enumerate(text) if visible(letter) != letter)
            raise WrongLoad(f"would reach the terminal: {text[max(0, at - 60) : at + 20]!r}")

    number = draw(st.integers(0, 9))
    further: dict[str, Any] = {}
    if draw(st.sampled_from([True, *[False] * 9])):
        changes["further"] = further = {draw(st.sampled_from(_GENERATION_FIELDS)): draw(_SETTINGS)}
    return json.dumps(changes)[:300], read


def generated(directory: Path, number: int, further: Mapping[str, Any]) -> None:
    """Generate a few tokens with a model, as ``d9d generate --file`` and ``--prompt`` do.

    Args:
        directory: model directory.
        number: random seed.
        further: settings of ``--generation``.

    Raises:
        WrongLoad: the output is not the JSON of the completions.
    """
    model = LanguageModel(directory, directory, None, torch.device("cpu"), None)
    decoding = Decoding(max_new_tokens=3, seed=number, further=further)
    prompt = Prompt("here", {"id": 1}, text="the quick")
    ids = model.encode(prompt, None, None, raw=False)
    model.check_length(ids, 3, "here")
    found = model.complete([ids, ids[:2]], decoding, number)
    if len(found) != 2 or any(len(one) > 3 for one in found):
        raise WrongLoad(f"completions of {[len(one) for one in found]} tokens")
    for one in found:
        json.dumps(row_of(prompt, one, model), ensure_ascii=False).encode()
    model.stream(ids, decoding)


@contextmanager
def heard() -> Iterator[io.StringIO]:
    """Capture all text that libraries print on the terminal within the block."""
    said, out = io.StringIO(), io.StringIO()
    handlers = [one for one in logging.getLogger("transformers").handlers if isinstance(one, logging.StreamHandler)]
    before = [handler.setStream(said) for handler in handlers]
    with redirect_stderr(said), redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("default")
        try:
            yield said
        finally:
            for handler, stream in zip(handlers, before, strict=True):
                if stream is not None:
                    handler.setStream(stream)
