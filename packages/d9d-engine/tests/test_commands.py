from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from d9d_core.registry.policy import FOUNDATION

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Run the command line in this process: exit status, standard output, standard error."""
    from d9d_core.cli.main import main as run

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["d9d", *arguments])
        with pytest.raises(SystemExit) as caught:
            run()
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    return call


COMMAND = """
@hookimpl
def d9d_commands():
    yield CommandSpec(name="NAME", summary="Greets a user.", app=Ref("APP"))
"""


def command(name: str, app: str) -> str:
    return COMMAND.replace("NAME", name).replace("APP", app)


def greeting(site: Path, module: str) -> None:
    (site / f"{module}.py").write_text(
        "import typer\napp = typer.Typer()\n@app.command()\ndef greet(name: str, loud: bool = False):\n"
        f"    print(f'{module}: hello {{name}}' + '!' * loud)\n"
    )


@pytest.mark.thorough
def test_plugins_add_commands_that_are_imported_when_used(
    site: Path, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, main: Main
) -> None:
    install("acme-tools", "1.0", command("greet", "acme_greet:app"))
    greeting(site, "acme_greet")
    monkeypatch.setenv("D9D_PLUGINS", "acme-tools")
    for arguments, expected in ((["--help"], "Greets a user."), (["greet", "you", "--loud"], "hello you!")):
        status, out, _ = main(*arguments)
        assert status == 0
        assert expected in out
        assert ("acme_greet" in sys.modules) == (arguments[0] == "greet")


def test_a_command_of_two_plugins_is_an_error_when_it_is_used(
    site: Path, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, main: Main
) -> None:
    for name in ("acme", "zeta"):
        install(f"{name}-tools", "1.0", command("greet", f"{name}_greet:app"))
        greeting(site, f"{name}_greet")
    monkeypatch.setenv("D9D_PLUGINS", "acme-tools,zeta-tools")
    status, _, err = main("greet", "you")
    assert (status, err) == (
        2,
        "error: command 'greet' is declared by acme-tools 1.0 and zeta-tools 1.0; "
        "write 'acme-tools/greet' or 'zeta-tools/greet', or block one in plugins.block\n",
    )
    assert main("acme-tools/greet", "you")[1] == "acme_greet: hello you\n"
    assert "zeta-tools/greet" in main("--help")[1]


@pytest.mark.thorough
def test_cores_commands_win_and_doctor_tells(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, main: Main
) -> None:
    install("acme-tools", "1.0", command("train", "nowhere:app"))
    monkeypatch.setenv("D9D_PLUGINS", "acme-tools")
    _, out, _ = main("--help")
    assert out.count(" train ") == 1
    assert "Greets a user." not in out
    status, _, err = main("train", "no_such_job.yaml")
    assert (status, err) == (2, "error: no_such_job.yaml: no such job file; to write one: d9d new job --help\n")
    status, out, _ = main("doctor")
    assert status == 1
    assert "no  command 'train' (acme-tools 1.0) is hidden by d9d's own" in out


def test_a_command_that_does_not_load_is_an_error_of_its_plugin(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, main: Main
) -> None:
    install("acme-tools", "1.0", command("greet", "nowhere:app"))
    monkeypatch.setenv("D9D_PLUGINS", "acme-tools")
    status, _, err = main("greet")
    assert status == 2
    assert "error: command 'greet' (acme-tools 1.0): its app nowhere:app failed to load: ModuleNotFoundError" in err


def test_a_plugin_that_exits_does_not_end_a_command_in_silence(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, main: Main
) -> None:
    install("acme-tools", "1.0", "import sys\nsys.exit(0)\n")
    monkeypatch.setenv("D9D_PLUGINS", "acme-tools")
    status, out, err = main("plugins", "list", "--json")
    assert status == 0
    assert [record["kind"] for record in json.loads(out) if record["name"] == "console"] == ["tracker"]
    assert "warning: acme-tools 1.0 failed to import: SystemExit(0) (see d9d doctor)" in err


@pytest.mark.parametrize("damaged", ["METADATA", "entry_points.txt"])
def test_a_damaged_distribution_is_a_warning(
    site: Path, install: Callable[..., None], main: Main, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    install("acme-tools", "1.0", command("greet", "nowhere:app"))
    (site / "acme_tools-1.0.dist-info" / damaged).write_text("[d9d]\nno equals sign\n")
    monkeypatch.setenv("D9D_PLUGINS", "acme-tools")
    assert main("--help")[0] == 0
    status, out, err = main("schema")
    assert status == 0
    assert json.loads(out)["title"] == "d9d job file"
    assert err.startswith("warning: acme-tools 1.0 has damaged metadata: ")


def test_plugins_check_takes_a_distribution_as_users_write_it(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, main: Main
) -> None:
    install("acme-tools", "1.0", command("greet", "nowhere:app"))
    install("sound-tools", "1.0", command("jump", "json:loads"))
    monkeypatch.setenv("D9D_PLUGINS", "acme-tools,sound-tools")
    status, out, _ = main("plugins", "check", "Acme_Tools", "--json")
    assert status == 1
    report = json.loads(out)
    assert report["records"] == 1
    assert [finding["plugin"] for finding in report["problems"]] == ["acme-tools 1.0"]
    assert main("plugins", "check", "sound-tools")[:2] == (0, "1 records checked, 0 problems\n")
    status, _, err = main("plugins", "check", "nothing")
    ours = [name for name in sorted(FOUNDATION - {"d9d-core"}) if find_spec(name.replace("-", "_"))]
    listed = ", ".join(["acme-tools", *ours, "sound-tools"])
    assert (status, err) == (2, f"error: no plugin 'nothing'; loaded: {listed}\n")
    monkeypatch.setenv("D9D_PLUGINS", "-acme-tools")
    assert "error: plugin 'acme-tools' is not loaded: it is blocked" in main("plugins", "check", "acme-tools")[2]
