"""The inference task ``generations``: its output equals transformers' generations, in every layout."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import D9dError, NonFiniteError
from d9d_inference.generation.decoder import Decoder, Sequences
from d9d_inference.job import InferenceJob

Command = Callable[..., tuple[int, str, str]]
# The library asks transformers for a name that has changed by now.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
PROMPTS = [" ".join(WORDS[number % 5 : 1 + number % 7 + number % 5]) or "x" for number in range(9)]
NEW = 8
ENDS = list(range(24))


@pytest.fixture(scope="module")
def model(published: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model that ends a text by many tokens, so that some prompts end early."""
    directory = published(tmp_path_factory.mktemp("model"), num_hidden_layers=4)
    settings = directory / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": ENDS}))
    return directory


@pytest.fixture
def values(model: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Values of an inference job over nine prompts; keyword arguments replace sections."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS))

    def of(name: str, task: Mapping[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
        return {
            "run": {"name": name, "dir": str(tmp_path / "runs")}, "device": "cpu",
            "model": {"name": "qwen3", "pretrained": str(model)},
            "data": {"name": "documents", "sources": [str(file)], "sequence_length": 48},
            "task": {"name": "generations", "max_new_tokens": NEW, **(task or {})},
            "batch": {"size": 8, "microbatch": 2},
            **sections,
        }  # fmt: skip

    return of


def rows_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    assert InferenceJob.from_values(values).build(lambda _: None).run().status == "finished"
    return read_rows(values)


def read_rows(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output_of(values).read_text().splitlines()]


def output_of(values: Mapping[str, Any]) -> Path:
    return Path(values["run"]["dir"]) / values["run"]["name"] / "output.jsonl"


@pytest.mark.thorough
def test_rows_are_what_transformers_generates(values: Callable[..., dict[str, Any]], model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    rows = rows_of(values("greedy"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    net = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert [row["row"] for row in rows] == list(range(len(PROMPTS)))
    for prompt, row in zip(PROMPTS, rows, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        new = net.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()
        assert row["prompt_tokens"] == len(ids)
        assert row["tokens"] == new
        assert row["text"] == tokenizer.decode(new, skip_special_tokens=True)
        assert row["finished"] == (new[-1] in ENDS)
    assert {row["finished"] for row in rows} == {True, False}
    summary = json.loads((output_of(values("greedy")).parent / "summary.json").read_text())["values"]
    assert summary["new_tokens"] == sum(len(row["tokens"]) for row in rows)


@pytest.mark.thorough
def test_draws_depend_on_the_seed_and_the_row_alone(values: Callable[..., dict[str, Any]]) -> None:
    drawn = {"temperature": 0.9, "stop": []}
    rows = rows_of(values("drawn", drawn))
    assert all(len(row["tokens"]) == NEW and not row["finished"] for row in rows)
    # Microbatches of another size compute the same up to rounding, and draw the same.
    alone = rows_of(values("alone", drawn, batch={"size": 2, "microbatch": 1}, limit=3))
    assert [row["tokens"] for row in alone] == [row["tokens"] for row in rows[:3]]
    assert rows_of(values("limited", drawn, limit=5)) == rows[:5]
    other = rows_of(values("seeded", {**drawn, "seed": 1}, limit=4))
    assert all(mine["tokens"] != row["tokens"] for mine, row in zip(other, rows, strict=False))


@pytest.mark.thorough
def test_an_interrupted_run_goes_on_with_the_same_bytes(values: Callable[..., dict[str, Any]]) -> None:
    whole, parts = (values(name, {"temperature": 0.7}, batch={"size": 4, "microbatch": 2}) for name in ("a", "b"))
    rows_of(whole)
    inference = InferenceJob.from_values(parts).build(lambda _: None)
    run, packs = inference.forwards.run, []

    def failing(pack: Any, outputs: Any) -> None:
        if len(packs) == 2:
            raise RuntimeError("killed")
        packs.append(pack)
        run(pack, outputs)

    inference.forwards.run = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="killed"):
        inference.run()
    rows_of(parts)
    assert output_of(parts).read_bytes() == output_of(whole).read_bytes()


@pytest.mark.parametrize(
    ("task", "sections", "message"),
    [
        ({"max_new_tokens": 100}, {}, "prompts of 48 positions .* and 100 new tokens are more than the model's 128"),
        ({}, {"data": {"name": "text", "packing": "best_fit", "field": "text"}}, "only whole samples can be continued"),
        ({"max_new_tokens": 0}, {}, "task.max_new_tokens"),
        ({"temperature": -1}, {}, "task.temperature"),
        ({"head": "lm"}, {}, "task.head"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(
    values: Callable[..., dict[str, Any]], task: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    given = values("wrong", task)
    for name, section in sections.items():
        given[name] = {**given[name], **section}
    with pytest.raises(D9dError, match=message):
        InferenceJob.from_values(given).build(lambda _: None)


@pytest.mark.thorough
def test_logits_that_are_no_numbers_are_an_error_unless_they_are_kept(
    values: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = Decoder._choose

    def spoiled(self: Decoder, logits: torch.Tensor, sequences: Sequences, index: int) -> torch.Tensor:
        rows = torch.tensor(sequences.numbers)[:, None]
        return choose(self, torch.where((rows == 3) & (index > 0), float("nan"), logits), sequences, index)

    monkeypatch.setattr(Decoder, "_choose", spoiled)
    with pytest.raises(NonFiniteError, match="row 3: the logits of its new token number 1 have NaN"):
        rows_of(values("nan", {"stop": []}))
    assert len(rows_of(values("kept", {"stop": []}, nonfinite="keep"))) == len(PROMPTS)


@pytest.mark.thorough
def test_a_run_without_a_tokenizer_writes_no_text(
    values: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d9d_inference.compose.tokenizer_of", lambda *_: None)
    rows = rows_of(values("plain", limit=3))
    assert [row["text"] for row in rows] == [None] * 3
    assert all(row["tokens"] for row in rows)


def infer(jobs: Sequence[Mapping[str, Any]]) -> None:
    """Run inference jobs one after the other; runs on every rank of a world."""
    from d9d_testing.layouts import topology_here

    for values in jobs:
        job = InferenceJob.from_values(values)
        job.build(lambda _: None, topology_here(job)).run()  # type: ignore[arg-type]


@pytest.mark.full
def test_output_is_the_same_bytes_in_every_layout(values: Callable[..., dict[str, Any]]) -> None:
    from d9d_testing.world import World

    layouts: dict[str, dict[str, Any]] = {
        "fsdp": {"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]},
        "replicas": {"mesh": {"dp_replicate": 2}, "parallel": ["replicate"]},
        "1f1b": {"mesh": {"pp": 2}, "pipeline": "1f1b"},
        "dual_pipe_v": {"mesh": {"pp": 2}, "pipeline": "dual_pipe_v"},
    }
    for temperature in (0.0, 0.8):
        task = {"temperature": temperature}
        alone = values(f"alone-{temperature}", task)
        rows_of(alone)
        jobs = {name: values(f"{name}-{temperature}", task, **layout) for name, layout in layouts.items()}
        World(2, timeout=120.0).run(infer, list(jobs.values()))
        for name, job in jobs.items():
            assert output_of(job).read_bytes() == output_of(alone).read_bytes(), name


@pytest.mark.full
def test_ranks_that_split_positions_continue_by_a_number_of_tokens_that_they_do_not_divide(
    values: Callable[..., dict[str, Any]],
) -> None:
    from d9d_testing.world import RankFailedError, World

    task = {"max_new_tokens": 7, "stop": []}
    alone, split = values("alone", task), values("split", task, mesh={"tp": 2}, parallel=["tensor_parallel"])
    World(2).run(infer, [split])
    assert read_rows(split) == rows_of(alone)
    layers = values("layers", mesh={"tp": 2}, parallel=["tensor_parallel"]) | {"task": "hidden_states"}
    with pytest.raises(
        RankFailedError, match="task: 'hidden_states' reads outputs of modules .* ranks of tp have only parts"
    ):
        World(2).run(infer, [layers])


@pytest.mark.full
def test_experts_on_two_ranks_write_the_same_bytes(
    values: Callable[..., dict[str, Any]], small_job: Callable[..., Path], tmp_path: Path
) -> None:
    from d9d_engine.job import Job
    from d9d_testing.world import World

    model = {
        "name": "qwen3_moe", "vocab_size": 257, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_positions": 64, "num_experts": 4, "experts_per_token": 2,
        "moe_intermediate_size": 24,
    }  # fmt: skip
    Job.load(small_job("experts", model=model, steps=2, lr_schedule=None, metrics=[], trackers=[])).build(
        lambda _: None
    ).train()
    model["pretrained"] = str(tmp_path / "runs" / "experts")
    task = {"temperature": 0.8}
    alone = values("alone", task, model=model)
    rows_of(alone)
    split = {"mesh": {"dp_shard": 2, "ep": 2}, "parallel": ["fsdp", "expert_parallel"]}
    World(2, timeout=120.0).run(infer, [values("split", task, model=model, **split)])
    assert output_of(values("split")).read_bytes() == output_of(alone).read_bytes()


@pytest.mark.thorough
def test_the_command_writes_text(d9d: Command, values: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    job = values("command", limit=2)
    file = tmp_path / "infer.json"
    file.write_text(json.dumps(job))
    status, out, err = d9d("infer", str(file))
    assert status == 0, err
    assert "new_tokens" in out
    assert [row["row"] for row in read_rows(job)] == [0, 1]
