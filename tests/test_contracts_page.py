"""The page of the five contracts: its files are plugins, and its job trains with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from d9d_engine.job import Job

from tests.documents import ROOT, files_of

PAGE = ROOT / "docs/contracts.md"


@pytest.mark.thorough
@pytest.mark.usefixtures("_hello_and_nothing_that_stays")
def test_the_five_plugins_train_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    files = files_of(PAGE)
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    Job.load("job.yaml").build().train()

    lines = [json.loads(line) for line in (tmp_path / "runs/five/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert round(losses[0], 2) == 0.47
    assert round(losses[-1], 2) == 0.13
    assert "goodbye after the last step" in capsys.readouterr().out
    assert len(files) == 6
