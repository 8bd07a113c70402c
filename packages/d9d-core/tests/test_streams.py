"""Standard streams whose reader is gone or whose disk is full."""

from __future__ import annotations

import array
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from d9d_core.cli.streams import SurvivingFile, output_is_incidental, surviving_streams

FULL = Path("/dev/full")  # each write to it fails with ENOSPC
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@pytest.fixture
def standard_output(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], io.TextIOWrapper]]:
    """Function that makes a file the standard output of this process."""
    opened: list[io.TextIOWrapper] = []

    def at(path: Path) -> io.TextIOWrapper:
        stream = path.open("w", encoding="latin-1", errors="backslashreplace")
        opened.append(stream)
        monkeypatch.setattr("sys.__stdout__", stream)
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.stderr", io.StringIO())
        return stream

    yield at
    monkeypatch.undo()
    for stream in opened:
        stream.close()


def error() -> str:
    assert isinstance(sys.stderr, io.StringIO)
    return sys.stderr.getvalue()


def test_data_for_a_full_disk_counts_as_written_and_the_error_is_kept() -> None:
    with SurvivingFile(os.open(FULL, os.O_WRONLY), "wb") as file:
        assert file.lost is None
        assert file.write(array.array("i", [1, 2])) == 8  # type: ignore[arg-type]
        assert file.lost is not None
        assert file.lost.errno == errno.ENOSPC


def test_data_for_a_closed_reader_is_dropped_for_good_and_no_error_is_kept() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with SurvivingFile(writing, "wb") as file:
        assert file.write(array.array("i", [1, 2, 3])) == 12  # type: ignore[arg-type]
        assert os.fstat(writing).st_rdev == Path(os.devnull).stat().st_rdev
        assert file.write(b"more") == 4
        assert file.lost is None


def test_a_pipe_that_is_full_for_now_is_no_loss() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with SurvivingFile(writing, "wb") as file:
        while file.write(b"x" * 4096):
            pass
        assert file.lost is None
    os.close(reading)


@pytest.mark.parametrize("code", [None, 0, "returned"])
def test_a_successful_command_whose_result_is_lost_fails(
    standard_output: Callable[[Path], io.TextIOWrapper], code: int | str | None
) -> None:
    standard_output(FULL)

    def command() -> None:
        print("a result")  # still in a buffer at the end of the block
        if code != "returned":
            sys.exit(code)

    with pytest.raises(SystemExit) as end, surviving_streams():
        command()
    assert end.value.code == 1
    assert error() == "error: standard output: No space left on device; the output is not complete\n"


def test_a_command_whose_result_is_stored_elsewhere_may_lose_its_output(
    standard_output: Callable[[Path], io.TextIOWrapper],
) -> None:
    standard_output(FULL)
    with surviving_streams():
        output_is_incidental()
        print("a report")
    assert error() == ""


def test_a_command_that_failed_keeps_its_status(standard_output: Callable[[Path], io.TextIOWrapper]) -> None:
    standard_output(FULL)

    def command() -> None:
        print("a part of the result")
        sys.exit(3)

    with pytest.raises(SystemExit) as end, surviving_streams():
        command()
    assert (end.value.code, error()) == (3, "")


def test_output_before_an_error_is_written_as_the_stream_would_have_written_it(
    standard_output: Callable[[Path], io.TextIOWrapper], tmp_path: Path
) -> None:
    before = standard_output(tmp_path / "out")
    print("\u00e9 first")

    def fails() -> None:
        stream = sys.stdout
        assert isinstance(stream, io.TextIOWrapper)
        assert stream is not before
        assert (stream.line_buffering, stream.write_through) == (before.line_buffering, before.write_through)
        print("second \u2192")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), surviving_streams():
        fails()
    assert (tmp_path / "out").read_bytes() == b"\xe9 first\nsecond \\u2192\n"


def test_other_streams_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    own = io.StringIO()
    monkeypatch.setattr("sys.stdout", own)
    with surviving_streams():
        assert sys.stdout is own
        output_is_incidental()
        print("x")
    assert own.getvalue() == "x\n"
