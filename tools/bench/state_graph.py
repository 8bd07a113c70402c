"""How long state graphs take to build, bind and apply: is it linear in the number of tensors?

python tools/bench/state_graph.py            (1,000 to 10,000 tensors)
python tools/bench/state_graph.py --most 100000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from d9d_core.types import TensorSpec
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.compose import Prefix
from d9d_weights.graph.graph import StateGraph
from d9d_weights.graph.mappers import Rename, Transpose
from d9d_weights.graph.merging import Concatenate, Stack

#: Number of tensors in a layer.
WIDTH = 10


def by_patterns() -> Mapper:
    """Mapper with one rename for each kind of tensor."""
    return Parallel(*(Rename(f"model.layers.{{layer}}.t{i}", f"layers.{{layer}}.u{i}") for i in range(WIDTH)))


def by_layer(layers: int) -> Mapper:
    """Mapper with separate entries for every layer, with merged and transposed tensors."""
    layer = Parallel(
        Concatenate(["t0", "t1"], "ffn") >> Transpose("ffn"),
        Stack(["t2", "t3", "t4"], "bank"),
        *(Rename(f"t{i}", f"u{i}") for i in range(5, WIDTH)),
    )
    return Parallel(*(Prefix(f"model.layers.{n}.", f"layers.{n}.", layer) for n in range(layers)))


def timed(action: Callable[[], object]) -> float:
    """Seconds of a call, the best of three."""
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - started)
    return best


def measure(count: int) -> tuple[float, float, float, float]:
    """Seconds for about the given number of tensors: bind by patterns, bind by layers, apply, invert and bind."""
    layers = count // WIDTH
    specs = {f"model.layers.{n}.t{i}": TensorSpec((4, 4), torch.float32) for n in range(layers) for i in range(WIDTH)}
    tensors = {name: torch.zeros(4, 4) for name in specs}
    graph = StateGraph(by_layer(layers), specs)
    return (
        timed(lambda: StateGraph(by_patterns(), specs).groups),
        timed(lambda: StateGraph(by_layer(layers), specs).groups),
        timed(lambda: graph.apply(tensors)),
        timed(lambda: StateGraph(by_layer(layers).inverse(), graph.specs).groups),
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=10_000, help="tensors")
    most = parser.parse_args().most
    titles = ("patterns: bind and group", "layers: bind and group", "apply", "invert and bind")
    print(f"{'tensors':>8}" + "".join(f"{title:>{len(title) + 4}}" for title in titles))
    for count in (most // 10, most // 3, most):
        seconds = measure(count)
        shown = count // WIDTH * WIDTH
        print(f"{shown:8}" + "".join(f"{s:{len(t) + 2}.3f} s" for s, t in zip(seconds, titles, strict=True)))


if __name__ == "__main__":
    main()
