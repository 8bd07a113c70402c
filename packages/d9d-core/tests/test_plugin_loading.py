from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from d9d_core.errors import PluginError
from d9d_core.registry import installed
from d9d_core.registry.known import KnownPlugins, ThirdParty
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import FOUNDATION, PluginPolicy
from d9d_core.registry.registry import Registry

Install = Callable[..., None]
OURS = {"acme-moe", "d9d-mixture", "d9d-conduit", "other"}
ONE = """
@hookimpl
def d9d_strategies():
    yield strategy("expert_parallel")
"""
KNOWN = KnownPlugins(
    {"strategy": {"expert_parallel": "d9d-mixture"}, "schedule": {"zbv": "d9d-conduit"}},
    {"d9d-mixture": "0.5.0"},
    [
        ThirdParty("acme-moe", "https://git.acme.org/moe", "acme-moe", {"strategy": ["offload", "expert_parallel"]}),
        ThirdParty("acme-other", "examples/other", "./examples/other", {"strategy": ["offload"], "tracker": ["csv"]}),
    ],
)


def ours(**kwargs: object) -> PluginPolicy:
    """Only distributions that a test installed: the environment of the tests has plugins of its own."""
    present = {candidate.origin.distribution for candidate in installed.scan()}
    return PluginPolicy(allow=frozenset(OURS & present), **kwargs)  # type: ignore[arg-type]


def find(name: str, kind: str = "strategy", **kwargs: object) -> object:
    return discover(ours(**kwargs), known=KNOWN).find(kind, name)


def message(name: str, kind: str = "strategy", **kwargs: object) -> str:
    with pytest.raises(PluginError) as caught:
        find(name, kind, **kwargs)
    return str(caught.value)


def test_a_name_finds_its_record_and_its_distribution(install: Install) -> None:
    install("acme-moe", "9.9", ONE)
    entry = find("expert_parallel")
    assert str(entry) == "'expert_parallel' (acme-moe 9.9)"


def test_an_absent_first_party_plugin_says_what_to_install(install: Install) -> None:
    assert message("expert_parallel") == (
        "strategy 'expert_parallel' comes from d9d-mixture; install it with: pip install d9d-mixture"
    )


def test_an_unknown_name_names_the_third_party_packages_that_have_it(install: Install) -> None:
    moe = (
        "it comes from the third-party package acme-moe (https://git.acme.org/moe), which d9d's authors do not check; "
        "install it with: pip install acme-moe"
    )
    other = (
        "it comes from the third-party package acme-other (examples/other of d9d's repository), which d9d's authors "
        "do not check; install it with: pip install ./examples/other"
    )
    assert message("offload") == f"unknown strategy 'offload': {moe}; or {other}"
    assert message("acme-moe/offload") == f"unknown strategy 'offload': {moe}"
    install("acme-moe", "9.9", "1 / 0\n")
    assert message("offload").startswith("strategy 'offload' comes from acme-moe 9.9, which failed to import: ")
    assert "which is not loaded: it is blocked" in message("offload", block=frozenset({"acme-moe"}))


def test_a_word_of_another_tool_gets_its_hint_before_a_third_party_package() -> None:
    said = message("csv", "tracker")
    assert said.startswith("unknown tracker 'csv'; d9d calls it 'jsonl'")
    assert said.endswith("install it with: pip install ./examples/other")


def test_a_first_party_package_goes_before_a_third_party_one(install: Install) -> None:
    assert message("expert_parallel").endswith("comes from d9d-mixture; install it with: pip install d9d-mixture")


def test_a_near_miss_suggests_the_installed_name(install: Install) -> None:
    install("d9d-mixture", "0.1.0", ONE)
    assert message("expert_paralel") == (
        "unknown strategy 'expert_paralel'; did you mean 'expert_parallel' (d9d-mixture 0.1.0)? "
        "installed: expert_parallel"
    )


def test_a_near_miss_of_an_absent_plugin_says_what_to_install(install: Install) -> None:
    assert message("expert_paralel") == (
        "unknown strategy 'expert_paralel'; did you mean 'expert_parallel' (pip install d9d-mixture)? installed: none"
    )


def test_an_unknown_name_lists_what_is_installed(install: Install) -> None:
    install("d9d-mixture", "0.1.0", ONE)
    assert message("zzz") == "unknown strategy 'zzz'; installed: expert_parallel"


def test_a_kind_that_nothing_offers_says_what_to_do_next(install: Install) -> None:
    with pytest.raises(PluginError) as error:
        find("lora", "peft method")
    assert str(error.value) == (
        "unknown peft method 'lora': no installed plugin offers a peft method, and no package of d9d does; "
        "install a plugin that does, or write one (docs/writing-a-plugin.md: d9d_peft_methods)"
    )


def test_a_kind_that_only_absent_packages_of_d9d_offer_names_them(install: Install) -> None:
    assert message("zzz") == (
        "unknown strategy 'zzz': no installed plugin offers a strategy; packages of d9d do: "
        "expert_parallel (pip install d9d-mixture)"
    )


def test_two_plugins_with_one_name_are_an_error_when_it_is_used(install: Install) -> None:
    install("acme-moe", "9.9", ONE)
    install("d9d-mixture", "0.1.0", ONE)
    assert message("expert_parallel") == (
        "strategy 'expert_parallel' is declared by acme-moe 9.9 and d9d-mixture 0.1.0; "
        "write 'acme-moe/expert_parallel' or 'd9d-mixture/expert_parallel', or block one in plugins.block"
    )
    assert str(find("acme-moe/expert_parallel")) == "'expert_parallel' (acme-moe 9.9)"


def test_a_broken_plugin_that_is_named_is_an_error_with_its_cause(install: Install) -> None:
    install("d9d-conduit", "0.1.0", "import a_module_that_is_not_there")
    with pytest.raises(PluginError) as caught:
        find("zbv", "schedule")
    assert str(caught.value) == (
        "schedule 'zbv' comes from d9d-conduit 0.1.0, which failed to import: "
        "ModuleNotFoundError(\"No module named 'a_module_that_is_not_there'\")"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert isinstance(caught.value.origin, ModuleNotFoundError)


def test_a_broken_plugin_that_nobody_named_leaves_the_others_alone(install: Install) -> None:
    install("other", "1.0", "1 / 0")
    install("acme-moe", "9.9", ONE)
    registry = discover(ours())
    assert registry.find("strategy", "expert_parallel")
    assert [str(p) for p in registry.problems] == ["other 1.0 failed to import: ZeroDivisionError('division by zero')"]


def test_an_unknown_name_mentions_plugins_that_failed_to_load(install: Install) -> None:
    install("other", "1.0", "1 / 0")
    assert message("theirs").endswith("not loaded: other 1.0 failed to import: ZeroDivisionError('division by zero')")


def test_strict_turns_every_problem_into_an_error(install: Install) -> None:
    install("other", "1.0", "1 / 0")
    with pytest.raises(PluginError, match=r"--strict-plugins: other 1.0 failed to import"):
        find("expert_parallel", strict=True)


def test_strict_turns_a_name_that_two_plugins_declare_into_an_error(install: Install) -> None:
    install("acme-moe", "9.9", ONE)
    install("d9d-mixture", "0.1.0", ONE)
    with pytest.raises(
        PluginError,
        match=r"^--strict-plugins: strategy 'expert_parallel' is declared by acme-moe 9.9 and d9d-mixture 0.1.0",
    ):
        find("acme-moe/expert_parallel", strict=True)


def test_an_older_plugin_api_says_what_to_install(install: Install) -> None:
    install("d9d-mixture", "0.1.0", "D9D_API = 0")
    assert (
        "d9d-mixture 0.1.0, which was written for plugin API 0, this d9d-core offers API 2; install d9d-mixture>=0.5.0"
        in (message("expert_parallel"))
    )


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (
            "from d9d_core.extend import Task",
            "plugin API 2 has no module d9d_core.extend: import names from",
        ),
        ("import d9d_core.tasks", "plugin API 2 has no module d9d_core.tasks"),
        ("from d9d_core.plugin import discover", "plugin API 2 has d9d_core.registry.loader.discover"),
        ("from d9d_core.model import HasBlocks", "plugin API 2 has d9d_core.traits.HasBlocks"),
        ("from d9d_core.model import HasBlock", "plugin API 2 has no name HasBlock"),
    ],
)
def test_an_import_that_core_does_not_have_says_where_the_name_is(line: str, advice: str, install: Install) -> None:
    install("d9d-mixture", "0.1.0", line)
    assert advice in message("expert_parallel")


def test_a_plugin_of_api_1_says_what_to_install(install: Install) -> None:
    install("d9d-mixture", "0.1.0", "D9D_API = 1")
    assert message("expert_parallel").endswith(
        "d9d-mixture 0.1.0, which was written for plugin API 1, this d9d-core offers API 2; install d9d-mixture>=0.5.0"
    )


def test_a_newer_plugin_api_asks_for_a_newer_core(install: Install) -> None:
    install("d9d-mixture", "0.1.0", "D9D_API = 99")
    assert message("expert_parallel").endswith(
        "was written for plugin API 99, this d9d-core offers API 2; install a newer d9d-core"
    )


def test_a_missing_api_statement_is_reported(install: Install) -> None:
    install("d9d-mixture", "0.1.0", "del D9D_API")
    assert "does not state its plugin API; write D9D_API = 2 in d9d_mixture_plugin" in message("expert_parallel")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "@hookimpl\ndef d9d_strategy(): ...",
            "implements an unknown hook 'd9d_strategy'; did you mean 'd9d_strategies'?",
        ),
        ("def d9d_strategies(): ...", "defines d9d_strategies without the decorator; write @hookimpl above it"),
        (
            "@hookimpl\ndef d9d_strategies(): yield 5",
            "yields an object of type int from the hook d9d_strategies; yield StrategySpec records",
        ),
        (
            "@hookimpl\ndef d9d_strategies():\n    yield strategy('a')\n    yield strategy('a')",
            "declares strategy 'a' twice",
        ),
        (
            "@hookimpl\ndef d9d_strategies(): yield strategy('Not A Name')",
            "failed in d9d_strategies: ValueError(\"StrategySpec name 'Not A Name': use lower-case",
        ),
        ("@hookimpl\ndef d9d_strategies(extra): yield strategy('a')", "has an invalid hook"),
        (
            "@hookimpl\ndef d9d_strategies(): return strategy('a')",
            "returns one StrategySpec from the hook d9d_strategies; use yield instead of return, or return a list",
        ),
        (
            "@hookimpl\ndef d9d_strategies(): strategy('a')",
            "returns nothing from the hook d9d_strategies; write yield in front of each record",
        ),
        (
            "@hookimpl\ndef d9d_strategies(): return 5",
            "returns int from the hook d9d_strategies; write yield in front of each record",
        ),
        (
            "class Mine: ...\n@hookimpl\ndef d9d_strategies():\n"
            "    yield StrategySpec(name='a', summary='s', anchor='data', config=Ref('a:b'), build=Mine)",
            "StrategySpec 'a': build is the class Mine itself; write Ref('d9d_mixture_plugin:Mine'),",
        ),
        (
            "@hookimpl\ndef d9d_strategies():\n"
            "    yield StrategySpec(name='a', summary='s', anchor='data', config='a:b', build=Ref('a:b'))",
            "StrategySpec 'a': config is a text; write Ref('a:b')",
        ),
        (
            "@hookimpl\ndef d9d_models():\n"
            "    yield ModelSpec(name='a', summary='s', config=Ref('a:b'), build=Ref('a:b'), hugging_face=5)",
            "ModelSpec 'a': hugging_face is 5; write Ref('package.module:attribute')",
        ),
    ],
)
def test_a_wrong_declaration_is_named(install: Install, code: str, text: str) -> None:
    install("d9d-mixture", "0.1.0", code)
    assert text in message("expert_parallel")


@pytest.mark.thorough
def test_a_declaration_that_imports_torch_is_reported(tmp_path: Path, install: Install) -> None:
    install("acme-moe", "9.9", "import torch\n" + ONE)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "from d9d_core.registry.loader import discover\nfrom d9d_core.registry.policy import PluginPolicy\n"
        "r = discover(PluginPolicy(allow=frozenset({'acme-moe'})))\n"
        "print(*r.problems); print(r.find('strategy', 'expert_parallel'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "acme-moe 9.9 imports torch and pydantic in its declaration module acme_moe_plugin" in out or (
        "acme-moe 9.9 imports torch in its declaration module acme_moe_plugin; refer to heavy code with Ref" in out
    )
    assert "'expert_parallel' (acme-moe 9.9)" in out


def test_blocked_plugins_are_not_imported_and_say_so(install: Install) -> None:
    install("d9d-mixture", "0.1.0", "1 / 0")
    text = message("expert_parallel", block=frozenset({"d9d-mixture"}))
    assert text == (
        "strategy 'expert_parallel' comes from d9d-mixture, which is not loaded: "
        "it is blocked (plugins.block or D9D_PLUGINS)"
    )


def test_a_required_plugin_must_load(install: Install) -> None:
    install("acme-moe", "9.9", "1 / 0")
    with pytest.raises(PluginError, match=r"plugins.require: the required plugin acme-moe 9.9 failed to import"):
        discover(ours(require=frozenset({"acme-moe"})))


def test_the_order_on_disk_decides_nothing(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("other", "acme-moe", "d9d-mixture"):
        install(name, "1.0", f"@hookimpl\ndef d9d_strategies(): yield strategy('{name.replace('-', '_')}')")
    forward = discover(ours())
    listed = list(importlib.metadata.distributions())
    monkeypatch.setattr(installed, "distributions", lambda: list(reversed(listed)) * 2)
    backward = discover(ours())
    assert len(forward.entries("strategy")) == 3
    assert [str(e) for e in forward.entries()] == [str(e) for e in backward.entries()]
    assert [str(o) for o in forward.plugins] == [str(o) for o in backward.plugins]


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "@hookimpl\ndef d9d_strategies(): raise SystemExit(0)"])
def test_a_plugin_cannot_end_the_program(install: Install, code: str) -> None:
    install("other", "1.0", code)
    install("acme-moe", "9.9", ONE)
    registry = discover(ours())
    assert registry.find("strategy", "expert_parallel")
    (problem,) = registry.problems
    assert "SystemExit(0)" in str(problem)
    assert isinstance(problem.error, SystemExit)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("METADATA", None),
        ("METADATA", "Metadata-Version: 2.1\nName: other\n"),
        ("entry_points.txt", "[d9d]\nno equals sign\n"),
        ("entry_points.txt", "[d9d]\nplugin = !!!\n"),
        ("direct_url.json", "{"),
        ("direct_url.json", "null"),
    ],
)
def test_a_damaged_distribution_leaves_the_others_alone(
    install: Install, site: Path, file: str, content: str | None
) -> None:
    install("acme-moe", "9.9", ONE)
    install("other", "1.0", ONE)
    damaged = site / "other-1.0.dist-info" / file
    damaged.unlink(missing_ok=True)
    if content is not None:
        damaged.write_text(content)
    registry = discover(ours())
    assert str(registry.find("strategy", "expert_parallel")) == "'expert_parallel' (acme-moe 9.9)"
    (problem,) = registry.problems
    assert str(problem).startswith("other 1.0 has damaged metadata: ")
    assert discover(PluginPolicy(block=frozenset({"other"}), autoload=False)).problems == ()


def test_a_damaged_distribution_that_declares_no_plugin_is_nobodys_business(install: Install, site: Path) -> None:
    install("other", "1.0", "")
    (site / "other-1.0.dist-info" / "entry_points.txt").write_text("[console_scripts]\nno equals sign\n")
    assert discover(PluginPolicy(autoload=False)).problems == ()


def test_a_selectors_distribution_is_read_like_packaging_tools_read_it(install: Install) -> None:
    install("acme-moe", "9.9", ONE)
    assert str(find("Acme_MoE/expert_parallel")) == "'expert_parallel' (acme-moe 9.9)"


def test_a_distribution_that_nobody_knows_is_not_advertised(install: Install) -> None:
    install("acme-moe", "9.9", ONE)
    assert message("evil-pkg/expert_parallel") == (
        "strategy 'evil-pkg/expert_parallel': no plugin 'evil-pkg' is installed; "
        "'expert_parallel' is offered by acme-moe 9.9"
    )
    assert message("evil-pkg/zbv", "schedule") == (
        "schedule 'evil-pkg/zbv': no plugin 'evil-pkg' is installed; 'zbv' comes from d9d-conduit; "
        "install it with: pip install d9d-conduit"
    )
    ours = [name for name in sorted(FOUNDATION - {"d9d-core"}) if find_spec(name.replace("-", "_"))]
    listed = ", ".join(["acme-moe", *ours])
    absent = "strategy 'evil-pkg/nothing': no plugin 'evil-pkg' is installed"
    assert message("evil-pkg/nothing") == f"{absent}; installed: {listed}"
    assert message("D9D_mixture/expert_parallel") == (
        "strategy 'expert_parallel' comes from d9d-mixture; install it with: pip install d9d-mixture"
    )


def test_a_registry_of_explicit_plugins_discovers_nothing(install: Install) -> None:
    install("acme-moe", "9.9", ONE)
    assert Registry.of().entries("strategy") == []


def test_the_plugin_layer_loads_without_torch_and_pydantic() -> None:
    code = "import sys, d9d_core.registry.registry as r; r.Registry.of(); print({'torch', 'pydantic'} & {*sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"
