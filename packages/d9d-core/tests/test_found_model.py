"""Jobs that name pretrained weights, but no model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.job_file.found_model import find_model, model_for_type
from d9d_core.job_file.schema import job_schema
from d9d_core.plugin import ANY_MODEL_TYPE, ModelSpec, Ref, hookimpl
from d9d_core.registry.known import KnownPlugins
from d9d_core.registry.registry import Registry

HOMES = {"model type": {"llama": "d9d-llama", "toy": "d9d-testing"}}


def registry(*models: tuple[str, set[str]], known: dict[str, dict[str, str]] = HOMES) -> Registry:
    """Registry of models with these names and model types, and of the toys."""
    config, form = Ref("acme:Config"), Ref("acme:Format")

    def plugin(name: str, model_types: set[str]) -> Any:
        spec = ModelSpec(
            name=name, summary="x", config=config, build=config, hugging_face=form, model_types=model_types
        )
        return SimpleNamespace(__name__=f"acme-{name}", D9D_API=2, d9d_models=hookimpl(lambda: [spec]))

    return Registry.of(toy, *(plugin(*model) for model in models), known=KnownPlugins(known))


def weights(directory: Path, **config: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def job(registry: Registry, **model: Any) -> JobFile:
    others = {"steps": 3, "task": "toy_task", "data": "toy_data", "optimizer": "toy_optimizer"}
    return JobFile.from_values({**others, "model": model}, registry=registry)


def test_a_record_that_lists_the_type_takes_precedence_over_one_that_reads_any() -> None:
    models = registry(("any", {ANY_MODEL_TYPE}), ("one", {"a", "b"}))
    assert model_for_type({"model_type": "b"}, models) == ("one", "model_type is 'b'")
    assert model_for_type({"model_type": "c"}, models) == ("any", "model_type is 'c'")


def test_two_records_of_one_type_are_a_choice_of_the_job() -> None:
    models = registry(("one", {"a"}), ("two", {"a", "b"}))
    with pytest.raises(JobError, match=r"'one' \(acme-one\) and 'two' \(acme-two\) read model_type 'a'; choose one"):
        model_for_type({"model_type": "a"}, models)
    assert model_for_type({"model_type": "b"}, models)[0] == "two"


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": ""}, {"model_type": ["a"]}])
def test_a_config_without_a_type_needs_a_name(config: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="the model's config.json states no model_type; name the model in model.name"):
        model_for_type(config, registry())


def test_a_type_that_no_installed_model_reads_says_what_does() -> None:
    read = "installed models read: a, b, toy"
    for known, install in (
        (HOMES, "; a model of d9d-llama does: pip install d9d-llama"),
        ({"model type": {ANY_MODEL_TYPE: "d9d-any"}}, "; a model of d9d-any does: pip install d9d-any"),
        ({}, ""),
    ):
        with pytest.raises(JobError) as caught:
            model_for_type({"model_type": "llama"}, registry(("one", {"b", "a"}), known=known))
        assert str(caught.value) == f"no installed model reads model_type 'llama'{install}; {read}"


def test_a_job_without_a_name_gets_the_model_and_its_stored_sizes(tmp_path: Path) -> None:
    stored = weights(tmp_path / "stored", model_type="toy", features=6)
    found, named = (job(registry(), **name, pretrained=str(stored)).model for name in ({}, {"name": "toy_model"}))
    assert found == named
    assert (found.name, found.features) == ("toy_model", 6)  # type: ignore[attr-defined]


def test_the_model_of_a_checkpoint_is_the_one_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    manifest = tmp_path / "step-00000003" / "manifest.json"
    for name in ("toy_model", "d9d-testing/toy_model"):
        manifest.write_text(json.dumps({"job": {"model": {"name": name, "features": 5}}}))
        assert find_model(str(tmp_path), registry()) == (name, "its checkpoint names it")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"blocks": 2}, "model: expected the name of a model, or a mapping with 'name', not {'blocks': 2}"),
        ({"pretrained": None}, "model: expected the name of a model, or a mapping with 'name'"),
        (
            {"pretrained": "other"},
            "model: pretrained: no model can be chosen for other: no installed model reads model_type 'llama'",
        ),
        ({"pretrained": "org/name"}, "hf download org/name --local-dir name, then set model.pretrained to ./name"),
        (
            {"pretrained": "absent"},
            "no model can be chosen for absent: the config.json of absent cannot be read (No such file or directory)",
        ),
        (
            {"name": "toy_model", "pretrained": "other"},
            "model_type in its config.json is 'llama', which model 'toy_model'",
        ),
    ],
)
def test_a_model_that_cannot_be_found_is_an_error_with_the_next_action(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], text: str
) -> None:
    weights(tmp_path / "other", model_type="llama")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError) as caught:
        job(registry(), **model)
    assert text in str(caught.value)


def test_an_existing_directory_is_not_taken_for_a_name_on_the_hub(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match="config.json of .* cannot be read"):
        job(registry(), pretrained="org/name")


def test_editors_accept_a_model_without_a_name_only_with_weights() -> None:
    properties = job_schema(Registry.of(toy))["properties"]
    unnamed = [choice for choice in properties["model"]["anyOf"] if choice.get("required") == ["pretrained"]]
    assert [choice["not"] for choice in unnamed] == [{"required": ["name"]}]
    assert not any(choice.get("required") for choice in properties["task"]["anyOf"])
