"""Names in messages about data: at most so many, cut at a length, and a hint where a name is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import DataError
from d9d_data.chat import formats
from d9d_data.fields import labelled, pairs, tokens
from d9d_data.sources import document, find, lines, tables
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.place import Place, Record
from d9d_data.tokenizer.byte_level import BytesTokenizer

FILE = SourceFile.of("a.jsonl")
#: Names of which the first is too long, and two are too many.
NAMES = ["n" * 41, *(f"n{number}" for number in range(21))]
SHOWN = ", ".join(["n" * 40, *(f"n{number}" for number in range(19))])


def record(**values: Any) -> Record:
    return Record(values, Place(FILE, 7))


def test_a_record_without_a_text_shows_twenty_of_its_fields() -> None:
    many = record(**dict.fromkeys(NAMES, 1))
    assert document._no_text(many, "text", None).startswith(f"has no text in a field 'text' (it has {SHOWN}); write")
    assert "(it has none); write" in document._no_text(record(), "text", None)
    assert "(it has text); it is empty there: write" in document._no_text(record(text=None), "text", None)
    assert "(it has text); it is a number there: write" in document._no_text(record(text=3), "text", 3)


def test_a_labelled_record_shows_twenty_of_its_fields() -> None:
    found = str(labelled._without(record(**dict.fromkeys(NAMES, 1)), "label", "label"))
    assert found.startswith(f"a.jsonl:7 has no label in a field 'label' (it has {SHOWN}); name another field")
    assert "(it has none); name" in str(labelled._without(record(), "label", "label"))
    assert "(it has label); it is a number there; name" in str(labelled._without(record(label=3), "label", "label"))
    assert "(it has label); name" in str(labelled._without(record(label="x"), "label", "label"))


def test_a_pair_and_a_record_of_tokens_show_twenty_of_their_fields() -> None:
    encoder = pairs.PairsEncoder(
        BytesTokenizer("<|endoftext|>"), "query", "positive", None, 0, "", "", longest=9, too_long="cut_end"
    )
    many = dict.fromkeys(NAMES, 1)
    for values, shown in ((many, SHOWN), ({}, "none")):
        with pytest.raises(DataError) as error:
            encoder._sample(record(**values))
        assert f"a.jsonl:7 has no text in query (it has {shown}); write records such as" in str(error.value)
    for values, shown in (({"none": None, **many}, SHOWN), ({"none": None}, "none")):
        with pytest.raises(DataError) as error:
            tokens._numbers(record(**values), "input_ids")
        assert str(error.value) == f"a.jsonl:7 has no field 'input_ids' (it has {shown}); give a list of numbers"
    with pytest.raises(DataError) as error:
        tokens._numbers(record(input_ids=[1, 2, "x" * 41]), "input_ids")
    assert str(error.value) == f"a.jsonl:7: input_ids[2] is {'x' * 40}; give whole numbers of at most 64 bits"


def test_a_conversation_shows_twenty_of_its_fields_and_little_of_their_values() -> None:
    assert formats._fields(dict.fromkeys(NAMES, 1)) == SHOWN
    assert formats._fields({"none": None, "a": 1}) == "a"
    assert formats._fields({"none": None}) == "none"
    most = formats._SHOWN
    long = {"n" * (most + 1): ["x" * (most + 1), *range(20)], **{f"n{number}": 0 for number in range(20)}}
    assert formats._shortened(long) == {
        "n" * most: ["x" * most, *range(19)], **{f"n{number}": 0 for number in range(19)}
    }  # fmt: skip
    assert formats._shortened((1, {"a": None})) == [1, {"a": None}]


def test_columns_of_a_table_are_shown_with_the_likely_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "likely_field", lambda _file, _columns: None)
    assert document._choice(FILE, NAMES) == f"it has {SHOWN}, ..."
    assert document._choice(FILE, NAMES[:20]) == f"it has {SHOWN}"
    assert document._choice(FILE, []) == "it has none"
    monkeypatch.setattr(document, "likely_field", lambda _file, columns: columns[1])
    assert document._choice(FILE, ["a", "b"]) == "it has a, b; 'b' looks right: 'data.field: b'"
    assert lines._shown(NAMES) == SHOWN
    assert lines._shown(["a\udce9"]) == "a?"


def test_a_likely_field_has_a_known_name_or_the_longest_text_of_the_first_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [record(a="x", b="xyz", c="xy", d=5), record(a="x" * 9)]
    monkeypatch.setattr(document, "read_records", lambda _file, reject: iter(found))
    assert document.likely_field(FILE, ["a", "b"]) == "b"
    assert document.likely_field(FILE, ["a", document._LIKELY[1], document._LIKELY[0]]) == document._LIKELY[0]
    found[:] = [record(d=5)]
    assert document.likely_field(FILE, ["d"]) is None
    found.clear()
    assert document.likely_field(FILE, ["d"]) is None


def test_a_missing_path_shows_five_of_the_names_there(tmp_path: Path) -> None:
    assert find._nearest(tmp_path / "none" / "x") == f"{tmp_path.resolve()} holds: nothing"
    for number in range(5):
        (tmp_path / f"{number}").touch()
    assert find._nearest(tmp_path / "none") == f"{tmp_path.resolve()} holds: 0, 1, 2, 3, 4"
    (tmp_path / "5").touch()
    assert find._nearest(tmp_path / "none") == f"{tmp_path.resolve()} holds: 0, 1, 2, 3, 4, ..."
    assert find._nearest(Path("x")) != "check the spelling"  # the working directory is there
    assert find._nearest(Path()) == "check the spelling"


def test_a_source_that_cannot_be_looked_for_is_shown_up_to_80_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> Any:
        raise ValueError("a zero byte")

    monkeypatch.setattr(find, "_files", refused)
    for length, shown in ((80, "x" * 80), (81, "x" * 80 + "...")):
        with pytest.raises(DataError) as error:
            find.find_files(["x" * length])
        assert f"cannot look for '{shown}': a zero byte; give a path" in str(error.value)


def test_the_reason_of_an_unreadable_table_is_the_first_line_up_to_300_characters() -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError) as error, tables._explained(SourceFile.of("a.parquet")):
        raise ValueError("e" * 301 + "\nmore")
    assert str(error.value).startswith(
        f"data.sources: a.parquet is not a readable parquet file ({'e' * 300}); write it again"
    )
    with pytest.raises(MemoryError), tables._explained(SourceFile.of("a.parquet")):
        raise MemoryError
