"""Strategy ``context_parallel``.

Each rank of ``cp`` has two chunks of every sample's positions (:class:`~d9d_engine.distributed.positions`), and all but
attention looks at one position at a time. Where a module looks at more, such as a router with a loss on the balance of
samples, it has the trait :class:`~d9d_core.extend.SeesContext`. Parameters are whole on all ranks, and the gradient on
each is a partial sum: ``fsdp`` and its kind reduce it over ``cp``, too, and what they leave out the loop sums.
"""

from __future__ import annotations

from d9d_core.extend import (
    Applied,
    BuildError,
    ContextParallelizable,
    SeesContext,
    SharesAttention,
    SplitsContext,
    Topology,
    modules_with,
)
from torch import nn

from d9d_parallel.context_parallel.config import ContextParallelConfig
from d9d_parallel.context_parallel.forwards import ExchangedHeads, GatheredKeys, check_heads
from d9d_parallel.context_parallel.ring import RingAttention
from d9d_parallel.context_parallel.share import ContextPositions
from d9d_parallel.ranks import Ranks


class ContextParallel:
    """Strategy that lets each rank of ``cp`` compute its own positions of each sample."""

    def __init__(self, config: ContextParallelConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Replace the forwards of attention cores, in place. Collective over all ranks.

        Raises:
            BuildError: the stage or a core cannot be split, or ranks cannot share the heads.
        """
        group = topology.axes_group("cp")
        assert group is not None  # there is a mesh
        ranks = Ranks(group)
        share = ContextPositions(ranks)
        if not isinstance(stage, SplitsContext):
            raise BuildError(
                f"strategy '{self._config.name}' splits positions, but {type(stage).__name__} lacks split_context(); "
                "see d9d_core.extend.SplitsContext"
            )
        stage.split_context(share)
        changed = [""]
        for name, owner in modules_with(stage, ContextParallelizable).items():
            assert isinstance(owner, ContextParallelizable)
            for core_name, core in owner.attention_cores().items():
                whole = f"{name}.{core_name}" if name else core_name
                self._core(whole, core, share, ranks, topology.sizes["tp"])
                changed.append(whole)
        for name, module in modules_with(stage, SeesContext).items():
            assert isinstance(module, SeesContext)
            module.see_context(share)
            changed.append(name)
        return Applied(modules=tuple(changed))

    def _core(self, name: str, core: nn.Module, share: ContextPositions, ranks: Ranks, tp: int) -> None:
        if self._config.method == "ulysses":
            if isinstance(core, SharesAttention):
                query_heads, key_value_heads = (max(1, heads // tp) for heads in core.attention_heads())
                check_heads(query_heads, key_value_heads, ranks.size)
            _replace(core, ExchangedHeads(core, ranks))
            return
        if not isinstance(core, SharesAttention):
            raise BuildError(
                f"strategy '{self._config.name}': the attention core '{name}' computes whole samples only; use method "
                "ulysses, or see d9d_core.extend.SharesAttention"
            )
        if self._config.method == "ring":
            core.attend_by(RingAttention(ranks))
            return
        core.see_queries(share)
        _replace(core, GatheredKeys(core, share))


def _replace(core: nn.Module, forward: ExchangedHeads | GatheredKeys) -> None:
    core.forward = forward
