"""Models are written in Hugging Face layout, by one process or many, and appear whole or not at all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from d9d_testing.world import World
from d9d_weights.hugging_face.blocks import BLOCK, BlockBuffer
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.plan import plan_files
from d9d_weights.hugging_face.writer import ModelWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor
from torch import distributed as dist

MODEL = {
    "half": torch.randn(3, 5).bfloat16(),
    "byte": torch.arange(7, dtype=torch.uint8),
    "wide": torch.randn(4, 6, dtype=torch.float64).T,
    "step": torch.tensor(7.0),
    "empty": torch.zeros(0, 3),
}
INDEX = "model.safetensors.index.json"


def specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def write(writer: ModelWriter, tensors: Mapping[str, Tensor] = MODEL, config: Mapping[str, Any] | None = None) -> None:
    writer.start()
    for file in writer.files:
        with writer.open_shard(file) as shard:
            for name in reversed(writer.tensors_of(file)):  # any order
                shard.write(name, tensors[name])
    writer.publish(config or {"hidden_size": 4}, {"tokenizer.json": b"{}"}, save_template)


def save_template(directory: Path) -> None:
    (directory / "more").mkdir()
    (directory / "more" / "chat_template.jinja").write_text("hello")


def read(location: str | Path) -> dict[str, Tensor]:
    with ModelDirectory.open(location) as model:
        tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in model.specs.items()}
        for name, tensor in tensors.items():
            model.read(name, (0,) * tensor.ndim, tensor)
        return tensors


def same(found: Mapping[str, Tensor], tensors: Mapping[str, Tensor] = MODEL) -> bool:
    return found.keys() == tensors.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in tensors.items()
    )


@pytest.fixture(autouse=True)
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


@pytest.mark.parametrize("limit", [1, 60, 10**9])
def test_what_is_written_reads_back_here_and_in_the_safetensors_library(tmp_path: Path, limit: int) -> None:
    target = tmp_path / "out" / "model"
    writer = ModelWriter(target, specs(MODEL), limit)
    write(writer)
    assert same(read(target))
    theirs = {}
    for file in writer.files:
        with safe_open(target / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            theirs |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - has no __iter__
    assert same(theirs)
    assert json.loads((target / "config.json").read_text()) == {"hidden_size": 4}
    assert (target / "tokenizer.json").read_bytes() == b"{}"
    assert (target / "more" / "chat_template.jinja").read_text() == "hello"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_one_file_has_no_number_and_no_index_and_several_have_both(tmp_path: Path) -> None:
    one = ModelWriter(tmp_path / "one", specs(MODEL))
    write(one)
    assert one.files == ("model.safetensors",)
    assert not (tmp_path / "one" / INDEX).exists()
    many = ModelWriter(tmp_path / "many", specs(MODEL), 200)
    write(many)
    first, second = many.files
    assert (first, second) == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 30 + 7 + 192 + 4}
    assert index["weight_map"] == {"half": first, "byte": first, "wide": second, "step": second, "empty": second}
    assert {name: many.file_of(name) for name in MODEL} == index["weight_map"]


@pytest.mark.thorough
def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    state = dict(model.state_dict())
    write(
        ModelWriter(tmp_path / "m", specs(state), 4000),
        state,
        {**config.to_dict(), "architectures": ["Qwen3ForCausalLM"]},
    )
    loaded, facts = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not facts["missing_keys"]
    assert not facts["unexpected_keys"]
    assert same(dict(loaded.state_dict()), state)


@pytest.mark.thorough
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.uint8, torch.bfloat16])), min_size=1),
    st.integers(1, 200),
)
def test_no_file_is_larger_than_the_limit_unless_one_tensor_is(
    sizes: list[tuple[int, torch.dtype]], limit: int
) -> None:
    tensors = {f"{n}": TensorSpec((size,), dtype) for n, (size, dtype) in enumerate(sizes)}
    plan = plan_files(tensors, limit)
    assert {name: spec for part in plan.values() for name, spec in part.items()} == tensors
    assert sum(len(part) for part in plan.values()) == len(tensors)
    nbytes = {name: spec.shape[0] * spec.dtype.itemsize for name, spec in tensors.items()}
    for part in plan.values():
        assert sum(nbytes[name] for name in part) <= limit or len([name for name in part if nbytes[name]]) == 1
        widths = [spec.dtype.itemsize for spec in part.values()]
        assert widths == sorted(widths, reverse=True)
    # Files follow the order of the tensors, and the next tensor would not have fitted.
    parts = list(plan.values())
    for part, following in itertools.pairwise(parts):
        assert max(map(int, part)) < min(map(int, following))
        assert sum(nbytes[name] for name in part) + nbytes[min(following, key=int)] > limit


@pytest.mark.full
@settings(max_examples=50)
@given(st.lists(st.integers(1, 5), max_size=3), st.integers(4, 64), st.randoms())
def test_any_strides_are_written_through_a_buffer_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], limit: int, random: Any
) -> None:
    order = random.sample(range(len(shape)), len(shape))
    tensors = {"a": torch.randn(shape).permute(order), "b": torch.randn(3), "one of many": torch.randn(9)[::9]}
    directory = tmp_path_factory.mktemp("model") / "m"
    counted: list[int] = []
    writer = ModelWriter(directory, specs(tensors), on_bytes=counted.append)
    writer._buffer = BlockBuffer(limit)
    write(writer, tensors)
    assert same(read(directory), tensors)
    assert sum(counted) == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(("tensor", "copies"), [(torch.arange(6.0), 0), (torch.arange(6.0).view(2, 3).T, 1)])
def test_only_tensors_that_are_not_contiguous_are_copied_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: Tensor, copies: int
) -> None:
    taken: list[Tensor] = []
    take = BlockBuffer.take
    monkeypatch.setattr(BlockBuffer, "take", lambda self, like, dtype: taken.append(like) or take(self, like, dtype))
    write(ModelWriter(tmp_path / "m", specs({"a": tensor})), {"a": tensor})
    assert len(taken) == copies
    assert same(read(tmp_path / "m"), {"a": tensor})


def test_memory_is_bounded_whatever_the_size_of_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"t": torch.arange(3 * BLOCK // 8, dtype=torch.float32).reshape(-1, 1024).T}  # 1.5 blocks
    writer = ModelWriter(tmp_path / "m", specs(tensors))
    allocated: list[int] = []
    empty = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **k: allocated.append(empty(*a, **k).nbytes) or empty(*a, **k))
        write(writer, tensors)
    assert allocated == [BLOCK]
    assert same(read(tmp_path / "m"), tensors)


def write_some(writer: ModelWriter, *names: str, **tensors: Tensor) -> None:
    with writer.open_shard("model.safetensors") as shard:
        for name in names:
            shard.write(name, MODEL[name])
        for name, tensor in tensors.items():
            shard.write(name, tensor)


def test_a_file_without_all_its_tensors_is_an_error_that_names_them(tmp_path: Path) -> None:
    writer = ModelWriter(tmp_path / "m", specs(MODEL))
    writer.start()
    with pytest.raises(
        CheckpointError, match=r"model.safetensors is not complete: write wide, empty before closing it"
    ):
        write_some(writer, "half", "step", "byte")
    with pytest.raises(KeyError):  # and not the missing tensors
        write_some(writer, "half", "unknown")
    with pytest.raises(CheckpointError, match=r"is not complete: model.safetensors has no bytes of \d+"):
        writer.publish({}, {})
    assert not (tmp_path / "m").exists()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("byte", MODEL["byte"], "'byte' was already written to model.safetensors"),
        ("other", MODEL["byte"], "'other' does not belong to the file model.safetensors"),
        ("half", MODEL["half"].float(), r"is torch.float32 \[3, 5\], but specs declared torch.bfloat16 \[3, 5\]"),
        ("half", MODEL["half"].T, r"is torch.bfloat16 \[5, 3\], but specs declared torch.bfloat16 \[3, 5\]"),
    ],
)
def test_a_tensor_that_was_not_planned_like_that_is_refused(
    tmp_path: Path, name: str, tensor: Tensor, text: str
) -> None:
    writer = ModelWriter(tmp_path / "m", specs(MODEL))
    writer.start()
    with pytest.raises(CheckpointError, match=text):
        write_some(writer, "byte", **{name: tensor})


@pytest.mark.parametrize(
    ("tensors", "limit", "text"),
    [
        ({}, 1, "a model without tensors"),
        ({"a": TensorSpec((1,), torch.complex128)}, 1, "'a' is torch.complex128, which safetensors does not support"),
        ({"__metadata__": TensorSpec((1,), torch.int8)}, 1, "safetensors reserves the name '__metadata__'"),
        ({"a": TensorSpec((1,), torch.int8)}, 0, "the size of weight files is 0 bytes"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is(
    tmp_path: Path, tensors: dict[str, TensorSpec], limit: int, text: str
) -> None:
    with pytest.raises(CheckpointError, match=text):
        ModelWriter(tmp_path / "m", tensors, limit)
    with pytest.raises(CheckpointError, match="nope://x cannot be written: ValueError: Protocol not known"):
        ModelWriter("nope://x", specs(MODEL))


@pytest.mark.parametrize("name", ["../x", "config.json", INDEX, "model.safetensors"])
def test_a_further_file_with_a_taken_name_is_refused(tmp_path: Path, name: str) -> None:
    writer = ModelWriter(tmp_path / "m", specs(MODEL))
    with pytest.raises(CheckpointError, match=f"{name} cannot be added to"):
        writer.publish({}, {name: b""})


def test_a_config_that_is_no_json_leaves_what_was_there(tmp_path: Path) -> None:
    write(ModelWriter(tmp_path / "m", specs(MODEL)))
    writer = ModelWriter(tmp_path / "m", {"a": TensorSpec((1,), torch.int8)})
    with pytest.raises(CheckpointError, match="config.json cannot be written: Out of range float"):
        write(writer, {"a": torch.zeros(1, dtype=torch.int8)}, {"x": float("nan")})
    writer.discard()
    assert same(read(tmp_path / "m"))
    write(writer, {"a": torch.ones(1, dtype=torch.int8)})
    assert same(read(tmp_path / "m"), {"a": torch.ones(1, dtype=torch.int8)})
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_without_a_start_the_error_says_so(tmp_path: Path) -> None:
    writer = ModelWriter(tmp_path / "m", specs(MODEL))
    with pytest.raises(CheckpointError, match=r"one process must call start\(\) first"):
        write_some(writer)
    with pytest.raises(CheckpointError, match="'x' is not a weight file of .*: it has model.safetensors"):
        writer.tensors_of("x")
    with pytest.raises(CheckpointError, match="'x' is not a tensor of the model"):
        writer.file_of("x")


@pytest.mark.parametrize("limit", [200, 10**9])
def test_behind_an_address_the_file_that_makes_the_model_exist_comes_last(
    memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    memory.pipe_file("/hub/m/notes.txt", b"mine")
    memory.pipe_file("/hub/m/model-00001-of-00009.safetensors", b"of an earlier model")
    written: list[str] = []
    put_file, pipe_file = memory.put_file, memory.pipe_file

    def put(local: str, remote: str) -> None:
        written.append(remote.removeprefix("/hub/m/"))
        put_file(local, remote)

    def pipe(remote: str, content: bytes) -> None:
        written.append(remote.removeprefix("/hub/m/"))
        pipe_file(remote, content)

    monkeypatch.setattr(memory, "put_file", put)
    monkeypatch.setattr(memory, "pipe_file", pipe)
    writer = ModelWriter("memory://hub/m", specs(MODEL), limit)
    write(writer)
    last = [INDEX] if len(writer.files) > 1 else []
    assert written == [*writer.files, "more/chat_template.jinja", "tokenizer.json", "config.json", *last]
    assert same(read("memory://hub/m"))
    assert memory.cat_file("/hub/m/notes.txt") == b"mine"
    assert not memory.exists("/hub/m/model-00001-of-00009.safetensors")
    writer.discard()
    assert not any(memory.exists(f"/hub/m/{file}") for file in (*writer.files, "config.json", INDEX))


@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_tokenizer_of_its_own_replaces_all_of_an_earlier_one(tmp_path: Path, where: str) -> None:
    writer = ModelWriter(tmp_path / "m" if where == "local" else "memory://hub/m", specs(MODEL))
    writer.start()
    write_some(writer, *MODEL)
    earlier = dict.fromkeys(["tokenizer.json", "added_tokens.json", "generation_config.json", "other.json"], b"earlier")
    writer.publish({}, earlier, lambda d: [(d / n).write_bytes(b"own") for n in ("tokenizer.json", "other.json")])
    with ModelDirectory.open(tmp_path / "m" if where == "local" else "memory://hub/m") as model:
        assert model.other_files() == ["generation_config.json", "tokenizer.json"]
        found = [model.read_file(name) for name in ("tokenizer.json", "other.json", "generation_config.json")]
    assert found == [b"own", b"own", b"earlier"]


def test_an_upload_that_fails_says_where(memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no rights")

    writer = ModelWriter("memory://hub/m", specs(MODEL))
    monkeypatch.setattr(memory, "put_file", fail)
    with pytest.raises(CheckpointError, match="memory://hub/m cannot be written: RuntimeError: no rights; check"):
        write(writer)


def write_mine(directory: str) -> None:
    """Each rank writes every other file."""
    tensors = {f"{n}": torch.full((4, 3), n) for n in range(5)}
    writer = ModelWriter(directory, specs(tensors), 100)
    if dist.get_rank() == 0:
        writer.start()
    dist.barrier()
    for file in writer.files[dist.get_rank() :: dist.get_world_size()]:
        with writer.open_shard(file) as shard:
            for name in writer.tensors_of(file):
                shard.write(name, tensors[name])
    dist.barrier()
    if dist.get_rank() == 0:
        writer.publish({}, {})
    dist.barrier()
    assert same(read(directory), tensors)


@pytest.mark.thorough
def test_ranks_share_the_files(world: type[World], tmp_path: Path) -> None:
    world(2).run(write_mine, str(tmp_path / "m"))


@pytest.mark.gpu
def test_a_strided_tensor_of_a_gpu_is_written_in_blocks(tmp_path: Path) -> None:
    tensors = {"t": torch.randn(300, 200, device="cuda").bfloat16().T}
    writer = ModelWriter(tmp_path / "m", specs(tensors))
    writer._buffer = BlockBuffer(1000)
    write(writer, tensors)
    assert same(read(tmp_path / "m"), {"t": tensors["t"].cpu()})
