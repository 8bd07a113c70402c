"""Modules that an import loads, measured in a process that has imported nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

#: Modules that a declaration must not import: they take seconds, and declarations load on every ``d9d`` command.
HEAVY = frozenset(
    {"matplotlib", "numpy", "pydantic", "rich", "safetensors", "tokenizers", "torch", "transformers", "triton", "typer"}
)

_SCRIPT = """
import importlib, json, sys, time
path, names = json.load(sys.stdin)
sys.path[:] = path
facts = {}
for name in names:
    before = set(sys.modules)
    start = time.perf_counter()
    importlib.import_module(name)
    facts[name] = [1000 * (time.perf_counter() - start), sorted(set(sys.modules) - before)]
print(json.dumps(facts))
"""


@dataclass(frozen=True, slots=True)
class ImportFacts:
    """Facts about the import of one module.

    Attributes:
        milliseconds: time of the import, which varies between machines and runs.
        modules: all modules that the import loaded.
    """

    milliseconds: float
    modules: frozenset[str]

    @property
    def heavy(self) -> list[str]:
        """Modules of :data:`HEAVY` that the import loaded."""
        return sorted(HEAVY & self.modules)


def import_fresh(*modules: str) -> dict[str, ImportFacts]:
    """Import modules one after the other in a new process with this process's ``sys.path``.

    The facts of a module leave out modules that were loaded by an earlier import.

    Raises:
        AssertionError: a module cannot be imported; the message is the traceback.
    """
    done = subprocess.run(  # noqa: S603 - this interpreter and a constant script
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps([sys.path, modules]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    return {name: ImportFacts(milliseconds, frozenset(names)) for name, (milliseconds, names) in facts.items()}
