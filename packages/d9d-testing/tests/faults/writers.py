"""Writers with one fault each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from d9d_testing.suites.inference.writer import WriterSuite


class Lines:
    """JSON lines, plainly."""

    suffix = ".jsonl"

    def write(self, path: Path, rows: Any) -> None:
        with path.open("x", encoding="utf-8") as file:
            for values in zip(*rows.values(), strict=True):
                plain = [getattr(value, "tolist", lambda value=value: value)() for value in values]
                file.write(json.dumps(dict(zip(rows, plain, strict=True))) + "\n")

    def join(self, parts: Sequence[Path], path: Path) -> None:
        path.write_bytes(b"".join(part.read_bytes() for part in parts))


class Sound(WriterSuite):
    target = "jsonl"
    writer: Callable[[], Any] = Lines

    def build(self, *_arguments: Any, **_fields: Any) -> Any:
        return type(self).writer()

    def read(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]


def with_(**changes: Any) -> dict[str, Any]:
    return {"writer": type("Changed", (Lines,), changes)}


def headed(self: Lines, path: Path, rows: Any) -> None:
    Lines.write(self, path, rows)
    path.write_text("# a part\n" + path.read_text("utf-8"), "utf-8")


_numbers = itertools.count()


def numbered(self: Lines, path: Path, rows: Any) -> None:
    Lines.write(self, path, rows)
    path.write_text(path.read_text("utf-8") + f"# {next(_numbers)}\n", "utf-8")


def rounded(self: Lines, path: Path, rows: Any) -> None:
    Lines.write(self, path, {**rows, "score": [round(value, 3) for value in rows["score"]]})


def silent(self: Lines, path: Path, rows: Any) -> None:
    if path.parent.exists():
        Lines.write(self, path, rows)


def sorted_by_name(self: Lines, parts: Sequence[Path], path: Path) -> None:
    Lines.join(self, sorted(parts, key=lambda part: part.name), path)


def in_ascii(self: Lines, path: Path, rows: Any) -> None:
    plain = {
        name: [value.encode("ascii", "ignore").decode() if isinstance(value, str) else value for value in values]
        for name, values in rows.items()
    }
    Lines.write(self, path, plain)


def with_leftovers(self: Lines, path: Path, rows: Any) -> None:
    Lines.write(self, path.with_suffix(".tmp"), rows)
    path.write_bytes(path.with_suffix(".tmp").read_bytes())


FAULTS = {
    "the suffix has no dot": (with_(suffix="jsonl"), "begin it with a dot"),
    "each part has a header": (with_(write=headed), "other bytes"),
    "each part has a number": (with_(write=numbered), ""),
    "numbers are rounded": (with_(write=rounded), "score is"),
    "parts are joined by name": (with_(join=sorted_by_name), "rows are missing, doubled or moved"),
    "the first part alone is joined": (
        with_(join=lambda self, parts, path: Lines.join(self, parts[:1], path)),
        "rows are missing, doubled or moved",
    ),
    "texts lose what ASCII lacks": (with_(write=in_ascii), ""),
    "leaves temporary files": (with_(write=with_leftovers), ""),
    "a disk that fails is not told": (with_(write=silent), "raised no OSError"),
}
