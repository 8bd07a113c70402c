"""Speed of reading a model directory, compared with plain reads of the same bytes.

    python tools/bench/read_model.py                       (8 GiB)
    python tools/bench/read_model.py --gib 0.1 --rounds 1  (a smoke run)

A model of the given size is written, in bfloat16 and in shards. Then two readers take turns, each time in a process of
its own, so that both pay for fresh memory: ``readinto`` of the files one after the other into one buffer, and
ModelDirectory into a tensor for each entry. Both find the files in the page cache if they fit there; with ``--cold``
the kernel is asked to drop them before each turn. Rates count opening and checking the files, but no imports.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from d9d_core.types import TensorSpec
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.writer import ModelWriter

GIB = 1 << 30
#: Tensors of a layer, as in a model of 8e9 parameters: wide matrices, narrow matrices and vectors.
SHAPES = {"up": (12288, 4096), "gate": (12288, 4096), "down": (4096, 12288), "q": (4096, 4096), "o": (4096, 4096),
          "k": (1024, 4096), "v": (1024, 4096), "norm": (4096,), "q_norm": (128,), "k_norm": (128,)}  # fmt: skip


def write_model(directory: Path, size: float, shard_bytes: int) -> None:
    """Write layers until the size in bytes is reached or slightly exceeded."""
    specs: dict[str, TensorSpec] = {}
    while sum(2 * torch.Size(spec.shape).numel() for spec in specs.values()) < size:
        layer = len(specs) // len(SHAPES)
        specs |= {f"layers.{layer}.{name}": TensorSpec(shape, torch.bfloat16) for name, shape in SHAPES.items()}
    source = {shape: torch.randn(shape, dtype=torch.bfloat16) for shape in SHAPES.values()}
    writer = ModelWriter(directory, specs, shard_bytes)
    writer.start()
    for file in writer.files:
        with writer.open_shard(file) as shard:
            for name, spec in writer.tensors_of(file).items():
                shard.write(name, source[spec.shape])
    writer.publish({}, {})


def read_plainly(directory: Path) -> int:
    """Read all files, one after the other, into one new buffer; return the bytes."""
    paths = sorted(directory.glob("*.safetensors"))
    buffer = torch.empty(sum(path.stat().st_size for path in paths), dtype=torch.uint8)
    view = buffer.numpy().data
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(view):
                view = view[count:]
    return buffer.nbytes


def read_model(directory: Path, threads: int) -> int:
    """Read all tensors, each into a new tensor; return the bytes."""
    with ModelDirectory.open(directory) as model, ThreadPoolExecutor(threads) as pool:

        def read(name: str) -> torch.Tensor:
            tensor = torch.empty(model.specs[name].shape, dtype=model.specs[name].dtype)
            model.read(name, (0,) * tensor.ndim, tensor)
            return tensor

        return sum(tensor.nbytes for tensor in list(pool.map(read, model.specs)))


def peak_memory() -> int:
    """Peak memory of this process in bytes. Unlike ``ru_maxrss``, excludes the parent process's memory before exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure(reader: str, directory: Path, threads: int) -> None:
    """Run one measurement: print the rate and the process's peak memory in excess of its imports."""
    before = peak_memory()
    start = time.perf_counter()
    size = read_plainly(directory) if reader == "plain" else read_model(directory, threads)
    rate = size / GIB / (time.perf_counter() - start)
    print(json.dumps({"rate": rate, "memory": (peak_memory() - before) / GIB, "size": size / GIB}))


def turn(reader: str, directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """Run one measurement in a separate process."""
    if options.cold:
        for path in directory.glob("*.safetensors"):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    command = [sys.executable, __file__, "--measure", reader, "--directory", str(directory)]
    done = subprocess.run([*command, "--threads", str(options.threads)], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Write the model, measure in turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8, help="size of the model (default 8)")
    parser.add_argument("--threads", type=int, default=4, help="that read the model (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each reader (default 5)")
    parser.add_argument("--shard-gib", type=float, default=1, help="size of a shard (default 1)")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each turn")
    parser.add_argument("--directory", type=Path, help="where the model is written (default: a temporary one)")
    parser.add_argument("--measure", choices=["plain", "model"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.directory, options.threads)
        return
    place = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        write_model(place / "model", options.gib * GIB, int(options.shard_gib * GIB))
        # Alternate the order.
        orders = [("plain", "model"), ("model", "plain")] * options.rounds
        rounds = [{r: turn(r, place / "model", options) for r in order} for order in orders[: options.rounds]]
    finally:
        shutil.rmtree(place)
    rates = {reader: [found[reader]["rate"] for found in rounds] for reader in ("plain", "model")}
    ratio = statistics.median(found["model"]["rate"] / found["plain"]["rate"] for found in rounds)
    cache = "dropped from the page cache" if options.cold else "in the page cache as far as they fit"
    print(f"{rounds[0]['model']['size']:.2f} GiB, {os.cpu_count()} cores, torch {torch.__version__}, files {cache}")
    for reader, what in (("plain", "readinto, 1 thread"), ("model", f"ModelDirectory, {options.threads} threads")):
        spread = f"{min(rates[reader]):.2f} to {max(rates[reader]):.2f}"
        memory = max(found[reader]["memory"] for found in rounds)
        print(f"{what:28} {statistics.median(rates[reader]):6.2f} GiB/s ({spread}), peak memory {memory:.2f} GiB")
    print(f"{'ratio, median of the rounds':28} {ratio:6.2f}")


if __name__ == "__main__":
    main()
