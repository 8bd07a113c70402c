"""The policy of the plugin API holds: no name breaks, no deprecation outlives its end, no release breaks a pin."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from d9d_core.registry import hooks
from d9d_testing.scaffold.kinds import KINDS
from d9d_testing.scaffold.package import plugin_files
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
#: They import each other's private modules, so an installer must update them together; d9d-all is their sum.
TOGETHER = {
    "d9d-all", "d9d-core", "d9d-engine", "d9d-inference", "d9d-launch", "d9d-planner", "d9d-reports", "d9d-testing",
    "d9d-verify", "d9d-weights",
}  # fmt: skip
VERSION = Version(tomllib.loads((ROOT / "packages/d9d-core/pyproject.toml").read_text())["project"]["version"])


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("api_changes")


@pytest.fixture
def surface(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("public_surface")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("function(a, b=)", "function(a, b=, c=)"),
        ("function(a, b=)", "function(a=, b=, *, d=)"),
        ("function(a, *, b)", "function(a, *, c=, b=)"),
        ("class(a); x", "class(a, *, b=); run(self); x"),
        ("class(a, *, name=); run(self, x); x", "class(a, *, name=); run(self, x, y=); x"),
        ("config(*, a, b=)", "config(*, a=, aa=, b=)"),
        ("protocol; apply(self, stage)", "protocol; apply(self, stage)"),
        ("value", "value"),
    ],
)
def test_additions_break_no_plugin(old: str, new: str, changes: ModuleType) -> None:
    assert list(changes.incompatible({"m": {"Name": old}}, {"m": {"Name": new, "More": "value"}, "n": {}})) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("function(a)", None, "is gone"),
        ("function(a)", "class(a)", "was a function and is a class"),
        ("function(a, b)", "function(b, a)", "does not take a as parameter 1 any more"),
        ("function(a, b)", "function(a, *, b)", "does not take b as parameter 2 any more"),
        ("function(a, *, b=)", "function(a)", "does not take b any more"),
        ("function(a, **rest)", "function(a)", "does not take **rest any more"),
        ("function(a=)", "function(a)", "requires a"),
        ("function(a)", "function(a, b)", "requires the new b"),
        ("class(*, name, x=)", "class(*, name, x=, y)", "requires the new y"),
        ("config(*, a=)", "config(*, a)", "requires a"),
        ("class(a); run(self, x); x", "class(a); x", "has no run any more"),
        ("class; run(self, x)", "class; run(self, y=)", "does not take x any more, in run"),
        ("protocol; apply(self, stage)", "protocol; apply(self, stage, more=)", "has apply with other parameters"),
        ("protocol; apply(self, stage)", "protocol; apply(self, stage); cost(self)", "requires the new member cost"),
        ("protocol; blocks", "protocol", "has no blocks any more"),
    ],
)
def test_each_change_that_breaks_a_plugin_is_recognised(
    old: str, new: str | None, problem: str, changes: ModuleType
) -> None:
    after = {"m": {"Name": new}} if new else {"m": {}}
    found = list(changes.incompatible({"m": {"Name": old}}, after))
    assert found
    assert found[0].startswith(f"m.Name {problem}")


def test_a_protocol_that_only_d9d_implements_may_have_new_members(changes: ModuleType) -> None:
    before, after = "protocol; sizes", "protocol; mesh(self); sizes"
    assert list(changes.incompatible({"m": {"Topology": before}}, {"m": {"Topology": after}})) == []


def test_shapes_show_parameters_fields_and_members(changes: ModuleType) -> None:
    from d9d_core.grid import Grid
    from d9d_core.plugin import ViewDim
    from d9d_core.task import Task
    from d9d_optim.optimizer.config import LionConfig

    assert changes.shape(ViewDim) == "class(name, axes, over=); axes; name; over"
    assert "; losses(self, outputs, microbatch); " in changes.shape(Task)
    assert changes.shape(LionConfig).startswith("config(*, betas=, groups=, lr=, name=")
    assert changes.shape(Grid.__init__).startswith("function(self, ")
    assert changes.shape(3) == "value"


@pytest.mark.parametrize(
    ("apis", "gone", "changed"),
    [([2, 2], True, True), ([2, 3], True, False), ([3, 3], False, False)],
    ids=["the same API", "a newer API", "the old API ended"],
)
def test_names_are_gone_only_with_the_oldest_api(
    apis: list[int], gone: bool, changed: bool, surface: ModuleType
) -> None:
    names = {"m": {"Old": "value", "call": "function(a)"}}
    before = {"plugin APIs": [2, 2], "hooks": {"d9d_olds": "OldSpec"}, "traits": {}, "names": names}
    after = {"plugin APIs": apis, "hooks": {}, "traits": {}, "names": {"m": {"call": "function(a, b)"}}}
    names_gone = ["hook d9d_olds was OldSpec and is gone", "m.Old is gone"]
    assert surface.breaking(before, after) == names_gone * gone + ["m.call requires the new b"] * changed


@pytest.mark.parametrize(
    ("release", "ends", "last_api", "found"),
    [
        ("0.2", "0.4", 2, []),
        ("0.2", "0.3", 2, ["m.Old ends in release 0.3; the earliest is 0.4"]),
        ("0.9", "0.10", 2, ["m.Old ends in release 0.10; the earliest is 0.11"]),
        ("1.3", "1.9", 2, ["m.Old ends in release 1.9; the earliest is 2.0"]),
        ("1.3", "2.0", 2, []),
        ("0.2", "0.4", 3, ["m.Old is deprecated after API 3, but there is no API 4"]),
    ],
)
def test_a_deprecation_ends_late_enough_and_with_its_api(
    release: str, ends: str, last_api: int, found: list[str], changes: ModuleType
) -> None:
    now = {"m": {"Old": {"ends": ends, "last_api": last_api}}}
    assert list(changes.unfit({}, now, release, 3)) == found


def test_a_recorded_deprecation_is_not_compared_with_later_releases(changes: ModuleType) -> None:
    recorded = {"m": {"Old": {"ends": "0.4", "last_api": 2}}}
    assert list(changes.unfit(recorded, recorded, "0.3", 3)) == []


def test_the_advice_says_keep_deprecate_or_raise(surface: ModuleType) -> None:
    assert re.search(r"Keep .* deprecated .* raise the API .*docs/api-policy.md", surface.BROKEN)


def test_breaking_changes_are_free_only_before_the_first_release(surface: ModuleType) -> None:
    assert surface.is_unreleased("# Changelog\n\n## 0.1.0 (not released yet)\n", "0.1")
    assert not surface.is_unreleased("# Changelog\n\n## 0.2.0 (not released yet)\n\n## 0.1.0\n", "0.1")


def expired(source: str, version: Version) -> Iterator[str]:
    """Deprecations of a source that end with a version at the latest, and deprecations whose end cannot be read."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and re.search(r"\b[Dd]eprecated$", ast.unparse(node.func)):
            ends = [keyword.value for keyword in node.keywords if keyword.arg == "ends"]
            if not ends or not isinstance(ends[0], ast.Constant) or Version(str(ends[0].value)) <= version:
                yield f"line {node.lineno}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('@deprecated(use="x", ends="0.4")\ndef f(): ...', []),
        ('@deprecated(use="x", ends="0.3")\ndef f(): ...', ["line 1"]),
        ('{"A": Deprecated("a:b", ends="1.0"),\n "B": d9d_core.deprecation.Deprecated("a:b", ends="0.2")}', ["line 2"]),
        ('@deprecated(use="x", ends=END)\ndef f(): ...', ["line 1"]),
    ],
)  # fmt: skip
def test_an_expired_deprecation_is_recognised(source: str, found: list[str]) -> None:
    assert list(expired(source, Version("0.3.1"))) == found


@pytest.mark.parametrize(
    ("heading", "release"), [("0.2.0 (not released yet)", "0.2"), ("0.1.1 (not released yet)", "0.1"), ("0.1.0", "0.2")]
)
def test_the_release_of_a_change_is_the_next_one(heading: str, release: str, surface: ModuleType) -> None:
    assert surface.upcoming(f"# Changelog\n\n## {heading}\n\n## 0.0.1\n", "0.1.0") == release


@pytest.fixture
def upcoming(surface: ModuleType) -> Version:
    return Version(surface.next_release())


def test_no_deprecation_stays_past_its_end(upcoming: Version) -> None:
    """Delete the old code in the release of ``ends``, and its last API in ``API_RELEASES``."""
    found = {}
    for path in [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]:
        text = path.read_text("utf-8")
        if "ends=" in text and path.name != "deprecation.py":
            found[str(path.relative_to(ROOT))] = list(expired(text, upcoming))
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_supported_apis_have_no_gap_and_their_releases_rise(upcoming: Version) -> None:
    numbers, releases = list(hooks.API_RELEASES), [Version(each) for each in hooks.API_RELEASES.values()]
    assert numbers == list(range(hooks.OLDEST_API, hooks.NEWEST_API + 1))
    assert releases == sorted(releases)
    assert releases[-1] <= upcoming


def test_the_policy_names_the_range_of_this_release() -> None:
    text = f"The range of this release: {hooks.OLDEST_API} to {hooks.NEWEST_API}."
    assert text in " ".join((ROOT / "docs/api-policy.md").read_text("utf-8").split())


def requirements(project: str) -> list[Requirement]:
    """Requirements for packages of d9d in a pyproject.toml, of its extras too, that limit versions."""
    table = tomllib.loads(project)["project"]
    lists = [table["dependencies"], *table.get("optional-dependencies", {}).values()]
    found = [Requirement(text) for texts in lists for text in texts if text.startswith("d9d-")]
    return [requirement for requirement in found if requirement.specifier]


def projects() -> dict[str, str]:
    """Name -> pyproject.toml of the members, of the example, of the frozen plugins and of a scaffold of each kind."""
    homes = ("packages", "plugins", "examples", "tests/frozen_plugins")
    files = [path for home in homes for path in ROOT.glob(f"{home}/*/pyproject.toml")]
    made = {f"scaffold of a {kind}": plugin_files(f"acme-{kind}", kind)["pyproject.toml"] for kind in KINDS}
    return made | {path.parent.name: path.read_text("utf-8") for path in files}


def later_releases() -> list[str]:
    major, minor = VERSION.major, VERSION.minor
    return [f"{major}.{minor + 1}.0", f"{major}.{minor + 9}.3", f"{major + 1}.0.0"]


def test_a_later_release_of_d9d_breaks_no_requirement_of_a_plugin() -> None:
    broken = {
        f"{name}: {requirement}"
        for name, project in projects().items()
        if name not in TOGETHER
        for requirement in requirements(project)
        if not all(requirement.specifier.contains(version) for version in [str(VERSION), *later_releases()])
    }
    assert broken == set()
    assert len(projects()) > len(TOGETHER) + len(KINDS) + 2


def test_the_packages_of_a_release_require_no_earlier_one() -> None:
    earlier = f"{VERSION.major}.{VERSION.minor - 1}.99" if VERSION.minor else f"{VERSION.major - 1}.99"
    members = {path.parent.name for house in ("packages", "plugins") for path in ROOT.glob(f"{house}/*/pyproject.toml")}
    late = {
        f"{name}: {requirement}"
        for name, project in projects().items()
        if name in members
        for requirement in requirements(project)
        if requirement.specifier.contains(earlier)
    }
    assert late == set()


def test_packages_that_share_private_modules_are_installed_in_one_minor_version() -> None:
    loose = {
        f"{name}: {requirement}"
        for name, project in projects().items()
        if name in TOGETHER
        for requirement in requirements(project)
        if not requirement.specifier.contains(f"{VERSION.major}.{VERSION.minor}.99")
        or any(requirement.specifier.contains(version) for version in later_releases())
    }
    assert loose == set()
