"""Expert parallelism (Lepikhin et al. 2020, "GShard", section 3.2).

``ep`` is laid over data-parallel ranks, which see different tokens: each rank of a group of ``ep`` keeps
``experts / ep`` neighbouring experts of every layer, and tokens travel between the ranks of the group. All other
parameters, the router's among them, follow the job's data-parallel strategy. Ranks that hold the same experts
(``expert_replicate`` x ``expert_fsdp``) share them as that strategy says.
"""

from __future__ import annotations

import torch
from d9d_core.errors import BuildError
from d9d_core.protocols import Applied, GradientOwner
from d9d_core.topology.mesh import Topology
from d9d_core.traits import HasExperts, modules_with
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from d9d_moe.all_to_all import AllToAllDispatcher
from d9d_moe.expert_parallel.config import ExpertParallelConfig
from d9d_moe.expert_parallel.local_banks import compute_with_local_banks

#: The view of the mesh that experts are spread over.
VIEW = "expert"


class ExpertParallel:
    """Spreads the experts of every layer over ``ep``, and sends tokens to them by all-to-all."""

    def __init__(self, config: ExpertParallelConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Turn banks into DTensors and replace dispatchers. Collective over all ranks.

        Raises:
            BuildError: no module has experts, or ``ep`` does not divide their number.
        """
        layers = modules_with(stage, HasExperts)
        if not layers:
            raise BuildError(
                f"strategy '{self._config.name}' found no experts in {type(stage).__name__}; implement "
                "d9d_core.traits.HasExperts in the model, or remove the strategy from 'parallel'"
            )
        mesh, group = topology.mesh(VIEW, "ep"), topology.group(VIEW, "ep")
        assert group is not None  # there is a mesh
        changed: list[str] = []
        for name, layer in layers.items():
            for bank_name, bank in layer.expert_banks().items():
                where = f"{name}.{bank_name}".removeprefix(".")
                experts = spread_bank(bank, mesh, where)
                changed.append(where)
            layer.dispatcher = AllToAllDispatcher(group, experts)
        claims, views = [], {}
        for bank_name in changed:
            for parameter, _ in stage.get_submodule(bank_name).named_parameters(bank_name):
                claims.append(GradientOwner(parameter, "ep", "none"))  # tokens of all its ranks come to the experts
                views[parameter] = VIEW
        return Applied(modules=(*layers, *changed), gradients=tuple(claims), views=views)


def spread_bank(bank: nn.Module, mesh: DeviceMesh, name: str) -> int:
    """Split every parameter of a bank by expert, on the meta device and in place.

    Args:
        bank: all of its parameters have one slice per expert in dimension 0.
        mesh: ``ep``.
        name: of the bank, for errors.

    Returns:
        The number of experts on all ranks.

    Raises:
        BuildError: the mesh does not divide the number of experts, or parameters disagree about it.
    """
    sizes = {len(parameter) for parameter in bank.parameters()}
    if len(sizes) != 1:
        raise BuildError(f"'{name}' has parameters of {sorted(sizes)} experts; dimension 0 of each must be the expert")
    (experts,) = sizes
    ranks = mesh.size()
    if experts % ranks:
        raise BuildError(f"mesh.ep is {ranks}, which does not divide the {experts} experts of '{name}'")
    for module in bank.modules():
        owned = dict(module.named_parameters(recurse=False))
        for parameter_name, parameter in owned.items():
            local = torch.empty_like(parameter[: experts // ranks])
            part = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            module.register_parameter(parameter_name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        if owned:
            compute_with_local_banks(module)
    return experts
