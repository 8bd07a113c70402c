from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
import yaml
from d9d_core.config.schema import job_schema
from d9d_core.errors import JobError
from d9d_core.job import Job
from d9d_core.plugin import Registry
from d9d_core.plugin.known import KnownPlugins
from d9d_testing.toy.config import ToyDataConfig, ToyModelConfig, ToyOptimizerConfig, ToyTaskConfig
from hypothesis import given
from hypothesis import strategies as st

REGISTRY = Registry.of(toy, known=KnownPlugins({"strategy": {"hsdp": "d9d-parallel"}}))
MINIMAL = """\
steps: 3
model: toy_model
data: toy_data
task: toy_task
optimizer: {name: toy_optimizer, lr: 0.1}
"""


def load(tmp_path: Path, text: str, *overrides: str, suffix: str = ".yaml") -> Job:
    path = tmp_path / f"job{suffix}"
    path.write_text(text)
    return Job.load(path, registry=REGISTRY, overrides=overrides)


def complaint(tmp_path: Path, text: str, *overrides: str, suffix: str = ".yaml") -> str:
    with pytest.raises(JobError) as caught:
        load(tmp_path, text, *overrides, suffix=suffix)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_a_bare_name_and_a_mapping_select_the_same(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL).model == ToyModelConfig()
    assert load(tmp_path, MINIMAL.replace("toy_model", "{name: toy_model, blocks: 3}")).model == ToyModelConfig(
        blocks=3
    )


def test_python_takes_config_objects_and_no_names() -> None:
    job = Job(
        steps=3, model=ToyModelConfig(), data=ToyDataConfig(), task=ToyTaskConfig(), optimizer=ToyOptimizerConfig()
    )
    assert job.use(REGISTRY).plan().parameters == (33, 33)
    with pytest.raises(ValueError, match=r"names are resolved by Job.load; in Python, give the model's config object"):
        Job(steps=3, model="toy_model", data=ToyDataConfig(), task=ToyTaskConfig(), optimizer=ToyOptimizerConfig())  # type: ignore[arg-type]


def test_toml_and_json_are_read_too(tmp_path: Path) -> None:
    values = yaml.safe_load(MINIMAL)
    toml = 'steps = 3\nmodel = "toy_model"\ndata = "toy_data"\ntask = "toy_task"\n'
    toml += '[optimizer]\nname = "toy_optimizer"\nlr = 0.1\n'
    assert load(tmp_path, MINIMAL) == load(tmp_path, json.dumps(values), suffix=".json")
    assert load(tmp_path, MINIMAL) == load(tmp_path, toml, suffix=".toml")


def test_the_resolved_job_reads_back_the_same(tmp_path: Path) -> None:
    job = load(
        tmp_path, MINIMAL + "metrics: [toy_metric]\nevaluation: {every: 2, data: {name: toy_data, features: 4}}\n"
    )
    resolved = job.model_dump(mode="json")
    assert resolved["optimizer"] == {"name": "toy_optimizer", "lr": 0.1}
    assert load(tmp_path, yaml.safe_dump(resolved)) == job


def test_a_qualified_name_survives_the_dump(tmp_path: Path) -> None:
    home = next(e for e in REGISTRY.entries("model")).origin.distribution
    job = load(tmp_path, MINIMAL.replace("toy_model", f"{home}/toy_model"))
    assert job.model_dump(mode="json")["model"]["name"] == f"{home}/toy_model"
    assert load(tmp_path, yaml.safe_dump(job.model_dump(mode="json"))) == job


def test_a_misspelt_section_names_line_and_remedy(tmp_path: Path) -> None:
    assert complaint(tmp_path, MINIMAL + "optimiser: {}\n") == (
        "job.yaml:6: optimiser: not a field of the job file; did you mean 'optimizer'?"
    )


def test_a_misspelt_field_names_the_plugin_that_owns_the_section(tmp_path: Path) -> None:
    origin = REGISTRY.find("optimizer", "toy_optimizer").origin
    text = complaint(tmp_path, MINIMAL.replace("lr: 0.1", "lrr: 0.1"))
    assert text == f"job.yaml:5: optimizer.lrr: not a field of 'toy_optimizer' ({origin}); did you mean 'lr'?"


def test_a_field_without_a_near_name_lists_the_fields(tmp_path: Path) -> None:
    assert complaint(tmp_path, MINIMAL + "batch: {qqq: 1}\n") == (
        "job.yaml:6: batch.qqq: not a field of this section; fields: size, microbatch"
    )


def test_a_wrong_type_names_line_and_value(tmp_path: Path) -> None:
    assert complaint(tmp_path, MINIMAL.replace("0.1", "fast")) == (
        "job.yaml:5: optimizer.lr: input should be a valid number, unable to parse string as a number, got 'fast'"
    )
    assert complaint(tmp_path, MINIMAL.replace("steps: 3", "steps: 0")) == (
        "job.yaml:1: steps: input should be greater than 0, got 0"
    )


def test_an_absent_first_party_plugin_is_named_at_its_place(tmp_path: Path) -> None:
    assert complaint(tmp_path, MINIMAL + "parallel:\n- {name: hsdp}\n") == (
        "job.yaml:7: parallel[0]: strategy 'hsdp' comes from d9d-parallel; install it with: pip install d9d-parallel"
    )


def test_a_near_miss_is_named_at_its_place(tmp_path: Path) -> None:
    text = complaint(tmp_path, MINIMAL.replace("toy_model", "toy_modle"))
    assert text.startswith("job.yaml:2: model: unknown model 'toy_modle'; did you mean 'toy_model' (")


def test_a_section_without_a_name_is_an_error(tmp_path: Path) -> None:
    assert complaint(tmp_path, MINIMAL.replace("model: toy_model", "model: {blocks: 2}")) == (
        "job.yaml:2: model: expected the name of a model, or a mapping with 'name', not {'blocks': 2}"
    )


def test_a_missing_section_says_what_to_add(tmp_path: Path) -> None:
    assert complaint(tmp_path, MINIMAL.replace("steps: 3\n", "")) == (
        "job.yaml: steps: missing; add 'steps:' to the job file"
    )


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = complaint(tmp_path, MINIMAL.replace("steps: 3", "steps: x").replace("lr:", "lrr:") + "sead: 1\n")
    assert [line.split(": ")[1] for line in text.splitlines()] == ["steps", "optimizer.lrr", "sead"]


def test_an_impossible_batch_is_an_error(tmp_path: Path) -> None:
    assert complaint(tmp_path, MINIMAL + "batch: {size: 6, microbatch: 4}\n") == (
        "job.yaml: batch.size 6 on 1 data-parallel rank(s) is 6 samples each, "
        "not a multiple of batch.microbatch 4; 2 would be"
    )
    assert "cannot be split over 4 data-parallel ranks" in complaint(
        tmp_path, MINIMAL + "batch: {size: 6}\nmesh: {dp_shard: 2, dp_replicate: 2}\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "job.yaml: a job file is a mapping of sections (model: ..., data: ...), this one is a list"),
        ("", "job.yaml: a job file is a mapping of sections (model: ..., data: ...), this one is empty"),
        (
            "just words",
            "job.yaml: a job file is a mapping of sections (model: ..., data: ...), this one is a single value",
        ),
        ("a: [1, 2", "job.yaml:1: expected ',' or ']', but got '<stream end>'"),
        ("steps: 1\nsteps: 2\n", "job.yaml:2: 'steps' appears twice"),
        (
            "run: !!python/object/apply:os.system ['true']\n",
            "job.yaml:1: the tag tag:yaml.org,2002:python/object/apply:os.system would build an object; "
            "job files hold plain values only",
        ),
        ("run: !thing {a: 1}\n", "job.yaml:1: the tag !thing would build an object; job files hold plain values only"),
    ],
)
def test_a_malformed_file_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    assert complaint(tmp_path, text) == message


def test_a_malformed_toml_or_json_is_an_error(tmp_path: Path) -> None:
    assert complaint(tmp_path, "a = ", suffix=".toml").startswith("job.toml: ")
    assert complaint(tmp_path, "{\n", suffix=".json").startswith("job.json:2: ")
    assert complaint(tmp_path, "", suffix=".ini") == "job.ini: a job file ends in .yaml, .yml, .toml, .json"


def test_an_absent_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"nope.yaml: no such job file"):
        Job.load(tmp_path / "nope.yaml", registry=REGISTRY)


def test_scientific_notation_is_a_number(tmp_path: Path) -> None:
    job = load(tmp_path, MINIMAL.replace("0.1", "3e-4"))
    assert job.optimizer.lr == 3e-4  # type: ignore[attr-defined]


def test_overrides_set_nested_fields(tmp_path: Path) -> None:
    text = MINIMAL + "metrics: [toy_metric]\n"
    job = load(
        tmp_path,
        text,
        "optimizer.lr=3e-4",
        "model.blocks=5",
        "run.name=other",
        "batch={size: 4}",
        "metrics[0]=toy_metric",
    )
    assert (job.optimizer.lr, job.model.blocks) == (3e-4, 5)  # type: ignore[attr-defined]
    assert (job.run.name, job.batch.size) == ("other", 4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr", "--set optimizer.lr: write section.field=value, for example --set optimizer.lr=3e-4"),
        ("steps.x=1", "--set steps.x=1: there is no steps.x to set"),
        ("metrics[3]=a", "--set metrics[3]=a: there is no metrics[3] to set"),
        ("optimizer.lrr=1", "--set optimizer.lrr: optimizer.lrr: not a field of 'toy_optimizer'"),
        ("optimizer.lr=[1", "--set optimizer.lr:1: expected ',' or ']'"),
    ],
)
def test_a_wrong_override_is_an_error(tmp_path: Path, override: str, message: str) -> None:
    assert complaint(tmp_path, MINIMAL + "metrics: [toy_metric]\n", override).startswith(message)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=12,
    )
)
def test_no_content_of_a_job_file_causes_anything_but_a_job_error(tmp_path_factory: Any, values: Any) -> None:
    path = tmp_path_factory.mktemp("jobs") / "job.yaml"
    path.write_text(
        yaml.safe_dump({"model": values, "steps": values, "plugins": values, "optimizer": {"name": values}})
    )
    with pytest.raises(JobError):
        Job.load(path, registry=REGISTRY)


def test_plugins_may_be_a_list_of_files(tmp_path: Path) -> None:
    job = load(tmp_path, MINIMAL + "plugins: [./mine.py]\n")
    assert job.plugins.files == [Path("mine.py")]


def test_the_schema_is_a_discriminated_union_over_what_is_installed() -> None:
    schema = job_schema(REGISTRY)
    assert "x-d9d-kind" not in json.dumps(schema)
    names, configs = schema["properties"]["optimizer"]["anyOf"]
    assert names == {"enum": ["toy_optimizer"]}
    (reference,) = configs["oneOf"]
    definition = schema["$defs"][reference["$ref"].rpartition("/")[2]]
    assert definition["properties"]["lr"]["description"] == "Base learning rate."
    assert definition["required"] == ["name"]
