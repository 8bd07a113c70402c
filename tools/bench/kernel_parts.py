"""Parts of ``tools/bench/kernels.py``: ops of models, the loss and optimizer steps, each measured."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from optimizer_step import contenders, moved, parameters
from records import GIB
from torch import Tensor

#: Measurements of an op, an optimizer or the loss, as JSON values.
Row = dict[str, Any]
Function = Callable[..., Any]

#: Bytes to fill before a measured call: a millisecond on an H200, longer than the host needs to launch a backward.
FILLED = 4 << 30
#: Smallest and largest number of calls for a median.
FEWEST_CALLS, MOST_CALLS = 5, 100


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of all measurements; the defaults fill an H200.

    Attributes:
        tokens: rows of norms, gates and rotations; half as many are routed to experts.
        length: positions of a sample.
        hidden, feed_forward: features.
        heads, key_heads, head_size: numbers of query heads and of key heads of attention, and features of a head.
        experts, chosen: number of experts of a router, and number of experts of a token.
        loss_tokens, words: tokens and vocabulary entries of the loss.
        billions: parameters that an optimizer's step updates, in billions.
        copy_gib: size of the tensor that is copied for the bandwidth.
        samples: samples of the block, each of ``length`` positions.
    """

    tokens: int = 32_768
    length: int = 4096
    hidden: int = 2048
    feed_forward: int = 6144
    heads: int = 16
    key_heads: int = 8
    head_size: int = 128
    experts: int = 128
    chosen: int = 8
    loss_tokens: int = 8192
    words: int = 151_936
    billions: float = 2.0
    copy_gib: float = 4.0
    samples: int = 4


TINY = Sizes(
    tokens=8, length=4, hidden=16, feed_forward=24, heads=4, key_heads=2, head_size=8, experts=4, chosen=2,
    loss_tokens=8, words=48, billions=1e-6, copy_gib=1e-6, samples=1,
)  # fmt: skip


class Bench:
    """Measurements on one device, in bfloat16.

    Args:
        sizes: sizes of all measurements.
        device: type of the device; times of a CPU are of single calls, which only try the code.
    """

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.sizes = sizes
        self.device = device
        self.is_gpu = device == "cuda"

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
        """Normally distributed leaf tensor."""
        return torch.randn(*shape, device=self.device).to(dtype).requires_grad_(grad)

    def milliseconds(self, run: Callable[[], Any], most: int = 60) -> float:
        """Median time of a call, with the caches of the device emptied before each.

        Args:
            run: call to measure; it must not have been called before.
            most: milliseconds to spend.
        """
        run()  # first call, which compiles
        if self.is_gpu:
            return self._on_gpu(run, most)
        times = []
        for _ in range(2):
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)

    def _on_gpu(self, run: Callable[[], Any], most: int) -> float:
        """Median time on the GPU alone.

        Filling memory empties the caches, and takes longer than the host needs to launch a call. So the speed of Python
        does not affect calls of many small kernels, such as backwards.
        """
        memory = torch.empty(FILLED, dtype=torch.int8, device=self.device)
        times: list[float] = []
        while len(times) < FEWEST_CALLS or (len(times) < MOST_CALLS and sum(times) < most):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            memory.zero_()
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)

    def clean(self) -> None:
        """Free cached memory between measurements."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def copy_rate(self) -> float:
        """Terabytes per second of a copy on the device, read and written."""
        source = torch.empty(max(int(self.sizes.copy_gib * GIB), 1024), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.milliseconds(lambda: target.copy_(source)) / 1e9


@dataclass(frozen=True, slots=True)
class Case:
    """Case of an op.

    Attributes:
        op: name of the op.
        shape: description of the shape.
        backends: name -> function.
        inputs: positional arguments.
        bytes: fewest bytes that a forward, and a backward, must read and write.
    """

    op: str
    shape: str
    backends: Mapping[str, Function]
    inputs: Sequence[Any]
    bytes: tuple[int, int]


def cases(bench: Bench) -> Iterator[Case]:
    """Cases of the ops of models: the references in eager mode, and the kernels."""
    from d9d_moe.dispatch import permutation as moe
    from d9d_nn.ops.add_rms_norm import add_rms_norm as add
    from d9d_nn.ops.normed_rope import normed_rope as place
    from d9d_nn.ops.rms_norm import rms_norm as norm
    from d9d_nn.ops.rope import rope as turn
    from d9d_nn.ops.silu_mul import silu_mul as gate
    from d9d_triton import add_rms_norm, normed_rope, permutation, rms_norm, rope, silu_mul

    s, draw = bench.sizes, bench.draw
    for rows, features in ((s.tokens, s.hidden), (s.tokens * s.heads, s.head_size)):
        size = 2 * rows * features
        yield Case(
            "rms_norm",
            f"{rows} x {features}",
            {"reference": norm, "triton": rms_norm.rms_norm},
            (draw(rows, features), draw(features), 1e-6),
            (2 * size, 3 * size),
        )
    size = 2 * s.tokens * s.hidden
    yield Case(
        "add_rms_norm",
        f"{s.tokens} x {s.hidden}",
        {"reference": add, "triton": add_rms_norm.add_rms_norm},
        (draw(s.tokens, s.hidden), draw(s.tokens, s.hidden), draw(s.hidden), 1e-6),
        (4 * size, 4 * size),
    )
    size = 2 * s.tokens * s.feed_forward
    yield Case(
        "silu_mul",
        f"{s.tokens} x {s.feed_forward}",
        {"reference": gate, "triton": silu_mul.silu_mul},
        (draw(s.tokens, s.feed_forward), draw(s.tokens, s.feed_forward)),
        (3 * size, 5 * size),
    )
    samples = max(1, s.tokens // s.length)
    angle = torch.arange(s.length, device=bench.device)[None, :, None] / 10 ** torch.linspace(
        0, 4, s.head_size // 2, device=bench.device
    )
    size = 2 * samples * s.length * (s.heads + s.key_heads) * s.head_size
    angles = 2 * angle.nbytes  # cosines and sines
    shape = f"{samples} x {s.length}, {s.heads} and {s.key_heads} heads of {s.head_size}"
    heads = [draw(samples, s.length, count, s.head_size) for count in (s.heads, s.key_heads)]
    yield Case(
        "rope",
        shape,
        {"reference": turn, "triton": rope.rope},
        (*heads, angle.cos(), angle.sin()),
        (2 * size + angles, 2 * size + angles),
    )
    weights = [draw(s.head_size) for _ in heads]
    yield Case(
        "normed_rope",
        shape,
        {"reference": place, "triton": normed_rope.normed_rope},
        (*heads, *weights, angle.cos(), angle.sin(), 1e-6),
        (2 * size + angles, 3 * size + angles),
    )
    tokens = s.tokens // 2
    slots, places = _routed(bench, tokens)
    few, many = 2 * tokens * s.hidden, 2 * tokens * s.chosen * s.hidden
    shape = f"{tokens} x {s.hidden}, {s.chosen} of {s.experts} experts"
    yield Case(
        "permute",
        shape,
        {"reference": moe.permute, "triton": permutation.permute},
        (draw(tokens, s.hidden), slots, places),
        (few + many, few + many),
    )
    yield Case(
        "unpermute",
        shape,
        {"reference": moe.unpermute, "triton": permutation.unpermute},
        (draw(tokens * s.chosen, s.hidden), slots, places, draw(tokens, s.chosen, dtype=torch.float32)),
        (few + many, few + 2 * many),
    )


def measure_ops(bench: Bench, rate: float) -> list[Row]:
    """Forward and backward of each case.

    Args:
        bench: measurements on the device.
        rate: bandwidth of a copy, in terabytes per second.
    """
    rows: list[Row] = []
    for case in cases(bench):
        for name, function in case.backends.items():
            with torch.no_grad():
                forward = bench.milliseconds(lambda f=function, c=case: f(*c.inputs))  # type: ignore[misc]
            backward = bench.milliseconds(_backward(function, case.inputs))
            for way, ms, size in (("forward", forward, case.bytes[0]), ("backward", backward, case.bytes[1])):
                rows.append(
                    {"op": case.op, "shape": case.shape, "backend": name, "pass": way, **_share(ms, size, rate)}
                )
        bench.clean()
    return rows


def measure_optimizers(bench: Bench, rate: float) -> list[Row]:
    """Steps of optimizers, each alone, because the states of several would not fit."""
    rows: list[Row] = gradient_norms(bench, rate)
    layer = ((16, 16),) if bench.sizes.billions < 1e-3 else None
    for name, dtype, state, make in contenders():
        named = parameters(bench.sizes.billions, dtype, bench.device, *([layer] if layer else []))
        size = moved(named, state)
        ms = bench.milliseconds(make(named), most=120)
        rows.append({"op": name, "shape": f"{bench.sizes.billions:g} G parameters", **_share(ms, size, rate)})
        del named
        bench.clean()
    return rows


def gradient_norms(bench: Bench, rate: float) -> list[Row]:
    """Measure the sum of squares of all gradients, by torch and by the kernel."""
    from d9d_engine.step.clip import gradient_power
    from d9d_triton.gradient_power import SumOfSquares

    device, count = torch.device(bench.device), max(1, int(bench.sizes.billions * 1e9 / bench.sizes.hidden**2))
    gradients = [bench.draw(bench.sizes.hidden, bench.sizes.hidden, grad=False) for _ in range(count)]
    size = sum(gradient.nbytes for gradient in gradients)
    rows: list[Row] = []
    for name, function in (("torch", partial(gradient_power, p=2.0)), ("triton", SumOfSquares())):
        ms = bench.milliseconds(partial(function, gradients, device))
        shape = f"{bench.sizes.billions:g} G parameters"
        rows.append({"op": f"gradient_power {name}, torch.bfloat16", "shape": shape, **_share(ms, size, rate)})
    del gradients
    bench.clean()
    return rows


def measure_loss(bench: Bench) -> dict[str, Any]:
    """Measure output projection and loss, forward and backward, relative to its three products, with its memory."""
    from d9d_nn.ops.linear_cross_entropy import linear_cross_entropy
    from d9d_triton.linear_cross_entropy.backend import (
        LinearCrossEntropy,
        LinearCrossEntropyByWords,
        LinearCrossEntropyNarrow,
    )

    s = bench.sizes
    hidden, weight = bench.draw(s.loss_tokens, s.hidden), bench.draw(s.words, s.hidden)
    targets = torch.randint(s.words, (s.loss_tokens,), device=bench.device)
    products = _products(bench, hidden.detach(), weight.detach())
    rows: list[Row] = []
    for name, function, frozen in (
        ("reference", linear_cross_entropy, False),
        ("triton", LinearCrossEntropy(), False),
        ("triton_sum", LinearCrossEntropy(ahead=True), False),
        ("triton_sum_narrow", LinearCrossEntropyNarrow(), False),
        ("triton_words", LinearCrossEntropyByWords(), False),
        ("triton, frozen weight", LinearCrossEntropy(), True),
        ("triton_sum_narrow, frozen weight", LinearCrossEntropyNarrow(), True),
        ("triton_words, frozen weight", LinearCrossEntropyByWords(), True),
    ):
        weight.requires_grad_(not frozen)
        leaves = [hidden] if frozen else [hidden, weight]

        def run(function: Function = function, leaves: Sequence[Tensor] = leaves) -> Any:
            return torch.autograd.grad(function(hidden, weight, targets).sum(), leaves)

        ms = bench.milliseconds(run, most=200)
        row: Row = {"backend": name, "ms": ms, "times_products": ms / (products * (2 / 3 if frozen else 1))}
        if bench.is_gpu:
            row["extra_gib"] = _extra_memory(run, sum(leaf.nbytes for leaf in leaves))
        rows.append(row)
        bench.clean()
    shape = f"{s.loss_tokens} x {s.hidden} x {s.words}"
    return {"shape": shape, "products_ms": products, "backends": rows}


def _share(ms: float, size: int, rate: float) -> Row:
    """Time, bytes, and bandwidth relative to a copy."""
    return {"ms": ms, "gigabytes": size / 1e9, "share_of_copy": size / ms / 1e9 / rate}


def _backward(function: Function, inputs: Sequence[Any]) -> Callable[[], Any]:
    """Function that runs only the backward of a call, any number of times."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.randn_like(output) for output in outputs]
    leaves = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


def _routed(bench: Bench, tokens: int) -> tuple[Tensor, Tensor]:
    """Slots [tokens x chosen] and places [tokens, chosen] of randomly routed tokens."""
    s = bench.sizes
    experts = torch.rand(tokens, s.experts, device=bench.device).topk(s.chosen, dim=1).indices
    slots = torch.sort(experts.flatten(), stable=True).indices
    places = torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots), device=bench.device))
    return slots, places.view(tokens, s.chosen)


def _products(bench: Bench, hidden: Tensor, weight: Tensor) -> float:
    """Milliseconds of the loss's three matrix products, into preallocated memory."""
    logits = hidden @ weight.T
    of_hidden, of_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(logits, weight, out=of_hidden)
        torch.mm(logits.T, hidden, out=of_weight)

    return bench.milliseconds(run, most=200)


def _extra_memory(run: Callable[[], Any], gradients: int) -> float:
    """Peak GiB of a call in excess of existing memory and the returned gradients."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - gradients) / GIB
