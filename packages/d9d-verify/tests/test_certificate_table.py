"""The table of a certificate on a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_verify.certify import command, run
from d9d_verify.certify.certificate import Cell, Certificate
from typer.testing import CliRunner

VERSIONS = {"d9d-core": "0.1", "torch": "2.11.0", "transformers": "5.0"}
CELLS = [Cell("tp=2", "exact", "1e-07"), Cell("pp=2", "refused", "no [b]stages[/b]")]


@pytest.mark.parametrize(
    ("kind", "versions", "head"),
    [
        (
            "llama",
            VERSIONS,
            "model [b]m[/b], model_type llama, config 0123456789ab, with torch 2.11.0, transformers 5.0",
        ),
        (None, {"torch": "2.11.0"}, "model [b]m[/b], config 0123456789ab, with torch 2.11.0"),
    ],
)
def test_a_certificate_names_the_model_and_the_libraries_that_computed(
    capsys: pytest.CaptureFixture[str], kind: str | None, versions: dict[str, str], head: str
) -> None:
    command._print(Certificate("[b]m[/b]", kind, "0123456789abcdef", versions, CELLS))
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
    found: list[Any] = []
    monkeypatch.setattr(command, "discover_plugins", lambda *policy: found.append(policy))
    result = CliRunner().invoke(command.app, ["m", "--plugin", "one.py", "--strict-plugins", *options])
    assert found == [([Path("one.py")], False, True)]
    assert result.exit_code == 1
    assert "differs" in result.stdout
    if options:
        assert result.stdout == json.dumps(Certificate("m", None, "0" * 64, VERSIONS, cells).to_json(), indent=1) + "\n"
        assert json.loads(result.stdout)["holds"] is False
    assert "tp=2" in result.stderr
    assert "\x1b" not in result.stderr
    del cells[-1]
    assert CliRunner().invoke(command.app, ["m", *options]).exit_code == 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [({"vocab_size": 50}, 50), ({"vocab_size": 1000}, 128), ({"vocab_size": "auto"}, "auto"), ({}, None)],
)
def test_a_certified_model_has_few_words(values: dict[str, Any], expected: object) -> None:
    model = SimpleNamespace(model_dump=lambda mode, exclude: {**values, "left_out": sorted(exclude), "mode": mode})
    found = run._with_few_words(model)
    assert (found.get("vocab_size"), found["left_out"], found["mode"]) == (expected, ["pretrained"], "json")
