from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from d9d_core.errors import DataError
from d9d_data.config import TextConfig
from d9d_data.corpus import prepare
from d9d_data.sources import python
from d9d_data.sources.document import Piece, texts_of
from d9d_data.sources.find import find_files
from pydantic import ValidationError

END = 256


def all_tokens(stream) -> list[int]:
    return np.asarray(stream._corpus.tokens).tolist()


def test_bytes_are_the_tokens_and_documents_end_with_the_end_of_text(open_stream, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hé\n", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfb")  # the byte-order mark is no text
    stream = open_stream(tmp_path / "a.txt", tmp_path / "b.txt", sequence_length=2)
    assert all_tokens(stream) == [*"Hé\n".encode(), END, ord("b"), END]
    facts = stream.facts
    assert (facts["vocab_size"], facts["tokens"], facts["documents"], facts["samples"]) == (257, 7, 2, 3)


def test_unigram_entropy_is_that_of_the_token_frequencies(open_stream, corpus: Path) -> None:
    stream = open_stream(corpus)
    tokens = all_tokens(stream)
    expected = -sum(n / len(tokens) * math.log(n / len(tokens)) for n in Counter(tokens).values())
    assert stream.facts["unigram_entropy"] == pytest.approx(expected)


def test_files_directories_and_globs_name_the_same_documents(corpus: Path, monkeypatch) -> None:
    (corpus / ".hidden").write_text("no")
    files = [str(corpus / f"{i:02}.txt") for i in range(12)]
    monkeypatch.chdir(corpus.parent)
    for sources in (files, [str(corpus)], ["corpus/*.txt"], ["**/*.txt"], [str(corpus / "*")]):
        assert [Path(file.name).name for file in find_files(sources)] == [Path(f).name for f in files]


def test_splits_share_no_document_and_together_hold_all(open_stream, corpus: Path) -> None:
    def documents(split: str) -> list[bytes]:
        stream = open_stream(corpus, split=split, held_out=0.25)
        joined = all_tokens(stream)
        starts = stream._corpus.starts
        return [bytes(joined[a : b - 1]) for a, b in itertools.pairwise(starts)]

    train, held_out = documents("train"), documents("held_out")
    assert (len(train), len(held_out)) == (9, 3)
    assert sorted(train + held_out) == sorted(file.read_bytes() for file in corpus.iterdir())


def test_splits_share_cache_and_tokenizer(open_stream, corpus: Path, tmp_path: Path) -> None:
    train = open_stream(corpus, tokenizer={"bpe": 300}, held_out=0.25)
    held_out = open_stream(corpus, tokenizer={"bpe": 300}, held_out=0.25, split="held_out")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert train.facts["unigram_entropy"] == held_out.facts["unigram_entropy"]
    with pytest.raises(DataError, match="other data"):
        held_out.load_state(train.state())


def test_tokenisation_happens_once_until_a_source_changes(open_stream, corpus: Path) -> None:
    notes: list[str] = []
    open_stream(corpus, note=notes.append)
    assert any("12 documents" in note for note in notes)
    told = len(notes)
    open_stream(corpus, note=notes.append, sequence_length=8, batch_size=2)
    assert len(notes) == told
    (corpus / "00.txt").write_text("something else")
    open_stream(corpus, note=notes.append)
    assert len(notes) > told


@pytest.mark.parametrize(("many", "told"), [(12, True), (13, False)])
def test_many_documents_are_announced_before_they_are_read(
    open_stream, corpus: Path, monkeypatch, many: int, told: bool
) -> None:
    notes: list[str] = []
    open_stream(corpus)
    monkeypatch.setattr(prepare, "_MANY", many)
    open_stream(corpus, note=notes.append)
    assert [note.partition(" from ")[0] for note in notes] == ["reading 12 documents"] * told


def test_two_documents_are_not_their_concatenation(open_stream, tmp_path: Path) -> None:
    for name, text in (("one/a", "foxtext dog"), ("two/a", "fox"), ("two/b", "dog")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    counts = [open_stream(tmp_path / folder, sequence_length=2).facts["documents"] for folder in ("one", "two")]
    assert counts == [1, 2]


def test_file_that_changes_while_it_is_read_is_an_error(open_stream, corpus: Path, tmp_path: Path) -> None:
    def append(text: str) -> None:
        if "preparing" in text:
            (corpus / "00.txt").write_text("changed")

    with pytest.raises(DataError, match="a file changed while it was being read"):
        open_stream(corpus, note=append)
    assert list((tmp_path / "cache").iterdir()) == []


def test_damaged_cache_is_rebuilt(open_stream, corpus: Path, tmp_path: Path) -> None:
    before = open_stream(corpus)
    expected = all_tokens(before)
    tokens = next((tmp_path / "cache").rglob("train.tokens.npy"))
    data = bytearray(tokens.read_bytes())
    data[-1] ^= 1
    tokens.write_bytes(data)
    notes: list[str] = []
    after = open_stream(corpus, note=notes.append)
    assert any("damaged" in note for note in notes)
    assert all_tokens(after) == expected
    assert after.state() == before.state()


def test_trained_bpe_is_deterministic_and_shortens_the_text(open_stream, corpus: Path, tmp_path: Path) -> None:
    first = open_stream(corpus, tokenizer={"bpe": 300})
    saved = next((tmp_path / "cache").rglob("tokenizer.json")).read_text()
    for file in (tmp_path / "cache").rglob("manifest.json"):
        file.unlink()
    second = open_stream(corpus, tokenizer={"bpe": 300})
    assert next((tmp_path / "cache").rglob("tokenizer.json")).read_text() == saved
    assert all_tokens(first) == all_tokens(second)
    assert first.facts["vocab_size"] == 300
    assert first.facts["tokens"] < open_stream(corpus).facts["tokens"]


def test_quoted_end_of_text_does_not_end_a_document(open_stream, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("say <|endoftext|> aloud " * 3)
    for tokenizer in ("bytes", {"bpe": 280}):
        stream = open_stream(tmp_path / "a.txt", tokenizer=tokenizer)
        end = END if tokenizer == "bytes" else 0
        assert all_tokens(stream).count(end) == 1


def test_held_out_documents_teach_neither_tokenizer_nor_entropy(open_stream, tmp_path: Path) -> None:
    facts = []
    for folder, aside in (("one", "aaaa " * 50), ("two", "zq " * 50)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.txt").write_text("the fox and the dog " * 5)
        (tmp_path / folder / "unseen.txt").write_text(aside)
        stream = open_stream(tmp_path / folder, tokenizer={"bpe": 400}, held_out=0.5)
        stream.save_assets(tmp_path / folder / "out")
        tokenizer = (tmp_path / folder / "out" / "tokenizer.json").read_text()
        facts.append((stream.facts["unigram_entropy"], tokenizer))
    assert facts[0] == facts[1]


def test_truncation_and_padding_of_a_tokenizer_file_are_ignored(open_stream, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"fox": 0, "?": 1, "</s>": 2}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["</s>"])
    backend.enable_truncation(2)
    backend.enable_padding(length=9, pad_id=1, pad_token="?")
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("fox fox fox")
    stream = open_stream(tmp_path / "a.txt", tokenizer=str(tmp_path), sequence_length=2)
    assert all_tokens(stream) == [0, 0, 0, 2]


def test_large_vocabularies_use_wider_tokens(open_stream, tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(2**16)} | {"</s>": 2**16}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w5 w65535 w7")
    stream = open_stream(tmp_path / "a.txt", tokenizer=str(tmp_path), sequence_length=2)
    assert all_tokens(stream) == [5, 65535, 7, 65536]
    assert stream.facts["vocab_size"] == 65537


def test_docstrings_and_sources_of_the_same_files_are_different_corpora(tmp_path: Path, monkeypatch) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""First."""\n\nclass A:\n    """Second\n\n    lines."""\n    def f(self):\n        if 1:\n'
                      '            def g():\n                "Third \\d"\n')  # fmt: skip
    monkeypatch.setattr(python, "_library", lambda: [module])
    texts = {}
    for source in ("python:docstrings", "python:sources"):
        config = TextConfig(sources=(source,), sequence_length=4)
        texts[source] = bytes(prepare.prepare(config, tmp_path / "cache", print).tokens[:-1].tolist()).decode()
    assert texts["python:docstrings"] == "First.\n\nSecond\n\nlines.\n\nThird \\d"
    assert texts["python:sources"] == module.read_text()


def test_every_python_has_topics() -> None:
    (source,) = find_files(["python:topics"])
    topics = list(texts_of(Piece(source)))
    assert len(topics) > 50
    assert sum(len(topic) for topic in topics) > 300_000


def test_the_sources_of_python_are_those_of_its_library(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(python.sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(DataError, match=r"has no \.py files; use files of your own"):
        find_files(["python:sources"])
    (tmp_path / "module.py").write_text("pass")
    for left_out in ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"):
        (tmp_path / "package" / left_out).mkdir(parents=True)
        (tmp_path / "package" / left_out / "other.py").write_text("raise")
    (tmp_path / "package" / "contest.py").write_text("yield")
    assert [text for file in find_files(["python:sources"]) for text in texts_of(Piece(file))] == ["pass", "yield"]


# --- bad input ---


def test_missing_path_says_what_is_there(open_stream, corpus: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sources\[1\]: .*nope\.txt' does not exist.*holds: 00\.txt, 01\.txt"):
        open_stream(corpus, corpus / "nope.txt")


def test_glob_without_a_match_is_an_error(open_stream, corpus: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sources\[0\]: no file matches .*\*\.md"):
        open_stream(corpus / "*.md")


def test_directory_without_files_is_an_error(open_stream, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"data\.sources\[0\]: the directory .*empty has no files"):
        open_stream(tmp_path / "empty")


def test_corpus_without_text_is_an_error(open_stream, tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="the corpus is empty: none of its 2 files holds text"):
        open_stream(tmp_path / "blank.txt", tmp_path / "empty.txt")


def test_file_that_is_not_utf8_is_named(open_stream, corpus: Path) -> None:
    (corpus / "05.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"05\.txt is not UTF-8 text \(byte 3: .*convert it"):
        open_stream(corpus)


def test_unreadable_file_is_named(open_stream, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text")

    def refuse(_self: Path, _mode: str) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: Permission denied"):
        open_stream(file)


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-of-this-name/x", "a text\n" * 100])
def test_name_that_cannot_be_a_path_is_an_error(open_stream, corpus: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"data\.sources\[0\]: cannot look for '.{,99}': .*give a path"):
        find_files([name])
    with pytest.raises(DataError, match=r"data\.tokenizer: cannot look for '.{,99}': .*'bytes', or \{bpe: 2048\}"):
        open_stream(corpus, tokenizer=name)


@pytest.mark.parametrize(("tokenizer", "end"), [("bytes", "a"), ({"bpe": 300}, "a"), ({"bpe": 300}, "fox")])
def test_end_of_text_that_ordinary_text_would_contain_is_an_error(
    open_stream, tmp_path: Path, tokenizer: object, end: str
) -> None:
    (tmp_path / "a.txt").write_text("fox\nfox\n" * 50)
    with pytest.raises(DataError, match=rf"data\.end_of_text: '{end}' is also a token of ordinary text"):
        open_stream(tmp_path / "a.txt", tokenizer=tokenizer, end_of_text=end)


def test_settings_of_a_trained_tokenizer_are_located_by_the_names_of_the_job_file() -> None:
    with pytest.raises(ValidationError) as caught:
        TextConfig.model_validate({"sources": ["a"], "sequence_length": 4, "tokenizer": {"bpe": 3}})
    assert [error["loc"] for error in caught.value.errors()] == [("tokenizer", "bpe")]


def test_missing_tokenizer_file_is_an_error(open_stream, corpus: Path) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer: '.*absent\.json' does not exist.*'bytes', or \{bpe: 2048\}"):
        open_stream(corpus, tokenizer=str(corpus / "absent.json"))


@pytest.mark.parametrize("content", ["not json", "{}", '{"version": "1.0", "model": {"type": "Nothing"}}'])
def test_file_that_is_no_tokenizer_is_an_error(open_stream, corpus: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"data\.tokenizer: .*tokenizer\.json is not a tokenizer \("):
        open_stream(corpus, tokenizer=str(tmp_path / "tokenizer.json"))


def test_tokenizer_without_a_known_end_of_text_asks_for_one(open_stream, corpus: Path, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"fox": 0, "?": 1, "<done>": 2}, unk_token="?"))
    backend.add_special_tokens(["<done>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"data\.end_of_text: .*does not name the token.*special tokens: <done>"):
        open_stream(corpus, tokenizer=str(tmp_path))
    with pytest.raises(DataError, match=r"data\.end_of_text: .*has no token '<end>'.*<done>"):
        open_stream(corpus, tokenizer=str(tmp_path), end_of_text="<end>")
    stream = open_stream(corpus, tokenizer=str(tmp_path), end_of_text="<done>", sequence_length=2)
    assert all_tokens(stream)[-1] == 2


def test_sequence_longer_than_the_data_is_an_error(open_stream, corpus: Path) -> None:
    tokens = open_stream(corpus).facts["tokens"]
    with pytest.raises(DataError, match=rf"the train split has {tokens}; use at most {tokens - 1}, or more text"):
        open_stream(corpus, sequence_length=tokens)
    assert open_stream(corpus, sequence_length=tokens - 1).facts["samples"] == 1


def test_held_out_fraction_that_sets_nothing_aside_is_an_error(open_stream, corpus: Path) -> None:
    for split in ("train", "held_out"):
        with pytest.raises(DataError, match=r"data\.held_out: 0\.05 of 12 documents is less than one"):
            open_stream(corpus, split=split, held_out=0.05)


def test_batch_that_does_not_divide_is_an_error(open_stream, corpus: Path) -> None:
    with pytest.raises(DataError, match="multiple of 3; use 3 or 6"):
        open_stream(corpus, batch_size=4, microbatch_size=3)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"sources": []}, "name a file"),
        ({"sources": [" "]}, "a source is empty"),
        ({"sources": ["python:topic"]}, "unknown source 'python:topic'; did you mean 'python:topics'"),
        ({"sequence_length": 0}, "greater than or equal to 1"),
        ({"held_out": 0.6}, "less than or equal to 0.5"),
        ({"split": "held_out"}, "needs a held_out fraction above 0"),
        ({"tokenizer": {"bpe": 256}}, "greater than or equal to 257"),
        ({"tokenizer": {"bppe": 300}}, "did you mean 'bpe'"),
        ({"tokenizer": 7}, "use 'bytes', the path of a tokenizer.json, or {bpe: 2048}"),
        ({"sources": "corpus"}, r"sources must be a list; write \[corpus\]"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        TextConfig.model_validate({"sources": ["a"], "sequence_length": 4} | values)


def test_documents_fill_samples_by_best_fit(corpus, open_stream) -> None:
    notes: list[str] = []
    fields = {"packing": "best_fit", "shuffle": False, "batch_size": 1, "microbatch_size": 1}
    stream = open_stream(corpus, sequence_length=96, note=notes.append, **fields)
    tokens, starts = stream._corpus.tokens, stream._corpus.starts
    found = []
    used = 0
    for _ in range(stream.facts["samples"]):
        (batch,) = stream.next_pack()
        length = int(batch["lengths"])
        used += length
        documents = batch["documents"][0, :length]
        for number in documents.unique().tolist():
            here = documents == number
            assert batch["positions"][0, :length][here].tolist() == list(range(int(here.sum())))
            ids = batch["tokens"][0, :length][here].tolist()
            assert batch["targets"][0, :length][here].tolist()[:-1] == ids[1:]
            found.append([*ids, int(batch["targets"][0, :length][here][-1])])
    wanted = []
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        document = tokens[first:last].tolist()
        wanted += [document[begin : begin + 97] for begin in range(0, len(document) - 1, 96)]
    assert sorted(found) == sorted(wanted)
    assert stream.facts["unused_positions"] == pytest.approx(1 - used / (96 * stream.facts["samples"]))
    assert any("% is padding" in note for note in notes)
