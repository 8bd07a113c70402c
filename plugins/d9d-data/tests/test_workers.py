"""Worker processes start slowly, so few tests start any."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.data import DataContext
from d9d_core.errors import TrainingError
from d9d_data.config import DocumentsConfig, TextConfig
from d9d_data.stream import reader
from d9d_data.stream.base import CorpusStream
from d9d_data.stream.documents import build_documents
from d9d_data.stream.text import build_text
from d9d_engine.run.prefetch import DevicePrefetcher


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def test_a_worker_without_its_training_process_ends_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader takes any other status for a crash."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    reader._end_with_training_process(parent=-1)
    assert statuses == [0]


@pytest.fixture
def open_any(corpus: Path, tmp_path: Path) -> Callable[..., CorpusStream]:
    def build(dataset: str, workers: int, **values: int) -> CorpusStream:
        context = DataContext(
            cache_dir=tmp_path / "cache", **({"seed": 1, "batch_size": 4, "microbatch_size": 2} | values)
        )  # type: ignore[arg-type]
        settings: Any = {"sources": (str(corpus),), "sequence_length": 16, "workers": workers}
        if dataset == "text":
            return build_text(TextConfig(**settings), context)
        return build_documents(DocumentsConfig(**settings), context)

    return build


def plain(pack: Any) -> list[dict[str, Any]]:
    return [{name: tensor.tolist() for name, tensor in microbatch.items()} for microbatch in pack]


@pytest.mark.full
@pytest.mark.parametrize(("dataset", "workers", "prefetch"), [("text", 1, 0), ("documents", 2, 3)])
def test_packs_and_states_do_not_depend_on_workers(open_any: Any, dataset: str, workers: int, prefetch: int) -> None:
    here, stream = open_any(dataset, 0), open_any(dataset, workers)
    generator, handler = torch.get_rng_state(), signal.getsignal(signal.SIGCHLD)

    def compare(packs: int) -> None:
        for _ in range(packs):
            assert plain(there.next()) == plain(here.next_pack())
            assert there.state() == here.state()

    with closing(stream), DevicePrefetcher(stream, torch.device("cpu"), prefetch) as there:
        compare(7)
        processes = set(multiprocessing.active_children())
        assert len(processes) == workers
        later = there.state()
        for state in ({**later, "consumed": 8}, later):  # back, and forward again, with the same processes
            here.load_state(state)
            there.load_state(state)
            compare(3)
        assert set(multiprocessing.active_children()) == processes
        assert torch.equal(torch.get_rng_state(), generator)
        assert signal.getsignal(signal.SIGCHLD) == handler
        # Ctrl-C and a scheduler's SIGTERM reach them too, sent by another process, and are not for them.
        pids = " ".join(str(process.pid) for process in processes)
        subprocess.run(["sh", "-c", f"kill -INT {pids}; kill -TERM {pids}"], check=True)
        compare(9)


@pytest.mark.full
def test_death_of_a_worker_is_an_error_and_not_a_hang(open_any: Any) -> None:
    reference = open_any("text", 0)
    with closing(open_any("text", 1)) as stream:

        def read(packs: int) -> None:
            for _ in range(packs):
                assert plain(stream.next_pack()) == plain(reference.next_pack())

        read(2)
        (process,) = multiprocessing.active_children()
        process.kill()
        process.join()
        # Not an error of the job, after which it would not be restarted.
        with pytest.raises(TrainingError, match=r"data\.workers: a process that builds packs died .*workers: 0'"):
            read(5)  # those that were ready may still come
        assert stream.state() == reference.state()
        read(1)  # by a new process


@pytest.mark.parametrize("dataset", ["text", "documents"])
def test_corpora_travel_to_workers_as_names_of_files(open_any: Any, dataset: str) -> None:
    stream = open_any(dataset, 0)
    stream.next_pack()
    source = stream._reader._source
    sent = bytes(ForkingPickler.dumps(source))
    assert source.samples.corpus.tokens.tobytes() not in sent
    assert source.samples.corpus.starts.tobytes() not in sent
    assert len(sent) < 3000
    copy = ForkingPickler.loads(sent)
    assert (copy.samples.corpus.tokens == source.samples.corpus.tokens).all()
    assert copy.samples.corpus.tokens.filename == source.samples.corpus.tokens.filename
