"""Averages of the weights against averages that are computed by hand."""

from __future__ import annotations

from typing import Any

import d9d_optim.plugin as plugin
import pytest
import torch
from d9d_core.cost import OptimizerCost
from d9d_core.errors import BuildError
from d9d_core.optimizer import AveragesWeights, DeclaresCollectives, DividesGradients
from d9d_core.registry.registry import Registry
from d9d_optim import costs
from d9d_optim.optimizer.adamw import AdamW
from d9d_optim.optimizer.any_torch import TorchOptimizer
from d9d_optim.optimizer.config import AdamWConfig, EmaConfig, MuonConfig, ScheduleFreeConfig, SGDConfig, TorchConfig
from d9d_optim.optimizer.ema import ema
from d9d_optim.optimizer.schedule_free import ScheduleFree
from d9d_optim.optimizer.sgd import SGD
from torch import Tensor, nn

KINDS: dict[type, Any] = {
    AdamWConfig: AdamW, ScheduleFreeConfig: ScheduleFree, SGDConfig: SGD, TorchConfig: TorchOptimizer,
}  # fmt: skip


def made(parameters: dict[str, nn.Parameter], of: Any, **fields: Any) -> Any:
    config = EmaConfig.model_construct(of=of, **fields)
    optimizer = ema(config, parameters, lambda inner, named: KINDS[type(inner)](inner, named))
    optimizer.init_state()
    return optimizer


def by_hand(weights: list[Tensor], decay: float | None, warmup: bool, start: int) -> Tensor:
    """Average of initial weights and the weights after each step."""
    average = weights[0]
    for step, newest in enumerate(weights[1:], start=1):
        n = step - start
        if n <= 0:
            kept = 0.0
        elif decay is None:
            kept = (n - 1) / n
        else:
            kept = min(decay, (1 + n) / (10 + n)) if warmup else decay
        average = kept * average + (1 - kept) * newest
    return average


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("decay", "warmup", "start"), [(0.9, False, 0), (0.25, True, 0), (0.999, True, 3), (None, True, 2), (0.0, False, 0)]
)
def test_averages_are_as_computed_by_hand_and_a_closed_gate_changes_nothing(
    dtype: torch.dtype, decay: float | None, warmup: bool, start: int
) -> None:
    parameter, frozen = nn.Parameter(torch.linspace(-1, 1, 6).to(dtype)), nn.Parameter(torch.ones(2, dtype=dtype))
    frozen.requires_grad_(False)
    optimizer = made(
        {"p": parameter, "frozen": frozen}, SGDConfig(lr=0.1), decay=decay, warmup=warmup, start=start, apply=True
    )
    assert optimizer.state().keys() == {"p/average", "p/average_steps"}
    weights = [parameter.detach().clone().double()]
    for step in range(7):
        parameter.grad = torch.randn(6, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.step(torch.tensor(step != 4))
        if step != 4:
            weights.append(parameter.detach().clone().double())
        expected = by_hand(weights, decay, warmup, start)
        torch.testing.assert_close(optimizer.state()["p/average"].double(), expected, rtol=1e-6, atol=1e-6)
    assert optimizer.state()["p/average_steps"] == 6
    training = parameter.detach().clone()
    with optimizer.evaluation_weights():
        assert torch.equal(parameter, optimizer.state()["p/average"].to(dtype))
    assert torch.equal(parameter, training)
    assert optimizer.average == ("average", 1.0)


def test_the_optimizer_takes_the_same_steps_as_without_averages_and_shows_its_own_features() -> None:
    alone, averaged = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    config = AdamWConfig(lr=0.1)
    plain, optimizer = AdamW(config, {"p": alone}), made({"p": averaged}, config)
    plain.init_state()
    for one, parameter in ((plain, alone), (optimizer, averaged)):
        one.set_lr_factor(0.5)
        parameter.grad = torch.full((4, 4), 6.0)
        one.divide_gradients(torch.tensor(2.0))
        one.step(torch.tensor(True))
    assert torch.equal(alone, averaged)
    assert optimizer.state().keys() - plain.state().keys() == {"p/average", "p/average_steps"}
    assert (optimizer.lr, optimizer.describe()) == (plain.lr, plain.describe())
    assert optimizer.op_slots() is not None
    assert all(isinstance(optimizer, kind) for kind in (AveragesWeights, DividesGradients, DeclaresCollectives))
    stored = made({"p": averaged}, TorchConfig(target="torch.optim.RAdam"), apply=False)
    assert not isinstance(stored, AveragesWeights)
    assert "p/average" in stored.state()


def test_an_optimizer_that_averages_weights_itself_is_refused() -> None:
    with pytest.raises(BuildError, match="optimizer.of: 'schedule_free' averages its weights itself; write it under"):
        made({"p": nn.Parameter(torch.ones(2))}, ScheduleFreeConfig())


def test_the_config_reads_the_averaged_optimizer_by_its_name() -> None:
    context = {"registry": Registry.of(plugin)}
    config = EmaConfig.model_validate({"of": {"name": "adamw", "lr": 0.25}}, context=context)
    assert config.of == AdamWConfig(lr=0.25)
    assert (config.lr, config.decay, config.warmup, config.start, config.apply) == (0.25, 0.999, True, 0, True)


def test_an_average_costs_four_bytes_and_its_passes() -> None:
    def cost(config: Any, width: int) -> OptimizerCost:
        inner = costs.muon if isinstance(config.of, MuonConfig) else costs.sgd
        return costs.ema(config, width, inner)  # type: ignore[arg-type]

    config = EmaConfig.model_construct(of=SGDConfig(lr=0.1))
    plain, wide = costs.sgd(config.of, 4), cost(config, 4)
    assert (wide.state, wide.traffic, wide.workspace_of_one) == (plain.state + 4, plain.traffic + 12, 0)
    assert cost(config, 2).workspace_of_one == 4
    matrices = cost(EmaConfig.model_construct(of=MuonConfig()), 4)
    assert matrices.of_weight is not None
    of_muon = costs.muon(MuonConfig(), 4).of_weight
    assert of_muon is not None
    for name, shape in (("layers.0.proj.weight", (8, 4)), ("norm.weight", (4,))):
        assert matrices.of_weight(name, shape).state == of_muon(name, shape).state + 4
