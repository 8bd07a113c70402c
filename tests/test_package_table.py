"""The table of packages has every member of the workspace and every name that it offers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_table_of_packages_is_up_to_date() -> None:
    command = [sys.executable, "tools/package_table.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_table_has_every_member_and_what_a_job_file_can_name() -> None:
    text = (ROOT / "docs" / "packages.md").read_text("utf-8")
    members = [path.parent for house in ("packages", "plugins") for path in ROOT.glob(f"{house}/*/pyproject.toml")]
    for member in members:
        assert f"| [{member.name}](../{member.relative_to(ROOT).as_posix()}/README.md) |" in text
    for name in ("muon", "wandb", "mlflow", "aim", "tensorboard", "inverse_sqrt", "d9d new plugin"):
        assert f"`{name}`" in text
