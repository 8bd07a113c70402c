"""Data parallelism by FSDP2 (Zhao et al., PyTorch FSDP; torch.distributed.fsdp.fully_shard).

One unit per block and one for the rest of the stage; experts sharded by expert parallelism are separate units, over the
ranks that hold the same experts. Gradients are summed, never averaged, because the loss is divided by its global weight
before the backward. If ``replicate`` needs FSDP2, it is ``hsdp`` with shards only over ``cp``, so FSDP2 owns the data
axes of all parameters that it wraps.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce

import torch
from d9d_core.errors import BuildError
from d9d_core.strategy import Applied, GradientOwner, no_collectives
from d9d_core.tensors import local
from d9d_core.topology import Topology
from d9d_engine.compat import prepare_fsdp_gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from d9d_parallel.blocks import blocks_of
from d9d_parallel.data_parallel.communication import FsdpCommunication, Unit
from d9d_parallel.data_parallel.config import DataParallelConfig, FsdpConfig, HsdpConfig, ReplicateConfig
from d9d_parallel.data_parallel.direct_gather import DirectGather, gather_directly
from d9d_parallel.data_parallel.direct_reduce import reduce_directly
from d9d_parallel.data_parallel.experts import REPLICAS, SHARDS, VIEW, ShardDimension, find_banks, is_spread
from d9d_parallel.data_parallel.reducer import FsdpReducer


@dataclass(frozen=True)
class _Dims:
    """Dimensions of FSDP2's mesh, and the mesh axes that gradients are therefore summed over.

    Attributes:
        dense, experts: dimensions of the two views, outermost first.
        axes: mesh axes covered by the dense dimensions.
    """

    dense: tuple[str, ...]
    experts: tuple[str, ...]
    axes: tuple[str, ...]


_SHARDED = _Dims(("fsdp",), (SHARDS,), ("dp_shard", "cp"))
_REPLICATED = _Dims(("dp_replicate", "fsdp"), (REPLICAS, SHARDS), ("dp_replicate", "dp_shard", "cp"))


class Replicate:
    """Strategy of data parallelism with the whole model on every rank of ``dp_replicate``; gradients are all-reduced.

    FSDP2 is used only for settings that need it: compute formats, offload, shards over ``cp``, and pipeline stages
    whose gradients are due at different times. Otherwise the stage stays unchanged, and gradients are reduced in place,
    in buckets during the last backward of a step, without copies of parameters and with copies of only few gradients.
    """

    def __init__(self, config: ReplicateConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Wrap the stage with FSDP2 if needed, or leave it unchanged. Collective over all ranks."""
        alone = all(topology.sizes[axis] == 1 for axis in ("pp", "dp_shard", "cp"))
        if alone and self._config.needs_no_units and not _is_wrapped(stage):
            owners = (GradientOwner(name, "dp_replicate", "sync") for name, _ in stage.named_parameters())
            return Applied(modules=("",), gradients=tuple(owners), collectives=no_collectives)
        # FSDP2 copies parameters for the forward even if there is nothing to gather; one copy per step is enough.
        return wrap(stage, topology, _REPLICATED, self._config, reshard_after_forward=False)


class Fsdp:
    """Strategy that shards parameters, gradients and optimizer state over ``dp_shard`` (and ``cp``)."""

    def __init__(self, config: FsdpConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Wrap the stage with FSDP2, sharded over ``dp_shard`` and ``cp``. Collective over all ranks."""
        return wrap(stage, topology, _SHARDED, self._config, self._config.reshard_after_forward)


class Hsdp:
    """Strategy that shards over ``dp_shard`` (and ``cp``), with replicas of the shards over ``dp_replicate``."""

    def __init__(self, config: HsdpConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Wrap the stage with FSDP2, sharded and replicated. Collective over all ranks."""
        return wrap(stage, topology, _REPLICATED, self._config, self._config.reshard_after_forward)


def wrap(
    stage: nn.Module,
    topology: Topology,
    dims: _Dims,
    config: ReplicateConfig | FsdpConfig | HsdpConfig,
    reshard_after_forward: bool | int,
) -> Applied:
    """Make every block of the stage, and the rest of the stage, a unit of FSDP2. In place. Collective over all ranks.

    A stage without blocks is one unit, whose parameters are all gathered at once.

    Args:
        stage: stage on the meta device.
        topology: topology with the meshes.
        dims: one dimension to shard over, or two: replicas, then shards.
        config: config of the strategy.
        reshard_after_forward: argument of FSDP2; the root keeps its parameters, which the backward needs first.

    Raises:
        BuildError: the group size does not divide, units share a parameter, or another data-parallel strategy was
            applied already.
    """
    if _is_wrapped(stage):
        raise BuildError(
            f"parallel: '{config.name}' follows another strategy of data parallelism; list only one of replicate, fsdp "
            "and hsdp"
        )
    mesh = topology.mesh("dense", *dims.dense)
    blocks, experts = blocks_of(stage), find_banks(stage)
    banks = {name: bank for name, bank in experts.items() if is_spread(bank)}
    _check_ties(stage, blocks, config.name)
    ignored, unmatched = _ignored(stage, config)
    _check_group(reshard_after_forward, mesh, config.name, spread=bool(banks))
    policy = MixedPrecisionPolicy(_dtype(config.compute_dtype), _reduce_dtype(stage, config))
    root_policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, _dtype(config.output_dtype))
    pinned = mesh.device_type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=pinned) if config.offload else OffloadPolicy()
    _check_formats(stage, experts, ignored, policy.param_dtype, config.name)
    skipped = {parameter for name, parameter in stage.named_parameters() if name in ignored}
    units_here = _units(stage, banks, blocks, ignored, dims, reshard_after_forward, config.backward_prefetch)
    for bank in banks.values():
        fully_shard(
            bank,
            mesh=topology.mesh(VIEW, *dims.experts),
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=ShardDimension(topology, config.name),
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=skipped,
        )
    for block in blocks.values():
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=skipped,
        )
    root = fully_shard(
        stage,
        mesh=mesh,
        reshard_after_forward=False,
        mp_policy=root_policy,
        offload_policy=offload,
        ignored_params=skipped,
    )
    units = [unit for unit in stage.modules() if isinstance(unit, FSDPModule)]
    for unit in units:
        # FSDP2 would average, and gloo has no scaled sum: so a divisor of one and plain sums.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    direct = gather_directly(stage)
    reduce_directly(direct)
    prepare_fsdp_gradients(stage)
    stage.register_forward_hook(partial(_reshard_without_backward, direct))
    # A direct gather begins when the host asks for it, so at least one block is prefetched.
    ahead = config.forward_prefetch or int(any(stage not in gather.group.modules for gather in direct))
    _prefetch([_units_of(block) for block in blocks.values()], ahead, config.backward_prefetch)
    spread = {f"{bank}.{name}" for bank, module in banks.items() for name, _ in module.named_parameters()}
    owners = (
        GradientOwner(name, axis, "fsdp")
        for name, parameter in stage.named_parameters()
        if name not in ignored
        for axis in (dims.experts if name in spread else dims.axes)
    )
    return Applied(
        modules=(*banks, *blocks, ""),
        gradients=tuple(owners),
        reducers=(FsdpReducer(root, config.defer),),
        compute_dtype=policy.param_dtype,
        on_host=frozenset(name for name, _ in stage.named_parameters() if config.offload and name not in ignored),
        unmatched=unmatched,
        collectives=FsdpCommunication(
            stage, topology, units_here, config.defer, policy.param_dtype, policy.reduce_dtype
        ),
    )


def _is_wrapped(stage: nn.Module) -> bool:
    """Whether a strategy has made units of FSDP2 in the stage."""
    return any(isinstance(module, FSDPModule) for module in stage.modules())


def _units(
    stage: nn.Module,
    banks: Mapping[str, nn.Module],
    blocks: Mapping[str, nn.Module],
    ignored: frozenset[str],
    dims: _Dims,
    reshard_after_forward: bool | int,
    prefetch: int,
) -> list[Unit]:
    """FSDP2 units with parameters that :func:`wrap` will make, in the order in which their forwards end.

    A parameter belongs to the innermost unit around it.
    """
    left = {name: local(parameter).shape for name, parameter in stage.named_parameters() if name not in ignored}
    inside = {block: [bank for bank in banks if bank.startswith(f"{block}.")] for block in blocks}
    units, first = [], next(iter(blocks), None)
    for name in (*(one for block in blocks for one in (*inside[block], block)), ""):
        own = {key: shape for key, shape in left.items() if not name or key.startswith(f"{name}.")}
        left = {key: shape for key, shape in left.items() if key not in own}
        view, over = (VIEW, dims.experts) if name in banks else ("dense", dims.dense)
        ahead = prefetch > 0 and name in blocks and name != first
        if own:
            reshards = reshard_after_forward if name else False
            units.append(Unit(name, own, view, over, reshards, prefetches=ahead, even=name in banks))
    return units


def _ignored(stage: nn.Module, config: DataParallelConfig) -> tuple[frozenset[str], dict[str, str]]:
    """Names of parameters that match ``ignore``, and an error message for each pattern that matches no parameter."""
    names = [name for name, _ in stage.named_parameters()]
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    unmatched = {
        pattern: f"the pattern {pattern!r} in 'ignore' matches no parameter; parameters: {shown}"
        for pattern in config.ignore
        if not fnmatch.filter(names, pattern)
    }
    return frozenset(name for name in names if any(fnmatch.fnmatchcase(name, p) for p in config.ignore)), unmatched


def _check_formats(
    stage: nn.Module,
    experts: Mapping[str, nn.Module],
    ignored: frozenset[str],
    compute: torch.dtype | None,
    strategy: str,
) -> None:
    """Raise an error if experts and their inputs have different dtypes; norms and routers cast their inputs."""
    names = [f"{bank}.{name}" for bank, module in experts.items() for name, _ in module.named_parameters()]
    for name in names:
        dtype = stage.get_parameter(name).dtype
        if compute is not None and name in ignored and dtype != compute:
            raise BuildError(
                f"strategy '{strategy}': 'ignore' keeps '{name}' in {dtype}, but its inputs are computed in "
                f"{compute}; remove the pattern or compute_dtype"
            )


def _check_group(reshard_after_forward: bool | int, mesh: DeviceMesh, strategy: str, *, spread: bool) -> None:
    shards = mesh.size(mesh.ndim - 1)
    if isinstance(reshard_after_forward, bool):
        return
    if spread:
        raise BuildError(
            f"strategy '{strategy}': reshard_after_forward {reshard_after_forward} is not possible with experts that "
            "are sharded over ranks; use true or false"
        )
    if shards % reshard_after_forward == 0:
        return
    raise BuildError(
        f"strategy '{strategy}': reshard_after_forward {reshard_after_forward} does not divide the {shards} ranks that "
        "share the parameters; use a divisor, true or false"
    )


def _check_ties(stage: nn.Module, blocks: Mapping[str, nn.Module], strategy: str) -> None:
    unit_of = {id(module): name for name, block in blocks.items() for module in block.modules()}
    seen: dict[int, tuple[str, str]] = {}
    for owner, module in stage.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(owner, recurse=False):
            unit = unit_of.get(id(module), "")
            other, where = seen.setdefault(id(parameter), (name, unit))
            if where != unit:
                raise BuildError(
                    f"strategy '{strategy}': '{other}' and '{name}' are one parameter, but blocks are gathered and "
                    "freed one by one; tie weights within one block or outside of blocks only"
                )


def _reshard_without_backward(
    gathers: Iterable[DirectGather], stage: nn.Module, _inputs: object, _outputs: object
) -> None:
    """Reshard parameters after a forward of an evaluation, because no backward follows that would reshard them."""
    if not torch.is_grad_enabled():
        for gather in gathers:
            gather.drop()
        for unit in stage.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def _units_of(block: nn.Module) -> list[FSDPModule]:
    """FSDP2 units of a block and of the experts in it, in the order of a forward."""
    return [unit for unit in block.modules() if isinstance(unit, FSDPModule)]


def _prefetch(blocks: list[list[FSDPModule]], forward: int, backward: int) -> None:
    if forward:
        for units, ahead in _windows(blocks, forward):
            units[0].set_modules_to_forward_prefetch(ahead)
    if backward:
        for units, ahead in _windows(blocks[::-1], backward):
            units[0].set_modules_to_backward_prefetch(ahead)


def _windows(blocks: list[list[FSDPModule]], depth: int) -> Iterable[tuple[list[FSDPModule], list[FSDPModule]]]:
    """Yield the units of each block except the last, and the units to prefetch with them: the block's experts first."""
    for index, units in enumerate(blocks[:-1]):
        following = blocks[index + 1 : index + 1 + depth]
        yield units, [*units[1:], *(unit for later in following for unit in later)]


def _reduce_dtype(stage: nn.Module, config: DataParallelConfig) -> torch.dtype | None:
    """Dtype of sums over ranks; ``None`` for the dtype in which gradients are accumulated."""
    compute = _dtype(config.compute_dtype)
    if config.reduce_dtype is not None or compute is None:
        return _dtype(config.reduce_dtype)
    stored = {parameter.dtype for parameter in stage.parameters() if parameter.requires_grad}
    wide = reduce(torch.promote_types, stored, compute)
    # Explicit, because torch 2.11 defaults to the compute format, and later releases to the parameters' format.
    return None if stored <= {compute} else wide


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
