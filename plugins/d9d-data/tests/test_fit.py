"""No dataset loses tokens or records in silence: facts, a line at each start and ``d9d data show`` count them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.cli.samples import samples_of
from d9d_data.config import (
    ChatConfig,
    DocumentsConfig,
    LabelledConfig,
    PairsConfig,
    PreferenceConfig,
    TextConfig,
)
from d9d_data.mixture.config import MixtureConfig, MixturePart
from d9d_data.mixture.stream import build_mixture
from d9d_data.stream.chat import build_chat, build_preference
from d9d_data.stream.documents import build_documents
from d9d_data.stream.text import build_text
from tokenizers import Tokenizer

POLICIES = ("cut_end", "cut_start", "drop", "error")
#: Tokens of the texts of records: short ones, and one in four long.
SIZES = [4, 5, 40, 6, 4, 5, 6, 60]


@dataclass(frozen=True)
class Case:
    """Dataset over records of one text each, or several.

    Attributes:
        config, build: of the dataset.
        record: of a text.
        plural: name of its records in lines.
        fields: further fields of the config.
        chat: whether it needs a model's tokenizer.
    """

    config: type[Any]
    build: Callable[[Any, DataContext], Any]
    record: Callable[[str], Mapping[str, Any]]
    plural: str
    fields: Mapping[str, Any] | None = None
    chat: bool = False

    def open(self, folder: Path, model: Path, notes: list[str], one_pass: bool = False, **fields: Any) -> Any:
        (folder / "data.jsonl").write_text(
            "".join(json.dumps(self.record("x" * (size - 1) + "y")) + "\n" for size in SIZES)
        )
        context = DataContext(
            0,
            2,
            2,
            folder / "cache",
            note=notes.append,
            pretrained=str(model) if self.chat else None,
            one_pass=one_pass,
        )
        values = {"sources": [str(folder / "data.jsonl")], "shuffle": False, **(self.fields or {}), **fields}
        return self.build(self.config.model_validate(values), context)


def dialogue(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]}


def words(text: str) -> dict[str, Any]:
    return {"tokens": [*text], "labels": [1 if letter == "y" else 0 for letter in text]}


def pair(text: str) -> dict[str, Any]:
    return {"prompt": "?", "chosen": text, "rejected": "z"}


CASES = {
    "documents": Case(DocumentsConfig, build_documents, lambda text: {"text": text}, "documents"),
    "chat": Case(ChatConfig, build_chat, dialogue, "conversations", chat=True),
    "chat, concat": Case(ChatConfig, build_chat, dialogue, "conversations", {"packing": "concat"}, chat=True),
    "chat, best_fit": Case(ChatConfig, build_chat, dialogue, "conversations", {"packing": "best_fit"}, chat=True),
    "preference": Case(PreferenceConfig, build_preference, pair, "pairs", chat=True),
    "labelled": Case(LabelledConfig, build_documents, lambda text: {"text": text, "label": len(text) % 2},
                     "labelled records"),
    "labelled words": Case(LabelledConfig, build_documents, words, "labelled records", {"per": "word"}),
    "pairs": Case(PairsConfig, build_documents, lambda text: {"query": "?", "positive": text}, "pairs"),
}  # fmt: skip
#: Positions that hold the short texts of all datasets, and not the long ones; and such that hold all.
SHORT, LONG = 48, 160


def tokens_of(stream: Any) -> int:
    """Tokens that one pass gives."""
    count = 0
    for _ in range(-(-stream.facts["samples"] // 2)):
        for microbatch in stream.next_pack():
            real = microbatch["rows"] >= 0
            count += int(microbatch["lengths"][real].sum()) if "lengths" in microbatch else microbatch["tokens"].numel()
    return count


@pytest.mark.thorough
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_what_is_cut_or_left_out_is_counted_and_said_at_each_start(
    name: str, policy: str, one_pass: bool, tmp_path: Path, model: Path
) -> None:
    case = CASES[name]
    fields = {"sequence_length": 16 if "labelled" in name or name in ("documents", "pairs") else SHORT}
    if policy == "error":
        with pytest.raises(DataError, match=r"tokens, but a sequence at most \d+"):
            case.open(tmp_path, model, [], one_pass, too_long=policy, malformed="skip", **fields)
        return
    for _ in range(2):  # the second start finds it prepared
        notes: list[str] = []
        stream = case.open(tmp_path, model, notes, one_pass, too_long=policy, **fields)
        fact, verb = ("dropped", "left out") if policy == "drop" else ("cut_documents", "cut")
        lost = stream.facts[fact]
        assert 0 < lost <= 2
        (line,) = [note for note in notes if f"{verb} {lost} of {len(SIZES)} {case.plural}" in note]
        assert line.startswith("warning: ")
        assert "longest" in line
    whole = case.open(tmp_path, model, notes := [], one_pass, too_long=policy, sequence_length=LONG)
    assert (whole.facts["cut_documents"], whole.facts.get("dropped", 0)) == (0, 0)
    assert not [note for note in notes if "cut " in note or "left out" in note]


@pytest.mark.thorough
@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("name", [name for name in CASES if "concat" not in name])
def test_tokens_that_are_given_and_tokens_that_are_lost_are_all(
    name: str, policy: str, tmp_path: Path, model: Path
) -> None:
    """The text that is shown as lost is the rest that a longer sample would have."""
    case = CASES[name]
    short = 16 if "labelled" in name or name in ("documents", "pairs") else SHORT
    every = tokens_of(case.open(tmp_path, model, [], True, sequence_length=LONG))
    stream = case.open(tmp_path, model, [], True, too_long=policy, sequence_length=short)
    shown = case.open(tmp_path, model, [], too_long=policy, sequence_length=short)
    texts = shown.facts.get("texts_per_sample", 1)
    samples = [sample for _, sample in zip(range(shown.facts["samples"] * texts), samples_of(shown), strict=False)]
    lost = sum(sum(sample.lost) for sample in samples)
    assert lost > 0
    assert tokens_of(stream) + lost == every


def test_answers_that_are_cut_are_said_to_be_incomplete(tmp_path: Path, model: Path) -> None:
    case, notes = CASES["chat"], list[str]()
    stream = case.open(tmp_path, model, notes, sequence_length=SHORT)
    assert stream.facts["incomplete"] == 2
    (line,) = [note for note in notes if "cut 2" in note]
    assert line == (
        "warning: cut 2 of 8 conversations to 49 tokens, longest 82; in 2 the last answer is incomplete; use a larger "
        "sequence_length, or choose their treatment with the dataset's field too_long"
    )


@pytest.mark.thorough
def test_an_answer_whose_white_space_alone_is_cut_is_complete(tmp_path: Path, model: Path) -> None:
    """The line break that a template writes after the end of a turn is never learned."""
    case, notes = CASES["chat"], list[str]()
    longest = case.open(tmp_path, model, [], sequence_length=SHORT).facts["longest"]
    stream = case.open(tmp_path, model, notes, sequence_length=longest - 2)
    assert (stream.facts["cut_documents"], stream.facts.get("incomplete", 0)) == (1, 0)
    assert "incomplete" not in "".join(notes)


def test_few_losses_are_no_warning(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SIZES", [4] * 150 + [40])
    notes: list[str] = []
    CASES["documents"].open(tmp_path, model, notes, sequence_length=16)
    assert [note for note in notes if "cut" in note] == ["cut 1 of 151 documents to 17 tokens, longest 41"]


@pytest.mark.parametrize(("policy", "advice"), [("cut_end", "cut_start"), ("drop", "cut_end or cut_start")])
def test_where_prompts_fill_every_sample_the_error_says_so(
    policy: str, advice: str, tmp_path: Path, model: Path
) -> None:
    case = CASES["chat"]
    with pytest.raises(DataError) as caught:
        case.open(tmp_path, model, [], sequence_length=16, too_long=policy)
    assert str(caught.value).startswith("data.sequence_length: ")
    assert "8 conversations" in str(caught.value)
    assert "the longest has 82" in str(caught.value)
    assert advice in str(caught.value)
    if policy == "cut_end":
        assert "prompts alone have 20 tokens and more" in str(caught.value)


def test_where_all_records_are_malformed_the_error_says_so(tmp_path: Path, model: Path) -> None:
    case = Case(PreferenceConfig, build_preference, lambda text: pair(text) | {"prompt": "?" * 20}, "pairs", chat=True)
    with pytest.raises(
        DataError, match=r"no record of its 1 files can be used; 8 are malformed, the first of them: .*data.jsonl:1"
    ):
        case.open(tmp_path, model, [], sequence_length=8, malformed="skip")


def test_a_mixture_counts_what_its_parts_cut(tmp_path: Path, model: Path) -> None:
    documents = DocumentsConfig(sources=(str(tmp_path / "data.jsonl"),), sequence_length=16)
    text = TextConfig(sources=(str(tmp_path / "data.jsonl"),), field="text", sequence_length=16, packing="best_fit")
    CASES["documents"].open(tmp_path, model, [], sequence_length=16)
    notes: list[str] = []
    context = DataContext(0, 2, 2, tmp_path / "cache", note=notes.append)
    config = MixtureConfig(parts=(MixturePart(data=documents, weight=1), MixturePart(data=text, weight=1)))

    def inner(config: Any, own: DataContext) -> Any:
        return (build_documents if isinstance(config, DocumentsConfig) else build_text)(config, own)

    stream = build_mixture(config, context, inner)
    assert stream.facts["cut_documents"] == 2
    assert len([note for note in notes if "cut 2 of 8 documents" in note]) == 1
    lost = {sum(sample.lost) for _, sample in zip(range(16), samples_of(stream), strict=False)}
    assert lost == {0, 24, 44}


@pytest.mark.parametrize("one_pass", [False, True])
def test_tokens_that_fill_no_sample_are_said(one_pass: bool, tmp_path: Path, model: Path) -> None:
    case = Case(TextConfig, build_text, lambda text: {"text": text}, "documents", {"field": "text"})
    notes: list[str] = []
    case.open(tmp_path, model, notes, one_pass, sequence_length=50)
    assert any(note.startswith("warning: the last 37 of 138 tokens do not fill a sample") for note in notes)


def test_one_pass_of_packed_texts_counts_what_it_does_not_read(tmp_path: Path, model: Path) -> None:
    fields = {"field": "text", "packing": "best_fit"}
    case = Case(TextConfig, build_text, lambda text: {"text": text}, "documents", fields)
    notes: list[str] = []
    assert case.open(tmp_path, model, notes, True, sequence_length=16).facts["cut_documents"] == 2
    assert any("cut 2 of 8 documents to 17 tokens, longest 61" in note for note in notes)
    assert "cut_documents" not in case.open(tmp_path, model, notes := [], sequence_length=16).facts
    assert not any("cut" in note for note in notes)


def test_a_trained_tokenizer_reads_no_held_out_text_if_records_are_left_out(tmp_path: Path) -> None:
    long = "".join(chr(0x4E00 + 37 * number) for number in range(60))  # no pair of characters occurs twice
    repeated = {letter: letter * 16 for letter in "bcdefghijklmnopq"}  # each letter is one document
    documents = [long, *list(repeated.values())[:7], long, *list(repeated.values())[7:]]
    records = [{"text": text, "label": index % 2} for index, text in enumerate(documents)]
    records[4]["label"] = None  # malformed if labelled
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    common = {"sources": [str(tmp_path / "data.jsonl")], "field": "text", "sequence_length": 24, "too_long": "drop"}
    common |= {"tokenizer": {"bpe": 400}, "held_out": 0.5, "malformed": "skip"}
    for kind in (DocumentsConfig, LabelledConfig):
        for split in ("train", "held_out"):
            context = DataContext(0, 2, 2, tmp_path / kind.__name__, note=lambda _text: None)
            build_documents(
                kind(**common, split=split, **({} if kind is DocumentsConfig else {"labels": ["0", "1"]})), context
            )
        (prepared,) = (tmp_path / kind.__name__).glob("text-*")
        tokenizer = Tokenizer.from_file(str(prepared / "tokenizer" / "tokenizer.json"))
        merged = {letter: len(tokenizer.encode(text).ids) < 16 for letter, text in repeated.items()}
        found = {}
        for split in ("train", "held_out"):
            ids = np.load(prepared / f"{split}.tokens.npy").tolist()
            found[split] = set(tokenizer.decode(ids, skip_special_tokens=True))
        assert all(merged[letter] for letter in found["train"])
        assert not any(merged[letter] for letter in found["held_out"])
        assert len(found["train"] | found["held_out"]) == 16 - (kind is LabelledConfig)
