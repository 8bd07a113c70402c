"""Strategies and layouts that a search tries, its order and its ends. Strategies and predictions are stand-ins."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
from d9d_core.config import PluginConfig
from d9d_core.cost import AttentionShape, BlockCost, ContextCost, Exchange, OpCost, StageCost
from d9d_core.errors import BuildError, JobError
from d9d_core.job_file.job import Mesh
from d9d_core.plugin import Ref, ScheduleSpec, StrategySpec, hookimpl
from d9d_core.registry.registry import Registry
from d9d_engine.compose.communication import nodes
from d9d_engine.distributed import devices
from d9d_planner import calibrate, check, command, search
from d9d_planner.check import _is_usable, _nearby, check_predictions, predicted
from d9d_planner.costs import context
from d9d_planner.device import Device
from d9d_planner.layout import Layout
from d9d_planner.options import Options
from pydantic import create_model

GIB = 2**30


class Config(PluginConfig):
    """Config of a strategy or schedule."""

    name: str = "any"
    degree: int = 1
    layers: tuple[int, ...] | None = None


class Needs(PluginConfig):
    """Config with a field that has no default."""

    name: Literal["needs"] = "needs"
    size: int


@cache
def config_of(name: str) -> type[Config]:
    """Config class that a name selects."""
    return create_model(f"{name.title()}Config", __base__=Config, name=(Literal[name], name))


class Here(Ref):
    def load(self) -> Any:
        if self.target == "my:more":
            return lambda config: [config.model_copy(update={"degree": degree}) for degree in (2, 3)]
        name = self.target.partition(":")[2]
        return Needs if name == "needs" else config_of(name)


def strategy(name: str, anchor: str, *axes: str, requires: frozenset[str] = frozenset(), more: bool = False) -> Any:
    return StrategySpec(
        name=name,
        summary="x",
        config=Here(f"my:{name}"),
        build=Here(f"my:{name}"),
        anchor=anchor,
        axes=frozenset(axes),
        requires=requires,
        alternatives=Here("my:more") if more else None,
    )


@hookimpl
def d9d_strategies() -> list[StrategySpec]:
    return [
        strategy("tensor", "tensor", "tp", more=True),
        strategy("ring", "context", "cp", more=True),
        strategy("library", "context", "cp", requires=frozenset({"import:x"})),
        strategy("experts", "expert", "ep"),
        strategy("shards", "data", "dp_shard", more=True),
        strategy("both", "data", "dp_shard", "dp_replicate"),
        strategy("copies", "data", "dp_replicate"),
        strategy("again", "checkpointing"),
        strategy("needs", "checkpointing"),
        strategy("compile", "compile"),
    ]


@hookimpl
def d9d_schedules() -> list[ScheduleSpec]:
    refs = {name: Here(f"my:{name}") for name in ("one", "two")}
    return [ScheduleSpec(name=name, summary="x", config=ref, build=ref) for name, ref in refs.items()]


REGISTRY = Registry.of(SimpleNamespace(__name__="acme", d9d_strategies=d9d_strategies, d9d_schedules=d9d_schedules))


def named(name: str, **more: Any) -> Config:
    return config_of(name)(**more)


def options(*parallel: Config, pipeline: Config | None = None, experts: int | None = 6) -> Options:
    job: Any = SimpleNamespace(
        parallel=list(parallel), pipeline=pipeline, model=SimpleNamespace(num_experts=experts), batch=None
    )
    return Options(job, REGISTRY)


def settings(several: list[list[PluginConfig]]) -> list[list[tuple[str, int]]]:
    return [[(config.selector, getattr(config, "degree", 0)) for config in one] for one in several]


def test_strategies_outside_of_layouts_are_kept_and_those_that_need_values_are_not_tried() -> None:
    found = options(named("compile", degree=5), named("tensor"), named("again", degree=7))
    assert [(config.selector, getattr(config, "degree", 0)) for config in found.kept] == [("compile", 5)]
    assert settings(found.recomputing) == [[("again", 7)]]
    assert settings(options().recomputing) == [[("again", 1)]]
    assert options().kept == []


def test_an_axis_has_the_jobs_own_strategy_or_those_without_a_library() -> None:
    assert [spec.name for spec in options().strategies("cp")] == ["ring"]
    assert [spec.name for spec in options(named("library")).strategies("cp")] == ["library"]
    assert [spec.name for spec in options(named("library"), named("ring")).strategies("cp")] == ["library", "ring"]


def test_a_strategy_that_alters_the_training_keeps_its_axis_and_excludes_its_conflicts() -> None:
    loose = replace(
        strategy("loose", "data", "dp_replicate"),
        alters_training=True,
        conflicts=frozenset({"strategy:shards", "strategy:ring", "strategy:experts", "mesh:pp"}),
    )
    module: Any = SimpleNamespace(
        __name__="acme", d9d_strategies=hookimpl(lambda: [*d9d_strategies(), loose]), d9d_schedules=d9d_schedules
    )
    job: Any = SimpleNamespace(
        parallel=[named("loose", degree=4), named("tensor")],
        pipeline=None,
        model=SimpleNamespace(num_experts=6),
        mesh=Mesh(dp_replicate=3, tp=2),
    )
    found = Options(job, Registry.of(module))
    assert settings([found.kept]) == [[("loose", 4)]]
    assert found.fixed == {"dp_replicate": 3}
    names = {axis: [spec.name for spec in found.strategies(axis)] for axis in ("tp", "cp", "ep")}
    assert names == {"tp": ["tensor"], "cp": [], "ep": []}
    assert found.expert_groups(Mesh(dp_shard=4, tp=3)) == [1]
    # The strategy for both axes is the only one left for dp_shard; dp_replicate needs none beside the kept one.
    assert settings(found.parallel(Mesh(dp_shard=2, dp_replicate=3), waits=True)) == [[("both", 1)]]
    assert settings(found.parallel(Mesh(dp_replicate=3), waits=True)) == [[]]


def test_of_strategies_that_fit_as_well_the_jobs_own_is_tried_first() -> None:
    wide = strategy("wide", "data", "dp_replicate", "pp")
    module: Any = SimpleNamespace(
        __name__="acme", d9d_strategies=hookimpl(lambda: [*d9d_strategies(), wide]), d9d_schedules=d9d_schedules
    )
    job: Any = SimpleNamespace(parallel=[named("wide", degree=4)], pipeline=None, model=None)
    found = Options(job, Registry.of(module))
    assert settings(found.parallel(Mesh(dp_replicate=2), waits=True)) == [[("wide", 4)]]
    assert settings(found.parallel(Mesh(dp_shard=2, dp_replicate=2), waits=True)) == [[("both", 1)]]


def test_numbers_of_expert_groups_divide_the_experts_and_fit_the_mesh() -> None:
    mesh = Mesh(dp_shard=4, tp=3)
    assert options().expert_groups(mesh) == [1, 3, 6]
    assert options(experts=None).expert_groups(mesh) == [1]


def test_a_mesh_gets_a_strategy_for_each_of_its_axes() -> None:
    assert settings(options().parallel(Mesh(), waits=True)) == [[]]
    assert settings(options().parallel(Mesh(tp=2, cp=2, ep=2), waits=True)) == [
        [("tensor", 1), ("ring", 1), ("experts", 1)]
    ]
    # Settings of inner axes vary only if the job has their strategy, settings of data only with several microbatches.
    assert settings(options(named("tensor", degree=9)).parallel(Mesh(tp=2), waits=False)) == [
        [("tensor", 9)],
        [("tensor", 2)],
        [("tensor", 3)],
    ]
    assert settings(options().parallel(Mesh(dp_shard=2), waits=False)) == [[("shards", 1)]]
    assert settings(options().parallel(Mesh(dp_shard=2), waits=True)) == [
        [("shards", 1)],
        [("shards", 2)],
        [("shards", 3)],
    ]
    assert settings(options(named("tensor")).parallel(Mesh(dp_shard=2, tp=2), waits=True))[:4] == [
        [("tensor", 1), ("shards", 1)],
        [("tensor", 2), ("shards", 1)],
        [("tensor", 3), ("shards", 1)],
        [("tensor", 1), ("shards", 2)],
    ]


def test_data_parallel_axes_get_one_strategy_for_all_of_them_without_further_axes() -> None:
    assert settings(options().parallel(Mesh(dp_shard=2, dp_replicate=2), waits=True)) == [[("both", 1)]]
    assert settings(options().parallel(Mesh(dp_replicate=2), waits=True)) == [[("copies", 1)]]
    assert settings(options(named("both", degree=4)).parallel(Mesh(dp_shard=2), waits=True)) == [[("both", 4)]]
    # A strategy of the job for another axis is no reason to leave out the settings of this one.
    assert settings(options(named("copies", degree=4)).parallel(Mesh(dp_shard=2), waits=False)) == [[("shards", 1)]]


def test_schedules_are_those_installed_without_the_jobs_layers_per_stage() -> None:
    assert [(one.selector, one.degree) for one in options().schedules] == [("one", 1), ("two", 1)]  # type: ignore[union-attr]
    own = options(pipeline=named("two", degree=3, layers=(1, 2))).schedules
    assert [(one.selector, one.degree, one.layers) for one in own] == [("one", 1, None), ("two", 3, None)]  # type: ignore[union-attr]


# --- the search -------------------------------------------------------------------------------------------------------


@dataclass
class Predicted:
    """Stand-in of a prediction; ``needed`` below zero stands for an invalid layout."""

    total: float
    needed: float = 1.0
    least_time: float = 0.0
    least_memory: float = 1.0
    pp: int = 1
    tp: int = 1
    microbatch: int = 1
    schedules: tuple[Predicted, ...] = field(default=(), repr=False)

    memories: ClassVar[int] = 0

    @property
    def time(self) -> Any:
        return SimpleNamespace(total=self.total)

    @property
    def memory(self) -> Any:
        if self.needed < 0:
            raise BuildError("no such schedule")
        return SimpleNamespace(needed=self.needed)

    @property
    def layout(self) -> Any:
        return SimpleNamespace(mesh=SimpleNamespace(pp=self.pp, tp=self.tp), microbatch=self.microbatch)


def searched(monkeypatch: pytest.MonkeyPatch, *bases: Predicted, memory: float = 5.0) -> tuple[list[float], int, Any]:
    monkeypatch.setattr(search, "_by_least_time", lambda *_: list(bases))
    monkeypatch.setattr(search, "_scheduled", lambda base: iter(base.schedules or (base,)))
    device: Any = SimpleNamespace(memory=memory)
    workload: Any = None
    found = search.search(workload, 4, device)
    smallest: Any = found.smallest
    return [one.time.total for one in found.ranked], found.legal, None if smallest is None else smallest.needed


def test_layouts_that_fit_are_ranked_by_time_and_the_smallest_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    bases = (
        Predicted(3.0, 5.0), Predicted(2.0, 5.5), Predicted(1.0, 4.0, microbatch=4), Predicted(0.5, least_memory=6.0),
    )  # fmt: skip
    ranked, legal, smallest = searched(monkeypatch, *bases)
    assert (ranked, legal) == ([1.0, 3.0], 4)
    # Of layouts with one microbatch size, the one with the least lower bound counts: the first of equal ones.
    assert smallest == 5.0
    assert searched(monkeypatch) == ([], 0, None)
    assert searched(monkeypatch, Predicted(1.0, -1.0)) == ([], 1, None)


def test_the_search_ends_where_no_later_layout_can_be_among_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_CERTAIN", 2)
    bases = [Predicted(float(4 - at), least_time=at, tp=at) for at in range(1, 4)]
    # After two layouts, of 3 and 2 seconds, a third of at least 3 seconds may be the second fastest, and one of at
    # least 4 may not; layouts with the least memory for their ranks are tried in any case.
    late = Predicted(0.1, least_time=3.01, tp=1, least_memory=2.0)
    assert searched(monkeypatch, *bases, late)[0] == [1.0, 2.0, 3.0]
    for least in (2.0, 2.5, 3.0):
        assert searched(monkeypatch, *bases[:2], replace(late, least_time=least))[0] == [0.1, 2.0, 3.0]
    assert searched(monkeypatch, *bases[:2], late)[0] == [2.0, 3.0]


def test_a_layout_that_needs_all_memory_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Predicted(2.0, 5.0, least_memory=5.0, microbatch=4)
    assert searched(monkeypatch, Predicted(1.0), full)[0] == [1.0, 2.0]
    # Also if only its little memory is a reason to try it.
    monkeypatch.setattr(search, "_EXAMINED", 1)
    assert searched(monkeypatch, Predicted(1.0), Predicted(2.0, 5.0, tp=2), Predicted(3.0, 5.1, tp=3))[0] == [1.0, 2.0]


def test_no_more_layouts_are_examined_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_EXAMINED", 2)
    bases = [Predicted(1.0, microbatch=4), Predicted(2.0, microbatch=4), Predicted(3.0, microbatch=4)]
    assert searched(monkeypatch, *bases)[0] == [1.0, 2.0]


def test_each_schedule_of_a_layout_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    several = (Predicted(4.0), Predicted(2.0, -1.0), Predicted(3.0, 6.0))
    assert searched(monkeypatch, Predicted(0.0, schedules=several)) == ([4.0], 1, 1.0)


def layout(pipeline: Any = None, **mesh: int) -> Any:
    return Layout(Mesh(**mesh), (), pipeline, 8, 1)


def test_layouts_are_ordered_by_their_least_time_and_equal_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {1: 5.0, 2: 3.0, 3: None, 4: 4.0}

    class Prediction:
        def __init__(self, workload: Any, of: Layout, device: Any) -> None:
            self.layout, self.given = of, (workload, device)

        @property
        def least_time(self) -> float:
            time = times[self.layout.mesh.tp]
            if time is None:
                raise BuildError("heads")
            return time

    asked: list[Any] = []

    def layouts(*given: Any) -> Any:
        asked.append(given)
        return [layout(tp=tp) for tp in (1, 2, 2, 3, 4)]

    monkeypatch.setattr(search, "Prediction", Prediction)
    monkeypatch.setattr(search, "layouts", layouts)
    workload: Any = SimpleNamespace(strategy=lambda _layout: "cost")
    device: Any = SimpleNamespace(node=8)
    found = search._by_least_time(workload, 16, device)
    assert [prediction.layout.mesh.tp for prediction in found] == [2, 4, 1]
    assert asked == [(workload, 16, 8)]


def test_layouts_with_pipeline_ranks_get_every_schedule() -> None:
    @dataclass
    class Base:
        workload: Any
        layout: Layout

    workload = SimpleNamespace(options=SimpleNamespace(schedules=[named("one"), named("two")]))
    alone: Any = Base(workload, layout())
    assert list(search._scheduled(alone)) == [alone]
    several: Any = Base(workload, layout(pp=2))
    assert [one.layout.pipeline.selector for one in search._scheduled(several)] == ["one", "two"]


def test_settings_that_wait_for_the_last_microbatch_need_several() -> None:
    asked: list[tuple[int, bool]] = []

    def parallel(mesh: Mesh, waits: bool) -> list[list[Any]]:
        asked.append((mesh.ep, waits))
        return [["data"], ["waits"]] if waits else [["data"]]

    given: Any = SimpleNamespace(
        expert_groups=lambda _mesh: [1, 2], parallel=parallel, recomputing=[["again"]], kept=["kept"]
    )
    found = list(search._layouts_on(Mesh(dp_shard=2), given, 3))
    assert asked == [(1, False), (1, True), (2, False), (2, True)]
    assert [(one.mesh.ep, one.microbatch, one.parallel, one.size, one.pipeline) for one in found[:6]] == [
        (1, 1, ("kept", "data"), 6, None),
        (1, 1, ("kept", "waits"), 6, None),
        (1, 1, ("kept", "again", "data"), 6, None),
        (1, 1, ("kept", "again", "waits"), 6, None),
        (1, 3, ("kept", "data"), 6, None),
        (1, 3, ("kept", "again", "data"), 6, None),
    ]
    assert [one.mesh.ep for one in found] == [1] * 6 + [2] * 6
    assert next(one.microbatch for one in search._layouts_on(Mesh(), given, 2**15)) == 2


# --- alternatives and lines -------------------------------------------------------------------------------------------


def near(recomputed: float, microbatch: int = 4) -> list[tuple[tuple[Any, ...], int]]:
    @dataclass
    class Base:
        workload: Any
        layout: Layout

    workload = SimpleNamespace(
        options=SimpleNamespace(recomputing=[["again"]]),
        strategy=lambda _layout: SimpleNamespace(recomputed=recomputed),
    )
    base: Any = Base(workload, Layout(Mesh(), ("own",), None, 8, microbatch))  # type: ignore[arg-type]
    return [(one.layout.parallel, one.layout.microbatch) for one in _nearby(base)]


def test_layouts_near_a_job_recompute_or_have_smaller_microbatches() -> None:
    assert near(0.0) == [
        (("own",), 1), (("own",), 2), (("again", "own"), 1), (("again", "own"), 2), (("again", "own"), 4),
    ]  # fmt: skip
    assert near(0.5) == [(("own",), 1), (("own",), 2)]
    assert near(1.0, 1) == []


def test_a_layout_is_usable_if_it_fits_and_takes_time() -> None:
    def usable(fits: bool, total: float) -> bool:
        made: Any = SimpleNamespace(fits=fits, time=SimpleNamespace(total=total))
        return _is_usable(made)

    assert [usable(True, 1.0), usable(False, 1.0), usable(True, 0.0)] == [True, False, False]
    invalid: Any = Predicted(1.0, -1.0)

    class Invalid:
        @property
        def fits(self) -> bool:
            return bool(invalid.memory)

    broken: Any = Invalid()
    assert not _is_usable(broken)


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins of workloads and predictions, with their arguments."""
    seen: dict[str, Any] = {"checked": [], "fails": False}

    def workload(*given: Any) -> Any:
        if seen["fails"]:
            raise JobError("no cost description")
        seen["workload"] = given
        return SimpleNamespace(notes=["a note"])

    monkeypatch.setattr(check, "Workload", workload)
    monkeypatch.setattr(check, "Layout", SimpleNamespace(of=lambda job: f"layout of {job.name}"))
    monkeypatch.setattr(check, "Prediction", lambda *given: seen.update(prediction=given) or "prediction")
    monkeypatch.setattr(check, "memory_line", lambda prediction: f"memory of {prediction}")
    monkeypatch.setattr(check, "check_memory", seen["checked"].append)
    monkeypatch.setattr(check, "_between_nodes", lambda prediction: iter([f"between nodes of {prediction}"]))
    return seen


JOB: Any = SimpleNamespace(name="job", registry="registry", views=lambda: "views", device="cuda")


def test_the_memory_of_a_job_is_predicted_on_the_default_device(workloads: dict[str, Any]) -> None:
    assert predicted(JOB, None) == ["memory of prediction", "a note", "between nodes of prediction"]
    assert workloads["workload"] == (JOB, "registry", "views")
    assert workloads["prediction"][1:] == ("layout of job", Device.named("h200"))
    assert workloads["checked"] == []
    predicted(JOB, 3 * GIB, 4)
    device = workloads["prediction"][2]
    assert (device.memory, device.node, device.product) == (3 * GIB, 4, Device.named("h200").product)
    assert workloads["checked"] == ["prediction"]


def test_a_job_that_cannot_be_predicted_is_an_error_only_if_it_must_fit(workloads: dict[str, Any]) -> None:
    workloads["fails"] = True
    assert predicted(JOB, None) == ["not predicted: no cost description"]
    with pytest.raises(JobError, match="no cost description"):
        predicted(JOB, 3 * GIB)


def test_predictions_are_printed_below_one_title(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(nodes, "processes_of_node", lambda device: {"cuda": 6}[device])
    monkeypatch.setattr(check, "predicted", lambda *given: asked.append(given) or ["one", "two"])
    check_predictions(JOB, 8, 5)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["predicted", "one"], ["two"]]
    assert asked == [(JOB, 5, 6)]


def test_rates_that_were_measured_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rates, measured = Device.named("h100"), Device.named("h200")
    monkeypatch.setattr(devices, "choose_device", lambda name: f"device {name}")
    monkeypatch.setattr(devices, "count_devices", lambda name: {"cuda": 2}[name])
    seen: list[Any] = []
    monkeypatch.setattr(calibrate, "calibrated", lambda *given: seen.append(given) or (measured, ["product", "link"]))
    file = tmp_path / "rates.yaml"
    assert command._calibrated("cuda", rates, file) is measured
    assert seen == [("device cuda", rates, 2)]
    assert capsys.readouterr().err == (
        f"measured on this machine: product, link; other rates are from --gpu; written to {file}\n"
    )
    assert Device.named(str(file)) == measured
    assert file.read_text().startswith(f"{next(iter(type(rates).model_fields))}: ")


# --- context parallelism ----------------------------------------------------------------------------------------------


def exchange(size: float) -> Exchange:
    return Exchange("send", "cp", size)


def test_the_attention_of_a_block_is_replaced_by_its_cost_over_several_ranks() -> None:
    first, last = OpCost("first", "memory"), OpCost("last", "memory")
    attention = OpCost("attention", "attention", attention=AttentionShape(1, 1, 1, 1, 2))
    block = BlockCost(
        "b", (first, attention, last), workspace=3.0, exchanges=(exchange(1),), backward_exchanges=(exchange(2),),
        beside=(exchange(3),), backward_beside=(exchange(4),),
    )  # fmt: skip
    seen: list[Any] = []

    def cost(op: OpCost, ranks: int) -> ContextCost:
        seen.append((op, ranks))
        return ContextCost((last, first), (exchange(5),), (exchange(6),), (exchange(7),), (exchange(8),), 11.0)

    plain = BlockCost("head", (first,), is_block=False)
    found = context.shared(StageCost((block, plain), 9.0), cost, 4)
    assert seen == [(attention, 4)]
    assert found.boundary == 9.0
    assert found.blocks[1] is plain
    changed = found.blocks[0]
    assert [op.name for op in changed.ops] == ["first", "last", "first", "last"]
    assert changed.workspace == 14.0
    sizes = [
        [one.size for one in several]
        for several in (changed.exchanges, changed.backward_exchanges, changed.beside, changed.backward_beside)
    ]
    assert sizes == [[1, 5], [2, 6], [3, 7], [4, 8]]
