"""The world fixture on real gloo processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_testing.world import RankFailedError, RankHungError, World
from torch import distributed as dist

pytestmark = [pytest.mark.smoke, pytest.mark.thorough]


def rank_and_sum(values: torch.Tensor) -> dict[str, Any]:
    mine = values * (dist.get_rank() + 1)
    dist.all_reduce(mine)
    return {"rank": dist.get_rank(), "size": dist.get_world_size(), "sum": mine}


def environment(names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names] + [str(Path.cwd())]


def overwrite(shared: torch.Tensor) -> torch.Tensor:
    before = shared.clone()
    dist.barrier()
    shared.fill_(dist.get_rank())
    dist.barrier()
    return before + shared


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"a precise reason on {rank}")
    dist.barrier()


def fail_everywhere() -> None:
    raise ValueError("the same everywhere")


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        sleep_for_ever()
    dist.barrier()


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def die(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def return_an_object() -> dict[str, Any]:
    return {"model": [torch.nn.Linear(1, 1)]}


class Holder:
    @staticmethod
    def identity(value: int) -> int:
        return value


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_a_process_group_and_return_by_rank(world: type[World], size: int) -> None:
    start = time.perf_counter()
    results = world(size).run(rank_and_sum, torch.arange(3, dtype=torch.bfloat16))
    print(f"world({size}): {time.perf_counter() - start:.2f} s")
    total = size * (size + 1) // 2
    for rank, result in enumerate(results):
        assert result["rank"] == rank
        assert result["size"] == size
        torch.testing.assert_close(result["sum"], total * torch.arange(3, dtype=torch.bfloat16), rtol=0, atol=0)


def test_ranks_see_the_environment_and_the_directory_of_the_test(
    world: type[World], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world(1).run(environment, [])  # the server runs from here on, with the environment it was started in
    monkeypatch.setenv("D9D_WORLD_TEST", "set by the test")
    monkeypatch.chdir(tmp_path)
    names = ["D9D_WORLD_TEST", "RANK", "WORLD_SIZE", "LOCAL_RANK"]
    assert world(2).run(environment, names) == [
        ["set by the test", "0", "2", "0", str(tmp_path)],
        ["set by the test", "1", "2", "1", str(tmp_path)],
    ]


def test_tensor_arguments_are_copies(world: type[World]) -> None:
    shared = torch.full((2,), 10.0)
    first, second = world(2).run(overwrite, shared)
    assert first.tolist() == [10.0, 10.0]
    assert second.tolist() == [11.0, 11.0]
    assert shared.tolist() == [10.0, 10.0]


def test_static_methods_and_keywords_travel(world: type[World]) -> None:
    assert world(1).run(Holder.identity, value=7) == [7]


@pytest.mark.parametrize("size", [2, 4])
def test_a_failing_rank_is_named_with_its_traceback_while_others_wait_for_it(world: type[World], size: int) -> None:
    with pytest.raises(RankFailedError) as caught:
        world(size).run(fail_on, size - 1)
    text = str(caught.value)
    assert text.startswith(f"1 of {size} ranks failed in fail_on\n\n--- rank {size - 1} ---\nTraceback")
    assert 'in fail_on\n    raise ValueError(f"a precise reason on {rank}")' in text
    assert f"ValueError: a precise reason on {size - 1}" in text
    assert set(caught.value.reports) == {size - 1}


def test_equal_failures_are_shown_once(world: type[World]) -> None:
    with pytest.raises(RankFailedError) as caught:
        world(4).run(fail_everywhere)
    assert "4 of 4 ranks failed" in str(caught.value)
    assert "--- ranks 0, 1, 2, 3 ---" in str(caught.value)
    assert str(caught.value).count("the same everywhere") == 2  # the source line and the message


@pytest.mark.parametrize("size", [2, 4])
def test_a_hanging_rank_is_reported_with_the_stack_of_every_rank(world: type[World], size: int) -> None:
    with pytest.raises(RankHungError) as caught:
        world(size, timeout=1.5).run(hang_on, 0)
    assert str(caught.value).startswith(f"{size} of {size} ranks did not return from hang_on in 1.5 s")
    assert "in sleep_for_ever" in caught.value.reports[0]
    for rank in range(1, size):
        assert "in barrier" in caught.value.reports[rank]
        assert "in hang_on" in caught.value.reports[rank]


def test_ranks_that_returned_are_told_apart_from_hanging_ones(world: type[World]) -> None:
    with pytest.raises(RankHungError) as caught:
        world(2, timeout=1.0).run(hang_alone)
    assert caught.value.reports[0] == "returned"
    assert "in sleep_for_ever" in caught.value.reports[1]


def hang_alone() -> None:
    if dist.get_rank() == 1:
        sleep_for_ever()


@pytest.mark.parametrize(("how", "cause"), [("exit", "exit status 3"), ("kill", "signal SIGKILL")])
def test_a_dead_process_is_reported_with_its_cause(world: type[World], how: str, cause: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        world(2).run(die, how)
    assert caught.value.reports[1] == f"the process died: {cause}"


def test_a_result_that_is_no_plain_data_is_an_error_that_says_where(world: type[World]) -> None:
    with pytest.raises(RankFailedError, match=r"the returned value\['model'\]\[0\] is a torch.nn.*Linear"):
        world(1).run(return_an_object)


def test_functions_without_a_global_name_are_refused(world: type[World]) -> None:
    def nested() -> None:
        pass

    for function in (nested, lambda: None):
        with pytest.raises(TypeError, match="define it at the top of a module"):
            world(1).run(function)


def open_files() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir()) if sys.platform == "linux" else set()


def test_nothing_is_left_behind(world: type[World], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world(1).run(fail_on, 1)  # starts the server, which stays until the tests end
    gc.collect()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environ, threads, files = dict(os.environ), threading.enumerate(), open_files()
    world(2).run(rank_and_sum, torch.ones(1))
    with pytest.raises(RankFailedError):
        world(2).run(fail_on, 0)
    with pytest.raises(RankHungError):
        world(2, timeout=0.5).run(hang_on, 0)
    assert multiprocessing.active_children() == []
    assert threading.enumerate() == threads
    assert dict(os.environ) == environ
    assert open_files() == files
    assert list(tmp_path.iterdir()) == []
    assert not dist.is_initialized()
