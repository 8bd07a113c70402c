"""Data parallelism by FSDP2 (Zhao et al., PyTorch FSDP; torch.distributed.fsdp.fully_shard).

Each block is one FSDP2 unit (parameters gathered together), and the rest of the stage is another; experts sharded by
expert parallelism are separate units, over the ranks that hold the same experts. Gradients are summed, never averaged,
because the loss is divided by its global weight before the backward. If ``replicate`` needs FSDP2, it becomes ``hsdp``
with shards only over ``cp``, so that FSDP2 reduces over all data axes of the parameters that it wraps.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial, reduce

import torch
from d9d_core.errors import BuildError
from d9d_core.strategy import (
    Applied,
    GradientOwner,
    is_inside,
    matched_modules,
    no_collectives,
    unmatched_patterns,
)
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
    """Dimensions of FSDP2's mesh, and the mesh axes over which FSDP2 therefore sums gradients.

    Attributes:
        dense, experts: dimensions of the mesh views for ordinary parameters and for experts, outermost first.
        axes: mesh axes covered by the dense dimensions.
    """

    dense: tuple[str, ...]
    experts: tuple[str, ...]
    axes: tuple[str, ...]


#: Name of the stage's attribute that keeps the units of all data-parallel entries of the job.
_ENTRIES = "data_parallel_entries"
_SHARDED = _Dims(("fsdp",), (SHARDS,), ("dp_shard", "cp"))
_REPLICATED = _Dims(("dp_replicate", "fsdp"), (REPLICAS, SHARDS), ("dp_replicate", "dp_shard", "cp"))


class Replicate:
    """Strategy of data parallelism with the whole model on every rank of ``dp_replicate``; gradients are all-reduced.

    FSDP2 is used only for settings that need it: compute formats, offload, shards over ``cp``, and pipelines, where the
    stages of a rank have their gradients ready at different times. Otherwise the stage stays unchanged, and gradients
    are reduced in place, in buckets during the last backward of a step, without copies of parameters and with copies of
    only few gradients.

    With ``match``, the matched modules are whole on every rank of all data axes, and FSDP2 is used only for formats and
    offload, which need a mesh without ``dp_shard``.
    """

    def __init__(self, config: ReplicateConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Wrap the stage or its matched modules with FSDP2 if needed. Collective over all ranks.

        Raises:
            BuildError: settings of matched modules need FSDP2, but the mesh has ``dp_shard``.
        """
        config, sizes = self._config, topology.sizes
        alone = all(sizes[axis] == 1 for axis in ("pp", "dp_shard", "cp")) and not _is_wrapped(stage)
        if config.needs_no_units and (alone or config.match):
            parts = matched_modules(stage, config.match)
            owners = (
                GradientOwner(name, axis, "sync")
                for name, _ in stage.named_parameters()
                if is_inside(name, parts)
                for axis in ("dp_replicate", "dp_shard", "cp")
            )
            return Applied(
                modules=tuple(parts),
                gradients=tuple(owners),
                unmatched=unmatched_patterns(stage, config.match, config.name),
                collectives=no_collectives,
            )
        if config.match and sizes["dp_shard"] > 1:
            raise BuildError(
                f"strategy '{config.name}' with 'match' supports only the further field 'defer' if mesh.dp_shard is "
                "more than 1; remove the other fields, or use precision.autocast for a compute format"
            )
        # FSDP2 copies parameters for the forward even if there is nothing to gather; one copy per step is enough.
        return wrap(stage, topology, _REPLICATED, config, reshard_after_forward=False)


class Fsdp:
    """Strategy that shards parameters, gradients and optimizer state over ``dp_shard`` (and ``cp``)."""

    def __init__(self, config: FsdpConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Wrap the stage or its matched modules, sharded over ``dp_shard`` and ``cp``. Collective over all ranks."""
        return wrap(stage, topology, _SHARDED, self._config, self._config.reshard_after_forward)


class Hsdp:
    """Strategy that shards over ``dp_shard`` (and ``cp``), with replicas of the shards over ``dp_replicate``."""

    def __init__(self, config: HsdpConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Wrap the stage or its matched modules, sharded and replicated. Collective over all ranks."""
        return wrap(stage, topology, _REPLICATED, self._config, self._config.reshard_after_forward)


def wrap(
    stage: nn.Module,
    topology: Topology,
    dims: _Dims,
    config: ReplicateConfig | FsdpConfig | HsdpConfig,
    reshard_after_forward: bool | int,
) -> Applied:
    """Make every block of the stage, and the rest of the stage, a unit of FSDP2. In place. Collective over all ranks.

    A stage without blocks is one unit, whose parameters are all gathered at once. With ``match``, the units are the
    blocks in matched modules, and the rest of each matched module; the stage is a unit without parameters, so that all
    units share FSDP2's streams and prefetch each other.

    Args:
        stage: stage on the meta device.
        topology: topology with the meshes.
        dims: one dimension to shard over, or two: replicas, then shards.
        config: config of the strategy.
        reshard_after_forward: argument of FSDP2 for blocks. Units outside of blocks keep their gathered parameters,
            because the backward needs them first, and other modules may read them, such as a tied embedding.

    Raises:
        BuildError: ``reshard_after_forward`` is a number that does not divide the number of shards, or a number
            although experts are sharded; units share a parameter; ``ignore`` keeps weights of experts in another dtype
            than ``compute_dtype``; or a module is in a unit of a data-parallel strategy already.
    """
    mesh = topology.mesh("dense", *dims.dense)  # before the return below: all ranks must create the mesh's groups
    parts = matched_modules(stage, config.match)
    whole = not config.match
    unmatched = unmatched_patterns(stage, config.match, config.name)
    if not parts:  # another stage of the pipeline has the modules
        return Applied(modules=(), unmatched=unmatched, collectives=no_collectives)
    _check_apart(stage, parts, config.name)
    blocks = {name: block for name, block in blocks_of(stage).items() if is_inside(name, parts)}
    experts = {name: bank for name, bank in find_banks(stage).items() if is_inside(name, parts)}
    banks = {name: bank for name, bank in experts.items() if is_spread(bank)}
    _check_group(reshard_after_forward, mesh, config.name, spread=bool(banks))
    ignored, unmatched_names = _ignored(stage, config)
    others = ignored | {name for name, _ in stage.named_parameters() if not is_inside(name, parts)}
    skipped = {parameter for name, parameter in stage.named_parameters() if name in others}
    rest = _rest(parts, {**banks, **blocks}, ignored)
    inside = {name: module for name, module in rest.items() if not whole and is_inside(name, blocks_of(stage))}
    outside = {name: module for name, module in rest.items() if name not in inside}
    _check_ties(stage, {**blocks, **rest}, config.name)
    policy = MixedPrecisionPolicy(_dtype(config.compute_dtype), _reduce_dtype(stage, parts, config))
    root_policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, _dtype(config.output_dtype))
    pinned = mesh.device_type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=pinned) if config.offload else OffloadPolicy()
    _check_formats(stage, experts, ignored, policy.param_dtype, config.name)
    chain = _in_order(stage, {**blocks, **inside})  # units whose parameters are gathered one after the other
    units_here = _units(stage, banks, chain, outside, others, dims, reshard_after_forward, config.backward_prefetch)
    before = {id(module) for module in stage.modules() if isinstance(module, FSDPModule)}
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
    for name, module in (*chain.items(), *outside.items()):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward if name in chain else False,
            mp_policy=policy if whole and name in chain else root_policy,
            offload_policy=offload,
            ignored_params=skipped,
        )
    if not isinstance(stage, FSDPModule):
        fully_shard(stage, mesh=mesh, reshard_after_forward=False, ignored_params=set(stage.parameters()))
    units = [unit for unit in stage.modules() if isinstance(unit, FSDPModule) and id(unit) not in before]
    for unit in units:
        # By default FSDP2 averages; with a divisor, it would use a scaled sum, which gloo lacks. So force plain sums.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    direct = gather_directly(units)
    reduce_directly(direct)
    for unit in units:
        assert isinstance(unit, nn.Module)
        prepare_fsdp_gradients(unit, recurse=False)
    stage.register_forward_hook(partial(_reshard_without_backward, direct))
    # A direct gather begins when the host asks for it, so at least one block is prefetched.
    gathered = {module for gather in direct for module in gather.group.modules} - set(outside.values())
    ahead = config.forward_prefetch or int(bool(gathered))
    _prefetch([_units_of(module) for module in chain.values()], ahead, config.backward_prefetch)
    spread = {f"{bank}.{name}" for bank, module in banks.items() for name, _ in module.named_parameters()}
    owners = (
        GradientOwner(name, axis, "fsdp")
        for name, _ in stage.named_parameters()
        if name not in others
        for axis in (dims.experts if name in spread else dims.axes)
    )
    is_first = _ENTRIES not in vars(stage)
    entries = _Entries.of(stage)
    entries.add(stage, units_here)
    entries.reducer.add(units, config.defer)
    return Applied(
        modules=(*banks, *chain, *outside),
        gradients=tuple(owners),
        reducers=(entries.reducer,) if is_first else (),
        compute_dtype=policy.param_dtype,
        on_host=frozenset(name for name, _ in stage.named_parameters() if config.offload and name not in others),
        unmatched=unmatched | unmatched_names,
        collectives=FsdpCommunication(
            stage, topology, units_here, config.defer, policy.param_dtype, policy.reduce_dtype, entries.units
        ),
    )


def _is_wrapped(stage: nn.Module) -> bool:
    """Whether a strategy has made units of FSDP2 in the stage."""
    return any(isinstance(module, FSDPModule) for module in stage.modules())


def _check_apart(stage: nn.Module, parts: Mapping[str, nn.Module], strategy: str) -> None:
    """Raise an error if a module that is to be wrapped belongs to a unit already."""
    for name, part in parts.items():
        around = [name[: place.start()] for place in re.finditer(r"\.", name)]
        if _is_wrapped(part) or any(isinstance(stage.get_submodule(outer), FSDPModule) for outer in around):
            raise BuildError(
                f"parallel: '{strategy}' acts on {name or 'the whole model'}, on which another strategy of data "
                "parallelism acts already; list one of replicate, fsdp and hsdp, or give each entry its modules by "
                "'match'"
            )


def _rest(
    parts: Mapping[str, nn.Module], inner: Mapping[str, nn.Module], ignored: frozenset[str]
) -> dict[str, nn.Module]:
    """Modules to wrap for the parameters of ``parts`` that belong to no inner unit, by name.

    FSDP2 cannot wrap a container that is never called, such as ``ModuleDict``; its children are wrapped instead.
    """
    found: dict[str, nn.Module] = {}
    for name, part in parts.items():
        left = [
            own
            for own, _ in part.named_parameters(name)
            if own.removeprefix(".") not in ignored and not is_inside(own.removeprefix("."), inner)
        ]
        if name and isinstance(part, nn.ModuleDict | nn.ModuleList):
            found |= _rest({f"{name}.{child}": module for child, module in part.named_children()}, inner, ignored)
        elif left or not name:
            found[name] = part
    return {name: module for name, module in found.items() if name not in inner}


def _in_order(stage: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Modules in the order of registration, in which a stage runs its blocks."""
    return {name: module for name, module in stage.named_modules() if name in modules}


@dataclass
class _Entries:
    """Units of all data-parallel entries of a job in one stage: FSDP2 prefetches and reduces them together.

    Attributes:
        reducer: reducer of all units.
        units: units in the order in which their forwards end.
    """

    reducer: FsdpReducer
    units: list[Unit]

    @classmethod
    def of(cls, stage: nn.Module) -> _Entries:
        """Units of the entries that were applied to a stage, kept as an attribute of the stage."""
        assert isinstance(stage, FSDPModule)
        known: _Entries = vars(stage).setdefault(_ENTRIES, cls(FsdpReducer(stage), []))
        return known

    def add(self, stage: nn.Module, units: Sequence[Unit]) -> None:
        """Add the units of an entry."""
        ends = list(_ends(stage))
        self.units[:] = sorted([*self.units, *units], key=lambda unit: ends.index(unit.name))


def _ends(module: nn.Module, name: str = "") -> Iterator[str]:
    """Names of a module and all modules inside it, in the order in which their forwards end."""
    for child, inner in module.named_children():
        yield from _ends(inner, f"{name}.{child}" if name else child)
    yield name


def _units(
    stage: nn.Module,
    banks: Mapping[str, nn.Module],
    chain: Mapping[str, nn.Module],
    outside: Mapping[str, nn.Module],
    others: Set[str],
    dims: _Dims,
    reshard_after_forward: bool | int,
    prefetch: int,
) -> list[Unit]:
    """Describe the FSDP2 units with parameters that :func:`wrap` will make, in the order in which their forwards end.

    A parameter belongs to the innermost unit around it.
    """
    left = {name: local(parameter).shape for name, parameter in stage.named_parameters() if name not in others}
    units, first = [], next(iter(chain), None)
    for name in _ends(stage):
        if name not in {**banks, **chain, **outside}:
            continue
        own = {key: shape for key, shape in left.items() if is_inside(key, [name])}
        left = {key: shape for key, shape in left.items() if key not in own}
        view, over = (VIEW, dims.experts) if name in banks else ("dense", dims.dense)
        ahead = prefetch > 0 and name in chain and name != first
        if own:
            reshards = False if name in outside else reshard_after_forward
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


def _check_ties(stage: nn.Module, units: Mapping[str, nn.Module], strategy: str) -> None:
    # Inner units come last, so that each module is mapped to the innermost unit around it.
    unit_of = {id(module): name for name in sorted(units) for module in units[name].modules()}
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
    """Yield the units of each block except the last, and the units to prefetch: its experts, then ``depth`` blocks."""
    for index, units in enumerate(blocks[:-1]):
        following = blocks[index + 1 : index + 1 + depth]
        yield units, [*units[1:], *(unit for later in following for unit in later)]


def _reduce_dtype(stage: nn.Module, parts: Mapping[str, nn.Module], config: DataParallelConfig) -> torch.dtype | None:
    """Dtype of sums over ranks; ``None`` for the dtype in which gradients are accumulated."""
    compute = _dtype(config.compute_dtype)
    if config.reduce_dtype is not None or compute is None:
        return _dtype(config.reduce_dtype)
    owned = (parameter for name, parameter in stage.named_parameters() if is_inside(name, parts))
    stored = {parameter.dtype for parameter in owned if parameter.requires_grad}
    wide = reduce(torch.promote_types, stored, compute)
    # Explicit, because torch 2.11 defaults to the compute format, and later releases to the parameters' format.
    return None if stored <= {compute} else wide


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
