from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, PluginError
from d9d_core.job_file.sections.kernels import KernelRule
from d9d_core.kernel import Decision, OpSignature, OpSlot
from d9d_core.plugin import KernelSpec, Ref, StrategySpec, hookimpl
from d9d_core.registry.capabilities import Chosen, Circumstances, Judge
from d9d_core.registry.entries import Entry, Origin
from d9d_core.registry.registry import Registry
from d9d_core.strategy import Applied
from d9d_engine.cli.report import print_kernel
from d9d_engine.compose.assemble import changed_modules
from d9d_engine.compose.kernels import (
    KernelChoice,
    bind_kernels,
    holders_alike,
    ops_elsewhere,
    refuse_unused,
    slot_facts,
)
from rich.console import Console
from torch import nn


class Square(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.op = OpSlot("square", torch.square, width=width)

    def op_slots(self) -> dict[str, OpSlot]:
        return {"op": self.op}


class Backends:
    """Objects that the records refer to; looked up by attribute."""

    @staticmethod
    def wide_only(signature: OpSignature) -> Decision:
        wide = signature.static["width"] >= 8
        return Decision(
            wide, "wide enough" if wide else f"needs width >= 8, not {signature.static['width']}", priority=5
        )

    @staticmethod
    def always(_signature: OpSignature) -> Decision:
        return Decision(True, "takes everything", priority=1)

    @staticmethod
    def behind(_signature: OpSignature) -> Decision:
        return Decision(True, "slow, for comparisons", priority=-1)

    @staticmethod
    def uncompiled(signature: OpSignature) -> Decision:
        if signature.compiled:
            return Decision(True, "the compiler fuses the reference", priority=0)
        return Decision(True, "no kernel fuses the reference", priority=3)

    @staticmethod
    def unchecked(signature: OpSignature) -> Decision:
        return Decision(not signature.checkpointed, "computed once", priority=3)

    @staticmethod
    def other(_signature: OpSignature) -> Any:
        return lambda x: -x

    @staticmethod
    def make(signature: OpSignature) -> Any:
        return lambda x: x * x + signature.static["width"]


@pytest.fixture(autouse=True)
def _backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "backends_for_this_test", SimpleNamespace(B=Backends))


def spec(name: str, supports: str, build: str = "make", **kwargs: Any) -> KernelSpec:
    ref = "backends_for_this_test:B."
    return KernelSpec(
        name=name, op="square", summary="x", supports=Ref(ref + supports), build=Ref(ref + build), **kwargs
    )


def offering(distribution: str, *specs: KernelSpec) -> SimpleNamespace:
    @hookimpl
    def d9d_kernels() -> tuple[KernelSpec, ...]:
        return specs

    return SimpleNamespace(d9d_kernels=d9d_kernels, __name__=distribution)


@pytest.fixture
def registry() -> Registry:
    @hookimpl
    def d9d_kernels() -> list[KernelSpec]:
        absent = Ref("a_module_that_is_not_there:supports")
        other = KernelSpec(name="wide", op="other", summary="x", supports=absent, build=absent)
        broken = KernelSpec(name="broken", op="square", summary="x", supports=absent, build=absent)
        return [spec("wide", "wide_only"), spec("plain", "always"), other, broken]

    return Registry.of(SimpleNamespace(d9d_kernels=d9d_kernels, __name__="acme"))


def choose(registry: Registry, stage: nn.Module, **requested: str) -> list[KernelChoice]:
    judge = Judge([], registry, Circumstances(device="cpu"))
    choices = bind_kernels(stage.named_modules(), registry, requested, "cpu", "float32", judge.verdicts)
    refuse_unused(requested, choices)
    return choices


def test_the_accepting_backend_with_the_highest_priority_is_bound_per_signature(registry: Registry) -> None:
    stage = nn.Sequential(Square(4), Square(16), Square(16))
    narrow, wide = choose(registry, stage)
    assert (narrow.backend, narrow.sites) == ("plain", ("0.op",))
    assert (wide.backend, wide.sites) == ("wide", ("1.op", "2.op"))
    assert stage[1].op(torch.tensor(2.0)).item() == 20  # type: ignore[operator, union-attr]
    assert narrow.considered["wide"].reason == "needs width >= 8, not 4"
    assert "failed: ModuleNotFoundError" in narrow.considered["broken"].reason


def test_slots_learn_the_operators_of_their_backend() -> None:
    registry = Registry.of(offering("acme", spec("plain", "always", operators=("aten.square",))))
    stage = nn.Sequential(Square(4))
    assert stage[0].op.operators == ()
    choose(registry, stage)
    assert stage[0].op.operators == ("aten.square",)


def test_a_backend_that_fails_to_build_is_named() -> None:
    absent = Ref("a_module_that_is_not_there:build")
    bad = replace(spec("bad", "always"), build=absent)
    with pytest.raises(PluginError, match=r"kernels.square: 'bad' \(zeta\) accepted, but a_module.* failed: ModuleNot"):
        choose(Registry.of(offering("zeta", bad)), Square(4))


class Particular(OpSlot):
    """Slot that takes only functions that say something."""

    def refusal(self, function: Any) -> str | None:
        return None if hasattr(function, "said") else "says nothing"


def test_what_a_slot_refuses_is_passed_over_for_the_next_backend(registry: Registry) -> None:
    stage = Square(16)
    stage.op = Particular("square", torch.square, width=16)
    (choice,) = choose(registry, stage)
    assert choice.backend == stage.op.backend == "reference"
    assert [choice.considered[name] for name in ("wide", "plain")] == [Decision(False, "says nothing")] * 2


def test_slots_of_other_stages_get_the_facts_that_strategies_gave_those_here() -> None:
    stage = nn.Sequential(Square(4), Square(16), Square(16), nn.Sequential(Square(8)))
    kinds = {name: type(module) for name, module in stage.named_modules()}
    before = slot_facts(stage)
    for index in (0, 1):
        stage[index].op.static = {**stage[index].op.static, "half": True}
    found = dict(holders_alike(stage, before, kinds, {"", "0", "1"}))
    assert [slot.static for slot in (stage[index].op for index in range(3))] == [
        {"width": width, "half": True} for width in (4, 16, 16)
    ]
    assert stage[3][0].op.static == {"width": 8, "half": True}
    assert found == dict(stage.named_modules())


def test_a_request_for_an_op_that_another_rank_s_strategies_may_put_in_is_that_rank_s_to_refuse() -> None:
    stage = nn.Sequential(Square(4), Square(4))
    stage[1].op = OpSlot("square", torch.square, instead=["cube"])
    assert ops_elsewhere(stage, {"", "0"}) == {"cube"}
    assert ops_elsewhere(stage, {"", "0", "1"}) == set()
    refuse_unused(["cube"], [], {"cube"})
    with pytest.raises(BuildError, match=r"kernels.cube: the job calls no op 'cube'"):
        refuse_unused(["cube"], [])


def test_slots_of_other_stages_are_gone_where_those_here_are() -> None:
    class Perhaps(Square):
        there = True

        def op_slots(self) -> dict[str, OpSlot]:
            return super().op_slots() if self.there else {}

    stage = nn.Sequential(Perhaps(4), Perhaps(4), Square(4))
    kinds = {name: type(module) for name, module in stage.named_modules()}
    before = slot_facts(stage)
    stage[0].there = False
    found = dict(holders_alike(stage, before, kinds, {"", "0"}))
    assert found.keys() == {"", "0", "2"}


def test_slots_that_took_the_place_of_others_are_planned_for_other_stages_with_facts_of_theirs() -> None:
    class Replaced(Square):
        other: OpSlot | None = None

        def op_slots(self) -> dict[str, OpSlot]:
            return super().op_slots() if self.other is None else {"other": self.other}

    first = Replaced(4)
    stage = nn.Sequential(first, Replaced(8), Square(4))
    kinds = {name: type(module) for name, module in stage.named_modules()}
    before = slot_facts(stage)
    first.other = OpSlot("cube", torch.square, width=4, ring=True)
    found: dict[str, Any] = dict(holders_alike(stage, before, kinds, {"", "0"}))
    assert found.keys() == {"", "0", "1", "2"}
    assert found["0"] is first
    (slot,) = found["1"].op_slots().values()
    assert (slot.op, slot.static) == ("cube", {"width": 8, "ring": True})


def test_slots_that_modules_keep_beside_one_that_is_gone_are_planned_for_other_stages_too() -> None:
    class Both(Square):
        whole = True

        def op_slots(self) -> dict[str, OpSlot]:
            return {**super().op_slots(), **({"all": OpSlot("cube", torch.square, width=4)} if self.whole else {})}

    first, second = Both(4), Both(8)
    stage = nn.Sequential(first, second)
    kinds = {name: type(module) for name, module in stage.named_modules()}
    before = slot_facts(stage)
    first.whole = False
    found: dict[str, Any] = dict(holders_alike(stage, before, kinds, {"", "0"}))
    assert found["0"] is first
    assert found["1"].op_slots() == {"op": second.op}


def test_a_backend_asked_for_by_name_is_taken(registry: Registry) -> None:
    assert [c.backend for c in choose(registry, Square(16), square="plain")] == ["plain"]
    assert [c.backend for c in choose(registry, Square(16), square="acme/plain")] == ["plain"]
    assert [c.backend for c in choose(registry, Square(16), square="reference")] == ["reference"]


class Fused(Square):
    """With an op that contains another."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.op = OpSlot("square", torch.square, parts=["product"], width=width)


@pytest.mark.parametrize(
    ("requests", "taken"),
    [
        ({}, "wide"),
        ({"product": "reference"}, "reference"),
        ({"product": "anything"}, "reference"),
        ({"square": "wide", "product": "reference"}, "wide"),
    ],
)
def test_an_op_leaves_its_parts_to_a_job_that_asks_for_a_backend_of_one(
    registry: Registry, requests: dict[str, str], taken: str
) -> None:
    model = Fused(8)
    (choice,) = bind_kernels(model.named_modules(), registry, requests, "cpu", "float32", lambda _: ())
    assert choice.backend == model.op.backend == taken
    if requests and taken == "reference":
        assert choice.considered["wide"].priority == 0
        assert "the job asks for kernels.product, an op that this one contains" in choice.considered["wide"].reason


# --- rules for some modules


def ruled(registry: Registry, stage: nn.Module, *rules: tuple[str, str | list[str]], op: str = "square") -> Any:
    made = [
        KernelRule.model_validate({"backend": backend, "match": [match] if isinstance(match, str) else match})
        for backend, match in rules
    ]
    return bind_kernels(stage.named_modules(), registry, {op: made}, "cpu", "float32", lambda _: ())


def layers(*widths: int) -> nn.Module:
    """Modules ``layers.<index>.mixer``."""
    stages = {str(index): nn.ModuleDict({"mixer": Square(width)}) for index, width in enumerate(widths)}
    return nn.ModuleDict({"layers": nn.ModuleDict(stages)})


def test_rules_choose_a_backend_in_the_modules_that_they_match(registry: Registry) -> None:
    stage = layers(16, 16, 16, 16)
    choices = ruled(registry, stage, ("plain", "layers.0"), ("reference", ["layers.[23].*"]))
    found = {site: (choice.backend, choice.requested, choice.rule) for choice in choices for site in choice.sites}
    assert found == {
        "layers.0.mixer.op": ("plain", True, 0),
        "layers.1.mixer.op": ("wide", False, None),  # chosen by itself
        "layers.2.mixer.op": ("reference", True, 1),
        "layers.3.mixer.op": ("reference", True, 1),
    }
    bound = [module.op.backend for module in stage.modules() if isinstance(module, Square)]
    assert bound == ["plain", "wide", "reference", "reference"]
    assert "asked for by kernels.square[1], at layers.2.mixer.op, layers.3.mixer.op" in explained(choices[-1])


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (
            [("plain", ["layers.0", "layers.7.*"])],
            r"kernels.square\[0\].match: the pattern 'layers.7.\*' matches no module with this op; .* layers.1.mixer",
        ),
        (
            [("plain", "layers.*"), ("reference", "*.1.mixer")],
            r"kernels.square\[0\] \(plain\) and kernels.square\[1\] \(reference\) both match layers.1.mixer; change",
        ),
        (
            [("plain", "layers.1"), ("wide", "layers.0")],
            r"kernels.square\[1\]: 'wide' \(acme\) cannot run here: needs",
        ),
    ],
)
def test_rules_without_effect_or_in_conflict_are_refused(
    registry: Registry, rules: list[tuple[str, str]], text: str
) -> None:
    with pytest.raises(BuildError, match=text):
        ruled(registry, layers(4, 4), *rules)


def test_rules_of_an_op_leave_it_to_the_ops_that_contain_it_in_other_modules(registry: Registry) -> None:
    stage = nn.ModuleDict({"first": Fused(8), "second": Fused(8)})
    choices = ruled(registry, stage, ("reference", "second"), op="product")
    assert [(choice.backend, choice.sites) for choice in choices] == [
        ("wide", ("first.op",)),
        ("reference", ("second.op",)),
    ]


def test_rules_for_an_op_that_is_not_called_are_left_to_its_caller(registry: Registry) -> None:
    assert ruled(registry, nn.Linear(2, 2), ("plain", "layers.0")) == []


def test_slots_of_other_stages_keep_what_they_refuse() -> None:
    class Replaced(Square):
        other: OpSlot | None = None

        def op_slots(self) -> dict[str, OpSlot]:
            return super().op_slots() if self.other is None else {"other": self.other}

    stage = nn.Sequential(Replaced(4), Replaced(8))
    kinds = {name: type(module) for name, module in stage.named_modules()}
    before = slot_facts(stage)
    stage[0].other = Particular("cube", torch.square, width=4)
    found: dict[str, Any] = dict(holders_alike(stage, before, kinds, {"", "0"}))
    (slot,) = found["1"].op_slots().values()
    assert slot.refusal(torch.square) == "says nothing"


def test_a_backend_asked_for_by_name_that_cannot_run_is_an_error(registry: Registry) -> None:
    with pytest.raises(BuildError, match=r"kernels.square: 'wide' \(acme\) cannot run here: needs width >= 8, not 4"):
        choose(registry, Square(4), square="wide")


def test_an_unknown_backend_or_op_is_an_error(registry: Registry) -> None:
    with pytest.raises(PluginError, match="unknown kernel 'square.wied'; did you mean 'square.wide'"):
        choose(registry, Square(4), square="wied")
    with pytest.raises(
        BuildError, match="kernels.sqare: the job calls no op 'sqare'; remove it, or name an op of the job: square"
    ):
        choose(registry, Square(4), sqare="wide")


def test_the_distribution_of_a_request_decides_whose_function_is_bound() -> None:
    registry = Registry.of(
        offering("acme", spec("fast", "always")), offering("zeta", spec("fast", "always", build="other"))
    )
    for request, supplier, expected in (("acme/fast", "acme", 8.0), ("zeta/fast", "zeta", -2.0)):
        stage = Square(4)
        (choice,) = choose(registry, stage, square=request)
        assert (choice.backend, choice.supplied_by) == ("fast", supplier)
        assert stage.op(torch.tensor(2.0)).item() == expected
    with pytest.raises(PluginError, match=r"kernels.square: kernel 'square.fast' is declared .*; write .*'zeta/fast'"):
        choose(registry, Square(4), square="fast")


def test_equal_offers_are_all_considered_and_the_first_distribution_wins() -> None:
    plugins = [offering("zeta", spec("fast", "always")), offering("acme", spec("fast", "always", build="other"))]
    for order in (plugins, plugins[::-1]):
        (choice,) = choose(Registry.of(*order), Square(4))
        assert (choice.backend, choice.supplied_by) == ("fast", "acme")
        assert sorted(choice.considered) == ["acme/fast", "reference", "zeta/fast"]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ({"requires": {"device:cuda>=9.0"}}, "kernel 'fast' needs device:cuda>=9.0: training runs on cpu"),
        ({"requires": {"import:deep_ep"}}, "kernel 'fast' needs import:deep_ep: module deep_ep is not installed"),
        ({"conflicts": {"device:cpu"}}, "conflicts with 'device:cpu', which holds here"),
    ],
)
def test_a_backend_runs_only_where_its_capabilities_hold(tokens: dict[str, Any], reason: str) -> None:
    registry = Registry.of(offering("acme", spec("fast", "always", **tokens)))
    stage = Square(4)
    (choice,) = choose(registry, stage)
    assert choice.backend == stage.op.backend == "reference"
    assert reason in choice.considered["fast"].reason
    with pytest.raises(BuildError) as caught:
        choose(registry, stage, square="fast")
    assert str(caught.value).startswith("kernels.square: 'fast' (acme) cannot run here: ")
    assert reason in str(caught.value)


def explained(choice: KernelChoice) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        print_kernel(console, choice)
    return capture.get()


def test_an_explanation_says_that_the_job_asked_for_a_backend_and_which_are_taken_by_name_only() -> None:
    registry = Registry.of(offering("acme", spec("slow", "behind"), spec("plain", "always")))
    (asked,) = choose(registry, Square(4), square="slow")
    (free,) = choose(registry, Square(4))
    assert explained(asked).splitlines() == [
        "  square: slow (acme), asked for by kernels.square, at op",
        "    reference accepts, priority 0: runs everywhere",
        "    plain accepts, priority 1: takes everything",
        "    slow accepts, priority -1, used only if the job names it: slow, for comparisons",
    ]
    assert explained(free).splitlines()[0] == "  square: plain (acme) at op"


def test_a_reference_asked_for_by_name_says_so() -> None:
    registry = Registry.of(offering("acme", spec("plain", "always")))
    (asked,) = choose(registry, Square(4), square="reference")
    assert explained(asked).splitlines()[0] == "  square: reference, asked for by kernels.square, at op"


class Deep(nn.Module):
    """Blocks with an op each, and an op outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): nn.Sequential(Square(4)) for index in (1, 10)})
        self.last = Square(4)


def test_a_backend_knows_what_is_compiled_with_all_that_is_inside() -> None:
    registry = Registry.of(offering("acme", spec("fused", "uncompiled")))
    judge = Judge([], registry, Circumstances(device="cpu"))
    stage = Deep()
    inside, outside = bind_kernels(
        stage.named_modules(), registry, {}, "cpu", "float32", judge.verdicts, compiled={"layers.1"}
    )
    assert (inside.backend, inside.compiled, inside.sites) == ("reference", True, ("layers.1.0.op",))
    assert (outside.backend, outside.compiled, outside.sites) == ("fused", False, ("layers.10.0.op", "last.op"))
    assert inside.considered["fused"].reason == "the compiler fuses the reference"
    assert explained(inside).splitlines()[0] == "  square: reference at layers.1.0.op, compiled"
    (everything,) = bind_kernels(stage.named_modules(), registry, {}, "cpu", "float32", judge.verdicts, compiled={""})
    assert everything.compiled
    (asked,) = bind_kernels(
        Square(4).named_modules(), registry, {"square": "fused"}, "cpu", "float32", judge.verdicts, compiled=("", "op")
    )
    assert (asked.backend, asked.compiled) == ("fused", True)


def test_a_backend_knows_what_runs_outside_of_graphs_in_compiled_modules() -> None:
    registry = Registry.of(offering("acme", spec("fused", "uncompiled")))
    judge = Judge([], registry, Circumstances(device="cpu"))
    outside, inside = bind_kernels(
        Deep().named_modules(),
        registry,
        {},
        "cpu",
        "float32",
        judge.verdicts,
        compiled={""},
        outside_graph={"layers.1"},
    )
    assert (outside.backend, outside.sites) == ("fused", ("layers.1.0.op",))
    assert (inside.backend, inside.sites) == ("reference", ("layers.10.0.op", "last.op"))


def test_stages_of_other_ranks_are_compiled_as_those_here() -> None:
    def chosen(anchor: str) -> Chosen:
        absent = Ref("a_module_that_is_not_there:x")
        record = StrategySpec(name="acme", summary="x", config=absent, build=absent, anchor=anchor)
        return Chosen("parallel[0]", Entry("strategy", record, Origin("acme", "1", "acme")))

    kinds = {"": Deep, "layers.0": nn.Linear, "layers.1": nn.Linear, "layers.2": nn.Linear, "norm": nn.LayerNorm}
    here = {"", "layers.0", "layers.1"}
    compiled = changed_modules("compile", [(chosen("compile"), Applied(modules=("layers.0",)))], kinds, here)
    assert compiled == {"layers.0", "layers.2"}, "layers.1 is here, and was left out"
    assert not changed_modules("compile", [(chosen("data"), Applied(modules=("layers.0",)))], kinds, here)


def test_a_backend_knows_what_the_backward_computes_again() -> None:
    registry = Registry.of(offering("acme", spec("fused", "unchecked")))
    stage, around = Deep(), {"layers.1": True, "layers.10": False, "last": False}
    choices = bind_kernels(
        stage.named_modules(), registry, {}, "cpu", "float32", lambda _: (), checkpointed={"layers.1"}
    )
    backends = {
        site.rpartition(".")[0].removesuffix(".0"): choice.backend for choice in choices for site in choice.sites
    }
    assert backends == {name: "reference" if again else "fused" for name, again in around.items()}


def test_backends_learn_where_checkpointed_blocks_store_outputs_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []

    def sees(signature: OpSignature) -> Decision:
        asked.append((signature.checkpointed, signature.storing))
        return Decision(True, "takes everything")

    monkeypatch.setattr(Backends, "always", staticmethod(sees))
    registry = Registry.of(offering("acme", spec("plain", "always")))
    where = {"checkpointed": {"layers.1", "layers.10"}, "storing": {"layers.10"}}
    bind_kernels(Deep().named_modules(), registry, {}, "cpu", "float32", lambda _: (), **where)  # type: ignore[arg-type]
    assert sorted(asked) == [(False, False), (True, False), (True, True)]


def test_backends_learn_whether_the_data_packs_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool | None] = []

    def sees(signature: OpSignature) -> Decision:
        asked.append(signature.documents)
        return Decision(True, "takes everything")

    monkeypatch.setattr(Backends, "always", staticmethod(sees))
    registry = Registry.of(offering("acme", spec("plain", "always")))
    for documents in (True, False, None):
        bind_kernels(Square(4).named_modules(), registry, {}, "cpu", "float32", lambda _: (), documents=documents)
    assert asked == [True, False, None]
