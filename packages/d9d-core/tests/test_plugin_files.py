from __future__ import annotations

import hashlib
import os
import py_compile
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import PluginError
from d9d_core.plugin import Ref
from d9d_core.registry import single_file
from d9d_core.registry.loader import discover
from d9d_core.registry.manifest import Manifest
from d9d_core.registry.policy import PluginPolicy


def test_a_single_file_is_a_plugin_and_its_content_is_in_the_manifest(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from d9d_core.plugin import *\n"
        "class Config: pass\n"
        "@hookimpl\n"
        "def d9d_tasks():\n"
        "    ref = Ref(f'{__name__}:Config')\n"
        "    yield TaskSpec(name='mine', summary='x', config=ref, build=ref)\n"
    )
    policy = PluginPolicy(autoload=False, files=(file,))
    registry = discover(policy)
    entry = registry.find("task", "mine")
    assert entry.spec.config.load().__name__ == "Config"  # type: ignore[union-attr]
    first = Manifest.of(registry)
    file.write_text(file.read_text() + "# changed\n")
    second = Manifest.of(discover(policy))
    assert first.digest != second.digest
    (line,) = first.differences(second, "rank 0 (node-a)", "rank 12 (node-b)")
    assert line.startswith("mine.py: rank 0 (node-a) sha256 ")


def test_a_single_file_runs_as_it_was_hashed(tmp_path: Path) -> None:
    """Whatever bytecode of an earlier version is cached, for a source of the same size and time of change."""
    file = tmp_path / "mine.py"
    policy = PluginPolicy(autoload=False, files=(file,))
    for summary in ("one", "two"):
        file.write_text(FILE.replace("NAME", "mine").replace('summary="x"', f'summary="{summary}"'))
        os.utime(file, (1, 1))
        if summary == "one":
            py_compile.compile(str(file))
        assert discover(policy).find("task", "mine").spec.summary == summary  # type: ignore[union-attr]


def test_a_single_file_of_an_older_api_says_what_to_write(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("D9D_API = 1\n" + FILE.replace("NAME", "mine"))
    with pytest.raises(PluginError, match=r"offers API 2; correct its imports and write D9D_API = 2"):
        discover(PluginPolicy(autoload=False, files=(file,)))


def test_a_single_file_that_fails_is_an_error_with_its_cause(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import a_module_that_is_not_there")
    with pytest.raises(PluginError, match=r"mine.py failed to import") as caught:
        discover(PluginPolicy(autoload=False, files=(file,)))
    assert isinstance(caught.value.origin, ModuleNotFoundError)


def test_an_absent_plugin_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"plugin file .*nope.py: No such file or directory; give the path"):
        discover(PluginPolicy(files=(tmp_path / "nope.py",)))


def test_manifests_name_both_versions() -> None:
    a = Manifest({"moe": {"version": "0.1.0", "editable": False, "sha256": ""}})
    b = Manifest({"moe": {"version": "0.1.1", "editable": False, "sha256": ""}})
    assert a.differences(b, "rank 0", "rank 1") == ["moe: rank 0 0.1.0, rank 1 0.1.1"]
    assert a.differences(Manifest({}), "checkpoint", "now") == ["moe: checkpoint 0.1.0, now not loaded"]
    assert a.differences(a, "x", "y") == []


def test_the_digest_of_a_manifest_is_that_of_its_sorted_json() -> None:
    facts = {"version": "0.1.0", "editable": False, "sha256": ""}
    text = (
        '{"a": {"editable": false, "sha256": "", "version": "0.1.0"}, '
        '"b": {"editable": false, "sha256": "", "version": "0.1.0"}}'
    )
    assert Manifest({"b": facts, "a": facts}).digest == hashlib.sha256(text.encode()).hexdigest()


FILE = """
from d9d_core.plugin import *
class Config: pass
@hookimpl
def d9d_tasks():
    ref = Ref(f"{__name__}:Config")
    yield TaskSpec(name="NAME", summary="x", config=ref, build=ref)
"""


def file_plugin(path: Path, name: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(FILE.replace("NAME", name))
    return path


def test_a_files_name_may_be_no_python_name(tmp_path: Path) -> None:
    files = (file_plugin(tmp_path / "my-own plugin.py", "mine"), file_plugin(tmp_path / "1.py", "one"))
    registry = discover(PluginPolicy(autoload=False, files=files))
    for name in ("mine", "one"):
        config = registry.find("task", name).spec.config  # type: ignore[union-attr]
        assert isinstance(config, Ref)
        assert config.load().__name__ == "Config"


def test_files_of_one_name_are_told_apart_in_the_manifest(tmp_path: Path) -> None:
    files = tuple(file_plugin(tmp_path / name / "mine.py", name) for name in ("a", "b"))
    manifest = Manifest.of(discover(PluginPolicy(autoload=False, files=files)))
    keys = [name for name in manifest.plugins if name.startswith("mine.py")]
    assert keys == [f"mine.py@{manifest.plugins[name]['sha256'][:8]}" for name in keys]
    assert len(keys) == 2
    moved = tuple(file_plugin(tmp_path / f"moved_{name}" / "mine.py", name) for name in ("b", "a"))
    assert Manifest.of(discover(PluginPolicy(autoload=False, files=moved))) == manifest


def test_a_reference_names_a_single_file_unless_a_module_has_its_name_or_two_versions_are_loaded(
    tmp_path: Path,
) -> None:
    own, like_installed = tmp_path / "own_parts.py", tmp_path / "json.py"
    for file in (own, like_installed):
        file.write_text(FILE.replace("NAME", file.stem) + "def loads(): return 'mine'\n")
    with pytest.raises(ModuleNotFoundError, match="own_parts"):
        Ref("own_parts:loads").load()
    discover(PluginPolicy(autoload=False, files=(own, like_installed)))
    assert Ref("own_parts:loads").load()() == "mine"
    assert Ref("json:loads").load()("[1]") == [1]
    with pytest.raises(AttributeError, match="absent"):
        Ref("own_parts:absent").load()
    own.write_text(own.read_text() + "# changed\n")
    discover(PluginPolicy(autoload=False, files=(own,)))
    with pytest.raises(ModuleNotFoundError, match="own_parts"):
        Ref("own_parts:loads").load()


def test_code_of_a_single_file_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f():\n    pass\n")
    origin, load = single_file.file_plugin(path)
    module: Any = load()
    assert (module.f.__code__.co_filename, module.__file__) == (str(path), str(path))
    assert module.__name__ == origin.module
    assert load() is module
