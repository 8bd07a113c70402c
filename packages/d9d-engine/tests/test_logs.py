"""Log lines of ranks."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from d9d_engine.distributed.logs import log_lines, rank_logger
from d9d_engine.distributed.mesh import Topology
from d9d_engine.job import Job

MakeJob = Callable[..., Job]


@contextmanager
def configured(*handlers: logging.Handler) -> Iterator[None]:
    """Program with these handlers and no others, which pytest has."""
    root = logging.getLogger()
    kept, root.handlers = root.handlers, list(handlers)
    try:
        yield
        assert not logging.getLogger("d9d").handlers
        assert logging.getLogger("d9d").level == logging.NOTSET
    finally:
        root.handlers = kept


def of_rank(rank: int) -> Topology:
    sizes: dict[str, Any] = {**Topology().sizes, "dp_shard": 2, "pp": 2}
    return Topology(sizes=sizes, rank=rank, world_size=4)


@configured()
def test_lines_begin_with_the_rank_and_its_coordinate(capsys: pytest.CaptureFixture[str]) -> None:
    with log_lines("debug", is_main=False):
        rank_logger("mine", of_rank(3)).debug("sharded %d tensors, 100%% of them", 12)
    expected = "DEBUG d9d.mine: rank 3 (pp=1, dp_shard=1): sharded 12 tensors, 100% of them\n"
    assert capsys.readouterr().err == expected


@configured()
@pytest.mark.parametrize(("is_main", "shown"), [(True, ["one", "two"]), (False, ["two"])])
def test_other_ranks_print_warnings_only(capsys: pytest.CaptureFixture[str], is_main: bool, shown: list[str]) -> None:
    with log_lines(None, is_main):
        log = rank_logger("mine", Topology())
        log.debug("none")
        log.info("one")
        log.warning("two")
    assert [line.split(": ")[-1] for line in capsys.readouterr().err.splitlines()] == shown


def test_a_program_that_has_configured_logging_gets_the_lines_itself(capsys: pytest.CaptureFixture[str]) -> None:
    taken: list[logging.LogRecord] = []

    class Own(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            taken.append(record)

    with configured(Own()), log_lines("info", is_main=True):
        rank_logger("mine", Topology()).info("once")
    assert [record.getMessage() for record in taken] == ["rank 0: once"]
    assert capsys.readouterr().err == ""


@configured()
def test_the_job_says_which_lines_are_printed(job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    with job("logging.level=error").joined() as topology:
        rank_logger("mine", topology).warning("hidden")
        rank_logger("mine", topology).error("shown")
    assert capsys.readouterr().err == "ERROR d9d.mine: rank 0: shown\n"


@pytest.mark.thorough
def test_importing_the_engine_configures_no_logging() -> None:
    code = "import logging, d9d_engine.job, d9d_engine.distributed.logs; print(logging.getLogger('d9d').hasHandlers())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
