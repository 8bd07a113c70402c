"""Texts of new jobs, exactly, and the facts about models and records from which they are written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import DataError, JobError
from d9d_data.new_job import command, found, samples
from d9d_data.new_job.found import Model, Records, proposed_length
from d9d_data.new_job.kinds import KINDS
from d9d_data.new_job.text import Plan, job_text
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.place import Place, Record

LLAMA = Model("models/base", "llama", "llama", 3 << 29, 512, True, False, Path("models/base"), True)
RECORDS = Records(("a.jsonl", "b c.jsonl"), 1234, {"format": "alpaca"}, 4321)
TAIL = """\
logging: {every: 10}
checkpoint: {every: 100}

# parallel: [activation_checkpointing] saves memory; trackers: [console, jsonl, wandb] also logs to wandb.
# `d9d plugins list` names all components, `d9d plugins show NAME` their fields.
"""
FOR_GPUS = """\
precision: {autocast: bfloat16} # float32 parameters, matrix products in bfloat16
parallel: [compile] # fused kernels; the first step takes longer
"""


def lines_of(kind: str, model: Model | None = None, records: Records = RECORDS, **more: Any) -> list[str]:
    return job_text(Plan(kind, "job.yaml", KINDS[kind], model, records, 64, 0, **more)).splitlines()


def line_of(start: str, kind: str, model: Model | None = None, records: Records = RECORDS, **more: Any) -> str:
    """Only line with a beginning."""
    (line,) = (line for line in lines_of(kind, model, records, **more) if line.lstrip(" #").startswith(start))
    return line


def test_the_job_of_a_new_chat_model_on_two_gpus() -> None:
    records = Records(("a.jsonl", "b c.jsonl"), -1, {}, None)
    assert job_text(Plan("sft", "my job.yaml", KINDS["sft"], None, records, 256, 2, tokenizer="tok")) == (
        """\
# Fine-tuning of all weights on conversations (SFT).
#   d9d check 'my job.yaml'                finds errors, and predicts memory
#   d9d data show 'my job.yaml'            prints samples; the learned tokens are marked
#   d9d train 'my job.yaml' --nproc 2      trains; continues after an interruption
run: {name: sft}
# A small model with random weights. For a published one: model: {pretrained: DIRECTORY}
model:
  name: qwen3
  vocab_size: 2048
  hidden_size: 128
  intermediate_size: 384
  num_layers: 4
  num_attention_heads: 4
  num_key_value_heads: 2
  max_positions: 256
  tie_embeddings: true
task: causal_lm

data: &data # the chat template renders each conversation; the assistant's tokens are learned
  name: chat
  sources: [a.jsonl, "b c.jsonl"]
  tokenizer: tok
  sequence_length: 256
  packing: best_fit # several conversations per sample; attention stays within each
  held_out: 0.05 # share of the records that is not learned, but evaluated
evaluation: {every: 50, data: {<<: *data, split: held_out}}
optimizer: {name: adamw, lr: 3.0e-3}
lr_schedule: {name: cosine, warmup_fraction: 0.1}
batch: {size: 16, microbatch: 8} # samples per step, and per forward: as many as fit
steps: 200
"""
        + FOR_GPUS
        + TAIL
    )


def test_the_job_of_a_published_model() -> None:
    assert job_text(Plan("lora", "lora.yaml", KINDS["lora"], LLAMA, RECORDS, 512, 0)) == (
        """\
# Fine-tuning on conversations with LoRA: little memory, and an adapter of some megabytes.
#   d9d check lora.yaml      finds errors, and predicts memory
#   d9d data show lora.yaml  prints samples; the learned tokens are marked
#   d9d train lora.yaml      trains; continues after an interruption
run: {name: lora}
model: {pretrained: models/base} # llama, 1.5 GiB of weights
task: causal_lm
# The weights stay as they are; each matrix gets two small ones of rank r that train. alpha / r scales their product.
peft: {name: lora, r: 16, alpha: 32}

data: &data # the chat template renders each conversation; the assistant's tokens are learned
  name: chat
  sources: [a.jsonl, "b c.jsonl"] # 1,234 records
  format: alpaca
  sequence_length: 512 # the longest of the first records has 4,321 tokens
  packing: best_fit # several conversations per sample; attention stays within each
  held_out: 0.05 # share of the records that is not learned, but evaluated
evaluation: {every: 50, packs: all, data: {<<: *data, split: held_out}}
optimizer: {name: adamw, lr: 2.0e-4}
lr_schedule: {name: cosine, warmup_fraction: 0.1}
batch: {size: 16, microbatch: 1} # samples per step, and per forward: as many as fit
epochs: 2
"""
        + TAIL
    )


def test_the_job_of_a_head_on_one_gpu_with_few_records() -> None:
    model = replace(LLAMA, predicts_further=True, type="")
    records = Records(("c.csv",), 3, {"label": "true"}, None, classes=1, few=True)
    assert job_text(Plan("classification", "c.yaml", KINDS["classification"], model, records, 64, 1)) == (
        """\
# Classification: learns the label of each text.
#   d9d check c.yaml      finds errors, and predicts memory
#   d9d data show c.yaml  prints samples; the learned tokens are marked
#   d9d train c.yaml      trains; continues after an interruption
run: {name: classification}
model:
  name: llama # a checkpoint, 1.5 GiB of weights
  pretrained: models/base
  tie_embeddings: false # there is no head that could share the weight
  mtp: {depths: 0} # this task does not train the layers that predict further tokens
  heads: {label: {kind: classification, num_classes: 2}}
task: classification

data: &data
  name: labelled
  sources: [c.csv] # 3 records
  label: "true"
  sequence_length: 64
# Too few records to hold some out. With 20 or more, add held_out to data, and evaluation below it:
#   held_out: 0.05
# evaluation: {every: 50, packs: all, data: {<<: *data, split: held_out}}
optimizer: {name: adamw, lr: 2.0e-5}
lr_schedule: {name: cosine, warmup_fraction: 0.1}
batch: {size: 2, microbatch: 2} # samples per step, and per forward: as many as fit
epochs: 2
"""
        + FOR_GPUS
        + TAIL
    )


def test_models_have_the_vocabulary_and_the_layers_that_their_task_needs() -> None:
    for kind, tokenizer, size in (("pretrain", "", 2048), ("embedding", "", 257), ("embedding", "tok", 2048)):
        assert line_of("vocab_size", kind, tokenizer=tokenizer) == f"  vocab_size: {size}"
    assert line_of("tokenizer", "pretrain") == "  tokenizer: {bpe: 2048} # trained on these texts"
    assert not any(line.startswith("  tokenizer") for line in lines_of("embedding"))
    assert not any(line.startswith("  tokenizer") for line in lines_of("pretrain", LLAMA))
    assert lines_of("embedding")[14:16] == [
        "  max_positions: 128",
        "  heads: {vector: {kind: embedding, pooling: last}}",
    ]
    further = replace(LLAMA, predicts_further=True, tied=False)
    assert lines_of("dpo", further)[5:8] == [
        "model:", "  pretrained: models/base # llama, 1.5 GiB of weights",
        "  mtp: {depths: 0} # this task does not train the layers that predict further tokens",
    ]  # fmt: skip
    assert lines_of("sft", further)[5] == "model: {pretrained: models/base} # llama, 1.5 GiB of weights"
    assert lines_of("embedding", replace(further, predicts_further=False))[5:9] == [
        "model:", "  name: llama # llama, 1.5 GiB of weights", "  pretrained: models/base",
        "  heads: {vector: {kind: embedding, pooling: last}}",
    ]  # fmt: skip
    assert line_of("heads", "classification", records=replace(RECORDS, classes=7)).endswith("num_classes: 7}}")
    teacher = '  teacher: {pretrained: "big model"} # has the same vocabulary'
    assert line_of("teacher", "distillation", LLAMA, teacher="big model") == teacher


@pytest.mark.parametrize(
    ("kind", "new", "count", "few", "batch", "length"),
    [
        ("sft", False, 6400, False, "16, microbatch: 1", "epochs: 1"),
        ("sft", False, 6399, False, "16, microbatch: 1", "epochs: 2"),
        ("sft", False, -1, False, "16, microbatch: 1", "epochs: 1"),
        ("sft", True, 6400, False, "16, microbatch: 8", "steps: 200"),
        ("sft", False, 17, False, "16, microbatch: 1", "epochs: 2"),
        ("sft", False, 16, False, "16, microbatch: 1", "epochs: 2"),
        ("sft", False, 15, False, "8, microbatch: 1", "epochs: 2"),
        ("sft", True, 5, False, "4, microbatch: 4", "steps: 200"),
        ("sft", True, 1, True, "1, microbatch: 1", "steps: 200"),
        ("sft", True, 0, True, "1, microbatch: 1", "steps: 200"),
        ("classification", False, 33, False, "32, microbatch: 8", "epochs: 2"),
        ("classification", False, 32, False, "16, microbatch: 8", "epochs: 2"),  # one of 32 is held out
        ("embedding", False, -1, False, "64, microbatch: 16", "epochs: 1"),
        ("pretrain", False, 3, False, "16, microbatch: 1", "epochs: 2"),
        ("pretrain", False, 3, True, "1, microbatch: 1", "epochs: 2"),
        ("pretrain", True, -1, True, "16, microbatch: 8", "steps: 200"),
    ],
)
def test_batches_are_filled_by_the_records_to_learn(
    kind: str, new: bool, count: int, few: bool, batch: str, length: str
) -> None:
    lines = lines_of(kind, None if new else LLAMA, replace(RECORDS, count=count, few=few))
    place = next(place for place, line in enumerate(lines) if line.startswith("batch:"))
    assert lines[place] == f"batch: {{size: {batch}}} # samples per step, and per forward: as many as fit"
    assert lines[place + 1] == length


@pytest.mark.parametrize(("count", "packed"), [(-1, True), (0, False), (999, False), (1000, True)])
def test_many_conversations_are_packed_and_counted_ones_are_all_evaluated(count: int, packed: bool) -> None:
    lines = lines_of("sft", records=replace(RECORDS, count=count))
    assert any("packing: best_fit" in line for line in lines) == packed
    assert any("packs: all" in line for line in lines) == (count >= 0)
    assert line_of("sources", "sft", records=replace(RECORDS, count=count)) == (
        '  sources: [a.jsonl, "b c.jsonl"]' + (f" # {count:,} records" if count >= 0 else "")
    )
    assert not any("packing" in line for line in lines_of("dpo", LLAMA, replace(RECORDS, count=count)))


def test_words_of_yaml_are_quoted() -> None:
    shown = {"null": '"null"', "true": '"true"', "false": '"false"', "a-b_c.d/9": "a-b_c.d/9", "a:b": '"a:b"', "": '""'}
    records = replace(RECORDS, fields={f"field{number}": text for number, text in enumerate(shown)})
    lines = lines_of("pretrain", records=records)
    assert [line.split(": ")[1] for line in lines if line.startswith("  field")] == list(shown.values())


# --- facts


@pytest.mark.parametrize(
    ("longest", "positions", "length"),
    [
        (None, None, 4096), (None, 512, 512), (None, 9000, 4096), (0, None, 64), (1, None, 128), (53, None, 128),
        (54, None, 128), (320, None, 448), (321, None, 512), (320, 100, 100), (5000, None, 4096),
    ],
)  # fmt: skip
def test_samples_hold_a_fifth_more_than_the_longest_record(
    longest: int | None, positions: int | None, length: int
) -> None:
    records = replace(RECORDS, longest=longest)
    assert proposed_length(records, replace(LLAMA, positions=positions)) == length
    if positions is None:
        assert proposed_length(records, None) == length


def looked_at(config: dict[str, Any] | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(found, "find_model", lambda directory, registry: (f"read by {registry}", directory))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    registry: Any = "them"
    return found.look_at_model(str(folder), registry)


def test_facts_of_a_model_are_in_its_config_or_the_part_about_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Model(str(tmp_path), "read by them", "", 0, None, True, False, None, False)
    assert looked_at(None, tmp_path, monkeypatch) == plain
    (tmp_path / "a.safetensors").write_bytes(b"abc")
    (tmp_path / "b.safetensors").write_bytes(b"de")
    (tmp_path / "c.bin").write_bytes(b"f")
    config = {"model_type": "m", "max_position_embeddings": 7, "tie_word_embeddings": False}
    model = replace(plain, type="m", size=5, positions=7, tied=False)
    assert looked_at(config, tmp_path, monkeypatch) == model
    inner = {"model_type": "m", "text_config": config, "max_position_embeddings": 9}
    assert looked_at(inner, tmp_path, monkeypatch) == replace(model, positions=9)
    for wrong in (0, -1, "7", 1.5):
        found_model = looked_at({**config, "max_position_embeddings": wrong, "text_config": 3}, tmp_path, monkeypatch)
        assert found_model == replace(model, positions=None)
    for further, predicts in ({"depths": 1}, True), ({"depths": 0}, False), ({}, False), (3, False):
        own = {**config, "d9d": {"mtp": further}}
        assert looked_at(own, tmp_path, monkeypatch) == replace(model, predicts_further=predicts)
    assert looked_at({**config, "d9d": 3}, tmp_path, monkeypatch) == model
    (tmp_path / "tokenizer.json").write_text("{}")
    assert looked_at(config, tmp_path, monkeypatch) == replace(model, tokenizer=tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert looked_at(config, tmp_path, monkeypatch) == replace(model, tokenizer=tmp_path, template=True)


def test_a_missing_model_that_has_the_name_of_a_repository_can_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Any = None
    for name, advice in (
        ("no-org/a.b_c", "; download it: hf download no-org/a.b_c --local-dir ./a.b_c"),
        ("nowhere", ""), ("no/such/place", ""), ("no dir/x", ""),
    ):  # fmt: skip
        with pytest.raises(JobError) as caught:
            found.look_at_model(name, registry)
        assert str(caught.value) == f"--model: {name} does not exist{advice}"


def test_gpus_are_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"device {index}")
    assert found.gpus() == (3, "device 0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert found.gpus() == (0, "")


def record(**values: Any) -> Record:
    return Record(values, Place(SourceFile("a.jsonl", "jsonl"), 1))


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("sft", {"chosen": "a", "rejected": "b"}, "has the fields chosen and rejected; use 'd9d new job dpo'"),
        ("sft", {"chosen": "a", "rejected": None}, None),
        ("dpo", {"prompt": "a", "completion": "b"}, "is a conversation without a rejected answer; use 'd9d new"),
        ("dpo", {"prompt": "a", "completion": "b", "rejected": "c"}, None),
        ("dpo", {"a": 1}, None),
        ("classification", {"text": ["a"], "label": 1}, "has a list of words in text, but classification reads one"),
        ("classification", {"words": ["a"]}, "has a list of words in words"),
        ("classification", {"text": "a", "class": [1]}, "has a list of labels in class, but classification learns one"),
        ("classification", {"text": "a", "class": 1, "more": [1]}, None),
        ("pretrain", {"text": ["a"], "label": [1], "chosen": "a", "rejected": "b"}, None),
    ],
)  # fmt: skip
def test_records_of_another_kind_of_job_are_told(kind: str, values: dict[str, Any], says: str | None) -> None:
    if says is None:
        found._check_kind(record(**values), KINDS[kind])
        return
    with pytest.raises(DataError) as caught:
        found._check_kind(record(**values), KINDS[kind])
    assert str(caught.value).startswith(f"--data: a.jsonl:1 {says}")


def test_fields_are_the_first_usual_names_that_have_a_value() -> None:
    kind = KINDS["embedding"]
    values = {"anchor": "a", "question": "b", "query": None, "text2": "c", "pos": "d"}
    assert found._fields_of(record(**values), kind) == {"query": "question", "positive": "pos"}
    with pytest.raises(DataError) as caught:
        found._fields_of(record(query="a"), kind)
    assert str(caught.value) == (
        "--data: a.jsonl:1 has none of the fields positive, pos, answer, document, passage, sentence2, text2 for the "
        "positive of a record (it has query); rename one, or name it in the job file: data.positive"
    )
    with pytest.raises(DataError, match=r"\(it has no fields\)"):
        found._fields_of(record(), kind)
    assert found._fields_of(record(text="a"), KINDS["sft"]) == {}


def test_negatives_are_one_text_or_a_list_of_them() -> None:
    kind = KINDS["embedding"]
    assert found._negatives_of(record(neg="a", negatives=["b", "c"]), kind) == {
        "negative": "negatives",
        "negatives": "2",
    }
    assert found._negatives_of(record(hard_negative="a"), kind) == {"negative": "hard_negative", "negatives": "1"}
    assert found._negatives_of(record(negative=[], other=["a"]), kind) == {}
    assert found._negatives_of(record(negative="a"), KINDS["dpo"]) == {}


def counted(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> Sequence[Any]:
    """Files with so many records, whose labels are 0, 1 and so on."""

    def read(file: Any, **_: Any) -> Any:
        return (record(label=number) for number in range(sizes[file]))

    monkeypatch.setattr(found, "read_records", read)
    monkeypatch.setattr(found, "_LABELS_LOOKED_AT", 5)
    return list(sizes)


def test_records_are_counted_up_to_a_limit_and_labels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes, count, classes in (
        ({"a": 2, "b": 3}, 5, 3), ({"a": 5}, 5, 5), ({"a": 6}, -1, 5), ({"a": 2, "b": 4}, -1, 3), ({}, 0, 0),
        ({"a": 4, "b": 9}, -1, 4), ({"a": 0, "b": 1}, 1, 1),
    ):  # fmt: skip
        files = counted(monkeypatch, **sizes)
        assert found._count(files) == count
        assert found._classes(files, {"label": "label"}) == classes
        assert found._classes(files, {"field": "text"}) == 0


def written(tmp_path: Path, name: str, *records: dict[str, Any]) -> str:
    (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in records))
    return str(tmp_path / name)


def test_facts_of_records_name_the_fields_that_the_job_has_to_name(tmp_path: Path) -> None:
    def looked(kind: str, *records: dict[str, Any], tokenizer: Path | None = None) -> Records:
        return found.look_at_records([written(tmp_path, "a.jsonl", *records)], KINDS[kind], tokenizer)

    sources = (str(tmp_path / "a.jsonl"),)
    assert looked("pretrain", *[{"text": "a", "id": 1, "none": None}] * 19) == Records(
        sources, 19, {"field": "text"}, None, 0, ("id",), True
    )
    assert looked("pretrain", *[{"body": "a", "id": 1}, *[{"body": "b", "more": 2}] * 19]) == Records(
        sources, 20, {"field": "body"}, None, 0, ("id", "more"), False
    )
    assert looked("embedding", {"query": "a", "answer": "b", "negative": "c"}) == Records(
        sources, 1, {"positive": "answer", "negatives": "1"}, None, 0, (), True
    )
    labels = [{"text": "a", "label": kind} for kind in "xyx"]
    assert looked("classification", *labels) == Records(sources, 3, {"field": "text"}, None, 2, (), True)
    alpaca = {"instruction": "a", "input": "b", "output": "c", "tools": None, "id": 1}
    assert looked("sft", alpaca) == Records(sources, 1, {"format": "alpaca"}, None, 0, ("id",), True)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert looked("sft", {"messages": turns, "tools": []}) == Records(sources, 1, {}, None, 0, (), True)
    with pytest.raises(DataError, match=r"^--data: .*a\.jsonl:1 has the fields of no known format"):
        looked("sft", {"x": 1})
    with pytest.raises(DataError, match=r"a\.jsonl has no records; give records such as"):
        looked("pretrain")


def test_plain_files_are_few_below_twenty(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("a")
    assert found.look_at_records([str(tmp_path)], KINDS["pretrain"], None) == Records((str(tmp_path),), -1, {}, None)
    (tmp_path / "0.txt").unlink()
    few = found.look_at_records([str(tmp_path)], KINDS["pretrain"], None)
    assert few == Records((str(tmp_path),), -1, {}, None, few=True)
    assert not found.look_at_records(["python:topics"], KINDS["pretrain"], None).few


# --- the command


@pytest.mark.parametrize(
    ("error", "written_files", "says"),
    [
        (OSError(28, "No space", "out/job.yaml"), [], "cannot write out/job.yaml: No space; free space, or choose"),
        (OSError(28, "No space"), ["out/tok"], "cannot write out/tok: No space; free space"),
        (OSError(28, "No space", "out/tok/a.json"), ["out/tok"], "cannot write out/tok/a.json: No space"),
        (OSError(28, "No space"), [], "cannot write out/job.yaml: No space"),
        (OSError(13, "Denied", "in/a.jsonl"), ["out/tok"], "cannot read in/a.jsonl: Denied; make it readable"),
        (OSError("odd"), [], "cannot write out/job.yaml: odd;"),
    ],
)
def test_errors_of_files_name_what_was_read_or_written(error: OSError, written_files: list[str], says: str) -> None:
    found_error = command._failure(error, [Path(name) for name in written_files], Path("out/job.yaml"))
    assert str(found_error).startswith(says)


def test_what_was_written_before_a_failure_is_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.touch()
    with pytest.raises(KeyError), command._only_whole(tmp_path / "job.yaml") as files:  # noqa: PT012
        (tmp_path / "tok").mkdir()
        (tmp_path / "tok" / "a").touch()
        (tmp_path / "job.yaml").touch()
        files += [tmp_path / "tok", tmp_path / "job.yaml", tmp_path / "never"]
        raise KeyError
    assert list(tmp_path.iterdir()) == [kept]
    with command._only_whole(tmp_path / "job.yaml") as files:
        files.append(kept)
    assert kept.exists()


def test_samples_and_tokenizers_that_exist_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(samples, "write_tokenizer", made.append)
    monkeypatch.setattr(samples, "write_samples", lambda kind, file: made.append((kind.dataset, file)))
    files: list[Path] = []
    directory, chats = tmp_path / "tokenizer", tmp_path / "conversations.jsonl"
    for _ in range(2):
        assert command._new_tokenizer(directory, files) == directory
        assert command._sample_data(KINDS["sft"], tmp_path, files) == str(chats)
        directory.mkdir(exist_ok=True)
        chats.touch()
    assert (made, files) == ([directory, ("chat", chats)], [directory, chats])
    sources = {kind: command._sample_data(KINDS[kind], tmp_path, []) for kind in ("pretrain", "classification")}
    assert sources == {"pretrain": "python:topics", "classification": "python:kinds"}


def test_answers_are_the_first_paragraphs_of_short_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    def documented(text: str | None, module: str = "one") -> Any:
        return type("Member", (), {"__doc__": text, "__module__": module, "__call__": lambda self: None})()

    longest = "x" * 400
    one = SimpleNamespace(
        b=documented("b(x)\n\nGives\n  b.\n\nMore."), a=documented("Gives a."), none=documented(None),
        _hidden=documented("Hidden."), long=documented(longest), longer=documented(longest + "x"),
        elsewhere=documented("Of two.", "two"), unknown=documented("Of three.", "three"), number=3, wrong=ValueError,
    )  # fmt: skip
    monkeypatch.setattr(samples, "_MODULES", ("one", "two", "builtins"))
    monkeypatch.setattr(samples, "_TYPES", ())
    modules = {"one": one, "two": SimpleNamespace(), "builtins": SimpleNamespace(f=documented("Built in.", "builtins"))}
    monkeypatch.setattr(samples.importlib, "import_module", modules.__getitem__)
    assert list(samples.answers()) == [
        ("one.a", "Gives a."), ("one.b", "Gives b."), ("one.long", longest), ("one.unknown", "Of three."),
        ("f", "Built in."),
    ]  # fmt: skip
