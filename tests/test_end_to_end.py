"""From a job file to a model that transformers loads, with first-party plugins only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_engine.job import Job
from safetensors.torch import load_file

D9d = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]


def final(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(max((directory / "checkpoints").iterdir()) / "tensors-00000.safetensors")


@pytest.mark.thorough
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("tokenizer", ["bytes", {"bpe": 270}])
def test_the_exported_model_gives_the_same_logits_in_transformers(
    small_job: Write, tmp_path: Path, tie: bool, tokenizer: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    path = small_job()
    overrides = [f"model.tie_embeddings={tie}", f"data.tokenizer={tokenizer}", "model.vocab_size=270"]
    trainer = Job.load(path, overrides=overrides).build(lambda _: None)
    trainer.train()
    directory = tmp_path / "runs" / "small" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    reader = transformers.AutoTokenizer.from_pretrained(directory)
    text = "the quick brown fox jumps over the lazy dog"
    tokens = torch.tensor([reader(text)["input_ids"]])
    assert reader.decode(tokens[0]) == text
    assert model.generation_config.eos_token_id == model.config.eos_token_id == reader.eos_token_id
    stage = trainer.stage.eval()
    with torch.no_grad():
        ours = stage(tokens=tokens, positions=torch.arange(tokens.shape[1])[None])["logits"]
        theirs = model(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.smoke
def test_the_loss_falls_below_the_unigram_entropy_of_a_repetitive_text(small_job: Write, d9d: D9d) -> None:
    path = small_job(steps=60, logging={"every": 60}, checkpoint={}, export=False)
    trainer = Job.load(path).build(lambda _: None)
    entropy = trainer.prefetcher.stream.facts["unigram_entropy"]
    assert isinstance(entropy, float)
    trainer.train()
    metrics = (Job.load(path).run.directory / "metrics.jsonl").read_text().splitlines()
    assert Job.load(path).run.directory.joinpath("loss.svg").exists()
    import json

    assert json.loads(metrics[-1])["loss"] < 0.5 * entropy


@pytest.mark.thorough
@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from inside Dynamo
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": ["activation_checkpointing"]},
        {"parallel": [{"name": "compile", "backend": "aot_eager"}, "activation_checkpointing"]},
        {
            "parallel": [
                {"name": "compile", "backend": "aot_eager"},
                {"name": "activation_checkpointing", "save": ["attention"]},
            ]
        },
        {"kernels": {"attention": "reference"}},
        {"batch": {"size": 4, "microbatch": 4}},
        {"model_": {"tie_embeddings": True}},
    ],
    ids=["checkpointing", "compile", "kept-attention", "reference-kernels", "one-microbatch", "tied"],
)
def test_options_that_promise_the_same_numbers_give_them(
    small_job: Write, sections: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    overrides = [f"model.{k}={v}" for k, v in sections.pop("model_", {}).items()]
    plain = Job.load(small_job("plain", export=False), overrides=overrides).build(lambda _: None)
    other = Job.load(small_job("other", export=False, **sections), overrides=overrides).build(lambda _: None)
    for step in range(3):
        a, b = (t.step(step, t.prefetcher.next()) for t in (plain, other))
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a.grad_norm, b.grad_norm, rtol=1e-3, atol=1e-4)
    assert "stores nothing" not in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("precision", [{"parameters": "bfloat16"}, {"autocast": "bfloat16"}])
def test_low_precision_trains(small_job: Write, tmp_path: Path, precision: dict[str, str]) -> None:
    path = small_job(steps=20, precision=precision, logging={"every": 1})
    trainer = Job.load(path).build(lambda _: None)
    trainer.train()
    import json

    losses = [json.loads(x)["loss"] for x in (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.3
    dtypes = {tensor.dtype for name, tensor in final(tmp_path / "runs/small").items() if name.startswith("model/")}
    assert dtypes == {torch.bfloat16 if "parameters" in precision else torch.float32}


@pytest.mark.thorough
def test_explain_names_every_supplier(small_job: Write, d9d: D9d) -> None:
    status, out, _ = d9d("explain", str(small_job(parallel=["activation_checkpointing"])))
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert status == 0
    assert any(line.startswith("model qwen3 d9d-qwen3") for line in lines)
    assert "activation_checkpointing: layers.0, layers.1" in lines
    assert any(line.startswith("attention: sdpa (d9d-nn") for line in lines)
    assert any("torch refuses" in line and "cuda" in line for line in lines)


def test_check_judges_a_job_for_many_ranks_on_a_laptop(small_job: Write, d9d: D9d) -> None:
    job = str(small_job(mesh={"dp_replicate": 64, "dp_shard": 64}, batch={"size": 4096}))
    status, _, err = d9d("check", job, "--world-size", "4096")
    assert status == 2
    assert "mesh.dp_replicate is 64, but no component of the job uses that axis" in err
    status, _, err = d9d("check", job, "--world-size", "4095")
    assert status == 2
    assert "4096 ranks, but the job was started with 4095" in err
