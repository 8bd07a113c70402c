"""Training time that a checkpoint costs: d9d's asynchronous save against torch's, in one run.

    python tools/bench/checkpoint_stall.py                                        (one process)
    torchrun --nproc-per-node 8 tools/bench/checkpoint_stall.py --parameters 8e9  (sharded over all GPUs)
    python tools/bench/checkpoint_stall.py --device cpu --parameters 1e6 --products 4 --size 256    (a smoke run)

A step is a row of matrix products and an update of every parameter and moment in place, as a fused optimizer makes it.
A save begins after a step; then the given number of steps runs on. The added time of a save is how much longer these
steps take, from before the save to the end of the last one, than the same steps without a save. The checkpoint is
written in the background meanwhile; time of the writing after the last step is no stall and is not counted. A chip
that rested during the writing is cooler and faster, so the same number of steps runs before each measurement. The
first row of the table saves nothing and shows the noise.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.gc import built_objects_spared
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

#: Width of a weight matrix; the model has many of them, with small vectors in between.
WIDTH = 4096


class Training:
    """Training state to save, and the step that changes it.

    Args:
        options: options of the command line.
        device: device of the training state.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.device = device
        self.tensors = dict(_tensors(options, device))
        self._local = [t.to_local() if isinstance(t, DTensor) else t for t in self.tensors.values()]
        self._products = options.products
        dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
        self._matrix = torch.randn(options.size, options.size, device=device, dtype=dtype) / math.sqrt(options.size)

    def step(self, before_update: Callable[[], None]) -> None:
        """Launch the matrix products, then the update; does not synchronise."""
        for _ in range(self._products):
            self._matrix = self._matrix @ self._matrix
            self._matrix /= self._matrix.norm()
        before_update()
        torch._foreach_mul_(self._local, 1.0001)  # like fused optimizers

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def _tensors(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    count, width = int(options.parameters), WIDTH if options.parameters >= 1e8 else 128
    for slot in ("model", "optimizer/first", "optimizer/second"):
        dtype = torch.bfloat16 if slot == "model" else getattr(torch, options.moments)
        for index in range(max(1, count // width**2)):
            for name, shape in (("matrix", (width, width)), ("norm", (width,))):
                local = torch.ones(shape[0] // ranks, *shape[1:], dtype=dtype, device=device)
                yield f"{slot}/{index}/{name}", DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


class Nothing:
    """Baseline without any save."""

    def save(self, step: int) -> None:
        """Do nothing."""

    def before_update(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""


class Ours:
    """``CheckpointStore`` with ``asynchronous=True``."""

    def __init__(self, training: Training, directory: Path) -> None:
        self._tensors = training.tensors
        topology = Topology(rank=dist.get_rank(), world_size=dist.get_world_size(), device=training.device)
        self._store = CheckpointStore(directory, 1, topology, asynchronous=True)
        self._store.reserve(self._tensors)
        self.before_update = self._store.before_mutation

    def save(self, step: int) -> None:
        """Start an asynchronous save."""
        self._store.save(step, self._tensors, {}, {})

    def wait(self) -> None:
        """Wait until the checkpoint exists."""
        self._store.wait()


class Torchs:
    """``torch.distributed.checkpoint.async_save``.

    Args:
        training: training state to save.
        directory: directory of the checkpoints.
        pinned: copy to pinned memory, in a thread; by default torch copies at once, to ordinary memory.
    """

    def __init__(self, training: Training, directory: Path, pinned: bool) -> None:
        self._tensors = training.tensors
        self._directory = directory
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        cuda = pinned and training.device.type == "cuda"
        self._stager = DefaultStager(StagingOptions(cuda, False, cuda, cuda)) if pinned else None
        self._staged: Callable[[], object] = lambda: None
        self._written: Callable[[], object] = lambda: None

    def save(self, step: int) -> None:
        """Start an asynchronous save."""
        shutil.rmtree(self._directory / f"{step - 1}", ignore_errors=True)
        answer = async_save(
            dict(self._tensors),
            checkpoint_id=self._directory / f"{step}",
            process_group=self._group,
            async_stager=self._stager,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged, self._written = answer.staging_completion.result, answer.upload_completion.result
        else:
            self._written = answer.result

    def before_update(self) -> None:
        """Wait on the host until torch's copies are complete: the update would overwrite the originals."""
        self._staged()
        self._staged = lambda: None

    def wait(self) -> None:
        """Wait until the checkpoint exists."""
        self._written()


def measure(
    training: Training, saver: Nothing | Ours | Torchs, options: argparse.Namespace
) -> tuple[float, float, float]:
    """Seconds: added by a save, waited inside the call, and from the call until the checkpoint exists."""
    added, called, written = [], [], []
    for number in range(1, options.saves + 2):
        _timed(training, lambda: None, options.steps)
        plain = _timed(training, lambda: None, options.steps)[0]
        dist.barrier()
        begin = time.perf_counter()
        total, call = _timed(training, saver.before_update, options.steps, lambda: saver.save(number))  # noqa: B023
        saver.wait()
        if number > 1:  # the first save allocates its buffers
            added.append(total - plain)
            called.append(call)
            written.append(time.perf_counter() - begin)
    return statistics.median(added), statistics.median(called), statistics.median(written)


def _timed(
    training: Training, before_update: Callable[[], None], steps: int, save: Callable[[], None] = lambda: None
) -> tuple[float, float]:
    """Seconds for the save and the steps together, and for the call of the save alone."""
    training.finish()
    begin = time.perf_counter()
    save()
    called = time.perf_counter() - begin
    for _ in range(steps):
        training.step(before_update)
    training.finish()
    return time.perf_counter() - begin, called


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Process group from torchrun's environment, or of this process alone."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29577")):
        os.environ.setdefault(name, value)
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=2e9, help="in bfloat16, over all ranks")
    parser.add_argument("--moments", default="bfloat16", help="number format of the two moments")
    parser.add_argument("--steps", type=int, default=20, help="after each save")
    parser.add_argument("--saves", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--products", type=int, default=300, help="matrix products per step")
    parser.add_argument("--size", type=int, default=8192, help="of the matrices")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--directory", type=Path, default=None, help="seen by all ranks; a temporary one by default")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # torch's own savers emit warnings
    with process_group(options.device), built_objects_spared():  # like the trainer
        run(options)


def run(options: argparse.Namespace) -> None:
    """Measure and print a table; collective over all ranks."""
    place = [str(options.directory or tempfile.mkdtemp(prefix="checkpoint-stall-"))]
    dist.broadcast_object_list(place)
    directory, is_main = Path(place[0]), dist.get_rank() == 0
    training = Training(options, torch.device(options.device))
    _timed(training, lambda: None, 3)
    step = _timed(training, lambda: None, options.steps)[0] / options.steps
    size = sum(t.numel() * t.itemsize for t in training.tensors.values())
    chip = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU"
    if is_main:
        print(f"{dist.get_world_size()} x {chip}, torch {torch.__version__}, {size / 1e9:.2f} GB of state in")
        print(f"{len(training.tensors)} tensors; a step takes {step * 1e3:.0f} ms; {options.steps} steps after a save")
        print(f"{'':26}{'added by a save':>17}{'of a step':>11}{'in the call':>13}{'until it exists':>17}")
    results = {}
    makers: dict[str, Callable[[], Nothing | Ours | Torchs]] = {
        "nothing": Nothing,
        "d9d": lambda: Ours(training, directory / "ours"),
        "torch async_save": lambda: Torchs(training, directory / "torch", pinned=False),
        "torch async_save, pinned": lambda: Torchs(training, directory / "pinned", pinned=True),
    }
    for name, make in makers.items():
        try:
            added, called, written = measure(training, make(), options)
        except (KeyError, RuntimeError) as error:  # torch 2.11 cannot copy every DTensor to pinned memory
            if is_main:
                print(f"{name:26} failed: {type(error).__name__} {error}")
            continue
        results[name] = added
        if is_main:
            shutil.rmtree(directory, ignore_errors=True)
            print(f"{name:26}{added * 1e3:14.1f} ms{added / step:11.1%}{called * 1e3:10.1f} ms{written:15.1f} s")
        dist.barrier()
    if is_main:
        ratios = [f"{results['d9d'] / max(added, 1e-9):.3f} of {name}'s" for name, added in results.items()][2:]
        print(f"the time that d9d adds is {' and '.join(ratios)}")


if __name__ == "__main__":
    main()
