from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import d9d_testing.toy.plugin as toy
import pytest
import yaml
from d9d_core.config import PluginConfig, Section
from d9d_core.errors import CheckpointError, D9dError, JobError, PluginError
from d9d_core.job import JobFile as Job
from d9d_core.job_file import pretrained
from d9d_core.job_file.document import Document
from d9d_core.job_file.schema import job_schema
from d9d_core.plugin import ModelSpec, Ref, TaskSpec, hookimpl
from d9d_core.registry.known import KnownPlugins
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_testing.toy.config import ToyDataConfig, ToyModelConfig, ToyOptimizerConfig, ToyTaskConfig
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

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
    assert job.use(REGISTRY).check().selection.model.spec.name == "toy_model"
    with pytest.raises(
        ValueError, match=r"names are resolved by Job.load only; in Python, give the config object of the model"
    ):
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
        "job.yaml:6: batch.qqq: not a field of this section; fields: size, microbatch, prefetch"
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
        "job.yaml: steps: the length of the run is missing; add 'steps:' or 'epochs:' to the job file"
    )


@pytest.mark.parametrize(
    ("suffix", "text", "field"),
    [(".json", '{"model": "toy_model"}', '"data":'), (".toml", 'model = "toy_model"', "data =")],
)
def test_a_missing_section_is_written_as_the_file_is(tmp_path: Path, suffix: str, text: str, field: str) -> None:
    path = tmp_path / f"job{suffix}"
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        Job.load(path, registry=Registry.of(toy))
    assert f"{path}: data: missing; add '{field}' to the job file" in str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("batch.size=9", "--set batch.size: batch.size 9 on 1 data-parallel rank(s)"),
        ("batch.microbatch=5", "--set batch.microbatch: batch.size 8 on 1"),
        ("parallel[0].every=2", "--set parallel[0].every: parallel[0]: expected the name of a strategy"),
        ("export=safetensors", "--set export: should be true, false, adapter or best, got 'safetensors'; exports have"),
        ("checkpoint.keep_every=3", "--set checkpoint.keep_every: checkpoint: keep_every 3 must be a multiple"),
        ("trackers=[console, console]", "--set trackers: trackers[1] is the same as trackers[0]"),
        ("model.blocks.x=3", "--set model.blocks.x: model.blocks: input should be"),
        ("seed=1", "job.yaml:6: batch.size 8 on 1"),
    ],
)
def test_an_error_names_the_override_that_caused_it(tmp_path: Path, override: str, text: str) -> None:
    path = tmp_path / "job.yaml"
    micro = "3" if override == "seed=1" else "4"
    path.write_text(MINIMAL + f"batch: {{size: 8, microbatch: {micro}}}\ncheckpoint: {{every: 2}}\n")
    with pytest.raises(JobError) as caught:
        Job.load(path, registry=Registry.of(toy), overrides=[override]).check()
    assert str(caught.value).replace(f"{tmp_path}/", "").startswith(text)


@pytest.mark.parametrize(("size", "microbatch", "best"), [(12, 5, 4), (8, 3, 2), (9, 7, 3)])
def test_the_largest_microbatch_that_fits_is_suggested(size: int, microbatch: int, best: int) -> None:
    values = {**yaml.safe_load(MINIMAL), "batch": {"size": size, "microbatch": microbatch}}
    with pytest.raises(JobError, match=f"use batch.microbatch {best}, or batch.size") as caught:
        Job.from_values(values, registry=Registry.of(toy)).check()
    assert f"batch: {{size: {size}, microbatch: {best}}}" in caught.value.__notes__[0]


@pytest.mark.parametrize("name", ["-x", ".x", "a b", ""])
def test_a_name_that_cannot_be_one_is_explained(tmp_path: Path, name: str) -> None:
    assert complaint(tmp_path, MINIMAL + f"run: {{name: '{name}'}}\n") == (
        "job.yaml:6: run.name: a name has letters, digits and _, and after the first character also - and ., "
        f"got '{name}'"
    )


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = complaint(tmp_path, MINIMAL.replace("steps: 3", "steps: x").replace("lr:", "lrr:") + "sead: 1\n")
    assert [line.split(": ")[1] for line in text.splitlines()] == ["steps", "optimizer.lrr", "sead"]


def test_a_broken_config_reference_is_an_error_at_its_place(tmp_path: Path) -> None:
    for config, cause in (
        ("nowhere:C", "failed to load: ModuleNotFoundError("),
        ("json:loads", "is not a subclass of d9d_core.config.PluginConfig"),
        ("d9d_testing.toy.config:ToyTaskConfig", "has the name 'toy_task'; write name: Literal['uu'] = 'uu'"),
    ):
        path = tmp_path / "job.yaml"
        path.write_text(MINIMAL.replace("toy_task", "uu"))
        with pytest.raises(JobError) as caught:
            Job.load(path, registry=Registry.of(toy, task_plugin(config)))
        assert str(caught.value).startswith(f"{path}:4: task: task 'uu' (acme): its config {config} {cause}")


def task_plugin(config: str) -> SimpleNamespace:
    @hookimpl
    def d9d_tasks() -> list[TaskSpec]:
        return [TaskSpec(name="uu", summary="x", config=Ref(config), build=Ref("json:loads"))]

    return SimpleNamespace(d9d_tasks=d9d_tasks, __name__="acme")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "evaluation: {every: 2}\n",
            "job.yaml:6: evaluation.data: the data is missing; add 'data:' under 'evaluation', or 'sets:' for "
            "several datasets",
        ),
        (
            "evaluation: {every: 2, data: toy_data, sets: {a: toy_data}}\n",
            "job.yaml:6: evaluation.data: 'sets' already names a; move 'data' into 'sets', or remove one of the two",
        ),
        ("steps: true\n", "job.yaml:6: steps: input should be a number, got True"),
        ("batch: {size: true}\n", "job.yaml:6: batch.size: input should be a number, got True"),
        ("batch: {microbatch: yes}\n", "job.yaml:6: batch.microbatch: input should be a number, got True"),
        (
            "peft: {name: toy_peft, trains: {a: 1}}\n",
            "job.yaml:6: peft.trains: input should be a list, got {'a': 1}",
        ),
        ("gradient_clipping: {p: true}\n", "job.yaml:6: gradient_clipping.p: input should be a number, got True"),
    ],
)
def test_a_nested_mistake_is_described_where_it_is(tmp_path: Path, text: str, message: str) -> None:
    before = MINIMAL.replace("steps: 3\n", "\n") if text.startswith("steps") else MINIMAL
    assert complaint(tmp_path, before + text) == message


def model_plugin(config: type[PluginConfig]) -> SimpleNamespace:
    class Here(Ref):
        def load(self) -> Any:
            return config

    @hookimpl
    def d9d_models() -> list[ModelSpec]:
        return [ModelSpec(name="shapes", summary="x", config=Here("x:y"), build=Here("x:y"), tiny=Here("x:y"))]

    return SimpleNamespace(d9d_models=d9d_models, __name__="acme")


class Round(Section):
    kind: Literal["round"] = "round"
    radius: float = Field(gt=0)
    corners: float = 0.0


class Square(Section):
    kind: Literal["square"] = "square"
    side: float
    round: float = Field(default=0.0, lt=1)


class Lone(Section):
    side: float


class ShapesConfig(PluginConfig):
    name: Literal["shapes"] = "shapes"
    several: list[Annotated[Round | Square, Field(discriminator="kind")]] = []
    called: dict[str, Annotated[Round | Square, Field(discriminator="kind")]] = {}
    lone: list[Lone] = []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("several: [{kind: square}]", "model.several[0].side: missing; add 'side:' under 'model.several[0]'"),
        ("several: [{side: 1}]", "model.several[0]: 'kind', which selects the fields, is missing, got {'side': 1}"),
        ("several: [{kind: round, radius: 0}]", "model.several[0].radius: input should be greater than 0, got 0"),
        ("several: [{kind: round, radius: 1, side: 2}]", "model.several[0].side: not a field of this section; fields"),
        ("called: {a: {kind: square}}", "model.called.a.side: missing; add 'side:' under 'model.called.a'"),
        ("lone: [{}]", "model.lone[0].side: missing; add 'side:' under 'model.lone[0]'"),
        # fields and parts that are called like a kind or a value
        (
            "called: {square: {kind: square}}",
            "model.called.square.side: missing; add 'side:' under 'model.called.square'",
        ),
        ("several: [{kind: square, side: 1, round: 2}]", "model.several[0].round: input should be less than 1, got 2"),
        ("several: [{kind: square, round: side}]", "model.several[0].side: missing; add 'side:' under"),
    ],
)
def test_the_kind_of_a_part_is_no_place_in_the_file(tmp_path: Path, fields: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL.replace("toy_model", f"{{name: shapes, {fields}}}"))
    with pytest.raises(JobError) as caught:
        Job.load(path, registry=Registry.of(toy, model_plugin(ShapesConfig)))
    assert any(line.startswith(f"{path}:2: {message}") for line in str(caught.value).splitlines()), caught.value


def test_true_is_no_number_in_lists_and_plugins_either(tmp_path: Path) -> None:
    class Numbers(PluginConfig):
        name: str = "numbers"
        several: list[dict[str, float]] = []
        either: bool | int = 0

    with pytest.raises(ValidationError, match=r"several.1.x\n  input should be a number"):
        Numbers(several=[{"x": 1}, {"x": True}])
    assert Numbers(either=True).either is True
    assert Numbers(several=[{"x": "3e-4"}]).several == [{"x": 3e-4}]
    assert complaint(tmp_path, MINIMAL.replace("0.1", "true")) == (
        "job.yaml:5: optimizer.lr: input should be a number, got True"
    )


def test_an_unknown_kernel_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    job = load(tmp_path, MINIMAL + "kernels: {attention: spda}\n")
    with pytest.raises(PluginError, match=r":6: kernels.attention: unknown kernel 'attention.spda'"):
        job.use(Registry.of(toy)).check()


@pytest.mark.parametrize(
    ("kernels", "text"),
    [
        ("[{backend: spda, match: [layers.0]}]", "kernels.attention: unknown kernel 'attention.spda'"),
        ("[]", "kernels.attention: list should have at least 1 item"),
        ("[{backend: sdpa}]", r"kernels.attention\[0\].match: missing; add 'match:' under 'kernels.attention\[0\]'"),
        ("[{backend: sdpa, match: layers.0}]", r"kernels.attention\[0\].match: .* write .*\[0\].match: \[layers.0\]"),
        ("3", "kernels.attention: input should be a valid list, got 3"),
        ("{backend: sdpa, match: [layers.0]}", r"kernels.attention: rules are a list; write \[{backend: ..., match: "),
    ],
)
def test_rules_of_kernels_are_refused_where_they_are_wrong(tmp_path: Path, kernels: str, text: str) -> None:
    with pytest.raises(D9dError, match=text):
        load(tmp_path, MINIMAL + f"kernels: {{attention: {kernels}}}\n").use(Registry.of(toy)).check()


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
        ("steps.x=1", "--set steps.x=1: cannot set steps.x: steps has no fields"),
        ("metrics[3]=a", "--set metrics[3]=a: cannot set metrics[3]: metrics is a list; its next entry is [1]"),
        ("metrics.x=a", "--set metrics.x=a: cannot set metrics.x: metrics is a list; its next entry is [1]"),
        ("optimizer[0]=a", "--set optimizer[0]=a: cannot set optimizer[0]: optimizer is not a list"),
        ("optimizer.lrr=1", "--set optimizer.lrr: not a field of 'toy_optimizer'"),
        ("optimizer.lr=[1", "--set optimizer.lr:1: expected ',' or ']'"),
    ],
)
def test_a_wrong_override_is_an_error(tmp_path: Path, override: str, message: str) -> None:
    assert complaint(tmp_path, MINIMAL + "metrics: [toy_metric]\n", override).startswith(message)


@pytest.mark.thorough
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


@pytest.mark.parametrize("section", ["[./mine.py]", "{files: [mine.py]}"])
def test_plugin_files_lie_beside_the_job_file(tmp_path: Path, section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("D9D_PLUGINS", raising=False)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "mine.py").write_text("from d9d_testing.toy.plugin import *\n")
    (tmp_path / "jobs" / "job.yaml").write_text(MINIMAL + f"plugins: {section}\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    job = Job.load("jobs/job.yaml", policy=PluginPolicy(autoload=False))
    assert job.model == ToyModelConfig()
    # The copy that a run keeps lies in another directory and is loaded from anywhere.
    copy = tmp_path / "elsewhere" / "job.yaml"
    copy.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = Job.load(copy, policy=PluginPolicy(autoload=False))
    assert again.model_dump() == job.model_dump()


@pytest.mark.parametrize(
    ("section", "where"),
    [("[./no.py]", "6: plugins[0]"), ("\n  files:\n  - no.py", "8: plugins.files[0]")],
)
def test_an_absent_plugin_file_is_named_at_its_place(tmp_path: Path, section: str, where: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL + f"plugins: {section}\n")
    with pytest.raises(JobError) as caught:
        Job.load(path)
    assert str(caught.value) == f"{path}:{where}: there is no file {tmp_path}/no.py"


def test_the_schema_is_a_discriminated_union_over_what_is_installed() -> None:
    schema = job_schema(REGISTRY)
    assert "x-d9d-kind" not in json.dumps(schema)
    names, configs = schema["properties"]["optimizer"]["anyOf"]
    assert names == {"enum": ["toy_optimizer"]}
    assert schema["properties"]["metrics"]["items"]["anyOf"][0] == {"enum": ["toy_metric"]}
    assert schema["properties"]["plugins"]["anyOf"][1]["items"] == {"type": "string"}
    (reference,) = configs["anyOf"]
    definition = schema["$defs"][reference["$ref"].rpartition("/")[2]]
    assert definition["properties"]["lr"]["description"] == "Base learning rate."
    assert definition["required"] == ["name"]


def test_sections_of_plugins_in_the_schema_are_found_where_it_refers_to_them() -> None:
    schema = job_schema(Registry.of(model_plugin(ShapesConfig)))
    (reference,) = schema["properties"]["model"]["anyOf"][1]["anyOf"]
    fields = schema["$defs"][reference["$ref"].removeprefix("#/$defs/")]["properties"]
    choices = fields["several"]["items"]
    pointers = [choice["$ref"] for choice in choices["oneOf"]]
    assert sorted(choices["discriminator"]["mapping"].values()) == sorted(pointers)
    pointers.append(fields["lone"]["items"]["$ref"])
    found = [schema["$defs"][pointer.removeprefix("#/$defs/")] for pointer in pointers]
    assert [definition["title"] for definition in found] == ["Round", "Square", "Lone"]


def test_epochs_stand_in_place_of_steps(tmp_path: Path) -> None:
    text = MINIMAL.replace("steps: 3\n", "epochs: 1.5\n")
    job = load(tmp_path, text)
    assert (job.epochs, job.steps) == (1.5, None)
    assert Job.from_values(job.resolved(), registry=job.registry) == job
    assert complaint(tmp_path, text + "steps: 3\n") == (
        "job.yaml:6: steps: steps and 'epochs: 1.5' both give the length of the run; remove one of them, on the "
        "command line by --set epochs=null or --set steps=null"
    )
    for wrong in ("0", "-1", ".inf", ".nan"):
        assert complaint(tmp_path, text.replace("1.5", wrong)).startswith("job.yaml:1: epochs: input should be ")


@pytest.mark.parametrize("assignment", ["steps", "=3", " =3", ".=3", ""])
def test_an_assignment_needs_a_field_and_a_value(assignment: str) -> None:
    with pytest.raises(JobError, match=r"^--set .*: write section.field=value, for example --set optimizer.lr=3e-4"):
        Document({}).override([assignment])


def test_sizes_are_read_from_the_newest_checkpoint_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 10):
        folder = run / "checkpoints" / f"step-{step:08}"
        folder.mkdir(parents=True)
        model = {"name": "m", "width": step, "pretrained": "x"}
        (folder / "manifest.json").write_text(json.dumps({"job": {"model": model}}))
    newest = run / "checkpoints" / "step-00000010"
    for place in (newest, run / "checkpoints", run):
        assert pretrained.find_manifest(str(place)) == newest / "manifest.json", place
    assert pretrained.find_manifest(str(run / "checkpoints" / "step-00000002")) == (
        run / "checkpoints" / "step-00000002" / "manifest.json"
    )
    assert pretrained.find_manifest(str(tmp_path)) is None
    assert pretrained._sizes_of_checkpoint("m", newest / "manifest.json") == {"width": 10}
    with pytest.raises(CheckpointError, match="^its checkpoint contains a model 'm', not "):
        pretrained._sizes_of_checkpoint("other", newest / "manifest.json")
