"""Stand-ins for commands of a cluster, such as ``kubectl``: they record arguments and give prepared answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = ["StandIns"]

_PROGRAM = """#!{python} -IS
import json, os, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
with open({calls!r}, "a") as file:
    file.write(json.dumps([name, *words]) + "\\n")
with open({answers!r}) as file:
    answers = json.load(file)
for command, begin, text, status in reversed(answers):
    if command == name and words[: len(begin)] == begin:
        print(text, file=sys.stderr if status else sys.stdout)
        sys.exit(status)
"""


class StandIns:
    """Commands that record their arguments. A command without an answer prints nothing and succeeds.

    Args:
        folder: empty folder of the commands, to be put first into ``PATH``.
        names: names of the commands.

    Attributes:
        folder: folder of the commands.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._calls, self._answers = folder / ".calls", folder / ".answers"
        self._answers.write_text("[]")
        program = _PROGRAM.format(python=sys.executable, calls=str(self._calls), answers=str(self._answers))
        for name in names:
            (folder / name).write_text(program)
            (folder / name).chmod(0o755)

    def first_in_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace ``PATH`` by the folder and the system's own folders, for the rest of the test."""
        monkeypatch.setenv("PATH", f"{self.folder}:/usr/bin:/bin")

    def answer(self, command: str, *begin: str, text: str = "", status: int = 0) -> None:
        """Set the answer to calls whose arguments begin with some words; a later answer replaces an earlier one.

        Args:
            command: name of the command.
            begin: first arguments of the calls.
            text: printed text, on standard error if the status is not 0.
            status: exit status.
        """
        answers = [*json.loads(self._answers.read_text()), (command, begin, text, status)]
        self._answers.write_text(json.dumps(answers))

    def calls(self, command: str | None = None) -> list[list[str]]:
        """Names and arguments of all calls, in their order; with ``command``, only of the calls of this command."""
        if not self._calls.exists():
            return []
        calls = [json.loads(line) for line in self._calls.read_text().splitlines()]
        return [call for call in calls if command in (None, call[0])]

    def forget(self) -> None:
        """Forget all calls."""
        self._calls.unlink(missing_ok=True)
