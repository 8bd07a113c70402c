"""The subscriber ``samples`` in real runs: its output, and that training is unchanged."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from d9d_core import events as ev
from d9d_core.errors import D9dError
from d9d_core.tensors import local
from d9d_engine.job import Job
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.logs import read_log_without_times
from d9d_testing.suites.subscriber import SubscriberSuite
from d9d_testing.world import World

PLUGINS = (
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin",
    "d9d_moe.plugin", "d9d_pipeline.plugin", "d9d_qwen3.plugin",
)  # fmt: skip
TEXT = {"name": "text", "sources": ["python:topics"], "sequence_length": 16}
# The library asks transformers for a name that has changed by now.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")


@pytest.mark.thorough
class TestSamples(SubscriberSuite):
    target = "samples"
    waits = True
    builds_on = PLUGINS
    job: ClassVar[Mapping[str, Any]] = {
        "model": {
            "name": "qwen3", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 16, "num_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1,
        },
        "task": "causal_lm", "data": TEXT, "optimizer": {"name": "adamw", "lr": 0.01},
        "evaluation": {"every": 4, "packs": 1, "data": TEXT},
    }  # fmt: skip

    def fields(self, directory: Path) -> Mapping[str, Any]:
        return {"every": 3, "prompts": ["the", [104, 105]], "max_new_tokens": 3, "temperature": 0.8}


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_continuations_are_those_of_transformers_on_the_export_of_that_step(
    published: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    base = published(tmp_path / "base")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one two three four five six seven eight nine ten. " * 40)
    prompts = ["one two", "a longer text to continue", "x", [65, 66, 67]]
    values = {
        "run": {"name": "run", "dir": str(tmp_path / "runs")}, "steps": 3, "device": "cpu", "batch": {"size": 4},
        "model": {"name": "qwen3", "pretrained": str(base)}, "task": "causal_lm", "trackers": [],
        "data": {"name": "text", "sources": [str(corpus)], "sequence_length": 32},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "subscribers": [{"name": "samples", "every": 2, "prompts": prompts, "max_new_tokens": 24, "rows": 3}],
    }  # fmt: skip
    Job.from_values(values).build(lambda _: None).train()
    run = tmp_path / "runs" / "run"
    lines = samples_of(run)
    assert [(line["step"], line["sample"]) for line in lines] == [(s, n) for s in (0, 2, 3) for n in range(4)]
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("sample at step")]) == 12
    for step, directory in ((0, base), (3, run / "model")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        for line in (line for line in lines if line["step"] == step):
            given = line["prompt"]
            ids = tokenizer(given)["input_ids"] if isinstance(given, str) else given
            new = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
            assert line["tokens"] == new
            assert line["completion"] == tokenizer.decode(new, skip_special_tokens=True)
            assert line["finish"] == ("stop" if new[-1] == tokenizer.eos_token_id else "length")
    assert {line["finish"] for line in lines} == {"stop", "length"}


@pytest.mark.thorough
def test_samples_of_a_resumed_run_are_those_of_one_that_was_not_interrupted(
    small_job: Callable[..., Path], tmp_path: Path
) -> None:
    sampled = {"name": "samples", "every": 2, "prompts": ["the"], "max_new_tokens": 4, "temperature": 1, "show": False}
    fixed = {"trackers": [], "metrics": [], "export": False, "lr_schedule": None, "subscribers": [sampled]}
    for name, lengths in (("whole", [4]), ("parts", [2, 4])):
        for steps in lengths:
            Job.load(small_job(name, steps=steps, **fixed)).build(lambda _: None).train()
    whole, parts = (samples_of(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert [line["step"] for line in whole] == [0, 2, 4]
    assert parts == whole


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give either 'prompts', a list of texts or token ids, or 'file'"),
        ({"prompts": ["a"], "max_new_tokens": 64}, "with max_new_tokens 64 exceeds the model's 64 positions"),
        ({"file": "nowhere.jsonl"}, "nowhere.jsonl cannot be read"),
    ],
)
def test_prompts_that_cannot_be_are_told_before_training(
    small_job: Callable[..., Path], fields: dict[str, Any], message: str
) -> None:
    job = small_job(subscribers=[{"name": "samples", "every": 1, **fields}])
    with pytest.raises(D9dError, match=message):
        Job.load(job).build(lambda _: None)


@pytest.mark.thorough
def test_prompts_come_from_a_file_too(small_job: Callable[..., Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the quick"}\n{"prompt": "a"}\n')
    sampled = {"name": "samples", "every": 9, "file": str(prompts), "max_new_tokens": 2, "show": False}
    job = small_job(steps=3, trackers=[], metrics=[], export=False, subscribers=[sampled])
    Job.load(job).build(lambda _: None).train()
    assert [line["prompt"] for line in samples_of(tmp_path / "runs" / "small")] == ["the quick", "a"] * 2
    prompts.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(D9dError, match=r"prompts.jsonl:1: messages need a chat template"):
        Job.load(job).build(lambda _: None)


@pytest.mark.thorough
def test_a_model_without_logits_is_told(small_job: Callable[..., Path]) -> None:
    path = small_job(subscribers=[{"name": "samples", "every": 1, "prompts": ["a"]}], steps=3)
    values = json.loads(path.read_text())
    values["model"]["heads"] = {"lm": {"kind": "causal_lm"}, "emb": {"kind": "embedding"}}
    values["task"] = {"name": "causal_lm", "head": "lm"}
    path.write_text(json.dumps(values))
    with pytest.raises(D9dError, match="the model returns no logits"):
        Job.load(path).build(lambda _: None).train()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_is_compiled_for_the_shapes_of_training_only(
    small_job: Callable[..., Path], tmp_path: Path
) -> None:
    from torch._dynamo.utils import counters

    sampled = {"name": "samples", "every": 1, "prompts": ["the"], "max_new_tokens": 2, "show": False}
    fixed = {"steps": 3, "trackers": [], "metrics": [], "export": False, "checkpoint": {"every": None}}
    found = []
    for name, subscribers in (("plain", []), ("sampled", [sampled])):
        torch.compiler.reset()
        counters.clear()
        job = small_job(name, parallel=[{"name": "compile", "backend": "eager"}], subscribers=subscribers, **fixed)
        Job.load(job).build(lambda _: None).train()
        found.append((counters["stats"]["unique_graphs"], counters["frames"]["total"]))
    assert found[0][0] > 0
    assert found[1] == found[0]


class Digest:
    """Fingerprint of all that a run consists of, after each step."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._state: dict[str, Any] = {}

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        return [
            (ev.DataReady, lambda event: self._state.update(stream=event.stream)),
            (ev.ModelReady, lambda event: self._state.update(stage=event.stage)),
            (ev.StepEnds, self._take),
        ]

    def _take(self, event: ev.StepEnds) -> None:
        stage = self._state["stage"]
        # Tallies, which are not persistent, are overwritten by each forward before anybody reads them.
        tensors = [*stage.state_dict().values(), event.result.loss, event.result.grad_norm]
        content = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        for tensor in tensors:
            content.update(local(tensor).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        content.update(str([module.training for module in stage.modules()]).encode())
        self.found.append(content.hexdigest())


def digests(jobs: list[dict[str, Any]], plugins: list[str]) -> list[list[str]]:
    """Fingerprints of runs, one after the other; runs on every rank of a world."""
    found = []
    for values in jobs:
        digest = Digest()
        job = job_of(values, plugins)
        job.build(lambda _note: None, topology_here(job), observers=[digest]).train()
        found.append(digest.found)
    return found


@pytest.mark.full
def test_training_is_bit_for_bit_the_one_without_samples_in_every_layout(table: ModuleType, tmp_path: Path) -> None:
    layouts: dict[str, dict[str, Any]] = {
        "one process": {},
        "fsdp 2": {"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]},
        "pp 2": {"mesh": {"pp": 2}, "pipeline": "1f1b"},
        "zero_bubble_v": {"mesh": {"pp": 2}, "pipeline": "zero_bubble_v"},
        "ep 2": {"mesh": {"dp_shard": 2, "ep": 2}, "parallel": ["fsdp", "expert_parallel"]},
    }
    sampled = {
        "name": "samples", "every": 2, "prompts": ["the", [104, 105, 106], "to"], "max_new_tokens": 3, "show": False,
    }  # fmt: skip
    jobs: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for name, layout in layouts.items():
        model = table.DEEP_EXPERTS if name != "one process" else table.EXPERTS
        common = table.job(tmp_path / "corpus", "float32", model=model) | {
            "steps": 4, "batch": {"size": 12, "microbatch": 3}, "logging": {"every": 1}, "metrics": ["router"],
            "trackers": [{"name": "jsonl", "picture": False}], "checkpoint": {"every": None}, **layout,
        }  # fmt: skip
        for kind, subscribers in (("plain", []), ("sampled", [sampled])):
            run = {"name": f"{name.replace(' ', '-')}-{kind}", "dir": str(tmp_path / "runs")}
            ranks = 2 if "mesh" in layout else 1
            jobs[ranks].append(common | {"run": run, "subscribers": subscribers})
    for ranks, of_world in jobs.items():
        for found in World(ranks, timeout=180.0).run(digests, of_world, list(PLUGINS)):
            for plain, watched in zip(found[::2], found[1::2], strict=True):
                assert len(plain) == 4
                assert watched == plain
        for values in of_world[::2]:
            run = tmp_path / "runs" / values["run"]["name"]
            watched_run = run.with_name(run.name.replace("-plain", "-sampled"))
            assert read_log_without_times(run) == read_log_without_times(watched_run)
    written = {
        name: samples_of(tmp_path / "runs" / f"{name.replace(' ', '-')}-sampled")
        for name in layouts
        if name != "one process"
    }
    assert [line["step"] for line in written["fsdp 2"]] == [step for step in (0, 2, 4) for _ in range(3)]
    for name, lines in written.items():
        assert lines == written["fsdp 2"], name
