"""Lines that ``d9d check`` and ``d9d explain`` print of a plan. Plans are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.kernel import Decision
from d9d_core.schedule import Backward, Forward
from d9d_core.strategy import Collective
from d9d_core.terminal.console import console_for
from d9d_core.types import TensorSpec
from d9d_engine.cli import report
from d9d_engine.cli import stages as stages_module
from d9d_engine.cli.report import print_communication, print_explanation, print_kernel, print_plan
from d9d_engine.cli.stages import handed_on, layers_of, pipeline_line, print_stages
from d9d_engine.compose.communication.placements import Placed
from d9d_engine.compose.communication.step import Entry, StepCollectives
from torch import nn

GIB = 2**30


class Mesh(SimpleNamespace):
    def __str__(self) -> str:
        return "the mesh"


def job(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "mesh": Mesh(world_size=1, pp=1),
        "model": None,
        "source": SimpleNamespace(note=None, auto=None),
        "batch": SimpleNamespace(size=12),
        "microbatches": 4,
        "microbatch_size": 3,
        "steps": 1000,
        "pipeline": None,
        "logging": SimpleNamespace(every=10),
    }
    return SimpleNamespace(**{**fields, **changes})


def plan(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "parameters": (12_345, 678),
        "selection": SimpleNamespace(model=SimpleNamespace(entry="'m' (acme)"), all=list),
        "pretrained": None,
        "memory": SimpleNamespace(
            total=4 * GIB, parameters=GIB, gradients=GIB // 2, optimizer=2 * GIB, frozen=0, host=0
        ),
        "collectives": StepCollectives(0, [], [], []),
        "program": tuple(Forward(0, index) for index in range(8)),
        "flops_per_token": None,
        "verdicts": [],
        "warnings": [],
        "kernels": [],
        "groups": {},
        "placements": [],
        "assembly": SimpleNamespace(applied=[], ownership=SimpleNamespace(table=list)),
    }
    return SimpleNamespace(**{**fields, **changes})


def rows(text: str) -> dict[str, str]:
    return {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1].rstrip() for line in text.splitlines() if line.strip()}


def test_a_plan_is_summed_up_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(job(), plan())
    assert rows(capsys.readouterr().out) == {
        "mesh": "the mesh",
        "model": "'m' (acme): 12,345 parameters, 678 of them train",
        "memory": "4.000 GiB without activations (parameters 1.000, gradients 0.500, optimizer 2.000)",
        "step": "12 samples, 4 microbatch(es) of 3",
        "run": "1,000 steps",
        "program": " ".join(str(Forward(0, index)) for index in range(8)),
    }


def test_a_plan_tells_weights_frozen_memory_rank_pipeline_and_what_is_undecided(
    capsys: pytest.CaptureFixture[str],
) -> None:
    undecided = SimpleNamespace(satisfied=None, chosen=SimpleNamespace(where="parallel[0]"), token="t:x", reason="why")
    found = plan(
        pretrained="from there",
        memory=SimpleNamespace(total=GIB, parameters=GIB, gradients=0, optimizer=0, frozen=3 * GIB, host=GIB),
        collectives=StepCollectives(2, [], [], []),
        program=tuple(Forward(0, index) for index in range(9)),
        flops_per_token=123_456.0,
        verdicts=[undecided, SimpleNamespace(satisfied=True)],
        warnings=["be careful"],
        assembly=SimpleNamespace(pipeline=SimpleNamespace(hosts=(0, 1, 1, 0), ranks=2)),
    )
    pipelined = job(pipeline=SimpleNamespace(name="zbv"))
    print_plan(pipelined, found)
    assert rows(capsys.readouterr().out) == {
        "mesh": "the mesh",
        "model": "'m' (acme): 12,345 parameters, 678 of them train",
        "weights": "from there",
        "memory": "1.000 GiB without activations on rank 2 (parameters 1.000, gradients 0.000, optimizer 0.000, frozen "
        "model 3.000), and 1.000 GiB of host memory",
        "step": "12 samples, 4 microbatch(es) of 3",
        "run": "1,000 steps",
        "pipeline": "zbv, 4 stage(s) on 2 rank(s), 4 microbatch(es)",
        "program": " ".join(str(Forward(0, index)) for index in range(8)) + " ...",
        "FLOPs": "1.235e+05 per token",
        "undecided": "parallel[0] needs t:x: why",
        "warning:": "be careful",
    }
    assert report._rank_of(pipelined, plan()) == " on the first rank"
    assert report._rank_of(job(), plan()) == ""


def test_a_kernel_is_printed_with_the_answer_of_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    choice: Any = SimpleNamespace(
        op="rope",
        backend="fast",
        supplied_by="d9d-triton",
        requested=True,
        rule=None,
        compiled=True,
        sites=("a", "", "c", "d", "e", "f"),
        considered={
            "fast": Decision(True, "fits", 1),
            "slow": Decision(True, "works", 0),
            "reference": Decision(True, "always", 0),
            "other": Decision(False, "no GPU"),
        },
    )
    print_kernel(console_for(), choice)
    assert capsys.readouterr().out.splitlines() == [
        "  rope: fast (d9d-triton), asked for by kernels.rope, at a, (the model itself), c, d and 2 more, compiled",
        "    fast accepts, priority 1: fits",
        "    slow accepts, priority 0, used only if the job names it: works",
        "    reference accepts, priority 0: always",
        "    other refuses: no GPU",
    ]
    plain: Any = SimpleNamespace(
        op="rope",
        backend="x",
        supplied_by=None,
        requested=False,
        rule=None,
        compiled=False,
        sites=tuple("abcd"),
        considered={},
    )
    print_kernel(console_for(), plain)
    assert capsys.readouterr().out == "  rope: x at a, b, c, d\n"


def entry(size: int | None, purpose: str = "p", approximate: bool = False) -> Entry:
    return Entry("fsdp", Collective("all_gather", "dp", (0, 1), size, 3, purpose, approximate=approximate))


def test_communication_of_several_processes_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_communication(console_for(), job(), plan(collectives=StepCollectives(0, [entry(1)], [], [])))
    assert capsys.readouterr().out == ""
    several = job(mesh=Mesh(world_size=2, pp=1))
    found = plan(
        placements=[
            Placed("layers.*.w", 3, (2, 5), "dim 0 sharded over dp=2", True),
            Placed("head", 1, (4,), "whole", False),
        ],
        collectives=StepCollectives(1, [entry(1000), entry(7)], [entry(9, "metrics")], ["something quiet"]),
    )
    print_communication(console_for(), several, found)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "parameters on rank 1, and where their other parts are",
        "layers.*.w 3 x [2, 5] dim 0 sharded over dp=2",
        "head [4] whole, frozen",
        "collectives of a step on rank 1",
        "by kind over ranks calls bytes each what",
        "fsdp all_gather dp 2 3 1,000 p",
        "fsdp all_gather dp 2 3 7 p",
        "collectives of a log entry, each 10 step(s) on rank 1",
        "by kind over ranks calls bytes each what",
        "fsdp all_gather dp 2 3 9 metrics",
        "in a step: 6 all_gather 3,021 bytes",
        "not listed: collectives of evaluations and checkpoints",
        "not listed: something quiet",
    ]


def test_signs_in_the_table_of_collectives_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    several = job(mesh=Mesh(world_size=2, pp=1))
    print_communication(
        console_for(), several, plan(collectives=StepCollectives(0, [entry(1), entry(2, approximate=True)], [], []))
    )
    out = capsys.readouterr().out
    assert "  ~: depends on values of the step, such as the choices of a router\n" in out
    assert "?:" not in out
    print_communication(console_for(), several, plan(collectives=StepCollectives(0, [entry(1), entry(None)], [], [])))
    out = capsys.readouterr().out
    assert "  ?: sizes that depend on the data; they are not in the sums\n" in out
    assert "~:" not in out
    print_communication(console_for(), several, plan())
    assert "  in a step: none\n" in capsys.readouterr().out


def test_an_explanation_names_parts_effects_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = SimpleNamespace(
        where="model",
        spec=SimpleNamespace(name="m", summary="A model."),
        entry=SimpleNamespace(origin="acme 1.0"),
    )
    strategy = SimpleNamespace(spec=SimpleNamespace(name="fsdp"))
    verdict = SimpleNamespace(satisfied=True, chosen=SimpleNamespace(where="parallel[0]"), token="t:x", reason="why")
    found = plan(
        selection=SimpleNamespace(model=SimpleNamespace(entry="'m' (acme)"), all=lambda: [chosen]),
        assembly=SimpleNamespace(
            applied=[(strategy, SimpleNamespace(modules=("a", "b"), notes=("left [x] alone",)))],
            ownership=SimpleNamespace(table=lambda: [("dp_shard", "fsdp", ("w", "v"))]),
        ),
        groups={"adamw": {"parameters": ["w", "v"], "lr": 0.1, "betas": 2}},
        verdicts=[verdict],
        collectives=StepCollectives(1, [], [], []),
    )
    print_explanation(job(), found)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:13] == [
        "parts",
        "model m acme 1.0 A model.",
        "strategies, in order of application (on rank 1)",
        "fsdp: a, b",
        "left [x] alone",
        "kernels",
        "optimizer groups",
        "adamw: lr 0.1, betas 2: w, v",
        "capabilities",
        "parallel[0] t:x: why",
        "gradient reductions (on rank 1)",
        "over dp_shard by fsdp: w, v",
        "mesh the mesh",
    ]


def test_an_explanation_of_a_plain_job_says_that_there_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    print_explanation(job(), plan())
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:10] == [
        "parts",
        "",
        "strategies, in order of application",
        "none",
        "kernels",
        "optimizer groups",
        "capabilities",
        "none are required",
        "gradient reductions",
        "none: the mesh",
    ]


def test_ranks_are_named_wherever_a_pipeline_makes_them_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages_module, "pipeline_line", lambda *_: "the pipeline")
    monkeypatch.setattr(stages_module, "print_stages", lambda *_: print("the stages"))
    print_explanation(job(mesh=Mesh(world_size=1, pp=2), pipeline=SimpleNamespace(name="zbv")), plan())
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[2:5] == ["stages of the pipeline", "the stages", "strategies, in order of application (on rank 0)"]
    assert "gradient reductions (on rank 0)" in lines


# --- stages -----------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, 2))

    def blocks(self) -> dict[str, nn.Module]:
        return dict(self.named_children())


def test_the_blocks_of_a_stage_are_named_by_first_and_last() -> None:
    assert layers_of(nn.Linear(1, 1)) == ""
    assert layers_of(Blocks("a")) == "a"
    assert layers_of(Blocks("a", "b", "c")) == "a to c (3)"
    assert layers_of(nn.ModuleDict({"body": Blocks("a", "b")})) == "body.a to body.b (2)"


class Stage(nn.Module):
    def __init__(self, specs: Any) -> None:
        super().__init__()
        self.specs, self.weight = specs, nn.Parameter(torch.zeros(1000, 2))

    def boundary(self, microbatch: Any) -> Any:
        if self.specs is None:
            raise KeyError("x")
        spec = microbatch["tokens"]
        return {name: TensorSpec((*spec.shape, width), torch.float32) for name, width in self.specs.items()}


def test_the_tensors_that_a_stage_passes_on_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_module, "PipelineStage", Stage)
    data: Any = SimpleNamespace(sequence_length=7)
    made = job(data=data)
    assert handed_on(nn.Linear(1, 1), made) == ""
    assert handed_on(Stage({"x": 4, "y": 5}), made) == "x [3, 7, 4], y [3, 7, 5]"
    assert handed_on(Stage({"x": 4}), job(data=SimpleNamespace())) == "x"
    assert handed_on(Stage(None), made) == "known when the data is read"


def test_stages_are_a_table_with_their_ranks_and_parameters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages_module, "handed_on", lambda stage, _job: f"of {stage.name}")
    monkeypatch.setattr(stages_module, "layers_of", lambda stage: f"layers of {stage.name}")
    one, other = nn.Linear(1000, 2, bias=False), nn.Linear(1, 1)
    one.name, other.name = cast("Any", "one"), cast("Any", "other")
    found: Any = SimpleNamespace(
        assembly=SimpleNamespace(
            all_stages=[one, other],
            pipeline=SimpleNamespace(hosts=(1, 0), ranks=2),
            shared={"embed.weight": (0, 1)},
        )
    )
    print_stages(console_for(), job(), found)
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "stage rank along pp layers parameters sent tensors",
        "0 1 layers of one 2,000 of one",
        "1 0 layers of other 2 of other",
        "embed.weight is in stages 0 and 1, kept equal",
    ]
    assert pipeline_line(job(), found) == "no schedule, 2 stage(s) on 2 rank(s), 4 microbatch(es)"


def test_a_program_is_shortened_after_eight_actions(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(job(), plan(program=(Forward(0, 0), Backward(0, 0))))
    assert rows(capsys.readouterr().out)["program"] == f"{Forward(0, 0)} {Backward(0, 0)}"
