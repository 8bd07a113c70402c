"""Verdicts on readers of hostile files."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from d9d_core.errors import DataError
from d9d_core.failures import describe
from d9d_testing.hostile.judge import Judge, Verdict, WrongLoad


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """A judge with a directory ``inside``; one for all tests, because its hook stays."""
    made = tmp_path_factory.mktemp("inside")
    with pytest.MonkeyPatch.context() as patch:
        # Modules may lie in a directory that also contains the files of tests.
        patch.setattr(sys, "path", [path for path in sys.path if not made.is_relative_to(path or "absent")])
        judge = Judge(made, seconds=0.2)
    judge.directory = made  # type: ignore[attr-defined]
    return judge


def raising(error: BaseException) -> Callable[[], object]:
    def read() -> object:
        raise error

    return read


def test_a_reader_reads_refuses_or_fails(judge: Judge) -> None:
    assert judge(lambda: 3) == Verdict("read")
    assert judge(raising(DataError("line 1: no"))) == Verdict("refused", "DataError")
    assert judge(raising(WrongLoad("step 3"))) == Verdict("wrong", "step 3")
    found = judge(raising(ValueError("x" * 200)))
    assert found.kind == "traceback"
    assert found.about.startswith("ValueError: test_judge.py:")
    assert found.about.endswith(repr("x" * 80))
    with pytest.raises(KeyboardInterrupt):
        judge(raising(KeyboardInterrupt()))
    sound = {kind: Verdict(kind).is_sound for kind in ("refused", "read", "traceback", "hang", "outside", "wrong")}  # type: ignore[arg-type]
    assert [kind for kind, is_sound in sound.items() if is_sound] == ["refused", "read"]


def test_an_error_has_to_be_printable_and_short(judge: Judge) -> None:
    most = 10_000 - len(describe(DataError("x"))) + 1  # without what stands before the text
    assert judge(raising(DataError("x" * most))).kind == "refused"
    found = judge(raising(DataError("x" * (most + 1))))
    assert found.kind == "traceback"
    assert found.about.startswith("DataError of 10001 characters: test_judge.py:")

    class Unprintable(DataError):
        def __str__(self) -> str:
            raise ValueError

    assert judge(raising(Unprintable("x"))).about.startswith("ValueError while Unprintable is printed: test_judge.py:")


@pytest.mark.thorough
def test_a_reader_without_an_end_hangs_and_the_timers_stop(judge: Judge) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGPROF, signal.SIGALRM)]

    def endless() -> None:
        while True:
            pass

    assert judge(endless).kind == "hang"
    assert [signal.getsignal(number) for number in (signal.SIGPROF, signal.SIGALRM)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert judge(lambda: time.sleep(0.3)).kind == "read"  # waits, but not for five times as long
    assert judge(lambda: time.sleep(2)).kind == "hang"


def test_files_outside_are_neither_read_nor_written(judge: Judge, tmp_path: Path) -> None:
    inside: Path = judge.directory  # type: ignore[attr-defined]
    outside = tmp_path / "outside"
    outside.write_text("secret")
    (inside / "file").write_text("mine")
    (inside / "link").symlink_to(outside)
    assert judge((inside / "file").read_text).kind == "read"
    assert judge(lambda: (inside / "new").write_text("x")).kind == "read"
    assert judge(outside.read_text) == Verdict("outside", str(outside))
    assert judge((inside / "link").read_text) == Verdict("outside", str(outside))
    assert judge(lambda: (tmp_path / "new").write_text("x")) == Verdict("outside", str(tmp_path / "new"))

    def refused() -> None:
        outside.read_text()
        raise DataError("no")

    assert judge(refused).kind == "outside"

    def carefully() -> None:
        with pytest.raises(OSError, match="symbolic|Too many"):
            os.open(inside / "link", os.O_RDONLY | os.O_NOFOLLOW)

    assert judge(carefully).kind == "read"
    beside = inside.with_name(f"{inside.name}-beside")
    beside.mkdir()
    (beside / "file").write_text("x")
    assert judge((beside / "file").read_text).kind == "outside"


@pytest.mark.parametrize(
    ("event", "place", "flags", "noted"),
    [
        ("open", "inside/file", os.O_RDONLY, False), ("open", "inside", os.O_WRONLY, False),
        ("open", "outside/file", os.O_RDONLY, True), ("open", "outside/file", None, True),
        ("open", "outside/file", os.O_RDONLY | os.O_NOFOLLOW, True), ("compile", "outside/file", os.O_RDONLY, False),
        ("open", "outside/absent", os.O_RDONLY, False), ("open", "outside/absent", os.O_WRONLY, True),
        ("open", "outside/absent", os.O_RDWR | os.O_CREAT, True), ("open", "outside", os.O_RDONLY, False),
        ("open", "inside-too/file", os.O_RDONLY, True), ("open", "inside/link", os.O_RDONLY, True),
        ("open", "inside/link", os.O_RDONLY | os.O_NOFOLLOW, False), ("open", "inside/pipe", os.O_RDONLY, False),
        ("open", "outside/pipe", os.O_RDONLY, False), ("open", "outside/pipe", os.O_WRONLY, True),
    ],
)  # fmt: skip
def test_each_way_to_open_a_file_is_judged_by_its_place(
    event: str, place: str, flags: int | None, noted: bool, tmp_path: Path
) -> None:
    for folder in ("inside", "outside", "inside-too"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("x")
        os.mkfifo(tmp_path / folder / "pipe")
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "outside" / "file")
    path = tmp_path / place
    for form in (str, os.fsencode, Path):
        own = SimpleNamespace(_touched=[], _inside=(str(tmp_path / "inside"),))
        Judge._on_event(own, event, (form(path), "r", flags))  # type: ignore[arg-type]
        assert own._touched == ([os.path.realpath(path)] if noted else [])
        Judge._on_event(own, "open", (3, "r", os.O_WRONLY))  # type: ignore[arg-type]
        assert len(own._touched) == noted
    idle = SimpleNamespace(_touched=None, _inside=())
    Judge._on_event(idle, "open", (str(path), "r", os.O_WRONLY))  # type: ignore[arg-type]
    assert idle._touched is None
