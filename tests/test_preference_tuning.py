"""A model learns to prefer, from a job file, against each kind of reference model, alike in every layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_engine.job import Job
from d9d_testing.layouts import Harness, assert_passed
from d9d_testing.logs import read_log
from d9d_verify.layouts import Layout

EXAMPLE = Path(__file__).parents[1] / "examples" / "preference" / "dpo.yaml"
PLUGINS = (
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_peft.plugin",
    "d9d_pipeline.plugin", "d9d_qwen3.plugin",
)  # fmt: skip
LORA = {"name": "lora", "r": 4}
COMPILE = {"name": "compile", "backend": "aot_eager"}
LAYOUTS = (
    Layout("fsdp 2, compiled", {"dp_shard": 2}, ["fsdp", COMPILE], ("batch.microbatch=1",)),
    Layout("replicate 2", {"dp_replicate": 2}, ["replicate"], ("batch.microbatch=2",)),
    Layout("pp 2", {"pp": 2}, [], ("pipeline.name=zb1p", "batch.microbatch=1")),
    Layout("tp 2", {"tp": 2}, ["tensor_parallel"], ("batch.microbatch=2",)),
    Layout("cp 2", {"cp": 2}, ["context_parallel"], ("batch.microbatch=2",)),
)  # fmt: skip

CONTEXT = Layout("cp 2 x fsdp 2", {"cp": 2, "dp_shard": 2}, ["context_parallel", "fsdp"], ("batch.microbatch=2",))


@pytest.fixture(scope="module")
def base(published: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("base"))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    records = [
        {
            "prompt": [{"role": "user", "content": f"Who is {n}?"}],
            "chosen": [{"role": "assistant", "content": "I am Dee."}],
            "rejected": [{"role": "assistant", "content": "Why?" + "!" * (n % 3)}],
        }
        for n in range(10)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def values(base: Path, pairs: Path, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(pairs.parent / "runs"), "name": "dpo"}, "steps": 3, "device": "cpu",
        "batch": {"size": 4, "microbatch": 4}, "model": {"name": "qwen3", "pretrained": str(base)}, "task": "dpo",
        "data": {"name": "preference", "sources": [str(pairs)], "sequence_length": 64}, "metrics": ["preference"],
        "optimizer": {"name": "adamw", "lr": 0.01}, "gradient_clipping": {"max_norm": None}, "export": False,
        "trackers": [{"name": "jsonl", "picture": False}], "logging": {"every": 1}, **sections,
    }  # fmt: skip


def test_the_example_is_a_job_file_of_fifteen_lines() -> None:
    lines = [line for line in EXAMPLE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 15


@pytest.mark.thorough
def test_the_model_learns_to_prefer_the_chosen_answers(base: Path, pairs: Path, tmp_path: Path) -> None:
    overrides = [
        f"model.pretrained={base}", f"data.sources=[{pairs}]", f"run.dir={tmp_path}/runs", "device=cpu",
        "data.sequence_length=64", "steps=12", "batch={size: 4, microbatch: 2}", "optimizer.lr=0.01", "logging.every=1",
        "trackers=[{name: jsonl, picture: false}]",
    ]  # fmt: skip
    Job.load(EXAMPLE, overrides=overrides).build(lambda _: None).train()
    lines = [line for line in read_log(tmp_path / "runs" / "dpo") if "loss" in line]
    assert lines[0]["loss"] == pytest.approx(0.6931, abs=1e-4)  # model and reference are the same
    assert lines[0]["preference/margin"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["loss"] < 0.5
    assert lines[-1]["preference/accuracy"] == 1
    assert lines[-1]["preference/margin"] > 0.3


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "peft", "layouts"),
    [
        ({}, LORA, LAYOUTS),
        ({"reference": "stored", "loss": "ipo"}, LORA, LAYOUTS[1:]),
        ({"reference": "copy"}, None, [*LAYOUTS[:3:2], CONTEXT]),
    ],
    ids=["without adapter", "stored", "copy"],
)
def test_preferences_are_learned_alike_in_every_layout(
    base: Path, pairs: Path, task: Mapping[str, Any], peft: Mapping[str, Any] | None, layouts: Sequence[Layout]
) -> None:
    job = values(base, pairs, task={"name": "dpo", **task}, peft=peft, trackers=[])
    job["evaluation"] = {"every": 3, "packs": 2, "data": job["data"]}
    assert_passed(Harness(job, PLUGINS, 3).compare(layouts))


@pytest.mark.full
@pytest.mark.parametrize(("task", "peft"), [({}, LORA), ({"loss": "ipo", "beta": 0.3}, LORA | {"dropout": 0.1})])
def test_every_reference_of_a_fresh_adapter_is_the_same_model(
    base: Path, pairs: Path, tmp_path: Path, task: Mapping[str, Any], peft: Mapping[str, Any]
) -> None:
    found = []
    for reference in ("without_adapter", "copy", "stored"):
        job = values(base, pairs, task={"name": "dpo", "reference": reference, **task}, peft=peft)
        job["run"] = {"dir": str(tmp_path), "name": reference}
        Job.from_values(job).build(lambda _: None).train()
        found.append([line["loss"] for line in read_log(tmp_path / reference) if "loss" in line])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] == pytest.approx(found[2], rel=1e-5)


@pytest.mark.full
def test_stored_results_are_used_again_by_a_run_that_goes_on(base: Path, pairs: Path) -> None:
    straight = values(base, pairs, task={"name": "dpo", "reference": "stored"}, peft=LORA)
    straight["run"] = straight["run"] | {"name": "straight"}
    Job.from_values(straight).build(lambda _: None).train()
    job = values(base, pairs, task={"name": "dpo", "reference": "stored"}, peft=LORA)
    notes: list[str] = []
    Job.from_values(job | {"steps": 2}).build(notes.append).train()
    assert any("the first pass over all samples is stored in" in note for note in notes)
    (file,) = (pairs.parent / "runs/dpo").glob("first-pass-*.safetensors")
    written = file.stat().st_mtime_ns
    Job.from_values(job).build(notes.append).train()
    assert any("the first pass over all samples was already stored" in note for note in notes)
    assert file.stat().st_mtime_ns == written
    curves = [[line["loss"] for line in read_log(pairs.parent / "runs" / run)] for run in ("straight", "dpo")]
    assert curves[0] == curves[1]
    file.write_bytes(b"damaged")
    Job.from_values(job).build(notes.append)
    assert file.stat().st_size > 100


def test_a_reference_without_adapter_needs_one(base: Path, pairs: Path) -> None:
    for peft, why in ((None, "has no 'peft'"), ({"name": "full_tune", "match": "norm"}, "trains the model's own")):
        job = values(base, pairs, task={"name": "dpo", "reference": "without_adapter"}, peft=peft)
        with pytest.raises(JobError, match=rf"task\.reference: 'without_adapter' .* {why}"):
            Job.from_values(job).plan()


def test_results_of_samples_without_numbers_cannot_be_stored(base: Path, pairs: Path) -> None:
    data = {"name": "documents", "sources": ["python:topics"], "sequence_length": 32}
    job = values(base, pairs, task={"name": "dpo", "reference": "stored"}, data=data)
    with pytest.raises(JobError, match=r"which dataset .documents. .* does not give; .preference. does"):
        Job.from_values(job).build(lambda _: None)
