"""A model learns to find the texts that answer queries, alike in every layout and split into microbatches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_engine.job import Job
from d9d_engine.step.randomness import seed_generators
from d9d_testing.layouts import Harness, assert_passed
from d9d_testing.logs import read_log
from d9d_verify.layouts import Layout
from torch.nn import functional

EXAMPLE = Path(__file__).parents[1] / "examples" / "embeddings" / "job.yaml"
PLUGINS = (
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_peft.plugin",
    "d9d_pipeline.plugin", "d9d_qwen3.plugin",
)  # fmt: skip
WORDS = ("apple", "brick", "cloud", "dune", "ember", "frost", "glade", "heron")


@pytest.fixture(scope="module")
def base(published: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("base"))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    records = [{"query": f"{word}?", "positive": f"all of {word}", "negatives": [f"none of {word}"]} for word in WORDS]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def overrides(base: Path, questions: Path) -> list[str]:
    return [
        f"model.pretrained={base}", f"data.sources=[{questions}]", f"run.dir={questions.parent}/runs", "device=cpu",
        "data.sequence_length=32", "steps=12", "optimizer.lr=0.003", "logging.every=1", "export=false",
        "trackers=[{name: jsonl, picture: false}]",
    ]  # fmt: skip


@pytest.mark.thorough
def test_a_model_learns_to_find_what_answers_a_query(base: Path, questions: Path) -> None:
    given = [*overrides(base, questions), "batch={size: 8, microbatch: 4}"]
    Job.load(EXAMPLE, overrides=given).build(lambda _: None).train()
    losses = [line["loss"] for line in read_log(questions.parent / "runs" / "embeddings")]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.full
def test_the_gradient_is_that_of_one_batch_however_it_is_split(base: Path, questions: Path) -> None:
    """Against one backward through all similarities, with negatives of its own and dropout."""
    job = Job.load(
        EXAMPLE,
        overrides=[
            *overrides(base, questions), "batch={size: 8, microbatch: 2}", "data.negatives=1", "task.symmetric=true",
            "peft={name: lora, r: 4, dropout: 0.2}", "gradient_clipping.max_norm=null",
        ],
    )  # fmt: skip
    trainer = job.build(lambda _: None)
    stage = trainer.stage
    with torch.no_grad():  # the second factors start at zero, where dropout has no effect
        for name, parameter in stage.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    kept: list[torch.Tensor] = []
    hook = stage.register_forward_hook(lambda _m, _a, outputs: kept.append(outputs["embedding"]))
    trainer.step.optimizer.step = lambda _gate: None  # type: ignore[method-assign]
    trainer.step.gradients.reset = lambda: None  # type: ignore[method-assign]
    pack = trainer.prefetcher.next()
    result = trainer.step(0, pack)
    hook.remove()
    count = len(pack)
    for first, second in zip(kept[:count], kept[count:], strict=True):
        assert torch.equal(first, second)  # the same units were dropped in both passes
    found = {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}
    again = torch.cat([kept[count + n] for n in range(count)]).detach()
    samples = again.view(8, 3, -1).requires_grad_()
    texts = samples[:, 1:].flatten(0, 1)
    forth = functional.cross_entropy(samples[:, 0] @ texts.T / 0.05, torch.arange(8) * 2)
    back = functional.cross_entropy(samples[:, 1] @ samples[:, 0].T / 0.05, torch.arange(8))
    expected = (forth + back) / 2
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-5, atol=1e-6)
    (at_embeddings,) = torch.autograd.grad(expected, samples)
    assert found
    stage.zero_grad()
    # The same forwards once more, now with the gradient of the whole batch.
    for number, microbatch in enumerate(pack):
        seed_generators(torch.device("cpu"), trainer.step.executor._draws(0, number, 0))
        inputs = trainer.step.task.inputs(microbatch)
        embedding = stage(**inputs.first, **inputs.shared)["embedding"]
        embedding.backward(at_embeddings.view(count, -1, embedding.shape[-1])[number])
    for name, parameter in stage.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_embeddings_are_learned_alike_in_every_layout(base: Path, questions: Path) -> None:
    values: dict[str, Any] = {
        "run": {"dir": str(questions.parent / "runs")}, "steps": 3, "device": "cpu",
        "batch": {"size": 8, "microbatch": 8}, "task": {"name": "embedding", "temperature": 0.1, "symmetric": True},
        "model": {
            "name": "qwen3", "pretrained": str(base), "tie_embeddings": False,
            "heads": {"vector": {"kind": "embedding"}},
        },
        "data": {"name": "pairs", "sources": [str(questions)], "sequence_length": 32, "negatives": 1},
        "optimizer": {"name": "adamw", "lr": 0.003}, "peft": {"name": "lora", "r": 4},
        "gradient_clipping": {"max_norm": None}, "trackers": [], "export": False,
    }  # fmt: skip
    values["evaluation"] = {"every": 3, "packs": 1, "data": values["data"]}
    layouts = [
        Layout("one process, microbatches of 2", {}, [], ("batch.microbatch=2",)),
        Layout("replicate 2", {"dp_replicate": 2}, ["replicate"], ("batch.microbatch=2",)),
        Layout("fsdp 2", {"dp_shard": 2}, ["fsdp"], ("batch.microbatch=4",)),
        Layout("pp 2", {"pp": 2}, [], ("pipeline.name=1f1b", "batch.microbatch=2")),
        Layout("tp 2", {"tp": 2}, ["tensor_parallel"], ("batch.microbatch=4",)),
        Layout("cp 2", {"cp": 2}, ["context_parallel"], ("batch.microbatch=4",)),
    ]
    assert_passed(Harness(values, PLUGINS, 3).compare(layouts))
