"""Each README says which distributions its package brings, as the package declares them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("weigh", ROOT / "tools" / "weigh.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


weigh = loaded()


@pytest.mark.parametrize("name", weigh.members())
@pytest.mark.full
def test_a_readme_lists_what_its_package_brings(name: str) -> None:
    member = weigh.members()[name]
    declared = [weigh.brought(name, extra) for extra in ("", *weigh.extras(member))]
    assert weigh.lists((member / "README.md").read_text("utf-8")) == declared, "run: uv run python tools/weigh.py"


@pytest.mark.thorough
def test_core_brings_little_and_no_member_a_library_for_plots() -> None:
    assert len(weigh.brought("d9d-core")) < 20
    assert "torch" not in weigh.required("d9d-core")
    assert [name for name in weigh.members() if "matplotlib" in weigh.required(name)] == []


def test_marks_are_filled_again_and_nothing_around_them_changes(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# d9d-one\n")
    sizes = {"one": 3 * weigh.MIB, "two": 10}
    for names in ({"one", "two"}, {"two"}, set[str]()):
        weigh.write(readme, weigh.line(names, sizes, "Beside torch"))
        text = readme.read_text()
        assert weigh.lists(text) == [sorted(names)]
        assert text.startswith("# d9d-one\n\n## Weight\n\n")
        assert text.count(weigh.MARKS[0]) == text.count(weigh.MARKS[1]) == 1
    assert "2 distributions, 3 MiB (one, two)." in weigh.line({"one", "two"}, sizes, "x")
