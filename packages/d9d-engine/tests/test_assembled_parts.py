"""Parts of the composition of a job alone: what strategies did, shared parameters, adapters, and loaded weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.config import ModelConfig
from d9d_core.errors import BuildError, CheckpointError, JobError
from d9d_core.plugin import ModelSpec, Ref, StrategySpec
from d9d_core.strategy import Applied, GradientOwner
from d9d_engine.compose import adapter as adapter_module
from d9d_engine.compose import assemble as module
from d9d_engine.compose import plan as plan_module
from d9d_engine.compose import pretrained as pretrained_module
from d9d_engine.compose.assemble import (
    Assembly,
    _apply,
    alike_modules,
    build_stages,
    changed_modules,
    merged,
    shared_names,
    split_sequences,
)
from d9d_engine.compose.first_pass.frozen import _suits
from d9d_engine.compose.plan import build_lr_schedule, flops_per_token
from d9d_engine.compose.pretrained import Pretrained, listed
from d9d_engine.step.tied import Ties
from torch import nn


def chosen(name: str, anchor: str = "tensor", **more: Any) -> Any:
    ref = Ref("nowhere:x")
    spec = StrategySpec(name=name, summary="x", config=ref, build=ref, anchor=anchor, **more)
    return SimpleNamespace(spec=spec, where=f"parallel[{name}]", entry=f"'{name}'")


def assembly(*applied: tuple[Any, Applied], **more: Any) -> Any:
    made: Any = Assembly.__new__(Assembly)
    for name, value in {"applied": list(applied), **more}.items():
        object.__setattr__(made, name, value)
    return made


def test_an_assembly_tells_what_its_strategies_did() -> None:
    made = assembly(
        (chosen("a", "checkpointing"), Applied(("x",), on_host=frozenset({"w"}), compute_dtype=torch.float16)),
        (chosen("b", "compile"), Applied(("y", "z"), on_host=frozenset({"v"}), compute_dtype=torch.bfloat16)),
        (chosen("c", "data"), Applied(("u",))),
    )
    assert made.unsplittable() == {"x", "y", "z"}
    assert made.on_host == {"v", "w"}
    assert made.compute_dtype == torch.bfloat16
    assert (assembly().on_host, assembly().compute_dtype) == (frozenset(), None)


def test_trained_parameters_have_the_names_of_the_whole_model() -> None:
    whole, here = nn.Linear(2, 1), nn.Linear(2, 1)
    here.bias = None  # type: ignore[assignment]
    made = assembly(stages={0: here}, full_model=whole, trainable={"weight", "bias"})
    found = made.trained()
    assert list(found) == ["weight", "bias"]
    assert found["weight"] is here.weight
    assert found["bias"] is whole.bias
    assert list(assembly(stages={0: here}, full_model=whole, trainable={"bias"}).trained()) == ["bias"]
    assert made.all_stages == [whole]
    alone: Any = SimpleNamespace(ranks=1)
    assert assembly(pipeline=alone).stage_holders(cast("Any", None)) is None


def test_parameters_in_several_stages_are_shared() -> None:
    one, other = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False)}), nn.ModuleDict({"b": nn.Linear(1, 1, bias=False)})
    both = nn.ModuleDict({"a": nn.Linear(1, 1), "c": nn.Linear(1, 1)})
    assert shared_names([one, other, both]) == {"a.weight": (0, 2)}


def test_modules_of_other_ranks_change_like_those_of_the_same_class() -> None:
    kinds = {"a": nn.Linear, "b": nn.GELU, "c": nn.Linear, "d": nn.GELU, "e": nn.Linear}
    assert alike_modules({"a", "new"}, kinds, {"a", "c"}) == {"a", "new", "e"}
    assert alike_modules(set(), kinds, {"a"}) == frozenset()
    applied = [
        (chosen("x", "compile"), Applied(("a",))),
        (chosen("y", "data"), Applied(("b",))),
        (SimpleNamespace(spec="no strategy"), Applied(("d",))),
    ]
    assert changed_modules("compile", applied, kinds, {"a", "b"}) == {"a", "c", "e"}  # type: ignore[arg-type]


class Splits(nn.Module):
    ranks = 1

    def split_sequence(self, ranks: int) -> None:
        self.ranks = ranks


def test_only_several_ranks_split_sequences() -> None:
    for ranks in (1, 3):
        splits = Splits()
        split_sequences([splits, nn.Linear(1, 1)], ranks)
        assert splits.ranks == ranks
    splits = Splits()
    splits.ranks = 7
    split_sequences([splits], 1)
    assert splits.ranks == 7


def test_effects_of_a_strategy_on_several_stages_are_merged() -> None:
    owner, other = GradientOwner("a", "tp", "sum"), GradientOwner("b", "tp", "sum")
    one = Applied(
        ("a", "b"), gradients=(owner,), views={"a": "x"}, on_host=frozenset({"w"}), sequence_ranks=2, notes=("n",)
    )
    two = Applied(
        ("b", "c"), gradients=(owner, other), views={"b": "y"}, compute_dtype=torch.bfloat16, sequence_ranks=1,
        cuda_graphs=True, outside_graph=("o",), storing=("b",), notes=("n", "m"), on_host=frozenset({"v"}),
    )  # fmt: skip
    assert merged([one]) is one
    found = merged([one, two])
    assert (found.modules, found.gradients, found.views) == (("a", "b", "c"), (owner, other), {"a": "x", "b": "y"})
    assert (found.compute_dtype, found.on_host, found.sequence_ranks) == (torch.bfloat16, {"v", "w"}, 2)
    assert (found.cuda_graphs, found.outside_graph, found.notes) == (True, ("o",), ("n", "m"))
    assert found.storing == ("b",)


def applied(
    monkeypatch: pytest.MonkeyPatch,
    *outcomes: Applied,
    several: bool = False,
    others: Any = None,
    simulated: bool = False,
) -> dict[int, Applied]:
    stages: Any = dict(enumerate(outcomes))
    strategy = SimpleNamespace(apply=lambda stage, _topology: stage)
    monkeypatch.setattr(module, "instantiate", lambda *_: strategy)
    monkeypatch.setattr(module, "all_gather_objects", lambda own, _group: [own, *(others or [])])
    topology: Any = SimpleNamespace(
        simulated=simulated, is_distributed=others is not None, axes_group=lambda axis: axis
    )
    return _apply(chosen("s"), "config", stages, topology, several)


def test_a_strategy_has_to_match_in_some_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing, something = Applied(()), Applied(("a",))
    assert applied(monkeypatch, nothing, something) == {0: nothing, 1: something}
    with pytest.raises(
        BuildError, match=r"^parallel\[s\]: strategy 's' changes no module of the model: its patterns match none"
    ):
        applied(monkeypatch, nothing)
    assert applied(monkeypatch, nothing, several=True, others=[[True, []]]) == {0: nothing}
    with pytest.raises(BuildError, match="changes no module"):
        applied(monkeypatch, nothing, several=True, others=[[False, []]])
    assert applied(monkeypatch, nothing, several=True, simulated=True) == {0: nothing}


def test_a_pattern_of_a_strategy_has_to_match_in_some_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Applied(("a",), unmatched={"p": "no p", "q": "no q"})
    one = Applied(("a",), unmatched={"q": "no q"})
    with pytest.raises(BuildError, match="^no q$"):
        applied(monkeypatch, both, one)
    with pytest.raises(BuildError, match="^no p$"):
        applied(monkeypatch, both)
    assert applied(monkeypatch, both, Applied(("a",))).keys() == {0, 1}
    assert applied(monkeypatch, one, several=True, others=[[True, ["p"]]]).keys() == {0}
    with pytest.raises(BuildError, match="^no q$"):
        applied(monkeypatch, one, several=True, others=[[True, ["q"]]])


class Stage(nn.Module):
    def __init__(self, name: str, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer(name, torch.ones(1), persistent=persistent)

    def boundary(self, microbatch: Any) -> Any: ...


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([Stage("a"), Stage("b")], None),
        ([nn.Linear(1, 1)], None),
        ([Stage("a"), Stage("a", persistent=False)], None),
        ([Stage("a"), Stage("b"), Stage("a")], "model 'm': stages 0 and 2 both have the buffer 'a', so a checkpoint"),
        ([Stage("a"), nn.Linear(1, 1)], r"model 'm': Linear does not declare a stage's outputs; give it boundary\(\)"),
    ],
)
def test_stages_declare_their_outputs_and_have_buffers_of_their_own(
    monkeypatch: pytest.MonkeyPatch, stages: list[nn.Module], said: str | None
) -> None:
    monkeypatch.setattr(module, "instantiate", lambda _chosen, _config, stage: stages[stage])
    job: Any = SimpleNamespace(precision=SimpleNamespace(parameters="float32"), model=None)
    selection: Any = SimpleNamespace(model=SimpleNamespace(entry="'m'"))
    pipeline: Any = SimpleNamespace(stages=range(len(stages)))
    if said is None:
        assert build_stages(job, selection, pipeline) == stages
        return
    with pytest.raises(BuildError, match=said):
        build_stages(job, selection, pipeline)


# --- tied parameters, frozen models, schedules and operations ---------------------------------------------------------


def test_copies_of_a_tied_parameter_are_added_and_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[Any] = []
    monkeypatch.setattr(
        "d9d_engine.step.tied.dist.all_reduce", lambda tensor, group: reduced.append((len(tensor), group))
    )
    ties: list[Any] = []
    for group, trains in (("g", True), (None, True), ("h", False)):
        first, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        other.grad = torch.full((3,), 2.0)
        ties.append(SimpleNamespace(first=first, others=[other], group=group, trains=trains))
    ties[0].first.grad = torch.ones(3)
    tied: Any = Ties.__new__(Ties)
    object.__setattr__(tied, "ties", ties)
    assert tied.sizes() == [("g", 12)]
    tied.reduce()
    assert reduced == [(3, "g")]
    tied.reset()
    assert [other.grad for tie in ties for other in tie.others] == [None, None, None]


def test_a_frozen_model_takes_strategies_whose_traits_it_has() -> None:
    spec = chosen("s", requires=frozenset({"model:experts", "mesh:tp"}))
    registry: Any = SimpleNamespace(find=lambda *given: spec if given == ("strategy", "s") else None)
    for provides, suits in (({"model:experts", "model:blocks"}, True), ({"model:blocks"}, False)):
        model: Any = SimpleNamespace(spec=SimpleNamespace(provides=provides))
        assert _suits(registry, "s", model) == suits


def test_a_learning_rate_schedule_knows_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "instantiate", lambda *given: given)
    job: Any = SimpleNamespace(lr_schedule="config")
    selection: Any = SimpleNamespace(lr_schedule="chosen")
    assert build_lr_schedule(job, selection, 7) == ("chosen", "config", 7)  # type: ignore[comparison-overlap]
    selection.lr_schedule = None
    assert [build_lr_schedule(job, selection, 7)(step) for step in (0, 99)] == [1.0, 1.0]


class Flops(Ref):
    def load(self) -> Any:
        return lambda config, length: 1000 * length + config


def test_operations_of_a_token_include_those_of_a_fine_tuning_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def tuning(_job: Any, peft: Any, length: int, registry: Any) -> float:
        if peft == "unknown":
            raise JobError("no cost description")
        assert registry == "registry"
        return -10.0 * length

    monkeypatch.setattr(plan_module, "tuning_flops", tuning)
    nowhere = Ref("nowhere:x")
    spec = ModelSpec(name="m", summary="x", config=nowhere, build=nowhere, flops=Flops("my:flops"))
    selection: Any = SimpleNamespace(model=SimpleNamespace(spec=spec))
    registry: Any = "registry"

    def of(peft: Any = None, length: int | None = 4) -> float | None:
        job: Any = SimpleNamespace(model=3, data=SimpleNamespace(sequence_length=length), peft=peft)
        return flops_per_token(job, selection, registry)

    assert (of(), of("lora"), of("unknown"), of(length=None)) == (4003.0, 3963.0, None, None)
    selection.model.spec = ModelSpec(name="m", summary="x", config=nowhere, build=nowhere)
    assert of() is None


# --- pretrained weights and adapters ----------------------------------------------------------------------------------


def test_names_that_differ_in_numbers_are_listed_once() -> None:
    names = ["layers.1.a", "layers.2.a", "layers.10.a", "head", "c", "d", "e", "f"]
    assert listed(names) == "layers.*.a (3 tensors), head, c, d, e and 1 more kinds"
    assert listed(names[:4]) == "layers.*.a (3 tensors), head"
    assert listed(names, 2) == "layers.*.a (3 tensors), head and 4 more kinds"


def pretrained(**graph: Any) -> Any:
    fields = {"outputs": {"weight": SimpleNamespace(spec=SimpleNamespace(dtype=torch.float32))}, "fresh": set()}
    whole = SimpleNamespace(**{**fields, "left_out": [], **graph}) if graph.pop("given", True) else None
    return Pretrained(cast("Any", "source"), "there", cast("Any", whole), {}, {})


@pytest.mark.parametrize(("read", "ranks", "once"), [("each", 4, False), ("once", 4, True), ("once", 1, False)])
def test_weights_are_loaded_once_for_equal_ranks_or_by_each(
    monkeypatch: pytest.MonkeyPatch, read: str, ranks: int, once: bool
) -> None:
    asked: list[Any] = []
    bars: list[Any] = []

    class Bar:
        done = 2**29
        add = "add"

        def __init__(self, *given: Any, **more: Any) -> None:
            bars.append((given, more))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(pretrained_module, "ByteBar", Bar)
    monkeypatch.setattr(pretrained_module, "load_tensors", lambda *given, **more: asked.append((given, more)))
    times = iter([10.0, 12.0])
    monkeypatch.setattr(pretrained_module.time, "perf_counter", lambda: next(times))
    job: Any = SimpleNamespace(loading=SimpleNamespace(read=read, threads=3))
    topology: Any = SimpleNamespace(world_size=ranks, is_main=True, world="world", axes_group=lambda *axes: axes)
    notes: list[str] = []
    model = nn.Linear(5, 2)
    found = pretrained(fresh={"b", "a"}, left_out=["x.1", "x.2"])
    found.load(model, job, topology, notes.append)
    ((given, more),) = asked
    assert given[0] is found.graph
    assert given[1] == "source"
    assert list(given[2]) == ["weight"]
    copies = ("dp_replicate", "dp_shard", "cp", "tp") if once else None
    assert more == {"threads": 3, "once": once, "copies": copies, "group": "world", "on_bytes": "add"}
    assert bars == [(("loading weights", 40), {"shown": True})]
    assert notes == [
        f"pretrained: 1 tensors from there (0.50 GiB in 2.0 s, 0.25 GiB/s{' here' if once else ''})",
        "pretrained: not in the source, initialised at random: a, b",
        "pretrained: left out, as the model has no such tensors: x.* (2 tensors)",
    ]


def test_sizes_alone_leave_all_weights_random() -> None:
    notes: list[str] = []
    nothing: Any = None
    pretrained(given=False).load(nothing, nothing, nothing, notes.append)
    assert notes == ["pretrained: sizes and tokenizer of there; all weights are initialised at random"]


def test_an_adapter_has_exactly_the_tensors_of_the_method() -> None:
    adapter_module._compare_names(["a", "b"], ["b", "a"])
    with pytest.raises(CheckpointError, match="^the adapter file has no tensor c; select only modules of the adapter"):
        adapter_module._compare_names(["a", "b"], ["b", "c", "a"])
    with pytest.raises(
        CheckpointError, match="^the adapter file has b, but peft selects no such module; add it to peft.targets"
    ):
        adapter_module._compare_names(["a", "b"], ["a"])


class Layout(Ref):
    architectures: Any = None

    def load(self) -> Any:
        return lambda: SimpleNamespace(
            config_json=lambda config, dtype: {"architectures": ARCHITECTURES[config, dtype]}
        )


ARCHITECTURES: dict[tuple[Any, str], Any] = {
    ("lm", "float32"): ["DenseForCausalLM"],
    ("classifier", "float32"): ["DenseForSequenceClassification"],
    ("none", "float32"): None,
}


def selection_of(hugging_face: Any) -> Any:
    nowhere = Ref("nowhere:x")
    spec = ModelSpec(name="m", summary="x", config=nowhere, build=nowhere, hugging_face=hugging_face)
    return SimpleNamespace(model=SimpleNamespace(spec=spec, entry="'m'"), peft=SimpleNamespace(entry="'plain'"))


def test_adapter_files_name_the_class_of_their_base_model() -> None:
    def classes(model: str) -> Any:
        job: Any = SimpleNamespace(model=model, precision=SimpleNamespace(parameters="float32"))
        return adapter_module._class_fields(adapter_module._class_of(job, selection_of(Layout("my:layout"))))

    assert classes("lm") == {"task_type": "CAUSAL_LM", "auto_mapping": None}
    mapping = {"base_model_class": "DenseForSequenceClassification", "parent_library": "transformers"}
    assert classes("classifier") == {"task_type": None, "auto_mapping": mapping}
    assert classes("none")["auto_mapping"]["base_model_class"] == ""


def test_names_of_a_model_without_head_have_no_prefix() -> None:
    names = ("Qwen3Model", "GPT2LMHeadModel", "Qwen3ForCausalLM", "")
    assert [adapter_module._is_bare(name) for name in names] == [True, False, False, False]
    names_of = adapter_module._without_prefix
    assert names_of({"a": "model.layers.0.model.w", "b": "score.w"}) == {"a": "layers.0.model.w", "b": "score.w"}


def test_adapter_files_need_a_method_that_has_them_and_a_model_with_a_layout() -> None:
    notes: list[str] = []

    def made(export: Any, method: Any, **more: Any) -> Any:
        job: Any = SimpleNamespace(export=export, model=ModelConfig.model_construct(), **more)
        of: Any = SimpleNamespace(peft=method, full_model=nn.Linear(1, 1), injected=frozenset())
        selection = selection_of(None)
        if method is None:
            selection.peft = None
        return adapter_module.save_adapter(job, selection, of, cast("Any", None), notes.append, {})

    assert made(True, object()) is None
    assert notes == []
    with pytest.raises(
        JobError, match="^export is 'adapter', but peft method 'plain' has no adapter files; set export"
    ):
        made("adapter", object())
    with pytest.raises(JobError, match="^export is 'adapter', but a job without peft has no adapter files"):
        made("adapter", None)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(adapter_module, "AdapterFormat", SimpleNamespace)
    try:
        assert made(True, SimpleNamespace()) is None
        assert notes == [
            "warning: no adapter is going to be written: model 'm' has no Hugging Face layout, so adapter files "
            "have no names for its tensors"
        ]
        with pytest.raises(CheckpointError, match="so adapter files have no names for its tensors"):
            made("adapter", SimpleNamespace())
    finally:
        monkey.undo()
