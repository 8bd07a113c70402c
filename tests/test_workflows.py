"""Workflows of the public forge follow its schema, are secure for a linter, and publish without secrets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[1] / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
BIN = Path(sys.executable).parent


def lint(*command: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [str(BIN / str(command[0])), *map(str, command[1:])], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def schema(*files: Path) -> tuple[int, str]:
    return lint("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *files)


def security(*files: Path) -> tuple[int, str]:
    return lint("zizmor", "--offline", "--no-config", *files)


def test_the_workflows_follow_the_schema_of_the_forge() -> None:
    assert [file.name for file in FILES] == ["ci.yml", "release.yml"]
    assert schema(*FILES)[0] == 0, schema(*FILES)[1]


def test_a_workflow_that_does_not_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "ci.yml").write_text((FOLDER / "ci.yml").read_text().replace("runs-on:", "run-on:"))
    status, said = schema(tmp_path / "ci.yml")
    assert status == 1
    assert "jobs.checks" in said


def test_the_workflows_have_no_finding_of_the_security_linter() -> None:
    status, said = security(*FILES)
    assert status == 0, said


@pytest.mark.parametrize(
    ("good", "bad", "finding"),
    [
        ('"$PYTHON"', "${{ github.head_ref }}", "template-injection"),
        ("@11bd71901bbe5b1630ceea73d27597364c9af683", "@v4", "unpinned-uses"),
        ("enable-cache: false", "enable-cache: true", "cache-poisoning"),
    ],
)
def test_an_insecure_workflow_is_recognised(tmp_path: Path, good: str, bad: str, finding: str) -> None:
    text = (FOLDER / "release.yml").read_text()
    assert good in text
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    (folder / "release.yml").write_text(text.replace(good, bad))
    status, said = security(folder / "release.yml")
    assert status != 0
    assert finding in said


def test_only_a_tried_release_is_published_and_without_secrets() -> None:
    text = (FOLDER / "release.yml").read_text()
    workflow: dict[Any, Any] = yaml.safe_load(text)
    jobs = workflow["jobs"]
    assert "secrets." not in text
    assert "password" not in text
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    assert jobs["publish"]["needs"] == ["build", "try"]
    assert jobs["try"]["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["publish"]
    assert [name for name, job in jobs.items() if "write" in job["permissions"].get("contents", "")] == ["attach"]


def test_the_continuous_integration_runs_the_script_of_this_repository() -> None:
    workflow = yaml.safe_load((FOLDER / "ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["checks"]["steps"] if "run" in step] == ["bash .ci/run"]
