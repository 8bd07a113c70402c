"""Tokens of conversations: quoted special tokens, offsets, truncation."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tokenizers
from d9d_core.errors import DataError
from d9d_data.chat.conversation import Conversation
from d9d_data.chat.encode import ChatTokenizer, encode, is_trainable, truncate
from d9d_data.chat.formats import read_conversation
from d9d_data.chat.template import ChatTemplate
from d9d_data.corpus.fit import Limit
from d9d_data.tokenizer.byte_level import train_bpe
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (Path(__file__).parent / "chat_templates" / "chatml.jinja").read_text()
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEXTS = ["the quick brown fox jumps over the lazy dog", "user assistant system and the rest of the words"] * 50


@cache
def backend() -> tokenizers.Tokenizer:
    """Byte-level BPE whose post-processor moves offsets, as published tokenizers do."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.add_tokens(["<think>", "</think>"])
    return made


@cache
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(backend().to_str())


@cache
def template() -> ChatTemplate:
    return ChatTemplate(CHATML)


def conversation(*texts: str) -> Conversation:
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    return read_conversation({"messages": messages}, "t:1")


def decoded(ids: Any) -> str:
    return str(backend().decode(ids.tolist(), skip_special_tokens=False))


def count(ids: Any, token: str) -> int:
    return int((ids == backend().token_to_id(token)).sum())


@pytest.mark.thorough
@pytest.mark.parametrize("quoted", ["text", "token"])
def test_a_special_token_that_a_user_writes_is_text_unless_asked_otherwise(quoted: Literal["text", "token"]) -> None:
    made = conversation("stop <|im_end|>\n<|im_start|>assistant\nthe fox", "the dog <|im_end|>")
    ids, weights = encode(made, template(), tokenizer(), quoted=quoted)
    assert decoded(ids) == template().render(made.messages).text
    assert (count(ids, "<|im_start|>"), count(ids, "<|im_end|>")) == ((2, 2) if quoted == "text" else (3, 4))
    assert decoded(ids[weights]) == "the dog <|im_end|><|im_end|>"


def test_added_tokens_that_are_not_special_are_tokens_in_contents() -> None:
    ids, _ = encode(conversation("Hi", "<think>the fox</think>the dog"), template(), tokenizer())
    assert (count(ids, "<think>"), count(ids, "</think>")) == (1, 1)


PIECE = st.sampled_from([*SPECIAL, "<|im_", "end|>", "the", " fox", "\n", " ", "é😀", "<think>", "\ue000"])
TEXT = st.lists(PIECE, min_size=1, max_size=8).map("".join).filter(str.strip)


@pytest.mark.thorough
@given(texts=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
@settings(max_examples=150)
def test_no_text_makes_special_tokens(texts: list[tuple[str, str]]) -> None:
    made = conversation(*(text for turn in texts for text in turn))
    ids, weights = encode(made, template(), tokenizer())
    assert decoded(ids) == template().render(made.messages).text
    assert count(ids, "<|im_start|>") == count(ids, "<|im_end|>") == 2 * len(texts)
    ends = ids == backend().token_to_id("<|im_end|>")
    assert ends[weights].sum() == len(texts)
    plain, _ = encode(made, template(), tokenizer(), quoted="token")
    if not any(token in text for turn in texts for text in turn for token in SPECIAL):
        assert ids.tolist() == plain.tolist() == backend().encode(template().render(made.messages).text).ids


def test_a_template_that_reads_special_tokens_in_contents_is_an_error() -> None:
    text = CHATML.replace("message.content +", "message.content.split('<|im_end|>')[-1] +")
    made = conversation("Hi<|im_end|>", "the fox")
    with pytest.raises(
        DataError, match=r"t:1 has a special token in its text, and t.jinja renders other text differently"
    ):
        encode(made, ChatTemplate(text, name="t.jinja"), tokenizer(), "all")


def test_a_token_has_weight_if_it_begins_in_a_reply() -> None:
    text = "{% for m in messages %}{{ m.role }}:{% generation %}{{ ' ' + m.content }}{% endgeneration %}\n{% endfor %}"
    made = read_conversation({"messages": [{"role": "assistant", "content": "the fox"}]}, "t:1")
    ids, weights = encode(made, ChatTemplate(text), tokenizer())
    assert decoded(ids[weights]) == " the fox"
    inside = ChatTemplate(text.replace("{% generation %}{{ ' ' +", "{{ ' ' }}{% generation %}{{"))
    assert decoded(np.concatenate([ids[weights] for ids, weights in [encode(made, inside, tokenizer())]])) == " fox"


def test_a_template_that_marks_what_the_user_writes_is_an_error() -> None:
    block = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    text = "{% for m in messages %}{{ m.role }}:BLOCK\n{% endfor %}"
    made = conversation("the cat", "the fox")
    with pytest.raises(DataError, match=r"t:1: t.jinja puts message 0 \(user\) into a generation block"):
        encode(made, ChatTemplate(text.replace("BLOCK", block), name="t.jinja"), tokenizer())
    of_replies = f"{{% if m.role == 'assistant' %}}{block}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    ids, weights = encode(made, ChatTemplate(text.replace("BLOCK", of_replies)), tokenizer())
    assert decoded(ids[weights]) == "the fox<|im_end|>"


@pytest.mark.thorough
@pytest.mark.parametrize("prefix", ["normalizer", "first", "always", "never"])
@pytest.mark.parametrize("user", [" the  fox", "the <|im_end|>\n fox<|im_start|>"])
def test_tokenizers_that_write_spaces_as_characters_give_the_same_replies(prefix: str, user: str) -> None:
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if prefix == "normalizer":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=500, special_tokens=tokens[:3], show_progress=False))
    state = json.loads(made.to_str())
    size = len(state["model"]["vocab"])
    state["model"]["vocab"] |= {token: size + index for index, token in enumerate(tokens[3:])}
    made = tokenizers.Tokenizer.from_str(json.dumps(state))
    ids, weights = encode(conversation(user, "the quick fox"), template(), ChatTokenizer(made.to_str()))
    if "<|" not in user:
        rendered = template().render(conversation(user, "the quick fox").messages).text
        assert ids.tolist() == made.encode(rendered, add_special_tokens=False).ids
    pieces = [made.id_to_token(number) for number in ids.tolist()]
    assert pieces.count("<|im_end|>") == pieces.count("<|im_start|>") == 2
    assert "".join(np.array(pieces)[weights]).lstrip("\u2581") == "the\u2581quick\u2581fox<|im_end|>"


def test_the_tokenizer_of_texts_serves_conversations_without_changing() -> None:
    texts = train_bpe(TEXTS, 300, "<|im_end|>")
    made = ChatTokenizer.of(texts)
    assert made.specials == ("<|im_end|>",)
    assert made.encode("a<|im_end|>")[0].tolist()[-1] == texts.end_of_text_id
    assert texts.encode(["a<|im_end|>"])[0].tolist()[-1] != texts.end_of_text_id


def test_a_tokenizer_can_be_sent_to_another_process() -> None:
    copy = pickle.loads(pickle.dumps(tokenizer()))
    text = "the <|im_end|> fox"
    assert copy.encode(text)[0].tolist() == tokenizer().encode(text)[0].tolist()


def test_a_tokenizer_that_pads_and_truncates_does_neither() -> None:
    asks = tokenizers.Tokenizer.from_str(backend().to_str())
    asks.enable_truncation(2)
    asks.enable_padding(length=64)
    text = "the quick brown fox"
    assert ChatTokenizer(asks.to_str()).encode(text)[0].tolist() == backend().encode(text).ids


IDS, WEIGHTS = np.arange(6), np.array([False, False, True, True, False, True])


@pytest.mark.parametrize(
    ("policy", "expected"), [("cut_end", [0, 1, 2, 3]), ("cut_start", [2, 3, 4, 5]), ("drop", None)]
)
def test_long_conversations_are_truncated_or_dropped(policy: Any, expected: list[int] | None) -> None:
    cut = truncate(IDS, WEIGHTS, Limit(4, policy))
    if expected is None:
        assert cut is None
    else:
        assert cut is not None
        assert (cut[0].tolist(), cut[1].tolist()) == (expected, WEIGHTS[expected].tolist())


@pytest.mark.parametrize("policy", ["cut_end", "cut_start", "drop", "error"])
def test_conversations_that_fit_are_kept(policy: Any) -> None:
    cut = truncate(IDS, WEIGHTS, Limit(6, policy))
    assert cut is not None
    assert cut[0].tolist() == IDS.tolist()


def test_a_long_conversation_can_be_an_error() -> None:
    with pytest.raises(DataError, match="a.jsonl:3 has 6 tokens, but a sequence at most 4"):
        truncate(IDS, WEIGHTS, Limit(4, "error"), "a.jsonl:3")


@pytest.mark.parametrize(
    ("weights", "trainable"),
    [([], False), ([True], False), ([True, False], False), ([False, True], True), ([False, False], False)],
)
def test_a_conversation_is_trainable_if_a_weight_has_a_token_before_it(weights: list[bool], trainable: bool) -> None:
    assert is_trainable(np.array(weights, dtype=bool)) is trainable


@pytest.mark.thorough
def test_conversations_are_encoded_without_torch() -> None:
    code = "import sys, d9d_data.chat.encode; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
