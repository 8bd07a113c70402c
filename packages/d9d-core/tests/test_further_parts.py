"""Further small parts alone: lengths and shapes, subscriptions, programs, and lists of plugins."""

from __future__ import annotations

import json
import logging
import signal
from types import SimpleNamespace
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
import torch
import torch.distributed.tensor
from d9d_core import tensors as tensors_module
from d9d_core.cli import app as app_module
from d9d_core.cli import main as main_module
from d9d_core.cli.app import app
from d9d_core.cli.plugins import check_plugins, show_records
from d9d_core.data import SampleLengths, packs_documents, sample_lengths
from d9d_core.errors import BuildError, PluginError, TrainingError, interrupt_behind
from d9d_core.job_file.schema import job_schema
from d9d_core.job_file.sections.plugins import Plugins
from d9d_core.model import Stage
from d9d_core.plugin import (
    KernelSpec,
    Ref,
    StrategySpec,
    hookimpl,
)
from d9d_core.program.index import ProgramIndex
from d9d_core.program.placement import Pipeline
from d9d_core.registry.entries import shown
from d9d_core.registry.registry import Registry
from d9d_core.schedule import Backward, Forward, Reduce
from d9d_core.strategy import StepShape
from d9d_core.subscriber import Subscribes, subscribe, subscriptions_of
from d9d_core.tensors import beside, full
from d9d_core.tracker import Histogram, flatten
from typer.testing import CliRunner


def test_lengths_are_fixed_if_the_divisor_is_the_bound() -> None:
    assert [SampleLengths(4, most).fixed for most in (4, 8, None)] == [4, None, None]
    stated = SimpleNamespace(sample_lengths=SampleLengths(4))
    assert sample_lengths(stated) == SampleLengths(4)
    assert sample_lengths(object()) is None


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([], False), ([False, False], False), ([False, True], True), ([None, True], True), ([False, None], None),
        (["silent", False], None), (["silent", True], True),
    ],
)  # fmt: skip
def test_documents_are_packed_if_any_dataset_says_so(answers: list[Any], found: bool | None) -> None:
    datasets = [object() if answer == "silent" else SimpleNamespace(packs_documents=answer) for answer in answers]
    assert packs_documents(*datasets) is found


def test_stages_know_their_place() -> None:
    places = [(stage.is_first, stage.is_last) for stage in (Stage(), Stage(0, 3), Stage(1, 3), Stage(2, 3))]
    assert places == [(True, True), (True, False), (False, False), (False, True)]


def test_passes_of_a_step_are_counted() -> None:
    shape = StepShape(("forward", "input_backward", "forward"), 2, 3, 4)
    assert (shape.forwards, shape.backwards, shape.split_backward) == (2, 1, True)
    assert not StepShape(("forward", "backward"), 2, 3, 4).split_backward
    assert (shape.bytes_of(5), shape.bytes_of(0.25), shape.bytes_of(5, 1)) == (120, 6, 30)
    assert StepShape((), 2, None, 4).bytes_of(5) is None


class Base(Subscribes):
    @subscribe(int)
    def first(self, event: Any) -> None: ...


class Watches(Base):
    @subscribe(str, float)
    def second(self, event: Any) -> None: ...

    @subscribe(bytes)
    def first(self, event: Any) -> None: ...

    def other(self) -> None: ...


def test_handlers_of_base_classes_come_first_and_of_each_event_once() -> None:
    found = [(event, handler.__name__) for event, handler in subscriptions_of(Watches())]
    assert found == [(bytes, "first"), (str, "second"), (float, "second")]

    @subscribe(int)
    @subscribe(str)
    def show(event: Any) -> None: ...

    assert list(subscriptions_of(show)) == [(str, show), (int, show)]
    for observer in (print, 3):
        with pytest.raises(TypeError, match="is not an observer; give it subscriptions"):
            list(subscriptions_of(observer))


def test_nested_values_get_names_with_slashes() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, 2], "e": [{"x": 1}, {"y": 2}], "f": []}) == {
        "a/b": 1, "a/c": {}, "d": [1, 2], "e/0/x": 1, "e/1/y": 2, "f": [],
    }  # fmt: skip
    Histogram(torch.ones(1), 0.0, 1.0)
    for counts in (torch.ones(0), torch.ones(1, 1), torch.ones(())):
        with pytest.raises(ValueError, match="counts of a histogram have shape"):
            Histogram(counts, 0.0, 1.0)


# --- tensors and programs ---------------------------------------------------------------------------------------------


class Sharded:
    """Stand-in of a DTensor on a mesh."""

    def __init__(self, mesh: str) -> None:
        self.device_mesh = mesh


def test_tensors_of_other_meshes_are_gathered_beside_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = torch.ones(1)
    assert beside(plain, plain) == (plain,)
    assert full(plain) is plain
    monkeypatch.setattr(tensors_module, "is_dtensor", lambda tensor: isinstance(tensor, Sharded))
    monkeypatch.setattr(tensors_module, "full", lambda tensor: ("full", tensor))
    own: Any = Sharded("a")
    same, other = Sharded("a"), Sharded("b")
    several: list[Any] = [same, same]
    assert beside(own, *several) == (same, same)
    mixed: list[Any] = [other, plain]
    assert beside(plain, *mixed) == (("full", other), ("full", plain))


def test_microbatches_of_programs_are_counted_from_their_largest_number() -> None:
    index = ProgramIndex.of([(Forward(0, 0), Forward(0, 2), Forward(0, 1)), (Backward(1, 1),)])
    assert (index.microbatches, index.stages, index.hosts, index.problems) == (3, 2, [0, 1], [])


def test_a_pipeline_works_with_the_least_microbatches_that_its_schedule_takes() -> None:
    def schedule(ranks: int, microbatches: int) -> list[Any]:
        if microbatches < 3:
            raise BuildError("too few")
        assert ranks == 1
        each = [action for count in range(microbatches) for action in (Forward(0, count), Backward(0, count))]
        return [(*each, Reduce(0))]

    pipeline = Pipeline(schedule)
    assert pipeline.least_microbatches(8) == 3
    assert pipeline.least_microbatches(2) == 2


# --- errors, plugins and commands -------------------------------------------------------------------------------------


def test_interrupts_behind_other_errors_are_recognised() -> None:
    error = RuntimeError("no")
    assert not interrupt_behind(error)
    error.__cause__ = KeyboardInterrupt()
    assert interrupt_behind(error)
    error.__cause__ = ValueError()
    assert not interrupt_behind(error)
    broken = type("SchemaError", (Exception,), {})
    assert interrupt_behind(broken("KeyboardInterrupt"))
    assert not interrupt_behind(broken("other"))


def test_values_of_plugins_are_shown_up_to_500_characters() -> None:
    assert shown("x" * 498) == repr("x" * 498)
    assert shown("x" * 499) == f"'{'x' * 499}... (501 characters)"


def test_the_schema_of_job_files_has_its_title_and_version() -> None:
    schema = job_schema(Registry.of(toy))
    assert schema["title"] == "d9d job file"
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"]["plugins"]["anyOf"][1] == {
        "type": "array", "items": {"type": "string"}, "description": "Single-file plugins.",
    }  # fmt: skip


def test_records_of_plugins_are_listed_checked_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    registry = Registry.of(toy)
    show_records(registry, "toy_strategy", as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "strategy toy_strategy (d9d_testing.toy.plugin): Halves the outputs of blocks."
    assert lines[1] == "  requires: model:blocks"
    rows = [line.split() for line in lines[2:]]
    assert rows[0] == ["field", "accepts", "default", "meaning"]
    assert [
        "blocks",
        "whole",
        "number",
        "1",
        "Number",
        "of",
        "blocks",
        "to",
        "change;",
        "zero",
        "changes",
        "none.",
    ] in rows
    show_records(registry, "toy_strategy", as_json=True)
    (detail,) = json.loads(capsys.readouterr().out)
    config = detail.pop("config")
    assert config["properties"]["blocks"]["default"] == 1
    assert detail == {
        "kind": "strategy",
        "name": "toy_strategy",
        "distribution": "d9d_testing.toy.plugin",
        "version": detail["version"],
        "summary": "Halves the outputs of blocks.",
        "requires": ["model:blocks"],
        "provides": [],
        "conflicts": [],
        "references": detail["references"],
    }
    show_records(registry, "d9d_testing.toy.plugin", as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["extension", "point", "name", "distribution", "summary"]
    assert ["model", "toy_model", "d9d_testing.toy.plugin"] in [row[:3] for row in rows]
    with pytest.raises(PluginError, match="^no record is called 'x'; names: "):
        show_records(registry, "x", as_json=False)
    assert check_plugins(registry, "d9d_testing.toy.plugin", as_json=True)
    number = len([entry for entry in registry.entries() if entry.origin.is_called("d9d_testing.toy.plugin")])
    expected = {"records": number, "problems": [], "deprecations": []}
    assert capsys.readouterr().out == json.dumps(expected, indent=1) + "\n"
    with pytest.raises(PluginError, match="^no plugin 'x'; loaded: "):
        check_plugins(registry, "x", as_json=True)
    with pytest.raises(PluginError, match=": no plugin is installed; to train, begin with: pip install d9d-engine$"):
        check_plugins(Registry(), None, as_json=True)


def test_clashes_are_reported_for_the_asked_distributions_only() -> None:
    def plugin(name: str) -> Any:
        @hookimpl
        def d9d_strategies() -> list[StrategySpec]:
            ref = Ref("nowhere:x")
            return [StrategySpec(name="same", summary="x", config=ref, build=ref, anchor="data")]

        return SimpleNamespace(__name__=name, d9d_strategies=d9d_strategies)

    registry = Registry.of(plugin("acme"), plugin("other"))
    assert len(registry.conflicts()) == 1
    assert len(registry.conflicts({"other"})) == 1
    assert registry.conflicts({"third"}) == []


def test_a_kernel_is_of_an_op_and_deterministic_unless_it_says_otherwise() -> None:
    ref = Ref("nowhere:x")
    kernel = KernelSpec(op="rope", name="fast", summary="x", supports=ref, build=ref)
    assert kernel.deterministic
    assert kernel.operators == ()


@pytest.mark.thorough
def test_commands_without_words_print_their_help() -> None:
    for words in ([], ["plugins"]):
        result = CliRunner().invoke(app, words)
        assert "Usage: " in result.output
        assert "--help" in result.output


def test_doctor_examines_the_plugins_and_names_of_own_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answers = [True, False]
    monkeypatch.setattr("d9d_core.cli.health.examine", lambda *given: asked.append(given) or answers[len(asked) - 1])
    monkeypatch.setattr(app_module, "discover_plugins", lambda *given: given)
    assert [CliRunner().invoke(app, ["doctor", "--no-plugins"]).exit_code for _ in range(2)] == [0, 1]
    inner = {f"plugins {name}" for name in ("list", "show", "check")}
    assert asked[0] == (([], True), {"check", "schema", "doctor", "plugins"} | inner, False)


@pytest.mark.parametrize(
    ("ends", "status"), [(None, 0), (SystemExit(3), 3), (SystemExit(None), 0), (SystemExit("no"), 1), (ValueError(), 1)]
)
def test_a_command_ends_in_time_with_its_status(
    monkeypatch: pytest.MonkeyPatch, ends: BaseException | None, status: int
) -> None:
    ended: list[int] = []

    def runs() -> None:
        if ends is not None:
            raise ends

    monkeypatch.setattr(main_module, "_main", runs)
    monkeypatch.setattr(main_module, "end_in_time", ended.append)
    monkeypatch.setattr(main_module, "make_tracebacks_visible", lambda: None)
    if ends is None:
        main_module.main()
    else:
        with pytest.raises(type(ends)):
            main_module.main()
    assert ended == [status]


def test_after_an_interrupt_no_further_one_is_raised_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    masked: list[Any] = []
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *given: masked.append(given))

    def run(error: BaseException | None) -> None:
        if error is not None:
            raise error

    for error, status, blocked in (
        (KeyboardInterrupt(), 130, [(signal.SIG_BLOCK, {signal.SIGINT})]),
        (SystemExit(130), 130, [(signal.SIG_BLOCK, {signal.SIGINT})]),
        (SystemExit(2), 2, []),
    ):
        masked.clear()
        monkeypatch.setattr(app_module, "run", lambda error=error: run(error))
        with pytest.raises(SystemExit) as end:
            main_module._main()
        assert (end.value.code, masked) == (status, blocked)
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.setattr(app_module, "run", lambda: run(TrainingError("x")))
    with pytest.raises(TrainingError):
        main_module._main()


def test_the_level_of_torchs_log_comes_back_after_a_gather() -> None:
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with tensors_module._without_gather_warning():
            assert logger.level == logging.ERROR
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)


def test_names_of_distributions_in_a_job_are_read_like_packaging_tools_read_them() -> None:
    policy = Plugins(allow=["Acme_Moe"], block=["Other.One"], require=["Acme_Moe"], autoload=False).policy()
    assert policy.allow is not None
    assert "acme-moe" in policy.allow
    assert "other-one" in policy.block
    assert ("acme-moe" in policy.require, policy.autoload) == (True, False)
    assert Plugins().policy().allow is None
    assert Plugins().policy().autoload
