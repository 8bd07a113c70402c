"""Certify each type of language model in the installed transformers and each family, and write docs/certificates.md.

    uv run python tools/certificates.py                  # all types; continues after an interruption
    uv run python tools/certificates.py gemma2 gpt_oss   # some types, to standard output
    uv run python tools/certificates.py --families       # the families, which have plugins of their own

Certificates are kept in build/certificates, by commit and by versions of torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import d9d_moe.plugin as moe_plugin
import d9d_nn.plugin as nn_plugin
import d9d_optim.plugin as optim_plugin
import d9d_parallel.plugin as parallel_plugin
import d9d_peft.plugin as peft_plugin
import d9d_pipeline.plugin as pipeline_plugin
import d9d_transformers.plugin as transformers_plugin
import d9d_verify.plugin as verify_plugin
from d9d_core.errors import D9dError
from d9d_core.plugin import ModelSpec
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_verify.certify.certificate import installed_versions
from d9d_verify.certify.run import certify

ROOT = Path(__file__).resolve().parents[1]
PAGE, DATA = ROOT / "docs" / "certificates.md", ROOT / "docs" / "certificates.json"
COLUMNS = (
    "transformers", "packed", "replicate 2", "fsdp 2", "hsdp 2 x 2", "pp 2", "tp 2", "cp 2", "tp 2 x pp 2", "ep 2",
    "checkpointing", "compile", "lora", "export",
)  # fmt: skip
SIGNS = {"exact": "=", "refused": "r", "differs": "**!**", "not applicable": "·"}
PLUGINS = (
    moe_plugin, nn_plugin, optim_plugin, parallel_plugin, peft_plugin, pipeline_plugin, transformers_plugin,
    verify_plugin,
)  # fmt: skip

Row = Mapping[str, Any]


def main() -> None:
    """Certify, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--part", default="1/1", help="K/N: only every Nth type, from the Kth one")
    parser.add_argument("--families", action="store_true", help="families instead of transformers' types")
    given = parser.parse_args()
    table = "families" if given.families else "types"
    registry = discover(PluginPolicy()) if given.families else Registry.of(*PLUGINS)
    place = ROOT / "build" / "certificates" / _key() / table
    place.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, given.part.split("/"))
    known = families(registry) if given.families else language_models()
    types = given.types or known
    for kind in types[part - 1 :: parts]:
        file = place / f"{kind}.json"
        if not file.exists():
            row = certified(kind, registry)
            file.write_text(json.dumps(row, indent=1) + "\n")
        print(shown(json.loads(file.read_text())), flush=True)
    rows = [json.loads(file.read_text()) for file in sorted(place.glob("*.json"))]
    if not given.types and len(rows) == len(types):
        facts = {name: version for name, version in installed_versions().items() if not name.startswith("d9d-")}
        made = {"date": date.today().isoformat(), "versions": facts, "rows": rows}
        DATA.write_text(json.dumps(json.loads(DATA.read_text()) | {table: made}, indent=1) + "\n")
        PAGE.write_text(page(json.loads(DATA.read_text())))


def families(registry: Registry) -> list[str]:
    """Models that have plugins of their own and a format of Hugging Face."""
    specs = [entry.spec for entry in registry.entries("model")]
    return sorted(
        spec.name
        for spec in specs
        if isinstance(spec, ModelSpec) and spec.hugging_face is not None and "*" not in spec.model_types
    )


def language_models() -> list[str]:
    """Types that transformers can build as causal language models."""
    import transformers

    known = transformers.AutoModelForCausalLM._model_mapping  # noqa: SLF001 - no public list
    return sorted({config.model_type for config in known})


def certified(kind: str, registry: Registry) -> Row:
    """Row of a type or family: its cells, or the reason why it is refused, and the seconds that this took."""
    started = time.monotonic()
    row: dict[str, Any] = {"type": kind, "refused": None, "cells": {}}
    try:
        found = certify(kind, registry, lambda _: None)
    except D9dError as error:
        row["refused"] = _first(str(error))
    except Exception as error:  # forwards of models raise anything
        row["refused"] = _first(f"it fails with {type(error).__name__}: {error}")
    else:
        row["cells"] = {cell.name: [cell.standing, cell.detail] for cell in found.cells}
    row = json.loads(re.sub(r"/[^\s\"]*/(?=(?:site-packages|lib/python[\d.]+|src)/)", "", json.dumps(row)))
    return row | {"seconds": round(time.monotonic() - started, 1)}


def _first(text: str) -> str:
    """First line of a text, with the next line if the first announces it by a colon."""
    lines = text.splitlines()
    return " ".join(line.strip() for line in lines[: 2 if lines[0].rstrip().endswith(":") else 1])


def shown(row: Row) -> str:
    """One line about a row."""
    if row["refused"]:
        return f"{row['type']:24s} {row['seconds']:5.1f} s  refused: {row['refused']}"
    count = Counter(standing for standing, _ in row["cells"].values())
    worst = "; ".join(f"{name}: {detail}" for name, (standing, detail) in row["cells"].items() if standing == "differs")
    return f"{row['type']:24s} {row['seconds']:5.1f} s  {dict(count)} {worst}"


def page(data: Mapping[str, Any]) -> str:
    """Markdown of the page."""
    types, own = data["types"], data["families"]
    built = [row for row in types["rows"] if not row["refused"]]
    lines = [
        "# Certificates",
        "",
        "<!-- written by tools/certificates.py -->",
        "`d9d certify` of small models with random weights, in float32. A certificate holds for its config and these",
        "versions only: `d9d certify DIR` makes the certificate of your model. `=` exact up to rounding, `r` refused",
        "before training, `!` differs, `·` does not apply. Reasons and deviations stand in",
        "[certificates.json](certificates.json).",
        "",
        "## Families",
        "",
        f"Models with [plugins of their own](which-checkpoints.md), certified on {_made(own)}. {_exact(own['rows'])}.",
        "",
        *_table("family", own["rows"]),
        "",
        "## Types of transformers",
        "",
        f"Each type of language model in transformers, certified on {_made(types)}, by",
        "[d9d-transformers](../plugins/d9d-transformers/README.md); a family's plugin reads its types in its place.",
        f"{len(built)} of {len(types['rows'])} types train. {_exact(built)}.",
        "",
        *_table("type", built),
        "",
        "## Cells that are refused or differ",
        "",
        "| reason | cells | types |",
        "|---|---|---|",
        *_reasons([*own["rows"], *built]),
        "",
        "## Types that are refused",
        "",
        "| type | reason |",
        "|---|---|",
        *(f"| {row['type']} | {_text(row['refused'])} |" for row in types["rows"] if row["refused"]),
    ]
    return "\n".join(lines) + "\n"


def _made(table: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(table["versions"].items()))
    return f"{table['date']} with {versions}"


def _exact(rows: Sequence[Row]) -> str:
    cells = [standing for row in rows for standing, _ in row["cells"].values() if standing != "not applicable"]
    exact = cells.count("exact")
    return f"{exact} of the {len(cells)} checks that apply are exact up to rounding ({exact / max(1, len(cells)):.0%})"


def _table(head: str, rows: Sequence[Row]) -> list[str]:
    return [f"| {head} | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS), *map(_line, rows)]


def _line(row: Row) -> str:
    signs = (SIGNS[row["cells"].get(name, ["not applicable"])[0]] for name in COLUMNS)
    return f"| {row['type']} | " + " | ".join(signs) + " |"


def _reasons(rows: Sequence[Row]) -> Iterable[str]:
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for name, (standing, detail) in row["cells"].items():
            if standing in ("refused", "differs"):
                found.setdefault(detail, {}).setdefault(row["type"], []).append(name)
    for reason, types in sorted(found.items(), key=lambda item: -len(item[1])):
        names = sorted({name for cells in types.values() for name in cells})
        yield f"| {_text(reason)} | {', '.join(names)} | {', '.join(types)} |"


def _text(reason: str) -> str:
    return reason.replace("|", "\\|").replace("<", "&lt;")


def _key() -> str:
    versions = installed_versions()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return f"{commit.stdout.strip()}-torch-{versions['torch']}-transformers-{versions['transformers']}"


if __name__ == "__main__":
    main()
