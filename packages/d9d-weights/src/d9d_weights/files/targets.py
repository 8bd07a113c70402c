"""Where a model directory is written: locally it appears by one rename, behind an fsspec address file by file."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from d9d_core.errors import CheckpointError

from d9d_weights.files.atomic import replace, sync
from d9d_weights.hugging_face.layout import CONFIG, SAFETENSORS, still_valid


class Target(Protocol):
    """A directory in the making. All ranks create files; one rank does the rest."""

    def start(self) -> None:
        """Begin. One rank, before all others."""

    def create(self, file: str) -> AbstractContextManager[BinaryIO]:
        """A new file that can be positioned, and is safe from a crash when the block is left."""

    def size(self, file: str) -> int | None:
        """Bytes of a file, ``None`` if there is none."""

    def publish(
        self, others: Mapping[str, bytes], last: Mapping[str, bytes], save_assets: Callable[[Path], None] | None
    ) -> None:
        """Add small files and have the directory exist. One rank, after all others.

        Args:
            others: such as an earlier tokenizer's; left out where ``save_assets`` writes other ones.
            last: what makes the model exist, in this order.
            save_assets: writes the model's own into the directory that it is given.
        """

    def discard(self) -> None:
        """Remove what a failure left. One rank, when no other writes any more; never fails."""


def open_target(directory: str | Path) -> Target:
    """A local directory, or whatever fsspec makes of an address.

    Raises:
        CheckpointError: fsspec knows no such kind of address, or its driver is not installed.
    """
    if isinstance(directory, str) and "://" in directory:
        return RemoteTarget(directory)
    return LocalTarget(Path(directory))


class LocalTarget:
    """A hidden directory beside the target that takes its place when it is complete.

    Args:
        target: replaced if it exists.
    """

    def __init__(self, target: Path) -> None:
        self._target = target.absolute()
        self._place = self._target.with_name(f".{self._target.name}.tmp")

    def start(self) -> None:
        """See :class:`Target`."""
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(parents=True)

    @contextmanager
    def create(self, file: str) -> Iterator[BinaryIO]:
        """See :class:`Target`."""
        if not self._place.is_dir():
            raise CheckpointError(
                f"{self._place} is not there: one process calls start() first, and all must see the same directory"
            )
        path = self._place / file
        try:
            with path.open("wb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
        except BaseException:
            path.unlink(missing_ok=True)  # with a hole in it, it would still have its full size
            raise

    def size(self, file: str) -> int | None:
        """See :class:`Target`."""
        path = self._place / file
        return path.stat().st_size if path.is_file() else None

    def publish(
        self, others: Mapping[str, bytes], last: Mapping[str, bytes], save_assets: Callable[[Path], None] | None
    ) -> None:
        """See :class:`Target`."""
        if save_assets is not None:
            save_assets(self._place)
        own = {path.name for path in self._place.iterdir()}
        for name, content in {**still_valid(others, own), **last}.items():
            (self._place / name).write_bytes(content)
        for path in (*self._place.rglob("*"), self._place):
            sync(path)
        replace(self._target, self._place)

    def discard(self) -> None:
        """See :class:`Target`."""
        shutil.rmtree(self._place, ignore_errors=True)


class RemoteTarget:
    """A prefix of an object store: there is no rename, so the file that makes the model exist comes last.

    Args:
        url: such as ``s3://bucket/model``; files of an earlier model there are removed by :meth:`start`.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self._url = url.rstrip("/")
        with self._explained():
            self._files, root = url_to_fs(self._url)
        self._root = root.rstrip("/")

    def start(self) -> None:
        """See :class:`Target`. What is no part of a model stays."""
        with self._explained():
            self._files.makedirs(self._root, exist_ok=True)
            self._remove()

    @contextmanager
    def create(self, file: str) -> Iterator[BinaryIO]:
        """See :class:`Target`. Built in this machine's directory for temporary files, uploaded when complete."""
        with tempfile.NamedTemporaryFile(suffix=f".{file}") as out:
            yield out  # type: ignore[misc] # a binary file in all but its class
            out.flush()
            with self._explained():
                self._files.put_file(out.name, f"{self._root}/{file}")

    def size(self, file: str) -> int | None:
        """See :class:`Target`."""
        with self._explained():
            self._files.invalidate_cache()
            try:
                return int(self._files.size(f"{self._root}/{file}"))
            except FileNotFoundError:
                return None

    def publish(
        self, others: Mapping[str, bytes], last: Mapping[str, bytes], save_assets: Callable[[Path], None] | None
    ) -> None:
        """See :class:`Target`."""
        with tempfile.TemporaryDirectory() as directory:
            if save_assets is not None:
                save_assets(Path(directory))
            assets = sorted(path for path in Path(directory).rglob("*") if path.is_file())
            with self._explained():
                for path in assets:
                    target = f"{self._root}/{path.relative_to(directory).as_posix()}"
                    self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
                    self._files.put_file(str(path), target)
                own = {path.name for path in Path(directory).iterdir()}
                for name, content in {**still_valid(others, own), **last}.items():
                    self._files.pipe_file(f"{self._root}/{name}", content)

    def discard(self) -> None:
        """See :class:`Target`."""
        with contextlib.suppress(Exception):
            self._remove()

    def _remove(self) -> None:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return
        names = [path.rstrip("/").rpartition("/")[2] for path in found]
        ours = [name for name in names if name == CONFIG or name.endswith((SAFETENSORS, f"{SAFETENSORS}.index.json"))]
        # What makes the model exist goes first, so that an interruption leaves none.
        for name in sorted(ours, key=lambda name: name.endswith(SAFETENSORS)):
            self._files.rm_file(f"{self._root}/{name}")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Drivers raise whatever their client library raises."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"{self._url} cannot be written: {type(error).__name__}: {error}; "
                "check the address, its driver and your rights there"
            ) from error
