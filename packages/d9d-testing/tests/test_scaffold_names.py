"""Names that a scaffolded plugin cannot have, and directories that it cannot be written to, are refused with advice."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml
from d9d_core.errors import PluginError
from d9d_testing.scaffold import package
from d9d_testing.scaffold.command import app, new_plugin
from d9d_testing.scaffold.kinds import KINDS
from d9d_testing.scaffold.package import plugin_files, write_plugin


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("class", "metric", "a keyword or a module of Python; use another, such as acme-class"),
        ("json", "metric", "a keyword or a module of Python"),
        ("adamw", "optimizer", "the optimizer of that name comes from d9d-optim"),
        ("d9d-mine", "metric", "first-party"),
        ("1st", "metric", "is not a package name"),
        ("acme", "gizmo", "no template of this kind"),
    ],
)
def test_a_name_that_cannot_work_is_refused(name: str, kind: str, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        plugin_files(name, kind)


def test_tests_do_not_repeat_what_the_package_needs() -> None:
    assert plugin_files("acme-bits", "metric")["pyproject.toml"].count('"torch') == 1


def test_the_command_writes_the_package_where_it_is_told_and_says_what_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    new_plugin("acme-bits", "metric", tmp_path / "else" / "where")
    new_plugin("acme-bobs", "metric", None)
    for root, name in ((tmp_path / "else" / "where", "acme-bits"), (tmp_path / "acme-bobs", "acme-bobs")):
        assert {str(file.relative_to(root)) for file in root.rglob("*")} >= set(plugin_files(name, "metric"))
    said = capsys.readouterr().out
    assert "cd acme-bobs" in said
    assert "fill in before a release: the addresses in pyproject.toml, and the name in LICENSE" in said


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with pytest.raises(PluginError, match="taken: cannot write the package there: Not a directory"):
        write_plugin(taken, "acme-bits", "metric")
    assert taken.read_text() == "mine"


def test_a_package_has_its_names_files_and_requirements(tmp_path: Path) -> None:
    made = plugin_files("Acme.Bits-2", "metric")
    assert list(made) == [
        "pyproject.toml", "README.md", "LICENSE", ".github/workflows/ci.yml", "src/acme_bits_2/__init__.py",
        "src/acme_bits_2/plugin.py", "src/acme_bits_2/conformance.py", "tests/test_metric.py",
        "src/acme_bits_2/metric.py", "src/acme_bits_2/config.py", "src/acme_bits_2/py.typed", "job.yaml",
    ]  # fmt: skip
    assert 'name = "acme-bits-2"' in made["pyproject.toml"]
    assert '"d9d-core>=0.1"' in made["pyproject.toml"]
    assert 'config=Ref("acme_bits_2.config:AcmeBits2Config")' in made["src/acme_bits_2/plugin.py"]
    assert made["job.yaml"].startswith("# Trains in seconds on a CPU: d9d train job.yaml\n")
    assert made["src/acme_bits_2/py.typed"] == ""
    # The workflow's own expressions are the only dollar signs.
    made[".github/workflows/ci.yml"] = made[".github/workflows/ci.yml"].replace("${{ matrix.", "")
    assert not any("${" in text or "{Name}" in text or "{name}" in text for text in made.values())
    written = write_plugin(tmp_path / "new", "acme-bits", "metric")
    assert written == sorted(path for path in (tmp_path / "new").rglob("*") if path.is_file())
    with pytest.raises(PluginError, match="new exists and is not empty; give another --directory"):
        write_plugin(tmp_path / "new", "acme-bits", "metric")
    (tmp_path / "empty").mkdir()
    assert len(write_plugin(tmp_path / "empty", "acme-bits", "metric")) == len(written)


@pytest.mark.parametrize("kind", KINDS)
def test_job_files_of_every_kind_are_complete(kind: str) -> None:
    made = plugin_files("acme-bits", kind)
    job = yaml.safe_load(made["job.yaml"])
    assert {"run", "model", "task", "data", "optimizer", "steps"} <= job.keys()
    own_model = kind == "model"
    assert own_model or job["model"].items() >= {"name": "qwen3", "vocab_size": 257, "max_positions": 64}.items()
    assert (kind == "head") == ("heads" in job["model"])
    assert kind != "head" or job["model"]["heads"] == {"topic": {"kind": "acme_bits", "num_classes": 3}}
    assert "infer.yaml" not in made or yaml.safe_load(made["infer.yaml"])


#: Kind -> whether its package has a config, a module with the implementation, and an inference job.
PARTS = {
    "metric": (True, True, False), "tracker": (True, True, False), "optimizer": (True, True, False),
    "lr_schedule": (True, True, False), "task": (True, True, False), "dataset": (True, True, False),
    "model": (True, True, False), "strategy": (True, True, False), "schedule": (True, True, False),
    "peft": (True, True, False), "kernel": (False, True, False), "subscriber": (True, True, False),
    "inference_task": (True, True, True), "writer": (True, True, True), "head": (True, True, False),
    "launcher": (True, True, False), "view": (False, False, False), "health_check": (False, True, False),
    "job_check": (False, True, False), "command": (False, True, False), "capability": (False, True, False),
}  # fmt: skip


def test_every_kind_has_its_files() -> None:
    found = {}
    for kind in KINDS:
        made = plugin_files("acme-bits", kind)
        readme = [f"| `{path}` |" in made["README.md"] for path in made]
        found[kind] = tuple(
            path in made for path in ("src/acme_bits/config.py", f"src/acme_bits/{kind}.py", "infer.yaml")
        )
        # The README lists the files that an author changes.
        listed = {path for path, there in zip(made, readme, strict=True) if there}
        assert set(made) - listed == {
            "pyproject.toml", "README.md", "LICENSE", "src/acme_bits/__init__.py", "src/acme_bits/py.typed",
        }  # fmt: skip
        assert made["README.md"].count("\n| `") == len(listed)
    assert found == PARTS


@pytest.mark.parametrize(
    ("kind", "imports", "record"),
    [
        (
            "metric",
            "MetricSpec, Ref",
            [
                'name="acme_bits"', 'summary="Mean loss of a token in bits, or in another unit."',
                'reads={"token_loss", "targets"}', 'config=Ref("acme_bits.config:AcmeBitsConfig")',
                'build=Ref("acme_bits.metric:AcmeBits")',
            ],
        ),
        (
            "lr_schedule",
            "LrScheduleSpec, Ref",
            [
                'name="acme_bits"', 'summary="Inverse square root with a linear warm-up."',
                'config=Ref("acme_bits.config:AcmeBitsConfig")', 'build=Ref("acme_bits.lr_schedule:acme_bits")',
            ],
        ),
        (
            "kernel",
            "KernelSpec, Ref",
            [
                'name="acme_bits"', 'summary="The gate of SwiGLU with less memory for the backward."',
                'op="silu_mul"', 'supports=Ref("acme_bits.kernel:supports")', 'build=Ref("acme_bits.kernel:build")',
            ],
        ),
        (
            "head",
            "HeadSpec, Ref",
            [
                'name="acme_bits"', 'summary="Classes of the largest features of a text."',
                'config=Ref("acme_bits.config:AcmeBitsConfig")',
            ],
        ),
        (
            "health_check",
            "HealthCheckSpec, Ref",
            ['name="acme_bits"', 'summary="Free space for temporary files."', 'run=Ref("acme_bits.health_check:run")'],
        ),
        (
            "view",
            "ViewDim, ViewSpec",
            [
                'name="acme_bits"',
                'summary="The mesh as stages, ranks with samples of their own, and ranks that share samples."',
                'dims=(ViewDim("stage", ("pp",)), ViewDim("data", ("dp_replicate", "dp_shard")), '
                'ViewDim("model", ("cp", "tp")))',
            ],
        ),
    ],
)  # fmt: skip
def test_a_declaration_has_the_fields_of_its_kind(kind: str, imports: str, record: list[str]) -> None:
    text = plugin_files("acme-bits", kind)["src/acme_bits/plugin.py"]
    assert f"from d9d_core.plugin import {imports}, hookimpl\n" in text
    spec = KINDS[kind].spec
    assert text.endswith(f"    yield {spec}(\n" + "".join(f"        {line},\n" for line in record) + "    )\n")


def test_a_capability_is_declared_by_its_token() -> None:
    text = plugin_files("acme-bits", "capability")["src/acme_bits/plugin.py"]
    assert "from d9d_core.plugin import CapabilitySpec, hookimpl\n" in text
    assert text.endswith(
        '    yield CapabilitySpec(\n        token="model:acme_bits",  # noqa: S106 - a capability token\n'
        '        summary="The model has modules with diagnostics().",\n    )\n'
    )


@pytest.mark.parametrize(
    ("kind", "needs", "tests"),
    [
        ("metric", ["d9d-core>=7.8", "pydantic>=2.9,<3", "torch>=2.11"], ["d9d-testing", "pytest"]),
        ("tracker", ["d9d-core>=7.8", "pydantic>=2.9,<3"], ["d9d-testing", "pytest", "torch"]),
        (
            "schedule",
            ["d9d-core>=7.8", "d9d-pipeline>=7.8", "pydantic>=2.9,<3"],
            ["d9d-testing", "pytest", "torch"],
        ),
        ("head", ["d9d-core>=7.8", "d9d-nn>=7.8", "pydantic>=2.9,<3", "torch>=2.11"], ["d9d-testing", "pytest"]),
        ("launcher", ["d9d-core>=7.8", "pydantic>=2.9,<3"], ["d9d-launch", "d9d-testing", "pytest", "torch"]),
        ("command", ["d9d-core>=7.8", "typer>=0.16"], ["d9d-testing", "pytest", "torch"]),
        ("view", ["d9d-core>=7.8"], ["d9d-testing", "pytest", "torch"]),
    ],
)
def test_requirements_are_sorted_and_those_of_the_tests_are_further_ones(
    kind: str, needs: list[str], tests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "version", lambda name: {"d9d-core": "7.8.9"}[name])
    made = plugin_files("acme-bits", kind)
    project = tomllib.loads(made["pyproject.toml"])["project"]
    assert project["dependencies"] == needs
    base = {"d9d-data", "d9d-nn", "d9d-optim", "d9d-qwen3"} - {need.partition(">")[0] for need in needs}
    assert project["optional-dependencies"]["test"] == sorted([*tests, *base])
    assert (project["name"], project["description"]) == ("acme-bits", KINDS[kind].summary)
    assert '"d9d-core==7.8.*"' in made[".github/workflows/ci.yml"]


def test_a_readme_shows_the_section_and_the_commands_of_its_kind() -> None:
    readme = plugin_files("acme-bits", "inference_task")["README.md"]
    assert readme.startswith(
        "# acme-bits\n\nCounts the improbable tokens of each sample. A plugin of d9d: it declares the inference task "
        "`acme_bits`.\n"
    )
    assert (
        "    d9d plugins conform acme-bits\n    d9d plugins show acme_bits\n    d9d train job.yaml\n"
        "    d9d infer infer.yaml\n\nIn a job file:\n\n```yaml\ntask: {name: acme_bits, below: 0.01}\n```\n"
    ) in readme
    readme = plugin_files("acme-bits", "command")["README.md"]
    assert "    d9d acme_bits runs/acme_bits\n\nPrints the last logged values of a run.\n" in readme


def test_jobs_of_a_package_replace_sections_of_the_common_job() -> None:
    made = plugin_files("acme-bits", "writer")
    assert made["infer.yaml"] == (
        "# Runs over the model that job.yaml trains: d9d infer infer.yaml\n"
        "run: {name: acme_bits_rows}\n"
        'model: {name: qwen3, pretrained: "runs/acme_bits/model"}\n'
        "task: perplexity\n"
        'data: {name: text, sources: ["python:topics"], sequence_length: 32}\n'
        "limit: 8\n"
        "writer: acme_bits\n"
    )
    assert plugin_files("acme-bits", "model")["job.yaml"] == (
        "# Trains in seconds on a CPU: d9d train job.yaml\n"
        "run: {name: acme_bits}\n"
        "model: {name: acme_bits, vocab_size: 257}\n"
        "task: causal_lm\n"
        'data: {name: text, sources: ["python:topics"], sequence_length: 32}\n'
        "optimizer: {name: adamw, lr: 0.01}\n"
        "steps: 20\n"
        "batch: {size: 8, microbatch: 4}\n"
        "logging: {every: 5}\n"
        "export: false\n"
    )


def test_names_of_one_letter_or_with_an_end_are_refused_and_advice_is_given() -> None:
    for name in ("a", "acme-", "-acme", "ac me"):
        with pytest.raises(PluginError, match=f"'{name}' is not a package name"):
            plugin_files(name, "metric")
    assert "src/ab/plugin.py" in plugin_files("AB", "metric")
    with pytest.raises(PluginError) as caught:
        plugin_files("adamw", "optimizer")
    assert str(caught.value) == (
        "'adamw': the optimizer of that name comes from d9d-optim; use another, such as acme-adamw"
    )
    assert "src/adamw/plugin.py" in plugin_files("adamw", "metric")  # a metric of that name is new
    with pytest.raises(PluginError) as caught:
        plugin_files("acme", "gizmo")
    assert str(caught.value) == f"--kind gizmo: there is no template of this kind; kinds: {', '.join(KINDS)}"


def test_the_command_lists_the_files_and_quotes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_plugin("acme-bits", "view", tmp_path / "new")
    made = sorted(plugin_files("acme-bits", "view"))
    assert capsys.readouterr().out.splitlines() == [
        *(f"  {tmp_path / 'new' / path}" for path in made), "", "next:", f"  cd {tmp_path / 'new'}",
        '  pip install -e ".[test]"', "  pytest", "  d9d plugins conform acme-bits",
        "fill in before a release: the addresses in pyproject.toml, and the name in LICENSE",
    ]  # fmt: skip
    assert (app._add_completion, app.pretty_exceptions_enable) == (False, False)
