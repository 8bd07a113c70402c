"""Datasets with one fault each, over the toy tokens. A single-file plugin, so that other processes find them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_core.plugin import DatasetSpec, Ref, hookimpl
from d9d_core.types import Pack, State
from d9d_testing.suites.dataset import DatasetSuite
from d9d_testing.toy.config import ToyTokensConfig
from d9d_testing.toy.data import ToyTokens

LIVES = itertools.count()


class Faulty(ToyTokens):
    """Sound; knows its data by the size of the vocabulary, and cuts three records to less than 8 positions."""

    def __init__(self, config: ToyTokensConfig, context: DataContext) -> None:
        super().__init__(config, context)
        self.life = next(LIVES)
        if self.cut:
            self.say_cut(context)

    @property
    def cut(self) -> int:
        return 3 if self._config.sequence_length < 8 else 0

    def say_cut(self, context: DataContext) -> None:
        context.note(f"cut {self.cut} records")

    @property
    def facts(self) -> State:
        return {**super().facts, "cut_documents": self.cut}

    def state(self) -> State:
        return {**super().state(), "vocab_size": self._config.vocab_size}

    def load_state(self, state: State) -> None:
        if state["vocab_size"] != self._config.vocab_size:
            raise DataError("other data")
        super().load_state(state)


class DrawsFromTheGlobalGenerator(Faulty):
    def next_pack(self) -> Pack:
        return [{**m, "tokens": m["tokens"] + torch.randint(2, m["tokens"].shape)} for m in super().next_pack()]


class IgnoresTheSeed(Faulty):
    def __init__(self, config: ToyTokensConfig, context: DataContext) -> None:
        super().__init__(config, DataContext(0, context.batch_size, context.microbatch_size, context.cache_dir,
                                             context.rank, context.ranks))  # fmt: skip


class DependsOnTheProcess(Faulty):
    def next_pack(self) -> Pack:
        return [{**m, "tokens": m["tokens"] + self.life} for m in super().next_pack()]


class EveryRankTheSame(Faulty):
    def next_pack(self) -> Pack:
        rank, context = self._context.rank, self._context
        object.__setattr__(context, "rank", 0)
        pack = super().next_pack()
        object.__setattr__(context, "rank", rank)
        return pack


class ShufflesPerRank(Faulty):
    def next_pack(self) -> Pack:
        step = self._packs
        seed = torch.Generator().manual_seed(17 * self._context.rank + step)
        return [{**m, "tokens": m["tokens"][:, torch.randperm(8, generator=seed)]} for m in super().next_pack()]


class OrderDependsOnTheMicrobatch(Faulty):
    def next_pack(self) -> Pack:
        return [{**m, "tokens": m["tokens"] + index} for index, m in enumerate(super().next_pack())]


class ResumesOnePackLate(Faulty):
    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._packs += 1


class ForgetsItsPlace(Faulty):
    def load_state(self, state: State) -> None:
        pass


class OnlyGoesForward(Faulty):
    def load_state(self, state: State) -> None:
        before = self._packs
        super().load_state(state)
        self._packs = max(before, self._packs)


class StateWithTensors(Faulty):
    def state(self) -> State:
        return {**super().state(), "packs": torch.tensor(self._packs)}  # type: ignore[dict-item]


class StateOfTheRank(Faulty):
    def state(self) -> State:
        return {**super().state(), "rank": self._context.rank}


class TakesOtherState(Faulty):
    def load_state(self, state: State) -> None:
        ToyTokens.load_state(self, state)


class ReusesMemory(Faulty):
    kept: Any = None

    def next_pack(self) -> Pack:
        pack = super().next_pack()
        if self.kept is None:
            self.kept = pack
        for mine, new in zip(self.kept, pack, strict=True):
            for name, tensor in new.items():
                mine[name].copy_(tensor)
        return self.kept


class DropsTheLastMicrobatch(Faulty):
    def next_pack(self) -> Pack:
        return super().next_pack()[:-1] or super().next_pack()


class FactsWithTensors(Faulty):
    @property
    def facts(self) -> State:
        return {"vocab_size": torch.tensor(3)}  # type: ignore[dict-item]


class FactsOfTheRank(Faulty):
    @property
    def facts(self) -> State:
        return {**super().facts, "samples": 100 // self._context.ranks}


class EmptyEpochs(Faulty):
    @property
    def facts(self) -> State:
        return {**super().facts, "samples": 0}


class CutsInSilence(Faulty):
    @property
    def facts(self) -> State:
        return ToyTokens.facts.fget(self)  # type: ignore[attr-defined, no-any-return]


class SaysOnceWhatItCuts(Faulty):
    def say_cut(self, context: DataContext) -> None:
        if not context.cache_dir.exists():
            super().say_cut(context)
            context.cache_dir.mkdir(parents=True)


class InOnePass(Faulty):
    """Says that it makes one pass, over 20 samples."""

    @property
    def facts(self) -> State:
        return {**super().facts, "samples": 20, "rows": 20}

    def next_pack(self) -> Pack:
        context = self._context
        share = context.batch_size // context.ranks
        first = self._packs * context.batch_size + context.rank * share
        pack = super().next_pack()
        rows = torch.arange(first, first + share).split(context.microbatch_size)
        return [
            {**microbatch, "rows": self.numbered(of), "targets": self.masked(microbatch["targets"], of)}
            for microbatch, of in zip(pack, rows, strict=True)
        ]

    def numbered(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.where(rows < 20, rows, -1)

    def masked(self, targets: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.where((rows < 20)[:, None], targets, -100)


class LeavesOutARow(InOnePass):
    def numbered(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.where(rows < 19, rows, -1)

    def masked(self, targets: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return super().masked(targets, rows + 1)


class FillersLearn(InOnePass):
    def masked(self, targets: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return targets.clamp(min=0)


class FillersFirst(InOnePass):
    def numbered(self, rows: torch.Tensor) -> torch.Tensor:
        return super().numbered(rows).flip(0)


class RowsOfTheRank(InOnePass):
    def numbered(self, rows: torch.Tensor) -> torch.Tensor:
        return super().numbered(rows - self._context.rank)


class ForgetsItsPlaceInThePass(InOnePass):
    """Saves whether its one pass has begun, and not its place."""

    def state(self) -> State:
        packs = min(self._packs, 1) if self._context.one_pass else self._packs
        return {**super().state(), "packs": packs}


class DeniesItsDocuments(Faulty):
    def next_pack(self) -> Pack:
        return [{**m, "documents": torch.arange(8).expand_as(m["tokens"]) // 3} for m in super().next_pack()]


class LacksWhatItsRecordGives(Faulty):
    def next_pack(self) -> Pack:
        return [{name: tensor for name, tensor in m.items() if name != "targets"} for m in super().next_pack()]


class ForgetsItsEpoch(Faulty):
    """Saves its place inside an epoch of three packs only."""

    def state(self) -> State:
        return {**super().state(), "packs": self._packs % 3}


class OrdersByHash(Faulty):
    """``hash`` of a text is another number in each process."""

    def next_pack(self) -> Pack:
        shift = hash(f"pack {self._packs}") % self._config.vocab_size
        size = self._config.vocab_size
        return [{**m, "tokens": (m["tokens"] + shift) % size} for m in super().next_pack()]


class GivesOutItsLiveState(Faulty):
    """The state that a checkpoint took changes with the next pack."""

    def __init__(self, config: ToyTokensConfig, context: DataContext) -> None:
        super().__init__(config, context)
        self._live: dict[str, Any] = dict(super().state())

    def next_pack(self) -> Pack:
        pack = super().next_pack()
        self._live["packs"] = self._packs
        return pack

    def state(self) -> State:
        return self._live

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._live = dict(super().state())


class NarrowTokens(Faulty):
    """Token ids as the file holds them: int32, although the name ``tokens`` stands for int64."""

    def next_pack(self) -> Pack:
        return [{**m, "tokens": m["tokens"].int()} for m in super().next_pack()]


class FaultyConfig(ToyTokensConfig):
    """Random tokens with a fault."""

    name: Literal["faulty"] = "faulty"  # type: ignore[assignment]
    """Selects the dataset."""
    fault: str = ""
    """Fault of the dataset."""


def build(config: FaultyConfig, context: DataContext) -> Faulty:
    """The dataset with the fault."""
    kinds: dict[str, type[Faulty]] = {
        kind.__name__: kind for kind in (*Faulty.__subclasses__(), *InOnePass.__subclasses__())
    }
    return kinds.get(config.fault, Faulty)(config, context)


@hookimpl
def d9d_datasets() -> Iterator[DatasetSpec]:
    """The faulty one."""
    yield DatasetSpec(
        name="faulty",
        summary="Random tokens with a fault.",
        config=Ref(f"{__name__}:FaultyConfig"),
        build=Ref(f"{__name__}:build"),
        gives={"tokens": 2, "targets": 2},
    )


class Sound(DatasetSuite):
    target = "faulty"
    plugin = __file__
    other = {"vocab_size": 32}
    too_long = {"sequence_length": 4}
    workers = None

    def packs_documents(self, directory: Path) -> bool | None:
        return False


def _fault(kind: type[Faulty], text: str) -> tuple[dict[str, Any], str]:
    return {"config": {"fault": kind.__name__}}, text


FAULTS = {
    "draws from the global generator": _fault(DrawsFromTheGlobalGenerator, ""),
    "ignores the seed": _fault(IgnoresTheSeed, "another seed gives the same order"),
    "depends on the process": _fault(DependsOnTheProcess, "opened again with the same seed"),
    "every rank reads the same": _fault(EveryRankTheSame, "form packs globally"),
    "shuffles per rank": _fault(ShufflesPerRank, "form packs globally"),
    "depends on the microbatch": _fault(OrderDependsOnTheMicrobatch, "form packs globally"),
    "resumes one pack late": _fault(ResumesOnePackLate, ""),
    "forgets its place": _fault(ForgetsItsPlace, ""),
    "only goes forward": _fault(OnlyGoesForward, "back at pack"),
    "state has tensors": _fault(StateWithTensors, "must be JSON values"),
    "state is of one rank": _fault(StateOfTheRank, "has state"),
    "takes the state of other data": _fault(TakesOtherState, "keep what identifies the data in state()"),
    "denies that it packs documents": _fault(DeniesItsDocuments, "a sample holds several documents"),
    "lacks what its record gives": _fault(LacksWhatItsRecordGives, "tensors that the record says it gives"),
    "reuses memory of packs": _fault(ReusesMemory, "after two more packs"),
    "drops a microbatch": _fault(DropsTheLastMicrobatch, ""),
    "facts have tensors": _fault(FactsWithTensors, "must be JSON values"),
    "facts differ between ranks": _fault(FactsOfTheRank, "one rank"),
    "one pass leaves out a row": _fault(LeavesOutARow, "expected each of 20 once"),
    "fillers have targets": _fault(FillersLearn, "a filler has targets"),
    "fillers stand first": _fault(FillersFirst, ""),
    "rows depend on the rank": _fault(RowsOfTheRank, ""),
    "forgets its place in one pass": _fault(ForgetsItsPlaceInThePass, "two ranks resume after 2 packs: pack 0"),
    "cuts in silence": _fault(CutsInSilence, "the facts do not count them"),
    "reports cut documents once": _fault(SaysOnceWhatItCuts, "at the second start no line"),
    "forgets its epoch": _fault(ForgetsItsEpoch, ""),
    "order depends on a hash": _fault(OrdersByHash, ""),
    "gives out its live state": _fault(GivesOutItsLiveState, ""),
    "tokens are int32": _fault(NarrowTokens, ""),
    "epochs have no samples": _fault(EmptyEpochs, "give a whole number above 0"),
}
