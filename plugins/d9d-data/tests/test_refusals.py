"""Refusals of data that name the fault: files that cannot be read, items, samples and directories of a cache."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from d9d_core.errors import DataError
from d9d_data.chat import template
from d9d_data.chat.conversation import Conversation
from d9d_data.chat.encode import _weights
from d9d_data.corpus import cache
from d9d_data.corpus.npy_writer import NpyWriter
from d9d_data.dataset.items import Items
from d9d_data.dataset.stream import ItemSamples
from d9d_data.library.sharding import ShardedDataset
from d9d_data.sources import python
from d9d_data.sources.opening import file_system
from d9d_data.tokenizer import file as tokenizer_file
from d9d_data.tokenizer import select


def unreadable(path: Path, *_: object, **__: object) -> bytes:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


# --- files ------------------------------------------------------------------------------------------------------------


def test_an_address_of_an_unknown_file_system_is_named() -> None:
    with pytest.raises(DataError, match=r"^data\.sources: cannot open nosuch://a: .*nosuch"):
        file_system("nosuch://a")


def test_a_python_without_its_reference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"this Python has no pydoc_data\.topics, so 'python:topics' is empty; use 'py"):
        python.topics()


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(select, "read_regular", unreadable)
    monkeypatch.setattr(tokenizer_file, "read_regular", unreadable)
    with pytest.raises(DataError) as error:
        select.tokenizer_identity(str(path))
    assert str(error.value) == f"data.tokenizer: cannot read {path}: Permission denied; make it readable"
    with pytest.raises(DataError) as error:
        tokenizer_file.read_tokenizer(path)
    assert str(error.value) == f"data.tokenizer: cannot read {path}: Permission denied; make it readable"
    other = path.with_name(next(iter(tokenizer_file.BESIDE)))
    other.write_text("{}")
    with pytest.raises(DataError) as error:
        tokenizer_file._beside(path)
    assert str(error.value) == f"data.tokenizer: cannot read {tmp_path}: Permission denied; make it readable"


def test_a_config_of_a_template_is_a_readable_json_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json holds no JSON object; repair it or move it away"):
        template._read_config(path)
    path.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON \("):
        template._read_config(path)
    path.write_text('{"a": 1}')
    assert template._read_config(path) == {"a": 1}
    monkeypatch.setattr(template, "read_regular", unreadable)
    with pytest.raises(DataError, match=r"^cannot read .*: Permission denied; make it readable$"):
        template._read_config(path)


def test_an_array_file_whose_header_grew_beyond_its_space_is_an_error(tmp_path: Path) -> None:
    with NpyWriter(tmp_path / "a.npy", np.int64) as writer:
        writer.append(np.asarray([3, 4]))
    assert np.load(tmp_path / "a.npy").tolist() == [3, 4]
    no_space = pytest.raises(RuntimeError, match=r"the header of .*b\.npy no longer fits the space reserved for it")
    with no_space, NpyWriter(tmp_path / "b.npy", np.int64) as writer:
        writer.length = 10**200
    assert writer._file.closed


# --- directories of a cache -------------------------------------------------------------------------------------------


def moved(monkeypatch: pytest.MonkeyPatch, *failures: OSError) -> list[Path]:
    """Let moves into the cache fail with these errors, and then succeed; the attempts."""
    attempts: list[Path] = []
    real, left = cache.move, list(failures)

    def move(source: Path, target: Path) -> None:
        attempts.append(target)
        if left:
            raise left.pop(0)
        real(source, target)

    monkeypatch.setattr(cache, "move", move)
    return attempts


def test_a_directory_that_another_process_renames_meanwhile_is_published_at_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").mkdir()
    gone = [OSError(errno.ENOTEMPTY, "not empty"), OSError(errno.EEXIST, "exists")]
    attempts = moved(monkeypatch, *gone)
    cache._publish(tmp_path / "new", tmp_path / "key", (), False)
    assert ([path.name for path in tmp_path.iterdir()], len(attempts)) == (["key"], 3)


def test_a_directory_that_cannot_be_published_is_the_error_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = moved(monkeypatch, OSError(errno.ENOSPC, "no space"))
    with pytest.raises(OSError, match="no space"):
        cache._publish(tmp_path / "new", tmp_path / "key", (), False)
    assert len(attempts) == 1


def test_a_directory_that_keeps_changing_is_given_up_after_ten_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = moved(monkeypatch, *[OSError(errno.EEXIST, "exists") for _ in range(20)])
    with pytest.raises(OSError, match="key keeps changing; stop other processes that write there"):
        cache._publish(tmp_path / "new", tmp_path / "key", (), False)
    assert len(attempts) == 10


# --- samples and items ------------------------------------------------------------------------------------------------


def said(*weights: float | None) -> Conversation:
    """Conversation of a user and an assistant, whose replies have these weights."""
    messages: list[Any] = []
    for weight in weights:
        messages.append({"role": "user", "content": "?"})
        messages.append({"role": "assistant", "content": "!"} | ({} if weight is None else {"weight": weight}))
    return Conversation(tuple(messages), where="a.jsonl:3")


def test_a_reply_is_learned_with_the_weight_of_its_message() -> None:
    assert _weights(said(None, 1), 0, 3) == [1.0, 1.0, 1.0]
    assert _weights(said(0.5, None), 0, 2) == [0.5, 1.0]
    assert _weights(said(0.5, 0.25), 2, 1) == [0.25]
    assert _weights(said(0.5, 0.25), 3, 1) == [0.25]
    with pytest.raises(DataError, match=r"a\.jsonl:3 has a message with a weight, but data\.loss: all trains on every"):
        _weights(said(0.5), 2, 1)
    with pytest.raises(DataError, match=r"the template marks 3 texts in 2 replies; remove the weights"):
        _weights(said(0.5, 0.25), 0, 3)


def test_a_shard_has_a_known_mode() -> None:
    mode: Any = "strided"
    with pytest.raises(ValueError, match="mode is 'strided'; use 'sequential' or 'chunked'"):
        ShardedDataset([1, 2], 2, 0, mode)


def test_a_field_of_a_microbatch_has_one_dtype() -> None:
    config: Any = SimpleNamespace(build="mine:items", padding={}, side="right", pad_multiple=1)
    items = Items.__new__(Items)
    items.config = config
    ints, floats = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.float32)
    with pytest.raises(DataError) as error:
        items._stacked("x", [ints, floats, ints], [4, 5, 6])
    assert str(error.value) == "data.build: field 'x' of mine:items has several dtypes: float32, int64; use one"


def test_items_of_one_pass_have_no_field_of_its_name() -> None:
    config = SimpleNamespace(build="mine:items")
    items: Any = SimpleNamespace(config=config, collate=lambda indices: {"rows": indices})
    with pytest.raises(
        DataError, match="items of mine:items have a field 'rows', which one pass uses for item indices"
    ):
        ItemSamples(items).microbatch(np.asarray([3]))
    items.collate = lambda indices: {"x": np.asarray(indices) * 2}
    found = ItemSamples(items).microbatch(np.asarray([3, 1]))
    assert {name: values.tolist() for name, values in found.items()} == {"x": [6, 2], "rows": [3, 1]}
