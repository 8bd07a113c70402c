"""Plugin declaration of the strategy ``deepep``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import Ref, StrategySpec, hookimpl

D9D_API = 2


@hookimpl
def d9d_strategies() -> Iterator[StrategySpec]:
    """Declare the strategy ``deepep``, which dispatches tokens by DeepEP's kernels for NVLink and RDMA."""
    yield StrategySpec(
        name="deepep",
        summary="Dispatches tokens by the library DeepEP: CUDA, bfloat16, NVLink within a node, RDMA between nodes.",
        config=Ref("d9d_deepep.config:DeepEPConfig"),
        build=Ref("d9d_deepep.strategy:DeepEP"),
        requires=frozenset({"strategy:expert_parallel", "model:experts", "device:cuda", "import:deep_ep"}),
        anchor="expert",
        position="after",
        axes=frozenset({"ep"}),
    )
