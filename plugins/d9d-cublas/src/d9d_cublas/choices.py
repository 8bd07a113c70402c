"""Choices of cuBLASLt algorithms by device, library version and product; a user's own choices are stored on disk.

A file of choices is JSON::

    {"format": 1, "choices": [
        {"device": "NVIDIA H200", "library": 130100,
         "layout": "forward", "rows": 16384, "out_features": 6144, "in_features": 2048, "dtype": "bfloat16",
         "algorithm": {"id": 66, "tile": 36, "stages": 35, "cluster": 3, ...}, "milliseconds": [0.626, 0.592]}]}

``device`` is the device name that torch returns, ``library`` the version that ``cublasLtGetVersion`` returns. The
fields of the product are described in :class:`~d9d_cublas.problem.Problem`, the fields of the algorithm in
:class:`~d9d_cublas.problem.Settings`. An algorithm of ``null`` means cuBLAS's default. ``milliseconds``, of the default
algorithm and of the chosen one, are only for information.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from d9d_cublas.problem import LAYOUTS, Problem, Settings

FORMAT = 1
#: File of the choices that the package ships.
SHIPPED = Path(__file__).with_name("choices.json")


@dataclass(frozen=True, slots=True)
class Key:
    """Key of a choice.

    Attributes:
        device: name of the device, for example ``NVIDIA H200``.
        library: version of the library, for example 130100.
        problem: shapes, layout and dtype of the product.
    """

    device: str
    library: int
    problem: Problem


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen algorithm for a product.

    Attributes:
        algorithm: settings of the algorithm; ``None`` for cuBLAS's default.
        milliseconds: measured time of the product with the default and with the choice, if known.
    """

    algorithm: Settings | None
    milliseconds: tuple[float, float] | None = None


def cache_file() -> Path:
    """Path of the user's choices, ``d9d/cublas.json`` below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - raises without a home
    return Path(home) / "d9d" / "cublas.json"


class Choices:
    """Choices of cuBLASLt algorithms: the user's own, then the choices that come with the package.

    Args:
        cache: file of the user's choices; need not exist. If several processes share it, the first recorded choice
            wins.
        shipped: file of the package's choices.
    """

    def __init__(self, cache: Path, shipped: Path = SHIPPED) -> None:
        self._cache = cache
        self._shipped = read(shipped)
        self._own: dict[Key, Choice] = {}
        self._seen: tuple[int, int] | None = None
        self._works = True

    def find(self, key: Key) -> Choice | None:
        """Choice for a product in the user's file, else in the package's file, else ``None``."""
        if key not in self._own:
            self._look()
        return self._own.get(key) or self.find_shipped(key)

    def find_shipped(self, key: Key) -> Choice | None:
        """Choice for a product in the package's file, or ``None``."""
        return self._shipped.get(key)

    def record(self, key: Key, choice: Choice) -> Choice:
        """Record a measured choice.

        Returns:
            The choice in effect: if another process has recorded a choice earlier, its choice.
        """
        if not self._works:
            return self._own.setdefault(key, choice)
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self._cache.with_suffix(".lock")):
                self._look()
                adopted = self._own.setdefault(key, choice)
                if self._works and adopted is choice:
                    write(self._cache, self._own)
        except OSError as error:
            self._give_up(f"cannot be written ({error})")
        return self._own.setdefault(key, choice)

    def _look(self) -> None:
        """Read the choices that other processes have recorded since the last call."""
        if not self._works:
            return
        try:
            state = self._cache.stat()
            seen = state.st_ino, state.st_mtime_ns
            if seen != self._seen:
                # Choices that this process has already used must not change.
                self._own = {**read(self._cache), **self._own}
                self._seen = seen
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._give_up(f"cannot be used ({error}); delete it")

    def _give_up(self, why: str) -> None:
        """Warn that the file of the user's choices cannot be read or written, and stop using the file."""
        self._works = False
        text = f"choices of cuBLASLt algorithms: {self._cache} {why}; this process measures for itself"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def read(path: Path) -> dict[Key, Choice]:
    """Read a file of choices.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not hold choices of this format.
    """
    content = json.loads(path.read_text("utf-8"))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"the file of choices does not have the format {FORMAT}")
    try:
        return dict(_parse(entry) for entry in content["choices"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"an entry of the choices lacks a field or has an unknown field: {error!r}") from error


def write(path: Path, choices: Mapping[Key, Choice]) -> None:
    """Write a file of choices atomically.

    Raises:
        OSError: the file cannot be written.
    """
    entries = [
        {
            "device": key.device,
            "library": key.library,
            **asdict(key.problem),
            "algorithm": None if choice.algorithm is None else asdict(choice.algorithm),
            "milliseconds": choice.milliseconds,
        }
        for key, choice in choices.items()
    ]
    lines = ",".join(f"\n  {json.dumps(entry)}" for entry in entries)  # one line per choice, so that diffs are readable
    text = f'{{\n "format": {FORMAT},\n "choices": [{lines}\n ]\n}}\n'
    # The name is unique to this process, even if several machines share the folder.
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _parse(entry: Mapping[str, Any]) -> tuple[Key, Choice]:
    problem = Problem(**{field.name: entry[field.name] for field in fields(Problem)})
    algorithm = None if entry["algorithm"] is None else Settings(**entry["algorithm"])
    numbers = [problem.rows, problem.out_features, problem.in_features, entry["library"]]
    numbers += [] if algorithm is None else asdict(algorithm).values()
    if problem.layout not in LAYOUTS or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"an entry of the choices has impossible values: {dict(entry)}")
    times = entry.get("milliseconds")
    return Key(entry["device"], entry["library"], problem), Choice(algorithm, None if times is None else tuple(times))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that excludes other writing processes; the operating system releases it if the process dies."""
    with path.open("w") as file:
        # On a file system without locks, the last of two concurrent writers wins; the file is complete in any case.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
