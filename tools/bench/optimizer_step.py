"""Bandwidth of optimizer steps on a device, and the price of clipping before the step against inside of it.

    python tools/bench/optimizer_step.py --parameters 2.0

Prints JSON: of each optimizer the milliseconds of a step, the bytes that it has to move, and its bandwidth relative to
torch's fused AdamW; and the milliseconds of AdamW's step with the clipping divisor in a pass before it, inside of it,
and without one. Blocks of these steps alternate, so that clocks and neighbours disturb all alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from d9d_optim.optimizer.adamw import AdamW
from d9d_optim.optimizer.base import NamedOptimizer
from d9d_optim.optimizer.config import AdamWConfig, StochasticAdamWConfig
from d9d_optim.optimizer.stochastic_adamw import StochasticAdamW
from d9d_triton.adamw import FusedAdamW
from timing import timed
from torch import nn

#: Shapes of a layer of a model of hidden size 4096, repeated until there are enough parameters.
LAYER = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4096,), (4096,))


def parameters(
    billions: float, dtype: torch.dtype, device: str, layer: Sequence[tuple[int, ...]] = LAYER
) -> dict[str, nn.Parameter]:
    """Parameters with gradients, by name: as many layers of these shapes as needed."""
    made: dict[str, nn.Parameter] = {}
    total = 0
    while total < billions * 1e9:
        for shape in layer:
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
            parameter.grad = torch.full_like(parameter, 1e-3)
            made[f"{len(made)}"] = parameter
            total += parameter.numel()
    return made


def moved(named: Mapping[str, nn.Parameter], bytes_of_state: int) -> int:
    """Minimum bytes of a step: parameters and state are read and written, gradients read."""
    return sum(p.numel() * (3 * p.element_size() + 2 * bytes_of_state) for p in named.values())


def stepper(optimizer: NamedOptimizer) -> Callable[[], None]:
    """Function that runs one step with the gate true."""
    optimizer.init_state()
    gate = torch.tensor(True, device=next(iter(optimizer.state().values())).device)
    return lambda: optimizer.step(gate)


def milliseconds(runs: Mapping[str, Callable[[], Any]], steps: int, rounds: int) -> dict[str, float]:
    """Median milliseconds over rounds that alternate between all functions."""
    for run in runs.values():
        timed(run, 2)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(timed(run, steps) * 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def contenders() -> Iterator[tuple[str, torch.dtype, int, Callable[[Any], Callable[[], Any]]]]:
    """Name, dtype of parameters, bytes of state of each, and the step for given parameters."""
    wide, narrow = torch.float32, torch.bfloat16
    for dtype in (wide, narrow):
        yield f"torch fused adamw, {dtype}", dtype, 2 * dtype.itemsize, lambda named: torch_adamw(named).step
        yield f"adamw triton, {dtype}", dtype, 2 * dtype.itemsize, lambda named: bound(AdamW(AdamWConfig(), named))
    config = StochasticAdamWConfig()
    yield "stochastic_adamw reference", narrow, 8, lambda named: stepper(StochasticAdamW(config, named))
    yield "stochastic_adamw triton", narrow, 8, lambda named: bound(StochasticAdamW(config, named))
    narrow_state = StochasticAdamWConfig(state_dtype="parameter")
    yield (
        "stochastic_adamw triton, bfloat16 moments",
        narrow,
        4,
        lambda named: bound(StochasticAdamW(narrow_state, named)),
    )


def torch_adamw(named: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    """Torch's AdamW with its fused kernel."""
    return torch.optim.AdamW(list(named.values()), fused=True)


def bound(optimizer: AdamW | StochasticAdamW) -> Callable[[], None]:
    """Function that runs one step with d9d-triton's kernel."""
    (slot,) = optimizer.op_slots().values()
    slot.bind("triton", FusedAdamW(stochastic=isinstance(optimizer, StochasticAdamW)))
    return stepper(optimizer)


def bandwidths(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Bandwidth of each optimizer, measured separately, because the states of several would not fit."""
    results: dict[str, dict[str, float]] = {}
    for name, dtype, state, make in contenders():
        named = parameters(options.parameters, dtype, options.device)
        run = make(named)
        time = milliseconds({name: run}, options.steps, options.rounds)[name]
        results[name] = {"milliseconds": time, "gigabytes": moved(named, state) / 1e9}
        results[name]["gigabytes_per_second"] = results[name]["gigabytes"] / time * 1e3
        del named, run
        if options.device == "cuda":
            torch.cuda.empty_cache()
    reference = next(iter(results.values()))["gigabytes_per_second"]
    for result in results.values():
        result["share_of_fused"] = result["gigabytes_per_second"] / reference
    return results


def clipping(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds of AdamW's step with and without a divisor, which is 1, so that gradients do not change."""
    return {str(dtype): clipping_of(options, dtype) for dtype in (torch.float32, torch.bfloat16)}


def clipping_of(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of each way of clipping, for one dtype of parameters."""
    named = parameters(options.parameters, dtype, options.device)
    plain, triton = AdamW(AdamWConfig(), named), AdamW(AdamWConfig(), named)
    steps = {"torch": stepper(plain), "triton": bound(triton)}
    divisor = torch.ones((), device=options.device)
    gradients = [p.grad for p in named.values() if p.grad is not None]

    def before() -> None:
        torch._foreach_div_(gradients, divisor)
        steps["torch"]()

    def inside(name: str, optimizer: AdamW) -> Callable[[], None]:
        def run() -> None:
            optimizer.divide_gradients(divisor)
            steps[name]()

        return run

    runs = {
        "no clipping": steps["torch"],
        "a pass before": before,
        "inside of the step": inside("torch", plain),
        "triton, no clipping": steps["triton"],
        "triton, inside of the step": inside("triton", triton),
    }
    return milliseconds(runs, options.steps, options.rounds)


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=2.0, help="billions")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    result = {"optimizers": bandwidths(options), "clipping_milliseconds": clipping(options)}
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
