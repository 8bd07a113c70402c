"""Algorithms of cuBLASLt for the products of feed-forward layers, measured on this GPU, against cuBLAS's defaults.

    python tools/bench/products.py 16384x2048x6144            rows x hidden x features of a layer, as many as you like
    python tools/bench/products.py 16384x2048x6144 --write    and take the choices over into d9d-cublas

Ignores the choices of the user and of the package, so that everything is measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from d9d_cublas.binding import Functions, find_library
from d9d_cublas.choices import SHIPPED, Choice, Choices, Key, read, write
from d9d_cublas.device import DeviceProducts
from d9d_cublas.library import Library
from d9d_cublas.problem import Problem, shape_of, stored_shapes
from d9d_cublas.tuning import Tuner

#: Standard deviations of activations, weights and gradients; zeros would draw less power.
_DEVIATION = {"forward": (1.0, 0.02), "rows_gradient": (0.01, 0.02), "weight_gradient": (0.01, 1.0)}


def problems(rows: int, hidden: int, features: int, dtype: str) -> Iterator[Problem]:
    """Products of a layer; in the backward both the joint and the separate products of gate and up."""
    yield Problem("forward", rows, features, hidden, dtype)
    yield Problem("forward", rows, hidden, features, dtype)
    for layout in ("rows_gradient", "weight_gradient"):
        yield Problem(layout, rows, hidden, features, dtype)
        yield Problem(layout, rows, 2 * features, hidden, dtype)
        yield Problem(layout, rows, features, hidden, dtype)


def measure(products: DeviceProducts, problem: Problem) -> None:
    """Measure a product, and record the choice."""
    shapes, dtype = stored_shapes(problem)[:2], getattr(torch, problem.dtype)
    first, second = (
        torch.randn(shape, device="cuda").mul_(deviation).to(dtype)
        for shape, deviation in zip(shapes, _DEVIATION[problem.layout], strict=True)
    )
    products.multiply(problem.layout, first, second, first.new_empty(shape_of(problem.layout, first, second)))


def line(key: Key, choice: Choice) -> str:
    """Choice as a line of text."""
    problem, (default, chosen) = key.problem, choice.milliseconds or (0.0, 0.0)
    sizes = f"T {problem.rows} N {problem.out_features} K {problem.in_features} {problem.dtype}"
    what = "as cuBLAS guesses"
    if choice.algorithm is not None:
        settings = ", ".join(f"{name} {value}" for name, value in asdict(choice.algorithm).items())
        what = f"{chosen:.4f} ms, {100 * (1 - chosen / default):.1f} % less: {settings}"
    return f"{problem.layout:15} {sizes}: {default:.4f} ms, {problem.operations / default / 1e9:.0f} TFLOP/s; {what}"


def main() -> int:
    """Measure the products of the named layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="+", metavar="ROWSxHIDDENxFEATURES")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--write", action="store_true", help=f"add the choices to {SHIPPED.name} of d9d-cublas")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as directory:
        empty, cache = Path(directory) / "none.json", Path(directory) / "cublas.json"
        write(empty, {})
        library = Library(Functions(find_library()), device)
        products = DeviceProducts(
            library, torch.cuda.get_device_name(device), Choices(cache, empty), Tuner(), smallest=0
        )
        for layer in options.layers:
            rows, hidden, features = map(int, layer.split("x"))
            for problem in problems(rows, hidden, features, options.dtype):
                measure(products, problem)
        found = read(cache)
    print("\n".join(line(key, choice) for key, choice in found.items()))
    if options.write:
        write(SHIPPED, read(SHIPPED) | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
