"""Command line of a run, as typed, for the record in its directory. Imports no torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import MutableMapping, Sequence

#: Environment variable by which ``d9d train --nproc`` passes its command line to the processes that it starts.
VARIABLE = "D9D_COMMAND"
#: Assignment to a field or an option whose name says that its value is secret; ``added_tokens=4`` is not.
_SECRET = re.compile(
    r"((?:^|[\W_])(?:api_?key|token|secret|password|passwd|credentials?)[\"']?\s*[=:]\s*)[^\s,}]+", re.IGNORECASE
)
#: User and password in an address.
_ACCOUNT = re.compile(r"(\w://)[^/@\s]+@")


def typed_command(words: Sequence[str], environ: MutableMapping[str, str]) -> str:
    """Command line that started a run, with the values of secrets replaced by ``***``.

    Args:
        words: arguments of this process, without the program.
        environ: environment variables; the command line that a launcher of d9d passes in them is removed.
    """
    return environ.pop(VARIABLE, None) or shlex.join(["d9d", *map(_hidden, words)])


def _hidden(word: str) -> str:
    return _ACCOUNT.sub(r"\1***@", _SECRET.sub(r"\1***", word))
