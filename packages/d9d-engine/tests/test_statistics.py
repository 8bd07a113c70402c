"""Values of metrics as series, and the merging of their states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from d9d_core.accumulators import AccumulatedMetric, Accumulator
from d9d_core.errors import BuildError, JobError
from d9d_core.metric import Vector
from d9d_engine.distributed import packed_reduction
from d9d_engine.distributed.packed_reduction import PackedReduction
from d9d_engine.step.metrics import Statistics
from d9d_engine.trackers.utilisation import Utilisation, known_peak, resident_bytes
from torch import Tensor


class Returns(AccumulatedMetric):
    """Computes the values that it is given."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self.values = values

    def update(self, observations: Mapping[str, Tensor]) -> None: ...

    def compute(self) -> Mapping[str, Any]:
        return self.values


class Range(AccumulatedMetric):
    def __init__(self) -> None:
        super().__init__(
            total=Accumulator(),
            count=Accumulator(dtype=torch.int64),
            each=Accumulator(shape=(3,), dtype=torch.int64),
            largest=Accumulator("max"),
            least=Accumulator("min", dtype=torch.int64),
        )

    def update(self, observations: Mapping[str, Tensor]) -> None:
        x = observations["x"]
        self.accumulate(total=x.sum(), count=x.numel(), each=x.long(), largest=x.max(), least=x.min().long())

    def compute(self) -> Mapping[str, Tensor]:
        return self.state()


def series_of(**values: Any) -> dict[str, float]:
    statistics = Statistics({"mine": Returns(**values)}, gated=False)
    return {name: value.item() for name, value in statistics.compute().items()}  # type: ignore[union-attr]


def test_vectors_become_a_series_for_each_value() -> None:
    found = series_of(a=torch.tensor([1.0, 2.0]), b=Vector(torch.tensor([3]), ("cat",)), c=torch.tensor(4.0))
    assert found == {"a/0": 1, "a/1": 2, "b/cat": 3, "c": 4}


def test_a_series_of_the_loop_gets_the_name_of_the_metric_in_front() -> None:
    names = series_of(mfu=torch.tensor(1.0), memory=torch.tensor([1.0]), other=torch.tensor(1.0))
    assert list(names) == ["mine/mfu", "mine/memory/0", "other"]


@pytest.mark.parametrize(
    ("value", "text"), [(torch.zeros(2, 2), r"a tensor of shape \[2, 2\] as 'x'"), (1.0, "a float as 'x'")]
)
def test_other_values_are_refused(value: Any, text: str) -> None:
    with pytest.raises(BuildError, match=f"metric 'mine': compute\\(\\) returned {text}; return a 0-d or 1-D tensor"):
        series_of(x=value)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("a",), "has shape \\[2\\] and 1 names; give one dimension, and a name for each value"),
        (("a", "a"), "several values .* named a"),
    ],
)
def test_a_vector_has_a_name_for_each_value(names: tuple[str, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Vector(torch.zeros(2), names)


def test_an_accumulator_takes_in_numbers_and_tensors_and_refuses_other_shapes() -> None:
    metric = Range()
    for x in ([1.0, 2.0, 5.0], [-3.0, 4.0, 0.0]):
        metric.update({"x": torch.tensor(x)})
    found = {name: tensor.tolist() for name, tensor in metric.state().items()}
    assert found == {"total": 9, "count": 6, "each": [-2, 6, 5], "largest": 5, "least": -3}
    metric.reset()
    assert [tensor.tolist() for tensor in metric.state().values()] == [0, 0, [0, 0, 0], -torch.inf, 2**63 - 1]
    with pytest.raises(JobError, match=r"Range: a value of shape \[2\] does not fit into 'each' of shape \[3\]"):
        metric.accumulate(each=torch.zeros(2))


def test_all_metrics_take_one_all_reduce_for_each_operation_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, torch.dtype, int]] = []

    def all_reduce(buffer: Tensor, operation: Any, _group: Any) -> None:
        calls.append((operation, buffer.dtype, buffer.numel()))
        if operation == packed_reduction.dist.ReduceOp.SUM:
            buffer *= 2  # another rank has the same

    monkeypatch.setattr(packed_reduction.dist, "all_reduce", all_reduce)
    metrics = {f"{number}": Range() for number in range(10)}
    statistics = Statistics(metrics, gated=False, group=object())  # type: ignore[arg-type]
    statistics.update({"x": torch.tensor([1.0, 2.0, 5.0])})
    computed = statistics.compute()
    assert sorted(size for _, _, size in calls) == [10, 10, 10, 40]
    assert len({(str(operation), dtype) for operation, dtype, _ in calls}) == 4
    assert [computed[f"7/{name}"].item() for name in ("total", "count", "largest", "least")] == [16, 6, 5, 1]  # type: ignore[union-attr]
    assert computed["7/each/2"].item() == 10  # type: ignore[union-attr]
    assert metrics["7"].state()["total"] == 8  # its own again


def test_twins_compute_and_the_metrics_keep_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_reduction.dist, "all_reduce", lambda buffer, *_: buffer.mul_(3))
    metric, twin = Range(), Range()
    statistics = Statistics({"a": metric}, gated=False, group=object(), twins={"a": twin})  # type: ignore[arg-type]
    statistics.update({"x": torch.ones(3)})
    own = metric.state()
    assert statistics.compute()["total"] == 9
    assert all(metric.state()[name] is tensor for name, tensor in own.items())
    statistics.reset()
    assert statistics.compute()["count"] == 0


class Stays(Range):
    """Loads in place, into its initial tensors."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self._state.items():
            tensor.copy_(state[name])

    def compute(self) -> Mapping[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.state().items()}


def test_a_twin_that_stays_on_another_device_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_reduction.dist, "all_reduce", lambda buffer, *_: buffer.mul_(3))
    twin = Stays()
    twin._state = {name: tensor.to("meta") for name, tensor in twin.state().items()}
    metrics, twins = {"a": Stays(), "b": Range()}, {"a": twin, "b": Range()}
    statistics = Statistics(metrics, False, object(), twins=twins)  # type: ignore[arg-type]
    for total in (9, 18):
        statistics.update({"x": torch.ones(3)})
        computed = statistics.compute()
        assert computed["a/total"] == computed["b/total"] == total
    assert metrics["a"].state()["total"] == 6


def test_packed_copies_do_not_change_with_what_was_packed() -> None:
    tensors = {"a": torch.ones(2, 2), "b": torch.zeros(()), "c": torch.ones(3)}
    packed = PackedReduction.of(tensors, {"a": "sum", "b": "sum", "c": "max"}, None)
    tensors["a"] += 1
    assert {key: buffer.numel() for key, buffer in packed.buffers.items()} == {
        ("sum", torch.float32): 5,
        ("max", torch.float32): 3,
    }
    assert torch.equal(packed.view("a"), torch.ones(2, 2))


# --- utilisation of the device


def test_mfu_is_the_share_of_the_peak_of_all_devices() -> None:
    cpu = torch.device("cpu")
    assert Utilisation(cpu, 4, 2e9, peak_tflops=10.0)(5000.0) == {"mfu": pytest.approx(0.25)}
    assert Utilisation(cpu, 4, None, peak_tflops=10.0)(5000.0) == {}
    assert Utilisation(cpu, 4, 2e9)(5000.0) == {}


def test_memory_of_a_cpu_is_logged_on_request() -> None:
    values = Utilisation(torch.device("cpu"), 1, None, memory=True)(1.0)
    if resident_bytes() is None:
        assert values == {}
    else:
        assert 0.05 < values["memory/resident_gib"] < 1024


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI250X", 191.5),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_peaks_are_known_by_name(name: str, peak: float | None) -> None:
    assert known_peak(name) == peak


@pytest.mark.gpu
@pytest.mark.gpus(1)
def test_on_a_gpu_peaks_of_memory_are_logged() -> None:
    device = torch.device("cuda", 0)
    torch.empty(1 << 28, dtype=torch.uint8, device=device)
    values = Utilisation(device, 1, None)(1.0)
    assert 0.25 <= values["memory/allocated_gib"] <= values["memory/reserved_gib"]
