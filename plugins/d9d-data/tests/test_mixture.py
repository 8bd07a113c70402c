"""Mixtures of datasets: proportions, ends of parts, and microbatches of samples of several kinds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from d9d_core.data import DataContext, SampleLengths
from d9d_core.errors import DataError
from d9d_data.config import TextConfig
from d9d_data.mixture.config import MixtureConfig, MixturePart
from d9d_data.mixture.merge import merge, with_lengths
from d9d_data.mixture.order import MixtureOrder, assign, whole_weights
from d9d_data.mixture.stream import MixtureStream
from d9d_testing.suites.dataset import DatasetSuite
from d9d_testing.suites.support.component import build_component
from d9d_testing.toy.config import ToyDataConfig
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=6)


@given(WEIGHTS)
def test_at_any_moment_each_part_has_given_its_share(weights: list[int]) -> None:
    total, parts = sum(weights), len(weights)
    pattern = assign(weights)
    had = np.cumsum(pattern[:, None] == np.arange(parts), axis=0)  # [W, parts]
    due = np.arange(1, total + 1)[:, None] * np.asarray(weights) / total
    assert np.abs(had - due).max() <= 1 - 1 / max(2, 2 * parts - 2) + 1e-9
    assert had[-1].tolist() == weights


@given(WEIGHTS, st.data())
def test_places_of_a_part_come_in_order_and_end_with_its_epochs(weights: list[int], data: st.DataObject) -> None:
    limits = [data.draw(st.none() | st.integers(1, 40)) for _ in weights]
    order = MixtureOrder(weights, limits)
    count = 2 * order.samples if order.samples is not None else 300
    found: dict[int, list[int]] = {}
    for number in range(count):
        part, place = order(number)
        found.setdefault(part, []).append(place)
    for part, places in found.items():
        assert places == list(range(len(places)))
        if order.samples is not None:
            assert len(places) == 2 * (limits[part] or 0)
        elif limits[part] is not None:
            assert len(places) <= limits[part]


def test_a_mistake_in_a_part_is_the_only_one() -> None:
    with pytest.raises(ValidationError, match="greater than 0") as caught:
        MixtureConfig.model_validate({"parts": [{"weight": -1, "data": ToyDataConfig()}]})
    assert [error["loc"] for error in caught.value.errors()] == [("parts", 0, "weight")]
    with pytest.raises(ValidationError, match="parts is empty; write a list"):
        MixtureConfig(parts=())


def test_where_a_part_ends_the_others_keep_their_proportions() -> None:
    order = MixtureOrder([2, 1, 1], [4, None, None])
    assert Counter(order(number)[0] for number in range(8)) == {0: 4, 1: 2, 2: 2}
    assert Counter(order(number)[0] for number in range(8, 28)) == {1: 10, 2: 10}


def test_weights_are_what_the_job_file_says() -> None:
    assert whole_weights([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert whole_weights([3, 1.5]) == (2, 1)
    with pytest.raises(DataError, match=r"have a period of 1,000,003 samples, above the limit of 65,536; round them"):
        whole_weights([1, 0.000003])


def test_padding_of_a_merged_sample_is_a_document_without_targets() -> None:
    def sample(length: int, padded: int) -> dict[str, Any]:
        row = np.arange(length + padded)
        inside = row < length
        return {
            "tokens": (row + 5)[None], "targets": np.where(inside, row + 6, -100)[None],
            "positions": np.where(inside, row, row - length)[None], "documents": (~inside).astype(np.int64)[None],
            **({"lengths": np.asarray([length])} if padded else {}),
        }  # fmt: skip

    merged = merge([with_lengths(sample(2, 0)), with_lengths(sample(3, 1)), with_lengths(sample(6, 0))])
    assert merged["lengths"].tolist() == [2, 3, 6]
    assert merged["targets"][:, :4].tolist() == [[6, 7, -100, -100], [6, 7, 8, -100], [6, 7, 8, 9]]
    assert merged["positions"].tolist() == [[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert merged["documents"].tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0] * 6]


def write(directory: Path) -> None:
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chats = [{"prompt": f"{n}?", "completion": "yes " * (n % 5 + 1)} for n in range(30)]
    (directory / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chats))
    texts = [{"text": f"text {n} " + "word " * (n % 7), "label": "ab"[n % 2]} for n in range(60)]
    words = [{"tokens": ["word"] * (1 + 3 * n), "labels": ["ab"[n % 2]] * (1 + 3 * n)} for n in range(12)]
    (directory / "words.jsonl").write_text("".join(json.dumps(record) + "\n" for record in words))
    (directory / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in texts))


def text(**fields: Any) -> dict[str, Any]:
    own = {"name": "text", "sources": ["data/texts.jsonl"], "field": "text", "sequence_length": 24}
    return {**own, "tokenizer": "data/tokenizer.json", **fields}


def labelled(file: str, **fields: Any) -> dict[str, Any]:
    own = {"name": "labelled", "sources": [f"data/{file}"], "tokenizer": "bytes", "sequence_length": 192}
    return {**own, **fields}


CHAT = {"name": "chat", "sources": ["data/chats.jsonl"], "sequence_length": 64, "tokenizer": "data"}
DOCUMENTS = {**text(name="documents", sequence_length=48)}


class OverParts(DatasetSuite):
    target = "mixture"

    @pytest.fixture(autouse=True)
    def _beside_the_data(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def fields(self, directory: Path) -> Mapping[str, Any]:
        write(directory)
        return {}


@pytest.mark.thorough
class TestTextAndChat(OverParts):
    workers = None  # see below
    config: ClassVar = {"parts": [{"weight": 3, "data": text()}, {"data": CHAT}]}
    other: ClassVar = {"parts": [{"weight": 2, "data": text()}, {"data": CHAT}]}


@pytest.mark.full  # processes start slowly
def test_worker_processes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    suite = TestTextAndChat()
    suite.workers = "workers"  # type: ignore[misc, assignment]
    suite.test_worker_processes_change_nothing(tmp_path)


@pytest.mark.full
class TestPartsThatEnd(OverParts):
    workers = None
    config: ClassVar = {"parts": [{"epochs": 0.2, "data": DOCUMENTS}, {"weight": 2, "epochs": 1, "data": CHAT}]}
    other: ClassVar = {"parts": [{"epochs": 0.3, "data": DOCUMENTS}, {"weight": 2, "epochs": 1, "data": CHAT}]}


@pytest.mark.full
class TestMixtureOfMixtures(OverParts):
    workers = None
    config: ClassVar = {
        "parts": [{"data": {"name": "mixture", "parts": [{"data": text()}, {"data": CHAT}]}}, {"data": DOCUMENTS}]
    }


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")

    def build(*parts: dict[str, Any], **values: Any) -> Any:
        context = DataContext(seed=0, batch_size=8, microbatch_size=8, cache_dir=tmp_path / "cache", **values)
        return build_component("dataset", None, "mixture", {"parts": list(parts)}, context)

    return build


def test_each_pack_has_the_proportions_of_the_job(opened: Any) -> None:
    stream = opened({"weight": 3, "data": text(sequence_length=200)}, {"data": CHAT})
    for _ in range(6):
        (microbatch,) = stream.next_pack()
        assert microbatch["lengths"].tolist().count(200) == 6  # no conversation is as long as a sample of text
        assert microbatch["tokens"].shape == microbatch["documents"].shape
        assert microbatch["tokens"].shape[1] % 8 == 0


def test_an_epoch_has_every_sample_of_each_part_as_often_as_its_epochs_say(opened: Any) -> None:
    stream = opened({"epochs": 2, "data": DOCUMENTS}, {"epochs": 1, "data": CHAT})
    samples = stream.facts["samples"]
    assert samples == 2 * 60 + 30
    rows: Counter[tuple[int, ...]] = Counter()
    taken = 0
    while taken < samples:
        for microbatch in stream.next_pack():
            for row, length in zip(microbatch["tokens"], microbatch["lengths"], strict=True):
                rows[tuple(row[:length].tolist())] += taken < samples
                taken += 1
    assert sorted(rows.values()) == sorted([*[2] * 60, *[1] * 30])


def test_weights_of_messages_are_one_elsewhere(opened: Any) -> None:
    said = {"role": "assistant", "content": "yes", "weight": 0.5}
    record = json.dumps({"messages": [{"role": "user", "content": "?"}, said]}) + "\n"
    Path("data/weighted.jsonl").write_text(record * 8)
    stream = opened({"data": text()}, {"data": {**CHAT, "sources": ["data/weighted.jsonl"]}})
    (microbatch,) = stream.next_pack()
    assert set(microbatch["weights"].unique().tolist()) == {0.0, 0.5, 1.0}
    assert torch.equal(microbatch["weights"] > 0, microbatch["targets"] >= 0)


def test_a_mixture_of_labelled_words_has_their_classes_and_labels_no_padding(opened: Any) -> None:
    words = labelled("words.jsonl", per="word")
    stream = opened({"data": words}, {"data": words})
    (microbatch,) = stream.next_pack()
    inside = torch.arange(microbatch["labels"].shape[1]) < microbatch["lengths"].unsqueeze(1)
    assert not inside.all()
    assert (microbatch["labels"][~inside] == -100).all()
    assert (stream.facts["num_classes"], stream.facts["labels"]) == (2, ["a", "b"])


def test_facts_are_those_in_common_and_those_of_each_part(opened: Any) -> None:
    facts = opened({"weight": 3, "data": text()}, {"epochs": 2, "data": CHAT}).facts
    assert (facts["vocab_size"], facts["sequence_length"]) == (258, 64)
    assert "samples" not in facts  # one part never ends
    assert [part["dataset"] for part in facts["parts"]] == ["text", "chat"]
    assert (facts["parts"][1]["epochs"], facts["parts"][1]["samples"], facts["parts"][0]["weight"]) == (2.0, 30, 3.0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [{"data": text()}, {"data": text(tokenizer="bytes")}],
            r"parts\[0\] and parts\[1\] have different tokenizers",
        ),
        (
            [{"data": CHAT}, {"data": text(sequence_length=9999)}],
            r"data\.parts\[1\]\.data\.sequence_length: 9999 positions",
        ),
        ([{"data": text(workers=2)}], r"data\.parts\[0\]\.data\.workers: has no effect in a mixture; .* data\.workers"),
        (
            [{"data": labelled("texts.jsonl")}, {"data": labelled("texts.jsonl", labels=["b", "a"])}],
            r"names of the classes in parts\[0\]: a, b; in parts\[1\]: b, a; mix datasets with the same classes",
        ),
        ([{"data": {**CHAT, "bucket_window": 8}}], r"data\.parts\[0\]\.data\.bucket_window: has no effect"),
    ],
)
def test_what_cannot_be_mixed_is_refused(opened: Any, parts: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(*parts)


class Lone:
    """Stream of samples with one tensor."""

    def __init__(self, name: str) -> None:
        self.source = self
        self.facts: dict[str, Any] = {}
        self._name = name

    def pack_at(self, consumed: int) -> list[dict[str, Any]]:
        return [{self._name: np.full(1, consumed)}]

    def state(self) -> dict[str, Any]:
        return {"fingerprint": self._name}

    def save_assets(self, directory: Path) -> None:
        pass


def test_parts_of_other_kinds_are_refused(tmp_path: Path) -> None:
    context = DataContext(seed=0, batch_size=8, microbatch_size=8, cache_dir=tmp_path)
    part = MixturePart(data=ToyDataConfig())
    twice = MixtureConfig(parts=(part, part))
    both = MixtureStream(twice, context, [Lone("x"), Lone("x")])
    assert both.next_pack()[0]["x"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(DataError, match=r"parts\[0\] \('toy_data'\) gives x, and parts\[1\] .* gives y; x, y do not"):
        MixtureStream(twice, context, [Lone("x"), Lone("y")])
    ending = MixtureConfig(parts=(MixturePart(epochs=1, data=ToyDataConfig()),))
    with pytest.raises(DataError, match=r"parts\[0\]\.epochs: dataset 'toy_data' has an unknown number of samples"):
        MixtureStream(ending, context, [Lone("x")])
    with pytest.raises(DataError, match=r"parts\[1\]\.data: dataset 'toy_data' cannot be mixed: its stream has no"):
        MixtureStream(twice, context, [Lone("x"), object()])


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([8, 12], SampleLengths(4, 12)), ([12, 8], SampleLengths(4, 12)), ([6], SampleLengths(6, 6)), ([8, None], None)],
)
def test_a_mixed_microbatch_is_as_long_as_the_longest_part_and_a_multiple_of_the_common_divisor(
    lengths: list[int | None], expected: SampleLengths | None
) -> None:
    """The lengths of a mixture are unknown if the lengths of one part are."""
    texts = [TextConfig(sources=("x",), sequence_length=length) if length else ToyDataConfig() for length in lengths]
    parts = tuple(MixturePart.model_construct(weight=1, data=data) for data in texts)
    assert MixtureConfig.model_construct(parts=parts).sample_lengths == expected
