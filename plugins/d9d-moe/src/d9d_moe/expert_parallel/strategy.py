"""Strategy ``expert_parallel`` (Lepikhin et al. 2020, "GShard", section 3.2).

``ep`` reuses the ranks of ``tp``, ``cp`` and data parallelism, which hold different tokens: each rank of a group of
``ep`` keeps ``experts / ep`` consecutive experts of every layer, and tokens are sent between the ranks of the group.
All other parameters, including the router's, are laid out as in a dense model. Ranks with the same experts
(``expert_replicate`` x ``expert_fsdp``) replicate or shard them according to the job's data-parallel strategy.
"""

from __future__ import annotations

import torch
from d9d_core.errors import BuildError
from d9d_core.strategy import Applied, GradientOwner, is_inside, matched_modules, unmatched_patterns
from d9d_core.topology import Topology
from d9d_core.traits import Dispatcher, HasExperts, modules_with
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from d9d_moe.all_to_all.dispatcher import AllToAllDispatcher
from d9d_moe.all_to_all.separate import SeparateDispatcher
from d9d_moe.expert_parallel.communication import ExpertCommunication
from d9d_moe.expert_parallel.config import ExpertParallelConfig
from d9d_moe.expert_parallel.dispatchers import experts_of, replace_dispatchers
from d9d_moe.expert_parallel.local_banks import compute_with_local_banks

#: Name of the view of the device mesh that has the axis ``ep``, over which experts are sharded.
VIEW = "expert"


class ExpertParallel:
    """Strategy of expert parallelism: shards the experts of every layer over ``ep``; tokens are sent by all-to-all.

    Args:
        config: config of the strategy.
    """

    def __init__(self, config: ExpertParallelConfig) -> None:
        self.config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Turn expert weights into DTensors and replace dispatchers. Collective over all ranks.

        Raises:
            BuildError: ``ep`` does not divide the number of experts, the matched modules have no experts, or the
                parameters of a layer have different numbers of experts.
        """
        mesh, group = topology.mesh(VIEW, "ep"), topology.group(VIEW, "ep")
        assert group is not None  # a topology with a mesh has this group
        banks: dict[str, nn.Module] = {}
        parts = matched_modules(stage, self.config.match)
        found = {name: layer for name, layer in modules_with(stage, HasExperts).items() if is_inside(name, parts)}
        if not found and topology.sizes["pp"] == 1:  # with a pipeline, single stages may have no experts
            where = "module in 'match'" if self.config.match else "layer of the model"
            raise BuildError(
                f"strategy '{self.config.name}': no {where} has experts to shard; remove the strategy from 'parallel'"
            )
        experts = {name: experts_of(layer) for name, layer in found.items()}
        for name, layer in found.items():
            banks |= {f"{name}.{bank}".removeprefix("."): module for bank, module in layer.expert_banks().items()}
        for name, bank in banks.items():
            spread_bank(bank, mesh, name)

        def dispatcher(experts: int) -> Dispatcher:
            summed = AllToAllDispatcher(group, experts)
            return summed if self.config.combine == "summed" else SeparateDispatcher(summed)

        layers = replace_dispatchers(stage, dispatcher, found)
        parameters = [own for name, bank in banks.items() for own, _ in bank.named_parameters(name)]
        return Applied(
            modules=(*layers, *banks),
            # No reduction over ep: the tokens of all its ranks were sent to the experts.
            gradients=tuple(GradientOwner(parameter, "ep", "none") for parameter in parameters),
            views=dict.fromkeys(parameters, VIEW),
            unmatched=unmatched_patterns(stage, self.config.match, self.config.name),
            outside_graph=layers,
            collectives=ExpertCommunication(
                {name: (layer, layer.dispatcher) for name, layer in found.items()},
                experts,
                topology.grid(VIEW).group(topology.rank, ["ep"]),
                topology.sizes["tp"],
            ),
        )


def spread_bank(bank: nn.Module, mesh: DeviceMesh, name: str) -> None:
    """Shard every parameter of a module of expert weights over ``ep``, on the meta device and in place.

    Args:
        bank: module whose parameters all have the expert as dimension 0.
        mesh: mesh of ``ep``.
        name: name of the module, for error messages.

    Raises:
        BuildError: the mesh does not divide the number of experts.
    """
    for module in bank.modules():
        owned = dict(module.named_parameters(recurse=False))
        for parameter_name, parameter in owned.items():
            if len(parameter) % mesh.size():
                raise BuildError(
                    f"mesh.ep is {mesh.size()}, which does not divide the {len(parameter)} experts of '{name}'; "
                    "choose a divisor"
                )
            local = torch.empty_like(parameter[: len(parameter) // mesh.size()])
            part = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            module.register_parameter(parameter_name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        if owned:
            compute_with_local_banks(module)
