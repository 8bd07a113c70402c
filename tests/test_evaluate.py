"""``d9d evaluate``: the same numbers as training's evaluation and as transformers, in every layout."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_testing.logs import read_log

Command = Callable[..., tuple[int, str, str]]
WriteJob = Callable[..., Path]
# The library asks transformers for a name that has changed by now.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "then", "it", "sleeps"]


@pytest.fixture(scope="module")
def model(published: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("model"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Twenty-one documents of different lengths, the longest beyond a sample."""
    lines = [{"text": " ".join(WORDS[: 1 + number % 7]) + f" {number}"} for number in range(20)]
    lines.append({"text": " ".join(WORDS * 4)})
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def evaluated(d9d: Command, *arguments: object) -> dict[str, Any]:
    status, out, err = d9d("evaluate", *map(str, arguments), "--json", "-")
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def reference(model: Path, texts: Path, length: int) -> float:
    """Mean loss of a token by transformers, text by text."""
    transformers = pytest.importorskip("transformers")
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    total = count = 0.0
    for line in texts.read_text().splitlines():
        ids = [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id][: length + 1]
        with torch.no_grad():
            logits = net(torch.tensor([ids])).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids[1:]), reduction="sum").item()
        count += len(ids) - 1
    return total / count


@pytest.mark.full
def test_perplexity_is_that_of_transformers_and_of_training(
    d9d: Command, model: Path, texts: Path, tmp_path: Path, small_job: WriteJob
) -> None:
    """On padded and on packed samples, of a published model and of the run that starts from it."""
    expected = reference(model, texts, 64)
    sets = {
        "padded": {"name": "documents", "sources": [str(texts)], "sequence_length": 64},
        "packed": {
            "name": "text", "sources": [str(texts)], "field": "text", "sequence_length": 64, "packing": "best_fit",
        },
    }  # fmt: skip
    job = small_job(
        "tuned", model={"name": "qwen3", "pretrained": str(model)}, steps=1, optimizer={"name": "adamw", "lr": 1e-12},
        data=sets["packed"], lr_schedule=None, export=False,
        evaluation={"every": 1, "packs": "all", "sets": sets, "metrics": ["perplexity"]},
    )  # fmt: skip
    options = ["--set", f"run.dir={tmp_path}", "--set", "device=cpu", "--set", "data.sequence_length=64"]
    options += ["--set", "evaluation.sets.texts.sequence_length=64"]
    alone = evaluated(d9d, model, "--data", texts, *options)["sets"]["texts"]
    assert alone["samples"] == 21
    assert alone["loss"] == pytest.approx(expected, rel=1e-5)
    assert alone["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    before = evaluated(d9d, job)  # nothing trained yet: the weights that training starts from
    assert before["step"] is None
    assert d9d("train", str(job))[0] == 0
    logged = next(line for line in read_log(tmp_path / "runs" / "tuned") if "eval/padded/loss" in line)
    after = evaluated(d9d, job)
    assert after["step"] == 1
    for name in sets:
        for values in (before["sets"][name], after["sets"][name]):
            assert values["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
            assert values["perplexity"] == pytest.approx(logged[f"eval/{name}/perplexity"], rel=1e-6)


@pytest.mark.full
def test_a_run_is_compared_with_itself_and_with_another_step(d9d: Command, small_job: WriteJob, tmp_path: Path) -> None:
    held_out = {"name": "documents", "sources": [str(tmp_path / "corpus")], "sequence_length": 64, "held_out": 0.5}
    job = small_job(
        data=held_out, checkpoint={"every": 2, "keep": 9, "best": {"series": "eval/loss"}},
        evaluation={"every": 2, "data": {**held_out, "split": "held_out"}}, export=False,
    )  # fmt: skip
    assert d9d("train", str(job))[0] == 0
    run = tmp_path / "runs" / "small"
    # Too few documents to compare by are an error; all of them are enough.
    status, _, err = d9d("evaluate", str(run), "--compare", str(run), "--limit", "3")
    assert status != 0
    assert "two models cannot be compared on 3 samples; use at least 5" in err
    same = evaluated(d9d, run, "--compare", run, "--set", "evaluation.data.split=train")["compare"]["differences"]
    assert same["evaluation"]["loss_difference"] == 0
    assert same["evaluation"]["better"] is None
    found = evaluated(
        d9d, run, "--compare", run / "checkpoints" / "step-00000002", "--set", "evaluation.data.split=train"
    )
    difference = found["compare"]["differences"]["evaluation"]
    assert difference["better"] == "first"
    losses = [found["sets"]["evaluation"]["loss"], found["compare"]["other"]["sets"]["evaluation"]["loss"]]
    assert difference["loss_difference"] == pytest.approx(losses[0] - losses[1], rel=1e-4)
    assert difference["confidence_interval"][1] < 0
    best = evaluated(d9d, run, "--checkpoint", "best")
    assert best["step"] == 6
    status, out, _ = d9d("evaluate", str(run), "--checkpoint", "2", "--json", str(tmp_path / "found.json"))
    assert status == 0
    assert "step 2" in out
    assert json.loads((tmp_path / "found.json").read_text())["step"] == 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: it does not exist; give a job file, the directory of a run"),
        (["MODEL"], "no data is given; add --data FILE.jsonl, or --like JOB"),
        (["MODEL", "--data", "EMPTY"], "is empty; give a file with records"),
        (["MODEL", "--data", "OTHER"], "has query; give records with text, messages, or prompt and completion"),
        (["MODEL", "--data", "TEXTS", "--checkpoint", "best"], "is a pretrained model without checkpoints"),
        (["JOB"], "the run has no checkpoint in"),
        (
            ["JOB", "--checkpoint", "last"],
            "--checkpoint: 'last' names no checkpoint; use newest, best, or the number of a step",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_told(
    d9d: Command, model: Path, texts: Path, tmp_path: Path, small_job: WriteJob, arguments: list[str], message: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "other.jsonl").write_text('{"query": "a"}\n')
    names: Mapping[str, Path] = {
        "MODEL": model, "TEXTS": texts, "EMPTY": tmp_path / "empty.jsonl", "OTHER": tmp_path / "other.jsonl",
        "JOB": small_job(),
    }  # fmt: skip
    status, _, err = d9d("evaluate", *(str(names.get(word, word)) for word in arguments))
    assert status != 0
    assert message in err


@pytest.mark.thorough
def test_a_model_without_a_tokenizer_is_told(d9d: Command, model: Path, texts: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model / name).read_bytes())
    status, _, err = d9d("evaluate", str(bare), "--data", str(texts), "--set", f"run.dir={tmp_path}")
    assert status != 0
    assert "tokenizer" in err


def test_metrics_that_read_what_the_task_does_not_observe_are_told(d9d: Command, small_job: WriteJob) -> None:
    data = {"name": "text", "sources": ["x"], "sequence_length": 8}
    status, _, err = d9d("check", str(small_job(evaluation={"every": 2, "data": data, "metrics": ["preference"]})))
    assert status != 0
    assert "evaluation.metrics[0]: metric 'preference'" in err
    assert "which task 'causal_lm' (d9d-nn" in err


@pytest.mark.full
def test_a_tuned_run_is_its_export(d9d: Command, model: Path, tmp_path: Path, small_job: WriteJob) -> None:
    """Of conversations with weights, from a checkpoint of the adapter alone; and on a file of conversations."""
    records = [
        {
            "messages": [
                {"role": "user", "content": f"Who is {n}?"},
                {"role": "assistant", "content": "I am Dee." * (1 + n % 3), "weight": 1 + n % 2},
            ]
        }
        for n in range(11)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    job = small_job(
        "tuned", model={"name": "qwen3", "pretrained": str(model)}, lr_schedule=None, metrics=[],
        data={"name": "chat", "sources": [str(file)], "sequence_length": 96}, peft={"name": "lora", "r": 4},
        checkpoint={"trainable_only": True}, steps=3,
    )  # fmt: skip
    assert d9d("train", str(job))[0] == 0
    run = tmp_path / "runs" / "tuned"
    tuned = evaluated(d9d, run, "--compare", run / "model")
    losses = [of["sets"]["data"]["loss"] for of in (tuned, tuned["compare"]["other"])]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert tuned["sets"]["data"]["samples"] == 11
    alike = evaluated(d9d, run / "model", "--like", job, "--compare", model)
    assert alike["sets"]["data"]["loss"] == pytest.approx(losses[0], rel=1e-5)
    assert alike["compare"]["differences"]["data"]["better"] == "first"
    on_file = [
        "--set",
        "device=cpu",
        "--set",
        "evaluation.sets.chats.sequence_length=96",
        "--set",
        f"run.dir={tmp_path}",
    ]
    alone = evaluated(d9d, run / "model", "--data", file, *on_file)
    assert alone["sets"]["chats"]["loss"] == pytest.approx(losses[0], rel=1e-5)
    few = evaluated(d9d, run, "--data", file, "--limit", 3)["sets"]["chats"]
    assert few["samples"] == 3
    assert few["loss"] != pytest.approx(losses[0], rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("reference", ["copy", "stored", "without_adapter"])
def test_preferences_are_measured_against_the_reference_of_training(
    d9d: Command, model: Path, tmp_path: Path, small_job: WriteJob, reference: str
) -> None:
    """The model as training starts, whatever it has become; fillers count nowhere."""
    records = [
        {
            "prompt": [{"role": "user", "content": f"Who is {n}?"}],
            "chosen": [{"role": "assistant", "content": "I am Dee."}],
            "rejected": [{"role": "assistant", "content": "Why?" + "!" * (n % 3)}],
        }
        for n in range(10)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"name": "preference", "sources": [str(tmp_path / "pairs.jsonl")], "sequence_length": 64}
    job = small_job(
        "dpo", model={"name": "qwen3", "pretrained": str(model)}, steps=3, lr_schedule=None, export=False,
        task={"name": "dpo", "reference": reference}, data=data, metrics=["preference"],
        peft={"name": "lora", "r": 4} if reference == "without_adapter" else None,
        evaluation={"every": 3, "packs": "all", "data": data, "metrics": ["preference"]},
    )  # fmt: skip
    assert d9d("train", str(job))[0] == 0
    logged = next(line for line in read_log(tmp_path / "runs" / "dpo") if "eval/loss" in line)
    assert logged["eval/loss"] < 0.6
    for _ in range(2):  # the stored value is the first one, however often it is measured
        found = evaluated(d9d, job)["sets"]["evaluation"]
        assert found["samples"] == 10
        assert found["loss"] == pytest.approx(logged["eval/loss"], rel=1e-5)
        assert found["preference/accuracy"] == pytest.approx(logged["eval/preference/accuracy"])


@pytest.mark.full
def test_fillers_answer_no_query(d9d: Command, model: Path, tmp_path: Path, small_job: WriteJob) -> None:
    """Eight queries in a batch of eight, and in one of sixteen."""
    words = ("apple", "brick", "cloud", "dune", "ember", "frost", "glade", "heron")
    records = [{"query": f"{word}?", "positive": f"all of {word}", "negatives": [f"no {word}"]} for word in words]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {
        "name": "pairs", "sources": [str(tmp_path / "questions.jsonl")], "sequence_length": 32, "negatives": 1,
    }  # fmt: skip
    heads = {"vector": {"kind": "embedding", "pooling": "last"}}
    embedder = {"name": "qwen3", "pretrained": str(model), "tie_embeddings": False, "heads": heads}
    losses = {}
    for size, micro in ((8, 8), (16, 8), (16, 16), (24, 2)):
        job = small_job(
            f"embed{size}",
            model=embedder,
            task="embedding",
            data=data,
            metrics=[],
            batch={"size": size, "microbatch": micro},
        )
        losses[size, micro] = evaluated(d9d, job)["sets"]["data"]["loss"]
    assert list(losses.values()) == pytest.approx([losses[8, 8]] * 4, rel=1e-5)


@pytest.mark.full
def test_layouts_measure_what_one_process_does(small_job: WriteJob, tmp_path: Path) -> None:
    """Losses, perplexity, metrics and the comparison, over shards and over stages."""
    data = {"name": "documents", "sources": [str(tmp_path / "corpus")], "sequence_length": 64}
    job = small_job(
        data=data, steps=2, lr_schedule=None, batch={"size": 8, "microbatch": 2}, export=False, checkpoint={"every": 1},
        evaluation={"every": 2, "packs": "all", "data": data, "metrics": ["perplexity"]},
    )  # fmt: skip

    command("train", str(job))
    start = str(tmp_path / "runs" / "small" / "checkpoints" / "step-00000001")
    words = ["evaluate", str(tmp_path / "runs" / "small"), "--compare", start, "--json"]
    found = {}
    layouts = {
        "alone": [],
        "fsdp": ["--nproc", "2"],  # whatever the run was trained in
        "pp": ["--nproc", "2", "--set", "mesh.pp=2", "--set", "pipeline=1f1b"],
        "cp": ["--nproc", "2", "--set", "mesh.cp=2", "--set", "parallel=[context_parallel]"],
    }
    for name, options in layouts.items():
        command(*words, str(tmp_path / f"{name}.json"), *options)
        found[name] = json.loads((tmp_path / f"{name}.json").read_text())
    for name in ("fsdp", "pp", "cp"):
        for values, expected in zip(numbers(found[name]), numbers(found["alone"]), strict=True):
            assert values == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.full
def test_preferences_are_measured_alike_where_ranks_share_positions(
    model: Path, tmp_path: Path, small_job: WriteJob
) -> None:
    """The task sums over these ranks, of each pair alone too, and fillers count nowhere."""
    answers = [("I am Dee.", "Why?" + "!" * (number % 3)) for number in range(11)]
    records = [
        {
            "prompt": [{"role": "user", "content": f"Who is {number}?"}],
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
        }
        for number, (chosen, rejected) in enumerate(answers)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"name": "preference", "sources": [str(tmp_path / "pairs.jsonl")], "sequence_length": 96}
    job = small_job(
        "dpo", model={"name": "qwen3", "pretrained": str(model)}, steps=2, lr_schedule=None, export=False,
        task={"name": "dpo", "reference": "copy"}, data=data, metrics=[], batch={"size": 4, "microbatch": 2},
        checkpoint={"every": 1}, evaluation={"every": 2, "packs": "all", "data": data, "metrics": ["preference"]},
    )  # fmt: skip
    command("train", str(job))
    run = tmp_path / "runs" / "dpo"
    words = ["evaluate", str(run), "--compare", str(run / "checkpoints" / "step-00000001"), "--json", "-"]
    alone = json.loads(command(*words))
    shared = json.loads(command(*words, "--nproc", "2", "--set", "mesh.cp=2", "--set", "parallel=[context_parallel]"))
    assert shared["sets"]["evaluation"]["samples"] == 11
    assert numbers(shared) == pytest.approx(numbers(alone), rel=1e-4, abs=1e-7)


@pytest.mark.full
def test_whole_sets_and_early_stopping_are_alike_over_stages(d9d: Command, small_job: WriteJob, tmp_path: Path) -> None:
    """A run that gets no better ends after the same step, with the same values."""
    data = {"name": "documents", "sources": [str(tmp_path / "corpus")], "sequence_length": 64}
    sections: dict[str, Any] = {
        "data": data, "steps": 20, "lr_schedule": None, "batch": {"size": 8, "microbatch": 2}, "export": False,
        "evaluation": {"every": 1, "packs": "all", "sets": {"a": data}, "metrics": ["perplexity"]},
        "subscribers": [{"name": "early_stopping", "series": "eval/a/loss", "patience": 2, "min_delta": 100.0}],
    }  # fmt: skip
    status, out, err = d9d("train", str(small_job("alone", **sections)))
    assert status == 0, err
    piped = command("train", str(small_job("pp", mesh={"pp": 2}, pipeline="1f1b", **sections)), "--nproc", "2")
    lines = {}
    for name, text in (("alone", out), ("pp", piped)):
        assert "ended after step 3 of 20 and saved: early_stopping: eval/a/loss" in text
        lines[name] = [line for line in read_log(tmp_path / "runs" / name) if "eval/a/loss" in line]
        assert [line["step"] for line in lines[name]] == [1, 2, 3]
    for found, expected in zip(lines["pp"], lines["alone"], strict=True):
        for series in ("eval/a/loss", "eval/a/perplexity"):
            assert found[series] == pytest.approx(expected[series], rel=1e-5)


def command(*arguments: str) -> str:
    """Standard output of a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "d9d_core", *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(found: Any) -> list[float]:
    """All numbers of a report, in order."""
    if isinstance(found, dict):
        return [number for key in sorted(found) for number in numbers(found[key])]
    if isinstance(found, list):
        return [number for item in found for number in numbers(item)]
    return [float(found)] if isinstance(found, int | float) else []
