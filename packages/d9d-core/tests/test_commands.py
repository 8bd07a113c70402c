"""Commands of plugins: names, clashes, missing modules, exit statuses, and the checks of ``d9d check``."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
import typer
from d9d_core.cli.app import run
from d9d_core.cli.check import check_job
from d9d_core.cli.group import OpenGroup, PluginGroup, _Lazy, foundation_commands, shadowed_commands
from d9d_core.cli.options import discover_plugins, load_job, policy_of, warn_of_problems
from d9d_core.cli.output import length_of, mesh_line
from d9d_core.errors import PluginError
from d9d_core.job import JobFile
from d9d_core.job_file.document import Document
from d9d_core.job_file.job import Mesh
from d9d_core.layout.auto import Source
from d9d_core.plugin import CommandSpec, JobCheckSpec, Ref, hookimpl
from d9d_core.registry.policy import FOUNDATION
from d9d_core.registry.registry import Registry

JOB = {"steps": 3, "model": "toy_model", "data": "toy_data", "task": "toy_task", "optimizer": "toy_optimizer"}


class Here(Ref):
    """Reference to a Typer application of this module."""

    def load(self) -> Any:
        return APPS[self.target.partition(":")[2]]


APPS: dict[str, typer.Typer] = {}


def application(name: str, result: Callable[[list[str]], object]) -> None:
    app = typer.Typer(add_completion=False)

    @app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def run(context: typer.Context) -> None:
        result(list(context.args))

    APPS[name] = app


def plugin(distribution: str, *names: str, **options: Any) -> Any:
    """Plugin that declares commands of these names, each with the application of its name."""

    @hookimpl
    def d9d_commands() -> list[CommandSpec]:
        return [CommandSpec(name=name, summary=f"The {name}.", app=Here(f"apps:{name}"), **options) for name in names]

    return SimpleNamespace(__name__=distribution, d9d_commands=d9d_commands)


def group(registry: Registry) -> Any:
    made: Any = PluginGroup(name="d9d")
    made.__dict__["_registry"] = registry
    return made


def entries(registry: Registry, name: str) -> list[Any]:
    return [entry for entry in registry.entries("command") if entry.spec.key == name]


def test_a_command_that_several_plugins_declare_is_listed_with_each_distribution() -> None:
    registry = Registry.of(plugin("acme", "brew", "pour"), plugin("other", "brew"))
    listed = group(registry).list_commands(None)
    own = list(dict.fromkeys(entry.spec.key.partition(" ")[0] for entry in foundation_commands(registry)))
    assert listed == [*own, "acme/brew", "other/brew", "pour"]
    assert own


def test_a_command_is_found_by_its_name_or_with_its_distribution() -> None:
    commands = group(Registry.of(plugin("acme", "brew", "pour"), plugin("other", "brew")))
    assert commands.get_command(None, "pour").help == "The pour."
    assert str(commands.get_command(None, "other/brew")._entry.origin.distribution) == "other"
    assert commands.get_command(None, "sip") is None
    with pytest.raises(PluginError, match="brew"):
        commands.get_command(None, "brew")
    first = commands.list_commands(None)[0]
    assert commands.get_command(None, first)._entry.origin.distribution in FOUNDATION


def test_commands_of_several_packages_may_begin_with_one_word() -> None:
    registry = Registry.of(plugin("acme", "cup", "pot", group="brew"), plugin("other", "jug", group="brew"))
    commands = group(registry)
    assert commands.list_commands(None).count("brew") == 1
    inner = commands.get_command(None, "brew")
    assert inner.list_commands(None) == ["cup", "jug", "pot"]
    assert inner.help == "The cup. The jug. The pot."
    assert inner.get_command(None, "jug")._entry.origin.distribution == "other"
    assert inner.get_command(None, "sip") is None
    assert commands.get_command(None, "cup") is None


def test_a_second_word_of_a_package_that_is_not_installed_is_told() -> None:
    inner = group(Registry.of(plugin("acme", "cup", group="new"))).get_command(None, "new")
    assert inner.list_commands(None) == ["cup", "plugin"]
    with pytest.raises(PluginError, match="'new job' .*d9d-data"):
        inner.get_command(None, "job")
    with pytest.raises(PluginError, match="declared by"):
        group(Registry.of(*(plugin(name, "cup", group="new") for name in ("a", "b")))).get_command(None, "new")


def test_packages_add_commands_to_the_group_plugins() -> None:
    application("list", print)
    made: Any = OpenGroup(name="plugins", commands={"list": typer.main.get_command(APPS["list"])})
    registry = Registry.of(plugin("acme", "cup", "list", group="plugins"))
    made.__dict__["_added"] = group(registry).get_command(None, "plugins")
    assert made.list_commands(None) == ["list", "conform", "cup"]
    assert made.get_command(None, "cup")._entry.origin.distribution == "acme"
    assert not isinstance(made.get_command(None, "list"), _Lazy), "no plugin replaces a command of d9d-core"
    assert made.get_command(None, "sip") is None
    (text,) = shadowed_commands(registry, {"plugins", "plugins list"}, {"acme"})
    assert "'plugins list' (acme) is hidden by d9d's own" in text


def test_plugins_commands_with_a_name_of_d9d_are_hidden_and_told() -> None:
    registry = Registry.of(plugin("acme", "plugins", "brew"), plugin("other", "plugins"))
    text = "is hidden by d9d's own; only a new release of the plugin can rename it"
    assert shadowed_commands(registry, {"plugins"}) == [
        f"command {entry} {text}" for entry in entries(registry, "plugins")
    ]
    assert len(shadowed_commands(registry, {"plugins"}, among={"other"})) == 1
    assert shadowed_commands(registry, {"x"}) == []


def invoke(entry: Any, *words: str) -> Any:
    command: Any = _Lazy(entry.spec.key, entry)
    with command.make_context(entry.spec.key, list(words)) as context:
        return command.invoke(context)


def test_a_command_gets_all_of_its_arguments() -> None:
    seen: list[list[str]] = []
    application("brew", seen.append)
    (entry,) = entries(Registry.of(plugin("acme", "brew")), "brew")
    invoke(entry, "--strong", "2", "cups")
    assert seen == [["--strong", "2", "cups"]]


@pytest.mark.parametrize(
    ("code", "status", "said"), [("no water", 1, "no water\n"), (3, 3, ""), (None, 0, ""), (0, 0, "")]
)
def test_the_exit_of_a_plugins_command_is_its_status(
    code: str | int | None, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    application("brew", lambda _words: sys.exit(code))
    (entry,) = entries(Registry.of(plugin("acme", "brew")), "brew")
    with pytest.raises(typer.Exit) as end:
        invoke(entry)
    assert end.value.exit_code == status
    assert capsys.readouterr().err == said


def test_a_command_that_lacks_modules_names_them() -> None:
    needs = {"import:no_such_module_b", "import:no_such_module_a", "import:json"}
    (entry,) = entries(Registry.of(plugin("acme", "brew", requires=needs)), "brew")
    with pytest.raises(PluginError) as caught:
        invoke(entry)
    assert str(caught.value) == (
        f"command {entry} needs no_such_module_a no_such_module_b; install it with: "
        "pip install no_such_module_a no_such_module_b"
    )


def test_a_command_whose_application_fails_to_load_is_an_error_of_its_plugin() -> None:
    APPS.pop("brew", None)
    (entry,) = entries(Registry.of(plugin("acme", "brew")), "brew")
    with pytest.raises(PluginError, match=r"its app apps:brew failed to load: KeyError\('brew'\)"):
        invoke(entry)


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_of_the_command_line_restrict_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("D9D_PLUGINS", raising=False)
    policy = policy_of([tmp_path / "a.py"], True, False)
    assert (policy.files, policy.autoload, policy.strict) == ((tmp_path / "a.py",), False, False)
    assert policy_of([], False, True).autoload
    assert policy_of([], False, True).strict
    found = {entry.origin.distribution for entry in discover_plugins([], True).entries()}
    assert found <= set(FOUNDATION)


class Kind:
    """Stand-in of a class of jobs: its arguments."""

    registry = SimpleNamespace(problems=["one", "two"])

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options

    load = classmethod(lambda cls, *args, **options: cls(*args, **options))


def test_problems_of_plugins_are_told_unless_the_command_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    kind: Any = Kind
    loaded: Any = load_job(kind, Path("job.yaml"), ["seed=1"], [], False, True, world_size=3)
    assert capsys.readouterr().err == "warning: one (see d9d doctor)\nwarning: two (see d9d doctor)\n"
    assert loaded.args == (Path("job.yaml"),)
    assert loaded.options == {"overrides": ["seed=1"], "policy": policy_of([], False, True), "world_size": 3}
    load_job(kind, Path("job.yaml"), [], [], False, False, quiet=True)
    assert capsys.readouterr().err == ""
    warn_of_problems(Kind.registry)  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("\n") == 2


# --- lines about a job ------------------------------------------------------------------------------------------------


def test_length_and_mesh_of_a_job_as_text() -> None:
    job: Any = SimpleNamespace(steps=12_345, epochs=None)
    assert length_of(job) == "12,345 steps"
    job = SimpleNamespace(steps=None, epochs=0.5)
    assert length_of(job) == "epochs: 0.5; the number of steps follows from the data, which was not read"
    mesh = Mesh(dp_shard=4, tp=2)
    document = Document({})
    for source, text in (
        (Source(document), "dp_shard=4 x tp=2"),
        (Source(document, auto="dp_shard"), "dp_shard=4 x tp=2 (dp_shard is auto: 4)"),
        (Source(document, auto="dp_shard", note="mesh: job has no mesh"), "job has no mesh"),
    ):
        job = SimpleNamespace(mesh=mesh, source=source)
        assert mesh_line(job) == text


# --- checks of other packages -----------------------------------------------------------------------------------------

CALLS: list[tuple[Any, ...]] = []


class Check(Ref):
    def load(self) -> Any:
        if self.target == "my:broken":
            raise ImportError("no module")
        return lambda *given: CALLS.append(given)


def checked(*specs: JobCheckSpec) -> JobFile:
    @hookimpl
    def d9d_job_checks() -> list[JobCheckSpec]:
        return list(specs)

    found = Registry.of(toy, SimpleNamespace(__name__="acme", d9d_job_checks=d9d_job_checks)).entries()
    own = Registry(entry for entry in found if entry.origin.distribution not in FOUNDATION)
    return JobFile.from_values({**JOB, "batch": {"size": 12, "microbatch": 3}}, registry=own)


def test_a_job_whose_plan_was_checked_is_said_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    CALLS.clear()
    job = checked(
        JobCheckSpec(name="plan", summary="Plan.", run=Check("my:plan")),
        JobCheckSpec(name="prediction", summary="Memory.", run=Check("my:memory"), memory=True),
    )
    check_job(job, 1, 99)
    assert capsys.readouterr().out == "ok: this job can run; its data was not read\n"
    assert [(job, 1), (job, 1, 99)] == CALLS


def test_a_job_without_a_plan_is_described_and_checks_that_lack_modules_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    CALLS.clear()
    needs = {"import:no_such_module_b", "import:no_such_module_a"}
    check_job(checked(JobCheckSpec(name="mine", summary="Mine.", run=Check("my:run"), requires=needs)), None)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert ["step", "12", "samples,", "4", "microbatch(es)", "of", "3"] in rows
    assert ["run", "3", "steps"] in rows
    assert "ok: names, values, capabilities, mesh and schedule" in lines
    assert "not checked (to check it: pip install no_such_module_a no_such_module_b): Mine." in lines
    assert CALLS == []


def test_a_check_that_fails_to_load_is_an_error_of_its_plugin() -> None:
    with pytest.raises(PluginError, match=r"^job check .*: my:broken failed to load: ImportError\('no module'\)"):
        check_job(checked(JobCheckSpec(name="mine", summary="Mine.", run=Check("my:broken"))), None)


@pytest.mark.parametrize(("given", "kept"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_waiting_threads_of_a_command_sleep_unless_the_user_lets_them_spin(given: dict[str, str], kept: str) -> None:
    code = (
        "import atexit, os, sys; from d9d_core.cli.app import run; sys.argv = ['d9d', '--version']; "
        "atexit.register(lambda: print(os.environ['OMP_WAIT_POLICY'])); run()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == kept


def test_a_place_that_cannot_be_written_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise OSError(errno.EROFS, "Read-only file system", "out/page.html")

    monkeypatch.setattr("typer.main.get_command", lambda _: command)
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: out/page.html: Read-only file system\n"


def test_another_error_of_the_system_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise OSError(errno.EBADF, "Bad file descriptor", "out/page.html")

    monkeypatch.setattr("typer.main.get_command", lambda _: command)
    with pytest.raises(OSError, match="Bad file descriptor"):
        run()
