"""Gradients of weights that come after the backward: FSDP2 reduces once all are there, and loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from d9d_core.deferral import Deferral, DeferredWeights
from d9d_core.job_file.job import Mesh
from d9d_core.plugin import ViewSpec
from d9d_core.registry.registry import Registry
from d9d_core.tensors import full
from d9d_core.traits import DefersWeights, modules_with
from d9d_engine.distributed.mesh import Topology
from d9d_parallel.data_parallel.config import FsdpConfig, HsdpConfig, ReplicateConfig
from d9d_parallel.data_parallel.reducer import FsdpReducer
from d9d_parallel.data_parallel.strategy import Fsdp, Hsdp, Replicate
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients
from d9d_testing.toy.deferring import Deferring
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor, distribute_tensor

pytestmark = pytest.mark.smoke
FEATURES, SAMPLES = 5, 3
VIEWS = {e.spec.key: e.spec for e in Registry.of().entries("view") if isinstance(e.spec, ViewSpec)}
STRATEGIES: dict[str, Any] = {
    "fsdp": (Fsdp, FsdpConfig),
    "hsdp": (Hsdp, HsdpConfig),
    "replicate": (Replicate, ReplicateConfig),
}
#: Microbatches and whether gradients of weights come with their backward (B) or after it (I, W).
WHOLE, SPLIT, MIXED = ("B0 B1 B2", "I0 I1 W0 I2 W1 W2", "B0 I1 B2 W1")


class Block(nn.Module):
    """A weight that waits, another one in a unit of its own, a vector that does not wait, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.expert = Deferring(FEATURES), Deferring(FEATURES)
        self.scale = nn.Parameter(torch.empty(FEATURES))
        self.frozen = nn.Parameter(torch.empty(FEATURES), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.expert(torch.tanh(self.product(x)) * self.scale) + self.frozen


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = Deferring(FEATURES)
        self.never = nn.Parameter(torch.empty(2))

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"layers.{index}": layer for index, layer in enumerate(self.layers)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Values that depend on the name only, in any layout."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        whole = torch.randn(parameter.shape, generator=generator) / 2
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(whole)


def samples(step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randn(SAMPLES, FEATURES, generator=generator)


@contextmanager
def counted() -> Iterator[list[str]]:
    """Notes each time that FSDP2 reduces gradients of a unit over ranks."""
    reductions, reduce = [], _fsdp_param_group.foreach_reduce

    def note(*args: Any, **kwargs: Any) -> Any:
        reductions.append("unit")
        return reduce(*args, **kwargs)

    _fsdp_param_group.foreach_reduce = note
    try:
        yield reductions
    finally:
        _fsdp_param_group.foreach_reduce = reduce


def wrapped(model: nn.Module, case: Mapping[str, Any]) -> FsdpReducer:
    if case["strategy"] == "by hand":
        return by_hand(model)
    sizes = Mesh(**case["mesh"]).sizes()
    topology = Topology(sizes=sizes, rank=dist.get_rank(), world_size=dist.get_world_size(), views=VIEWS)
    strategy, config = STRATEGIES[case["strategy"]]
    # Without it, `replicate` would need no FSDP2 outside of a pipeline, which these tests imitate.
    as_in_a_pipeline = {"forward_prefetch": 1} if case["strategy"] == "replicate" else {}
    (reducer,) = strategy(config(**case["settings"], **as_in_a_pipeline)).apply(model, topology).reducers
    model.to_empty(device="cpu")
    return reducer  # type: ignore[no-any-return]


def by_hand(model: nn.Module) -> FsdpReducer:
    """Units inside of blocks, as experts have them."""
    units: list[nn.Module] = [module for module in model.modules() if isinstance(module, Block)]
    for unit in [*(block.expert for block in units), *units, model]:
        fully_shard(unit)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    assert isinstance(model, FSDPModule)
    reducer = FsdpReducer(model)
    reducer.add([module for module in model.modules() if isinstance(module, FSDPModule)], "nothing")
    return reducer


class Trainer:
    """Runs the actions of a program on one stage; counts reductions before they are due."""

    def __init__(self, model: nn.Module, reducer: FsdpReducer, deferral: Deferral) -> None:
        self.model, self.reducer, self.deferral = model, reducer, deferral
        self.waiting: dict[str, DeferredWeights] = {}

    def step(self, program: str, loss_of: Callable[[int], Tensor]) -> int:
        actions = program.split()
        losses = {action[1]: loss_of(int(action[1])) for action in actions if action[0] != "W"}
        with counted() as early:
            for action in actions:
                {"B": self.whole, "I": self.inputs, "W": self.weights}[action[0]](action[1], losses, actions)
        assert not self.waiting
        if "W" in program:
            self.reducer.reduce()
        return len(early)

    def whole(self, microbatch: str, losses: dict[str, Tensor], actions: Sequence[str]) -> None:
        self.reducer.before_backward(last=f"B{microbatch}" == actions[-1])
        losses.pop(microbatch).backward()

    def inputs(self, microbatch: str, losses: dict[str, Tensor], _actions: Sequence[str]) -> None:
        self.reducer.before_backward(last=False, complete=False)
        with self.deferral.collect() as left:
            losses.pop(microbatch).backward()
        assert len(left) == len(modules_with(self.model, DefersWeights))
        self.waiting[microbatch] = left

    def weights(self, microbatch: str, _losses: dict[str, Tensor], _actions: Sequence[str]) -> None:
        self.waiting.pop(microbatch).run()
        self.reducer.after_weights()


def trainer_of(model: nn.Module, case: Mapping[str, Any]) -> Trainer:
    reducer, deferral = wrapped(model, case), Deferral()
    fill(model)
    for module in modules_with(model, DefersWeights).values():
        module.defer_to(deferral)
    if accumulate := case.get("accumulate"):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = getattr(torch, accumulate)
    return Trainer(model, reducer, deferral)


def gradients_of(case: Mapping[str, Any]) -> list[tuple[dict[str, Tensor], int, int]]:
    """Of two steps: whole gradients, how often they were reduced before they were due, and how many units there are."""
    stored = getattr(torch, case.get("parameters", "float32"))
    with torch.device("meta"):
        model = Model().to(stored)
    trainer = trainer_of(model, case)
    found = []
    for step in range(2):
        early = trainer.step(
            case["program"],
            lambda index, step=step: model(samples(step, index, dist.get_rank()).to(stored)).float().square().sum(),
        )
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or type(parameter.grad) is type(parameter), name
        assert all(not unit._get_fsdp_state()._fsdp_param_group.is_unsharded for unit in units_of(model))
        whole = {n: full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        found.append((whole, early, len(units_of(model))))
    return found


def units_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def run(cases: list[dict[str, Any]]) -> list[Any]:
    return [gradients_of(case) for case in cases]


def expected_of(step: int) -> dict[str, Tensor]:
    """The same in one process, all in float32."""
    model = Model()
    fill(model)
    for microbatch in range(3):
        for rank in range(2):
            model(samples(step, microbatch, rank)).square().sum().backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad
    }


SHARD, COPY = {"dp_shard": 2}, {"dp_replicate": 2}
LAYOUTS = [("fsdp", SHARD), ("replicate", COPY), ("hsdp", COPY)]
DEFER = ["nothing", "all_reduce", "everything"]
FORMATS: list[dict[str, Any]] = [
    {},
    {"settings": {"compute_dtype": "bfloat16"}},
    {"settings": {"compute_dtype": "bfloat16", "reduce_dtype": "bfloat16"}},
    {"parameters": "bfloat16", "settings": {"reduce_dtype": "float32"}},
    {"parameters": "bfloat16", "accumulate": "float32"},
]


def case_of(layout: tuple[str, dict[str, int]], defer: str, form: Mapping[str, Any], program: str) -> dict[str, Any]:
    settings_here = {"defer": defer, **form.get("settings", {})}
    return {**form, "strategy": layout[0], "mesh": layout[1], "settings": settings_here, "program": program}


def some(program: str) -> list[dict[str, Any]]:
    """All layouts with all formats, and all layouts with all that may wait."""
    formats = [case_of(layout, "nothing", form, program) for layout in LAYOUTS for form in FORMATS]
    return formats + [case_of(layout, defer, FORMATS[1], program) for layout in LAYOUTS for defer in DEFER[1:]]


@pytest.mark.full
def test_late_gradients_of_weights_are_reduced_like_others(world: Any) -> None:
    cases = [*some(SPLIT), *(case for case in some(MIXED) if case["strategy"] != "fsdp")]
    cases += [{"strategy": "by hand", "program": program} for program in (WHOLE, SPLIT, MIXED)]
    for found in world(2).run(run, cases):
        for case, steps in zip(cases, found, strict=True):
            within = TOLERANCES[torch.bfloat16 if "bfloat16" in str(case) else torch.float32]
            for step, (gradients, early, units) in enumerate(steps):
                expected = expected_of(step)
                if case["strategy"] == "by hand":
                    del expected["never"]  # as FSDP2 comes, it reduces what there is
                try:
                    assert_close_gradients(gradients, expected, within)
                except AssertionError as error:
                    raise AssertionError(f"step {step} of {case}: {error}") from None
                # In MIXED, the first backward finds nothing that it must wait for.
                waits = case["program"] == SPLIT or case.get("settings", {}).get("defer") == "everything"
                assert early == {WHOLE: 3 * units}.get(case["program"], 0 if waits else units), case


# --- the format in which gradients add up


class Part(nn.Module):
    """The gradient of its weight is its argument; it may wait."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.deferral: Deferral | None = None

    def defer_to(self, deferral: Deferral | None) -> Collection[str]:
        self.deferral = deferral
        return ("weight",)

    def forward(self, gradient: float) -> Tensor:
        edge = get_gradient_edge(self.weight)
        alone = torch.zeros(0, requires_grad=True)  # has the backward come here
        return _Times.apply(self.weight.detach(), gradient, self.deferral, edge, alone)


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: float, deferral: Deferral, edge: GradientEdge, _: Tensor) -> Tensor:
        ctx.gradient, ctx.deferral, ctx.edge = torch.full_like(weight, gradient), deferral, edge
        return (weight * gradient).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        gradient = ctx.gradient
        ctx.deferral.add(ctx.edge, lambda: gradient)
        return None, None, None, None, None


class Parts(nn.Module):
    """One inside of a block and one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = Part(), Part()

    def blocks(self) -> Mapping[str, nn.Module]:
        return {"inside": self.inside}

    def forward(self, gradient: float) -> Tensor:
        return self.inside(gradient) + self.outside(gradient)


def added_up(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    values = [256.0] + [1.0] * 8  # in bfloat16, 256 + 1 is 256
    program = " ".join(f"{action}{index}" for action in "IW" for index in range(len(values)))
    for case in cases:
        with torch.device("meta"):
            model = Parts().to(getattr(torch, case["parameters"]))
        trainer = trainer_of(model, case)
        trainer.step(program, lambda index, model=model: model(values[index]))
        sums = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
        assert {tuple(gradient.tolist()) for gradient in sums.values()} == {tuple(sums["outside.weight"].tolist())}
        found.append({"sum": sums["outside.weight"][0].item(), "dtype": str(sums["inside.weight"].dtype)})
    return found


@pytest.mark.thorough
def test_late_gradients_add_up_in_the_wide_format(world: Any) -> None:
    plain = [
        {"strategy": name, "mesh": mesh, "settings": {"defer": "nothing"}, "parameters": "bfloat16"}
        for name, mesh in LAYOUTS
    ]
    wide = [case | {"accumulate": "float32"} for case in plain]
    mixed = [
        case | {"parameters": "float32", "settings": {"compute_dtype": "bfloat16", "reduce_dtype": "float32"}}
        for case in plain
    ]
    for found in world(2).run(added_up, [*plain, *wide, *mixed]):
        sums, rest = found[: len(plain)], found[len(plain) :]
        assert all(one == {"sum": 512.0, "dtype": "torch.bfloat16"} for one in sums)
        assert all(one == {"sum": 528.0, "dtype": "torch.float32"} for one in rest)
