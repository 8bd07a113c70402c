"""Helpers of the conformance suites."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.plugin import Spec
from d9d_testing import collectives
from d9d_testing.stand_ins import StandIns
from d9d_testing.suites import fresh
from d9d_testing.suites import plugin as plugin_suite
from d9d_testing.suites.plugin import PluginSuite
from d9d_testing.suites.support import model_matrices
from d9d_testing.suites.support.component import registry_of
from d9d_testing.suites.support.models import require
from d9d_testing.suites.support.ops import KNOWN_OPS
from d9d_testing.world import wire, worker


def skipped(reason: str) -> Any:
    return pytest.raises(pytest.skip.Exception, match=reason)


# --- support


def test_the_first_tensor_is_found_at_any_depth() -> None:
    first, second = torch.ones(1), torch.zeros(1)
    for values, found in (
        ([3, first, second], first), ([{"a": 1, "b": first}, second], first), ([(None, [second, first])], second),
        ([{"a": [first]}], first), (["a", 3], None), ([], None),
    ):  # fmt: skip
        assert model_matrices._first_tensor(values) is found


def test_ops_with_several_results_are_called_like_models_do() -> None:
    call = KNOWN_OPS["rope"].calls()[0]
    given: list[Any] = []

    def slot(*inputs: Any, **options: Any) -> Any:
        given.append((inputs, options))
        return inputs[0], inputs[1]

    made: Any = slot
    out = KNOWN_OPS["rope"].invoke(made, call)
    assert torch.equal(out, torch.cat([call.inputs["query"], call.inputs["key"]], dim=2))
    assert all(one is other for one, other in zip(given[0][0], call.inputs.values(), strict=True))
    for call in KNOWN_OPS["add_rms_norm"].calls()[:2]:
        given.clear()
        made = lambda x, added, weight, **options: given.append((x, added, weight, options)) or (x, 2 * x)  # noqa: E731
        out = KNOWN_OPS["add_rms_norm"].invoke(made, call)
        assert torch.equal(out, torch.cat([call.inputs["x"], 2 * call.inputs["x"]], dim=-1))
        ((x, added, weight, options),) = given
        assert (x is call.inputs["x"], added is call.inputs.get("added"), weight is call.inputs["weight"]) == (
            True,
        ) * 3
        assert options == {"eps": 1e-6}


def test_random_recurrences_cover_their_range() -> None:
    for name, (samples, value) in {"gated_delta_rule": ("query", "value"), "state_space_rule": ("B", "x")}.items():
        make, random = KNOWN_OPS[name].at_random, Random(1)
        assert make is not None
        made = [make(random) for _ in range(600)]
        of: list[tuple[int, ...]] = [tuple(call.inputs[samples].shape) for call in made]
        assert [(min(sizes), max(sizes)) for sizes in list(zip(*of, strict=True))[:3]] == [(1, 2), (1, 150), (1, 3)]
        shared = {call.inputs[value].shape[2] // call.inputs[samples].shape[2] for call in made}
        features = {call.static["key_dim" if name == "gated_delta_rule" else "head_dim"] for call in made}
        assert (shared, features) == ({1, 2, 3}, set(range(1, 10)))
        assert {bool(call.documents) for call in made} == {True, False}
        sizes = [shape[:3] for shape in ((call.inputs[samples].shape) for call in KNOWN_OPS[name].calls())]
        assert [tuple(size) for size in sizes] == [(2, 7, 2), (1, 1, 1), (1, 70, 2), (2, 130, 1)]


def test_groups_of_functional_collectives_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        pass

    group = Group()
    monkeypatch.setattr(collectives.dist, "ProcessGroup", Group)
    monkeypatch.setattr(collectives.dist.distributed_c10d, "_resolve_process_group", {"7": group}.__getitem__)
    assert collectives._group({"group_name": "7"}) is group
    assert collectives._group({"process_group": group, "group_name": "8"}) is group  # type: ignore[dict-item]
    with pytest.raises(AssertionError, match=r"no process group among \['a'\]"):
        collectives._group({"a": 1})
    assert collectives._bytes([torch.ones(3), [torch.ones(2, dtype=torch.int16)]]) == 16


def test_distributed_tensors_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Distributed:
        pass

    monkeypatch.setattr(wire, "DTensor", Distributed)
    with pytest.raises(TypeError, match=r"value\['a'\]\[1\] is a DTensor; send its to_local\(\) or full_tensor\(\)"):
        wire.pack({"a": [1, Distributed()]})


def test_functions_of_scripts_are_found_without_running_the_script_as_main(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("class Outer:\n    name = __name__\n    def inner(): return 'found'\n")

    def launch(module: str, file: str, name: str) -> Any:
        return SimpleNamespace(module=module, file=file, qualname=name)

    before = set(sys.modules)
    script = str(tmp_path / "script.py")
    try:
        assert worker._find(launch("__main__", script, "Outer.inner"))() == "found"
        assert sys.modules["__mp_main__"].Outer.name == "__mp_main__"
        assert worker._find(launch("no.such.module", script, "Outer.inner"))() == "found"
        assert sys.modules["no.such.module"].Outer.name == "no.such.module"
        assert worker._find(launch("d9d_testing.world.wire", str(wire.__file__), "pack")) is wire.pack
        with pytest.raises(ImportError, match=r"a\.txt is not a Python file"):
            worker._module(launch("mine", str(tmp_path / "a.txt"), "x"))
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]


def test_modules_are_imported_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answer = SimpleNamespace(returncode=0, stderr="")

    def run(command: list[str], **options: Any) -> Any:
        asked.append((command[:2], json.loads(options.pop("input")), options))
        return answer

    monkeypatch.setattr(fresh.subprocess, "run", run)
    answer.stdout = 'a warning\n{"a": [12.5, ["a", "torch", "b"]], "c": [1.0, []]}\n'
    found = fresh.import_fresh("a", "c")
    assert found == {
        "a": fresh.ImportFacts(12.5, frozenset({"a", "torch", "b"})), "c": fresh.ImportFacts(1.0, frozenset()),
    }  # fmt: skip
    assert (found["a"].heavy, found["c"].heavy) == (["torch"], [])
    assert asked == [
        ([sys.executable, "-c"], [sys.path, ["a", "c"]], {"capture_output": True, "text": True, "check": False})
    ]
    answer.returncode, answer.stderr = 1, "no module named a"
    with pytest.raises(AssertionError, match="no module named a"):
        fresh.import_fresh("a")


def test_tokens_of_the_core_and_fields_without_a_text_are_known() -> None:
    tokens = (
        "mesh:tp",
        "mesh:xy",
        "model:blocks",
        "model:wheels",
        "device:cuda>=9",
        "device:",
        "import:x",
        "acme:x",
        "x",
    )
    found = [token for token in tokens if plugin_suite._is_core_token(token)]
    assert found == ["mesh:tp", "model:blocks", "device:cuda>=9", "import:x"]
    schema = {
        "properties": {"a": {"description": "A."}, "b": {"description": " "}, "c": {}},
        "$defs": {"Inner": {"properties": {"d": {}}}},
    }
    assert list(plugin_suite._undocumented(schema, "Config")) == [("Config", "b"), ("Config", "c"), ("Inner", "d")]
    assert list(plugin_suite._undocumented({}, "Config")) == []


@pytest.mark.parametrize(("summary", "fine"), [("x" * 100, True), ("x" * 101, False), ("a\nb", False), ("a", True)])
def test_summaries_have_one_line_of_100_characters(summary: str, fine: bool) -> None:
    suite = PluginSuite()
    suite._entries = lambda: [SimpleNamespace(spec=SimpleNamespace(summary=summary))]  # type: ignore[method-assign]
    if fine:
        suite.test_summaries_are_one_line()
    else:
        with pytest.raises(AssertionError, match="the summary must be one line of at most 100 characters"):
            suite.test_summaries_are_one_line()


def test_the_stated_plugin_api_is_one_that_core_offers() -> None:
    oldest, newest = plugin_suite.OLDEST_API, plugin_suite.NEWEST_API
    suite = PluginSuite()
    suite.plugin = "acme.plugin"  # type: ignore[misc]
    for stated, says in (
        (oldest, None), (newest, None), (oldest - 1, "this d9d-core offers"), (newest + 1, "this d9d-core offers"),
        (None, f"acme.plugin: D9D_API is None; write D9D_API = {newest}"), (float(newest), "write D9D_API"),
    ):  # fmt: skip
        suite._module = lambda stated=stated: SimpleNamespace(D9D_API=stated)  # type: ignore[method-assign]
        if says is None:
            suite.test_declares_its_plugin_api()
        else:
            with pytest.raises(AssertionError, match=says):
                suite.test_declares_its_plugin_api()
    suite._module = SimpleNamespace  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="D9D_API is None"):
        suite.test_declares_its_plugin_api()
    suite._entries = list  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="acme.plugin declares no records; are its hooks decorated with @hookimpl"):
        suite.test_registers_at_least_one_record()


def test_a_library_that_a_record_requires_may_be_absent_on_this_platform() -> None:
    def missing(name: str) -> Any:
        def load() -> Any:
            raise ModuleNotFoundError("absent", name=name)

        return SimpleNamespace(load=load)

    class Declared(Spec):
        def refs(self) -> Any:
            return references

    references: dict[str, Any] = {}
    entry: Any = SimpleNamespace(spec=Declared(name="part", summary="Part.", requires={"import:absentlib.part"}))

    def problems(**found: Any) -> list[str]:
        references.clear()
        references.update(found)
        return list(plugin_suite._reference_problems(entry))

    assert problems(build=missing("absentlib")) == []
    (problem,) = problems(build=missing("otherlib"))
    assert problem.endswith(" does not load: ModuleNotFoundError('absent')")
    (problem,) = problems(build=SimpleNamespace(load=lambda: 3), config=SimpleNamespace(load=lambda: 3))
    assert problem.endswith("is a int, which is not callable")


def test_children_whose_outputs_add_up_to_a_change_are_found() -> None:
    start, big = torch.ones(2, 3), torch.tensor([[1e6, 0.0, 0.0], [0.0, 0.0, 0.0]])
    parts = {"input": start, "a": torch.full((2, 3), 2.0), "b": torch.full((2, 3), 3.0), "c": torch.full((2, 3), 7.0)}
    for change, chosen in ((3.0, ("b",)), (5.0, ("a", "b")), (12.0, ("a", "b", "c")), (4.0, ())):
        assert model_matrices._summands({"": start + change, **parts}) == chosen
    # Differences are as large as the rounding of the largest number.
    rounded = {"": big, "input": torch.zeros(2, 3), "a": big + 5}
    assert model_matrices._summands(rounded) == ("a",)
    assert model_matrices._summands({**rounded, "a": big + 20}) == ()
    assert model_matrices._summands({**rounded, "input": torch.zeros(2)}) == ()


def test_a_single_file_is_a_plugin_of_a_suite(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from d9d_core.plugin import *\n"
        "class Config: pass\n"
        "@hookimpl\n"
        "def d9d_tasks():\n"
        "    ref = Ref(f'{__name__}:Config')\n"
        "    yield TaskSpec(name='mine', summary='x', config=ref, build=ref)\n"
    )
    assert registry_of(str(tmp_path / "mine.py")).find("task", "mine").spec.summary == "x"  # type: ignore[union-attr]


def test_a_model_that_does_not_claim_a_capability_is_skipped() -> None:
    spec: Any = SimpleNamespace(name="m", provides=frozenset({"a"}))
    require(spec, "a")
    with pytest.raises(pytest.skip.Exception, match="^m does not claim b, c$"):
        require(spec, "c", "a", "b")


def test_the_last_step_of_a_job_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trained:
        def build(self, _say: Any, _topology: Any, observers: Any) -> Any:
            (recorder,) = observers
            steps = [[collectives.Call(kind, (0, 1), 4)] for kind in "abc"]
            return SimpleNamespace(train=lambda: recorder.steps.extend(steps))

    monkeypatch.setattr(collectives, "job_of", lambda _values, _plugins: Trained())
    monkeypatch.setattr(collectives, "topology_here", lambda _job: None)
    assert collectives.recorded_step({}, ()) == [("c", (0, 1), 4)]


def test_forgotten_calls_are_no_calls(tmp_path: Path) -> None:
    stand_ins = StandIns(tmp_path, ["run"])
    stand_ins.forget()
    assert stand_ins.calls() == []
    (tmp_path / ".calls").write_text('["run", "a"]\n["stop"]\n')
    assert (stand_ins.calls(), stand_ins.calls("stop")) == ([["run", "a"], ["stop"]], [["stop"]])
    stand_ins.forget()
    assert stand_ins.calls() == []
