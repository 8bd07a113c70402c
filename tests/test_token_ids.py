"""One rule for the token ids of all datasets: equal to transformers', and one end of text where a dataset adds it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from d9d_core.data import DataContext
from d9d_data.config import (
    ChatConfig,
    DocumentsConfig,
    LabelledConfig,
    PairsConfig,
    PreferenceConfig,
    TextConfig,
)
from d9d_data.stream.chat import build_chat, build_preference
from d9d_data.stream.documents import build_documents
from d9d_data.stream.text import build_text

transformers = pytest.importorskip("transformers")
# Other people's libraries warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore")

#: What tokenizers add to a text, and the token that ends texts.
KINDS = {
    "nothing": ("$A", "</s>"),
    "a beginning": ("<s> $A", "</s>"),
    "both": ("<s> $A </s>", "</s>"),
    "marks around": ("[CLS] $A [SEP]", "[SEP]"),
    "marks, another end": ("[CLS] $A [SEP]", "</s>"),
}
SPECIAL = ["<s>", "</s>", "[CLS]", "[SEP]"]
TEXTS = ["a text", "another one", "the third"]
TEMPLATE = "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(kind: str, tmp_path: Path) -> Path:
    """Tokenizer that adds special tokens of some kind, as ``save_pretrained`` writes it."""
    return write_tokenizer(tmp_path / "model", *KINDS[kind])


def write_tokenizer(directory: Path, single: str, end: str) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    ids = [(token, backend.token_to_id(token)) for token in SPECIAL]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=ids)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def rows_of(stream: Any) -> list[list[int]]:
    """Token ids of the rows of one pass, the last target included where tokens are predicted."""
    rows: list[list[int]] = []
    while len(rows) < stream.facts["rows"]:
        for batch in stream.next_pack():
            places = range(int((batch["rows"] >= 0).sum()))
            lengths = batch.get("lengths", batch["tokens"].new_full((len(batch["tokens"]),), batch["tokens"].shape[1]))
            for place in places:
                size = int(lengths[place])
                ids = batch["tokens"][place, :size].tolist()
                rows.append(ids + ([int(batch["targets"][place, size - 1])] if "targets" in batch else []))
    return rows


Open = Callable[..., Any]


@pytest.fixture
def opened(model: Path, tmp_path: Path) -> Open:
    def build(config: type[Any], build: Any, records: list[Mapping[str, Any]], **fields: Any) -> Any:
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        values = {"sources": [str(tmp_path / "data.jsonl")], "sequence_length": 64, "shuffle": False, **fields}
        context = DataContext(0, 1, 1, tmp_path / "cache", one_pass=True, note=fields.pop("note", lambda _text: None))
        values = {name: value for name, value in values.items() if name != "note"} | {"tokenizer": str(model)}
        return build(config.model_validate(values), context)

    return build


def ended(tokenizer: Any, text: str) -> list[int]:
    ids = list(tokenizer(text)["input_ids"])
    return ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


@pytest.mark.thorough
def test_texts_have_what_the_tokenizer_adds_and_one_end(model: Path, opened: Open) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    expected = [ended(tokenizer, text) for text in TEXTS]
    records = [{"text": text} for text in TEXTS]
    assert rows_of(opened(DocumentsConfig, build_documents, records)) == expected
    row = [number for ids in expected for number in ids]
    stream = opened(TextConfig, build_text, records, field="text", sequence_length=len(row) - 1)
    assert [*stream.next_pack()[0]["tokens"][0].tolist(), row[-1]] == row
    pairs = [{"query": TEXTS[0], "positive": TEXTS[1]}]
    assert rows_of(opened(PairsConfig, build_documents, pairs)) == expected[:2]


def test_texts_with_labels_have_what_the_tokenizer_adds(model: Path, opened: Open) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    records = [{"text": text, "label": number % 2} for number, text in enumerate(TEXTS)]
    found = rows_of(opened(LabelledConfig, build_documents, records))
    assert found == [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.mark.thorough
def test_completions_are_texts_and_conversations_are_what_the_template_renders(model: Path, opened: Open) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    strings = [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " five"}]
    expected = [ended(tokenizer, f"2 + 2 ={text}") for text in (" 4", " five")]
    assert rows_of(opened(PreferenceConfig, build_preference, strings)) == expected
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    (found,) = rows_of(opened(ChatConfig, build_chat, [{"messages": messages}]))
    assert found == tokenizer.apply_chat_template(messages, return_dict=False)


@pytest.mark.thorough
def test_special_tokens_that_are_recognised_are_tokens_and_none_comes_twice(
    model: Path, kind: str, opened: Open
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    records = [{"text": text} for text in ("a</s>b", "<s>x[SEP]</s>")]
    notes: list[str] = []
    first, second = rows_of(
        opened(DocumentsConfig, build_documents, records, special_tokens="token", note=notes.append)
    )
    assert first == ended(tokenizer, "a</s>b")
    assert second.count(tokenizer.convert_tokens_to_ids("<s>")) == 1
    if kind != "marks, another end":  # whose tokenizer adds a mark between the two
        assert second.count(tokenizer.convert_tokens_to_ids("</s>")) == 1
    assert any(
        "2 of 2 documents spell special tokens, such as </s>, which are read as these tokens" in n for n in notes
    )
    plain = rows_of(opened(DocumentsConfig, build_documents, records, note=notes.append))
    assert len(plain[0]) > len(first)
    assert "which are read as ordinary text; 'special_tokens: token'" in "".join(notes)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["nothing", "a beginning"], indirect=True)
def test_texts_and_pairs_have_the_ids_that_trl_gives_them(kind: str, model: Path, opened: Open, tmp_path: Path) -> None:
    """Where a tokenizer adds an end itself, TRL adds a second one, and we do not."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, pad_token="[CLS]")
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(model)
    common: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": []}

    def trainer(kind: Any, args: Any, records: list[Mapping[str, Any]]) -> Any:
        network = transformers.Qwen3ForCausalLM.from_pretrained(model)
        data = datasets.Dataset.from_list(records)
        return kind(network, args=args, train_dataset=data, processing_class=tokenizer).train_dataset

    texts: list[Mapping[str, Any]] = [{"text": text} for text in TEXTS]
    theirs = trainer(trl.SFTTrainer, trl.SFTConfig(**common), texts)
    assert rows_of(opened(DocumentsConfig, build_documents, texts)) == [list(ids) for ids in theirs["input_ids"]]
    strings = [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " five"}]
    (pair,) = trainer(trl.DPOTrainer, trl.DPOConfig(**common), strings)
    expected = [[*pair["prompt_ids"], *pair[side]] for side in ("chosen_ids", "rejected_ids")]
    assert rows_of(opened(PreferenceConfig, build_preference, strings)) == expected


@pytest.mark.parametrize("kind", ["a beginning"], indirect=True)
def test_a_checkpoint_of_other_token_ids_says_so(model: Path, opened: Open) -> None:
    records = [{"text": text} for text in TEXTS]
    stream = opened(DocumentsConfig, build_documents, records)
    older = {"consumed": 1, "fingerprint": "0" * 16}
    with pytest.raises(Exception, match="another version of d9d-data saved it and made other tokens of some texts"):
        stream.load_state(older)
    with pytest.raises(Exception, match="belongs to other data") as caught:
        stream.load_state({**stream.state(), "fingerprint": "0" * 16})
    assert "another version" not in str(caught.value)
