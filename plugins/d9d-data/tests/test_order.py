from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.config import TextConfig
from d9d_data.corpus.prepare import Corpus
from d9d_data.order.samples import SampleOrder
from d9d_data.stream.text import TextStream
from hypothesis import given
from hypothesis import strategies as st

LENGTH = 3


def numbers(samples: int) -> Corpus:
    """Token i is i, so that the first token of a sample tells which one it is."""
    tokens = np.arange(samples * LENGTH + 1, dtype=np.uint32)
    starts = np.asarray([0, len(tokens)], dtype=np.int64)
    return Corpus(tokens, starts, len(tokens), "numbers", 1.0, f"digest {samples}", Path("absent"))


def stream(samples: int, **values: int) -> TextStream:
    sizes = {"seed": 0, "batch_size": 4, "microbatch_size": 1} | values
    context = DataContext(cache_dir=Path("absent"), **sizes)  # type: ignore[arg-type]
    return TextStream(TextConfig(sources=("unused",), sequence_length=LENGTH), context, numbers(samples))


def samples_of(pack) -> list[int]:
    return [int(first) // LENGTH for microbatch in pack for first in microbatch["tokens"][:, 0]]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int]:
    """Ranks and microbatch size that divide a batch of 12."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    share = 12 // ranks
    return ranks, draw(st.sampled_from([size for size in (1, 2, 3, 4, 6, 12) if share % size == 0]))


@pytest.mark.thorough
@given(st.integers(1, 40), st.integers(0, 5), st.lists(layouts(), min_size=1, max_size=6))
def test_any_layout_and_any_resume_point_give_the_same_samples(
    samples: int, seed: int, per_step: list[tuple[int, int]]
) -> None:
    expected = SampleOrder(samples, seed, shuffle=True).take(0, 12 * len(per_step)).tolist()
    seen: list[int] = []
    state = None
    for ranks, microbatch_size in per_step:  # every step runs in another layout, resumed from the step before
        states = []
        for rank in range(ranks):
            reader = stream(samples, seed=seed, batch_size=12, microbatch_size=microbatch_size, rank=rank, ranks=ranks)
            if state is not None:
                reader.load_state(state)
            taken = reader.next_pack()
            assert {tuple(microbatch["tokens"].shape) for microbatch in taken} == {(microbatch_size, LENGTH)}
            seen += samples_of(taken)
            states.append(reader.state())
        assert all(other == states[0] for other in states)
        state = states[0]
    assert seen == expected


def test_every_epoch_visits_each_sample_once_in_another_order() -> None:
    order = SampleOrder(50, seed=3, shuffle=True)
    first, second = order.take(0, 50), order.take(50, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first.tolist() != second.tolist()
    assert first.tolist() != list(range(50))


def test_a_pack_may_span_several_epochs() -> None:
    assert sorted(SampleOrder(3, seed=0, shuffle=True).take(0, 9)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_seeds_give_different_orders() -> None:
    orders = {tuple(SampleOrder(50, seed, shuffle=True).take(0, 50)) for seed in range(5)}
    assert len(orders) == 5


def test_epochs_of_one_seed_are_not_those_of_the_next() -> None:
    epoch_1_of_seed_0 = SampleOrder(50, 0, shuffle=True).take(50, 50).tolist()
    assert epoch_1_of_seed_0 != SampleOrder(50, 1, shuffle=True).take(0, 50).tolist()


def test_without_shuffling_samples_come_in_order() -> None:
    assert SampleOrder(4, seed=9, shuffle=False).take(2, 6).tolist() == [2, 3, 0, 1, 2, 3]


def test_state_is_plain_json() -> None:
    reader = stream(10)
    reader.next_pack()
    assert reader.state()["consumed"] == 4
    assert set(reader.state()) == {"consumed", "fingerprint", "tokenisation"}


def test_microbatches_are_int64_cpu_tensors() -> None:
    (microbatch, *_) = stream(10, microbatch_size=2).next_pack()
    assert set(microbatch) == {"tokens", "targets", "positions", "documents"}
    for tensor in microbatch.values():
        assert (tensor.dtype, tensor.shape, tensor.device.type) == (torch.int64, (2, LENGTH), "cpu")


def test_state_of_other_data_is_refused() -> None:
    with pytest.raises(DataError, match=r"other data .*fingerprint.*a new run .*set model.pretrained to the directory"):
        stream(10).load_state(stream(11).state())


def test_state_of_another_order_is_refused(open_stream, corpus: Path) -> None:
    state = open_stream(corpus).state()
    for values in ({"shuffle": False}, {"sequence_length": 8}, {"held_out": 0.25}):
        with pytest.raises(DataError, match="belongs to other data"):
            open_stream(corpus, **values).load_state(state)
    open_stream(corpus, batch_size=6, microbatch_size=3).load_state(state)


def test_damaged_state_is_refused() -> None:
    reader = stream(10)
    with pytest.raises(DataError, match="damaged: consumed is 'many'"):
        reader.load_state({**reader.state(), "consumed": "many"})


def test_batch_that_does_not_divide_names_sizes_that_do() -> None:
    with pytest.raises(DataError, match=r"batch of 10 .* 2 data-parallel ranks .* of 4: .* multiple of 8; use 8 or 16"):
        stream(10, batch_size=10, ranks=2, microbatch_size=4)


def test_sequence_longer_than_the_data_names_the_largest_usable_length() -> None:
    config = TextConfig(sources=("unused",), sequence_length=100)
    context = DataContext(seed=0, batch_size=1, microbatch_size=1, cache_dir=Path("absent"))
    with pytest.raises(DataError, match=r"100 positions need 101 tokens, but the train split has 31; use at most 30"):
        TextStream(config, context, numbers(10))
