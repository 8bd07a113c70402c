"""Any optimizer of torch in a job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, D9dError, JobError
from d9d_optim.imports import import_path
from d9d_optim.optimizer.any_torch import TorchOptimizer, _accepted, _arguments, _Record
from d9d_optim.optimizer.config import GroupRule, TorchConfig
from torch import nn

SHAPES = {"embed.weight": (7, 5), "layer.weight": (5, 5), "layer.bias": (5,)}


class CountsOnTheHost(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["calls"] = self.state[parameter].get("calls", 0) + 1


class CountsInItsGroup(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("RAdam", {}),
        ("NAdam", {"momentum_decay": 0.01}),
        ("Adagrad", {"initial_accumulator_value": 0.5}),
        ("Adamax", {}),
        ("Rprop", {"step_sizes": [1e-5, 1.0]}),
        ("Adafactor", {}),
        ("ASGD", {}),
        ("Adadelta", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("AdamW", {"amsgrad": True}),
    ],
)
def test_steps_equal_those_of_the_class_bit_for_bit(name: str, arguments: dict[str, Any]) -> None:
    mine, other = parameters(), parameters()
    optimizer = TorchOptimizer(TorchConfig(target=f"torch.optim.{name}", lr=0.01, arguments=arguments), mine)
    optimizer.init_state()
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    decay = {} if name == "Rprop" else {"weight_decay": 0.0}
    reference = getattr(torch.optim, name)(list(other.values()), lr=0.01, **decay, **given)
    for step in range(4):
        set_gradients(mine, step)
        set_gradients(other, step)
        if step == 1:
            optimizer.step(torch.tensor(False))  # leaves no trace
            set_gradients(mine, step)
        optimizer.step(torch.tensor(True))
        reference.step()
    assert [torch.equal(mine[name], other[name]) for name in mine] == [True] * 3


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RAdam", "Adamax", "Adafactor", "SGD"])
def test_gradients_wider_than_their_parameters_are_rounded_for_the_step_alone(name: str) -> None:
    mine, other = ({name: nn.Parameter(p.bfloat16()) for name, p in parameters().items()} for _ in range(2))
    optimizer = TorchOptimizer(TorchConfig(target=f"torch.optim.{name}", lr=0.01), mine)
    optimizer.init_state()
    reference = getattr(torch.optim, name)(list(other.values()), lr=0.01, weight_decay=0.0)
    for key, parameter in mine.items():
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
        parameter.grad_dtype = torch.float32
        parameter.grad = gradient
        other[key].grad = (gradient / 2).bfloat16()
    grads = [parameter.grad for parameter in mine.values()]
    optimizer.divide_gradients(torch.tensor(2.0))
    optimizer.step(torch.tensor(True))
    reference.step()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert all(parameter.grad is grad for parameter, grad in zip(mine.values(), grads, strict=True))
    assert [parameter.grad_dtype for parameter in mine.values()] == [torch.float32] * 3


def test_groups_have_their_own_rate_and_decay() -> None:
    mine, other = parameters(), parameters()
    rules = (GroupRule(match="embed.*", lr_scale=0.1, weight_decay=0.0),)
    config = TorchConfig(target="torch.optim.RMSprop", lr=0.01, weight_decay=0.5, groups=rules)
    optimizer = TorchOptimizer(config, mine)
    optimizer.init_state()
    groups = [
        {"params": [other["embed.weight"]], "lr": 0.001},
        {"params": [other["layer.weight"]], "lr": 0.01, "weight_decay": 0.5},
        {"params": [other["layer.bias"]], "lr": 0.01},
    ]
    reference = torch.optim.RMSprop(groups)
    for step in range(2):
        for named in (mine, other):
            set_gradients(named, step)
        optimizer.step(torch.tensor(True))
        reference.step()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"target": "torch.optim.RAdm"}, "optimizer.target: .*has no 'RAdm'; did you mean torch.optim.RAdam"),
        ({"target": "no_such_package.Adam"}, "there is no module 'no_such_package'"),
        ({"target": "torch.nn.Linear"}, "is not a subclass of torch.optim.Optimizer, but the class Linear"),
        ({"target": "torch.optim.Optimizer"}, "is not a subclass"),
        ({"target": "torch.optim.LBFGS"}, "needs a closure"),
        ({"target": "torch.optim.RAdam", "arguments": {"beta": 1}}, "arguments.beta: .*did you mean 'betas'"),
        ({"target": "torch.optim.RAdam", "arguments": {"lr": 1}}, "not an argument; set optimizer.lr"),
        ({"target": "torch.optim.RAdam", "arguments": {"betas": [2, 2]}}, "RAdam refuses the arguments: .*beta"),
        ({"target": "torch.optim.Rprop", "weight_decay": 0.1}, "weight_decay: .*has no weight decay"),
        ({"target": "torch.optim.RAdam", "state_dtype": "float32"}, "state_dtype: the class chooses"),
        ({"target": f"{__name__}.CountsOnTheHost"}, "its state calls of embed.weight is not a tensor"),
        (
            {"target": "torch.optim.SGD", "arguments": {"momentum": 0.9, "dampening": 0.5}},
            r"first step of this class makes state \(momentum_buffer\) from the gradient, .*use 'optimizer: sgd'",
        ),
        ({"target": f"{__name__}.CountsInItsGroup"}, "keeps calls in its parameter group"),
    ],
)
def test_what_is_no_optimizer_is_an_error(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(D9dError, match=text):
        TorchOptimizer(TorchConfig.model_validate({"lr": 0.1, **fields}), parameters())


def test_state_is_needed_before_a_step() -> None:
    optimizer = TorchOptimizer(TorchConfig(target="torch.optim.RAdam", lr=0.1), parameters())
    with pytest.raises(BuildError, match="init_state"):
        optimizer.step(torch.tensor(True))


def test_names_of_arguments_are_listed_without_positional_ones() -> None:
    def function(a: int, *more: int, b: int = 1, **others: int) -> None: ...

    assert _accepted(function) == ["a", "b", "**"]


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def test_classes_and_arguments_that_do_not_fit_are_named() -> None:
    def refused(**fields: Any) -> str:
        with pytest.raises(D9dError) as error:
            TorchOptimizer(TorchConfig.model_validate({"lr": 0.1, **fields}), parameters())
        return str(error.value)

    assert refused(target=f"{__name__}.WithoutRate") == (
        f"optimizer.target: {__name__}.WithoutRate takes no 'lr', so no schedule can set its learning rate"
    )
    assert refused(target=f"{__name__}.SHAPES").endswith("is not a subclass of torch.optim.Optimizer, but a dict")
    assert refused(target="torch.optim.Rprop", arguments={"zzz": 1}) == (
        "optimizer.arguments.zzz: torch.optim.Rprop takes no such argument; it takes: etas, step_sizes, capturable, "
        "foreach, maximize, differentiable"
    )
    rule = {"match": "*bias", "weight_decay": 0.1}
    assert refused(target="torch.optim.Rprop", groups=[rule]) == (
        "optimizer.weight_decay: torch.optim.Rprop has no weight decay; remove it"
    )


def test_the_first_value_of_a_slot_is_its_initial_value() -> None:
    record = _Record()
    value = torch.tensor([1.0])
    record["sum"] = value
    value.add_(1.0)
    record.update({"sum": torch.tensor([9.0]), "none": None}, count=3)
    assert record.setdefault("late", torch.tensor([4.0])).item() == 4.0
    assert record.setdefault("late", torch.tensor([5.0])).item() == 4.0
    assert record.setdefault("count") == 3
    assert {slot: first.tolist() for slot, first in record.first.items()} == {"sum": [1.0], "late": [4.0]}
    assert record.unfit == {"count"}


class Replaces(torch.optim.SGD):
    """Keeps its sum of gradients in a new tensor in each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                total = self.state[parameter].get("total", torch.zeros_like(parameter))
                self.state[parameter]["total"] = total + parameter.grad
                parameter.data.sub_(group["lr"] * self.state[parameter]["total"])


def test_new_tensors_of_state_are_copied_into_the_ones_that_checkpoints_know() -> None:
    mine = {"p": nn.Parameter(torch.tensor([8.0]))}
    optimizer = TorchOptimizer(TorchConfig(target=f"{__name__}.Replaces", lr=0.5), mine)
    optimizer.init_state()
    known = optimizer.state()["p/total"]
    for gradient, gate, weight, total in ((2.0, True, 7.0, 2.0), (9.0, False, 7.0, 2.0), (4.0, True, 4.0, 6.0)):
        mine["p"].grad = torch.tensor([gradient])
        optimizer.step(torch.tensor(gate))
        assert (mine["p"].item(), known.item()) == (weight, total)
        assert optimizer.state()["p/total"] is known
        inner = optimizer._inner[0] or optimizer._inner[1]
        assert inner is not None
        assert inner.state[mine["p"]]["total"] is known


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("no kernel")


def test_a_class_that_fails_in_the_step_of_a_parameter_is_an_error_with_its_name() -> None:
    with pytest.raises(BuildError) as error:
        TorchOptimizer(TorchConfig(target=f"{__name__}.Fails", lr=0.1), parameters())
    assert str(error.value) == (f"optimizer 'torch' ({__name__}.Fails): a step with embed.weight fails: no kernel")


def test_state_on_another_device_than_its_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["count"] = torch.zeros((), device="meta")

    monkeypatch.setattr("d9d_optim.optimizer.any_torch.import_path", lambda _where, _path: Elsewhere)
    with pytest.raises(BuildError, match="its state count of embed.weight is not on cpu, so each step would synchron"):
        TorchOptimizer(TorchConfig(target="a.Elsewhere", lr=0.1), parameters())


def test_a_module_that_does_not_load_is_an_error_of_its_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_optimizer.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(JobError) as error:
        import_path("optimizer.target", "broken_optimizer:Adam")
    assert str(error.value) == (
        "optimizer.target: the module 'broken_optimizer' fails to import: "
        "ZeroDivisionError('division by zero'); correct it"
    )
    for path in ("Adam", "torch.", "torch..Adam", "torch.optim.2", "torch. optim.Adam", ":Adam"):
        with pytest.raises(JobError, match="is not an import path; write package.module.name"):
            import_path("here", path)
    assert import_path("here", "torch.optim:Adam") is import_path("here", "torch.optim.Adam") is torch.optim.Adam


def test_classes_count_steps_on_the_device_unless_they_are_fused() -> None:
    def given(device: str, name: str = "AdamW", **arguments: Any) -> dict[str, Any]:
        named: Any = {"p": SimpleNamespace(device=SimpleNamespace(type=device))}
        found: Any = getattr(torch.optim, name)
        return _arguments(found, TorchConfig(target="a.B", lr=0.1, arguments=arguments), named)

    assert [given(device) for device in ("cpu", "meta", "cuda")] == [{}, {}, {"capturable": True}]
    assert given("cuda", fused=True) == {"fused": True}
    assert given("cuda", capturable=False) == {"capturable": False}
    assert given("cuda", "SGD", momentum=0.5) == {"momentum": 0.5}
    assert given("cpu", betas=[0.5, 0.75]) == {"betas": (0.5, 0.75)}
