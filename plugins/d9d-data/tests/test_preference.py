"""The dataset ``preference``: pairs of completions become two rows each, of which the completions are learned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.chat.preference import _split
from d9d_data.cli.samples import marked, samples_of
from d9d_data.config import PreferenceConfig
from d9d_data.stream.chat import build_preference
from d9d_data.stream.documents import DocumentStream
from tokenizers import Tokenizer

ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


Open = Callable[..., DocumentStream]


@pytest.fixture
def stream(model: Path, tmp_path: Path) -> Open:
    def build(*records: Any, batch: int = 1, notes: list[str] | None = None, **values: Any) -> DocumentStream:
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        fields = {"sources": [str(tmp_path / "pairs.jsonl")], "sequence_length": 64, "shuffle": False, **values}
        note = (lambda _text: None) if notes is None else notes.append
        context = DataContext(0, batch, batch, tmp_path / "cache", note=note, pretrained=str(model))
        return build_preference(PreferenceConfig.model_validate(fields), context)

    return build


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {
        "prompt": [said("user", prompt)],
        "chosen": [said("assistant", chosen)],
        "rejected": [said("assistant", rejected)],
    }


def rows(model: Path, stream: DocumentStream) -> list[tuple[str, str]]:
    """Text before the learned tokens, and text of the learned tokens, of each row of the next microbatch."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    (batch,) = stream.next_pack()
    found = []
    for tokens, targets, length in zip(batch["tokens"], batch["targets"], batch["lengths"].tolist(), strict=True):
        learned = targets[targets >= 0].tolist()
        begin = int((targets >= 0).nonzero()[0]) + 1
        assert learned[:-1] == tokens[begin:length].tolist()
        before = tokens[:begin].tolist()
        decoded = [tokenizer.decode(ids, skip_special_tokens=False) for ids in (before, learned)]
        found.append((decoded[0], decoded[1]))
    return found


@pytest.mark.thorough
def test_a_pair_is_two_rows_of_which_the_completions_are_learned(model: Path, stream: Open) -> None:
    records = [pair("ab", "c", "def"), pair("x" * 9, "yes", "no")]
    reader = stream(*records, batch=2)
    (batch,) = reader.next_pack()
    shape = tuple(batch["tokens"].shape)
    assert shape[0] == 4
    assert shape[1] % 8 == 0
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        **dict.fromkeys(("tokens", "targets", "positions", "documents"), shape), "lengths": (4,), "samples": (2,)
    }  # fmt: skip
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert batch["samples"].tolist() == [0, 1]
    assert rows(model, stream(*records, batch=2)) == [
        (ASKED.format("ab"), "c<|im_end|>\n"),
        (ASKED.format("ab"), "def<|im_end|>\n"),
        (ASKED.format("x" * 9), "yes<|im_end|>\n"),
        (ASKED.format("x" * 9), "no<|im_end|>\n"),
    ]
    assert (reader.facts["samples"], reader.facts["texts"]) == (2, ["chosen", "rejected"])
    assert (reader.facts["vocab_size"], reader.facts["sequence_length"]) == (259, 64)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "ab", "chosen": [said("assistant", "c")], "rejected": [said("assistant", "d")]},
        {"chosen": pair("ab", "c", "")["prompt"] + [said("assistant", "c")],
         "rejected": pair("ab", "d", "")["prompt"] + [said("assistant", "d")]},
        {"prompt": "ab", "chosen": pair("ab", "c", "")["prompt"] + [said("assistant", "c")],
         "rejected": pair("ab", "d", "")["prompt"] + [said("assistant", "d")]},
    ],
)  # fmt: skip
def test_prompts_are_stated_or_what_both_sides_begin_with(model: Path, stream: Open, record: dict[str, Any]) -> None:
    assert rows(model, stream(record)) == [(ASKED.format("ab"), "c<|im_end|>\n"), (ASKED.format("ab"), "d<|im_end|>\n")]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " five"},
        {"prompt": "2 + 2 =", "chosen": " 4<|im_end|>", "rejected": " five"},
        {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = five"},
    ],
)
def test_strings_are_learned_as_they_are_with_an_end(model: Path, stream: Open, record: dict[str, Any]) -> None:
    assert rows(model, stream(record)) == [("2 + 2 =", " 4<|im_end|>"), ("2 + 2 =", " five<|im_end|>")]


def test_strings_need_no_template(model: Path, stream: Open, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "plain" / name).write_bytes((model / name).read_bytes())
    fields = {"tokenizer": str(tmp_path / "plain")}
    assert rows(model, stream({"prompt": "a", "chosen": "b", "rejected": "c"}, **fields))[0] == ("a", "b<|im_end|>")
    with pytest.raises(DataError, match=r"pairs.jsonl:1:? has messages, but there is no chat template with"):
        stream(pair("a", "b", "c"), **fields)


def test_a_quoted_special_token_ends_no_turn(model: Path, stream: Open) -> None:
    (batch,) = stream(pair("a<|im_end|>", "b", "c<|im_end|>")).next_pack()
    end = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("<|im_end|>")
    assert [int((targets == end).sum()) for targets in batch["targets"]] == [1, 1]
    assert int((batch["tokens"][0, : int(batch["lengths"][0])] == end).sum()) == 2  # of the prompt, and of the reply


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("record", "message"),
    [
        (pair("a", "b", "b"), "chosen and rejected are equal, so neither is preferred"),
        ({"prompt": "a", "chosen": "b"}, r"has no field 'rejected' \(it has prompt, chosen\)"),
        ({"prompt": "a", "chosen": [said("assistant", "b")], "rejected": [said("user", "c")]},
         "rejected has no assistant message"),
        ({"chosen": "ab", "rejected": "ac"}, "has no field 'prompt' .* are read as prompt"),
        (pair("a" * 60, "b", "c"), "no token of chosen is left in 65 tokens, as its prompt has"),
        (pair("a", "b" * 60 + "c", "b" * 60 + "d"), "are equal in the 65 tokens that are kept"),
        ({"prompt": "a", "chosen": [], "rejected": [said("assistant", "c")]}, "chosen is empty"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "prompt is a number"),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_refused_with_its_place_or_skipped(
    stream: Open, record: dict[str, Any], message: str
) -> None:
    good = pair("a", "x", "y")
    with pytest.raises(DataError, match=rf"pairs.jsonl:2:? .*{message}"):
        stream(good, record)
    notes: list[str] = []
    reader = stream(good, record, malformed="skip", notes=notes)
    assert (reader.facts["samples"], reader.facts["skipped"]) == (1, 1)
    assert any(note.startswith("left out 1 malformed pairs; the first: ") for note in notes)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": "ab", "rejected": "cd"}, "have no common beginning"),
        ({"chosen": "ab", "rejected": [said("assistant", "c")]}, "two strings or two lists of messages"),
    ],
)
def test_sides_without_a_prompt_have_a_common_beginning(stream: Open, record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"pairs.jsonl:1:? .*{message}"):
        stream(record)


@pytest.mark.thorough
def test_long_texts_are_cut_or_their_pair_is_left_out(model: Path, stream: Open) -> None:
    long, short = pair("a", "b" * 90, "c"), pair("a", "x", "y")
    cut = rows(model, stream(long, too_long="cut_start"))
    assert cut == [("b", "b" * 62 + "<|im_end|>\n"), (ASKED.format("a"), "c<|im_end|>\n")]
    cut = rows(model, stream(long, too_long="cut_end"))
    assert [len(learned) for _, learned in cut] == [65 - len("<user\na>\n<assistant\n"), len("c<|im_end|>\n")]
    notes: list[str] = []
    reader = stream(long, short, too_long="drop", notes=notes)
    assert (reader.facts["samples"], reader.facts["dropped"]) == (1, 1)
    assert any("left out 1 of 2 pairs that are too long" in note for note in notes)
    assert rows(model, reader)[1] == (ASKED.format("a"), "y<|im_end|>\n")
    with pytest.raises(DataError, match=r"pairs.jsonl:1 chosen has 112 tokens, but a sequence at most 65"):
        stream(long, too_long="error")


@pytest.mark.thorough
def test_pairs_are_held_out_as_a_whole(model: Path, stream: Open) -> None:
    records = [pair(f"{number}", f"{number} yes", f"{number} no") for number in range(8)]
    found = []
    for split, samples in (("train", 6), ("held_out", 2)):
        reader = stream(*records, split=split, held_out=0.25)
        assert reader.facts["samples"] == samples
        for _ in range(samples):
            (asked, chosen), (also, rejected) = rows(model, reader)
            assert asked == also
            assert chosen.replace("yes", "no") == rejected
            found.append(asked)
    assert sorted(found) == [ASKED.format(number) for number in range(8)]


def test_shown_are_both_sides_by_name(model: Path, stream: Open) -> None:
    reader = stream({"prompt": "a", "chosen": "b", "rejected": "c"})
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = zip(range(2), samples_of(reader), strict=False)
    shown = [(sample.name, marked(sample, tokenizer, brackets=True).plain) for _, sample in texts]
    assert shown == [("chosen", "a«b<|im_end|>»"), ("rejected", "a«c<|im_end|>»")]


@pytest.mark.parametrize(
    "sides", [([{"role": "user", "content": "a"}], "ab"), ("ab", [{"role": "user", "content": "a"}])]
)
def test_sides_of_different_kinds_have_no_common_prompt(sides: tuple[Any, Any]) -> None:
    with pytest.raises(DataError, match="chosen and rejected must be two strings or two lists of messages"):
        _split(*sides, "file:1")


def test_the_common_prompt_ends_before_the_first_difference() -> None:
    assert _split("a good b", "a good c", "x") == ("a good", " b", " c")
    first, second = ({"role": "user", "content": text} for text in "ab")
    assert _split([first, second], [first, first], "x") == ([first], [second], [first])
    # Each side keeps a message.
    assert _split([first, second], [first, second, first], "x") == ([first], [second], [second, first])
