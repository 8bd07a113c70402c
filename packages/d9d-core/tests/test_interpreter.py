"""Python processes that d9d starts find the modules that this process finds, and no others."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from d9d_core.interpreter import children_import_as_here, python_command


@pytest.mark.parametrize("here", [False, True])
def test_a_child_imports_from_the_working_directory_only_if_this_process_does(
    here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_the_directory.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if here:
        monkeypatch.syspath_prepend("")
    code = ["-c", "import module_of_the_directory"]
    assert (subprocess.run([*python_command(), *code], capture_output=True, check=False).returncode == 0) is here
    with children_import_as_here():
        done = subprocess.run([python_command()[0], *code], capture_output=True, check=False)
    assert (done.returncode == 0) is here
    assert "PYTHONSAFEPATH" not in os.environ
