"""Records as tokens, exactly: conversations, pairs, labels and lists of ids; and the files and facts of a corpus."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from d9d_core.errors import DataError
from d9d_data.chat.conversation import Conversation
from d9d_data.chat.encode import ChatTokenizer, _overlap, encode, encode_prompt, strings_in
from d9d_data.chat.encoder import ChatEncoder
from d9d_data.chat.preference import Pair, PreferenceEncoder, read_pair
from d9d_data.chat.template import Rendering
from d9d_data.corpus.encoder import Dropped, Sample
from d9d_data.fields.label_table import LabelTable
from d9d_data.fields.labelled import LabelledEncoder
from d9d_data.fields.learned import learned_field
from d9d_data.fields.pairs import PairsEncoder
from d9d_data.fields.tokens import TokensEncoder
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.place import Place, Record
from d9d_data.tokenizer.byte_level import BytesTokenizer

END = "<|endoftext|>"


class Template:
    """Template that writes each message between its role and the end of text."""

    name = "t.jinja"
    special_tokens = {"eos_token": END}

    def render(
        self, messages: Any, tools: Any = None, *, generation_prompt: bool = False, where: str = ""
    ) -> Rendering:
        text = "".join(f"{message['role'][0]}:{message.get('content', '')}{END}" for message in messages)
        return Rendering(text + "a:" * generation_prompt, None)


def ids(text: str) -> list[int]:
    """Ids of a text whose ends of text, written as $, are tokens."""
    return [256 if letter == "$" else ord(letter) for letter in text]


def record(**values: Any) -> Record:
    return Record(values, Place(SourceFile("a.jsonl", "jsonl"), 7))


def said(*texts: str, **more: Any) -> dict[str, Any]:
    """Record of a conversation in which user and assistant alternate."""
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    messages[-1] |= more
    return {"messages": messages}


# --- conversations


def chat(longest: int = 99, policy: Any = "cut_end", loss: Any = "assistant") -> Any:
    template: Any = Template()
    return ChatEncoder(BytesTokenizer(END), template, loss, longest, policy)


def test_replies_are_learned_up_to_the_end_of_their_turns() -> None:
    found = chat()._sample(record(**said("x", "yz", "u", "v")))
    text = "u:x$a:yz$u:u$a:v$"
    assert found.ids[0].tolist() == ids(text)
    learned = [place in (6, 7, 8, 15, 16) for place in range(len(text))]
    (weights,), (scales,) = found.columns["weights"], found.columns["scales"]
    assert (weights.tolist(), scales.tolist()) == (learned, [1.0] * len(text))
    assert (found.lost, found.incomplete, found.spelling, found.parsed, found.stop) == ([0], False, "", False, END)


@pytest.mark.parametrize(
    ("longest", "policy", "stop", "incomplete"),
    [
        (17, "cut_end", END, False), (16, "cut_end", "", True), (15, "cut_end", END, True), (7, "cut_end", "", True),
        (11, "cut_start", END, True), (8, "cut_start", END, True),
    ],
)  # fmt: skip
def test_conversations_are_cut_and_their_losses_told(longest: int, policy: str, stop: str, incomplete: bool) -> None:
    text = "u:x$a:yz$u:u$a:v$"
    found = chat(longest, policy)._sample(record(**said("x", "yz", "u", "v")))
    assert found.ids[0].tolist() == ids(text[:longest] if policy == "cut_end" else text[-longest:])
    assert (found.lost, found.stop, found.incomplete) == ([17 - longest], stop, incomplete)


def test_conversations_without_a_token_to_learn_are_dropped_with_the_length_that_they_need() -> None:
    whole = said("x", "yz")
    assert chat(6)._sample(record(**whole)) == Dropped(9, 7)
    assert chat(8, "drop")._sample(record(**whole)) == Dropped(9, 7)
    assert isinstance(chat(7)._sample(record(**whole)), Sample)
    assert chat(99)._sample(record(**said("x", "yz", weight=0))) == Dropped(9, 0)


def test_weights_of_messages_are_scales_of_learned_tokens() -> None:
    found = chat()._sample(record(**said("x", "yz", weight=0.5)))
    assert found.columns["scales"][0].tolist() == [1.0] * 6 + [0.5] * 3
    assert found.columns["weights"][0].tolist() == [False] * 6 + [True] * 3
    spelled = chat()._sample(record(**said(f"x{END}", "yz")))
    assert (spelled.spelling, spelled.ids[0].tolist().count(256)) == (END, 2)
    turn = chat(loss="last_turn")._sample(record(**said("x", "y", "u", "v")))
    assert np.flatnonzero(turn.columns["weights"][0]).tolist() == [14, 15]
    whole = chat(loss="all")._sample(record(**said("x", "y")))
    assert whole.columns["weights"][0].tolist() == [True] * 8


def test_a_conversation_with_all_marks_of_quoted_tokens_is_refused() -> None:
    marks = "".join(chr(code) for code in range(0xE000, 0xE010))
    with pytest.raises(DataError, match=r"^a.jsonl:7 contains all characters from U\+E000 to U\+E00F; leave"):
        chat()._sample(record(**said(f"{END}{marks}", "y")))
    assert isinstance(chat()._sample(record(**said(f"{END}{marks[:-1]}", "y"))), Sample)
    assert isinstance(chat()._sample(record(**said(marks, "y"))), Sample)


def test_a_prompt_ends_where_a_reply_begins() -> None:
    messages = tuple(said("x", "y")["messages"])
    tokenizer, template = ChatTokenizer.of(BytesTokenizer(END)), Template()
    given: Any = template
    assert encode_prompt(Conversation(messages, prompt=1), given, tokenizer).tolist() == ids("u:x$a:")
    found, weights = encode(Conversation(messages, prompt=1), given, tokenizer)
    assert (found.tolist(), np.flatnonzero(weights).tolist()) == (ids("u:x$a:y$"), [6, 7])


def test_the_stop_of_tokens_is_their_last_special_one() -> None:
    tokenizer = ChatTokenizer.of(BytesTokenizer(END))
    for text, stop in (("a$", END), ("a$ \n", END), ("a$b", ""), ("", ""), (" ", ""), ("$", END), ("a", "")):
        assert tokenizer.stop_of(np.asarray(ids(text), dtype=np.int64)) == stop
    assert (tokenizer.specials, tokenizer.added) == ((END,), (END,))
    found, begins = tokenizer.encode("é$".replace("$", END))
    assert (found.tolist(), begins.tolist()) == ([0xC3, 0xA9, 256], [0, 0, 1])
    quoted, begins = tokenizer.encode(f"a{END}b{END}", [(1, 1 + len(END))])
    assert quoted.tolist() == [*f"a{END}b".encode(), 256]
    assert begins.tolist() == [*range(len(END) + 2), len(END) + 2]


def test_strings_and_spans_at_any_depth() -> None:
    assert list(strings_in({"a": ["b", ("c", {"d": "e", "f": 3})], "g": None})) == ["b", "c", "e"]
    spans = [(2, 4), (8, 9)]
    for span, over in (
        ((0, 2), False),
        ((0, 3), True),
        ((4, 8), False),
        ((3, 5), True),
        ((8, 9), True),
        ((2, 2), False),
    ):
        assert _overlap(span, spans) == over


# --- preference pairs


def preferences(longest: int = 99, policy: Any = "cut_end", template: Any = None) -> Any:
    return PreferenceEncoder(BytesTokenizer(END), template, longest, policy)


def test_completions_are_learned_from_the_first_token_that_differs_from_the_prompt() -> None:
    found = preferences()._sample(record(prompt="ab", chosen="cd", rejected="e"))
    assert [side.tolist() for side in found.ids] == [ids("abcd$"), ids("abe$")]
    assert [side.tolist() for side in found.columns["weights"]] == [[False] * 2 + [True] * 3, [False] * 2 + [True] * 2]
    assert (found.lost, found.incomplete, found.stop, found.spelling, found.parsed) == ([0, 0], False, END, "", False)
    ended = preferences()._sample(record(prompt="ab", chosen=f"cd{END}", rejected="e"))
    assert ended.ids[0].tolist() == ids("abcd$")
    assert ended.spelling == END
    rendered = preferences(template=Template())._sample(
        record(prompt=said("x")["messages"], chosen="y", rejected=[{"role": "assistant", "content": "zz"}])
    )
    assert [side.tolist() for side in rendered.ids] == [ids("u:x$a:y$"), ids("u:x$a:zz$")]
    assert [np.flatnonzero(side).tolist() for side in rendered.columns["weights"]] == [[6, 7], [6, 7, 8]]


@pytest.mark.parametrize(
    ("longest", "policy", "lost", "kept", "incomplete"),
    [
        (5, "cut_end", [0, 0], ["abcd$", "abe$"], False), (4, "cut_end", [1, 0], ["abcd", "abe$"], True),
        (4, "cut_start", [1, 0], ["bcd$", "abe$"], False), (3, "cut_start", [2, 1], ["cd$", "be$"], False),
        (2, "cut_start", [3, 2], ["d$", "e$"], True), (3, "cut_end", [2, 1], ["abc", "abe"], True),
    ],
)  # fmt: skip
def test_pairs_are_cut_on_both_sides(
    longest: int, policy: str, lost: list[int], kept: list[str], incomplete: bool
) -> None:
    found = preferences(longest, policy)._sample(record(prompt="ab", chosen="cd", rejected="e"))
    assert ([side.tolist() for side in found.ids], found.lost) == ([ids(text) for text in kept], lost)
    assert found.incomplete == incomplete


@pytest.mark.parametrize(
    ("longest", "policy", "values", "says"),
    [
        (2, "cut_end", {}, "no token of chosen is left in 2 tokens, as its prompt has 2; use longer sequences"),
        (3, "cut_end", {"rejected": "cz"}, "chosen and rejected are equal in the 3 tokens that are kept; use longer"),
        (9, "error", {"chosen": "c" * 9}, " chosen has 12 tokens, but a sequence at most 9"),
    ],
)
def test_pairs_with_nothing_to_compare_are_refused(
    longest: int, policy: str, values: dict[str, str], says: str
) -> None:
    with pytest.raises(DataError, match=f"^a.jsonl:7: ?{says}"):
        preferences(longest, policy)._sample(record(**{"prompt": "ab", "chosen": "cd", "rejected": "e", **values}))


def test_a_completion_that_adds_no_token_is_refused_and_a_long_pair_is_dropped() -> None:
    class Same(Template):
        def render(self, messages: Any, tools: Any = None, **more: Any) -> Rendering:
            return Rendering("ab", None)

    encoder = preferences(template=Same())
    encoder._ids = lambda pair, where: (np.asarray(ids("ab")), [np.asarray(ids("abc")), np.asarray(ids("ab"))])
    with pytest.raises(
        DataError, match="^a.jsonl:7: rejected adds no token to the prompt; give a completion, or leave"
    ):
        encoder._sample(record(prompt="ab", chosen="c", rejected="d"))
    assert preferences(4, "drop")._sample(record(prompt="ab", chosen="e", rejected="cd")) == Dropped(5, 3)
    with pytest.raises(DataError, match="^a.jsonl:7 has messages, but there is no chat template with the tokenizer"):
        preferences()._sample(record(prompt=said("x")["messages"], chosen="y", rejected="z"))


@pytest.mark.parametrize(
    ("values", "pair"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": "[]"}, Pair("a", "b", "c", "[]")),
        ({"prompt": ["x"], "chosen": "b", "rejected": "c"}, Pair(["x"], "b", "c")),
        # Sides that begin with a message of the user are whole conversations.
        (
            {"prompt": "a", "chosen": said("a", "b")["messages"], "rejected": said("a", "c")["messages"]},
            Pair(said("a")["messages"], said("a", "b")["messages"][1:], said("a", "c")["messages"][1:]),
        ),
        (
            {"prompt": "a", "chosen": said("a", "b")["messages"][1:], "rejected": said("a", "c")["messages"]},
            Pair("a", said("a", "b")["messages"][1:], said("a", "c")["messages"]),
        ),
        ({"prompt": "a", "chosen": [], "rejected": said("a", "c")["messages"]},
         Pair("a", [], said("a", "c")["messages"])),
        ({"prompt": "a", "chosen": {"role": "assistant", "content": "b"}, "rejected": "c"},
         Pair("a", [{"role": "assistant", "content": "b"}], "c")),
    ],
)  # fmt: skip
def test_pairs_have_a_prompt_and_two_sides(values: dict[str, Any], pair: Pair) -> None:
    assert read_pair(values, "w") == pair
    assert pair.plain == all(isinstance(side, str) for side in (pair.prompt, pair.chosen, pair.rejected))


# --- lists of token ids


def tokens(longest: int = 9, policy: Any = "cut_end", **fields: str) -> Any:
    return TokensEncoder(BytesTokenizer(END), "input_ids", fields.get("labels"), fields.get("mask"), longest, policy)


@pytest.mark.parametrize(
    ("values", "fields", "learned"),
    [
        ({}, {}, [True] * 4),
        ({"labels": [-100, 98, -100, 256]}, {"labels": "labels"}, [False, True, False, True]),
        ({"mask": [0, 1, 1, 0]}, {"mask": "mask"}, [False, True, True, False]),
        ({"mask": [True, False, True, True]}, {"mask": "mask"}, [True, False, True, True]),
        ({"mask": [0.0, 1.0, 0.0, 1.0]}, {"mask": "mask"}, [False, True, False, True]),
    ],
)
def test_learned_ids_are_those_of_the_labels_or_the_mask(
    values: dict[str, Any], fields: dict[str, str], learned: list[bool]
) -> None:
    found = tokens(**fields)._sample(record(input_ids=[97, 98, 99, 256], **values))
    assert found.ids[0].tolist() == [97, 98, 99, 256]
    assert found.columns["weights"][0].tolist() == learned
    assert (found.lost, found.incomplete, found.stop) == ([0], False, END if learned[3] else "")


def test_padding_after_ids_is_cut_and_long_lists_are_truncated() -> None:
    padded = record(input_ids=[97, 98, 99, 0, 0], attention_mask=[1, 1, 1, 0, 0])
    assert tokens()._sample(padded).ids[0].tolist() == [97, 98, 99]
    cut = tokens(2)._sample(padded)
    assert (cut.ids[0].tolist(), cut.lost, cut.incomplete) == ([97, 98], [1], True)
    late = tokens(2, "cut_start")._sample(padded)
    assert (late.ids[0].tolist(), late.lost) == ([98, 99], [1])
    assert tokens(2, "drop")._sample(padded) == Dropped(3, 2)
    masked = record(input_ids=[97, 98, 99, 256], mask=[1, 0, 0, 1])
    assert tokens(3, mask="mask")._sample(masked) == Dropped(4, 4)
    assert tokens(mask="mask")._sample(record(input_ids=[97, 98], mask=[1, 0])) == Dropped(2, 0)
    whole = tokens(3, mask="mask")._sample(record(input_ids=[97, 98, 99, 256], mask=[1, 1, 1, 0]))
    assert (whole.incomplete, whole.lost) == (False, [1])


@pytest.mark.parametrize(
    ("values", "fields", "says"),
    [
        ({"input_ids": [97, 257]}, {}, r": input_ids\[1\] is 257, but the tokenizer has the ids 0 to 256; name"),
        ({"input_ids": [-1]}, {}, r": input_ids\[0\] is -1, but"),
        ({"input_ids": []}, {}, ": input_ids is empty; leave the record out"),
        ({"input_ids": "97"}, {}, ": input_ids is a string, not a list of numbers"),
        ({"input_ids": [[1], [2, 3]]}, {}, r": input_ids\[0\] is \[1\]; give whole numbers"),
        ({"input_ids": [1, 2.5]}, {}, r": input_ids\[1\] is 2.5; give whole numbers"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, {}, " has labels, but the first record has neither labels nor"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, {}, " has loss_mask, but the first"),
        ({"input_ids": [1, 2], "m": [1]}, {"mask": "m"}, ": m has 1 values, but input_ids has 2"),
        ({"input_ids": [1, 2], "m": [1, 2]}, {"mask": "m"}, r": m\[1\] is 2; give 0 or 1"),
        (
            {"input_ids": [1, 2, 3], "l": [2, 3, -100]},
            {"labels": "l"},
            r": l\[0\] is 2, but input_ids\[0\] is 1; .*shift",
        ),
        ({"input_ids": [1, 2, 3], "l": [1, 3, 1]}, {"labels": "l"}, r": l\[1\] is 3, but .*, or -100: repair it"),
        ({"input_ids": [1], "l": [2]}, {"labels": "l"}, ": repair it"),
        ({"input_ids": [1, 2], "attention_mask": [0, 1]}, {}, ": attention_mask is not 2 numbers, ones and then zer"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, {}, ": attention_mask is not 2 numbers"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, {}, ": attention_mask has no ones, so there is no token"),
    ],
)
def test_wrong_ids_labels_and_masks_are_refused(values: dict[str, Any], fields: dict[str, str], says: str) -> None:
    with pytest.raises(DataError, match=f"^a.jsonl:7{says}" if not says.startswith(": repair") else says):
        tokens(**fields)._sample(record(**values))


def test_the_tokens_to_learn_are_in_one_field() -> None:
    assert learned_field(record(input_ids=[1])) == (None, None)
    assert learned_field(record(labels=[1], loss_mask=None)) == ("labels", None)
    assert learned_field(record(assistant_masks=[1])) == (None, "assistant_masks")
    with pytest.raises(DataError) as caught:
        learned_field(record(completion_mask=[1], labels=[1]))
    assert str(caught.value) == (
        "data: a.jsonl:7 has labels and completion_mask; choose the tokens to learn: 'labels: labels' or "
        "'mask: completion_mask'"
    )


# --- labels and pairs


def labelled(longest: int = 99, policy: Any = "cut_end", **fields: Any) -> Any:
    """Function that encodes a record of these fields."""
    given = {"per": "text", "field": "text", "pair": None, "label": None, "names": ("no", "yes"), **fields}
    encoder = LabelledEncoder(BytesTokenizer(END), **given, longest=longest, too_long=policy)
    sample: Any = encoder._of_text if given["per"] == "text" else encoder._of_words
    return lambda **values: sample(LabelTable(given["names"]), record(**values))


def test_the_label_of_a_text_is_at_its_first_token() -> None:
    encoded = labelled()
    found = encoded(text="abc", label="yes")
    assert (found.ids[0].tolist(), found.columns["labels"][0].tolist()) == (ids("abc"), [1, -100, -100])
    assert (found.lost, found.incomplete, found.spelling) == ([0], False, "")
    assert encoded(text=f"a{END}", label=0).spelling == END
    cut = labelled(2)
    assert (cut(text="abc", label=1).ids[0].tolist(), cut(text="abc", label=1).lost) == (ids("ab"), [1])
    start = labelled(2, "cut_start")
    assert start(text="abc", label=1).ids[0].tolist() == ids("bc")
    drop = labelled(2, "drop")
    assert (drop(text="abc", label=1), isinstance(drop(text="ab", label=1), Sample)) == (Dropped(3), True)
    two = labelled(pair="other", label="kind")
    assert two(text="ab", other="cd", kind=-100).columns["labels"][0].tolist() == [-100] * 4
    assert two(text="ab", other=f"c{END}", kind=1).spelling == END
    for values, why in (
        ({"text": " ", "label": 1}, "has no text in a field 'text'"), ({"text": 3, "label": 1}, "has no text in a"),
        ({"text": "a"}, "has no label in a field 'label'"), ({"text": "a", "label": ""}, ": label is empty; give the"),
        ({"text": "a", "label": None}, ": label is empty"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"^a.jsonl:7 ?{why}"):
            encoded(**values)


def test_a_text_without_a_token_is_refused() -> None:
    encoder: Any = LabelledEncoder(BytesTokenizer(END), "text", "text", None, None, None, 9, "cut_end")
    encoder._encoded = lambda *_: (SimpleNamespace(ids=[]), 0)
    with pytest.raises(DataError, match="^a.jsonl:7: the tokenizer makes no token of text; leave the record out$"):
        encoder._of_text(LabelTable(None), record(text="a", label=1))


@pytest.mark.parametrize(
    ("longest", "policy", "labels", "lost", "incomplete"),
    [
        (99, "cut_end", [0, -100, -100, 1, -100, -1, -100, -100], 0, False),
        (6, "cut_end", [0, -100, -100, 1, -100, -1], 2, False),
        (4, "cut_end", [0, -100, -100, 1], 4, False),
        (3, "cut_end", [0, -100, -100], 5, True),
        (5, "cut_start", [1, -100, -1, -100, -100], 3, True),
        (4, "cut_start", [-100, -1, -100, -100], 4, True),
    ],
)
def test_the_label_of_a_word_is_at_its_first_token(
    longest: int, policy: str, labels: list[int], lost: int, incomplete: bool
) -> None:
    encoded = labelled(longest, policy, per="word", field="tokens")
    text = "ab c def"
    found = encoded(tokens=text.split(), ner_tags=["no", "yes", -100])
    expected = [-100 if label == -1 else label for label in labels]
    assert found.ids[0].tolist() == ids(text[: len(labels)] if policy == "cut_end" else text[-len(labels) :])
    # The last word has no label.
    assert found.columns["labels"][0].tolist() == expected
    assert (found.lost, found.incomplete) == ([lost], incomplete)


def test_words_and_labels_belong_together() -> None:
    encoded = labelled(per="word", field="tokens")
    for values, why in (
        ({"tokens": "a", "labels": [1]}, "has no list of words in a field 'tokens'"),
        ({"tokens": ["a"], "labels": 1}, "has no list of labels in a field 'labels'"),
        ({"tokens": ["a", " "], "labels": [1, 1]}, r": tokens\[1\] is empty; give a text"),
        ({"tokens": ["a", 3], "labels": [1, 1]}, r": tokens\[1\] is a number; give a text"),
        ({"tokens": ["a"], "labels": [1, 0]}, "has 1 words in tokens and 2 labels in labels; give one per word"),
        ({"tokens": [], "labels": []}, "has 0 words in tokens and 0 labels in labels"),
        ({"tokens": ["a", "b"], "labels": [1, 7]}, r": labels\[1\] is 7; class numbers are 0 to 1"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"^a.jsonl:7 ?{why}"):
            encoded(**values)
    drop = labelled(3, "drop", per="word", field="tokens")
    assert drop(tokens=["ab", "c"], labels=[0, 1]) == Dropped(4)


def pairs(negatives: int = 0, longest: int = 99, policy: Any = "cut_end", negative: str | None = None) -> Any:
    return PairsEncoder(BytesTokenizer(END), "query", "positive", negative, negatives, "q:", "d:", longest, policy)


def test_texts_of_a_pair_have_their_prefixes_and_ends() -> None:
    found = pairs(2)._sample(record(query="a", positive="b", negative=["c", "dd"]))
    assert [text.tolist() for text in found.ids] == [ids("q:a$"), ids("d:b$"), ids("d:c$"), ids("d:dd$")]
    assert (found.lost, found.columns, found.spelling) == ([0] * 4, {}, "")
    cut = pairs(1, longest=4)._sample(record(query="a", positive="bcd", negatives="e"))
    assert ([text.tolist() for text in cut.ids], cut.lost) == ([ids("q:a$"), ids("d:b$"), ids("d:e$")], [0, 2, 0])
    start = pairs(0, 3, "cut_start")._sample(record(query="ab", positive="bcd"))
    assert ([text.tolist() for text in start.ids], start.lost) == ([ids("ab$"), ids("cd$")], [2, 3])
    assert pairs(0, 4, "drop")._sample(record(query="a", positive="bcd")) == Dropped(6)
    assert pairs()._sample(record(query=END, positive="b")).spelling == END


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"query": "a", "positive": "a", "n": "x"}, ": query and positive are equal, so there is nothing to learn"),
        ({"query": "a", "positive": "b"}, " has 0 negatives in n, but data.negatives is 1; give each record that many"),
        ({"query": "a", "positive": "b", "n": ["c", "d"]}, " has 2 negatives in n"),
        ({"query": "a", "positive": "b", "n": [" "]}, r" has no text in n\[0\] \(it has query, positive, n\)"),
        ({"query": " ", "positive": "b", "n": "c"}, " has no text in query"),
        ({"query": "a", "positive": 3, "n": "c"}, " has no text in positive"),
    ],
)
def test_incomplete_pairs_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=f"^a.jsonl:7{says}"):
        pairs(1, negative="n")._sample(record(**values))
