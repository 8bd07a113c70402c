"""Verdicts on layouts, the table of them, and merged measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.schedule import Backward, Forward, Reduce
from d9d_engine.job import Job
from d9d_verify import run, worker
from d9d_verify.command import _print, app, verify_job
from d9d_verify.compare import Verdict, compare, compared
from d9d_verify.deviations import FLOORS, Limits
from d9d_verify.layouts import REFERENCE_LAYOUT, Layout, layout_values, own_layout, parse_layout
from d9d_verify.measure import LOUD, Jitter, Rate, _backwards, _here, _numbers
from d9d_verify.measurement import Measurement, Record, fill, read_all, when
from d9d_verify.run import _job, _settings, launch_processes, narrowest_dtype, unlike_saved, unlike_state
from torch import nn
from typer.testing import CliRunner


def two_steps(**changes: float) -> Measurement:
    """Two steps of a run with a parameter, a buffer and a state."""
    numbers = {f"{step}/{name}": 2.0 for step in range(2) for name in ("loss", "tokens", "grad_norm", "lr")}
    numbers |= {"end/accuracy": 0.5, "end/load[0]": 1.0, "end/load[1]": 1.0}
    tensors = {"start/model/a": torch.ones(2), "start/model/b": torch.ones(1)}
    for step in range(2):
        tensors |= {f"{step}/gradients/{name}": torch.ones(2) for name in ("a",)}
        tensors |= {f"{step}/model/a": torch.full((2,), 0.5 - 0.25 * step), f"{step}/model/b": torch.ones(1)}
        tensors |= {f"{step}/optimizer/a/momentum": torch.ones(2)}
    for name, factor in changes.items():
        key = name.removeprefix("at_").replace("__", "/")
        if key in numbers:
            numbers[key] *= factor
        else:
            tensors[key] = tensors[key] * factor
    return Measurement(numbers, tensors)


def judged(measured: Measurement) -> Verdict:
    return compare("x", measured, two_steps(), Limits.of(torch.float32, two_steps()))


def test_a_verdict_has_the_largest_deviation_of_each_kind_with_its_name() -> None:
    verdict = judged(
        two_steps(at_0__loss=1.25, at_1__loss=1.5, at_1__grad_norm=1.125, at_1__gradients__a=2.0, at_1__model__a=2.0)
    )
    assert (verdict.layout, verdict.loss, verdict.grad_norm) == ("x", 0.5, 0.125)
    assert verdict.norm == (0.5, "a")
    assert verdict.update == (pytest.approx(1.0), "a")
    assert verdict.angle == (pytest.approx(0.0, abs=1e-12), "a")
    assert verdict.diverged is not None
    assert verdict.diverged[0] == 0


def test_what_is_not_a_number_is_the_largest_deviation() -> None:
    verdict = judged(two_steps(at_0__loss=math.nan, at_1__loss=1.5))
    assert verdict.loss == math.inf
    values = verdict.to_json()
    assert (values["loss"], values["passed"], values["layout"]) == ("inf", False, "x")
    assert values["diverged"] == [0, "the loss is off by inf (allowed 5e-06)"]
    json.dumps(values, allow_nan=False)


def test_a_layout_that_failed_diverges_from_the_first_step() -> None:
    verdict = Verdict.failure("x", "no port")
    assert (verdict.passed, verdict.diverged) == (False, (0, "no port"))
    assert verdict.to_json()["angle"] == ["nan", "nothing"]
    assert judged(two_steps()).to_json()["passed"] is True


def test_the_first_step_that_deviates_is_named() -> None:
    assert judged(two_steps(at_1__loss=1.5)).diverged == (1, "the loss is off by 5.0e-01 (allowed 5e-06)")
    assert judged(two_steps(at_1__lr=2.0)).diverged == (1, "the learning rate is off by 1.0e+00")
    # Values at the end belong to the last step.
    assert judged(two_steps(end__accuracy=2.0)).diverged == (
        1, "the series accuracy is off by 1.0e+00 (allowed 1e-04)",
    )  # fmt: skip


def test_the_deviating_gradient_of_the_same_step_is_named_with_the_norm() -> None:
    text = "the gradient norm is off by 1.2e-01 (allowed 1e-05)"
    both = judged(two_steps(at_0__grad_norm=1.125, at_0__gradients__a=2.0, at_1__gradients__a=4.0))
    assert both.diverged == (0, f"{text}; the gradient of a most, by 5.0e-01")
    later = judged(two_steps(at_0__grad_norm=1.125, at_1__gradients__a=4.0))
    assert later.diverged == (0, text)


def test_ranks_that_disagree_before_a_deviation_are_named_instead() -> None:
    off = two_steps(at_1__model__a=2.0)
    said = "ranks that should have equal values have different values of"
    for name, step, what in (
        ("0/optimizer/a/momentum", 0, "the optimizer's a/momentum"),
        ("1/gradients/a", 1, "the gradient of a"),
        ("start/model/a", 0, "a"),
    ):
        found = judged(Measurement(off.numbers, off.tensors, [name]))
        assert found.diverged == (step, f"{said} {what}")
    found = judged(Measurement(two_steps().numbers, two_steps().tensors, ["end/accuracy"]))
    assert found.diverged == (1, f"{said} the series accuracy")
    found = judged(Measurement(off.numbers, off.tensors, ["1/optimizer/a/momentum"]))
    assert found.diverged is not None
    assert found.diverged[1].startswith("the update of a ")


def test_buffers_come_before_states_and_states_before_anything_else_of_a_step() -> None:
    for changed, later, what in (
        ({"at_0__model__b": 2.0}, "0/optimizer/a/momentum", "the buffer b is off"),
        ({"at_0__optimizer__a__momentum": 2.0}, "0/other", "the optimizer's a/momentum after a step"),
    ):
        off = two_steps(**changed)
        found = judged(Measurement(off.numbers, off.tensors, [later]))
        assert found.diverged is not None
        assert found.diverged[1].startswith(what)


def test_other_names_are_listed_up_to_three() -> None:
    more = two_steps()
    more.numbers |= {f"end/{letter}": 1.0 for letter in "dcba"}
    assert judged(more).diverged == (
        0, "different parameters, states or series: missing [], extra ['end/a', 'end/b', 'end/c']",
    )  # fmt: skip


def test_the_list_of_compared_values_counts_them() -> None:
    numbers = "loss and its terms, number of tokens, gradient norm, learning rate"
    gradients = "1 gradients before the optimizer's step, and its updates from equal gradients"
    equal = "and bitwise equality of values that several ranks have"
    assert compared(two_steps()) == (
        f"2 steps: {numbers}, {gradients}, 1 tensors of the optimizer's state, 1 buffers and frozen parameters, "
        f"the series accuracy, load, {equal}"
    )
    bare = Measurement({"0/loss": 1.0}, {"0/gradients/a": torch.ones(1), "0/model/a": torch.ones(1)})
    assert compared(bare) == (
        f"1 steps: {numbers}, {gradients}, no optimizer state, no metrics, no evaluation, {equal}"
    )


def test_the_table_has_a_line_for_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Verdict("pp=2", 0.5, 0.25, (1e-9, "a"), (0.125, "b"), (2.0, "c"), (1, "the loss is off"))
    _print([judged(two_steps()), wrong])
    titles, good, bad = (
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in capsys.readouterr().out.splitlines()
    )
    assert titles == [
        "layout", "loss", "gradient norm", "worst angle (1-cos)", "worst length", "worst update", "verdict",
    ]  # fmt: skip
    assert good == ["x", "0.0e+00", "0.0e+00", "0.0e+00 a", "0.0e+00 a", "0.0e+00 a", "pass"]
    assert bad == ["pp=2", "5.0e-01", "2.5e-01", "1.0e-09 a", "1.2e-01 b", "2.0e+00 c", "FAIL step 2: the loss is off"]


@pytest.mark.parametrize("as_json", [False, True])
def test_one_layout_that_fails_fails_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    verdicts = [judged(two_steps()), Verdict.failure("pp=2", "no port")]

    def verify(_job: object, _layouts: object, _steps: int, note: Any) -> list[Verdict]:
        note("pp=2: 2 processes\x1b[2J")
        return verdicts

    monkeypatch.setattr("d9d_verify.run.verify", verify)
    assert not verify_job(job({"pp": 2}), ["pp=2"], 1, 8, as_json)
    written = capsys.readouterr()
    assert "pp=2: 2 processes" in written.err
    assert "\x1b" not in written.err
    assert as_json == written.out.startswith("[\n {")
    assert as_json != ("FAIL" in written.out)
    del verdicts[1]
    assert verify_job(job({"pp": 2}), ["pp=2"], 1, 8, as_json)


def job(mesh: dict[str, int], *strategies: dict[str, Any]) -> Job:
    """Stand-in of a job: mesh and strategies."""

    class Mesh:
        def sizes(self) -> dict[str, int]:
            return dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1) | mesh

        def __str__(self) -> str:
            return "the mesh"

    registry = SimpleNamespace(entries=lambda _kind: [])
    entries = [SimpleNamespace(selector=s["name"], model_dump=lambda mode, s=s: s) for s in strategies]
    return cast("Job", SimpleNamespace(mesh=Mesh(), parallel=entries, pipeline=None, registry=registry))


def test_the_own_layout_of_a_job_has_at_most_two_ranks_on_each_axis() -> None:
    layout = own_layout(job({"pp": 4, "dp_shard": 2}, {"name": "fsdp", "x": 1}, {"name": "compile"}), 4)
    assert layout.mesh == {"pp": 2, "dp_shard": 2}
    assert layout.name == "pp=2 x dp_shard=2 fsdp, compile"
    assert list(layout.parallel) == [{"name": "fsdp", "x": 1}, {"name": "compile"}]
    assert (layout.ranks, layout.data_parallel_size) == (4, 2)
    assert own_layout(job({}), 1).name == "one process"
    with pytest.raises(JobError, match="the mesh needs at least 8 processes, more than the 7 that are allowed"):
        own_layout(job({"pp": 2, "dp_shard": 2, "tp": 2}), 7)


def test_a_layout_is_read_with_the_jobs_settings_of_its_strategies() -> None:
    own = job({"dp_shard": 8}, {"name": "fsdp", "x": 1})
    layout = parse_layout(" dp_replicate=2 , dp_shard=3: fsdp ,compile,", own)
    assert layout.mesh == {"dp_replicate": 2, "dp_shard": 3}
    assert list(layout.parallel) == [{"name": "fsdp", "x": 1}, {"name": "compile"}]
    assert (layout.ranks, layout.data_parallel_size) == (6, 6)
    assert Layout("x", {"dp_shard": 4, "tp": 3, "ep": 2}, []).ranks == 12  # ep needs no ranks of its own
    assert (parse_layout(":fsdp", own).mesh, parse_layout("pp=1", own).parallel) == ({}, [])


@pytest.mark.parametrize("text", ["dp=2", "dp_shard", "dp_shard=0", "dp_shard=-1", "dp_shard=x", "pp=2,tp:fsdp"])
def test_a_malformed_layout_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="write axis=size"):
        parse_layout(text, job({}))


def test_a_layout_of_stages_may_name_one_schedule_of_those_installed() -> None:
    own = job({"pp": 2}, {"name": "fsdp", "x": 1})
    schedules = [SimpleNamespace(spec=SimpleNamespace(key=name)) for name in ("1f1b", "gpipe")]
    known: Any = own
    known.registry = SimpleNamespace(entries=lambda kind: {"schedule": schedules}[kind])
    known.pipeline = SimpleNamespace(selector="gpipe", model_dump=lambda mode: {"name": "gpipe", "mode": mode})
    found = parse_layout("pp=2:1f1b(x=[1, {y: 2}], z = 3),fsdp", own)
    assert (found.pipeline, list(found.parallel)) == (
        {"name": "1f1b", "x": [1, {"y": 2}], "z": 3}, [{"name": "fsdp", "x": 1}],
    )  # fmt: skip
    assert parse_layout("pp=2:gpipe", own).pipeline == {"name": "gpipe", "mode": "json"}
    assert parse_layout("pp=2:fsdp", own).pipeline is None
    values = {"pipeline": {"name": "gpipe"}}
    assert layout_values(values, found, [])["pipeline"] == {"name": "1f1b", "x": [1, {"y": 2}], "z": 3}
    for text in ("pp=2:1f1b,gpipe", "pp=1:1f1b", "dp_shard=2:1f1b"):
        with pytest.raises(JobError, match=f"^--layout {text}: name at most one schedule, and only with pp=2 or more$"):
            parse_layout(text, own)
    for text in ("fsdp(x", "fsdp(x)", "fsdp(=1)", "fsdp(x=1,y)"):
        with pytest.raises(JobError) as error:
            parse_layout(f"pp=2:{text}", own)
        assert str(error.value) == f"--layout pp=2:{text}: write fields as name(field=value,...), not {text}"


def test_only_layouts_with_stages_keep_the_pipeline_and_only_the_reference_has_reference_kernels() -> None:
    values = {"mesh": {"tp": 8}, "parallel": ["fsdp"], "pipeline": {"name": "1f1b"}, "kernels": {"rope": "triton"}}
    flat = layout_values(values, Layout("x", {"dp_shard": 2}, ["hsdp"]), ["rope", "swiglu"])
    assert flat == {"mesh": {"dp_shard": 2}, "parallel": ["hsdp"], "pipeline": None, "kernels": {"rope": "triton"}}
    assert layout_values(values, Layout("x", {"pp": 2}, []), [])["pipeline"] == {"name": "1f1b"}
    reference = layout_values(values, REFERENCE_LAYOUT, ["rope", "swiglu"])
    assert (reference["mesh"], reference["kernels"].keys()) == ({}, {"rope", "swiglu"})
    assert set(reference["kernels"].values()) != {"triton"}


def test_records_of_ranks_are_joined_at_their_offsets() -> None:
    first = Record(
        {"0/loss": 1.0, "0/lr": math.nan}, {"0/model/a@0,0": torch.ones(1, 2), "0/model/c@": torch.tensor(3)}
    )
    second = Record({"0/loss": 1.0, "0/lr": math.nan}, {"0/model/a@1,0": torch.full((2, 2), 2.0)})
    merged = Measurement.of([first, second])
    assert merged.tensors["0/model/a"].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert merged.tensors["0/model/c"] == 3
    assert (merged.numbers["0/loss"], merged.disagreements, merged.steps) == (1.0, [], 1)


def test_parts_that_no_rank_has_are_not_numbers() -> None:
    parts = {
        "0/model/a@1": torch.ones(1),
        "0/model/a@3": torch.ones(1),
        "0/model/n@1": torch.ones(1, dtype=torch.int64),
    }
    merged = Measurement.of([Record({}, parts)])
    assert merged.tensors["0/model/a"].isnan().tolist() == [True, False, True, False]
    assert merged.tensors["0/model/n"].tolist() == [0, 1]


def test_disagreements_are_in_the_order_of_computation() -> None:
    names = ["end/x", "1/loss", "0/model/b", "0/optimizer/b/m", "0/lr", "0/gradients/b", "0/grad_norm", "0/loss"]
    first = Record(dict.fromkeys(names, 1.0), {"start/model/a@0": torch.ones(2)})
    second = Record(dict.fromkeys(names, 2.0), {"start/model/a@0": torch.ones(2, dtype=torch.float64)})
    merged = Measurement.of([first, second])
    assert merged.disagreements == [
        "start/model/a", "0/loss", "0/grad_norm", "0/gradients/b", "0/lr", "0/model/b", "0/optimizer/b/m", "1/loss",
        "end/x",
    ]  # fmt: skip
    assert merged.numbers["0/loss"] == 1.0  # the first rank's
    assert when("end/x") == (math.inf, 7)


def test_shards_of_different_sizes_disagree() -> None:
    first, second = (Record({}, {"0/model/a@0": torch.ones(size)}) for size in (2, 3))
    assert Measurement.of([first, second]).disagreements == ["0/model/a"]


def test_series_of_steps_and_tensors_below_a_name() -> None:
    measured = two_steps(at_1__loss=2.0)
    assert measured.series("loss") == [2.0, 4.0]
    assert measured.steps == 2
    assert Measurement({"end/loss": 1.0, "end/eval/loss": 1.0, "0/grad_norm": 1.0}).steps == 0
    assert measured.under("0/model").keys() == {"a", "b"}
    assert measured.under("0/mod") == {}


def test_a_guide_has_gradients_buffers_and_frozen_parameters() -> None:
    guide = two_steps().guide()
    assert guide.tensors.keys() == {
        "start/model/b", "0/gradients/a", "0/model/b", "1/gradients/a", "1/model/b",
    }  # fmt: skip
    assert guide.numbers == {}


def test_later_steps_are_added_and_replace_what_was_measured_at_the_end() -> None:
    first = Measurement({"0/loss": 1.0, "end/x": 1.0}, {"start/model/a": torch.zeros(1)}, ["0/loss"])
    later = Measurement(
        {"1/loss": 2.0, "end/y": 2.0}, {"start/model/a": torch.ones(1), "1/model/a": torch.ones(1)}, ["y"]
    )
    merged = first.with_steps_of(later)
    assert merged.numbers == {"0/loss": 1.0, "1/loss": 2.0, "end/y": 2.0}
    assert merged.tensors["start/model/a"] == 0
    assert "1/model/a" in merged.tensors
    assert merged.disagreements == ["0/loss", "y"]


def test_records_of_all_ranks_are_read_in_order(tmp_path: Path) -> None:
    for rank in range(2):
        Record({"0/loss": float(rank)}, {f"0/model/a@{rank}": torch.full((1,), float(rank))}).write(tmp_path, rank)
    merged = read_all(tmp_path, 2)
    assert merged.tensors["0/model/a"].tolist() == [0.0, 1.0]
    assert (merged.numbers, merged.disagreements) == ({"0/loss": 0.0}, ["0/loss"])


def test_full_tensors_fill_tensors_of_their_names_in_place() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(1)}
    fill(tensors, {"a": torch.arange(6.0).reshape(2, 3), "c": torch.ones(1)})
    assert (tensors["a"].tolist(), tensors["b"].tolist()) == ([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [0.0])


def test_a_record_is_a_copy_in_host_memory() -> None:
    record, tensor = Record(), torch.zeros(2)
    record.take("0/model", {"a": tensor})
    tensor.fill_(1.0)
    assert record.windows["0/model/a@0"].tolist() == [0.0, 0.0]


def test_a_rate_goes_on_from_a_step_of_the_schedule() -> None:
    assert [Rate(2.0, 10).on(float, 4)(step) for step in (3, 4)] == [26.0, 28.0 * LOUD]
    assert Rate().on(float, 4)(3) == 3.0


def test_jitter_moves_outputs_of_layers_by_at_most_half_of_the_last_bit() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity()))
    Jitter()._model_ready(cast("Any", SimpleNamespace(stage=model)))
    inputs = torch.ones(1000)
    moved = (model(inputs) - inputs) / torch.finfo(torch.float32).eps
    assert moved.any()
    assert moved.abs().max() <= 1.0  # two layers, half a bit each
    assert moved.min() < 0
    counts = torch.arange(3)
    assert model(counts) is counts


def test_jitter_moves_gradients_by_at_most_half_of_the_last_bit_and_equal_ones_alike() -> None:
    def moved(seed: int) -> dict[str, torch.Tensor]:
        stage = nn.ParameterDict({name: nn.Parameter(torch.zeros(1000)) for name in ("a", "b", "frozen")})
        for name in ("a", "b"):
            stage[name].grad = torch.ones(1000)
        jitter = Jitter(seed)
        jitter._model_ready(cast("Any", SimpleNamespace(stage=stage)))
        jitter._gradients_final(cast("Any", None))
        assert stage["frozen"].grad is None
        return {name: (cast("Any", stage[name].grad) - 1) / torch.finfo(torch.float32).eps for name in ("a", "b")}

    found = moved(1)
    assert found["a"].abs().max() <= 0.5
    assert found["a"].min() < 0
    assert not torch.equal(found["a"], found["b"])
    assert torch.equal(moved(1)["a"], found["a"])
    assert not torch.equal(moved(2)["a"], found["a"])


def test_a_schedule_backwards_has_the_last_microbatch_first() -> None:
    program = (Forward(0, 0), Forward(0, 2), Backward(0, 1), Reduce(0))
    asked: list[tuple[int, int]] = []

    def schedule(ranks: int, microbatches: int) -> list[Any]:
        asked.append((ranks, microbatches))
        return [program]

    assert _backwards(schedule)(1, 3) == [(Forward(0, 2), Forward(0, 0), Backward(0, 1), Reduce(0))]
    assert asked == [(1, 3)]


def test_the_cells_of_a_table_are_numbered_and_state_of_other_ranks_is_left_out() -> None:
    from d9d_core.metric import Table

    table = Table(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), row="a", column="b", unit="c")
    assert _numbers("x", table) == {"x[0]": 1.0, "x[1]": 2.0, "x[2]": 3.0, "x[3]": 4.0}
    assert _numbers("x", torch.tensor(5.0)) == {"x": 5.0}
    assert _here({"a": torch.zeros(1), "b": torch.zeros(1, device="meta")}).keys() == {"a"}


@pytest.mark.parametrize(
    ("cause", "failure", "output", "said"),
    [
        ("rank 1 was killed by SIGKILL", "late", "text", "rank 1 was killed by SIGKILL"),
        ("rank 0 ended", "the cause\nand what to do\n", "text", "the cause\nand what to do"),
        ("rank 0 ended", None, "some\nlast line\n\n", "last line"),
        ("rank 0 ended", None, " \n", "rank 0 ended"),
        (None, None, "text", None),
    ],
)
def test_the_cause_of_a_failed_layout_is_its_first_error_or_its_last_line_of_output(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cause: str | None,
    failure: str | None,
    output: str,
    said: str | None,
) -> None:
    seen: dict[str, Any] = {}

    def run_module(module: str, words: list[str], ranks: int, environ: dict[str, str], file: Any) -> Any:
        seen.update(module=module, words=words, ranks=ranks, environ=environ)
        file.write(output)
        if failure is not None:
            (tmp_path / "failure.txt").write_text(failure)
        return None if cause is None else SimpleNamespace(text=cause)

    monkeypatch.setattr("d9d_verify.run.run_module", run_module)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("OTHER", "kept")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch_processes(tmp_path, 2) == said
    assert (seen["module"], seen["words"], seen["ranks"]) == ("d9d_verify.worker", [str(tmp_path)], 2)
    assert "RANK" not in seen["environ"]
    assert (seen["environ"]["OTHER"], seen["environ"]["OMP_NUM_THREADS"]) == ("kept", "1")


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_failure_names_the_line_that_raised_it_or_called_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_torch: bool
) -> None:
    def fails(*_: object) -> None:
        torch.ones(2).view(3) if by_torch else {}["x"]

    monkeypatch.setattr(worker.Job, "load", fails)
    with pytest.raises((KeyError, RuntimeError)):
        worker.main(tmp_path)
    text = (tmp_path / "failure.txt").read_text()
    line = fails.__code__.co_firstlineno + 1
    assert text.startswith("RuntimeError: shape" if by_torch else "KeyError: 'x'")
    assert text.endswith(f" ({__file__}:{line}, in fails)")


def test_a_failure_of_torch_alone_names_its_last_line(tmp_path: Path) -> None:
    code = "def a():\n    b()\ndef b():\n    c()\ndef c():\n    raise ValueError\na()"
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - it has no text
        exec(compile(code, str(tmp_path / "torch" / "x.py"), "exec"), {})
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this test
    assert worker._place(error) == f"{tmp_path / 'torch' / 'x.py'}:6, in c"


@pytest.mark.parametrize(
    ("precision", "parallel", "dtype"),
    [
        ({"autocast": "bfloat16"}, [], torch.bfloat16),
        ({"autocast": None}, [{"name": "fsdp", "reduce": "bfloat16"}], torch.bfloat16),
        ({"autocast": None}, [{"name": "fsdp"}], torch.float32),
    ],
)
def test_bfloat16_anywhere_is_the_narrowest_dtype(precision: Any, parallel: Any, dtype: torch.dtype) -> None:
    assert narrowest_dtype({"precision": precision, "parallel": parallel}) == dtype


def test_a_measured_job_writes_below_its_directory_and_reads_the_users_cache(tmp_path: Path) -> None:
    (tmp_path / "user" / ".cache").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    values = {"run": {"dir": str(tmp_path / "user"), "name": "x"}, "checkpoint": {"every": 2}, "steps": 3}
    found = _job(values, tmp_path / "mine")
    assert found == {
        "run": {"dir": str(tmp_path / "mine" / "runs"), "name": "x"},
        "checkpoint": {"every": 2, "dir": str(tmp_path / "mine" / "checkpoints")},
        "steps": 3,
    }
    assert (tmp_path / "mine" / "runs" / ".cache").resolve() == tmp_path / "user" / ".cache"
    (tmp_path / "other").mkdir()
    _job(values | {"run": {"dir": str(tmp_path / "none")}}, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_the_settings_of_a_measurement_are_told(tmp_path: Path) -> None:
    settings = {"rate": {"factor": 2.5, "first": 9}, "max_norm": None}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    assert _settings(tmp_path, 1) == (
        "the job does not clip; learning rate x 2.5 from step 10 of the schedule, so that updates show"
    )
    (tmp_path / "settings.json").write_text(json.dumps(settings | {"max_norm": 0.5}))
    assert _settings(tmp_path, 2) == (
        "gradients clipped to a norm of 0.5; learning rate x 2.5 from step 10 of the schedule, so that updates show, "
        "one save and one resume across layouts"
    )


def test_the_command_checks_four_steps_of_the_jobs_own_layout_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called: list[tuple[Any, ...]] = []
    passed = [True, False, True]

    def verified(*given: Any) -> bool:
        called.append(given)
        return passed[len(called) - 1]

    monkeypatch.setattr("d9d_verify.command.load_job", lambda *given: given)
    monkeypatch.setattr("d9d_verify.command.verify_job", verified)
    path = tmp_path / "job.yaml"
    path.write_text("")
    runner, text = CliRunner(), str(path)
    assert runner.invoke(app, [text]).exit_code == 0
    assert runner.invoke(app, [text]).exit_code == 1
    options = ["--layout", "pp=2", "--steps", "1", "--max-ranks", "1", "--json", "--set", "seed=1", "--strict-plugins"]
    assert runner.invoke(app, [text, *options]).exit_code == 0
    assert runner.invoke(app, [text, "--steps", "0"]).exit_code == 2
    assert runner.invoke(app, [text, "--max-ranks", "0"]).exit_code == 2
    assert called == [
        ((Job, path, [], [], False, False), [], 4, 8, False),
        ((Job, path, [], [], False, False), [], 4, 8, False),
        ((Job, path, ["seed=1"], [], False, True), ["pp=2"], 1, 1, True),
    ]


def test_a_jobs_own_layout_is_verified_with_at_most_the_given_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def verify(own: Job, layouts: list[Layout], steps: int, _note: object) -> list[Verdict]:
        given.append((own, [dict(layout.mesh) for layout in layouts], steps))
        return []

    monkeypatch.setattr("d9d_verify.run.verify", verify)
    own = job({"pp": 4})
    assert verify_job(own, [], 3, 2, as_json=True)
    assert given == [(own, [{"pp": 2}], 3)]
    with pytest.raises(JobError, match="--max-ranks"):
        verify_job(own, [], 3, 1, as_json=True)


def saved(**changes: Any) -> Any:
    """Stand-in of a checkpoint: values, and tensors of a metric."""
    values = {"data": {"pack": 2}, "skipped": 0, "skips": {"total": 0}, "tokens": 5, **changes.get("values", {})}
    tensors = {"metrics/loss/sum": torch.tensor([3.0, 4.0]), "model/a": torch.ones(1), **changes.get("tensors", {})}

    def load_into(wanted: dict[str, torch.Tensor], _scope: str) -> None:
        for name, tensor in wanted.items():
            tensor.copy_(tensors[name])

    table = {name: {"shape": list(tensor.shape), "dtype": "float32"} for name, tensor in tensors.items()}
    return SimpleNamespace(step=2, values=lambda: values, manifest={"tensors": table}, load_into=load_into)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"values": {"data": {"pack": 3}}}, "the checkpoint of step 2 has data: {'pack': 3}, expected {'pack': 2}"),
        ({"values": {"skipped": 1}}, "the checkpoint of step 2 has skipped: 1, expected 0"),
        (
            {"values": {"skips": {"total": 1}}},
            "the checkpoint of step 2 has skips: {'total': 1}, expected {'total': 0}",
        ),
        ({"values": {"tokens": 7}}, None),  # verify counts no tokens of its own
        ({"tensors": {"metrics/loss/sum": torch.tensor([3.0, 4.0004])}}, None),
        (
            {"tensors": {"metrics/loss/sum": torch.tensor([3.0, 5.0])}},
            "metrics/loss/sum in the checkpoint of step 2 is off by 2.0e-01 (allowed 1e-04)",
        ),
        (
            {"tensors": {"metrics/new/sum": torch.ones(1)}},
            "the checkpoint of step 2 has the metrics ['metrics/loss/sum', 'metrics/new/sum'], expected "
            "['metrics/loss/sum']",
        ),
    ],
)
def test_a_saved_position_counter_or_metric_that_differs_is_named(changes: Any, said: str | None) -> None:
    limits = Limits(FLOORS[torch.float32], {})
    assert unlike_state(saved(**changes), saved(), limits) == said


def test_a_metric_that_is_off_by_its_limit_is_fine() -> None:
    changed = saved(tensors={"metrics/loss/sum": torch.tensor([3.0, 5.25])})
    for floor, fine in ((0.25, True), (0.2499, False)):
        assert (unlike_state(changed, saved(), Limits({"series": floor}, {})) is None) is fine


def test_a_layout_that_saves_nothing_is_wrong() -> None:
    assert unlike_state(None, saved(), Limits(FLOORS[torch.float32], {})) == "no checkpoint was saved"
    assert unlike_state(saved(), None, Limits(FLOORS[torch.float32], {})) == "no checkpoint was saved"
    assert unlike_saved(None, two_steps(), two_steps()) == "no checkpoint was saved"


@pytest.mark.parametrize(
    ("name", "of_layout", "said"),
    [
        ("model/a", 2.0, None),  # a parameter has the layout's value
        ("model/a", 1.0, "model/a in the checkpoint of step 2 differs from the trained value"),
        ("model/b", 1.0, None),  # a buffer was replaced by the reference's
        ("model/b", 2.0, "model/b in the checkpoint of step 2 differs from the trained value"),
        ("optimizer/a/momentum", 2.0, None),
        (
            "optimizer/a/momentum",
            1.0,
            "optimizer/a/momentum in the checkpoint of step 2 differs from the trained value",
        ),
    ],
)
def test_saved_weights_and_states_are_those_of_the_layouts_step(name: str, of_layout: float, said: str | None) -> None:
    def run_of(value: float) -> Measurement:
        names = ("0/model/a", "0/model/b", "1/model/a", "1/model/b", "1/optimizer/a/momentum", "1/gradients/a")
        return Measurement({}, {of: torch.full((2,), value if of.startswith("1/") else 7.0) for of in names})

    def load_into(wanted: dict[str, torch.Tensor], scope: str) -> None:
        assert all(of.startswith(scope) for of in wanted)
        for tensor in wanted.values():
            tensor.fill_(of_layout)

    manifest = {"tensors": {of: {"shape": [2], "dtype": "float32"} for of in (name, "metrics/x")}}
    checkpoint: Any = SimpleNamespace(step=2, manifest=manifest, load_into=load_into)
    assert unlike_saved(checkpoint, run_of(2.0), run_of(1.0)) == said


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_layout_that_passes_and_saves_another_state_fails_at_the_step_of_the_save(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """A single step saves nothing."""
    monkeypatch.setattr(run, "scaled_values", lambda *_: {"batch": {"size": 4}, "precision": {}, "parallel": []})
    monkeypatch.setattr(run, "ops_of", lambda *_: ["rope"])
    monkeypatch.setattr(run, "scaled_model", lambda *_: torch.nn.Identity())
    monkeypatch.setattr(run, "_check", lambda *_: None)
    monkeypatch.setattr(run, "_reference", lambda *_, **_named: (two_steps(), []))
    monkeypatch.setattr(run, "_run", lambda *_: two_steps())
    monkeypatch.setattr(run, "_settings", lambda *_: "settings")
    monkeypatch.setattr(run, "_checkpoint", lambda directory: (directory.parent.name, directory.name))
    own, reference = ("0", "checkpoints"), ("reference", "checkpoints")
    monkeypatch.setattr(run, "unlike_saved", lambda mine, *_: None if mine == own else "not the layout's")
    monkeypatch.setattr(
        run, "unlike_state", lambda *given: "another position" if given[:2] == (own, reference) else None
    )
    (verdict,) = run.verify(cast("Job", None), [Layout("x", {"dp_shard": 2}, [])], steps, lambda _text: None)
    assert verdict.diverged == (None if steps == 1 else (steps // 2 - 1, "another position"))


@pytest.mark.parametrize(
    ("own", "layout", "routes", "expected"),
    [
        ("float32", "float32", True, 2),
        ("bfloat16", "bfloat16", False, 2),
        ("bfloat16", "bfloat16", True, 4),
        ("float32", "bfloat16", False, 3),
        ("float32", "bfloat16", True, 5),
    ],
)
def test_there_are_more_correct_runs_where_rounding_moves_tokens_between_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, layout: str, routes: bool, expected: int
) -> None:
    def values_of(values: Any, chosen: Layout, _ops: Any) -> dict[str, Any]:
        dtype = own if chosen is REFERENCE_LAYOUT else layout
        return {**values, "precision": {"parameters": own}, "parallel": [{"name": "fsdp", "compute_dtype": dtype}]}

    counts = []
    monkeypatch.setattr(run, "layout_values", values_of)
    monkeypatch.setattr(run, "read_all", lambda *_: two_steps())
    monkeypatch.setattr(run, "_run", lambda *_, sound: counts.append(sound) or two_steps())
    values = {"run": {"dir": str(tmp_path)}, "checkpoint": {}, "kernels": {"rope": "x"}}
    layouts = [Layout("x", {"dp_shard": 2}, ["fsdp"])]
    _, sound = run._reference(values, [], layouts, 2, tmp_path / "r", lambda *_: None, routes=routes)
    assert (len(sound), counts) == (expected, [expected])
    variants = [json.loads((tmp_path / "r" / f"sound-{index}.json").read_text()) for index in range(expected)]
    if layout != own:  # further variants compute in the narrow dtype, too
        assert {variant["precision"].get("autocast") for variant in variants[2:]} == {"bfloat16"}
