"""Tests of the plugin's own behaviour; conformance.py holds the suites."""

from __future__ import annotations

import pytest
import torch
from acme_tuning.config import CosineRestartsConfig, HostActivationsConfig, NormsConfig, SignumConfig, TwoEndsConfig
from acme_tuning.cosine_restarts import cosine_restarts
from acme_tuning.host_activations import HostActivations
from acme_tuning.norms import Norms
from acme_tuning.signum import Signum
from acme_tuning.silu_mul import silu_mul
from acme_tuning.v_gpipe import programs
from d9d_core.errors import BuildError
from d9d_core.schedule import count_stages
from d9d_engine.distributed.mesh import Topology
from d9d_nn.heads.heads import Heads
from torch import nn


def test_each_weight_moves_by_the_learning_rate() -> None:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([4.0, -0.1, 0.0])
    optimizer = Signum(SignumConfig(lr=0.5), {"weight": weight})
    optimizer.init_state()
    optimizer.step(torch.tensor(True))
    assert weight.tolist() == [-0.5, 0.5, 0.0]


def test_each_cycle_starts_at_the_full_rate_and_is_longer() -> None:
    factor = cosine_restarts(CosineRestartsConfig(cycle=2, growth=3), 100)
    assert [step for step in range(30) if factor(step) == 1.0] == [0, 2, 8, 26]
    assert factor(1) == pytest.approx(0.5)
    even = cosine_restarts(CosineRestartsConfig(cycle=4, growth=1, floor=0.2), 100)
    assert even(400) == 1.0
    assert even(402) == pytest.approx(0.6)


def test_a_text_is_its_first_and_its_last_state() -> None:
    heads = Heads({"ends": TwoEndsConfig()}, hidden_size=3, vocabulary=7, num_layers=1, std=0.1)
    hidden = torch.arange(12.0).view(1, 4, 3)
    assert heads(hidden, {}, lengths=torch.tensor([2]))["embedding"].tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]


def test_only_norms_train() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(2), "linear": nn.Linear(2, 2)})
    assert Norms(NormsConfig()).inject(model) == {"norm.weight", "norm.bias"}
    with pytest.raises(BuildError, match=r"no layer matches 'x'; there are: norm, linear"):
        Norms(NormsConfig(match="x")).inject(model)


def test_a_closed_gate_lets_nothing_through() -> None:
    assert silu_mul(torch.zeros(3), torch.ones(3)).tolist() == [0.0, 0.0, 0.0]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(BuildError, match="found no blocks"):
        HostActivations(HostActivationsConfig()).apply(nn.Linear(1, 1), Topology())


def test_each_rank_has_two_stages() -> None:
    assert count_stages(programs(3, 4)) == 6
