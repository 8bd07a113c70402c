"""The same loop on one accelerator: no waiting in the step, flags that arrive later, resume onto the device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from d9d_core.errors import NonFiniteError
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer
from d9d_nn.attention.core import AttentionCore

Write = Callable[..., Path]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch's own: a prototype debug mode, deprecations inside Inductor
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def no_host_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def build(write: Write, name: str = "small", **sections: Any) -> Trainer:
    return Job.load(write(name, **({"device": "cuda", "export": False} | sections))).build(lambda _: None)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"precision": {"parameters": "bfloat16"}},
        {"precision": {"autocast": "bfloat16"}},
        {"parallel": ["activation_checkpointing"]},
        {"parallel": ["compile"], "precision": {"parameters": "bfloat16"}},
        {"kernels": {"attention": "reference", "rms_norm": "reference"}},
    ],
    ids=["float32", "bfloat16", "autocast", "checkpointing", "compile", "references"],
)
def test_a_step_never_waits_for_the_gpu(small_job: Write, sections: dict[str, Any]) -> None:
    trainer = build(small_job, **sections)
    for step in range(2):  # lazy initialisation may wait
        trainer.step(step, trainer.prefetcher.next())
    with no_host_synchronisation():
        for step in range(2, 5):
            trainer.step(step, trainer.prefetcher.next())
            trainer.step.statistics.compute()


@pytest.mark.parametrize(
    ("parallel", "capacity"),
    [([], None), (["compile"], None), (["activation_checkpointing"], 1.5)],
    ids=["plain", "compile", "checkpointing and capacity"],
)
def test_a_step_of_experts_never_waits_for_the_gpu(
    small_job: Write, table: ModuleType, parallel: list[Any], capacity: float | None
) -> None:
    """With every way of balancing, and statistics of the routers. In float32 the experts of torch 2.11 would wait."""
    model = {**table.EXPERTS, "max_positions": 64, "capacity": capacity}
    trainer = build(
        small_job,
        model=model,
        parallel=parallel,
        precision={"parameters": "bfloat16"},
        metrics=["router"],
    )
    for step in range(2):  # lazy initialisation may wait
        trainer.step(step, trainer.prefetcher.next())
    with no_host_synchronisation():
        for step in range(2, 5):
            trainer.step(step, trainer.prefetcher.next())
            trainer.step.statistics.compute()


def test_the_gpu_computes_what_the_cpu_computes(small_job: Write) -> None:
    cpu = build(small_job, "cpu", device="cpu")
    gpu = build(small_job, "gpu")
    stages = [trainer.stage for trainer in (cpu, gpu)]
    stages[1].load_state_dict(stages[0].state_dict())
    for step in range(3):
        a, b = (trainer.step(step, trainer.prefetcher.next()) for trainer in (cpu, gpu))
        torch.testing.assert_close(a.loss, b.loss.cpu(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.grad_norm, b.grad_norm.cpu(), rtol=1e-3, atol=1e-3)


#: Heads that flex computes.
WIDE_HEADS = {
    "name": "qwen3", "vocab_size": 257, "hidden_size": 64, "intermediate_size": 64, "num_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 64,
}  # fmt: skip


@pytest.mark.parametrize("windows", [None, 8], ids=["all", "windows"])
@pytest.mark.parametrize(
    "parallel",
    [
        [],
        ["compile"],
        ["activation_checkpointing"],
        ["activation_checkpointing", "compile"],
        [{"name": "activation_checkpointing", "save": ["aten.mm"]}],
        [{"name": "activation_checkpointing", "save": ["aten.mm"]}, "compile"],
    ],
    ids=str,
)
def test_packed_documents_with_flex_are_those_of_the_cpu(
    small_job: Write, parallel: list[Any], windows: int | None
) -> None:
    """Steps do not wait, either."""
    model = {**WIDE_HEADS, "sliding_window": windows, "sliding_from_layer": 1 if windows else None}
    model = {name: value for name, value in model.items() if value is not None}
    cpu = build(small_job, "cpu", device="cpu", model=model)
    gpu = build(small_job, "gpu", model=model, parallel=parallel)
    assert {module.attention.backend for module in gpu.stage.modules() if isinstance(module, AttentionCore)} == {"flex"}
    gpu.stage.load_state_dict(cpu.stage.state_dict())
    for step in range(5):
        a = cpu.step(step, cpu.prefetcher.next())
        with no_host_synchronisation() if step > 1 else nullcontext():
            b = gpu.step(step, gpu.prefetcher.next())
        torch.testing.assert_close(a.loss, b.loss.cpu(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(a.grad_norm, b.grad_norm.cpu(), rtol=1e-2, atol=1e-2)


def test_a_run_on_the_gpu_logs_every_step_in_order_and_learns(small_job: Write, tmp_path: Path) -> None:
    build(small_job, steps=40, logging={"every": 1}, evaluation=None).train()
    lines = [json.loads(line) for line in (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1


def poison(trainer: Trainer, at: int) -> None:
    """Make the loss of one step NaN."""
    run, count = trainer.step.executor.run, iter(range(10_000))

    def poisoned(step: int, pack: Any, scale: Any, share: Any) -> Any:
        bad = next(count) == at
        return run(step, pack, {term: value * torch.nan for term, value in scale.items()} if bad else scale, share)

    trainer.step.executor.run = poisoned  # type: ignore[method-assign]


def test_a_nonfinite_step_is_met_when_its_flag_arrives_and_never_saved(small_job: Write, tmp_path: Path) -> None:
    trainer = build(small_job, steps=20, checkpoint={"every": 4})
    poison(trainer, at=6)
    with pytest.raises(NonFiniteError, match="step 7: loss is nan"):
        trainer.train()
    assert sorted(path.name for path in (tmp_path / "runs/small/checkpoints").glob("step-*")) == ["step-00000004"]


def test_a_skipped_step_changes_nothing_on_the_gpu(small_job: Write) -> None:
    trainer = build(small_job, nonfinite="skip")
    poison(trainer, at=3)
    for step in range(3):
        trainer.step(step, trainer.prefetcher.next())
    before = {name: tensor.clone() for name, tensor in trainer.checkpointer.tensors().items() if "metrics" not in name}
    trainer.step(3, trainer.prefetcher.next())
    after = trainer.checkpointer.tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_resumed_run_continues_with_the_saved_tensors(small_job: Write) -> None:
    first = build(small_job, steps=4)
    first.train()
    second = build(small_job, steps=4)
    second.train()
    a, b = first.checkpointer.tensors(), second.checkpointer.tensors()
    assert all(torch.equal(a[name], b[name]) for name in a if "metrics" not in name)
    assert all(tensor.is_cuda for name, tensor in b.items() if name.startswith("model/"))


def _records(directory: Path, name: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    file = directory / f"{name}.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"name": name, "sources": [str(file)], "sequence_length": 64}


@pytest.mark.parametrize("kind", ["without_adapter", "copy", "stored", "teacher", "top_k", "embedding"])
@pytest.mark.parametrize("parallel", [[], ["compile"]], ids=["eager", "compile"])
def test_first_passes_never_wait_for_the_gpu(
    small_job: Write, published: Callable[..., Path], tmp_path: Path, kind: str, parallel: list[str]
) -> None:
    base = published(tmp_path / "base")
    numbers = range(16)
    model: dict[str, Any] = {"name": "qwen3", "pretrained": str(base)}
    peft: dict[str, Any] | None = {"name": "lora", "r": 4, "dropout": 0.1}
    metrics = []
    if kind == "embedding":
        model |= {"tie_embeddings": False, "heads": {"vector": {"kind": "embedding"}}}
        task: Any = "embedding"
        data = _records(tmp_path, "pairs", [{"query": f"{n}?", "positive": f"{n}!"} for n in numbers])
    elif kind in ("teacher", "top_k"):
        teacher = {"name": "qwen3", "pretrained": str(published(tmp_path / "teacher", hidden_size=128))}
        task = {"name": "distillation", "teacher": teacher, "hard_weight": 0.5, "top_k": 8 if kind == "top_k" else None}
        data = {"name": "text", "sources": ["python:topics"], "sequence_length": 64}
    else:
        peft = peft if kind != "copy" else None
        task, metrics = {"name": "dpo", "reference": kind}, ["preference"]
        sides = {"prompt": "Who?", "rejected": " no one"}
        data = _records(tmp_path, "preference", [{**sides, "chosen": f" {n}"} for n in numbers])
    trainer = build(
        small_job, model=model, task=task, data=data, peft=peft, metrics=metrics, parallel=parallel,
        precision={"parameters": "bfloat16"},
    )  # fmt: skip
    for step in range(2):
        trainer.step(step, trainer.prefetcher.next())
    with no_host_synchronisation():
        for step in range(2, 5):
            result = trainer.step(step, trainer.prefetcher.next())
            trainer.step.statistics.compute()
    assert result.loss.isfinite()
