"""Names that a scaffolded plugin cannot have, and directories that it cannot be written to, are refused with advice."""

from __future__ import annotations

from pathlib import Path

import pytest
from d9d_core.errors import PluginError
from d9d_testing.scaffold.command import new_plugin
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
