"""``d9d state``: sizes and formats, comparison of two checkpoints, and windows of a checkpoint's tensors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from d9d_weights.checkpoint.tensors import CheckpointTensors
from d9d_weights.progress import SampleBar
from d9d_weights.state import command
from d9d_weights.state import tensors as module
from d9d_weights.state.command import app
from d9d_weights.state.tensors import (
    Conversion,
    _print_tensors,
    _refuse_taken,
    _taken_over,
    diff_states,
    parse_dtype,
    parse_size,
)
from torch import Tensor
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5_000_000_000), ("512MiB", 512 * 2**20), ("2 kb", 2000), ("1.5KiB", 1536), ("3TB", 3 * 10**12),
        ("7B", 7), ("0.1B", 1), (" 4GiB ", 4 * 2**30),
    ],
)  # fmt: skip
def test_sizes_of_files_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5", "GB", "0GB", "-1GB", "1.2.3GB", "5XB", "1e3GB"])
def test_what_is_no_size_of_a_file_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="is not a size, such as 5GB or 512MiB"):
        parse_size(text)


def test_number_formats_are_floating_point() -> None:
    assert parse_dtype("bfloat16") == torch.bfloat16
    assert parse_dtype(None) is None
    for text in ("int8", "nn", "float7"):
        with pytest.raises(CheckpointError, match=f"--dtype: '{text}' is not a floating-point format"):
            parse_dtype(text)


def test_a_target_is_absent_or_an_empty_directory(tmp_path: Path) -> None:
    _refuse_taken(str(tmp_path / "new"))
    _refuse_taken(str(tmp_path))
    (tmp_path / "file").write_text("")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(CheckpointError, match="exists: name a new directory, or remove "):
            _refuse_taken(str(taken))


class Tensors:
    """Tensors in memory."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors
        self.specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
        part = self.tensors[name]
        for dim, (begin, size) in enumerate(zip(offset, into.shape, strict=True)):
            part = part.narrow(dim, begin, size)
        into.copy_(part)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.ones(1, dtype=torch.int64)
    left = Tensors(
        a=torch.tensor([1.0, 2.0]),
        b=torch.ones(2),
        c=torch.ones(1),
        d=torch.ones(3),
        e=counts,
    )
    right = Tensors(
        a=torch.tensor([1.0, 2.5]), b=torch.ones(2), d=torch.ones(2), e=torch.ones(1), f=torch.ones(1, 4).bfloat16()
    )

    @contextmanager
    def opened(location: str) -> Iterator[Tensors]:
        yield {"left": left, "right": right}[location]

    monkeypatch.setattr(module, "opened", opened)


def test_two_checkpoints_are_compared_name_by_name(two: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert not diff_states("left", "right", 0.0, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["tensors"] == 6
    assert [
        (row["name"], row["difference"], row["left"], row["right"], row["largest"]) for row in found["different"]
    ] == [
        ("a", "numbers", "[2] float32", "[2] float32", 0.5),
        ("c", "only on the left", "[1] float32", "-", None),
        ("d", "shape", "[3] float32", "[2] float32", None),
        ("e", "dtype", "[1] int64", "[1] float32", 0.0),
        ("f", "only on the right", "-", "[1, 4] bfloat16", None),
    ]


def test_a_comparison_is_printed_as_a_table(two: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert not diff_states("left", "right", 0.49, as_json=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "tensor difference left right largest deviation"
    assert lines[1] == "a numbers [2] float32 [2] float32 0.5"
    assert lines[-1] == "6 tensors: 1 equal within 0.49, 5 different"
    assert len(lines) == 7
    assert not diff_states("left", "right", 0.5, as_json=False)
    assert capsys.readouterr().out.splitlines()[-1] == "6 tensors: 2 equal within 0.5, 4 different"


def test_equal_checkpoints_print_no_table(two: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff_states("left", "left", 0.0, as_json=False)
    assert capsys.readouterr().out == "5 tensors: 5 equal within 0, 0 different\n"


def test_tensors_are_listed_with_their_totals(capsys: pytest.CaptureFixture[str]) -> None:
    specs = {
        "layers.0.w": TensorSpec((2**20, 3), torch.float32),
        "layers.1.w": TensorSpec((2**20, 3), torch.float32),
        "n": TensorSpec((2**29,), torch.bfloat16),
    }
    _print_tensors(specs, as_json=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "tensor shape dtype count"
    assert lines[1].endswith("[1048576, 3] float32 2")
    assert lines[2] == "n [536870912] bfloat16 1"
    assert lines[3] == f"3 tensors, {6 * 2**20 + 2**29:,} numbers, 1.02 GiB"
    _print_tensors(specs, as_json=True)
    assert json.loads(capsys.readouterr().out)["n"] == {"shape": [2**29], "dtype": "bfloat16"}


def test_a_conversion_mentions_the_weights_that_a_run_started_from(capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = None
    assert _taken_over({"model": {"pretrained": "/there"}}, None, model, model) == ({}, {})
    assert capsys.readouterr().err == (
        "note: the run started from '/there'; use --keep-from to copy its tokenizer, eos ids and the like\n"
    )
    assert _taken_over({"model": {}}, None, model, model) == ({}, {})
    assert capsys.readouterr().err == ""


def test_files_and_fields_of_another_model_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def there(location: str) -> Iterator[Any]:
        assert location == "there"
        yield SimpleNamespace(
            config=lambda: {"eos": 1}, other_files=lambda: ["a", "b"], read_file=lambda name: name.encode()
        )

    monkeypatch.setattr(module, "ModelDirectory", SimpleNamespace(open=there))
    plain: Any = object()
    model: Any = "model"
    assert _taken_over({}, "there", plain, model) == ({}, {"a": b"a", "b": b"b"})
    keeps: Any = SimpleNamespace(kept_fields=lambda config, of: {**config, "of": of})
    monkeypatch.setattr(module, "KeepsFields", SimpleNamespace)
    assert _taken_over({}, "there", keeps, model) == ({"eos": 1, "of": "model"}, {"a": b"a", "b": b"b"})


# --- windows of a checkpoint ------------------------------------------------------------------------------------------

WHOLE = torch.arange(24.0).reshape(4, 6)


def checkpoint(average: dict[str, Any] | None = None) -> CheckpointTensors:
    """Checkpoint with a tensor [4, 6] in four files, each with a part of it, and its average in one."""
    made: Any = CheckpointTensors.__new__(CheckpointTensors)
    made.location, made._lock, made._average = "there", threading.Lock(), average
    pieces = [
        {"offset": [row, column], "shape": [2, size], "file": f"{row}-{column}", "key": "w"}
        for row in (0, 2)
        for column, size in ((0, 2), (2, 4))
    ]
    slot = {"dtype": "float64", "pieces": [{"offset": [0, 0], "shape": [4, 6], "file": "slot", "key": "w"}]}
    made._table = {"w": {"dtype": "float32", "pieces": pieces}}
    made._everything = {"model/w": made._table["w"], "optimizer/w/average": slot}

    def read(name: str, inside: list[int], into: Tensor) -> None:
        if name == "slot":
            whole = WHOLE.double() + 100
        else:
            row, column = map(int, name.split("-"))
            whole = WHOLE[row : row + 2, column : column + (2 if column == 0 else 4)]
        first, second = inside
        assert into.dtype == whole.dtype
        into.copy_(whole[first : first + into.shape[0], second : second + into.shape[1]])

    made._file = lambda name: SimpleNamespace(read=lambda key, inside, into: read(name, inside, into))
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("offset", "shape"), [((0, 0), (4, 6)), ((1, 1), (2, 3)), ((2, 2), (2, 4)), ((3, 5), (1, 1)), ((0, 1), (1, 1))]
)
def test_a_window_is_read_from_all_pieces_that_it_meets(offset: tuple[int, int], shape: tuple[int, int]) -> None:
    expected = WHOLE[offset[0] : offset[0] + shape[0], offset[1] : offset[1] + shape[1]]
    into = torch.full(shape, -1.0)
    checkpoint().read("w", offset, into)
    assert into.equal(expected)
    narrow = torch.full(shape, -1.0).bfloat16()
    checkpoint().read("w", offset, narrow)
    assert narrow.equal(expected.bfloat16())


def test_averaged_weights_are_between_the_trained_and_the_average() -> None:
    into = torch.empty(1, 2)
    checkpoint({"slot": "average", "weight": 0.25}).read("w", (1, 3), into)
    assert into.tolist() == [[9.0 + 25, 10.0 + 25]]
    checkpoint({"slot": "other", "weight": 0.25}).read("w", (1, 3), into)
    assert into.tolist() == [[9.0, 10.0]]


def test_a_file_that_cannot_be_read_is_named() -> None:
    made: Any = checkpoint()

    def fails(*_: object) -> None:
        raise OSError("no space")

    made._file = lambda _name: SimpleNamespace(read=fails)
    with pytest.raises(CheckpointError, match="there/2-2 cannot be read: no space"):
        made.read("w", (3, 5), torch.empty(1, 1))


@pytest.mark.parametrize(("same", "status"), [(True, 0), (False, 1)])
def test_different_states_end_the_command_with_one(monkeypatch: pytest.MonkeyPatch, same: bool, status: int) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(module, "diff_states", lambda *given: asked.append(given) or same)
    assert CliRunner().invoke(app, ["diff", "a", "b", "--tolerance", "0.5", "--json"]).exit_code == status
    assert asked == [("a", "b", 0.5, True)]


def test_a_bar_counts_what_was_added() -> None:
    with SampleBar("samples", 10, shown=False) as bar:
        bar.add(3)
        bar.add(4)
        assert bar.done == 7


def test_show_and_convert_do_what_their_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(command, "discover_plugins", lambda *given: ("plugins", *given))
    monkeypatch.setattr(module, "show_state", lambda *given: asked.append(given))
    monkeypatch.setattr(module, "convert_state", lambda *given: asked.append(given) or "written")
    for words in (["show", "a"], ["show", "a", "--picture", "p.mmd", "--json", "--no-plugins", "--plugin", "x.py"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    result = CliRunner().invoke(app, ["convert", "a", "b"])
    assert (result.exit_code, result.output) == (0, "written\n")
    words = ["--dtype", "bfloat16", "--shard-size", "2KiB", "--threads", "3", "--keep-from", "c", "--no-plugins"]
    assert CliRunner().invoke(app, ["convert", "a", "b", *words]).exit_code == 0
    assert asked == [
        ("a", ("plugins", [], False), None, False),
        ("a", ("plugins", [Path("x.py")], True), Path("p.mmd"), True),
        (Conversion("a", "b", None, 5_000_000_000, 4, None), ("plugins", [], False)),
        (Conversion("a", "b", torch.bfloat16, 2048, 3, "c"), ("plugins", [], True)),
    ]
