"""Searches for sources, buffers of similar items, packs of a loader, and small parts of conversations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from d9d_core.errors import DataError
from d9d_data.chat.conversation import (
    Conversation,
    call_names,
    has_string_arguments,
    join_conversation,
    text_of,
)
from d9d_data.chat.formats import read_conversation
from d9d_data.chat.preference import _common
from d9d_data.cli.commands import app
from d9d_data.library.bucketing import BufferSortedDataset, sorted_packs
from d9d_data.library.packing import FixedCountPacker
from d9d_data.order.permutation import Permutation
from d9d_data.sources import find
from d9d_data.sources.find import find_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with files, hidden ones too."""
    monkeypatch.chdir(tmp_path)
    for name in ("c/b.txt", "c/a.jsonl", "c/d/e.txt", "c/.hidden.txt", "c/.h/x.txt", "z.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def names(*sources: str) -> list[str]:
    return [file.address for file in find_files(sources)]


@pytest.mark.usefixtures("folder")
def test_sources_stay_in_order_and_files_of_a_source_are_sorted_without_hidden_ones() -> None:
    assert names("z.txt", "c") == ["z.txt", "c/a.jsonl", "c/b.txt", "c/d/e.txt"]
    assert names("c/*.txt") == ["c/b.txt"]
    assert names("c/**/*.txt") == ["c/b.txt", "c/d/e.txt"]
    assert names("c/.h") == ["c/.h/x.txt"]
    assert [(file.format, file.compression) for file in find_files(["c/a.jsonl", "z.txt"])] == [
        ("jsonl", ""), ("text", ""),
    ]  # fmt: skip


def test_a_missing_path_shows_what_its_longest_existing_part_holds(folder: Path) -> None:
    def told(source: str) -> str:
        with pytest.raises(DataError) as caught:
            find_files(["z.txt", source])
        return str(caught.value)

    start = f"data.sources[1]: 'c/q/r/s.txt' does not exist (from {folder}); {folder}/c holds: "
    assert told("c/q/r/s.txt") == f"{start}.h, .hidden.txt, a.jsonl, b.txt, d"
    (folder / "c" / "f").mkdir()
    assert told("c/q/r/s.txt") == f"{start}.h, .hidden.txt, a.jsonl, b.txt, d, ..."
    assert told("c/f/x").endswith(f"{folder}/c/f holds: nothing")
    assert told("z.txt/x").endswith(f"{folder} holds: c, z.txt")
    assert told("c/f").startswith("data.sources[1]: the directory c/f has no files")
    assert told("c/*.csv") == f"data.sources[1]: no file matches 'c/*.csv' (from {folder}); '**' matches any folders"
    long = "n" * 300
    assert told(long).startswith(f"data.sources[1]: cannot look for '{'n' * 80}...': ")


@pytest.mark.usefixtures("folder")
def test_long_searches_are_announced_at_each_tenfold_number_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(find, "_MANY", 2)
    assert find._counted(iter("abcdefghij" * 2), "here", told.append) == list("abcdefghij" * 2)
    assert told == [f"here has {count} files, and the search continues" for count in (2, 20)]
    monkeypatch.setattr(find, "MAX_FILES", 3)
    assert len(find_files(["c"])) == 3
    monkeypatch.setattr(find, "MAX_FILES", 2)
    with pytest.raises(DataError, match=r"data.sources\[0\]: .*/c has more than 2 files; name the folder"):
        find_files(["c"])


@pytest.mark.parametrize("file", [("dataset_dict.json",), ("state.json", "dataset_info.json")])
def test_a_saved_dataset_needs_its_prefix(folder: Path, file: tuple[str, ...]) -> None:
    (folder / "c" / file[0]).write_text("{}")
    if len(file) == 2:
        assert len(find_files(["c"])) == 4
        (folder / "c" / file[1]).write_text("{}")
    with pytest.raises(DataError, match=r"c seems to be saved by the library 'datasets'; write 'hf:c'"):
        find_files(["c"])


class Sizes:
    """Dataset of items named by their places, with sizes."""

    def __init__(self, *sizes: float) -> None:
        self.sizes = sizes
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> str:
        return f"item {index}"

    def sort_key(self, index: int) -> float:
        self.asked.append(index)
        return self.sizes[index]


def test_items_of_a_buffer_are_sorted_and_an_incomplete_pack_stays_last() -> None:
    dataset = Sizes(5, 1, 4, 2, 9, 8, 7)
    sorted_items = BufferSortedDataset(dataset, 4, 2, None)
    assert [sorted_items.place_of(index) for index in range(7)] == [1, 3, 2, 0, 6, 5, 4]
    assert dataset.asked == list(range(7))  # each size once
    assert (sorted_items[0], sorted_items.sort_key(0), len(sorted_items)) == ("item 1", 1, 7)
    for wrong in (-1, 7):
        with pytest.raises(IndexError, match=f"item {wrong} in a dataset of 7"):
            sorted_items[wrong]
    for sizes in ((4, 0), (0, 2), (5, 2)):
        with pytest.raises(ValueError, match=f"{sizes[0]} is not a positive multiple of pack_size {sizes[1]}"):
            BufferSortedDataset(dataset, *sizes)
    shuffled = BufferSortedDataset(dataset, 6, 2, 3)
    packs = [[1, 3], [2, 0], [5, 4]]
    order = Permutation(3, "seed 3 packs of buffer 0")(np.arange(3)).tolist()
    expected = [place for pack in order for place in packs[pack]]
    assert [shuffled.place_of(index) for index in range(7)] == [*expected, 6]


def test_equal_sizes_keep_their_order_and_few_items_are_only_sorted() -> None:
    assert sorted_packs(np.asarray([2, 1, 2, 1]), 2, None).tolist() == [1, 3, 0, 2]
    assert sorted_packs(np.asarray([2, 1]), 3, "key").tolist() == [1, 0]
    assert sorted_packs(np.asarray([3, 2, 1]), 2, "key").tolist() == [2, 1, 0]


def test_packs_of_a_loader_have_one_size() -> None:
    def packs(size: int, count: int, drop: bool) -> list[list[int]]:
        packer = FixedCountPacker(range(size), count, drop)
        found = list(packer)
        assert len(packer) == len(found)
        return found

    assert packs(5, 2, True) == [[0, 1], [2, 3]]
    assert packs(5, 2, False) == [[0, 1], [2, 3], [4]]
    assert packs(4, 2, False) == packs(4, 2, True) == [[0, 1], [2, 3]]
    assert packs(1, 2, True) == packs(0, 1, False) == []
    assert list(FixedCountPacker(range(3), 2)) == [[0, 1]]
    with pytest.raises(ValueError, match="count, the number of microbatches of a pack, is 0; use at least 1"):
        FixedCountPacker([], 0)
    with pytest.raises(TypeError, match="list_iterator has no length"):
        len(FixedCountPacker(iter([1]), 1))


def test_calls_and_texts_of_a_message_in_either_form() -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}, {"name": "g"}]
    assert call_names({"tool_calls": calls}) == ["f", "g"]
    assert call_names({}) == []
    assert text_of({"content": [{"text": "a"}, {"text": "b"}]}) == "ab"
    assert text_of({}) == ""
    assert has_string_arguments({"messages": [{"tool_calls": calls}]})
    assert has_string_arguments(({"a": {"tool_calls": [{"name": "g", "arguments": "x"}]}},))
    for none in ({"tool_calls": [{"name": "g", "arguments": {}}]}, {"tool_calls": "x"}, [1, "a"], "a", {"a": 1}):
        assert not has_string_arguments(none)


def test_arguments_that_are_json_objects_are_parsed_and_others_stay() -> None:
    texts = ('{"a": 1}', "[1]", "x", {"b": 2})
    functions = [{"name": f"f{number}", "arguments": text} for number, text in enumerate(texts)]
    calls = [{"function": functions[0], "id": "1"}, *functions[1:], {"name": "bare"}]
    record = {"messages": [{"role": "assistant", "tool_calls": calls}]}
    parsed = read_conversation(record, "w", "parse").messages[0]["tool_calls"]
    assert parsed[0] == {"function": {"name": "f0", "arguments": {"a": 1}}, "id": "1"}
    assert parsed[1:] == calls[1:]
    assert read_conversation(record, "w").messages[0]["tool_calls"] == calls


def test_replies_and_the_last_turn_begin_after_the_prompt() -> None:
    found = join_conversation("q", [{"role": "assistant", "content": "a"}] * 2, "completion", None, "w")
    assert (found.prompt, found.replies, found.last_turn, found.tools) == (1, (1, 2), 1, None)
    roles = ("user", "assistant", "user", "assistant", "user")
    chat = Conversation(tuple({"role": role, "content": "x"} for role in roles))
    assert (chat.replies, chat.last_turn, chat.where) == ((1, 3), 3, "the conversation")
    with pytest.raises(DataError, match="w: rejected has no assistant message"):
        join_conversation("q", [{"role": "user", "content": "a"}], "rejected", None, "w")


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 4], 2), ([], [1], 0), ([3], [1], 0), ([1], [1], 1)],
)
def test_ids_have_a_common_beginning(one: list[int], other: list[int], common: int) -> None:
    ids: Any = [np.asarray(side, dtype=np.int64) for side in (one, other)]
    assert _common(*ids) == common


def test_the_command_offers_help_and_no_completion() -> None:
    info = SimpleNamespace(**vars(app.info))
    assert (info.no_args_is_help, app._add_completion) == (True, False)
    assert app.pretty_exceptions_enable is False
