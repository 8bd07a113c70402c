"""Jobs that ``d9d new job`` writes load, fit the model and the records, and name the choices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import D9dError, DataError, JobError
from d9d_core.job import JobFile
from d9d_data.chat.template import ChatTemplate
from d9d_data.new_job.command import app
from d9d_data.new_job.kinds import KINDS
from d9d_data.new_job.samples import answers, write_samples, write_tokenizer
from d9d_data.tokenizer.select import make_tokenizer
from d9d_engine.job import Job
from typer.testing import CliRunner

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
}  # fmt: skip


#: A model that predicts further tokens, as d9d exports it.
FURTHER = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "vocab_size": 2048, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    "rope_theta": 1e4, "d9d": {"mtp": {"depths": 1}},
}  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer") / "it"
    write_tokenizer(directory)
    return directory


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("d9d_data.new_job.found.gpus", lambda: (0, ""))
    return tmp_path


@pytest.fixture
def model(place: Path, tokenizer: Path) -> Path:
    directory = place / "base model"
    directory.mkdir()
    for file in tokenizer.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return directory


def write(*arguments: str) -> str:
    """Run the command, and return its output."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def lines(file: Path, *records: dict[str, Any]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def chat(count: int) -> list[dict[str, Any]]:
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A fox. " * 60}]
    return [{"messages": turns}] * count


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.tunes])
def test_a_job_from_nothing_loads(kind: str, place: Path) -> None:
    output = write(kind)
    job = JobFile.load(place / f"{kind}.yaml")
    assert job.run.name == kind
    assert f"d9d train {kind}.yaml" in output
    assert "a small set to try the job with" in output
    assert (place / f"{kind}.yaml").read_text().startswith(f"# {KINDS[kind].title}.\n")


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_for_a_model_loads_and_uses_it(kind: str, place: Path, model: Path) -> None:
    teacher = ["--teacher", str(model)] if kind == "distillation" else []
    output = write(kind, "--model", str(model), *teacher)
    job = JobFile.load(place / f"{kind}.yaml")
    assert job.model.pretrained == str(model)
    assert (job.peft is not None) == (kind in ("lora", "dpo"))
    assert f"llama in {model}, read by 'llama'" in output.replace("\n", "")
    heads = {"classification": "classification", "embedding": "embedding"}
    assert [head.kind for head in job.model.heads.values()] == [heads.get(kind, "causal_lm")]
    assert job.evaluation is not None


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_only_next_tokens_are_predicted_by_tasks_that_train_no_further_ones(
    kind: str, place: Path, model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(FURTHER))
    write(kind, "--model", str(model), *(["--teacher", str(model)] if kind == "distillation" else []))
    depths = JobFile.load(place / f"{kind}.yaml").model.mtp.depths
    assert depths == (1 if kind in ("pretrain", "sft", "lora") else 0)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["lora", "dpo", "classification"])
def test_a_job_for_few_records_trains_to_its_end(kind: str, place: Path, model: Path) -> None:
    records: dict[str, list[dict[str, Any]]] = {
        "lora": chat(24),
        "dpo": [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(24)],
        "classification": [{"text": f"{n} foxes", "label": "odd" if n % 2 else "even"} for n in range(24)],
    }
    write(kind, "--model", str(model), "--data", lines(place / "few.jsonl", *records[kind]))
    overrides = ["loading.weights=false", "batch.size=4", "batch.microbatch=2"]
    assert Job.load(place / f"{kind}.yaml", overrides=overrides).build(lambda _: None).train().status == "finished"


def test_the_length_of_samples_follows_the_records_and_the_model(place: Path, model: Path) -> None:
    short, long = lines(place / "short.jsonl", *chat(3)), lines(place / "long.jsonl", {"messages": [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": "many words " * 2000}]})  # fmt: skip
    tokens = make_tokenizer(str(model), None, ()).encode(["user Who? assistant " + "A fox. " * 60])[0]
    output = write("sft", "--model", str(model), "--data", short)
    length = JobFile.load(place / "sft.yaml").data.sequence_length
    assert len(tokens) < length <= len(tokens) * 1.2 + 128
    assert length % 64 == 0
    assert f"sequence_length: {length}" in output
    write("sft", "--model", str(model), "--data", long, "--output", "long.yaml")
    assert JobFile.load(place / "long.yaml").data.sequence_length == LLAMA["max_position_embeddings"]


def test_fields_of_records_are_found_and_told(place: Path) -> None:
    texts = lines(place / "web.jsonl", *[{"content": "a text", "id": 3}] * 5)
    assert "data: 5 records, field = content" in write("pretrain", "--data", texts)
    assert JobFile.load(place / "pretrain.yaml").data.field == "content"
    labelled = lines(place / "l.jsonl", *({"sentence": "a", "category": kind} for kind in ("x", "y", "z", "x")))
    assert "label = category" in write("classification", "--data", labelled)
    job = JobFile.load(place / "classification.yaml")
    assert (job.data.field, job.data.label, job.model.heads["label"].num_classes) == ("sentence", "category", 3)
    pairs = lines(place / "p.jsonl", *[{"question": "a", "answer": "b"}] * 4)
    write("embedding", "--data", pairs)
    assert JobFile.load(place / "embedding.yaml").data.query == "question"


def test_numbers_of_classes_may_have_gaps(place: Path) -> None:
    write("classification", "--data", lines(place / "l.jsonl", *({"text": "a", "label": n} for n in (1, 4))))
    assert JobFile.load(place / "classification.yaml").model.heads["label"].num_classes == 5


def test_plain_texts_need_no_field(place: Path) -> None:
    (place / "a.txt").write_text("a text")
    assert "data: plain text\n" in write("pretrain", "--data", "a.txt")
    assert JobFile.load(place / "pretrain.yaml").data.field is None


def test_a_machine_with_gpus_gets_settings_for_them(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_data.new_job.found.gpus", lambda: (2, "GPU of tests"))
    output = write("pretrain")
    text = (place / "pretrain.yaml").read_text()
    assert "precision: {autocast: bfloat16}" in text
    assert "d9d train pretrain.yaml --nproc 2" in text
    assert "device: 2 x GPU of tests" in output
    assert "--nproc 2" in output


def test_a_file_that_exists_is_kept(place: Path) -> None:
    (place / "sft.yaml").write_text("mine")
    with pytest.raises(JobError, match="sft.yaml exists; choose another file: --output"):
        write("sft")
    assert (place / "sft.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["distilation"], "no kind of job 'distilation'; did you mean distillation"),
        (["x"], "use one of pretrain, sft"),
        (["lora"], "lora starts from a trained model: --model"),
        (["distillation"], "--model DIRECTORY --teacher DIRECTORY"),
        (["distillation", "--model", "base model"], "needs a larger model .*--teacher"),
        (["sft", "--teacher", "base model"], "--teacher: sft has no teacher"),
        (
            ["sft", "--model", "Qwen/Qwen3-0.6B"],
            "does not exist; download it: hf download Qwen/Qwen3-0.6B --local-dir ./Qwen3",
        ),
        (["sft", "--model", "nowhere"], "--model: nowhere does not exist$"),
        (["sft", "--data", "absent.jsonl"], "absent.jsonl' does not exist"),
        (["classification", "--data", "t.txt"], "t.txt is plain text without fields; give records such as"),
        (["pretrain", "--data", "other.jsonl"], "other.jsonl:1 has none of the fields text, content.*it has fox"),
        (["pretrain", "--data", "empty.jsonl"], "empty.jsonl has no records"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_and_leaves_no_job(
    arguments: list[str], text: str, place: Path, model: Path
) -> None:
    assert model.is_dir()
    (place / "t.txt").write_text("a text")
    lines(place / "other.jsonl", {"fox": 1})
    (place / "empty.jsonl").write_text("")
    with pytest.raises(D9dError, match=text):
        write(*arguments)
    assert list(place.glob("*.yaml")) == []


def test_the_template_of_a_new_tokenizer_marks_only_replies(tokenizer: Path) -> None:
    turns = [("user", "a?"), ("assistant", "b."), ("user", "c?"), ("assistant", "d.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rendering = ChatTemplate((tokenizer / "chat_template.jinja").read_text()).render(messages)
    assert [rendering.text[begin:end] for begin, end in rendering.marks or ()] == ["b.<|im_end|>", "d.<|im_end|>"]
    turn = "<|im_start|>{}\n{}<|im_end|>\n"
    assert rendering.text == "".join(turn.format(*pair) for pair in turns)


def test_a_model_without_a_chat_template_is_refused_for_conversations(place: Path, model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(JobError, match="has no chat template, so it is probably a base model"):
        write("lora", "--model", str(model))
    write("pretrain", "--model", str(model))


def test_a_job_that_is_not_valid_is_not_left_behind(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_data.new_job.text.job_text", lambda _plan: "model: 3\n")
    with pytest.raises(JobError):
        write("pretrain")
    assert not (place / "pretrain.yaml").exists()


def test_a_preferred_sample_differs_from_the_rejected_one(place: Path, model: Path) -> None:
    write("dpo", "--model", str(model))
    records = [json.loads(line) for line in (place / "preferences.jsonl").read_text("utf-8").splitlines()]
    assert len(records) > 200
    assert [record for record in records if record["chosen"] == record["rejected"]] == []


def test_the_rejected_answer_is_the_nearest_other_answer_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"a": "one", "b": "two", "c": "two", "d": "three"}
    monkeypatch.setattr("d9d_data.new_job.samples.answers", lambda: iter(found.items()))
    write_samples(KINDS["dpo"], tmp_path / "pairs.jsonl")
    records = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert [(record["chosen"], record["rejected"]) for record in records] == [
        ("one", "three"), ("two", "one"), ("two", "one"), ("three", "two"),
    ]  # fmt: skip


def test_samples_are_many_and_differ() -> None:
    found = dict(answers())
    assert len(found) > 200
    assert {"math.sin", "str.join", "len"} <= found.keys()
    assert "statistics.groupby" not in found


def test_records_of_a_wrong_kind_are_refused(place: Path, tokenizer: Path) -> None:
    (place / "broken.jsonl").write_text("{")
    with pytest.raises(DataError, match="broken.jsonl"):
        write("pretrain", "--data", "broken.jsonl")
    assert tokenizer.is_dir()


PAIR = {"anchor": "a fox", "positive": "an animal"}
TURNS = chat(1)[0]["messages"]
IMAGE = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, TURNS[1]]


@pytest.mark.parametrize(
    ("negatives", "expected"),
    [({"negative": "a stone"}, ("negative", 1)), ({"neg": ["a stone", "a brick"]}, ("neg", 2))],
)
def test_negatives_of_pairs_are_used(place: Path, negatives: dict[str, Any], expected: tuple[str, int]) -> None:
    output = write("embedding", "--data", lines(place / "p.jsonl", *[PAIR | negatives] * 3))
    data = JobFile.load(place / "embedding.yaml").data
    assert (data.negative or "negative", data.negatives) == expected
    assert "fields not used" not in output


def test_fields_that_are_not_used_are_told(place: Path) -> None:
    output = write("embedding", "--data", lines(place / "p.jsonl", *[PAIR | {"score": 0.1}] * 3))
    assert "fields not used: score; every pair counts as positive" in output
    assert "fields not used: id\n" in write("sft", "--data", lines(place / "c.jsonl", chat(1)[0] | {"id": 3}))


def test_a_job_for_few_records_evaluates_nothing_and_says_so(place: Path) -> None:
    output = write("sft", "--data", lines(place / "one.jsonl", *chat(1)))
    job = JobFile.load(place / "sft.yaml")
    assert (job.evaluation, job.data.held_out, job.batch.size) == (None, 0, 1)
    assert "data: 1 record\n" in output
    assert "evaluation: none" in output
    assert "#   held_out: 0.05" in (place / "sft.yaml").read_text()
    write("sft", "--data", lines(place / "twenty.jsonl", *chat(20)), "--output", "twenty.yaml")
    assert JobFile.load(place / "twenty.yaml").evaluation is not None


@pytest.mark.parametrize(
    ("kind", "records", "text"),
    [
        ("sft", [*chat(2), {"messages": TURNS[:1]}], "a.jsonl:3"),
        ("sft", [*chat(2), {"messages": IMAGE}], "a.jsonl:3"),
        ("sft", [*chat(2), {"conversations": TURNS}], "a.jsonl:3 has no field 'messages'"),
        ("embedding", [PAIR, PAIR | {"positive": ["a"]}], "a.jsonl:2 has no text in positive"),
        ("classification", [{"text": "a", "label": "x"}, {"text": "b", "label": ["x"]}], "a.jsonl:2: label is a list"),
        ("classification", [{"text": "a", "labels": ["x"]}], "list of labels in labels.*one record per text"),
        ("classification", [{"tokens": ["a"], "ner_tags": [1]}], "token_classification.*per: word"),
        ("sft", [{"prompt": "a", "chosen": "b", "rejected": "c"}], "d9d new job dpo"),
    ],
)
def test_records_that_training_would_refuse_are_refused_and_leave_nothing(
    kind: str, records: list[dict[str, Any]], text: str, place: Path
) -> None:
    with pytest.raises(DataError, match=text):
        write(kind, "--data", lines(place / "a.jsonl", *records))
    assert [file.name for file in place.iterdir()] == ["a.jsonl"]


def test_conversations_are_no_preferences(place: Path, model: Path) -> None:
    with pytest.raises(DataError, match="without a rejected answer; use 'd9d new job sft'"):
        write("dpo", "--model", str(model), "--data", lines(place / "a.jsonl", *chat(2)))


def test_files_of_different_formats_are_refused(place: Path) -> None:
    first = lines(place / "a.jsonl", *chat(2))
    second = lines(place / "b.jsonl", {"instruction": "a", "output": "b"})
    with pytest.raises(DataError, match=r"b.jsonl:1 has no field 'messages'"):
        write("sft", "--data", first, "--data", second)


def test_printed_commands_quote_the_path(place: Path) -> None:
    assert "d9d train 'my jöb.yaml'" in write("pretrain", "--output", "my jöb.yaml")
    assert "d9d check 'my jöb.yaml'" in (place / "my jöb.yaml").read_text()


def test_a_file_that_cannot_be_written_is_told_with_its_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(JobError, match=r"cannot write tokenizer: No space left on device"):
        write("sft")
    assert list(place.iterdir()) == []
    with pytest.raises(JobError, match="directory absent does not exist"):
        write("sft", "--output", "absent/sft.yaml")
