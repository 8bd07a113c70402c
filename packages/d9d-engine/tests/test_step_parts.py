"""Parts of a training step alone: loss scales, auxiliary losses, tallies, boundaries, seeds, buckets; their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.task import StageInputs
from d9d_core.traits import InputTargets, LossTerm
from d9d_core.types import TensorSpec
from d9d_engine.run import clock as clock_module
from d9d_engine.run.clock import Clock
from d9d_engine.step import auxiliary_losses, buckets
from d9d_engine.step import loss as loss_module
from d9d_engine.step.auxiliary_losses import AuxiliaryLosses, Tallies
from d9d_engine.step.boundary import Boundaries
from d9d_engine.step.executor import StageLoss
from d9d_engine.step.loss import LossScale, on_device
from d9d_engine.step.randomness import MicrobatchSeeds, derive_seed
from d9d_engine.step.step import TrainStep, constant_lr
from torch import Tensor, nn


def tensor(value: float) -> Tensor:
    return torch.tensor(value)


class Task:
    """Task with two terms, whose weights are in the microbatch."""

    def __init__(self, late: bool = False) -> None:
        self.coefficients = {"nll": 1.0, "z": 0.5}
        self.late = late

    def weights(self, microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"z": microbatch["z"], "nll": microbatch["nll"]}

    def inputs(self, microbatch: Mapping[str, Tensor]) -> StageInputs:
        shared = {"lengths": microbatch["lengths"]} if "lengths" in microbatch else {}
        return StageInputs(first={"tokens": microbatch["tokens"]}, shared=shared)


class Balance(nn.Module):
    """Module with two loss terms."""

    def __init__(self, sums: tuple[float, float], coefficient: float = 0.25) -> None:
        super().__init__()
        self.sums = {"balance": tensor(sums[0]), "spread": tensor(sums[1])}
        self.factors = {"spread": tensor(0.0), "balance": tensor(0.0)}
        self.coefficient = coefficient

    def loss_terms(self) -> Mapping[str, LossTerm]:
        return {"balance": LossTerm(self.coefficient, "position"), "spread": LossTerm(2.0, "sample")}

    def loss_sums(self) -> Mapping[str, Tensor]:
        return self.sums

    def loss_factors(self) -> Mapping[str, Tensor]:
        return self.factors


def auxiliary(*modules: nn.Module, task: Task | None = None, context_ranks: int = 1) -> AuxiliaryLosses:
    stages = {stage: nn.Sequential(module) for stage, module in enumerate(modules)}
    return AuxiliaryLosses(stages, nn.Sequential(*modules), cast("Any", task or Task()), context_ranks)


def microbatch(nll: float, z: float, rows: int, positions: int) -> dict[str, Tensor]:
    return {"nll": tensor(nll), "z": tensor(z), "tokens": torch.zeros(rows, positions, dtype=torch.int64)}


PACK = [microbatch(3.0, 0.0, 2, 5), microbatch(5.0, 0.0, 3, 4)]


def scale(losses: AuxiliaryLosses, late: bool = False, group: Any = None, everywhere: Any = None) -> LossScale:
    return LossScale(cast("Any", Task(late)), losses, group, everywhere)


def test_the_factor_of_a_term_is_one_over_its_weight_in_the_pack_and_zero_without_weight() -> None:
    found = scale(auxiliary()).begin(PACK)
    assert {name: value.item() for name, value in found.items()} == {"nll": 0.125, "z": 0.0}
    found = scale(auxiliary(Balance((0, 0)))).begin(PACK)
    assert {name: round(1 / value.item()) if value else 0 for name, value in found.items()} == {
        "nll": 8, "z": 0, "balance": 22, "spread": 5,
    }  # fmt: skip


def test_weights_of_all_ranks_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(value: Tensor, group: object) -> None:
        assert group == "group"
        value += 8

    monkeypatch.setattr(loss_module, "dist", SimpleNamespace(all_reduce=reduce))
    found = scale(auxiliary(), group="group").begin(PACK)
    assert {name: value.item() for name, value in found.items()} == {"nll": 1 / 16, "z": 0.125}
    late = scale(auxiliary(), late=True, everywhere="group")
    scaled: list[float] = []
    gradients: Any = SimpleNamespace(scale=lambda factor: scaled.append(factor.item()), device=torch.device("cpu"))
    settled = late.settle(StageLoss({"nll": tensor(6.0)}, tensor(8.0)), gradients)
    assert (settled.terms["nll"].item(), scaled) == (0.375, [1 / 16])
    none = late.settle(StageLoss({}, None), gradients)
    assert (none.terms, scaled[1]) == ({}, 0.125)


def test_a_late_weight_scales_after_the_last_backward() -> None:
    late = scale(auxiliary(), late=True)
    assert {name: value.item() for name, value in late.begin(PACK).items()} == {"nll": 1.0, "z": 1.0}
    scaled: list[float] = []
    gradients: Any = SimpleNamespace(scale=lambda factor: scaled.append(factor.item()), device=torch.device("cpu"))
    weight = tensor(4.0)
    assert late.settle(StageLoss({"nll": tensor(6.0)}, weight), gradients).terms["nll"].item() == 1.5
    assert late.settle(StageLoss({"nll": tensor(6.0)}, tensor(0.0)), gradients).terms["nll"].item() == 0.0
    assert (scaled, weight.item()) == ([0.25, 0.0], 4.0)
    loss = StageLoss({"nll": tensor(6.0)}, weight)
    assert scale(auxiliary()).settle(loss, gradients) is loss
    assert len(scaled) == 2
    with pytest.raises(BuildError, match=r"modules of the model add loss terms too \(balance, spread\)"):
        scale(auxiliary(Balance((0, 0))), late=True)


def test_a_number_becomes_a_tensor_of_one_element_like_another() -> None:
    like = torch.zeros(3, dtype=torch.float64)
    for number in (3, 3.0, torch.tensor(3)):
        found = on_device(number, like)
        assert (found.tolist(), found.dtype) == ([3.0], torch.float64)


def test_auxiliary_losses_weigh_samples_or_positions() -> None:
    losses = auxiliary(Balance((1, 2)), context_ranks=2)
    assert losses.coefficients == {"balance": 0.25, "spread": 2.0}
    assert losses.weights(microbatch(0, 0, 3, 4)) == {"balance": 24, "spread": 3}
    packed = {**microbatch(0, 0, 3, 4), "lengths": torch.tensor([4, 0, 3])}
    assert {name: int(value) for name, value in losses.weights(packed).items()} == {"balance": 7, "spread": 2}
    assert auxiliary().weights(microbatch(0, 0, 3, 4)) == {}


class Further(Balance):
    """Module with a loss term over its own targets."""

    def loss_terms(self) -> Mapping[str, LossTerm]:
        return {"further": LossTerm(0.5, InputTargets("later", 1))}


def test_a_term_with_own_targets_weighs_their_number_on_this_rank() -> None:
    class Shifting(Task):
        def inputs(self, microbatch: Mapping[str, Tensor]) -> StageInputs:
            return StageInputs(super().inputs(microbatch).first, {"later": microbatch["later"]})

    losses = auxiliary(Further((0, 0)), task=Shifting(), context_ranks=2)
    later = torch.tensor([[[1, 2], [3, -100], [-100, 4]]])
    (weight,) = losses.weights({**microbatch(0, 0, 1, 3), "later": later}).values()
    assert int(weight) == 2
    with pytest.raises(BuildError, match="loss term 'further' over its input 'later', which the task does not give"):
        auxiliary(Further((0, 0))).weights(microbatch(0, 0, 1, 3))


def test_auxiliary_losses_fill_factors_and_add_up_sums_of_a_stage() -> None:
    first, second = Balance((1.0, 2.0)), Balance((10.0, 20.0))
    losses = AuxiliaryLosses(
        {0: nn.Sequential(first, second), 1: nn.Sequential()}, nn.Sequential(first, second), cast("Any", Task())
    )
    losses.begin({"balance": tensor(0.5), "spread": tensor(0.125)})
    for module in (first, second):
        assert {name: value.item() for name, value in module.factors.items()} == {"balance": 0.125, "spread": 0.25}
    assert {name: value.item() for name, value in losses.take(0).items()} == {"balance": 11.0, "spread": 22.0}
    assert losses.take(1) == {}
    auxiliary().begin({})


def test_terms_with_two_meanings_are_refused() -> None:
    with pytest.raises(BuildError, match="module '1' adds the loss term 'balance' as .*0.5.*, another as .*0.25"):
        auxiliary(Balance((0, 0)), Balance((0, 0), coefficient=0.5))
    task = Task()
    task.coefficients["spread"] = 1.0
    with pytest.raises(
        BuildError, match="module '0' adds a loss term 'spread', but the task has this term, too; rename one"
    ):
        auxiliary(Balance((0, 0)), task=task)


class Counts(nn.Module):
    """Module with two tallies, of which it adapts to one."""

    def __init__(self, adapts: bool = True) -> None:
        super().__init__()
        self.counted = {"load": torch.tensor([1, 2]), "dropped": torch.tensor([5])}
        self.adapts, self.adapted = adapts, list[tuple[dict[str, list[int]], bool]]()

    def tallies(self) -> Mapping[str, Tensor]:
        return self.counted

    def adapts_to(self) -> frozenset[str]:
        return frozenset({"load"} if self.adapts else ())

    def adapt(self, sums: Mapping[str, Tensor], finite: Tensor) -> None:
        self.adapted.append(({name: value.tolist() for name, value in sums.items()}, bool(finite)))


def test_modules_adapt_to_the_sum_of_their_tallies_over_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, still = Counts(), Counts(), Counts(adapts=False)
    tallies = Tallies({0: nn.ModuleDict({"a": one, "b": still}), 1: nn.ModuleDict({"c": other})})
    assert tallies.adapted_bytes() == [32]
    assert {name: value.tolist() for name, value in tallies.take(0).items()} == {
        "a/load": [1, 2], "a/dropped": [5], "b/load": [1, 2], "b/dropped": [5],
    }  # fmt: skip
    one.counted["load"][0] = 10  # the next forward overwrites it
    tallies.take(0)
    tallies.take(1)
    tallies.adapt(torch.tensor(True))
    assert one.adapted == [({"load": [11, 4]}, True)]
    assert other.adapted == [({"load": [1, 2]}, True)]
    assert still.adapted == []
    tallies.adapt(torch.tensor(True))  # nothing was counted
    assert len(one.adapted) == 1
    reduced: list[tuple[list[int], object]] = []

    def reduce(value: Tensor, group: object) -> None:
        reduced.append((value.tolist(), group))
        value *= 2

    monkeypatch.setattr(auxiliary_losses, "dist", SimpleNamespace(all_reduce=reduce))
    single = Counts()
    single.counted["load"] = torch.tensor([0.5])
    ranks = Tallies({0: nn.ModuleDict({"a": one, "s": single, "c": other})}, cast("Any", "group"))
    assert ranks.adapted_bytes() == [32, 4]
    ranks.take(0)
    ranks.adapt(torch.tensor(False))
    assert reduced == [([10, 2, 1, 2], "group"), ([0.5], "group")]  # one message for each dtype
    assert (one.adapted[1], other.adapted[1]) == (({"load": [20, 4]}, False), ({"load": [2, 4]}, False))
    assert single.adapted == [({"load": [1.0]}, False)]


class Stage(nn.Module):
    """Pipeline stage that passes on hidden states and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.asked = 0

    def boundary(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        self.asked += 1
        rows, positions = specs["tokens"].shape
        return {"hidden": TensorSpec((rows, positions, 4), torch.float32), "at": TensorSpec((rows,), torch.int64)}


def test_boundaries_follow_the_shape_of_the_microbatch_and_the_dtype_of_the_computation() -> None:
    stage = Stage()
    boundaries = Boundaries([stage], torch.bfloat16)
    small, large = microbatch(0, 0, 2, 3), microbatch(0, 0, 5, 3)
    expected = {"hidden": TensorSpec((2, 3, 4), torch.bfloat16), "at": TensorSpec((2,), torch.int64)}
    assert boundaries.after(0, small) == expected
    assert boundaries.after(0, small) == expected
    assert stage.asked == 1
    assert boundaries.after(0, large)["at"].shape == (5,)
    assert Boundaries([Stage()]).after(0, small)["hidden"].dtype == torch.float32
    outputs = {"at": torch.zeros(2, dtype=torch.int64), "hidden": torch.zeros(2, 3, 4)}
    conform = boundaries.conform(0, outputs, small)
    assert list(conform) == ["hidden", "at"]
    assert conform["hidden"].dtype == torch.bfloat16
    with pytest.raises(
        BuildError, match=r"boundary\(\) of stage 0 declares \{'hidden': \(5, 3, 4\).* returned \{'at': \(2,\)"
    ):
        boundaries.conform(0, outputs, large)


def test_seeds_depend_on_the_sample_and_leave_out_what_a_single_process_lacks() -> None:
    one = MicrobatchSeeds(7, 0, 2, 0)
    other = MicrobatchSeeds(7, 4, 2, 0)
    assert one(3, 2, 0) == other(3, 0, 0) == derive_seed(7, "step", 3, "sample", 4)
    assert one(3, 2, 1) == derive_seed(7, "step", 3, "sample", 4, "stage", 1)
    assert MicrobatchSeeds(7, 0, 2, 1)(3, 2, 0) == derive_seed(7, "step", 3, "sample", 4, "part", 1)
    assert MicrobatchSeeds(7, 0, 2, 1)(3, 2, 1) == derive_seed(7, "step", 3, "sample", 4, "stage", 1, "part", 1)
    seeds = {derive_seed(seed, *keys) for seed in (1, 2) for keys in ((1, 2), (12,), ("a", 2))}
    assert len(seeds) == 6
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    # SHA-256 of "0": its first 64 bits are 5feceb66ffc86f38.
    assert derive_seed(0) == 0x5FECEB66FFC86F38 >> 1


def test_the_clock_leaves_out_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def wait(seconds: float) -> None:
        now[0] += seconds

    clock = Clock()
    wait(1)
    assert clock.take() == 1.0
    wait(2)
    clock.stop()
    wait(10)
    clock.stop()
    wait(10)
    clock.go()
    wait(4)
    clock.go()
    assert clock.take() == 6.0
    wait(8)
    with clock.paused():
        wait(100)
    with suppress(ValueError), clock.paused():
        wait(100)
        raise ValueError
    assert clock.take() == 8.0


class Recorded:
    """Any collaborator of a step: records its calls."""

    def __init__(self, calls: list[str], name: str, **returns: Any) -> None:
        self._calls, self._name, self._returns = calls, name, returns

    def __call__(self, *given: Any) -> Any:
        self._calls.append(f"{self._name}({', '.join(map(str, given))})")
        return self._returns.get("")

    def __getattr__(self, method: str) -> Any:
        return Recorded(self._calls, f"{self._name}.{method}", **{"": self._returns.get(method)})


class Averages:
    """Optimizer with averaged weights for evaluation."""

    average = lr = init_state = step = set_lr_factor = describe = state = True

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        self._calls.append("averages in")
        yield
        self._calls.append("averages out")


def step_with(calls: list[str], optimizer: Any = None) -> TrainStep:
    def part(name: str, **returns: Any) -> Any:
        return Recorded(calls, name, **returns)

    @contextmanager
    def ranges(name: str) -> Iterator[None]:
        calls.append(f"<{name}>")
        yield
        calls.append("</>")

    def emit(event: object) -> None:
        calls.append(type(event).__name__)

    methods = {name: part(f"optimizer.{name}") for name in ("set_lr_factor", "step")}
    result = SimpleNamespace(finite="finite")
    counted = iter([3, 4])
    return TrainStep(
        task=cast("Any", SimpleNamespace(begin_step=part("task.begin_step"), count=lambda _mb: next(counted))),
        first_pass=part("first_pass", **{"": ["x", "y"]}),
        loss_scale=part("loss_scale", begin="scale", settle="settled"),
        executor=part("executor", run="loss"),
        gradients=part("gradients"),
        clipper=part("clipper", clip=result),
        statistics=part("statistics"),
        before_update=part("before_update"),
        optimizer=optimizer or SimpleNamespace(**methods),
        ties=part("ties"),
        lr_schedule=lambda step: step / 10,
        tallies=part("tallies"),
        events=cast("Any", SimpleNamespace(emit=emit)),
        ranges=cast("Any", ranges),
        mark=part("mark"),
    )


def test_a_step_calls_its_collaborators_in_order() -> None:
    calls: list[str] = []
    step = step_with(calls)
    step.loss_scale.settle = lambda loss, gradients: calls.append(f"settle({loss})") or "settled"  # type: ignore
    result = step(7, ["a", "b"])  # type: ignore[list-item]
    assert cast("Any", result).finite == "finite"
    assert calls == [
        "StepStarts", "task.begin_step(7)", "mark()", "ForwardBackwardStarts", "statistics.begin()",
        "first_pass(['a', 'b'], 7)", "loss_scale.begin(['x', 'y'])", "executor.run(7, ['x', 'y'], scale, None)",
        "ForwardBackwardEnds", "<gradient reduction>", "gradients.finish()", "</>", "settle(loss)", "<clip>",
        "clipper.clip(settled, 7)", "</>", "OptimizerStepStarts", "before_update()", "<optimizer>",
        "optimizer.set_lr_factor(0.7)", "optimizer.step(finite)", "</>", "ties.copy_values()",
        "tallies.adapt(finite)", "OptimizerStepEnds", "statistics.settle(finite)", "gradients.reset()", "StepEnds",
    ]  # fmt: skip
    assert constant_lr(5) == 1.0


def test_evaluation_weights_are_in_the_model_inside_the_block_only() -> None:
    calls: list[str] = []
    with step_with(calls, Averages(calls)).evaluation_weights():
        calls.append("evaluation")
    assert calls == [
        "before_update()", "averages in", "ties.copy_values()", "evaluation", "averages out", "ties.copy_values()",
    ]  # fmt: skip
    calls.clear()
    with step_with(calls).evaluation_weights():
        calls.append("evaluation")
    assert calls == ["evaluation"]


def member(elements: int, group: str = "g", operation: str = "sum", dtype: torch.dtype = torch.float32) -> Any:
    return buckets.Member(nn.Parameter(torch.zeros(elements, dtype=dtype)), cast("Any", group), operation)


def filled(limit: int, *members: Any) -> list[list[int]]:
    return [[m.parameter.numel() for m in bucket.members] for bucket in buckets._fill(members, limit)]


def test_buckets_are_filled_up_to_their_limit_and_large_gradients_stay_alone() -> None:
    # 160 bytes: a gradient of 20 bytes, 5 elements, is reduced alone.
    assert filled(160, member(4), member(5), member(4)) == [[5], [4, 4]]
    assert filled(160, *[member(4)] * 11) == [[4] * 10, [4]]
    assert filled(160, member(4, dtype=torch.float64), member(3, dtype=torch.float64)) == [[4], [3]]


def test_buckets_hold_one_group_operation_and_dtype_in_the_order_of_their_last_gradients() -> None:
    members = [
        member(1), member(2, "h"), member(3, operation="max"), member(1), member(2, dtype=torch.bfloat16),
        member(2, "h"), member(3),
    ]  # fmt: skip
    assert filled(1000, *members) == [[3], [2], [2, 2], [1, 1, 3]]


class Work:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def wait(self) -> None:
        self.calls.append("wait")


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All-reduces that double the values."""
    calls: list[Any] = []

    def all_reduce(value: Tensor, operation: Any, group: object, async_op: bool) -> Work:
        calls.append((value.tolist(), str(operation).rpartition(".")[2], group, async_op))
        value *= 2
        return Work(calls)

    monkeypatch.setattr(buckets, "dist", SimpleNamespace(all_reduce=all_reduce))
    return calls


def test_gradients_are_reduced_in_the_backward_once_their_bucket_and_all_before_are_complete(
    reductions: list[Any],
) -> None:
    first, second, third = member(1), member(2), member(30)
    found = buckets.Buckets([first, second, third], 160)
    assert cast("Any", found.sizes()) == [("g", 120), ("g", 12)]

    def backward(*members: Any) -> None:
        sum((m.parameter * (1.0 + m.parameter.numel())).sum() for m in members).backward()

    backward(third)
    assert reductions == []  # not armed: an earlier microbatch
    found.arm()
    backward(first, second)
    assert reductions == []  # the bucket before is not complete
    backward(third)
    assert reductions == [([62.0] * 30, "SUM", "g", True), ([3.0, 3.0, 2.0], "SUM", "g", True)]
    found.finish()
    assert reductions[2:] == ["wait", "wait"]
    assert first.parameter.grad.tolist() == [4.0]
    assert second.parameter.grad.tolist() == [6.0, 6.0]
    assert third.parameter.grad.tolist() == [124.0] * 30
    backward(third)
    assert len(reductions) == 4  # not armed any more


def test_missing_gradients_are_reduced_as_zeros_at_the_end(reductions: list[Any]) -> None:
    members = [member(2, operation="max"), member(1, operation="max")]
    found = buckets.Buckets(members, 160, overlap=False)
    found.arm()
    (members[1].parameter * 3).sum().backward()
    assert reductions == []
    found.finish()
    assert reductions == [([3.0, 0.0, 0.0], "MAX", "g", True), "wait"]
    assert [m.parameter.grad.tolist() for m in members] == [[0.0, 0.0], [6.0]]
