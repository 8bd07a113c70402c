"""Inference jobs: rows equal transformers' rows, padded and packed, in every layout, and after kills."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from d9d_core.errors import CheckpointError, DataError, JobError, NonFiniteError
from d9d_core.events import PackEnds, RowsWritten
from d9d_engine.job import Job
from d9d_engine.run.interrupt import Interrupts
from d9d_inference.captures import groups_of
from d9d_inference.job import InferenceJob
from d9d_inference.runner import InferenceOutcome

Published = Callable[..., Path]
Rows = list[dict[str, Any]]
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "sleeps", "under", "trees")
COUNT = 37
LENGTH = 64


class Folder:
    """A tiny published model, and texts of 1 to 60 bytes."""

    def __init__(self, path: Path, published: Published) -> None:
        self.path = path
        self.model = published(path / "model")
        draw = random.Random(0)
        self.texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 10)))[:60] for _ in range(COUNT)]
        lines = [json.dumps({"text": text}) + "\n" for text in self.texts]
        (path / "texts.jsonl").write_text("".join(lines))

    def data(self, packed: bool = False, **fields: Any) -> dict[str, Any]:
        shape = {"name": "text", "packing": "best_fit", "field": "text"} if packed else {"name": "documents"}
        return {**shape, "sources": [str(self.path / "texts.jsonl")], "sequence_length": LENGTH, **fields}

    def job(self, name: str, **sections: Any) -> InferenceJob:
        values: dict[str, Any] = {
            "run": {"name": name, "dir": str(self.path / "runs")}, "device": "cpu",
            "model": {"name": "qwen3", "pretrained": str(self.model)}, "task": "log_probs", "data": self.data(),
            "batch": {"size": 16, "microbatch": 2}, **sections,
        }  # fmt: skip
        return InferenceJob.from_values(values)

    def run(self, name: str, **sections: Any) -> InferenceOutcome:
        return self.job(name, **sections).build(note=lambda _text: None).run()

    def rows(self, name: str, **sections: Any) -> Rows:
        outcome = self.run(name, **sections)
        rows = self.read(name)
        assert (outcome.status, outcome.rows) == ("finished", len(rows))
        return rows

    def read(self, name: str) -> Rows:
        return [json.loads(line) for line in (self.path / "runs" / name / "output.jsonl").read_text().splitlines()]

    def bytes_of(self, name: str) -> bytes:
        return (self.path / "runs" / name / "output.jsonl").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, published: Published) -> Folder:
    return Folder(tmp_path_factory.mktemp("inference"), published)


class Theirs:
    """transformers on single texts, without padding."""

    def __init__(self, folder: Folder) -> None:
        import transformers

        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder.model)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder.model, dtype=torch.float32)

    def tokens(self, text: str, end: bool) -> torch.Tensor:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor([[*ids, self.tokenizer.eos_token_id] if end else ids])


@pytest.fixture(scope="module")
def theirs(folder: Folder) -> Theirs:
    return Theirs(folder)


# --- rows equal transformers' rows


@pytest.mark.thorough
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_log_probabilities_equal_those_of_transformers(folder: Folder, theirs: Theirs, packed: bool) -> None:
    rows = folder.rows(f"log_probs-{packed}", task={"name": "log_probs", "per": "token"}, data=folder.data(packed))
    assert [row["row"] for row in rows] == list(range(COUNT))
    with torch.no_grad():
        for row, text in zip(rows, folder.texts, strict=True):
            tokens = theirs.tokens(text, end=True)
            logs = theirs.model(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
            assert row["targets"] == tokens[0, 1:].tolist()
            assert row["log_probs"] == pytest.approx(logs.tolist(), abs=2e-5)
            assert row["log_prob"] == pytest.approx(logs.double().sum().item(), abs=2e-4)
            assert row["tokens"] == len(logs)


@pytest.mark.thorough
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_embeddings_equal_pooled_hidden_states_of_transformers(folder: Folder, theirs: Theirs, packed: bool) -> None:
    for pooling in ("last", "mean"):
        model = {
            "name": "qwen3",
            "pretrained": str(folder.model),
            "heads": {"e": {"kind": "embedding", "pooling": pooling}},
        }
        rows = folder.rows(f"embeddings-{pooling}-{packed}", task="embeddings", data=folder.data(packed), model=model)
        assert len(rows) == COUNT
        with torch.no_grad():
            for row in rows:
                states = theirs.model.model(theirs.tokens(folder.texts[row["row"]], end=True)).last_hidden_state[0]
                vector = states[-1] if pooling == "last" else states.mean(0)
                np.testing.assert_allclose(row["embedding"], (vector / vector.norm()).numpy(), atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_classes_and_rewards_equal_those_of_transformers(folder: Folder, theirs: Theirs, packed: bool) -> None:
    import transformers

    for classes, task in ((3, {"name": "classes", "labels": ["a", "b", "c"]}), (1, {"name": "rewards"})):
        torch.manual_seed(classes)
        config = transformers.Qwen3Config.from_pretrained(folder.model, num_labels=classes)
        model: Any = transformers.Qwen3ForSequenceClassification(config).eval()
        directory = folder.path / f"classifier-{classes}-{packed}"
        model.save_pretrained(directory)
        shutil.copy(folder.model / "tokenizer.json", directory)
        shutil.copy(folder.model / "tokenizer_config.json", directory)
        given = {"name": "qwen3", "pretrained": str(directory)}
        rows = folder.rows(f"{task['name']}-{packed}", task=task, data=folder.data(packed), model=given)
        assert len(rows) == COUNT
        with torch.no_grad():
            for row in rows:
                logits = model(theirs.tokens(folder.texts[row["row"]], end=False)).logits[0]
                if classes == 1:
                    assert row["reward"] == pytest.approx(logits.item(), abs=1e-5)
                    continue
                np.testing.assert_allclose(row["probabilities"], logits.softmax(-1).numpy(), atol=1e-5)
                assert row["label"] == "abc"[row["class"]] == "abc"[int(logits.argmax())]


@pytest.mark.thorough
def test_hidden_states_are_those_of_the_chosen_layers(folder: Folder, theirs: Theirs) -> None:
    task = {"name": "hidden_states", "layers": [0, -2], "pooling": "none"}
    rows = folder.rows("hidden", task=task, data=folder.data(packed=True))
    with torch.no_grad():
        for row in rows[::5]:
            tokens = theirs.tokens(folder.texts[row["row"]], end=False)
            states = theirs.model.model(tokens, output_hidden_states=True).hidden_states[1][0]
            assert row["tokens"] == len(states)
            for column in ("layer_0", "layer_minus_2"):  # the same one of two layers
                np.testing.assert_allclose(row[column], states.numpy(), rtol=1e-5, atol=1e-4)


@pytest.mark.thorough
def test_perplexity_of_all_rows_is_that_of_their_tokens(folder: Folder) -> None:
    outcome = folder.run("perplexity", task="perplexity")
    rows = folder.read("perplexity")
    tokens = sum(row["tokens"] for row in rows)
    loss = sum(row["tokens"] * row["loss"] for row in rows) / tokens
    assert outcome.values["tokens"] == tokens
    assert outcome.values["perplexity"] == pytest.approx(np.exp(loss), rel=1e-9)
    summary = json.loads((folder.path / "runs" / "perplexity" / "summary.json").read_text())
    assert summary["rows"] == COUNT
    assert summary["values"]["perplexity"] == outcome.values["perplexity"]


def test_classes_of_tokens_are_one_for_each(folder: Folder) -> None:
    model = {
        "name": "qwen3",
        "pretrained": str(folder.model),
        "heads": {"t": {"kind": "token_classification", "num_classes": 2}},
    }
    rows = folder.rows(
        "tokens", task={"name": "token_classes", "labels": ["x", "y"]}, model=model, data=folder.data(packed=True)
    )
    for row in rows:
        assert row["tokens"] == len(row["labels"]) == len(folder.texts[row["row"]])
        assert set(row["labels"]) <= {"x", "y"}


# --- how a run goes


@pytest.mark.thorough
def test_a_run_that_is_stopped_goes_on_with_the_same_rows(folder: Folder) -> None:
    expected = folder.rows("whole")
    interrupts = Interrupts()

    class Stops:
        def subscriptions(self) -> Sequence[tuple[type[Any], Callable[[Any], None]]]:
            return [(PackEnds, lambda _event: interrupts.request("SIGTERM"))]

    stopped = folder.job("parts").build(note=lambda _text: None, observers=[Stops()], interrupts=interrupts).run()
    assert (stopped.status, stopped.samples) == ("stopped", 16)
    assert not (folder.path / "runs" / "parts" / "output.jsonl").exists()
    assert folder.rows("parts") == expected
    again = folder.run("parts")  # there is nothing left to do
    assert (again.status, again.rows) == ("finished", COUNT)
    assert again.values["tokens"] > 0
    assert folder.bytes_of("parts") == folder.bytes_of("whole")


@pytest.mark.thorough
def test_rows_do_not_depend_on_how_many_are_written_at_a_time(folder: Folder) -> None:
    expected = folder.rows("whole-2")
    assert folder.rows("small", batch={"size": 2, "microbatch": 2}) == expected
    seen: list[int] = []

    class Watches:
        def subscriptions(self) -> Sequence[tuple[type[Any], Callable[[Any], None]]]:
            return [(RowsWritten, lambda event: seen.append(event.samples))]

    folder.job("watched").build(note=lambda _text: None, observers=[Watches()]).run()
    assert seen == [16, 32, COUNT]


@pytest.mark.thorough
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_limit_takes_the_first_samples(folder: Folder, packed: bool) -> None:
    whole = folder.rows(f"unlimited-{packed}", data=folder.data(packed))
    few = folder.rows(f"limited-{packed}", data=folder.data(packed), limit=5)
    assert few == whole[: len(few)]
    assert len(few) == 5 or (packed and 5 < len(few) < COUNT)


@pytest.mark.thorough
def test_parquet_holds_what_json_lines_hold(folder: Folder) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    task = {"name": "log_probs", "per": "token"}
    rows = folder.rows("as-jsonl", task=task)
    folder.run("as-parquet", task=task, writer="parquet")
    table = parquet.read_table(folder.path / "runs" / "as-parquet" / "output.parquet").to_pylist()
    assert [row["targets"] for row in table] == [row["targets"] for row in rows]
    assert [row["log_prob"] for row in table] == pytest.approx([row["log_prob"] for row in rows], rel=1e-12)


@pytest.mark.thorough
def test_a_training_job_makes_the_inference_job_over_its_run(folder: Folder, small_job: Callable[..., Path]) -> None:
    job = Job.load(
        small_job(
            trackers=[], metrics=[], lr_schedule=None, steps=2, nonfinite="skip", peft={"name": "lora", "r": 2},
            subscribers=[{"name": "early_stopping", "series": "loss"}],
        )
    )  # fmt: skip
    job.build(note=lambda _text: None).train()
    outcome = InferenceJob.over(job, task="perplexity").build(lambda _text: None).run()
    assert outcome.rows > 0
    assert (job.run.dir / f"{job.run.name}-perplexity" / "output.jsonl").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["looped_bfs", "dual_pipe_v"])
def test_layers_are_captured_of_stages_that_run_ahead(folder: Folder, schedule: str) -> None:
    task = {"name": "hidden_states", "layers": [0, 1], "pooling": "mean"}
    whole = folder.rows(f"one-stage-{schedule}", task=task)
    pipeline = {"name": schedule, **({"stages_per_rank": 2} if schedule == "looped_bfs" else {})}
    assert folder.rows(f"ahead-{schedule}", task=task, pipeline=pipeline) == whole


def test_no_group_is_smaller_than_what_fills_the_pipeline() -> None:
    pack: list[dict[str, torch.Tensor]] = [{} for _ in range(18)]
    assert [len(group) for group in groups_of(pack, 8)] == [9, 9]
    assert [len(group) for group in groups_of(pack[:3], 8)] == [3]


# --- bad input


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sections", "error", "text"),
    [
        ({"model": {"name": "qwen3", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2}},
         JobError, "model: inference needs trained weights; set 'model.pretrained' to"),
        ({"loading": {"weights": False}}, JobError, "inference needs trained weights"),
        ({"task": "classes"}, JobError, "the task needs a head of kind classification"),
        ({"task": "clases"}, JobError, "did you mean 'classes'"),
        ({"writer": "jsonlines"}, JobError, "unknown writer"),
        ({"task": {"name": "hidden_states", "layers": [2]}}, JobError, "there is no layer 2 in a model of 2"),
        ({"batch": {"size": 10, "microbatch": 4}}, JobError, "not a multiple of batch.microbatch 4"),
        ({"mesh": {"pp": 2}}, JobError, "mesh"),
        ({"loading": {"weights": False}}, JobError, "loading.weights: inference needs trained weights"),
        ({"peft": {"name": "lora", "r": 2}}, JobError, "peft: inference trains nothing"),
        ({"subscribers": ["early_stopping"]}, JobError, r"subscribers\[0\]: .* observes training only"),
        ({"subscribers": [{"name": "samples", "every": 1, "prompts": ["a"]}]}, JobError, "observes training only"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(
    folder: Folder, sections: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        folder.run("refused", **sections)
    assert not (folder.path / "runs" / "refused" / "output.jsonl").exists()


@pytest.mark.thorough
def test_rows_that_are_too_long_are_refused_or_cut_as_asked(folder: Folder) -> None:
    data = folder.data(sequence_length=16)
    with pytest.raises(DataError, match="rows are longer than 16 positions; increase it, or set 'too_long: cut'"):
        folder.run("long", data=data)
    with pytest.raises(DataError, match="rows are longer than 16 positions"):
        folder.run("long-in-a-mixture", data={"name": "mixture", "parts": [{"data": data, "weight": 1}]})
    rows = folder.rows("cut", data=data, too_long="cut")
    assert len(rows) == COUNT
    assert max(row["tokens"] for row in rows) == 16


def test_an_empty_split_is_refused(folder: Folder) -> None:
    with pytest.raises((DataError, JobError), match="split|samples"):
        folder.run("empty", data=folder.data(split="held_out", held_out=0.001))


def test_data_that_cannot_be_read_in_order_is_refused(folder: Folder) -> None:
    data = {"name": "toy_tokens", "vocab_size": 259, "sequence_length": 8}
    pytest.importorskip("d9d_testing.toy.plugin")
    import d9d_data.plugin
    import d9d_nn.plugin
    import d9d_qwen3.plugin
    from d9d_core.registry.registry import Registry
    from d9d_testing.toy import plugin as toy

    registry = Registry.of(d9d_nn.plugin, d9d_qwen3.plugin, d9d_data.plugin, toy)
    values = {**folder.job("shuffled").resolved(), "data": data}
    with pytest.raises(DataError, match="cannot be read once and in order"):
        InferenceJob.from_values(values, registry=registry).build(note=lambda _text: None)


@pytest.mark.thorough
def test_a_row_with_nan_ends_the_run_unless_it_is_to_be_kept(folder: Folder) -> None:
    from safetensors.torch import load_file, save_file

    broken = folder.path / "broken"
    shutil.copytree(folder.model, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    model = {"name": "qwen3", "pretrained": str(broken)}
    with pytest.raises(NonFiniteError, match="row 0: 'log_prob' has NaN or infinity"):
        folder.run("nan", model=model)
    rows = folder.rows("nan-kept", model=model, nonfinite="keep")
    assert {row["log_prob"] for row in rows} == {None}


@pytest.mark.thorough
def test_results_of_another_job_or_other_weights_are_not_mixed(folder: Folder) -> None:
    folder.rows("mine")
    with pytest.raises((JobError, CheckpointError), match=r"another job\.task\.per"):
        folder.run("mine", task={"name": "log_probs", "per": "token"})
    model = folder.path / "changing"
    shutil.copytree(folder.model, model)
    given = {"name": "qwen3", "pretrained": str(model)}
    folder.rows("weights", model=given)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    with pytest.raises((JobError, CheckpointError), match="another weights"):
        folder.run("weights", model=given)


# --- every layout, and kills


@pytest.mark.full
def test_kills_in_every_layout_leave_the_rows_of_an_undisturbed_process(
    tmp_path: Path, tool: Callable[[str], ModuleType]
) -> None:
    campaign = tool("inference_campaign")
    found = campaign.campaign(tmp_path, 4, 600, 0, ["one", "ep 2", "pp 2"], 1.2)
    assert found["kills"] == 4


@pytest.mark.full
def test_captured_layers_of_all_stages_arrive_at_the_last(
    folder: Folder, d9d: Callable[..., tuple[int, str, str]]
) -> None:
    task = {"name": "hidden_states", "layers": [0, 1], "pooling": "mean"}
    expected = folder.rows("one-process", task=task)
    job = folder.job("two-stages", task=task, mesh={"pp": 2}, pipeline="1f1b")
    path = folder.path / "stages.json"
    path.write_text(json.dumps(job.resolved()))
    status, _, err = d9d("infer", str(path), "--nproc", "2")
    assert status == 0, err
    for row, other in zip(expected, folder.read("two-stages"), strict=True):
        np.testing.assert_allclose(row["layer_0"], other["layer_0"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(row["layer_1"], other["layer_1"], rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_of_two_launches_of_one_directory_the_second_fails_before_it_reads_data_and_weights(folder: Folder) -> None:
    first = folder.job("twice").build(note=lambda _text: None)
    late = folder.job("twice", data={**folder.data(), "sources": ["gone.jsonl"]})
    with first.store.opened(), pytest.raises(CheckpointError, match="belongs to a running process"):
        late.build(note=lambda _text: None, owning=True)
    with pytest.raises(DataError, match=r"gone\.jsonl"):
        late.build(note=lambda _text: None, owning=True)
