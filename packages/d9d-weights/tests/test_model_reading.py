"""Models in Hugging Face layout are read by windows, and a fault is reported before a tensor is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from d9d_weights.files.local import LocalFile
from d9d_weights.hugging_face.blocks import BLOCK, BlockBuffer, blocks
from d9d_weights.hugging_face.directory import ModelDirectory
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import Tensor

MODEL = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.arange(5, dtype=torch.int64),
    "c": torch.randn(2, 3, 4).bfloat16(),
    "step": torch.tensor(7.0),
    "empty": torch.zeros(0, 3),
}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
PLACES = {FIRST: ("c", "step"), SECOND: ("a", "b", "empty")}


def content(**changes: bytes | None) -> dict[str, bytes]:
    """The files of a model in two shards."""
    files: dict[str, bytes | None] = {file: save({n: MODEL[n] for n in names}) for file, names in PLACES.items()}
    files[INDEX] = json.dumps({"weight_map": {n: file for file, names in PLACES.items() for n in names}}).encode()
    files["config.json"] = b'{"hidden_size": 4}'
    files |= changes
    return {name: text for name, text in files.items() if text is not None}


def put(directory: Path, files: Mapping[str, bytes]) -> Path:
    for name, text in files.items():
        (directory / name).write_bytes(text)
    return directory


def index(**table: str) -> bytes:
    return json.dumps({"weight_map": table}).encode()


@pytest.fixture
def remote() -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for name, text in content().items():
        memory.pipe_file(f"/hub/model/{name}", text)
    yield "memory://hub/model"
    memory.store.clear()


def whole(model: ModelDirectory) -> dict[str, Tensor]:
    tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in model.specs.items()}
    for name, tensor in tensors.items():
        model.read(name, (0,) * tensor.ndim, tensor)
    return tensors


def check(model: ModelDirectory) -> None:
    assert dict(model.specs) == {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in MODEL.items()}
    for name, tensor in whole(model).items():
        assert torch.equal(tensor, MODEL[name])
    part = torch.empty(2, 2, dtype=torch.float64)
    model.read("a", (1, 2), part)
    assert part.tolist() == [[6, 7], [10, 11]]


def test_a_sharded_model_reads_back(tmp_path: Path) -> None:
    with ModelDirectory.open(put(tmp_path, content())) as model:
        check(model)
        assert model.config() == {"hidden_size": 4}


def test_a_model_behind_an_address_reads_back(remote: str) -> None:
    with ModelDirectory.open(remote) as model:
        check(model)
        assert model.config() == {"hidden_size": 4}
    with ModelDirectory.open(f"{remote}/{FIRST}") as model:
        assert set(model.specs) == {"c", "step"}


def test_shards_without_an_index_are_taken_together(tmp_path: Path) -> None:
    with ModelDirectory.open(put(tmp_path, content(**{INDEX: None}))) as model:
        check(model)


def test_one_file_is_a_model_with_the_config_beside_it(tmp_path: Path) -> None:
    with ModelDirectory.open(str(put(tmp_path, content()) / SECOND)) as model:
        assert set(model.specs) == {"a", "b", "empty"}
        assert model.config() == {"hidden_size": 4}


def test_the_order_is_that_of_the_bytes_in_the_files(tmp_path: Path) -> None:
    names = [f"{n}" for n in (3, 1, 2, 0)]
    header: dict[str, Any] = {n: {"dtype": "U8", "shape": [1], "data_offsets": [int(n), int(n) + 1]} for n in names}
    text = json.dumps(header).encode()
    (tmp_path / "b.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    save_file({"z": torch.zeros(1)}, tmp_path / "a.safetensors")
    with ModelDirectory.open(tmp_path) as model:
        assert list(model.specs) == ["z", "0", "1", "2", "3"]


def test_other_files_are_the_tokenizer_and_generation_but_no_weights_pickles_or_code(tmp_path: Path) -> None:
    passed = ["added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt",
              "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
              "vocab.json"]  # fmt: skip
    held_back = ["tokenizer.py", "tokenizer.bin", "pytorch_model.bin", "optimizer.pt", "modeling_x.py", "README.md"]
    with ModelDirectory.open(put(tmp_path, content(**dict.fromkeys([*passed, *held_back], b"x")))) as model:
        assert model.other_files() == passed
        assert model.read_file("merges.txt") == b"x"
        for name in ("../x", "/etc/hostname", "a/b", "..", ""):
            with pytest.raises(CheckpointError, match="is not a file directly in"):
                model.read_file(name)
        with pytest.raises(CheckpointError, match="nothing.json does not exist"):
            model.read_file("nothing.json")


def test_a_directory_without_weights_can_be_opened_for_its_config(tmp_path: Path) -> None:
    directory = put(tmp_path, content(**{FIRST: None, SECOND: None, INDEX: None}))
    with ModelDirectory.open(directory, weights=False) as model:
        assert model.config() == json.loads(content()["config.json"])
        assert not model.specs


PROBLEMS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "no weights": ({FIRST: None, SECOND: None, INDEX: None}, "has no .safetensors file: name a directory"),
    "pickles only": (
        {FIRST: None, SECOND: None, INDEX: None, "pytorch_model.bin": b""},
        r"pytorch_model.bin: such a file is a pickle, and reading it runs code .* safe_serialization=True",
    ),
    "pickles in the index": ({INDEX: index(a="x.bin")}, "index.json has its weights in x.bin: such a file is a"),
    "missing shard": ({FIRST: None}, f"{INDEX} names {FIRST}, which does not exist"),
    "missing number": ({FIRST: None, INDEX: None}, f"lacks {FIRST}: copy or download the rest"),
    "missing tensor": (
        {INDEX: index(a=SECOND, b=SECOND, c=FIRST, step=FIRST, empty=SECOND, x=FIRST)},
        f"lists 'x' in {FIRST}, but that file does not contain it",
    ),
    "wrong shard": (
        {INDEX: index(a=FIRST, b=SECOND, c=FIRST, step=FIRST, empty=SECOND)},
        f"lists 'a' in {FIRST}, but that file does not contain it",
    ),
    "extra tensor": (
        {INDEX: index(a=SECOND, b=SECOND, c=FIRST, empty=SECOND)},
        f"does not list 'step' in {FIRST}, so it may not belong to the model: add it to the index",
    ),
    "outside": ({INDEX: index(a="../x.safetensors")}, "'../x.safetensors', which is not a file in the same"),
    "absolute": ({INDEX: index(a="/x.safetensors")}, "'/x.safetensors', which is not a file in the same"),
    "not safetensors": ({INDEX: index(a="config.json")}, "names config.json, which is not a .safetensors file"),
    "same name twice": (
        {FIRST: save({"a": torch.zeros(1)})},
        f"contains 'a' twice, in {FIRST} and in {SECOND}: remove the file",
    ),
    "clash without an index": (
        {INDEX: None, "more.safetensors": save({"a": torch.zeros(1)})},
        f"contains 'a' twice, in {SECOND} and in more.safetensors",
    ),
    "truncated": ({FIRST: content()[FIRST][:-1]}, f"{FIRST} is damaged: its tensors need .*; copy or download it"),
    "long header": (
        {FIRST: (99).to_bytes(8, "little") + b"{}"},
        "the file has 10 bytes, but its first bytes give a header of 99",
    ),
    "shorter than a length": ({FIRST: b"123"}, "the file has 3 bytes, but its first bytes"),
    "duplicate in a header": (
        {FIRST: b"\x44" + bytes(7) + b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":0}'.ljust(0x44)},
        f"{FIRST} is damaged: its header is unreadable .*'a' appears twice",
    ),
    "header is no object": ({FIRST: b"\x01" + bytes(7) + b"7"}, f"{FIRST} is damaged: its header is unreadable"),
    "damaged index": ({INDEX: b"{"}, f"{INDEX} is not JSON"),
    "index is a list": ({INDEX: b"[]"}, f"{INDEX} is not a JSON object but a list"),
    "no weight map": ({INDEX: b"{}"}, f"{INDEX} has no weight_map"),
    "git lfs": (
        {FIRST: b"version https://git-lfs.github.com/spec/v1\n"},
        f"{FIRST} is a pointer of Git LFS.* 'git lfs pull'",
    ),
    "longest git lfs": (
        {FIRST: b"version https://git-lfs.github.com/spec/v1\n".ljust(1023)},
        f"{FIRST} is a pointer of Git LFS.* 'git lfs pull'",
    ),
    "longer than git lfs": (
        {FIRST: b"version https://git-lfs.github.com/spec/v1\n".ljust(1024)},
        f"{FIRST} is damaged: the file has 1024 bytes, but",
    ),
    "two indices": ({"other.safetensors.index.json": b"{}"}, "has several index files"),
    "two models": ({"model.safetensors": save({"a": torch.zeros(1)})}, f"has both model.safetensors and {INDEX}"),
}


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(("changes", "text"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_what_is_wrong_with_a_model_is_said_when_it_is_opened(
    tmp_path: Path, changes: dict[str, bytes | None], text: str
) -> None:
    descriptors = open_files()
    with pytest.raises(CheckpointError, match=text) as caught:
        ModelDirectory.open(put(tmp_path, content(**changes)))
    assert str(tmp_path) in str(caught.value)
    assert open_files() == descriptors


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere", "nowhere does not exist: check the path"),
        ("nope://x", "nope://x cannot be read: ValueError: Protocol not known: nope"),
        ("memory://nowhere", "memory://nowhere does not exist"),
        ("weights.pt", "weights.pt: such a file is a pickle"),
        ("config.json", "config.json is not a .safetensors file: name one, or the directory"),
    ],
)
def test_a_place_that_is_no_model_is_refused(tmp_path: Path, name: str, text: str) -> None:
    put(tmp_path, {"weights.pt": b"", "config.json": b"{}"})
    with pytest.raises(CheckpointError, match=text):
        ModelDirectory.open(name if "://" in name else tmp_path / name)


@pytest.mark.parametrize(("config", "text"), [(None, "does not exist"), (b"[1]", "but a list"), (b"{", "is not JSON")])
def test_a_config_that_is_none_is_refused(tmp_path: Path, config: bytes | None, text: str) -> None:
    with (
        ModelDirectory.open(put(tmp_path, content(**{"config.json": config}))) as model,
        pytest.raises(CheckpointError, match=f"config.json .*{text}"),
    ):
        model.config()


def test_a_window_that_a_tensor_does_not_have_is_refused(tmp_path: Path) -> None:
    with ModelDirectory.open(put(tmp_path, content())) as model:
        for name, offset, into in [
            ("a", (0,), torch.empty(3)), ("a", (1, 0), torch.empty(3, 4)), ("a", (-1, 0), torch.empty(1, 1)),
            ("b", (0, 0), torch.empty(1, 1)),
        ]:  # fmt: skip
            with pytest.raises(CheckpointError, match=f"'{name}' of .*which does not contain the window"):
                model.read(name, offset, into)
        with pytest.raises(CheckpointError, match=r"'a' of .* cannot be cast to torch.int32; read it into a tensor of"):
            model.read("a", (0, 0), torch.empty(3, 4, dtype=torch.int32))
        with pytest.raises(CheckpointError, match="has no tensor 'x'"):
            model.read("x", (), torch.empty(()))
    with pytest.raises(CheckpointError, match="was closed"):
        model.read("step", (), torch.empty(()))


def test_a_file_that_shrinks_while_it_is_read_is_reported(tmp_path: Path) -> None:
    with ModelDirectory.open(put(tmp_path, content())) as model:
        os.truncate(tmp_path / SECOND, 100)
        with pytest.raises(CheckpointError, match=f"{SECOND} is damaged: the file ends early"):
            model.read("a", (0, 0), torch.empty(3, 4))


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 20))
def test_blocks_are_consecutive_small_and_everything(shape: list[int], limit: int) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    found = [
        numbers[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        for offset, size in blocks(shape, limit)
    ]
    assert all(0 < part.numel() <= limit for part in found)
    assert [n for part in found for n in part.flatten().tolist()] == numbers.flatten().tolist()


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    bounds = [tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape]
    return shape, bounds, draw(st.permutations(range(len(shape))))


@pytest.mark.thorough
@settings(max_examples=150)
@given(windows(), st.integers(2, 64), st.sampled_from([torch.bfloat16, torch.float64]), st.booleans())
def test_every_window_equals_a_slice_whatever_strides_dtype_and_block(
    tmp_path_factory: pytest.TempPathFactory,
    window: tuple[list[int], list[tuple[int, int]], list[int]],
    limit: int,
    dtype: torch.dtype,
    spread: bool,
) -> None:
    shape, bounds, order = window
    tensor = torch.randn(shape).bfloat16()
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file({"a": torch.zeros(3), "t": tensor}, path)
    sizes = [end - first for first, end in bounds]
    memory = torch.full([sizes[dim] * (1 + spread) for dim in order], 99.0, dtype=dtype)
    into = memory.permute([order.index(dim) for dim in range(len(shape))])
    if spread:
        into = into[tuple(slice(None, None, 2) for _ in shape)]
    covered: list[int] = []
    with ModelDirectory.open(path, covered.append) as model:
        model._buffer = BlockBuffer(limit)
        model.read("t", [first for first, _ in bounds], into)
    expected = tensor[tuple(slice(*bound) for bound in bounds)]
    assert torch.equal(into, expected.to(dtype))
    assert sum(covered) == expected.nbytes
    assert (memory == 99).sum() == memory.numel() - expected.numel()


def counting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Reads of files: start and size, in order."""
    reads: list[tuple[int, int]] = []
    read_into: Callable[[Any, int, memoryview], int] = LocalFile.read_into

    def read(self: LocalFile, start: int, view: memoryview) -> int:
        reads.append((start, len(view)))
        return read_into(self, start, view)

    monkeypatch.setattr(LocalFile, "read_into", read)
    return reads


def test_only_the_rows_of_a_window_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(100, 64)
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    with ModelDirectory.open(tmp_path) as model:
        reads = counting(monkeypatch)
        rows, columns = torch.empty(10, 64), torch.empty(10, 8)
        model.read("t", (5, 0), rows)
        model.read("t", (5, 8), columns)
    assert torch.equal(rows, tensor[5:15])
    assert torch.equal(columns, tensor[5:15, 8:16])
    assert [size for _, size in reads] == [10 * 64 * 4] * 2


def test_a_part_of_a_long_row_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(4, 100_000)
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    with ModelDirectory.open(tmp_path) as model:
        reads = counting(monkeypatch)
        into = torch.empty(2, 10)
        model.read("t", (1, 50), into)
    assert torch.equal(into, tensor[1:3, 50:60])
    assert [size for _, size in reads] == [40, 40]


@pytest.mark.thorough
def test_memory_is_bounded_whatever_the_size_of_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(3 * BLOCK // 8, dtype=torch.float32).reshape(-1, 1024)  # 1.5 blocks
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    transposed = torch.empty(tensor.shape[::-1]).T
    allocated: list[int] = []
    empty = torch.empty
    with ModelDirectory.open(tmp_path) as model:
        reads = counting(monkeypatch)
        monkeypatch.setattr(torch, "empty", lambda *a, **k: allocated.append(empty(*a, **k).nbytes) or empty(*a, **k))
        model.read("t", (0, 0), transposed)
        model.read("t", (0, 0), transposed)
    assert torch.equal(transposed, tensor)
    assert allocated == [BLOCK]  # once for both reads
    assert max(size for _, size in reads) == BLOCK


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["local", "remote"])
def test_threads_read_at_once_and_do_not_mix_up(tmp_path: Path, where: str) -> None:
    tensors = {f"{n}": torch.full((50, 40), n) for n in range(16)}
    memory = fsspec.filesystem("memory")
    if where == "local":
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        memory.pipe_file("/threads/model.safetensors", save(tensors))

    def right(number: int) -> bool:
        into = torch.empty(40, 50, dtype=torch.float64).T
        model.read(f"{number % 16}", (0, 0), into)
        return bool((into == number % 16).all())

    with (
        ModelDirectory.open(tmp_path if where == "local" else "memory://threads") as model,
        ThreadPoolExecutor(8) as pool,
    ):
        model._buffer = BlockBuffer(512)
        assert all(pool.map(right, range(200)))
    memory.store.clear()


def test_a_link_into_a_cache_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "main").mkdir(parents=True)
    for name, text in content().items():
        (tmp_path / "blobs" / f"hash-{name}").write_bytes(text)
        (tmp_path / "snapshots" / "main" / name).symlink_to(f"../../blobs/hash-{name}")
    with ModelDirectory.open(tmp_path / "snapshots" / "main") as model:
        check(model)


@pytest.mark.gpu
def test_a_window_goes_to_a_gpu_in_blocks(tmp_path: Path) -> None:
    tensor = torch.randn(300, 200).bfloat16()
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    into = torch.empty(200, 100, device="cuda").T
    with ModelDirectory.open(tmp_path) as model:
        model._buffer = BlockBuffer(1000)
        assert model._buffer.take(into[0], torch.bfloat16).is_pinned()
        model.read("t", (200, 0), into)
    assert torch.equal(into.cpu(), tensor[200:].float())
