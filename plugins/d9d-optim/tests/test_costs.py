"""Costs of optimizers agree with the state that they make."""

from __future__ import annotations

from typing import Any

import d9d_optim.plugin as plugin
import pytest
import torch
from d9d_core.cost import OptimizerCost
from d9d_core.plugin import OptimizerSpec
from d9d_optim.optimizer.newton_schulz import orthogonalize
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.weight": (80, 32),
    "layers.0.proj.weight": (64, 32),
    "layers.0.wide.weight": (32, 96),
    "layers.0.experts.up_proj": (4, 32, 16),
    "norm.weight": (32,),
    "heads.causal_lm.weight": (80, 32),
}
SPECS: dict[str, OptimizerSpec] = {
    spec.name: spec for spec in plugin.d9d_optimizers() if spec.cost and not spec.composite
}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in SPECS),
    ("adamw", {"amsgrad": True}),
    ("adamw", {"state_dtype": "float32"}),
    ("adamw", {"master_weights": True}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "dampening": 0.1, "state_dtype": "float32"}),
    ("muon", {"state_dtype": "float32"}),
    ("muon", {"adamw": {"match": ["*wide*"]}}),
    ("lion", {"state_dtype": "float32"}),
    ("schedule_free", {"state_dtype": "parameter"}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "fields"), SETTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_is_as_large_as_described(name: str, fields: dict[str, Any], dtype: torch.dtype) -> None:
    if (name == "stochastic_adamw" or "master_weights" in fields) and dtype == torch.float32:
        dtype = torch.bfloat16  # the only one that it trains
    parameters = {
        shape_name: nn.Parameter(torch.zeros(shape, dtype=dtype, device="meta")) for shape_name, shape in SHAPES.items()
    }
    config = SPECS[name].config.load()(**{"lr": 0.1, **fields})
    optimizer = SPECS[name].build.load()(config, parameters)
    optimizer.init_state()
    for weight_name, weight in parameters.items():
        cost = cost_of(name, config, dtype.itemsize, weight_name)
        own = {key: tensor for key, tensor in optimizer.state().items() if key.rpartition("/")[0] == weight_name}
        state = sum(tensor.nbytes for tensor in own.values() if tensor.shape == weight.shape)
        assert state == cost.state * weight.numel(), weight_name
        # The gradient is read, the parameter and all state are read and written at least.
        assert cost.traffic >= 3 * dtype.itemsize + 2 * cost.state


def cost_of(name: str, config: Any, width: int, weight: str) -> OptimizerCost:
    reference = SPECS[name].cost
    assert reference is not None
    cost: OptimizerCost = reference.load()(config, width)
    return cost if cost.of_weight is None else cost.of_weight(weight, SHAPES[weight])


class Passes(TorchDispatchMode):
    """Counts the bytes of tensors of one size that operations read and write."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.bytes = numbers, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            # What an operation writes in place is an argument and a result.
            read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.empty_like):
                read = read[1:]  # its first argument is only written
            written = tree_leaves(result) if result is not None else args[0]
            for one in [*read, *written]:
                if isinstance(one, torch.Tensor) and one.numel() == self.numbers:
                    self.bytes += one.nbytes
        return result


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lion", "schedule_free"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_passes_of_plain_updates_are_counted(name: str, dtype: torch.dtype) -> None:
    config = SPECS[name].config.load()(lr=0.1, state_dtype="parameter")
    weight = nn.Parameter(torch.zeros(SHAPES["layers.0.proj.weight"], dtype=dtype))
    weight.grad = torch.zeros_like(weight)
    optimizer = SPECS[name].build.load()(config, {"layers.0.proj.weight": weight})
    optimizer.init_state()
    optimizer.divide_gradients(torch.tensor(1.0))
    with Passes(weight.numel()) as passes:
        optimizer.step(torch.tensor(True))
    cost = cost_of(name, config, dtype.itemsize, "layers.0.proj.weight")
    assert cost.traffic == pytest.approx(passes.bytes / weight.numel(), rel=0.1)


def test_products_of_muon_are_those_of_its_iterations() -> None:
    config = SPECS["muon"].config.load()(lr=0.1)
    for name in ("layers.0.proj.weight", "layers.0.wide.weight", "layers.0.experts.up_proj"):
        weight = torch.zeros(SHAPES[name], dtype=torch.bfloat16)
        with FlopCounterMode(display=False) as counter:
            orthogonalize(weight, config.ns_coefficients, config.ns_steps, config.eps)
        assert cost_of("muon", config, 2, name).flops * weight.numel() == pytest.approx(counter.get_total_flops())
    for name in ("norm.weight", "embedding.weight", "heads.causal_lm.weight"):
        assert cost_of("muon", config, 2, name).flops == 0


@pytest.mark.parametrize(
    ("name", "fields", "width", "expected"),
    [
        # A fused update reads the gradient, and reads and writes the parameter and the moments.
        ("adamw", {}, 4, OptimizerCost(8, 28)),
        ("adamw", {}, 2, OptimizerCost(4, 14)),
        ("adamw", {"amsgrad": True}, 4, OptimizerCost(12, 36)),
        ("adamw", {"state_dtype": "float32"}, 2, OptimizerCost(8, 22)),
        ("adamw", {"master_weights": True}, 2, OptimizerCost(10, 26)),
        ("stochastic_adamw", {"state_dtype": "parameter"}, 2, OptimizerCost(4, 14)),
        # torch's kernels leave the division of narrow gradients, and wide copies, to passes of their own.
        ("adam", {}, 4, OptimizerCost(8, 28)),
        ("adam", {}, 2, OptimizerCost(4, 14 + 4)),
        ("adam", {"state_dtype": "float32"}, 2, OptimizerCost(8, 22 + 4 + 18, workspace_of_one=8)),
        ("sgd", {}, 4, OptimizerCost(0, 12)),
        ("sgd", {"momentum": 0.9}, 2, OptimizerCost(2, 10 + 4)),
        ("sgd", {"momentum": 0.9, "dampening": 0.1}, 4, OptimizerCost(4, 24 * 4 + 8, workspace_of_one=12)),
        ("lion", {}, 4, OptimizerCost(4, 23 * 4 + 8, workspace_of_one=12)),
        ("lion", {}, 2, OptimizerCost(2, 23 * 2 + 4, workspace_of_one=6)),
        ("lion", {"state_dtype": "float32"}, 2, OptimizerCost(4, 23 * 4 + 4 + 18, workspace_of_one=12)),
        ("schedule_free", {"state_dtype": "parameter"}, 4, OptimizerCost(8, 43 * 4 + 8, workspace_of_one=20)),
    ],
)
def test_an_update_costs_its_passes_over_memory(
    name: str, fields: dict[str, Any], width: int, expected: OptimizerCost
) -> None:
    cost = SPECS[name].cost
    assert cost is not None
    assert cost.load()(SPECS[name].config.load()(lr=0.1, **fields), width) == expected


def test_muon_costs_its_iterations_for_matrices_and_adamw_for_the_rest() -> None:
    cost = SPECS["muon"].cost
    assert cost is not None
    config = SPECS["muon"].config.load()(lr=0.1, ns_steps=2, adamw={"match": ["*wide*"]})
    found = cost.load()(config, 4)
    assert (found.state, found.traffic, found.workspace_of_one) == (8, 28, 0)
    # Of 3 x 5: an iteration has 2 * 2 * 3 * 3 * 5 + 2 * 3 * 3 * 3 FLOPs in 15 elements, and reads and writes X twice,
    # the result once and four square matrices of 9 elements, in bfloat16.
    matrix = OptimizerCost(
        4, pytest.approx(8 + 21 * 4 + 14 + 2 * 2 * (3 + 36 / 15)), 4, 12, pytest.approx(2 * (180 + 54) / 15), 2
    )
    for shape in ((3, 5), (5, 3), (7, 3, 5)):
        assert found.of_weight("proj.weight", shape) == matrix
    for name, shape in (
        ("proj.bias", (5,)),
        ("up_bias", (3, 5)),
        ("wide.weight", (3, 5)),
        ("conv.weight", (2, 3, 5, 7)),
    ):
        assert found.of_weight(name, shape) == OptimizerCost(8, 28)
