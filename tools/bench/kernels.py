"""Kernels of d9d-triton, each against the device's limit: the bandwidth of a copy, or plain matrix products.

    python tools/bench/kernels.py                            an H200, in a minute and a half at most
    python tools/bench/kernels.py --parts ops loss --tokens 16384 --loss-tokens 16384
    python tools/bench/kernels.py --tiny                     the whole bench on a CPU, by Triton's interpreter
    python tools/bench/kernels.py --tables                   only the table of benchmarks/README.md, from its files

Bytes are the minimum that an op must read and write, not the actual number; the copy is measured in the same
run, before and after. The loss is compared with its three products, and a whole block of Qwen3 is measured as it is
written, with the kernels, and compiled. The result goes into ``benchmarks/`` and, from there, into its page.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import records
import torch

#: Key that identifies results of this benchmark.
KIND = "kernels"
MARKS = ("<!-- kernels: written by tools/bench/kernels.py -->", "<!-- end of kernels -->")
NONE_YET = "No kernel has been measured by this command yet."
_NUMBERS = ("ms", "GB, at least", "of a copy's speed")
_OF_LOSS = ("backend", "ms", "times the products it needs", "GiB beyond inputs and gradients")
PARTS = ("ops", "loss", "optimizers", "block")


def main() -> None:
    """Measure, print, and write the result."""
    options = _options()
    folder: Path = options.folder
    if not options.tables:
        if options.tiny:
            os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported
        result = measure(options)
        print(text_of([result]))
        _say(f"written: {records.write(result, folder)}")
    page = folder / "README.md"
    if page.exists():
        filled = records.fill(page.read_text(encoding="utf-8"), text_of(records.read(folder, KIND)), MARKS)
        page.write_text(filled, encoding="utf-8")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All measurements, as JSON values."""
    import kernel_parts as parts
    from kernel_block import measure_block

    names = [field.name for field in dataclasses.fields(parts.Sizes)]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    sizes = dataclasses.replace(parts.TINY if options.tiny else parts.Sizes(), **given)
    torch.manual_seed(0)
    bench = parts.Bench(sizes, "cpu" if options.tiny or not torch.cuda.is_available() else "cuda")
    if not bench.is_gpu and not options.tiny:
        raise SystemExit("there is no CUDA device; --tiny tries the bench on a CPU")
    began = time.perf_counter()
    rates = [bench.copy_rate()]
    bench.clean()
    found: dict[str, Any] = {}
    for name, run in (
        ("ops", lambda: parts.measure_ops(bench, rates[0])),
        ("loss", lambda: parts.measure_loss(bench)),
        ("optimizers", lambda: parts.measure_optimizers(bench, rates[0])),
        ("block", lambda: measure_block(bench)),
    ):
        if name in options.parts:
            found[name] = run()
            bench.clean()
            _say(f"{name}: measured after {time.perf_counter() - began:.0f} s")
    rates.append(bench.copy_rate())
    return {
        "table": "kernels",
        "taken": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": " ".join(["python tools/bench/kernels.py", *sys.argv[1:]]),
        "commit": records.commit(),
        "hardware": _hardware(),
        "sizes": dataclasses.asdict(sizes),
        "copy_tbps": rates,
        "seconds": round(time.perf_counter() - began, 1),
        KIND: found,
    }


def text_of(results: Sequence[Mapping[str, Any]]) -> str:
    """All tables."""
    return "\n\n".join(map(_section, results)) or NONE_YET


def _section(result: Mapping[str, Any]) -> str:
    found, rates = result[KIND], result["copy_tbps"]
    copies = " and ".join(f"{rate:.2f}" for rate in rates)
    lines = [
        f"### Kernels: {result['hardware']['device']}",
        "",
        f"bfloat16; {records.origin(result)}. A copy moves {copies} TB/s, before and after the measurements.",
    ]
    if rows := found.get("ops"):
        names = ("op", "shape", "pass", "backend")
        lines += ["", *records.table((*names, *_NUMBERS), [_row(row, names) for row in rows])]
    if rows := found.get("optimizers"):
        lines += ["", *records.table(("step", "shape", *_NUMBERS), [_row(row, ("op", "shape")) for row in rows])]
    if loss := found.get("loss"):
        text = f"Output projection and loss, {loss['shape']}, forward and backward; its three products alone take"
        lines += ["", f"{text} {loss['products_ms']:.1f} ms:", ""]
        lines += records.table(_OF_LOSS, [_loss_row(row) for row in loss["backends"]])
    if block := found.get("block"):
        lines += ["", f"A block of Qwen3, {block['shape']}, forward and backward:", ""]
        lines += records.table(("block", "ms"), [[name, f"{ms:.2f}"] for name, ms in block["ms"].items()])
    return "\n".join(lines)


def _row(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    numbers = f"{row['ms']:.3f}", f"{row['gigabytes']:.2f}", f"{row['share_of_copy']:.0%}"
    return [*(str(row[name]) for name in names), *numbers]


def _loss_row(row: Mapping[str, Any]) -> list[str]:
    memory = f"{row['extra_gib']:.2f}" if "extra_gib" in row else ""
    return [row["backend"], f"{row['ms']:.1f}", f"{row['times_products']:.2f}", memory]


def _hardware() -> dict[str, Any]:
    import triton

    machine = records.hardware()
    machine["versions"]["triton"] = triton.__version__
    return machine


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    for name in ("tokens", "length", "hidden", "feed_forward", "heads", "key_heads", "head_size", "experts", "chosen",
                 "loss_tokens", "words", "samples"):  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--billions", type=float, help="parameters of an optimizer's step")
    parser.add_argument("--copy-gib", type=float, help="size of the copy")
    parser.add_argument("--folder", type=Path, default=records.BENCHMARKS, help="where the results are")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU: tries the bench, measures nothing")
    parser.add_argument("--tables", action="store_true", help="only write the tables of the results that are there")
    options = parser.parse_args()
    if options.tiny and options.folder == records.BENCHMARKS:
        options.folder = Path("runs", "kernels-tiny")  # the numbers of tiny runs are meaningless
    return options


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
