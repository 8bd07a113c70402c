"""Plugins of the supported APIs load, and `d9d plugins check` reports names of no API, of another API, or too new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import PluginError
from d9d_core.registry import hooks
from d9d_core.registry.api import Api, Use, imported_modules, references
from d9d_core.registry.api_check import api_findings
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry

Install = Callable[..., None]
COMMAND = """
@hookimpl
def d9d_commands(): yield CommandSpec(name="acme", summary="for a test", app=Ref("acme.code:app"))
"""


@pytest.fixture
def _apis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give d9d-core three APIs, as it may have after some releases."""
    monkeypatch.setattr(hooks, "API_RELEASES", {2: "0.1", 3: "0.3", 4: "0.5"})
    monkeypatch.setattr(hooks, "NEWEST_API", 4)


@pytest.mark.usefixtures("_apis")
@pytest.mark.parametrize("stated", [2, 3, 4])
def test_a_plugin_of_each_supported_api_loads(stated: int, install: Install) -> None:
    install("acme", "1.0", f"D9D_API = {stated}\n{COMMAND}")
    (origin,) = [each for each in discover().plugins if each.distribution == "acme"]
    assert origin.api == stated


@pytest.mark.usefixtures("_apis")
@pytest.mark.parametrize(
    ("stated", "text"),
    [
        ("1", "was written for plugin API 1, this d9d-core offers APIs 2 to 4; install a newer acme"),
        ("5", "was written for plugin API 5, this d9d-core offers APIs 2 to 4; install a newer d9d-core"),
        ("2.0", "states D9D_API = 2.0, not an integer; write D9D_API = 4"),
        ("'2'", "states D9D_API = '2', not an integer; write D9D_API = 4"),
        ("True", "states D9D_API = True, not an integer; write D9D_API = 4"),
        ("range(2, 4)", "states D9D_API = range(2, 4), not an integer; write D9D_API = 4"),
        ("None", "does not state its plugin API; write D9D_API = 4 in acme_plugin"),
    ],
)
def test_any_other_statement_is_refused(stated: str, text: str, install: Install) -> None:
    install("acme", "1.0", f"D9D_API = {stated}\n{COMMAND}")
    (problem,) = discover().problems
    assert str(problem) == f"acme 1.0 {text}"


def names_of_three_releases() -> Api:
    deprecated = {"target": "d9d_core.task:Task", "ends": "0.5", "last_api": 2}
    return Api.from_json(
        {
            "packages": ["d9d_core", "d9d_nn"],
            "foundation": ["d9d_core"],
            "outer": [],
            "for_suites": ["d9d_core.failures"],
            "names": {
                "d9d_core.plugin": {"0.1": ["Ref", "hookimpl"]},
                "d9d_core.task": {"0.1": ["Task"], "0.3": ["NewTask"]},
                "d9d_core.failures": {"0.1": ["describe"]},
                "d9d_nn.linear": {"0.1": ["Linear"], "0.4": ["Folded"]},
            },
            "deprecated": {"d9d_core.task": {"OldTask": deprecated}},
        }
    )


@pytest.fixture
def check(site: Path, install: Install) -> Callable[..., list[str]]:
    """Findings about a plugin with the given code, API and requirements."""

    def put(code: str, stated: int = 2, requires: str = "d9d-core>=0.1") -> list[str]:
        package = site / "acme"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "code.py").write_text(code)
        install("acme", "1.0", f"D9D_API = {stated}\n{COMMAND}", module="acme_plugin")
        metadata = next(site.glob("acme-*/METADATA"))
        metadata.write_text(metadata.read_text() + "".join(f"Requires-Dist: {each}\n" for each in requires.split(", ")))
        registry = discover(PluginPolicy(allow=frozenset({"acme"})))
        assert registry.find("command", "acme")
        return [found.text for found in api_findings(registry, {"acme"}, names_of_three_releases())]

    return put


def test_names_of_the_api_are_no_findings(check: Callable[..., list[str]]) -> None:
    code = (
        "import d9d_core.task\nfrom d9d_core import task\nfrom d9d_core.task import Task, NewTask\nimport torch, acme\n"
        "from acme.code import anything\nfrom d9d_nn.linear import Folded\nfrom . import x\nX = 'd9d_core.task:Task'\n"
    )
    assert check(code, requires="d9d-core>=0.3.1, d9d-nn~=0.4") == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "\nfrom d9d_core.step import Secret",
            "acme/code.py:2 uses d9d_core.step.Secret, which is in no plugin API and may change in any release; "
            "use a name in __all__ of a public module",
        ),
        (
            "def f():\n    from d9d_core.model import Linear",
            "acme/code.py:2 uses d9d_core.model.Linear, which is in no plugin API and may change in any release; "
            "use d9d_nn.linear.Linear",
        ),
        ("import d9d_core.step", "acme/code.py:1 uses d9d_core.step, which is in no plugin API and may change"),
        ("from d9d_core import step", "acme/code.py:1 uses d9d_core.step, which is in no plugin API and may change"),
        ("from d9d_core.failures import describe", "acme/code.py:1 uses d9d_core.failures.describe, which is in no"),
        ("x = 1\nX = \"d9d_core.task:Secret\"", "acme/code.py:2 uses d9d_core.task.Secret, which is in no plugin API"),
        (
            "from d9d_core.task import NewTask",
            "acme/code.py:1 uses d9d_core.task.NewTask, which d9d-core has since 0.3, but the plugin requires "
            "d9d-core>=0.1; require d9d-core>=0.3",
        ),
    ],
)  # fmt: skip
def test_private_and_newer_names_are_told_with_their_places(
    code: str, text: str, check: Callable[..., list[str]]
) -> None:
    (found,) = check(code)
    assert found.startswith(text)


@pytest.mark.usefixtures("_apis")
def test_a_stated_api_that_is_newer_than_the_required_core_is_told(check: Callable[..., list[str]]) -> None:
    assert check("", stated=3, requires="d9d-core>=0.1") == [
        "states D9D_API = 3, which d9d-core has since 0.3, but requires d9d-core>=0.1; "
        "require d9d-core>=0.3, or state an older API"
    ]


@pytest.mark.usefixtures("_apis")
def test_an_old_name_is_told_to_a_plugin_that_states_an_api_without_it(check: Callable[..., list[str]]) -> None:
    assert check("from d9d_core.task import OldTask", stated=3, requires="d9d-core>=0.3") == [
        "acme/code.py:1 uses d9d_core.task.OldTask, which is not in plugin API 3; "
        "use d9d_core.task.Task, or write D9D_API = 2 in acme_plugin"
    ]


@pytest.mark.parametrize("requires", ["d9d-core>=0.3", "d9d-core>0.2.9,!=0.2.9999", "d9d_core[torch]~=0.4", "torch"])
def test_a_requirement_without_older_releases_is_no_finding(requires: str, check: Callable[..., list[str]]) -> None:
    assert check("from d9d_core.task import NewTask", requires=requires) == []


def test_a_file_that_python_cannot_read_is_left_out(check: Callable[..., list[str]], site: Path) -> None:
    (site / "acme_templates").mkdir()
    assert check("from d9d_core.step import ${name}") == []


def test_strict_plugins_refuse_private_names(
    site: Path, install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Api, "shipped", names_of_three_releases)
    file = tmp_path / "mine.py"
    file.write_text("import d9d_core.registry.manifest\n")
    policy = PluginPolicy(files=(file,), autoload=False)
    assert [origin.module for origin in discover(policy).plugins if origin.digest]
    with pytest.raises(
        PluginError, match=r"--strict-plugins: .*mine.py: mine.py:1 uses d9d_core.registry.manifest, which"
    ):
        discover(policy | PluginPolicy(strict=True))


def test_the_foundation_may_import_itself() -> None:
    assert list(api_findings(Registry.of(), api=names_of_three_releases())) == []


def test_uses_have_the_lines_of_a_source() -> None:
    source = "import torch\nfrom d9d_core.task import (\n    Task,\n)\nX = 'x'; Y = \"d9d_nn.linear:Linear\"\n"
    expected: list[Any] = [Use("torch", "", 1), Use("d9d_core.task", "Task", 2), Use("d9d_nn.linear", "Linear", 5)]
    assert [*imported_modules(source), *references(source)] == expected


def test_the_shipped_api_has_the_names_of_the_five_contracts() -> None:
    names = Api.shipped().names
    for module, name in (
        ("task", "Task"),
        ("data", "DataStream"),
        ("strategy", "Strategy"),
        ("subscriber", "Subscriber"),
    ):
        assert names[f"d9d_core.{module}"][name] == "0.1"


def test_only_names_of_declared_modules_may_be_imported() -> None:
    known = Api(
        packages=frozenset({"d9d_a", "d9d_b"}), foundation=frozenset({"d9d_a"}), outer=frozenset({"d9d_tool"}),
        for_suites=frozenset({"d9d_a.suite"}),
        names={"d9d_a.open": {"x": "0.1"}, "d9d_a.suite": {"y": "0.1"}}, deprecated={},
    )  # fmt: skip
    uses = [
        Use(*use) for use in (
            ("d9d_a.open", "x"), ("d9d_a.open", "z"), ("d9d_a.open", ""), ("d9d_a.open", "*"), ("d9d_a.secret", "*"),
            ("d9d_a.secret", ""), ("d9d_a.suite", "y"), ("d9d_a", "open"), ("d9d_b.any", "x"), ("torch", "nn"),
        )
    ]  # fmt: skip
    refused = ["z of d9d_a.open", "* of d9d_a.secret", "all of d9d_a.secret", "y of d9d_a.suite", "x of d9d_b.any"]
    assert [str(use) for use in known.undeclared(uses)] == refused
    for_suites = [str(use) for use in known.undeclared(uses, suites=True)]
    assert for_suites == [text for text in refused if "suite" not in text]
    assert [str(use) for use in known.undeclared(uses, {"d9d_a"})] == ["x of d9d_b.any"]
    assert known.exempt("d9d_c") == {"d9d_c"}
    assert known.exempt("d9d_a") == {"d9d_a"}
    assert known.exempt("d9d_tool") == {"d9d_a", "d9d_tool"}
