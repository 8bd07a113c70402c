"""Optimizer steps on random parameters, in this process or as DTensors over the ranks of a world."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from d9d_testing.suites.support.component import build_component
from d9d_testing.suites.support.tensors import bits, differing


def draw_parameters(shapes: Mapping[str, Sequence[int]], dtype: str, device: str = "cpu") -> dict[str, nn.Parameter]:
    """Random parameters of these shapes, equal in each call."""
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(tuple(shape), generator=generator) for name, shape in shapes.items()}
    return {name: nn.Parameter(tensor.to(device, getattr(torch, dtype))) for name, tensor in drawn.items()}


def set_gradients(parameters: Mapping[str, nn.Parameter], step: int) -> None:
    """Set gradients that depend on the step and the order of parameters; parameters on the meta device get none."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(drawn, parameter.device_mesh, parameter.placements)
        elif not parameter.is_meta:
            parameter.grad = drawn.to(parameter.device)


def stepped(optimizer: Any, parameters: Mapping[str, nn.Parameter], steps: Iterable[int], device: str) -> None:
    """Set gradients and run the optimizer, with an open gate, for each of the given step numbers."""
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step(torch.tensor(True, device=device))


def sharded_steps(address: Sequence[Any], shapes: Mapping[str, Sequence[int]], dtype: str) -> dict[str, Any]:
    """Run a step with a closed gate and two with an open gate on DTensors. Collective over the world.

    Returns:
        ``refused``: names changed by the closed gate; ``facts``: name -> full shape and dtype of parameters and state;
        ``start``: full state before the first step; ``parameters``: full parameters after the steps.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements: list[list[Placement]] = [[Shard(0)], [Replicate()], [Shard(0)], [Shard(0)]]
    parameters = {
        name: nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements[index % len(placements)]))
        for index, (name, parameter) in enumerate(draw_parameters(shapes, dtype).items())
    }
    optimizer = build_component(*address, parameters)
    optimizer.init_state()
    start = {name: _full(tensor).detach().clone() for name, tensor in optimizer.state().items()}
    set_gradients(parameters, 50)
    before = bits({**parameters, **optimizer.state()})
    optimizer.step(torch.tensor(False))
    refused = differing(before, bits({**parameters, **optimizer.state()}))
    stepped(optimizer, parameters, [0, 1], "cpu")
    everything = {**parameters, **optimizer.state()}
    return {
        "refused": refused,
        "start": start,
        "facts": {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in everything.items()},
        "parameters": {name: _full(tensor).detach() for name, tensor in parameters.items()},
    }


def _full(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.dtype in (torch.int16, torch.uint16):  # gloo cannot gather 16-bit integers
        whole: Tensor = tensor.to(torch.int32).full_tensor()  # type: ignore[attr-defined]
        return whole.to(tensor.dtype)
    return tensor.full_tensor()
