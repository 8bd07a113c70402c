"""Access to transformers: releases, fields, and models that it has, lacks or refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError
from d9d_transformers import library
from torch import nn


@pytest.mark.parametrize(
    ("written", "newer"),
    [
        ("5.18.0", True), ("6.0.0", True), ("10.1", True), ("5.17.9", False), ("5.17", False), ("5.9.0", False),
        ("4.99.0", False), ("5", False), ("next", False), (None, False), (5.18, False), ("5.18.0.dev0", True),
    ],
)  # fmt: skip
def test_a_newer_release_has_a_larger_major_or_minor_version(
    monkeypatch: pytest.MonkeyPatch, written: Any, newer: bool
) -> None:
    monkeypatch.setattr(library, "library", lambda: SimpleNamespace(__version__="5.17.1"))
    assert library.written_by_newer({"transformers_version": written}) == (written if newer else None)
    assert library.written_by_newer({}) is None


def test_a_missing_library_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BuildError, match="needs the library transformers, .*; install it with: pip install"):
        library.library()


def test_numbers_that_json_lacks_are_read_and_code_is_not() -> None:
    odd: dict[str, Any] = {"__float__": "Infinity"}
    values = {"model_type": "llama", "auto_map": {"AutoConfig": "mine.Config"}, "rms_norm_eps": odd}
    values |= {"latents": [odd, {"inner": {"__float__": "-Infinity"}}, 3], "pairs": {**odd, "other": 1}}
    found = library.native_config(values)
    assert found.rms_norm_eps == float("inf")
    assert found.latents == [float("inf"), {"inner": float("-inf")}, 3]
    assert found.pairs == {"__float__": "Infinity", "other": 1}
    assert not hasattr(found, "auto_map")


def test_unknown_fields_are_those_that_the_class_of_a_config_does_not_declare() -> None:
    values = {"model_type": "gpt2", "n_layer": 2, "num_hidden_layers": 2, "latents": 3, "empty": None, "other": 0}
    config = library.native_config(values)
    assert library.unknown_fields(config, values) == ["latents", "other"]
    assert library.unknown_fields(config, {**values, "never_stored": 1}) == ["latents", "other"]


def test_a_field_that_is_almost_a_name_is_misspelled_unless_that_field_is_given_too() -> None:
    with pytest.raises(
        CheckpointError, match=r"^config\.json: hiden_size is no field of llama, which has hidden_size;"
    ):
        library.native_config({"model_type": "llama", "hiden_size": 8})
    both = library.native_config({"model_type": "llama", "hiden_size": 8, "hidden_size": 64})
    assert both.hidden_size == 64
    library.native_config({"model_type": "llama", "size_of_hidden": 8})


def test_the_fields_of_a_language_model_inside_a_larger_one() -> None:
    inside = {"model_type": "gemma3_text", "hidden_size": 32, "num_hidden_layers": 2}
    whole: dict[str, Any] = {"model_type": "gemma3", "text_config": inside, "tie_word_embeddings": False}
    own = {"architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": False}
    found = library.language_fields(whole)
    assert found is not None
    assert found == {**found, **inside, **own}
    marked = library.language_fields(whole | {"quantization_config": {"bits": 4}, "is_encoder_decoder": False})
    assert marked is not None
    assert marked == {**found, "quantization_config": {"bits": 4}, "is_encoder_decoder": False}
    tied = library.language_fields(whole | {"tie_word_embeddings": True})
    assert tied is not None
    assert tied["tie_word_embeddings"] is True
    assert library.language_fields(inside) is None
    bare = library.language_fields({"model_type": "gemma3"})
    assert bare is not None
    assert bare["model_type"] == "gemma3_text"


class Config:
    """Config of a stand-in model."""

    model_type = "stand_in"


class Kind:
    """Auto class of transformers that builds its arguments."""

    def __init__(self, name: str, *configs: type) -> None:
        self.name, self._model_mapping = name, dict.fromkeys(configs)

    def from_config(self, config: Any, **given: Any) -> Any:
        if config.model_type == "broken":
            raise KeyError("size")
        return self.name, config, given


def test_models_are_built_in_the_default_dtype_without_code_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    kind = Kind("language", Config)
    monkeypatch.setattr(library, "library", lambda: SimpleNamespace(AutoModelForCausalLM=kind))
    given = {"attn_implementation": "d9d", "dtype": torch.float32, "trust_remote_code": False}
    assert library.native_model(config) == ("language", config, given)
    assert library.native_model(config, "eager") == ("language", config, given | {"attn_implementation": "eager"})
    assert library.container_model(config) == ("language", config, given)
    config.model_type = "broken"
    with pytest.raises(BuildError, match=r"^model\.config: transformers cannot build a broken: 'size'$"):
        library.native_model(config)
    other = SimpleNamespace(model_type="other")
    with pytest.raises(BuildError, match=r"no language model \(ForCausalLM\) of type 'other'; choose another type"):
        library.native_model(other)
    with pytest.raises(BuildError, match=r"transformers has no model of type 'other'; correct model_type"):
        library.container_model(other)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (
            ["AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"],
            "AutoModelForMultimodalLM",
        ),
        (["AutoModelForCausalLM", "AutoModelForImageTextToText"], "AutoModelForImageTextToText"),
        (["AutoModelForCausalLM"], "AutoModelForCausalLM"),
    ],
)
def test_larger_models_are_found_by_the_first_auto_class_that_has_them(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], expected: str
) -> None:
    monkeypatch.setattr(library, "library", lambda: SimpleNamespace(**{kind: Kind(kind, Config) for kind in kinds}))
    assert library.container_model(Config())[0] == expected
    monkeypatch.setattr(library, "library", lambda: SimpleNamespace(
        AutoModelForMultimodalLM=Kind("other"), AutoModelForCausalLM=Kind("language", Config)
    ))  # fmt: skip
    assert library.container_model(Config())[0] == "language"


def test_the_base_of_a_model_has_the_name_that_the_model_states() -> None:
    whole: Any = nn.ModuleDict({"decoder": nn.Linear(1, 1)})
    whole.base_model_prefix = "decoder"
    assert library.base_of(whole) == ("decoder", whole["decoder"])
    whole.base_model_prefix = "model"
    with pytest.raises(
        BuildError, match=r"^model\.config: ModuleDict has no module 'model' that returns hidden states"
    ):
        library.base_of(whole)


@pytest.mark.parametrize("named", ["silu", "gelu", "relu2"])
def test_activations_have_the_names_of_transformers(named: str) -> None:
    assert named in library.activations()
    check: Callable[[str], bool] = library.activations().__contains__
    assert not check("silou")
