"""Writes the page of plugin templates from the templates of ``d9d new plugin``.

uv run python tools/template_page.py           write docs/plugin-templates.md
uv run python tools/template_page.py --check   exit with 1 if it is out of date

So the page shows the code that plugin authors get.
"""

from __future__ import annotations

import sys
from pathlib import Path

from d9d_testing.scaffold.kinds import KINDS
from d9d_testing.scaffold.package import plugin_files

FILE = Path(__file__).resolve().parents[1] / "docs" / "plugin-templates.md"
HEAD = """# Plugin templates

`d9d new plugin NAME --kind KIND` (of d9d-testing) writes a complete package: `pyproject.toml` with the entry point, a
declaration, an implementation that works, the conformance suites of its kind, a test, a README, a licence, a workflow
for a forge's CI, and a job that trains in seconds on a CPU. This page quotes the templates, for a plugin called
`acme`; a test installs one of each kind, runs its suite and trains with it. [Writing a plugin](writing-a-plugin.md)
explains the parts.

<!-- written by tools/template_page.py -->
"""


def page() -> str:
    """Content of the page."""
    parts = [HEAD]
    for kind, spec in KINDS.items():
        files = plugin_files("acme", kind)
        paths = [f"src/acme/{kind}.py", "src/acme/conformance.py", f"tests/test_{kind}.py"]
        shown = [path for path in paths if path in files]
        parts.append(f"## {kind}\n\n{spec.summary} `d9d new plugin acme --kind {kind}` declares it as\n")
        record = files["src/acme/plugin.py"].partition("@hookimpl\n")[2].rstrip()
        parts.append(f"```py\n# src/acme/plugin.py\n@hookimpl\n{record}\n```\n")
        parts += [f"```py\n# {path}\n{files[path].rstrip()}\n```\n" for path in shown]
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    if arguments == ["--check"]:
        if FILE.exists() and FILE.read_text("utf-8") == page():
            return 0
        print(f"{FILE.name} is out of date; run: uv run python tools/template_page.py", file=sys.stderr)
        return 1
    FILE.write_text(page(), encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
