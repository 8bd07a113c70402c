"""Checks of the suites of datasets and tasks, each with a stand-in that has one fault: no processes, no training."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import DataError
from d9d_testing.suites import dataset as dataset_suite
from d9d_testing.suites.dataset import DatasetSuite, _assert_same, _copied, _difference
from d9d_testing.suites.task import TaskSuite


class Stream:
    """Stream of samples 0, 1, and so on, each with two positions; a fault may change its microbatches."""

    def __init__(self, context: Any, fault: Any = None) -> None:
        self.context, self.fault, self.consumed = context, fault, 0
        self.facts = {"samples": 16, "vocab_size": 9, "sequence_length": 2}

    def next_pack(self) -> Any:
        context = self.context
        share = context.batch_size // context.ranks
        first = self.consumed + context.rank * share
        self.consumed += context.batch_size
        starts = range(first, first + share, context.microbatch_size)
        pack = [self.microbatch(list(range(start, start + context.microbatch_size))) for start in starts]
        return self.fault(pack, self) if self.fault is not None else pack

    def microbatch(self, samples: list[int]) -> Any:
        numbers = torch.tensor(samples)
        return {"tokens": torch.stack([numbers, numbers + 1], dim=1), "x": numbers.float()}

    def state(self) -> Any:
        return {"consumed": self.consumed}

    def load_state(self, state: Any) -> None:
        self.consumed = state["consumed"]

    def save_assets(self, directory: Path) -> None:
        (directory / "assets.txt").write_text("written")


class Numbers(DatasetSuite):
    """Suite of such streams."""

    fault: Any = None
    streams: Any = Stream
    kwargs: Any = None

    @contextmanager
    def opened(self, directory: Path, **given: Any) -> Any:
        facts = {"seed": 0, "rank": 0, "ranks": 1, "microbatch_size": 2, "batch_size": self.batch_size, **given}
        self.given = facts
        yield self.streams(SimpleNamespace(**facts), self.fault)


def suite(fault: Any = None, **more: Any) -> Any:
    made = Numbers()
    made.fault = fault
    for name, value in more.items():
        setattr(made, name, value)
    return made


def changed(change: Any, first: int = 0) -> Any:
    """Fault that changes the microbatches from one on."""
    return lambda pack, stream: [*pack[:first], *(change(dict(batch), stream) for batch in pack[first:])]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (None, None),
        (lambda pack, stream: pack[:-1], "the pack has 3 microbatches, expected 4"),
        (changed(lambda batch, _: batch | {"x": batch["x"][:1]}, 3), r"x \(a first dim of 1 on cpu\); put them on"),
        (changed(lambda batch, _: batch | {"x": batch["x"].to("meta")}), r"x \(a first dim of 2 on meta\)"),
        (changed(lambda batch, _: batch | {"tokens": batch["tokens"].int()}), "tokens torch.int32; tensors of these"),
        (
            changed(lambda batch, stream: batch | ({"y": batch["x"]} if stream.context.ranks == 4 else {})),
            "microbatches have different names",
        ),
        (
            lambda pack, stream: pack[:-1] if stream.context.rank == 3 else pack,
            "rank 3 of 4, microbatches of 2, batches of 8: the pack has 0 microbatches, expected 1",
        ),
    ],
)  # fmt: skip
def test_packs_have_microbatches_of_the_stated_size(fault: Any, says: str | None, tmp_path: Path) -> None:
    if says is None:
        suite(fault).test_packs_are_microbatches_of_the_stated_size(tmp_path)
    else:
        with pytest.raises(AssertionError, match=says):
            suite(fault).test_packs_are_microbatches_of_the_stated_size(tmp_path)


def test_samples_of_several_rows_have_one_index(tmp_path: Path) -> None:
    class Pairs(Stream):
        def microbatch(self, samples: list[int]) -> Any:
            rows = torch.tensor([row for sample in samples for row in (sample, sample + 100)])
            return {"samples": torch.tensor(samples), "tokens": rows[:, None]}

    sound = suite(streams=Pairs, rows_per_sample=2)
    sound.test_packs_are_microbatches_of_the_stated_size(tmp_path)
    sound.test_slices_of_ranks_make_up_the_global_pack(tmp_path)
    batch = Pairs(None).microbatch([3, 5])
    assert [sound.sample(batch, row) for row in (0, 1)] == [
        (("samples", (sample,)), ("tokens", (sample,)), ("tokens", (sample + 100,))) for sample in (3, 5)
    ]
    assert sound.counted([[batch], [batch, batch]]) == Counter({sound.sample(batch, row): 3 for row in (0, 1)})
    with pytest.raises(AssertionError, match="with 2 samples of 1 rows each"):
        suite(streams=Pairs).test_packs_are_microbatches_of_the_stated_size(tmp_path)


def test_padding_is_no_part_of_a_sample() -> None:
    batch = {
        "lengths": torch.tensor([1, 2]),
        "tokens": torch.tensor([[1, 0], [2, 3]]),
        "x": torch.tensor([[[1], [9]], [[2], [3]]]),
    }
    assert suite().sample(batch, 0) == (("lengths", (1,)), ("tokens", (1,)), ("x", (1,)))
    assert suite().sample(batch, 1) == (("lengths", (2,)), ("tokens", (2, 3)), ("x", (2, 3)))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (None, None),
        (changed(lambda batch, stream: batch | {"x": batch["x"] + stream.context.rank}), "pack 0 over 2 ranks"),
        (
            changed(lambda batch, stream: batch | ({"x": batch["x"] * 0 - 1} if stream.context.ranks == 4 else {})),
            "pack 0 over 4 ranks with microbatches of 1: 8 of 8 samples are missing and 8 differ",
        ),
        (
            changed(lambda batch, stream: batch | {"x": batch["x"] + (stream.context.microbatch_size == 4)}, 1),
            "pack 0 over 1 ranks with microbatches of 4: 4 of 8 samples are missing and 4 differ from one rank's",
        ),
    ],
)  # fmt: skip
def test_ranks_share_the_samples_of_a_pack(fault: Any, says: str | None, tmp_path: Path) -> None:
    if says is None:
        suite(fault).test_slices_of_ranks_make_up_the_global_pack(tmp_path)
    else:
        with pytest.raises(AssertionError, match=says):
            suite(fault).test_slices_of_ranks_make_up_the_global_pack(tmp_path)


class Shared(Stream):
    """Stream whose states are one mapping."""

    def state(self) -> Any:
        self.__dict__.setdefault("kept", {})["consumed"] = self.consumed
        return self.kept

    def next_pack(self) -> Any:
        pack = super().next_pack()
        self.state()
        return pack


class Forgets(Stream):
    def load_state(self, state: Any) -> None:
        pass


class Onward(Stream):
    """Stream that only goes forward."""

    def load_state(self, state: Any) -> None:
        self.consumed = max(self.consumed, state["consumed"])


class OfRank(Stream):
    def state(self) -> Any:
        return {"consumed": self.consumed, "rank": self.context.rank}


class Skips(Stream):
    def load_state(self, state: Any) -> None:
        self.consumed = state["consumed"]
        self.late = state["consumed"] > 0 and self.context.ranks > 1

    def next_pack(self) -> Any:
        if getattr(self, "late", False):
            self.consumed, self.late = self.consumed + 1, False
        return super().next_pack()


def test_states_are_those_of_any_stream_at_the_same_place(tmp_path: Path) -> None:
    suite().test_a_stream_resumes_at_any_pack(tmp_path)
    suite().test_state_is_the_same_on_all_ranks(tmp_path)
    for streams, says in (
        (Shared, "a state that was taken before a pack is {'consumed': 8} after it, and was {'consumed': 0}"),
        (Forgets, "back at pack 4: pack 0, microbatch 0: tokens differs"), (Onward, "back at pack 4: pack 0"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=says):
            suite(streams=streams).test_a_stream_resumes_at_any_pack(tmp_path)
    with pytest.raises(
        AssertionError, match="rank 0 of 2 has state|rank 1 of 2 has state {'consumed': 8, 'rank': 1}, one"
    ):
        suite(streams=OfRank).test_state_is_the_same_on_all_ranks(tmp_path)
    with pytest.raises(AssertionError, match="two ranks that load the state of one rank continue with other samples"):
        suite(streams=Skips).test_state_is_the_same_on_all_ranks(tmp_path)


def test_earlier_packs_stay_and_states_of_other_data_are_refused(tmp_path: Path) -> None:
    class Reuses(Stream):
        buffer = torch.zeros(2)

        def microbatch(self, samples: list[int]) -> Any:
            return {"x": self.buffer.copy_(torch.tensor(samples))}

    suite().test_packs_that_were_given_out_stay_as_they_are(tmp_path)
    with pytest.raises(
        AssertionError, match="the first pack, after two more packs were read: pack 0, microbatch 0: x differs"
    ):
        suite(streams=Reuses).test_packs_that_were_given_out_stay_as_they_are(tmp_path)

    class Refuses(Stream):
        def load_state(self, state: Any) -> None:
            raise DataError("other data")

    suite(other={"a": 1}, streams=Refuses).test_state_of_other_data_is_refused(tmp_path)
    with pytest.raises(AssertionError, match="the state of a stream with {'a': 1} is accepted; keep what identifies"):
        suite(other={"a": 1}).test_state_of_other_data_is_refused(tmp_path)
    with pytest.raises(pytest.skip.Exception, match="Numbers.other names no fields that make other data"):
        suite().test_state_of_other_data_is_refused(tmp_path)


def test_records_that_do_not_fit_are_counted_and_said(tmp_path: Path) -> None:
    def streams(facts: Any, *lines: str) -> Any:
        def opened(context: Any, _fault: Any) -> Any:
            for line in lines:
                context.note(line)
            return SimpleNamespace(facts=facts)

        return opened

    def check(facts: Any, *lines: str) -> None:
        made = suite(too_long={"n": 1}, streams=streams(facts, *lines))
        made.test_what_samples_do_not_hold_is_said(tmp_path)

    check({"cut_documents": 1200}, "some line", "cut 1,200 records")
    check({"cut_documents": 0, "dropped": 3}, "left out 3")
    with pytest.raises(AssertionError, match="with {'n': 1} records are shortened or dropped, but the facts do not"):
        check({"cut_documents": 0}, "cut 3")
    with pytest.raises(
        AssertionError, match="at the first start no line of DataContext.note contains {'dropped': 3}; li"
    ):
        check({"dropped": 3}, "left out 4")
    with pytest.raises(pytest.skip.Exception, match="Numbers.too_long names no fields with which samples do not hold"):
        suite().test_what_samples_do_not_hold_is_said(tmp_path)


def test_samples_with_several_documents_are_noticed_unless_they_are_padding(tmp_path: Path) -> None:
    def check(stated: bool | None, **fields: Any) -> None:
        made = suite(changed(lambda batch, _: batch | fields), packs_documents=lambda _directory: stated)
        made.test_samples_hold_several_documents_only_if_the_config_says_so(tmp_path)

    one, several = torch.tensor([[0, 0], [0, 0]]), torch.tensor([[0, 0], [0, 1]])
    check(False)
    check(False, documents=one)
    check(False, documents=several, lengths=torch.tensor([2, 1]))
    with pytest.raises(AssertionError, match=r"a sample holds several documents: \[\[0, 0\], \[0, 1\]\], of lengths"):
        check(False, documents=several)
    with pytest.raises(AssertionError, match=r"of lengths \[1, 2\]"):
        check(False, documents=several, lengths=torch.tensor([1, 2]))
    for stated in (True, None):
        with pytest.raises(pytest.skip.Exception, match="the config does not state that a sample is one document"):
            check(stated, documents=several)


def test_the_seed_alone_decides_the_order(tmp_path: Path) -> None:
    def draws(batch: Any, stream: Any) -> Any:
        return batch | {"x": batch["x"] + torch.rand(()) * 0}

    seeded = changed(lambda batch, stream: batch | {"x": batch["x"] + 100 * stream.context.seed})
    suite(seeded).test_order_depends_on_the_seed_alone(tmp_path)
    suite(shuffled=False).test_order_depends_on_the_seed_alone(tmp_path)
    with pytest.raises(AssertionError, match="another seed gives the same order; draw from DataContext.seed"):
        suite().test_order_depends_on_the_seed_alone(tmp_path)
    with pytest.raises(AssertionError, match="reading packs moves torch's global random number generator"):
        suite(changed(draws)).test_order_depends_on_the_seed_alone(tmp_path)
    lives: list[int] = []

    def lives_on(pack: Any, stream: Any) -> Any:
        lives.append(0)
        return [batch | {"x": batch["x"] + len(lives)} for batch in pack]

    with pytest.raises(AssertionError, match="opened again with the same seed: pack 0, microbatch 0: x differs"):
        suite(lives_on).test_order_depends_on_the_seed_alone(tmp_path)


def test_facts_are_plain_and_equal_on_all_ranks(tmp_path: Path) -> None:
    def check(facts: Any) -> None:
        class Facts(Stream):
            def __init__(self, context: Any, fault: Any) -> None:
                super().__init__(context, fault)
                self.facts = facts(context)

        suite(streams=Facts).test_facts_are_plain_data_and_assets_are_written(tmp_path)
        (tmp_path / "assets" / "assets.txt").unlink()
        (tmp_path / "assets").rmdir()

    check(lambda _: {"samples": 1})
    check(lambda _: {})
    for facts, says in (
        (lambda context: {"rank": context.rank}, "rank 0 of 2 has the facts {'rank': 0}, rank 1 of 2 {'rank': 1}"),
        (lambda context: {"samples": 8 // context.ranks}, "the fact samples is 8 on one rank and 4 on two"),
        (lambda _: {"samples": 0}, "facts say 0 samples an epoch; give a whole number above 0"),
        (lambda _: {"samples": 2.5}, "facts say 2.5 samples"), (lambda _: {"x": {1}}, "facts must be JSON values"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=says):
            check(facts)


# --- one pass


def passed(*packs: Any) -> Any:
    return [[{name: torch.tensor(values) for name, values in batch.items()} for batch in pack] for pack in packs]


@pytest.mark.parametrize(
    ("packs", "facts", "says"),
    [
        ([[{"rows": [0, 1]}, {"rows": [2, -1]}]], {"rows": 3}, None),
        ([[{"rows": [1, 0]}], [{"rows": [2, -1]}]], {"rows": 3}, None),
        ([[{"rows": [0, 2]}], [{"rows": [1, -1]}]], {"rows": 3}, r"one pass has the rows \[0, 2, 1\], expected"),
        ([[{"rows": [0, 1]}]], {"rows": 3}, r"one pass has the rows \[0, 1\]"),
        ([[{"rows": [0, 0]}]], {"rows": 1}, r"one pass has the rows \[0, 0\]"),
        ([[{"rows": [-1, 0]}]], {"rows": 1}, "fillers come before samples: rows "),
        ([[{"rows": [0, -1], "targets": [[1, 2], [-100, -100]]}]], {"rows": 1}, None),
        ([[{"rows": [0, -1], "targets": [[1, 2], [-100, 3]]}]], {"rows": 1}, "a filler has targets: rows "),
        ([[{"rows": [0, -1], "targets": [[1.0], [3.0]]}]], {"rows": 1}, None),
        (
            [[{"rows": [0, 2], "documents": [[0, 1, 2], [0, 0, 1]], "lengths": [2, 2]}]], {"rows": 3, "packed": True},
            None,
        ),
        (
            [[{"rows": [0, 2], "documents": [[0, 1, 2], [0, 0, 1]], "lengths": [2, 3]}]], {"rows": 3, "packed": True},
            r"one pass has the rows \[0, 1, 2, 3\]",
        ),
    ],
)  # fmt: skip
def test_rows_of_one_pass_come_once_and_in_order(packs: Any, facts: Any, says: str | None) -> None:
    if says is None:
        suite()._check_rows(passed(*packs), facts)
    else:
        with pytest.raises(AssertionError, match=says):
            suite()._check_rows(passed(*packs), facts)


class Once(Stream):
    """Stream of one pass over 20 samples."""

    def __init__(self, context: Any, fault: Any = None) -> None:
        super().__init__(context, fault)
        self.facts = {"samples": 20, "rows": 20}

    def microbatch(self, samples: list[int]) -> Any:
        rows = torch.tensor([sample if sample < 20 else -1 for sample in samples])
        return {"rows": rows, "x": rows.clamp(min=0)}


def test_one_pass_is_the_same_on_all_ranks_and_resumes(tmp_path: Path) -> None:
    suite(streams=Once).test_one_pass_gives_every_row_once(tmp_path)
    suite(streams=Once).test_one_pass_resumes_at_any_pack(tmp_path)
    packs, facts = suite(streams=Once)._passed(tmp_path, 8, 2, ranks=2)
    assert [[batch["rows"].tolist() for batch in pack] for pack in packs] == [
        [[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11], [12, 13], [14, 15]],
        [[16, 17], [18, 19], [-1, -1], [-1, -1]],
    ]  # fmt: skip
    assert facts == {"samples": 20, "rows": 20}
    off = changed(lambda batch, stream: batch | {"x": batch["x"] + stream.context.rank})
    with pytest.raises(
        AssertionError, match="one pass with batches of 8 in microbatches of 2, 2 ranks against one: pack 0"
    ):
        suite(off, streams=Once).test_one_pass_gives_every_row_once(tmp_path)
    four = changed(lambda batch, stream: batch | {"x": batch["x"] + (stream.context.rank == 3)})
    with pytest.raises(AssertionError, match="one pass with batches of 32 in microbatches of 1, 4 ranks against one"):
        suite(four, streams=Once).test_one_pass_gives_every_row_once(tmp_path)

    class Restarts(Once):
        def load_state(self, state: Any) -> None:
            pass

    with pytest.raises(AssertionError, match="one pass that two ranks resume after 1 packs: pack 0, microbatch 0"):
        suite(streams=Restarts).test_one_pass_resumes_at_any_pack(tmp_path)
    with pytest.raises(pytest.skip.Exception, match="the stream cannot make one pass: it has no fact 'rows'"):
        suite().test_one_pass_gives_every_row_once(tmp_path)


# --- comparisons


def test_packs_differ_in_numbers_names_dtypes_or_values() -> None:
    one = passed([{"a": [1, 2]}, {"a": [3, 4]}])
    for other, says in (
        (passed([{"a": [1, 2]}, {"a": [3, 4]}]), None),
        (passed([{"a": [1, 2]}]), "pack 0 has 1 microbatches, expected 2"),
        (passed([{"a": [1, 2]}, {"b": [3, 4]}]), r"pack 0, microbatch 1 has \['b'\], expected \['a'\]"),
        (passed([{"a": [1, 2]}, {"a": [3, 5]}]), "pack 0, microbatch 1: a differs"),
        (passed([{"a": [1.0, 2.0]}, {"a": [3, 4]}]), "pack 0, microbatch 0: a differs"),
        (passed([{"a": [1, 2], "b": [0]}, {"a": [3, 4]}]), r"pack 0, microbatch 0 has \['a', 'b'\], expected \['a'\]"),
    ):  # fmt: skip
        found = _difference(other, one)
        assert (found is None) == (says is None)
        assert dataset_suite._same(other, one) == (says is None)
        if says is None:
            _assert_same(other, one, "here")
        else:
            with pytest.raises(AssertionError, match=f"here: {says}; a pack must depend on the seed"):
                _assert_same(other, one, "here")
    with pytest.raises(ValueError, match="longer"):
        _difference(one, one + one)
    copies = _copied(one[0])
    assert copies[0]["a"] is not one[0][0]["a"]


# --- tasks


class Sums(TaskSuite):
    """Suite of a task that adds up the numbers of its samples."""

    samples = 12
    group = 2
    asked: Any = None

    def build(self, **_: Any) -> Any:
        return self

    def whole(self) -> Any:
        return self.microbatch(slice(0, self.samples))

    def microbatch(self, samples: slice, *, counted: bool = True) -> Any:
        if self.asked is not None:
            self.asked.append((samples.start, samples.stop))
        return {"x": torch.arange(12.0)[samples]}

    def sums(self, task: Any, batch: Any) -> Any:
        return {"a": self.of(batch["x"])}

    def of(self, x: Any) -> Any:
        return x.sum()


def test_sums_of_parts_add_up_at_three_cuts() -> None:
    made = Sums()
    made.asked = []
    made.test_parts_of_a_batch_add_up_to_the_whole()
    assert made.asked == [(0, 12), (0, 2), (2, 12), (0, 6), (6, 12), (0, 10), (10, 12)]
    made.test_a_batch_twice_has_twice_the_sums()
    made.of = lambda x: x.mean()  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=r"a of 2 and 10 samples added, compared with all .*; groups are 2 neighb"):
        made.test_parts_of_a_batch_add_up_to_the_whole()
    with pytest.raises(AssertionError, match="a of a doubled batch, against twice the sum"):
        made.test_a_batch_twice_has_twice_the_sums()
    made.group = 5  # type: ignore[misc]
    with pytest.raises(AssertionError, match="samples = 12 is no multiple of group = 5"):
        made.test_parts_of_a_batch_add_up_to_the_whole()
    for late in (2, 6, 10):  # each cut is needed
        made.group = 2  # type: ignore[misc]
        made.of = lambda x, late=late: x.sum() + (len(x) == late)  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match="samples added, compared with all at once"):
            made.test_parts_of_a_batch_add_up_to_the_whole()
