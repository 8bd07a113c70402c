"""Parameters that take part in some microbatches, on some ranks, in some steps: zeros where they do not.

The gradients must equal the gradients of one process with all samples of all ranks, and no rank may wait for another.
Which block runs is the same on all ranks, as FSDP2 gathers a block's parameters when it runs; within blocks and in the
root, ranks may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from d9d_core.job_file.job import Mesh
from d9d_core.plugin import ViewSpec
from d9d_core.registry.registry import Registry
from d9d_core.tensors import full
from d9d_engine.distributed.mesh import Topology
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.ownership import settle
from d9d_parallel.data_parallel.config import FsdpConfig, HsdpConfig, ReplicateConfig
from d9d_parallel.data_parallel.strategy import Fsdp, Hsdp, Replicate
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients
from d9d_testing.world import World
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

FEATURES, SAMPLES = 5, 3
VIEWS = {e.spec.key: e.spec for e in Registry.of().entries("view") if isinstance(e.spec, ViewSpec)}
STRATEGIES: dict[str, Any] = {
    "fsdp": (Fsdp, FsdpConfig),
    "hsdp": (Hsdp, HsdpConfig),
    "replicate": (Replicate, ReplicateConfig),
}
#: step -> microbatch -> rank -> used parts
Usage = list[list[list[list[str]]]]


class Block(nn.Module):
    """Has an expert that may get no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(FEATURES, FEATURES))
        self.expert = nn.Parameter(torch.empty(FEATURES, FEATURES))
        self.frozen = nn.Parameter(torch.empty(FEATURES), requires_grad=False)

    def forward(self, x: Tensor, used: Sequence[str]) -> Tensor:
        x = torch.tanh(x @ self.weight) + self.frozen
        return x + x @ self.expert if "expert" in used else x


class Model(nn.Module):
    """Two blocks that always run, one that may not, and two heads outside of blocks, one of which may not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.spare = Block()
        self.head = nn.Parameter(torch.empty(FEATURES))
        self.aux = nn.Parameter(torch.empty(FEATURES))
        self.never = nn.Parameter(torch.empty(2))

    def blocks(self) -> Mapping[str, nn.Module]:
        return {"layers.0": self.layers[0], "layers.1": self.layers[1], "spare": self.spare}

    def forward(self, x: Tensor, used: Sequence[str]) -> Tensor:
        for layer in self.layers:
            x = layer(x, used)
        if "spare" in used:
            x = self.spare(x, used)
        y = x @ self.head
        return y + (x @ self.aux).square() if "aux" in used else y


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


def gradients_of(case: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Whole gradients of each step."""
    stored = getattr(torch, case.get("parameters", "float32"))
    with torch.device("meta"):
        model = Model().to(stored)
    gradients = wrapped(model, case)
    fill(model)
    found = []
    for step, microbatches in enumerate(case["usage"]):
        for index, by_rank in enumerate(microbatches):
            used = by_rank[dist.get_rank()]
            loss = model(samples(step, index, dist.get_rank()).to(stored), used).float().sum()
            gradients.before_backward(last=index == len(microbatches) - 1)
            loss.backward()
        found.append(finished(model, gradients))
    return found


def wrapped(model: nn.Module, case: Mapping[str, Any]) -> Gradients:
    """Apply the case's strategy and allocate, in the order of a job's build."""
    sizes = Mesh(**case["mesh"]).sizes()
    topology = Topology(sizes=sizes, rank=dist.get_rank(), world_size=dist.get_world_size(), views=VIEWS)
    strategy, config = STRATEGIES[case["strategy"]]
    applied = strategy(config(**case["settings"])).apply(model, topology)
    model.to_empty(device="cpu")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ownership = settle(trained, topology, [(case["strategy"], applied)])
    accumulate = getattr(torch, case["accumulate"]) if case.get("accumulate") else None
    return Gradients(trained, ownership, topology, {0: applied.reducers}, accumulate=accumulate)


def finished(model: nn.Module, gradients: Gradients) -> dict[str, Tensor]:
    gradients.reduce(0)
    gradients.finish()
    whole = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    gradients.reset()
    return whole


def run(cases: list[dict[str, Any]]) -> list[list[dict[str, Tensor]]]:
    return [gradients_of(case) for case in cases]


def expected_of(case: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """The same in one process, all in float32."""
    model = Model()
    fill(model)
    found = []
    for step, microbatches in enumerate(case["usage"]):
        for index, by_rank in enumerate(microbatches):
            for rank, used in enumerate(by_rank):
                model(samples(step, index, rank), used).sum().backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()})
        model.zero_grad()
    return found


def check(cases: list[dict[str, Any]]) -> None:
    for found in World(2).run(run, cases):
        for case, steps in zip(cases, found, strict=True):
            within = TOLERANCES[torch.bfloat16 if "bfloat16" in str(case) else torch.float32]
            for step, (gradients, expected) in enumerate(zip(steps, expected_of(case), strict=True)):
                try:
                    assert_close_gradients(gradients, expected, within)
                except AssertionError as error:
                    raise AssertionError(f"step {step} of {case}: {error}") from None


SHARD, COPY, BOTH = {"dp_shard": 2}, {"dp_replicate": 2}, ["spare"]
LAYOUTS = [("fsdp", SHARD), ("replicate", COPY), ("hsdp", COPY)]
DEFER = ["nothing", "all_reduce", "everything"]
FORMATS: list[dict[str, Any]] = [
    {},
    {"settings": {"compute_dtype": "bfloat16"}},
    {"settings": {"compute_dtype": "bfloat16", "reduce_dtype": "bfloat16"}},
    {"parameters": "bfloat16", "settings": {"reduce_dtype": "float32"}},
    {"parameters": "bfloat16", "accumulate": "float32"},
    {"settings": {"ignore": ["aux", "*.expert"]}},
]
STEPS: Usage = [
    [[["aux"], []], [["aux"], []]],  # on one rank
    [[[], []], [[], []]],  # nowhere
    [[[], []], [[], ["aux", "expert"]]],  # in the last microbatch only
    [[["aux", "expert"], []], [[], []]],  # in the first one only
    [[BOTH, BOTH], [[], []]],  # a whole unit, first microbatch
    [[[], []], [BOTH, [*BOTH, "expert"]]],  # last microbatch
    [[["expert"], ["aux"]]],  # one microbatch
    [[[], []]],
]


def case_of(layout: tuple[str, dict[str, int]], defer: str, form: Mapping[str, Any], usage: Usage) -> dict[str, Any]:
    settings_here = {"defer": defer, **form.get("settings", {})}
    return {**form, "strategy": layout[0], "mesh": layout[1], "settings": settings_here, "usage": usage}


@pytest.mark.smoke
@pytest.mark.full
@pytest.mark.parametrize("defer", DEFER)
def test_what_takes_no_part_counts_as_zeros(defer: str) -> None:
    orders = (STEPS, STEPS[::-1])  # a unit may run in the first step, or long after it
    chosen = product(enumerate(LAYOUTS), enumerate(FORMATS))
    check([case_of(layout, defer, form, orders[(place + number) % 2]) for (place, layout), (number, form) in chosen])


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    usage: Usage = []
    for _ in range(draw(st.integers(1, 3))):
        microbatches = draw(st.lists(st.sampled_from([[], BOTH]), min_size=1, max_size=3))
        by_rank = st.sets(st.sampled_from(["aux", "expert"])).map(sorted)
        usage.append([[[*alike, *draw(by_rank)] for _ in range(2)] for alike in microbatches])
    layout, defer, form = (draw(st.sampled_from(choices)) for choices in (LAYOUTS, DEFER, FORMATS))
    return case_of(layout, defer, form, usage)


@pytest.mark.full
@settings(
    max_examples=3,
    phases=[Phase.explicit, Phase.generate],  # a world for every step of shrinking would take minutes
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.lists(cases(), min_size=15, max_size=20))
def test_any_use_on_any_rank_gives_the_gradients_of_one_process(drawn: list[dict[str, Any]]) -> None:
    check(drawn)


# --- the format in which gradients add up


class Part(nn.Module):
    """The gradient of its weight is its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, gradient: float) -> Tensor:
        return (self.weight * gradient).sum()


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
    for case in cases:
        with torch.device("meta"):
            model = Parts().to(getattr(torch, case["parameters"]))
        gradients = wrapped(model, case)
        fill(model)
        values = [256.0] + [1.0] * 10  # in bfloat16, 256 + 1 is 256
        for index, value in enumerate(values):
            gradients.before_backward(last=index == len(values) - 1)
            model(value).backward()
        sums = finished(model, gradients)
        assert {tuple(gradient.tolist()) for gradient in sums.values()} == {tuple(sums["outside.weight"].tolist())}
        found.append({"sum": sums["outside.weight"][0].item(), "dtype": str(sums["inside.weight"].dtype)})
    return found


@pytest.mark.thorough
@pytest.mark.smoke
def test_microbatches_add_up_in_the_accumulation_format_also_in_what_fsdp_owns() -> None:
    plain = [
        {"strategy": name, "mesh": mesh, "settings": {"defer": defer}, "parameters": "bfloat16"}
        for name, mesh in LAYOUTS
        for defer in DEFER
    ]
    wide = [case | {"accumulate": "float32"} for case in plain]
    whole = [case | {"parameters": "float32"} for case in plain]
    for found in World(2).run(added_up, [*plain, *wide, *whole]):
        sums, rest = found[: len(plain)], found[len(plain) :]
        assert all(one == {"sum": 512.0, "dtype": "torch.bfloat16"} for one in sums)
        assert all(one == {"sum": 532.0, "dtype": "torch.float32"} for one in rest)
