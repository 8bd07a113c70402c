"""A small model learns from a larger one in the same job, alike in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_engine.job import Job
from d9d_testing.layouts import Harness, assert_passed
from d9d_verify.layouts import Layout

PLUGINS = (
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_pipeline.plugin",
    "d9d_qwen3.plugin",
)  # fmt: skip
EXAMPLE = Path(__file__).parents[1] / "examples" / "distillation" / "job.yaml"
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_positions": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model with random weights, wider than the student."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=257, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.3,
        tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def values(teacher: Path, tmp_path: Path, **task: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(tmp_path / "runs"), "name": "student"}, "steps": 3, "device": "cpu",
        "batch": {"size": 4, "microbatch": 4}, "model": {"name": "qwen3", "vocab_size": 257, **SIZES},
        "task": {"name": "distillation", "teacher": {"name": "qwen3", "pretrained": str(teacher)}, **task},
        "data": {"name": "text", "sources": ["python:topics"], "tokenizer": "bytes", "sequence_length": 16},
        "optimizer": {"name": "adamw", "lr": 0.01}, "gradient_clipping": {"max_norm": None}, "export": False,
        "trackers": [{"name": "jsonl", "picture": False}], "logging": {"every": 1},
    }  # fmt: skip


@pytest.mark.full
def test_the_first_loss_is_the_divergence_of_the_two_models(teacher: Path, tmp_path: Path) -> None:
    """Against transformers, on the batch that the job takes."""
    transformers = pytest.importorskip("transformers")
    trainer = Job.from_values(values(teacher, tmp_path, temperature=2.0)).build(lambda _: None)
    pack = trainer.prefetcher.next()
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(teacher)(pack[0]["tokens"]).logits
        # Documents hide nothing here: the comparison counts the first document of each sample.
        first = (pack[0]["documents"] == 0) & (pack[0]["targets"] != -100)
        ours = trainer.stage(**{name: pack[0][name] for name in ("tokens", "positions", "documents")})["logits"]
    p, q = (torch.log_softmax(logits[first].double() / 2, -1) for logits in (theirs, ours))
    expected = 4 * (p.exp() * (p - q)).sum(-1)
    (complete,) = trainer.step.first_pass(pack, 0)
    counted = {**complete, "targets": pack[0]["targets"].masked_fill(~first, -100)}
    found = trainer.step.task.losses({"logits": ours}, counted)["divergence"]
    torch.testing.assert_close(found.double(), expected.sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("task", [{}, {"top_k": 8, "hard_weight": 0.5}], ids=["all words", "eight words"])
def test_a_student_comes_closer_to_its_teacher(teacher: Path, tmp_path: Path, task: dict[str, Any]) -> None:
    job = Job.from_values(values(teacher, tmp_path, **task) | {"steps": 30})
    notes: list[str] = []
    job.build(notes.append).train()
    assert any(note.startswith("task.teacher: a frozen model of") for note in notes)
    lines = [json.loads(line) for line in (tmp_path / "runs/student/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]


@pytest.mark.thorough
def test_the_example_distils_into_a_published_model(teacher: Path, tmp_path: Path, published: Any) -> None:
    """Both have one tokenizer, and matrices of different sizes."""
    student = published(tmp_path / "student")
    larger = published(tmp_path / "teacher", hidden_size=80, padded_vocabulary=264)
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "number {n} " }}\n' for n in range(200)))
    overrides = [
        f"model.pretrained={student}", f"task.teacher.pretrained={larger}", f"data.sources=[{tmp_path}/texts.jsonl]",
        f"run.dir={tmp_path}/runs", "device=cpu", "data.sequence_length=16", "batch={size: 4, microbatch: 2}",
        "steps=8", "optimizer.lr=0.003", "logging.every=1", "trackers=[{name: jsonl, picture: false}]",
    ]  # fmt: skip
    Job.load(EXAMPLE, overrides=overrides).build(lambda _: None).train()
    lines = [json.loads(line) for line in (tmp_path / "runs/distillation/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (tmp_path / "runs/distillation/model/model.safetensors").is_file()


@pytest.mark.full
def test_a_student_learns_alike_in_every_layout(teacher: Path, tmp_path: Path) -> None:
    layouts = [
        Layout("replicate 2", {"dp_replicate": 2}, ["replicate"], ("batch.microbatch=1",)),
        Layout("fsdp 2", {"dp_shard": 2}, ["fsdp", "activation_checkpointing"], ("batch.microbatch=2",)),
        Layout("pp 2", {"pp": 2}, [], ("pipeline.name=1f1b", "batch.microbatch=1")),
        Layout(
            "pp 2, first and last stage on one rank",
            {"pp": 2},
            [],
            ("pipeline.name=zero_bubble_v", "batch.microbatch=1"),
        ),
        Layout("tp 2", {"tp": 2}, ["tensor_parallel"], ("batch.microbatch=2",)),
        Layout("cp 2", {"cp": 2}, [{"name": "context_parallel", "method": "ring"}, "fsdp"], ("batch.microbatch=2",)),
    ]
    for task, some in (
        ({}, [*layouts[1:3], layouts[4]]),
        ({"top_k": 5, "hard_weight": 1.0}, [*layouts[::3], layouts[5]]),
    ):
        job = values(teacher, tmp_path, **task)
        job["model"] |= {"num_layers": 4}
        job |= {"trackers": [], "evaluation": {"every": 3, "packs": 1, "data": job["data"]}}
        assert_passed(Harness(job, PLUGINS, 3).compare(some))


def test_a_plan_counts_the_memory_of_the_teacher(teacher: Path, tmp_path: Path) -> None:
    plan = Job.from_values(values(teacher, tmp_path)).plan()
    assert plan.memory.frozen == 4 * sum(tensor.numel() for tensor in _tensors(teacher))
    assert plan.memory.total > plan.memory.frozen


def _tensors(directory: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(directory / "model.safetensors").values())


def test_a_teacher_of_another_vocabulary_is_refused(teacher: Path, tmp_path: Path) -> None:
    job = values(teacher, tmp_path)
    job["model"] |= {"vocab_size": 300}
    with pytest.raises(JobError, match=r"task\.teacher: the teacher has 257 token ids, the model 300"):
        Job.from_values(job).build(lambda _: None)


def test_a_teacher_without_weights_is_refused(tmp_path: Path) -> None:
    job = values(tmp_path, tmp_path)
    job["task"]["teacher"] = {"name": "qwen3", "vocab_size": 257, **SIZES}
    with pytest.raises(JobError, match=r"task\.teacher: the teacher has no trained weights to learn from"):
        Job.from_values(job).plan()
