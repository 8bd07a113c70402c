"""Error messages for unknown names, missing packages, and configs without a name."""

from __future__ import annotations

from collections.abc import Callable
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from d9d_core.cli.app import app
from d9d_core.cli.health import examine
from d9d_core.cli.plugins import check_plugins, list_records
from d9d_core.config import PluginConfig
from d9d_core.errors import PluginError
from d9d_core.health import Health
from d9d_core.job_file.lookup import load_config
from d9d_core.job_file.open_union import Named
from d9d_core.plugin import HealthCheckSpec, KernelSpec, Ref, StrategySpec, hookimpl
from d9d_core.registry.capabilities import missing_extras
from d9d_core.registry.entries import Entry, Origin
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_core.terminal.console import VisibleConsole
from pydantic import TypeAdapter, ValidationError
from typer.testing import CliRunner


@pytest.mark.parametrize(("typo", "meant"), [("trian", "train"), ("exlpain", "explain"), ("chek", "check")])
def test_near_names_of_all_commands_are_suggested(typo: str, meant: str) -> None:
    result = CliRunner().invoke(app, [typo])
    assert result.exit_code == 2
    assert f"No such command '{typo}'. Did you mean '{meant}'" in result.stderr


def test_core_alone_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("d9d_core.cli.health.machine", lambda _: [])
    assert examine(Registry())
    list_records(Registry(), as_json=False)
    first, second = capsys.readouterr().out.splitlines()
    for line in (first, second):
        assert "no plugin is installed; to train, begin with: pip install d9d-engine" in line


def test_doctor_prints_the_machine_then_checks_then_plugins_then_problems_then_blocked_plugins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = {
        "a:well": lambda: Health(True, "all [is] well"),
        "a:sick": lambda: Health(False, "no disk"),
        "a:slow": lambda: Health(True, "old", "renew it"),
        "a:bad": fails,
    }
    monkeypatch.setattr("d9d_core.cli.health.machine", lambda verbose: [("disk", Health(True, f"all: {verbose}"))])
    monkeypatch.setattr(Ref, "load", lambda ref: checks[str(ref)])
    specs = [HealthCheckSpec(name=str(ref)[2:], summary="s", run=Ref(ref)) for ref in checks]
    origin = Origin("acme", "1.2", "acme", editable=True, seconds=0.0126)
    registry = SimpleNamespace(
        entries=lambda kind=None: [SimpleNamespace(spec=spec) for spec in specs] if kind else [],
        plugins=[origin, Origin("plain", "2", "plain", seconds=1.5)], problems=["acme: broken"],
        conflicts=lambda: ["two of a kind"], blocked={"other": "not allowed"}, records=dict,
    )  # fmt: skip
    monkeypatch.setattr("d9d_core.cli.health.shadowed_commands", lambda _registry, own: [f"hidden: {own}"])
    begins = ["ok  well: all [is] well", "no  sick: no disk", "--  slow: old; renew it",
              "no  bad: the check failed: ZeroDivisionError('by zero')"]  # fmt: skip
    ends = ["no  plugin acme: broken", "no  two of a kind", "no  hidden: ['train']", "--  plugin other: not allowed"]
    assert not examine(registry, ["train"])  # type: ignore[arg-type]
    said = capsys.readouterr().out.splitlines()
    assert said == ["ok  disk: all: False", *begins, "ok  plugins: 2 load; d9d doctor --verbose lists them", *ends]
    assert not examine(registry, ["train"], verbose=True)  # type: ignore[arg-type]
    said = capsys.readouterr().out.splitlines()
    each = ["ok  plugin acme 1.2, editable (13 ms)", "ok  plugin plain 2 (1500 ms)"]
    assert said == ["ok  disk: all: True", *begins, *each, *ends]
    specs.clear()
    assert not examine(registry)  # type: ignore[arg-type]


def test_lines_of_doctor_are_wrapped_beside_their_marks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("d9d_core.cli.health.machine", lambda _: [("disk", Health(True, "one two three four five"))])
    monkeypatch.setattr("d9d_core.cli.health.console_for", lambda: VisibleConsole(width=24))
    assert examine(Registry())
    assert capsys.readouterr().out.splitlines()[:2] == ["ok  disk: one two three", "    four five"]


def test_doctor_names_the_extras_whose_packages_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ['acme-absent>=1; extra == "plots"', 'rich; extra == "plots"', 'rich; extra == "whole"', "pydantic"]
    described = Message()
    for extra in ("plots", "whole"):
        described["Provides-Extra"] = extra
    monkeypatch.setattr("d9d_core.registry.capabilities.requires", lambda _: lines)
    monkeypatch.setattr("d9d_core.registry.capabilities.metadata", lambda _: described)
    monkeypatch.setattr("d9d_core.cli.health.machine", lambda _: [])
    assert missing_extras("acme") == {"plots": ["acme-absent"]}
    assert examine(Registry(plugins=[Origin("acme", "1.2", "acme")]))
    assert capsys.readouterr().out.splitlines()[-1] == "--  optional: acme-absent; pip install 'acme[plots]'"


def fails() -> Health:
    raise ZeroDivisionError("by zero")


def test_references_that_miss_one_package_are_one_problem(
    install: Callable[..., None], site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(
        "acme-heavy",
        "1.0",
        """
        @hookimpl
        def d9d_strategies():
            ref = Ref("acme_heavy_code:Config")
            lost = Ref("acme_heavy_lost:Config")
            part = Ref("acme_heavy_part:Config")
            yield StrategySpec(name="a", summary="x", config=ref, build=ref, anchor="data")
            yield StrategySpec(name="b", summary="x", config=lost, build=part, anchor="data")
        """,
    )
    (site / "acme_heavy_code.py").write_text("import a_package_that_is_not_there\n")
    (site / "acme_heavy_part.py").write_text("import json.a_part_that_is_not_there\n")
    assert not check_plugins(discover(PluginPolicy(allow=frozenset({"acme-heavy"}))), "acme-heavy", as_json=False)
    out = capsys.readouterr().out
    assert (
        "acme-heavy 1.0: 2 references need the module a_package_that_is_not_there, which is not installed; install it "
        "with: pip install a_package_that_is_not_there\n"
    ) in out
    assert "config acme_heavy_lost:Config failed to load: ModuleNotFoundError" in out
    assert "build acme_heavy_part:Config failed to load: ModuleNotFoundError" in out
    assert "3 problems" in out


def test_a_config_without_a_default_name_is_said_so(install: Callable[..., None]) -> None:
    install(
        "acme-nameless",
        "1.0",
        """
        from typing import Literal
        from d9d_core.config import PluginConfig
        class Nameless(PluginConfig):
            name: Literal["nameless"]
        @hookimpl
        def d9d_strategies():
            ref = Ref("acme_nameless_plugin:Nameless")
            yield StrategySpec(name="nameless", summary="x", config=ref, build=ref, anchor="data")
        """,
    )
    entry = discover(PluginPolicy(allow=frozenset({"acme-nameless"}))).find("strategy", "nameless")
    with pytest.raises(PluginError, match=r"Nameless has no default name; write name: Literal\['nameless'\] = "):
        load_config(entry)


@pytest.mark.parametrize("config", [dict, print, None])
def test_a_config_of_another_kind_is_named(monkeypatch: pytest.MonkeyPatch, config: object) -> None:
    spec = StrategySpec(name="s", summary="x", config=Ref("a:B"), build=Ref("a:c"), anchor="data")
    monkeypatch.setattr(Ref, "load", lambda _ref: config)
    kind: Any = SimpleNamespace(name="strategy")
    with pytest.raises(
        PluginError, match=r"^strategy 's' \(acme\): its config a:B is not a subclass of d9d_core.config"
    ):
        load_config(Entry(kind, spec, Origin("acme", "", "acme")))


def test_a_config_that_no_record_of_a_run_could_hold_is_said_so(install: Callable[..., None]) -> None:
    install(
        "acme-odd",
        "1.0",
        """
        from typing import Literal
        from d9d_core.config import PluginConfig
        class Odd(PluginConfig):
            name: Literal["odd"] = "odd"
            value: object = object()
        @hookimpl
        def d9d_strategies():
            ref = Ref("acme_odd_plugin:Odd")
            yield StrategySpec(name="odd", summary="x", config=ref, build=ref, anchor="data")
        """,
    )
    registry = discover(PluginPolicy(allow=frozenset({"acme-odd"})))
    field: TypeAdapter[PluginConfig] = TypeAdapter(Annotated[PluginConfig, Named("strategy")])
    text = r"the config of 'odd' \(acme-odd 1.0\) has a value that JSON cannot hold: .*Unable to serialize unknown type"
    with pytest.raises(ValidationError, match=text):
        field.validate_python("odd", context={"registry": registry})


def test_an_unknown_op_is_called_so() -> None:
    with pytest.raises(
        PluginError, match=r"^kernels.bogus: unknown op 'bogus': .*; ops with kernels: adamw, add_rms_norm, attention, "
    ):
        Registry.of().find_kernel("bogus", "x")


def test_an_unknown_kernel_lists_kernels_of_its_op_only() -> None:
    def d9d_kernels() -> list[KernelSpec]:
        made = Ref("x:y")
        names = [("attention", "flex"), ("attention", "sdpa"), ("swiglu", "mine")]
        return [KernelSpec(op=op, name=name, summary="x", build=made, supports=made) for op, name in names]

    registry = Registry.of(SimpleNamespace(__name__="acme", d9d_kernels=hookimpl(d9d_kernels)))
    with pytest.raises(PluginError) as caught:
        registry.find_kernel("attention", "flash")
    assert str(caught.value).endswith("installed: attention.flex, attention.sdpa")


def test_an_op_that_a_broken_plugin_may_have_is_not_called_unknown(install: Callable[..., None]) -> None:
    install("acme-broken", "1.0", "1 / 0")
    registry = discover(PluginPolicy(allow=frozenset({"acme-broken"})))
    with pytest.raises(PluginError, match=r"^kernels.bogus: (?!unknown op)"):
        registry.find_kernel("bogus", "x")


@pytest.mark.thorough
def test_a_health_check_that_misses_a_module_is_not_run(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    install(
        "acme-sick",
        "1.0",
        """
        @hookimpl
        def d9d_health_checks():
            run, needs = Ref("nowhere:f"), {"import:a_module_that_is_not_there"}
            yield HealthCheckSpec(name="sick", summary="s", run=run, requires=needs)
        """,
    )
    assert not examine(discover(PluginPolicy(allow=frozenset({"acme-sick"}))))
    out = capsys.readouterr().out
    assert "sick: a_module_that_is_not_there is not installed; pip install a_module_that_is_not_there" in out
    assert "the check failed" not in out
