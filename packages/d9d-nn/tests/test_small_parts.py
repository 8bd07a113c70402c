"""Sums of preferences over ranks, pooling over split samples, and limits of the loss of logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.kernel import OpSignature
from d9d_core.strategy import ContextCall, StepShape
from d9d_nn.heads.pooling import PoolsContext
from d9d_nn.inference.config import HiddenStatesConfig
from d9d_nn.ops import linear_cross_entropy as loss
from d9d_nn.ops import silu_mul
from d9d_nn.preference import sums
from d9d_nn.preference.config import PreferenceMetricConfig
from d9d_nn.preference.metric import PreferenceMetric
from pydantic import ValidationError
from torch import Tensor


def test_the_metric_of_preferences_is_means_over_all_pairs() -> None:
    metric = PreferenceMetric(PreferenceMetricConfig())
    assert metric.compute() == {}
    metric.update({"chosen_rewards": torch.tensor([1.0, 5.0]), "rejected_rewards": torch.tensor([3.0, 3.0])})
    metric.update({"chosen_rewards": torch.tensor([2.0, 4.0]), "rejected_rewards": torch.tensor([2.0, 0.0])})
    expected = {
        "preference/chosen": 3.0, "preference/rejected": 2.0, "preference/margin": 1.0, "preference/accuracy": 0.5,
    }  # fmt: skip
    assert {name: value.item() for name, value in metric.compute().items()} == expected
    other = PreferenceMetric(PreferenceMetricConfig())
    other.load_state({"sums": 2 * metric.state()["sums"]})
    assert {name: value.item() for name, value in other.compute().items()} == expected
    assert metric.state()["sums"].tolist() == [12.0, 8.0, 2.0, 4.0]
    assert metric.reductions == {"sums": "sum"}
    metric.reset()
    assert metric.compute() == {}
    assert metric.state()["sums"].tolist() == [0.0] * 4
    other.load_state({"sums": torch.zeros(4)})
    assert {value.item() for value in other.compute().values()} == {0.0}


def test_observations_that_the_metric_of_preferences_lacks_are_named() -> None:
    metric = PreferenceMetric(PreferenceMetricConfig())
    with pytest.raises(JobError) as error:
        metric.update({"chosen_rewards": torch.ones(1), "loss": torch.ones(1)})
    assert str(error.value) == (
        "metrics: preference needs rejected_rewards, but the task's observations() returns only chosen_rewards, loss; "
        "remove the metric, or use the task dpo"
    )
    with pytest.raises(JobError, match="needs chosen_rewards and rejected_rewards, .* returns only nothing"):
        metric.update({})


def test_a_sum_over_ranks_has_the_sum_of_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = []

    def all_reduce(tensor: Tensor, group: Any) -> None:
        groups.append(group)
        tensor.mul_(3)  # three ranks with equal tensors

    monkeypatch.setattr(sums.dist, "all_reduce", all_reduce)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    out = sums.summed(x, "group")  # type: ignore[arg-type]
    (out * torch.tensor([1.0, 10.0])).sum().backward()
    assert (out.tolist(), x.tolist()) == ([3.0, 6.0], [1.0, 2.0])
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 30.0]
    assert groups == ["group", "group"]


def test_heads_that_pool_gather_the_hidden_states_of_all_positions() -> None:
    step = StepShape(("forward",), samples=2, positions=5, itemsize=2)
    head, hidden = PoolsContext(), torch.ones(1, 2, 3)
    assert head.of_all_positions(hidden) is hidden
    assert [call.bytes for call in head.context_collectives(step)] == [None, None]
    head.features = 7
    assert [call.bytes for call in head.context_collectives(step)] == [140, 140]
    head.see_context(SimpleNamespace(ranks=4, gather=lambda tensor: 2 * tensor))  # type: ignore[arg-type]
    assert torch.equal(head.of_all_positions(hidden), 2 * hidden)
    assert list(head.context_collectives(step)) == [
        ContextCall("all_gather", 560, "hidden states"),
        ContextCall("reduce_scatter", 560, "gradients of hidden states", backward=True),
    ]


def test_a_layer_is_named_once() -> None:
    assert HiddenStatesConfig().layers == (-1,)
    assert HiddenStatesConfig(layers=(0, -1)).layers == (0, -1)
    with pytest.raises(ValidationError, match=r"a layer appears twice in \[0, 1, 0\]; name each once"):
        HiddenStatesConfig(layers=(0, 1, 0))
    with pytest.raises(ValidationError):
        HiddenStatesConfig(layers=())


def test_more_logits_are_kept_on_a_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loss.may_be_kept(torch.zeros(1)) == 2**27
    for memory, itemsize, most in ((20 * 2**30, 2, 2**29), (20 * 2**30, 4, 2**28), (20 * 2**20, 2, 2**27)):
        properties = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(loss.torch.cuda, "get_device_properties", lambda _device, found=properties: found)
        hidden: Any = SimpleNamespace(device=torch.device("cuda"), itemsize=itemsize)
        assert loss.may_be_kept(hidden) == most


def test_products_are_added_in_the_wide_or_the_same_dtype() -> None:
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
    for dtype in (torch.float32, torch.bfloat16):
        total = torch.full((1, 1), 5.0)
        loss.add_product(total, a.to(dtype), b.to(dtype))
        assert total.item() == 16.0


def test_an_activation_that_is_computed_again_has_the_same_gradients() -> None:
    results = []
    for function in (silu_mul.silu_mul, silu_mul.recomputed_build(OpSignature("silu_mul", "cpu", "float32", {}))):
        gate, up = (torch.tensor([-1.0, 0.5], requires_grad=True), torch.tensor([2.0, 3.0], requires_grad=True))
        out = function(gate, up)
        out.sum().backward()
        results.append((out, gate.grad, up.grad))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)  # type: ignore[arg-type]
