"""Conformance suite of datasets: order of samples, resume, slices of ranks, and worker processes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.data import DataContext, packs_documents
from d9d_core.errors import DataError
from torch import Tensor

from d9d_testing.suites.support import dataset_ranks
from d9d_testing.suites.support.component import ComponentSuite, configured, plain_json, registry_of
from d9d_testing.suites.support.resolved import given_by
from d9d_testing.world import World

_Plain = list[dict[str, Tensor]]
#: Names of microbatch fields that must be int64 (:mod:`d9d_core.data`).
_INDICES = ("tokens", "targets", "positions", "documents", "lengths", "labels", "rows")


class DatasetSuite(ComponentSuite):
    """Conformance suite of datasets (:class:`d9d_core.data.DataStream`).

    Subclass it, name the dataset, and write the files that it reads::

        class TestMyDataset(DatasetSuite):
            target = "my_dataset"
            other = {"sequence_length": 8}

            def fields(self, directory):
                (directory / "a.txt").write_text("some text")
                return {"sources": [str(directory)]}

    Attributes:
        batch_size: samples of a pack, a multiple of 8; the data should have enough samples for several packs.
        packs: number of packs to examine.
        shuffled: whether another seed gives another order.
        other: fields that select other data, whose state must be refused.
        rows_per_sample: rows per sample in all tensors except ``samples`` [b], the indices of the samples.
        too_long: fields with which records are too long for a sample, such as a small ``sequence_length``, if records
            have a length.
        workers: config field with the number of processes that build packs. The test takes seconds; it is skipped with
            ``None``, and if the config has no such field.
    """

    kind = "dataset"

    batch_size: ClassVar[int] = 8
    packs: ClassVar[int] = 5
    shuffled: ClassVar[bool] = True
    other: ClassVar[Mapping[str, Any]] = {}
    rows_per_sample: ClassVar[int] = 1
    too_long: ClassVar[Mapping[str, Any]] = {}
    workers: ClassVar[str | None] = "workers"

    # --- for subclasses to override

    def fields(self, directory: Path) -> Mapping[str, Any]:  # noqa: ARG002 - for subclasses
        """Config fields, with data in an initially empty directory; the same data in every call."""
        return {}

    def packs_documents(self, directory: Path) -> bool | None:
        """Whether samples hold several documents, from the config (:class:`d9d_core.data.PacksDocuments`)."""
        fields = {**self.config, **self._data(directory)}
        return packs_documents(configured(self.kind, self.plugin, self.target, fields)[1])

    def sample(self, microbatch: Mapping[str, Tensor], row: int) -> object:
        """Identity of a sample, independent of its batch; by default all of its values without padding."""
        values: list[tuple[str, tuple[Any, ...]]] = []
        for name, tensor in sorted(microbatch.items()):
            for place in self._rows(name, row):
                value = tensor[place]
                if tensor.ndim > 1 and "lengths" in microbatch:
                    value = value[: int(microbatch["lengths"][place])]
                values.append((name, tuple(value.flatten().tolist())))
        return tuple(values)

    # --- tests

    def test_order_depends_on_the_seed_alone(self, tmp_path: Path) -> None:
        """Packs are equal each time a stream is opened, whatever torch's random state, and reading leaves this state.

        Another seed gives another order.
        """
        with self.opened(tmp_path) as stream:
            expected = self.take(stream, self.packs)
        for seed in (1, 2):
            with torch.random.fork_rng(devices=[]), self.opened(tmp_path) as stream:
                torch.manual_seed(seed)
                generator = torch.get_rng_state()
                found = self.take(stream, self.packs)
                assert torch.equal(torch.get_rng_state(), generator), (
                    "reading packs moves torch's global random number generator; use a torch.Generator of your own"
                )
            _assert_same(found, expected, "opened again with the same seed")
        if self.shuffled:
            with self.opened(tmp_path, seed=1) as stream:
                other = self.take(stream, self.packs)
            assert not _same(other, expected), (
                "another seed gives the same order; draw from DataContext.seed, or state shuffled = False"
            )

    def test_order_is_the_same_in_another_process(self, tmp_path: Path) -> None:
        """The order of samples is the same in other processes (ranks, resumed runs), where a text's hash differs."""
        if type(self).build is not ComponentSuite.build:
            pytest.skip(f"{type(self).__name__} overrides build(), so another process cannot build the dataset")
        with self.opened(tmp_path) as stream:
            expected = self.take(stream, self.packs)
        kind, plugin, target, config = self.address()
        address = [kind, plugin, target, {**config, **self._data(tmp_path)}]
        facts = {"seed": 0, "batch_size": self.batch_size, "microbatch_size": 2}
        (found,) = World(1).run(dataset_ranks.packs, address, facts, str(tmp_path / "cache"), self.packs)
        difference = _difference(found, expected)
        assert difference is None, (
            f"in another process: {difference}; the order must not depend on the process, such as on hash() of a "
            "text or the order of a set"
        )

    def test_packs_are_microbatches_of_the_stated_size(self, tmp_path: Path) -> None:
        """Every rank gets equally many microbatches of the stated size, with equal tensor names, on the CPU.

        Tensors of token ids and other indices are int64.
        """
        names = set()
        for ranks, size in ((1, 2), (2, 1), (4, 2)):
            for rank in range(ranks):
                with self.opened(tmp_path, rank=rank, ranks=ranks, microbatch_size=size) as stream:
                    pack = stream.next_pack()
                where = f"rank {rank} of {ranks}, microbatches of {size}, batches of {self.batch_size}"
                expected = self.batch_size // ranks // size
                assert len(pack) == expected, f"{where}: the pack has {len(pack)} microbatches, expected {expected}"
                for microbatch in pack:
                    names.add(tuple(sorted(microbatch)))
                    wrong = [
                        f"{name} (a first dim of {len(tensor)} on {tensor.device})"
                        for name, tensor in microbatch.items()
                        if len(tensor) != len(self._rows(name, 0)) * size or tensor.device.type != "cpu"
                    ]
                    narrow = [
                        f"{name} {tensor.dtype}"
                        for name, tensor in microbatch.items()
                        if name in _INDICES and tensor.dtype != torch.int64
                    ]
                    assert not narrow, f"{where}: {', '.join(narrow)}; tensors of these names are int64 (d9d_core.data)"
                    assert not wrong, (
                        f"{where}: {', '.join(wrong)}; put them on the CPU, with {size} samples of "
                        f"{self.rows_per_sample} rows each"
                    )
        assert len(names) == 1, f"microbatches have different names: {sorted(names)}"

    def test_every_microbatch_has_the_tensors_that_the_record_names(self, tmp_path: Path) -> None:
        """Microbatches have the tensors that the record lists, with the stated numbers of dims.

        Tasks are checked against this list early.
        """
        config = configured(self.kind, self.plugin, self.target, {**self.config, **self._data(tmp_path)})[1]
        given = given_by(registry_of(self.plugin), config)
        if given is None:
            pytest.skip("the record does not say which tensors it gives")
        with self.opened(tmp_path) as stream:
            for microbatch in itertools.chain(*self.take(stream, self.packs)):
                found = {name: microbatch[name].ndim for name in sorted(given) if name in microbatch}
                assert found == given, (
                    f"a microbatch has {sorted(microbatch)}; of the tensors that the record says it gives, "
                    f"{dict(given)}, it has {found}; name the tensors in gives that every microbatch has, and their "
                    "number of dims"
                )

    def test_samples_hold_several_documents_only_if_the_config_says_so(self, tmp_path: Path) -> None:
        """If ``packs_documents`` of the config is false, no sample holds several documents.

        Attention kernels then ignore ``documents``.
        """
        if self.packs_documents(tmp_path) is not False:
            pytest.skip("the config does not state that a sample is one document")
        with self.opened(tmp_path) as stream:
            for microbatch in itertools.chain(*self.take(stream, self.packs)):
                documents = microbatch.get("documents", microbatch["tokens"] * 0)
                lengths = microbatch.get("lengths", torch.tensor([documents.shape[1]] * len(documents)))
                inside = torch.arange(documents.shape[1]) < lengths[:, None]
                assert not ((documents != documents[:, :1]) & inside).any(), (
                    f"a sample holds several documents: {documents.tolist()}, of lengths {lengths.tolist()}; "
                    "return True or None from packs_documents of the config"
                )

    def test_slices_of_ranks_make_up_the_global_pack(self, tmp_path: Path) -> None:
        """The slices of all ranks together contain the same samples for any number of ranks and any microbatch size."""
        with self.opened(tmp_path, microbatch_size=1) as stream:
            expected = [self.counted([pack]) for pack in self.take(stream, self.packs)]
        for ranks, size in ((1, 4), (2, 2), (4, 1)):
            found = [Counter[object]() for _ in range(self.packs)]
            for rank in range(ranks):
                with self.opened(tmp_path, rank=rank, ranks=ranks, microbatch_size=size) as stream:
                    for step, pack in enumerate(self.take(stream, self.packs)):
                        found[step] += self.counted([pack])
            for step, samples in enumerate(found):
                missing, extra = expected[step] - samples, samples - expected[step]
                assert samples == expected[step], (
                    f"pack {step} over {ranks} ranks with microbatches of {size}: {missing.total()} of "
                    f"{self.batch_size} samples are missing and {extra.total()} differ from one rank's samples; form "
                    "packs globally, and give each rank its part"
                )

    def test_a_stream_resumes_at_any_pack(self, tmp_path: Path) -> None:
        """From JSON state, a new stream resumes at any pack, and a stream goes back; no sample is repeated or left out.

        A state does not change when its stream reads further packs.
        """
        with self.opened(tmp_path) as stream:
            state, saved = stream.state(), plain_json(stream.state(), "state()")
            self.take(stream, 1)
            assert plain_json(state, "state()") == saved, (
                f"a state that was taken before a pack is {state!r} after it, and was {saved!r}; return a new mapping, "
                "because checkpoints are written during later steps"
            )
        with self.opened(tmp_path) as stream:
            states = [plain_json(stream.state(), "state()")]
            expected: list[_Plain] = []
            for _ in range(self.packs):
                expected += self.take(stream, 1)
                states.append(plain_json(stream.state(), "state()"))
            for step in (self.packs - 1, 0):
                stream.load_state(states[step])
                _assert_same(self.take(stream, 1), expected[step : step + 1], f"back at pack {step}")
        for step, state in enumerate(states[:-1]):
            with self.opened(tmp_path) as stream:
                stream.load_state(state)
                assert plain_json(stream.state(), "state()") == state, (
                    f"after load_state(state) state() is {stream.state()!r}, not {state!r}"
                )
                _assert_same(self.take(stream, self.packs - step), expected[step:], f"resumed at pack {step}")

    def test_state_is_the_same_on_all_ranks(self, tmp_path: Path) -> None:
        """All ranks have equal states: one rank's state is saved, and is loaded on any number of ranks."""
        with self.opened(tmp_path) as stream:
            self.take(stream, 1)
            saved, expected = plain_json(stream.state(), "state()"), [self.counted([p]) for p in self.take(stream, 2)]
        found = [Counter[object](), Counter[object]()]
        for rank in range(2):
            with self.opened(tmp_path, rank=rank, ranks=2) as stream:
                self.take(stream, 1)
                state = plain_json(stream.state(), "state()")
                assert state == saved, f"rank {rank} of 2 has state {state!r}, one rank alone has {saved!r}"
            with self.opened(tmp_path, rank=rank, ranks=2) as stream:
                stream.load_state(saved)
                for step, pack in enumerate(self.take(stream, 2)):
                    found[step] += self.counted([pack])
        assert found == expected, "two ranks that load the state of one rank continue with other samples"

    def test_packs_that_were_given_out_stay_as_they_are(self, tmp_path: Path) -> None:
        """Reading further packs does not change packs that were read before, because the loop prefetches packs."""
        with self.opened(tmp_path) as stream:
            pack = stream.next_pack()
            before = _copied(pack)
            self.take(stream, 2)
            _assert_same([_copied(pack)], [before], "the first pack, after two more packs were read")

    def test_state_of_other_data_is_refused(self, tmp_path: Path) -> None:
        """The state of other data is refused with a ``DataError``; otherwise a run would repeat samples."""
        if not self.other:
            pytest.skip(f"{type(self).__name__}.other names no fields that make other data")
        with self.opened(tmp_path, fields=self.other) as stream:
            self.take(stream, 1)
            state = stream.state()
        with self.opened(tmp_path) as stream, suppress(DataError):
            stream.load_state(state)
            raise AssertionError(
                f"the state of a stream with {dict(self.other)} is accepted; keep what identifies the data in state()"
            )

    def test_what_samples_do_not_hold_is_said(self, tmp_path: Path) -> None:
        """A dataset counts shortened and dropped records in its facts and in a line at each start, or refuses them."""
        if not self.too_long:
            pytest.skip(f"{type(self).__name__}.too_long names no fields with which samples do not hold all records")
        for start in ("first", "second"):
            notes: list[str] = []
            with suppress(DataError), self.opened(tmp_path, fields=self.too_long, note=notes.append) as stream:
                facts = plain_json(stream.facts, "facts")
                counted = {name: facts[name] for name in ("cut_documents", "dropped") if facts.get(name)}
                assert counted, (
                    f"with {dict(self.too_long)} records are shortened or dropped, but the facts do not count them; "
                    "set the facts 'cut_documents' and 'dropped'"
                )
                said = any(f"{count:,}" in note for count in counted.values() for note in notes)
                assert said, f"at the {start} start no line of DataContext.note contains {counted}; lines: {notes}"

    def test_worker_processes_change_nothing(self, tmp_path: Path) -> None:
        """Packs and states are the same with worker processes as without."""
        workers = self.workers
        if workers is None:
            pytest.skip(f"{type(self).__name__}.workers is None")
        config = configured(self.kind, self.plugin, self.target, {**self.config, **self._data(tmp_path)})[1]
        if workers not in type(config).model_fields:
            pytest.skip(f"the config has no field '{workers}'")
        with (
            self.opened(tmp_path, fields={workers: 0}) as here,
            self.opened(tmp_path, fields={workers: 2}) as there,
        ):
            for step in range(self.packs):
                _assert_same(self.take(there, 1), self.take(here, 1), f"pack {step} of 2 worker processes")
                assert there.state() == here.state(), f"after pack {step} the state differs with worker processes"

    def test_facts_are_plain_data_and_assets_are_written(self, tmp_path: Path) -> None:
        """Facts are JSON values, equal on all ranks, as tasks and epochs use them; assets are written without error."""
        with self.opened(tmp_path, rank=0, ranks=2) as first, self.opened(tmp_path, rank=1, ranks=2) as second:
            here, there = (plain_json(stream.facts, "facts") for stream in (first, second))
            assert here == there, f"rank 0 of 2 has the facts {here}, rank 1 of 2 {there}"
        with self.opened(tmp_path) as stream:
            facts = plain_json(stream.facts, "facts")
            for name in ("samples", "vocab_size", "sequence_length"):
                alone, of_two = facts.get(name), here.get(name)
                assert alone == of_two, f"the fact {name} is {alone} on one rank and {of_two} on two"
            samples = facts.get("samples", 1)
            sound = isinstance(samples, int) and samples > 0
            assert sound, f"facts say {samples!r} samples an epoch; give a whole number above 0, or leave it out"
            assets = tmp_path / "assets"
            assets.mkdir()
            stream.save_assets(assets)

    def test_one_pass_gives_every_row_once(self, tmp_path: Path) -> None:
        """One pass gives all rows once, pack by pack in order; microbatches do not depend on the number of ranks.

        In a microbatch, fillers come last and have no targets.
        """
        for size, micro, ranks in ((self.batch_size, 2, 2), (4 * self.batch_size, 1, 4)):
            alone, facts = self._passed(tmp_path, size, micro, ranks=1)
            self._check_rows(alone, facts)
            where = f"one pass with batches of {size} in microbatches of {micro}, {ranks} ranks against one"
            difference = _difference(self._passed(tmp_path, size, micro, ranks=ranks)[0], alone)
            assert difference is None, (
                f"{where}: {difference}; give rank r of R the r-th of R equal runs of a pack, and let nothing else "
                "depend on the ranks"
            )

    def test_one_pass_resumes_at_any_pack(self, tmp_path: Path) -> None:
        """One pass over all samples resumes after each of its first packs, on another number of ranks."""
        size = self.batch_size
        expected, _ = self._passed(tmp_path, size, 2, ranks=1)
        for after in range(1, max(2, min(len(expected), self.packs))):
            with self._in_one_pass(tmp_path, size, 2) as stream:
                self.take(stream, after)
                state = plain_json(stream.state(), "state()")
            found, _ = self._passed(tmp_path, size, 2, ranks=2, state=state)
            difference = _difference(found[: len(expected) - after], expected[after:])
            assert difference is None, f"one pass that two ranks resume after {after} packs: {difference}"

    def _in_one_pass(
        self, directory: Path, size: int, micro: int, rank: int = 0, ranks: int = 1
    ) -> AbstractContextManager[Any]:
        return self.opened(directory, batch_size=size, microbatch_size=micro, one_pass=True, rank=rank, ranks=ranks)

    def _passed(
        self, directory: Path, size: int, micro: int, ranks: int, state: Mapping[str, Any] | None = None
    ) -> tuple[list[_Plain], dict[str, Any]]:
        """Packs of one pass with the parts of all ranks concatenated, and the facts; skips if there is no such pass."""
        packs: list[_Plain] = []
        facts: dict[str, Any] = {}
        for rank in range(ranks):
            with self._in_one_pass(directory, size, micro, rank=rank, ranks=ranks) as stream:
                facts = plain_json(stream.facts, "facts")
                if "rows" not in facts:
                    pytest.skip("the stream cannot make one pass: it has no fact 'rows'")
                if state is not None:
                    stream.load_state(state)
                count = -(-int(facts["samples"]) // size)
                for index, pack in enumerate(self.take(stream, count)):
                    packs[index : index + 1] = [packs[index] + pack if rank else pack]
        return packs, facts

    def _check_rows(self, packs: Sequence[_Plain], facts: Mapping[str, Any]) -> None:
        found: list[int] = []
        for pack in packs:
            rows: list[int] = []
            for microbatch in pack:
                firsts = microbatch["rows"]
                fillers = firsts < 0
                assert bool((fillers[1:] >= fillers[:-1]).all()), f"fillers come before samples: rows {firsts}"
                targets = microbatch.get("targets")
                assert targets is None or targets.is_floating_point() or bool((targets[fillers] < 0).all()), (
                    f"a filler has targets: rows {firsts}; give it -100"
                )
                for place, first in enumerate(firsts.tolist()):
                    held = 1
                    if facts.get("packed"):
                        held = int(microbatch["documents"][place, int(microbatch["lengths"][place]) - 1]) + 1
                    rows += range(first, first + held) if first >= 0 else ()
            found += sorted(rows)
        expected = list(range(facts["rows"]))
        assert found == expected, f"one pass has the rows {found}, expected each of {facts['rows']} once, in order"

    # --- helpers for subclasses

    @contextmanager
    def opened(
        self,
        directory: Path,
        *,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        microbatch_size: int = 2,
        batch_size: int | None = None,
        one_pass: bool = False,
        fields: Mapping[str, Any] | None = None,
        note: Callable[[str], None] = lambda _text: None,
    ) -> Iterator[Any]:
        """Open a stream over the data; closed at the end of the block if it has ``close()``."""
        context = DataContext(
            seed=seed,
            batch_size=batch_size or self.batch_size,
            microbatch_size=microbatch_size,
            cache_dir=directory / "cache",
            rank=rank,
            ranks=ranks,
            one_pass=one_pass,
            note=note,
        )
        stream = self.build(context, **{**self._data(directory), **(fields or {})})
        try:
            yield stream
        finally:
            if hasattr(stream, "close"):
                stream.close()

    def take(self, stream: Any, count: int) -> list[_Plain]:
        """Read the next packs of a stream, and return copies of them."""
        return [_copied(stream.next_pack()) for _ in range(count)]

    def counted(self, packs: Sequence[_Plain]) -> Counter[object]:
        """Number of occurrences of each sample in the packs."""
        microbatches = [microbatch for pack in packs for microbatch in pack]
        firsts = [next(iter(microbatch.items())) for microbatch in microbatches]
        sizes = [len(tensor) // len(self._rows(name, 0)) for name, tensor in firsts]
        pairs = zip(microbatches, sizes, strict=True)
        return Counter(self.sample(microbatch, row) for microbatch, size in pairs for row in range(size))

    def _rows(self, name: str, sample: int) -> range:
        """Rows of a sample in a tensor of a microbatch."""
        rows = 1 if name == "samples" else self.rows_per_sample
        return range(sample * rows, (sample + 1) * rows)

    def _data(self, directory: Path) -> dict[str, Any]:
        data = directory / "data"
        data.mkdir(exist_ok=True)
        return dict(self.fields(data))


def _copied(pack: Sequence[Mapping[str, Tensor]]) -> _Plain:
    return [{name: tensor.clone() for name, tensor in microbatch.items()} for microbatch in pack]


def _same(found: Sequence[_Plain], expected: Sequence[_Plain]) -> bool:
    return _difference(found, expected) is None


def _assert_same(found: Sequence[_Plain], expected: Sequence[_Plain], where: str) -> None:
    difference = _difference(found, expected)
    assert difference is None, (
        f"{where}: {difference}; a pack must depend on the seed and the number of consumed samples only"
    )


def _difference(found: Sequence[_Plain], expected: Sequence[_Plain]) -> str | None:
    for step, (pack, other) in enumerate(zip(found, expected, strict=True)):
        if len(pack) != len(other):
            return f"pack {step} has {len(pack)} microbatches, expected {len(other)}"
        for index, (microbatch, wanted) in enumerate(zip(pack, other, strict=True)):
            if microbatch.keys() != wanted.keys():
                return f"pack {step}, microbatch {index} has {sorted(microbatch)}, expected {sorted(wanted)}"
            for name, tensor in microbatch.items():
                same = tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name])
                if not same:
                    return f"pack {step}, microbatch {index}: {name} differs"
    return None
