"""Old names work, warn once for each plugin, and are listed or refused on request."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from d9d_core.cli.plugins import check_plugins
from d9d_core.deprecation import Deprecated, DeprecatedNames, DeprecatedNameWarning, deprecated
from d9d_core.errors import PluginError
from d9d_core.registry import api_check, hooks
from d9d_core.registry.api import Api
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy

Install = Callable[..., None]

#: A module of d9d as it would be after ``Old`` was renamed to ``New``.
CONTRACTS = """
from d9d_core.deprecation import Deprecated, DeprecatedNames, deprecated
class New: ...
@deprecated(use="contracts.new", ends="9.9")
def old(value, *, twice=False): return value * (2 if twice else 1)
__getattr__ = DeprecatedNames(__name__, {"Old": Deprecated("contracts:New", ends="9.9", last_api=2)})
"""
#: A plugin whose config comes from a module that uses the old name.
PLUGIN = """
@hookimpl
def d9d_commands(): yield CommandSpec(name="acme", summary="for a test", app=Ref("acme_code:app"))
"""
CODE = "import contracts\nfrom contracts import Old\nOld = Old\napp = contracts.Old\n"
TEXT = "uses contracts.Old, which ends in release 9.9 of d9d; use contracts.New"


@pytest.fixture
def contracts(site: Path, install: Install) -> ModuleType:
    (site / "contracts.py").write_text(CONTRACTS)
    return importlib.import_module("contracts")


def own_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught if isinstance(warning.message, DeprecatedNameWarning)]


def use(site: Path, name: str, code: str) -> ModuleType:
    (site / f"{name}.py").write_text(code)
    return importlib.import_module(name)


def test_an_old_name_is_the_new_object_and_warns_at_the_place_of_its_use(contracts: ModuleType, site: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        user = use(site, "some_user", "\nfrom contracts import Old\n")
    assert user.Old is contracts.New
    assert own_warnings(caught) == [f"some_user {TEXT}"]
    assert (Path(caught[0].filename).name, caught[0].lineno) == ("some_user.py", 2)


def test_a_user_is_warned_once_for_each_name(contracts: ModuleType, site: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(site, "first", "import contracts\ncontracts.Old\ncontracts.Old\ncontracts.old(1)\ncontracts.old(1)\n")
        use(site, "second", "import contracts\ncontracts.Old\n")
    assert [text.partition(",")[0] for text in own_warnings(caught)] == [
        "first uses contracts.Old", "first uses contracts.old", "second uses contracts.Old",
    ]  # fmt: skip


def test_the_warning_names_the_distribution_of_the_plugin(contracts: ModuleType, install: Install) -> None:
    install("acme-old", "1.2", "import contracts\ncontracts.Old", module="acme_old")
    with pytest.warns(DeprecatedNameWarning, match=r"^acme-old 1.2 uses contracts.Old"):
        discover(PluginPolicy(allow=frozenset({"acme-old"})))


def test_a_single_file_is_named_by_its_path(contracts: ModuleType, site: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import contracts\ncontracts.Old\n")
    with pytest.warns(DeprecatedNameWarning) as caught:
        discover(PluginPolicy(autoload=False, files=(file,)))
    assert str(caught[0].message) == f"{file} {TEXT}"


def test_python_shows_the_warning_by_default() -> None:
    assert issubclass(DeprecatedNameWarning, FutureWarning)


def test_an_old_function_takes_its_arguments(contracts: ModuleType) -> None:
    with pytest.warns(
        DeprecatedNameWarning, match=r"uses contracts.old, which ends in release 9.9 of d9d; use contracts.new"
    ):
        assert contracts.old(2, twice=True) == 4


def test_a_module_has_no_other_names(contracts: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"module 'contracts' has no attribute 'Older'"):
        contracts.Older  # noqa: B018
    with pytest.raises(ImportError, match=r"cannot import name 'Older'"):
        exec("from contracts import Older")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Deprecated("contracts.New", ends="0.4", last_api=2), "write 'package.module:attribute'"),
        (lambda: Deprecated("contracts:New", ends="0.4.1", last_api=2), "write the first release without the name"),
        (lambda: deprecated(use="x", ends="soon"), "write the first release without the name"),
    ],
)
def test_a_deprecation_without_a_target_or_an_end_is_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_the_replacement_is_the_target_unless_another_is_named() -> None:
    assert Deprecated("a.b:C", ends="0.4", last_api=2).use == "a.b.C"
    names = DeprecatedNames("contracts", {"Old": Deprecated("a.b:C", ends="0.4", last_api=2, use="D")})
    assert names.names["Old"].use == "D"


def api_with_old_names() -> Api:
    """API in which ``contracts`` is a package of d9d."""
    return Api.from_json(
        {
            "packages": ["contracts", "d9d_core"],
            "foundation": [],
            "outer": [],
            "for_suites": [],
            "names": {"contracts": {"0.1": ["New"]}, "d9d_core.plugin": {"0.1": ["hookimpl"]}},
            "deprecated": {"contracts": {"Old": {"target": "contracts:New", "ends": "9.9", "last_api": 2}}},
        }
    )


@pytest.mark.parametrize(
    ("api", "line"),
    [(None, f"acme_code: {TEXT}"), (api_with_old_names(), f"acme-old 1.2: acme_code.py:2 {TEXT}")],
    ids=["while it loads", "in its source"],
)
def test_plugins_check_lists_old_names_and_refuses_them_on_request(
    api: Api | None, line: str, contracts: ModuleType, site: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "acme_code.py").write_text(CODE)
    install("acme-old", "1.2", PLUGIN, module="acme_old")
    registry = discover(PluginPolicy(allow=frozenset({"acme-old"})))
    assert check_plugins(registry, "acme-old", as_json=False, api=api)
    assert " ".join(capsys.readouterr().out.split()) == f"-- {line} 1 records checked, 0 problems"

    if api is not None:  # a module is imported only once
        assert not check_plugins(registry, "acme-old", as_json=True, strict=True, api=api)
        found = json.loads(capsys.readouterr().out)
        assert found["problems"] == [{"plugin": "acme-old 1.2", "problem": f"acme_code.py:2 {TEXT}"}]
        assert found["deprecations"] == []


def test_strict_plugins_refuse_old_names(
    contracts: ModuleType, site: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "acme_code.py").write_text(CODE)
    install("acme-old", "1.2", PLUGIN, module="acme_old")
    monkeypatch.setattr(Api, "shipped", api_with_old_names)
    policy = PluginPolicy(allow=frozenset({"acme-old"}))
    assert discover(policy).find("command", "acme")
    with pytest.raises(PluginError, match=rf"^--strict-plugins: acme-old 1.2: acme_code.py:2 {TEXT}$"):
        discover(policy | PluginPolicy(strict=True))


def test_a_plugin_of_a_newer_api_must_not_use_old_names(
    contracts: ModuleType, site: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "NEWEST_API", 3)
    monkeypatch.setattr(hooks, "API_RELEASES", {2: "0.1", 3: "0.2"})
    (site / "acme_code.py").write_text(CODE)
    install("acme-old", "1.2", f"D9D_API = 3\n{PLUGIN}", module="acme_old")
    registry = discover(PluginPolicy(allow=frozenset({"acme-old"})))
    (found,) = api_check.api_findings(registry, {"acme-old"}, api_with_old_names())
    assert not found.deprecated
    assert found.text == (
        "acme_code.py:2 uses contracts.Old, which is not in plugin API 3; "
        "use contracts.New, or write D9D_API = 2 in acme_old"
    )
