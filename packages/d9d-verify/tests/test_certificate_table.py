"""The table of a certificate on a terminal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from d9d_verify.certify import command
from d9d_verify.certify.certificate import Cell, Certificate
from typer.testing import CliRunner

VERSIONS = {"d9d-core": "0.1", "torch": "2.11.0", "transformers": "5.0"}
CELLS = [Cell("tp=2", "exact", "1e-07"), Cell("pp=2", "refused", "no [b]stages[/b]")]


@pytest.mark.parametrize(
    ("kind", "versions", "head"),
    [
        ("llama", VERSIONS, "model m, model_type llama, config 0123456789ab, with torch 2.11.0, transformers 5.0"),
        (None, {"torch": "2.11.0"}, "model m, config 0123456789ab, with torch 2.11.0"),
    ],
)
def test_a_certificate_names_the_model_and_the_libraries_that_computed(
    capsys: pytest.CaptureFixture[str], kind: str | None, versions: dict[str, str], head: str
) -> None:
    command._print(Certificate("m", kind, "0123456789abcdef", versions, CELLS))
    first, titles, *rows = capsys.readouterr().out.splitlines()
    assert first == head
    assert titles.split("  ")[0].strip() == "layout or feature"
    assert [row.strip().split(maxsplit=2) for row in rows] == [
        ["tp=2", "exact", "1e-07"], ["pp=2", "refused", "no [b]stages[/b]"],
    ]  # fmt: skip


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_difference_fails_the_command(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    cells = [*CELLS, Cell("lora", "differs", "0.5")]

    def certified(target: str, _registry: object, note: Any) -> Certificate:
        assert target == "m"
        note("tp=2 \x1b[2J")
        return Certificate(target, None, "0" * 64, VERSIONS, cells)

    monkeypatch.setattr("d9d_verify.certify.run.certify", certified)
    monkeypatch.setattr(command, "discover_plugins", lambda *_: SimpleNamespace())
    result = CliRunner().invoke(command.app, ["m", *options])
    assert result.exit_code == 1
    assert "differs" in result.stdout
    assert ('"holds": false' in result.stdout) == bool(options)
    assert "tp=2" in result.stderr
    assert "\x1b" not in result.stderr
    del cells[-1]
    assert CliRunner().invoke(command.app, ["m", *options]).exit_code == 0
