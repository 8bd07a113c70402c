from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from d9d_core.errors import BuildError, JobError
from d9d_core.job_file.document import Document


def read(tmp_path: Path, text: str, *overrides: str, suffix: str = ".yaml") -> Document:
    path = tmp_path / f"job{suffix}"
    path.write_text(text)
    return Document.read(path).override(overrides)


def complaint(tmp_path: Path, text: str, suffix: str = ".yaml") -> str:
    with pytest.raises(JobError) as caught:
        read(tmp_path, text, suffix=suffix)
    return str(caught.value).replace(f"{tmp_path}/", "")


BOMB = "a: &a [1]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefgh"))


MERGES = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b}\n  <<: [{', '.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefgh")
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
            "job files may hold plain values only",
        ),
        (
            "run: !thing {a: 1}\n",
            "job.yaml:1: the tag !thing would build an object; job files may hold plain values only",
        ),
    ],
)
def test_a_malformed_file_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    assert complaint(tmp_path, text) == message


def test_a_malformed_toml_or_json_is_an_error(tmp_path: Path) -> None:
    assert complaint(tmp_path, "a = ", suffix=".toml").startswith("job.toml: ")
    assert complaint(tmp_path, "{\n", suffix=".json").startswith("job.json:2: ")
    assert (
        complaint(tmp_path, "", suffix=".ini")
        == "job.ini: the suffix of a job file must be one of .yaml, .yml, .toml, .json"
    )


def test_an_absent_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"nope.yaml: no such job file"):
        Document.read(tmp_path / "nope.yaml")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nsteps: !!int abc\n", "job.yaml:2: YAML reads 'abc' as the type int, "),
        ("\nsteps: !!int ''\n", "job.yaml:2: YAML reads '' as the type int, "),
        ("\nsteps: !!bool maybe\n", "job.yaml:2: YAML reads 'maybe' as the type bool, "),
        ("steps: " + "1" * 5000, "job.yaml:1: YAML reads '1111"),
        ("\nrun: !!timestamp abc\n", "job.yaml:2: the tag tag:yaml.org,2002:timestamp would build an object"),
        ("run: !!binary aGVsbG8=\n", "job.yaml:1: the tag tag:yaml.org,2002:binary would build an object"),
        ("\nkernels: &a {x: *a}\n", "job.yaml:2: an alias (*name) refers to a mapping or list that contains the alias"),
        ("kernels: &a {<<: *a}\n", "job.yaml:1: an alias (*name) refers to a mapping or list that contains the alias"),
        ("run: {<<: 3}\n", "job.yaml:1: '<<' takes a mapping, or a list of mappings"),
        ("a:\n  " + "[" * 3000 + "]" * 3000, "job.yaml:2: nested more than 100 levels deep"),
        ("a: " + "[" * 110 + "]" * 110, "job.yaml:1: nested more than 100 levels deep"),
        (BOMB, "job.yaml:1: more than 100,000 values, repetitions by aliases included"),
        (MERGES, "job.yaml:1: more than 100,000 values, repetitions by aliases included"),
        ("a: 1\n---\nb: 2\n", "job.yaml:2: expected a single document in the stream, but found another document"),
        ("a: *nothing\n", "job.yaml:1: found undefined alias 'nothing'"),
        ("a: 1\nb: \0\n", "job.yaml:2: the character U+0000 is not allowed"),
        ("\n1: x\n", "job.yaml:2: a key must be text, and 1 is a number; put it in quotes if it is meant as text"),
        ("on: x\n", "job.yaml:1: a key must be text, and on is not text; put it in quotes if it is meant as"),
        ("? [a]\n: x\n", "job.yaml:1: a key must be text, but this key is a list or a mapping"),
    ],
)
def test_a_malformed_value_is_an_error_at_its_line_and_not_expanded(tmp_path: Path, text: str, message: str) -> None:
    assert complaint(tmp_path, text).startswith(message)


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ('{"steps": 1, "steps": 2}', ".json", "job.json: 'steps' appears twice in one mapping"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", ".json", "job.json: nested more than 100 levels deep"),
        ('{"a": ' + "[" * 110 + "]" * 110 + "}", ".json", "job.json: nested more than 100 levels deep"),
        ('{"steps": ' + "1" * 5000 + "}", ".json", "job.json: "),
        ("a = " + "[" * 3000 + "]" * 3000, ".toml", "job.toml: nested more than 100 levels deep"),
        ("a = " + "[" * 110 + "]" * 110, ".toml", "job.toml: nested more than 100 levels deep"),
        ("a = " + "1" * 5000, ".toml", "job.toml: "),
    ],
)
def test_json_and_toml_have_the_same_limits(tmp_path: Path, text: str, suffix: str, message: str) -> None:
    assert complaint(tmp_path, text, suffix=suffix).startswith(message)


def test_as_many_levels_as_are_allowed_are_read(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text('{"a": ' + "[" * 99 + "1" + "]" * 99 + "}")
    assert "a" in Document.read(path).values


@pytest.mark.parametrize("word", ["1e5abc", "2024-01-01", "2024-13-45", "="])
def test_what_is_no_number_is_a_word_with_overrides_and_without(tmp_path: Path, word: str) -> None:
    assert read(tmp_path, f"run: {word}\n").values == {"run": word}
    assert read(tmp_path, f"run: {word}\n", "steps=3").values == {"run": word, "steps": 3}
    assert read(tmp_path, "steps: 3\n", f"run={word}").values == {"run": word, "steps": 3}


def test_merged_mappings_give_way_to_what_is_written_out(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: 1}\nb:\n  <<: [*a, {y: 2, z: 2}]\n  x: 3\n"
    document = read(tmp_path, text)
    assert document.values["b"] == {"x": 3, "y": 1, "z": 2}
    assert document.where(("b", "x")) == f"{tmp_path}/job.yaml:4"


def test_an_override_builds_and_appends_to_lists(tmp_path: Path) -> None:
    text = "metrics: [one]\n"
    document = read(tmp_path, text, "a[0]=x", "a[1].c=2", "metrics[1]=two", "metrics[0].c=3", "d.e[0].f=4")
    metrics = [{"name": "one", "c": 3}, "two"]
    assert document.values == {"a": ["x", {"c": 2}], "metrics": metrics, "d": {"e": [{"f": 4}]}}
    assert read(tmp_path, text).values == {"metrics": ["one"]}


def test_a_bare_word_becomes_a_name_only_where_it_names_a_plugin(tmp_path: Path) -> None:
    text = "data: {name: text, tokenizer: bytes}\noptimizer: adamw\nevaluation: {data: text}\n"
    document = read(tmp_path, text, "data.tokenizer.bpe=300", "optimizer.lr=1", "evaluation.data.split=held_out")
    assert document.values == {
        "data": {"name": "text", "tokenizer": {"bpe": 300}},
        "optimizer": {"name": "adamw", "lr": 1},
        "evaluation": {"data": {"name": "text", "split": "held_out"}},
    }


def test_what_an_override_replaced_is_found_on_the_command_line(tmp_path: Path) -> None:
    document = read(tmp_path, "optimizer: {name: adamw,\n  lr: 1}\n", "optimizer={name: adamw, lr: abc}")
    assert document.where(("optimizer", "lr")) == "--set optimizer"


def test_a_component_that_another_name_selects_is_found_on_the_command_line(tmp_path: Path) -> None:
    document = read(tmp_path, "optimizer:\n  name: adam\n  lr: 1.0\n", "optimizer.name=adamm")
    path = document.source
    assert document.where(("optimizer",)) == "--set optimizer.name"
    assert document.where(("optimizer", "lr")) == f"{path}:3"
    assert document.placed("optimizer: unknown optimizer 'adamm'") == "--set optimizer.name: unknown optimizer 'adamm'"
    assert document.placed("optimizer.lr: too large") == f"{path}:3: optimizer.lr: too large"


def test_a_value_that_only_overrides_have_is_found_on_the_command_line(tmp_path: Path) -> None:
    document = read(tmp_path, "optimizer: {name: adamw}\n", "optimizer.groups.match=x", "optimizer.lr=1")
    here = f"{tmp_path}/job.yaml:1"
    assert document.where(("optimizer", "groups")) == "--set optimizer.groups.match"
    assert document.where(("optimizer",)) == document.where(("optimizer", "eps")) == here
    assert document.where(("optimizer",), whole=True) == "--set optimizer.groups.match, --set optimizer.lr"


def test_an_error_of_a_later_check_gets_the_line_of_its_field(tmp_path: Path) -> None:
    document = read(tmp_path, "mesh:\n  tp: 3\ndata: {sources: [a]}\n", "model.vocab_size=5")
    here = f"{tmp_path}/job.yaml"
    cases = {
        "mesh.tp is 3, too many": f"{here}:2: mesh.tp is 3, too many",
        "data.sources[0]: a does not exist": f"{here}:3: data.sources[0]: a does not exist",
        "data: no samples": f"{here}:3: data: no samples",
        "model.vocab_size 5 is small": "--set model.vocab_size: model.vocab_size 5 is small",
        "mesh of two axes": "mesh of two axes",
        "optimizer: not in the file": "optimizer: not in the file",
        f"{here}:9: mesh.tp: placed already": f"{here}:9: mesh.tp: placed already",
    }
    assert {text: document.placed(text) for text in cases} == cases
    with pytest.raises(BuildError) as caught, document.placing():
        raise BuildError("\n".join(cases))
    assert str(caught.value) == "\n".join(cases.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1,\n  2\n\n", "job.yaml:2: expected ',' or ']', but got '<stream end>'"),
        (
            "a: 1\nb: [1,\n  2\nc: 3\nd: 4\n",
            "job.yaml:4: expected ',' or ']', but got ':' (while parsing a flow sequence of line 2)",
        ),
        ("a: 'x\nb: 1\n", "job.yaml:1: found unexpected end of stream"),
    ],
)
def test_an_unclosed_value_is_reported_where_it_begins(tmp_path: Path, text: str, message: str) -> None:
    assert complaint(tmp_path, text).startswith(message)


def test_a_directory_is_no_job_but_may_hold_one(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=f"^{tmp_path} is a directory; a job is a file: give a file in {tmp_path}$"):
        Document.read(tmp_path)
    (tmp_path / "job.yaml").write_text("steps: 3")
    with pytest.raises(JobError, match=r"is a directory; a job is a file: give .*/job.yaml of this run$"):
        Document.read(tmp_path)
