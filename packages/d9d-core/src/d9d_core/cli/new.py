"""``d9d new``: packages to begin with."""

from __future__ import annotations

from pathlib import Path

from d9d_core.scaffold.package import write_plugin
from d9d_core.terminal.console import console_for


def new_plugin(name: str, kind: str, directory: Path | None) -> None:
    """Write the package of a plugin that works, and say what to do with it.

    Raises:
        PluginError: there is no such kind, the name is none, or the directory has files.
    """
    root = directory or Path(name)
    written = write_plugin(root, name, kind)
    console = console_for()
    for path in written:
        console.print(f"  {path}")
    console.print(f'\nnext:\n  cd {root}\n  pip install -e ".[test]"\n  pytest\n  d9d train job.yaml')
