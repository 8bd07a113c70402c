"""The dataset ``chat``: conversations in files become samples of which the assistant's tokens are learned."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.chat.formats import read_conversation
from d9d_data.config import ChatConfig
from d9d_data.stream.binned import BinStream
from d9d_data.stream.bins import best_fit, cut_pieces, pack_bins
from d9d_data.stream.chat import build_chat
from d9d_data.stream.documents import DocumentStream
from d9d_data.stream.text import TextStream
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

Stream = DocumentStream | TextStream | BinStream


Open = Callable[..., Stream]


@pytest.fixture
def stream(model: Path, tmp_path: Path) -> Open:
    """Open a stream of conversations with these answers."""

    def build(*records: Any, notes: list[str] | None = None, batch: int = 1, **values: Any) -> Stream:
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        fields = {"sources": [str(tmp_path / "data.jsonl")], "sequence_length": 64, "shuffle": False, **values}
        note = (lambda _text: None) if notes is None else notes.append
        context = DataContext(0, batch, 1, tmp_path / "cache", note=note, pretrained=str(model))
        return build_chat(ChatConfig.model_validate(fields), context)

    return build


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]}


def text_of(model: Path, ids: list[int]) -> str:
    return str(Tokenizer.from_file(str(model / "tokenizer.json")).decode(ids, skip_special_tokens=False))


def learned(model: Path, batch: dict[str, torch.Tensor], row: int = 0) -> str:
    targets = batch["targets"][row]
    return text_of(model, targets[targets >= 0].tolist())


@pytest.mark.thorough
def test_what_the_assistant_writes_is_learned_and_nothing_else(model: Path, stream: Open) -> None:
    reader = stream(chat("ab", "c", "d", "efg"), bucket_window=1)
    (batch,) = reader.next_pack()
    assert learned(model, batch) == "c<|im_end|>efg<|im_end|>"
    length = int(batch["lengths"])
    whole = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n"
    assert text_of(model, batch["tokens"][0, :length].tolist()).startswith(whole)
    assert batch["tokens"].shape[1] % 8 == 0
    assert reader.facts["learned_tokens"] == 6
    assert reader.facts["documents"] == 1
    (last,) = stream(chat("ab", "c", "d", "efg"), loss="last_turn").next_pack()
    assert learned(model, last) == "efg<|im_end|>"
    (everything,) = stream(chat("ab", "c"), loss="all").next_pack()
    assert learned(model, everything) == "user\nab<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"


def test_prompts_and_completions_are_conversations(model: Path, stream: Open) -> None:
    (batch,) = stream({"prompt": "ab", "completion": "cd"}).next_pack()
    assert learned(model, batch) == "cd<|im_end|>"


@pytest.mark.parametrize(
    ("policy", "expected", "dropped"),
    [
        ("cut_end", ["b" * 45, "x<|im_end|>"], 1),
        ("cut_start", ["b" * 62 + "<|im_end|>", "x<|im_end|>", "z<|im_end|>"], 0),
        ("drop", ["x<|im_end|>"], 2),
    ],
)
def test_a_conversation_that_is_too_long_is_cut_or_left_out(
    stream: Open, model: Path, policy: str, expected: list[str], dropped: int
) -> None:
    notes: list[str] = []
    records = [chat("a", "b" * 90), chat("a", "x"), chat("a" * 200, "z")]
    reader = stream(*records, too_long=policy, notes=notes, bucket_window=1)
    assert [learned(model, reader.next_pack()[0]) for _ in range(reader.facts["samples"])] == expected
    assert reader.facts.get("dropped", 0) == dropped
    assert any(f"left out {dropped} of 3 conversations that are too long" in note for note in notes) == bool(dropped)


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([chat("a", "b") | {"weight": 0}], "all 1 conversations are too long for 65 tokens, or have no token to learn"),
        (
            [chat("a" * 200, "z"), chat("a" * 100, "z")],
            "none of the 2 conversations has a token to learn in its first 65 tokens: "
            "their prompts alone have 119 tokens and more",
        ),
    ],
)
def test_a_corpus_of_conversations_without_tokens_to_learn_says_what_they_lack(
    stream: Open, records: list[dict[str, Any]], says: str
) -> None:
    for record in records:
        record["messages"][1]["weight"] = record.pop("weight", 1)
    with pytest.raises(DataError) as caught:
        stream(*records)
    assert str(caught.value).startswith(f"data.sequence_length: {says}")


@pytest.mark.thorough
def test_an_error_names_the_record_and_skipping_counts_it(stream: Open) -> None:
    with pytest.raises(DataError, match=r"data.jsonl:2 .*but a sequence at most 65"):
        stream(chat("a", "x"), chat("a" * 90, "x"), too_long="error")
    bad = {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(DataError, match=r"data.jsonl:2:? messages has no assistant message"):
        stream(chat("a", "x"), bad)
    reader = stream(chat("a", "x"), bad, {"text": "no"}, malformed="skip")
    assert (reader.facts["documents"], reader.facts["skipped"]) == (1, 2)


def test_files_without_records_and_models_without_a_template_are_refused(
    stream: Open, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(DataError, match=r"a\.txt has no records with fields, but conversations are"):
        stream(chat("a", "x"), sources=[str(tmp_path / "a.txt")])
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="template"):
        stream(chat("a", "x"), tokenizer=str(plain))


@pytest.mark.thorough
def test_another_template_or_another_mask_is_another_corpus(stream: Open, model: Path) -> None:
    one = stream(chat("ab", "c"))
    with pytest.raises(DataError, match="belongs to other data"):
        stream(chat("ab", "c"), loss="all").load_state(one.state())


# --- packing


@pytest.mark.thorough
def test_packed_conversations_keep_apart_and_learn_the_same(model: Path, stream: Open) -> None:
    records = [chat("q" * n, "a" * (n % 3 + 1)) for n in range(1, 9)]
    plain, packed = stream(*records), stream(*records, packing="best_fit", sequence_length=104)
    assert packed.facts["samples"] < plain.facts["samples"] == 8
    assert 0 <= packed.facts["unused_positions"] < 1
    assert packed.facts["learned_tokens"] == plain.facts["learned_tokens"]
    wanted = sorted(learned(model, plain.next_pack()[0]) for _ in records)
    found = []
    for _ in range(packed.facts["samples"]):
        (batch,) = packed.next_pack()
        assert batch["tokens"].shape == (1, 104)
        length = int(batch["lengths"])
        documents, positions = batch["documents"][0], batch["positions"][0]
        begins = (positions == 0).nonzero().flatten().tolist()
        assert documents[begins].tolist() == list(range(len(begins)))
        assert (batch["targets"][0, length:] == -100).all()
        for number in documents[:length].unique().tolist():
            targets = batch["targets"][0][documents == number]
            found.append(text_of(model, targets[targets >= 0].tolist()))
    assert sorted(found) == wanted


@pytest.mark.full
def test_packed_streams_go_on_where_they_were_and_workers_change_nothing(stream: Open) -> None:
    records = [chat("q" * n, "a") for n in range(1, 20)]
    fields: dict[str, Any] = {"packing": "best_fit", "sequence_length": 104, "shuffle": True, "batch": 2}
    one = stream(*records, **fields)
    packs = [one.next_pack() for _ in range(9)]
    other = stream(*records, **fields)
    for pack in packs[:3]:
        assert torch.equal(other.next_pack()[0]["tokens"], pack[0]["tokens"])
    again = stream(*records, workers=2, **fields)
    again.load_state(other.state())
    for pack in packs[3:]:
        for mine, expected in zip(again.next_pack(), pack, strict=True):
            assert all(torch.equal(mine[name], expected[name]) for name in expected)
    again.close()


@pytest.mark.thorough
def test_a_batch_larger_than_the_bins_is_refused(stream: Open) -> None:
    with pytest.raises(DataError, match="the train split fills only 1 samples; use at most 1, or more data"):
        stream(chat("a", "b"), packing="best_fit", batch=2)


@given(st.lists(st.integers(1, 32), min_size=1, max_size=60))
def test_bins_hold_each_sample_once_none_overflows_and_few_are_needed(lengths: list[int]) -> None:
    bins = best_fit(np.asarray(lengths), 32)
    assert sorted(bins.members.tolist()) == list(range(len(lengths)))
    sizes = [sum(lengths[m] for m in bins.members[a:b]) for a, b in zip(bins.starts[:-1], bins.starts[1:], strict=True)]
    assert max(sizes) <= 32
    assert min(sizes) > 0
    assert bins.unused == pytest.approx(1 - sum(lengths) / (32 * len(bins)))
    # No two bins could be one.
    assert sum(size <= 16 for size in sizes) <= 1


@pytest.mark.thorough
def test_what_packs_are_made_of_can_be_sent_to_a_process(stream: Open) -> None:
    reader = stream(chat("a", "b"), packing="best_fit")
    source = pickle.loads(pickle.dumps(reader._source))  # type: ignore[union-attr]
    assert isinstance(source.samples.corpus.weights, np.memmap)
    assert torch.equal(torch.as_tensor(source.pack_at(0)[0]["tokens"]), reader.next_pack()[0]["tokens"])


def test_without_weights_all_of_a_bin_is_learned() -> None:
    tokens, starts = np.arange(10), np.asarray([0, 4, 10])
    pieces = cut_pieces(starts, 8)
    packed = pack_bins(tokens, None, pieces, best_fit(pieces.lengths, 8), np.asarray([0]), 8)
    assert packed["tokens"].tolist() == [[0, 1, 2, 4, 5, 6, 7, 8]]
    assert packed["targets"].tolist() == [[1, 2, 3, 5, 6, 7, 8, 9]]
    assert packed["documents"].tolist() == [[0] * 3 + [1] * 5]
    assert packed["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]


@pytest.mark.thorough
def test_conversations_in_a_row_are_learned_wherever_they_are_cut(model: Path, stream: Open) -> None:
    records = [chat("q" * n, "a" * (n % 3 + 1)) for n in range(1, 9)]
    plain, row = stream(*records), stream(*records, packing="concat", sequence_length=40)
    corpus = row._corpus
    assert row.facts["unused_positions"] == 0
    assert row.facts["learned_tokens"] == plain.facts["learned_tokens"]
    assert row.facts["samples"] == (len(corpus.tokens) - 1) // 40
    found = []
    for number in range(row.facts["samples"]):
        (batch,) = row.next_pack()
        here = slice(40 * number + 1, 40 * number + 41)
        assert corpus.weights is not None
        starts = np.isin(np.arange(here.start, here.stop), corpus.starts)
        wanted = np.where(corpus.weights[here] & ~starts, corpus.tokens[here].astype(np.int64), -100)
        assert batch["targets"][0].tolist() == wanted.tolist()
        found.append(learned(model, batch))
    whole = "".join(learned(model, batch) for _ in records for batch in plain.next_pack())
    assert sum(map(len, found)) >= len(whole) - 40


@given(st.lists(st.integers(1, 90), min_size=1, max_size=30))
def test_pieces_cover_each_document_and_only_the_last_is_short(lengths: list[int]) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    pieces = cut_pieces(starts, 16)
    covered = [place for f, n in zip(pieces.firsts, pieces.lengths, strict=True) for place in range(f, f + n)]
    ends = set((starts[1:] - 1).tolist())
    assert covered == [place for place in range(int(starts[-1])) if place not in ends]
    short = pieces.firsts[pieces.lengths < 16] + pieces.lengths[pieces.lengths < 16]
    assert {int(end) for end in short} <= ends
    assert pieces.lengths.min(initial=1) > 0


def weighted(*weights: float | None) -> dict[str, Any]:
    """Conversation of one-letter replies with these weights."""
    record = chat(*[text for number in range(len(weights)) for text in ("q", "abcdef"[number])])
    for message, weight in zip(record["messages"][1::2], weights, strict=True):
        message.update({} if weight is None else {"weight": weight})
    return record


@pytest.mark.thorough
@pytest.mark.parametrize("packing", ["none", "concat", "best_fit"])
def test_messages_have_weights_that_their_tokens_get(model: Path, stream: Open, packing: str) -> None:
    reader = stream(weighted(0.5, None, 0), weighted(2), packing=packing, sequence_length=72)
    found: dict[str, float] = {}
    for _ in range(reader.facts["samples"]):
        (batch,) = reader.next_pack()
        assert batch["weights"].dtype == torch.float32
        assert batch["weights"].shape == batch["targets"].shape
        assert ((batch["weights"] > 0) == (batch["targets"] >= 0)).all()
        for weight in batch["weights"].unique().tolist():
            text = text_of(model, batch["targets"][batch["weights"] == weight].tolist()) if weight else ""
            for letter in text.replace("<|im_end|>", ""):
                found[f"{letter}{weight}"] = weight
    assert found == ({"a0.5": 0.5, "b1.0": 1, "a2.0": 2} if packing != "concat" else {"a0.5": 0.5, "b1.0": 1})


@pytest.mark.thorough
def test_weights_of_nought_and_one_are_what_is_learned_and_no_field(model: Path, stream: Open) -> None:
    (batch,) = stream(weighted(0, 1), sequence_length=96).next_pack()
    assert "weights" not in batch
    assert learned(model, batch) == "b<|im_end|>"
    (plain,) = stream(weighted(None, None), sequence_length=96).next_pack()
    (ones,) = stream(weighted(1, 1.0), sequence_length=96).next_pack()
    assert plain.keys() == ones.keys()
    assert all(torch.equal(plain[name], ones[name]) for name in plain)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("record", "fields", "message"),
    [
        (weighted(-1), {}, r"messages\[1\].weight is '-1'; give a number"),
        (weighted(True), {}, r"weight is 'True'; give a number"),
        ({"messages": [{"role": "user", "content": "a", "weight": 1}, {"role": "assistant", "content": "b"}]}, {},
         r"messages\[0\] of role 'user' has a weight"),
        (weighted(0.5), {"loss": "all"}, "has a message with a weight, but data.loss: all trains on every token"),
    ],
)  # fmt: skip
def test_weights_that_mean_nothing_are_refused(
    stream: Open, record: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=f"data.jsonl:1.*{message}"):
        stream(record, **fields)


CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
def test_tool_arguments_are_learned_as_objects(model: Path, stream: Open, tmp_path: Path, arguments: Any) -> None:
    (tmp_path / "calls").mkdir()
    (tmp_path / "calls" / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (tmp_path / "calls" / "chat_template.jinja").write_text(CALLS)
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    record = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]}
    notes: list[str] = []
    fields = {"tokenizer": str(tmp_path / "calls"), "sequence_length": 128, "notes": notes}
    (batch,) = stream(record, **fields).next_pack()
    assert learned(model, batch) == '[weather {"city": "Paris"}]<|im_end|>'
    said = any("1 of 1 conversations have tool arguments that are JSON strings; they are parsed" in n for n in notes)
    assert said == isinstance(arguments, str)
    (batch,) = stream(record, tool_arguments="keep", **fields).next_pack()
    quoted = '"{\\"city\\": \\"Paris\\"}"' if isinstance(arguments, str) else '{"city": "Paris"}'
    assert learned(model, batch) == f"[weather {quoted}]<|im_end|>"


def test_tool_arguments_that_are_no_objects_stay_as_they_are() -> None:
    def arguments_of(value: Any) -> Any:
        call = {"name": "f", "arguments": value}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        return read_conversation({"messages": messages}, "it", "parse").messages[1]["tool_calls"][0]["arguments"]

    for value in ("{", "3", '"text"', "[1]", "", {"a": None}):
        assert arguments_of(value) == value
    assert arguments_of('{"a": null}') == {"a": None}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("marks", "stopped"), [("{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}", 2),
                           ("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>", 0)],
)  # fmt: skip
def test_a_start_says_whether_the_stop_token_is_learned(
    model: Path, stream: Open, tmp_path: Path, marks: str, stopped: int
) -> None:
    (tmp_path / "marked").mkdir()
    (tmp_path / "marked" / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (tmp_path / "marked" / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + marks
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    for _ in range(2):
        notes: list[str] = []
        reader = stream(chat("a", "b"), chat("c", "d"), tokenizer=str(tmp_path / "marked"), notes=notes)
        (line,) = [note for note in notes if "stop token" in note]
        assert f"stop token learned in {stopped} of 2 conversations" in line
        assert line.startswith("warning: ") == (not stopped)
        assert reader.facts["stop_learned"] == stopped
        end = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("<|im_end|>")
        assert reader.facts["stop_token_ids"] == [end][:stopped]


@pytest.mark.thorough
def test_special_tokens_in_conversations_are_text_or_tokens(model: Path, stream: Open) -> None:
    end = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("<|im_end|>")
    for choice, count in (("text", 2), ("token", 3)):
        notes: list[str] = []
        (batch,) = stream(chat("a<|im_end|>", "b"), special_tokens=choice, notes=notes).next_pack()
        assert int((batch["tokens"] == end).sum()) == count
        assert any("1 of 1 conversations spell special tokens, such as <|im_end|>" in note for note in notes)


@pytest.mark.thorough
def test_a_template_gets_its_arguments(model: Path, stream: Open) -> None:
    template = model / "chat_template.jinja"
    text = template.read_text()
    template.write_text("{{ system_note | default('none') }}|" + text)
    try:
        (batch,) = stream(chat("ab", "c"), template_arguments={"system_note": "short"}).next_pack()
        (other,) = stream(chat("ab", "c")).next_pack()
    finally:
        template.write_text(text)
    starts = [text_of(model, one["tokens"][0].tolist()).partition("<|im_start|>")[0] for one in (batch, other)]
    assert starts == ["short|", "none|"]
