"""Strategy ``context_parallel``.

Each rank of ``cp`` has two chunks of every sample's positions (:mod:`d9d_engine.distributed.positions`). All modules
except attention compute each position separately; a module that mixes positions in another way, such as a router with
a balancing loss per sample, has the trait :class:`~d9d_core.model.SeesContext`. Parameters are replicated, and each
rank's gradient is a partial sum: data-parallel strategies such as ``fsdp`` reduce it over ``cp`` too, and the training
loop sums the remaining gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from d9d_core.errors import BuildError
from d9d_core.model import GathersLatents, SeesContext, SharesAttention, SplitsContext
from d9d_core.strategy import Applied, CommunicatesInContext
from d9d_core.topology import Topology
from d9d_core.traits import ContextParallelizable, HasOps, modules_with
from torch import nn

from d9d_parallel.context_parallel.communication import ContextCommunication, Heads, Meeting
from d9d_parallel.context_parallel.config import ContextParallelConfig
from d9d_parallel.context_parallel.forwards import ExchangedHeads, GatheredKeys, check_heads
from d9d_parallel.context_parallel.ring import RingAttention
from d9d_parallel.context_parallel.share import ContextPositions
from d9d_parallel.ranks import Ranks


class ContextParallel:
    """Strategy of context parallelism: each rank of ``cp`` computes its own positions of each sample."""

    def __init__(self, config: ContextParallelConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Replace the forwards of attention cores, in place. Collective over all ranks.

        Raises:
            BuildError: the stage or a core cannot be split, or the heads cannot be divided over the ranks.
        """
        group = topology.axes_group("cp")
        assert group is not None  # a topology with a mesh has this group
        share = ContextPositions(Ranks(group))
        if not isinstance(stage, SplitsContext):
            raise BuildError(
                f"strategy '{self._config.name}' splits positions, but {type(stage).__name__} lacks split_context(); "
                "see d9d_core.model.SplitsContext"
            )
        stage.split_context(share)
        changed, meeting = [""], self._meeting(topology, share)
        communication, notes = ContextCommunication(stage, share.all_ranks, meeting), []
        for name, owner in modules_with(stage, ContextParallelizable).items():
            assert isinstance(owner, ContextParallelizable)
            for core_name, core in owner.attention_cores().items():
                whole = f"{name}.{core_name}" if name else core_name
                communication.cores[whole] = self._core(whole, core, meeting)
                changed.append(whole)
                if meeting.ring is not None and not (isinstance(core, HasOps) and core.op_slots()):
                    notes.append(f"{whole}: declares no slot of attention_block, so it is computed in plain PyTorch")
        for name, module in modules_with(stage, SeesContext).items():
            assert isinstance(module, SeesContext)
            module.see_context(share)
            changed.append(name)
            if isinstance(module, CommunicatesInContext):
                communication.alone[name] = module
            else:
                kind = type(module).__name__
                notes.append(f"{name} ({kind}) does not declare its communication: context_collectives()")
        if len(changed) == 1:
            raise BuildError(
                f"strategy '{self._config.name}' splits positions, but no module of {type(stage).__name__} names an "
                "attention core; return the modules in which positions meet from attention_cores(), see "
                "d9d_core.traits.ContextParallelizable"
            )
        return Applied(
            modules=tuple(changed),
            notes=tuple(notes),
            collectives=communication,
        )

    def _meeting(self, topology: Topology, share: ContextPositions) -> Meeting:
        """Process groups of the exchanges in attention, by method. Collective over all ranks."""
        method, inner, tp = self._config.method, self._config.head_ranks, topology.sizes["tp"]
        if method == "ulysses":
            return Meeting(tp, heads=share.all_ranks)
        if method == "ring":
            return Meeting(tp, ring=share.all_ranks)
        if inner is None:
            return Meeting(tp, keys=share)
        if share.ranks % inner or inner == share.ranks:
            raise BuildError(
                f"strategy '{self._config.name}': head_ranks is {inner}, but mesh.cp is {share.ranks}; choose a "
                "smaller divisor, or method ulysses, where all ranks swap heads"
            )
        neighbours = [range(first, first + inner) for first in range(0, share.ranks, inner)]
        rings = [range(first, share.ranks, inner) for first in range(inner)]
        heads, ring = (_ranks(topology, positions) for positions in (neighbours, rings))
        return Meeting(tp, heads=heads, ring=ring)

    def _core(self, name: str, core: nn.Module, meeting: Meeting) -> Heads | None:
        """Split the attention of a core over the ranks; return the core's heads on this rank, if it declares them."""
        heads = None
        if isinstance(core, SharesAttention):
            query_heads, key_value_heads = (max(1, count // meeting.tp) for count in core.attention_heads())
            latent = core.latent_features() if isinstance(core, GathersLatents) else None
            heads = Heads(query_heads, key_value_heads, core.head_features(), latent)
            if meeting.heads is not None:
                check_heads(query_heads, key_value_heads, meeting.heads.size)
            if meeting.ring is not None:
                core.attend_by(RingAttention(meeting.ring))
            elif meeting.keys is not None:
                core.see_queries(meeting.keys)
        elif meeting.ring is not None or meeting.keys is not None:
            raise BuildError(
                f"strategy '{self._config.name}': the attention core '{name}' computes whole samples only; use method "
                "ulysses, or see d9d_core.model.SharesAttention"
            )
        if meeting.heads is not None:
            _replace(core, ExchangedHeads(core, meeting.heads))
        if meeting.keys is not None:
            if isinstance(core, GathersLatents):
                core.gather_by(meeting.keys)
            else:
                _replace(core, GatheredKeys(core, meeting.keys))
        return heads


def _ranks(topology: Topology, parts: Sequence[Sequence[int]]) -> Ranks:
    """Ranks of this rank's process group within ``cp``. Collective over all ranks: all ranks create all groups."""
    own, mine = topology.coordinate["cp"], None
    for part in parts:
        group = topology.positions_group("cp", part)
        mine = group if own in part else mine
    assert mine is not None  # the parts cover the whole axis
    return Ranks(mine)


def _replace(core: nn.Module, forward: ExchangedHeads | GatheredKeys) -> None:
    # A bound method: Dynamo guards on the identity of other callables, and would recompile for every block.
    core.forward = forward.__call__
