"""Writes the table of component names, from which d9d-core tells users what to install.

    uv run python tools/known_plugins.py           write packages/d9d-core/.../known_plugins.json
    uv run python tools/known_plugins.py --check   exit with 1 if it is out of date

The table is read from the declarations of the workspace's members, and from the list of third-party plugins,
docs/third-party.toml; d9d-core reads the table and imports none of them.
"""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from plugin_list import listed

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "packages" / "d9d-core" / "src" / "d9d_core" / "registry" / "known_plugins.json"


def table(root: Path = ROOT) -> dict[str, Any]:
    """Names of all members with an entry point by kind, the members' versions, and the listed third-party plugins."""
    from d9d_core.plugin import ModelSpec
    from d9d_core.registry.registry import Registry

    homes: dict[str, dict[str, str]] = {}
    versions: dict[str, str] = {}
    for file in sorted([*root.glob("packages/*/pyproject.toml"), *root.glob("plugins/*/pyproject.toml")]):
        project = tomllib.loads(file.read_text("utf-8"))["project"]
        for module in project.get("entry-points", {}).get("d9d", {}).values():
            versions[project["name"]] = project["version"]
            for entry in Registry.of(importlib.import_module(module)).entries():
                if entry.origin.module == module:
                    homes.setdefault(entry.kind.name, {})[entry.spec.key] = project["name"]
                    if isinstance(entry.spec, ModelSpec):
                        for model_type in entry.spec.model_types:
                            homes.setdefault("model type", {})[model_type] = project["name"]
    others = [
        {"distribution": plugin.distribution, "url": plugin.url, "install": plugin.install, "adds": plugin.adds}
        for plugin in listed(root / "docs" / "third-party.toml")
    ]
    return {"homes": homes, "versions": versions, "others": others}


def text(root: Path = ROOT) -> str:
    """Content of the file."""
    return json.dumps(table(root), indent=1, sort_keys=True) + "\n"


def main(arguments: list[str]) -> int:
    """Write the file, or check it."""
    if arguments == ["--check"]:
        if TABLE.read_text("utf-8") == text():
            return 0
        print(f"{TABLE.relative_to(ROOT)} is out of date; run: uv run python tools/known_plugins.py", file=sys.stderr)
        return 1
    TABLE.write_text(text(), encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
