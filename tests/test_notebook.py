"""The notebook of the examples: its cells run in order, and it is kept without outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook" / "animals.ipynb"
#: Runs the code cells in one namespace. No kernel: nbclient is not among the tools of the tests.
SCRIPT = """
import ast, builtins, json, sys, threading
from pathlib import Path

class ZMQInteractiveShell:  # by which libraries know a notebook's kernel
    pass

builtins.get_ipython = ZMQInteractiveShell
namespace, shown = {"__name__": "__main__"}, []
for number, source in enumerate(json.loads(Path("cells.json").read_text())):
    body = ast.parse(source, f"cell {number}")
    last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
    exec(compile(body, f"cell {number}", "exec"), namespace)
    value = None if last is None else eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), namespace)
    shown.append(value if isinstance(value, (dict, list, tuple)) else repr(value))
    Path("shown.json").write_text(json.dumps(shown))
print([thread.name for thread in threading.enumerate() if thread.name.startswith("d9d-")])
"""


def cells(kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def last_of(logged: list[dict[str, float]]) -> float:
    return next(line["eval/loss"] for line in reversed(logged) if "eval/loss" in line)


def test_the_notebook_is_kept_without_outputs() -> None:
    values = json.loads(NOTEBOOK.read_text())
    assert (values["nbformat"], values["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in values["cells"]}) == len(values["cells"])
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells("code")] == [([], None)] * len(cells("code"))


@pytest.mark.full
def test_all_cells_of_the_notebook_run_in_order(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "cells.json").write_text(json.dumps(["".join(cell["source"]) for cell in cells("code")]))
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"],
        check=False,
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")  # no thread of a forgotten trainer is left
    count, parameters, outcome, (losses, measured), sets, worst, said = json.loads(
        (tmp_path / "shown.json").read_text()
    )
    assert (count, outcome) == ("240", "Outcome(status='finished', step=60)")
    assert parameters == [107008, 107008]
    logged = [json.loads(line) for line in (tmp_path / "runs/animals/metrics.jsonl").read_text().splitlines()]
    # Steps in parts equal the training's, and the evaluation equals the one after its last step.
    assert losses[0] == pytest.approx(logged[0]["loss"], rel=1e-6)
    assert losses[-1] < losses[0]
    assert len(losses) == 5
    assert measured["eval/loss"] > last_of(logged)
    assert (tmp_path / "runs/draft/model.safetensors").exists()
    assert sets["evaluation"]["loss"] == pytest.approx(last_of(logged), rel=1e-5)
    assert set(worst) == {"row", "tokens", "loss", "perplexity"}
    assert said["cow"].startswith(" moo")
    assert " tokens/s " in done.stdout  # the bar
