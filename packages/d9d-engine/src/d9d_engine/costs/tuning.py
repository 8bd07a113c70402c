"""Costs of models with a fine-tuning method, which freezes weights and adds parameters. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from d9d_core.config import PluginConfig
from d9d_core.cost import AdapterCost, AdapterCosts, BlockCost, OpCost, Share, StageCost
from d9d_core.errors import JobError
from d9d_core.plugin import PeftSpec
from d9d_core.registry.registry import Registry

_PRODUCTS = ("product", "grouped_product")
#: For each op of a block, the costs that the fine-tuning method adds to each weight of the op.
_Effects = tuple[tuple[AdapterCost, ...], ...]


def adapter_costs(config: PluginConfig, registry: Registry) -> AdapterCosts:
    """Function that returns a fine-tuning method's costs for a weight; covers methods nested in the method.

    Args:
        config: config of the method.
        registry: registry of the plugins.

    Raises:
        JobError: the method has no cost description.
    """
    entry = registry.find("peft method", config.selector)
    if not isinstance(entry.spec, PeftSpec) or entry.spec.cost is None:
        raise JobError(f"peft: {entry} has no cost description for a prediction; its plugin must give PeftSpec.cost")
    cost: Any = entry.spec.cost.load()

    def inner(config: PluginConfig, *arguments: Any) -> AdapterCost:
        return adapter_costs(config, registry)(*arguments)

    further = (inner,) if entry.spec.composite else ()
    return lambda *arguments: cost(config, *arguments, *further)


def tuned(stages: Sequence[StageCost], cost: AdapterCosts, share: Share) -> list[StageCost]:
    """Costs of stages with a fine-tuning method.

    Frozen weights need no weight gradients, no matrix products for weight gradients, and no inputs kept for these
    products. The first stage has no backward before the first trained parameter; later stages always compute input
    gradients.

    Args:
        stages: costs of all stages without the method.
        cost: costs of the method for each weight.
        share: share of a rank in the work.

    Raises:
        JobError: the model's cost description names no weights.
    """
    return [_stage(stage, cost, share, passes=index > 0) for index, stage in enumerate(stages)]


def _stage(stage: StageCost, cost: AdapterCosts, share: Share, *, passes: bool) -> StageCost:
    groups: dict[tuple[int, _Effects, bool, bool], list[str]] = {}
    for number, name in _in_order(stage.blocks):
        block = stage.blocks[number]
        _check(block)
        effects = tuple(
            tuple(
                cost(f"{name}.{weight.name}" if name else weight.name, weight, op.rows, share) for weight in op.weights
            )
            for op in block.ops
        )
        into = passes
        passes = passes or any(map(_trains, effects))
        groups.setdefault((number, effects, into, passes), []).append(name)
    return replace(
        stage,
        blocks=tuple(
            _block(stage.blocks[number], names, effects, into, passes)
            for (number, effects, into, passes), names in groups.items()
        ),
    )


def _check(block: BlockCost) -> None:
    named = sum(weight.numbers for op in block.ops for weight in op.weights)
    if not named and block.parameters + block.expert_parameters:
        raise JobError(
            f"peft: fine-tuning cannot be predicted, as the model's cost description names no weights of "
            f"'{block.name}'; its plugin must give OpCost.weights"
        )


def _in_order(blocks: Sequence[BlockCost]) -> Iterator[tuple[int, str]]:
    """Index into ``blocks`` and name of each single block, in the forward order that numbers in the names give."""
    first = next((number for number, block in enumerate(blocks) if block.is_block), 0)
    entries = [
        (first if block.is_block else number, _by_number(name), number, name)
        for number, block in enumerate(blocks)
        for name in block.names or ("",) * (block.count if block.is_block else 1)
    ]
    return ((number, name) for _, _, number, name in sorted(entries))


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort key that puts ``layers.10`` after ``layers.9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _trains(effects: Sequence[AdapterCost]) -> bool:
    return any(one.trains or one.parameters for one in effects)


def _block(block: BlockCost, names: Sequence[str], effects: _Effects, into: bool, passes: bool) -> BlockCost:
    """Cost of a block; ``into``: whether its input has a gradient; ``passes``: whether its output has one."""
    ops: list[OpCost] = []
    reached = into
    trained, trained_experts, added, added_experts, released = 0, 0, 0, 0, 0.0
    for op, each in zip(block.ops, effects, strict=True):
        begins = not reached and _trains(each)  # the first op with a backward, whose input needs no gradient
        reached = reached or begins
        ops.append(_op(op, each, reached))
        if begins and op.kind in _PRODUCTS:
            ops[-1] = replace(ops[-1], backward_flops=max(0.0, ops[-1].backward_flops - op.flops))
        released += op.workspace - ops[-1].workspace
        for weight, one in zip(op.weights, each, strict=True):
            of_bank = weight.kind == "bank"
            number = weight.numbers if one.trains else 0
            trained, trained_experts = trained + (not of_bank) * number, trained_experts + of_bank * number
            added, added_experts = added + (not of_bank) * one.parameters, added_experts + of_bank * one.parameters
        terms = sum(each, AdapterCost())
        if terms.parameters:
            ops.append(_terms(terms))
    return replace(
        block,
        ops=tuple(ops),
        count=len(names),
        names=tuple(names) if block.names else (),
        parameters=block.parameters + added,
        expert_parameters=block.expert_parameters + added_experts,
        # A weight that two blocks share is a parameter of one of them only.
        frozen=max(0, block.parameters - trained),
        frozen_experts=max(0, block.expert_parameters - trained_experts),
        input=block.input if passes else 0.0,
        workspace=max(0.0, block.workspace - released) if passes else 0.0,
        backward_exchanges=block.backward_exchanges if passes else (),
        backward_beside=block.backward_beside if passes else (),
    )


def _terms(cost: AdapterCost) -> OpCost:
    """Op with the total cost of the products that a fine-tuning method adds to another op."""
    return OpCost(
        "adapters",
        "product",
        cost.flops,
        cost.backward_flops,
        cost.traffic,
        cost.backward_traffic,
        cost.kept,
    )


def _op(op: OpCost, effects: Sequence[AdapterCost], passes: bool) -> OpCost:
    """Cost of an op whose weights may be frozen; if no gradient passes the op, without costs of the backward."""
    weights = tuple(replace(weight, trains=one.trains) for weight, one in zip(op.weights, effects, strict=True))
    op = replace(op, weights=weights)
    if not passes:
        return replace(op, backward_flops=0.0, backward_traffic=0.0, kept=0.0, workspace=0.0)
    numbers = sum(weight.numbers for weight in weights)
    if not numbers or all(weight.trains for weight in weights):
        return op
    trained = sum(weight.numbers for weight in weights if weight.trains) / numbers
    adapted = any(one.parameters for one in effects)
    if all(weight.kind == "embedding" for weight in weights) and not trained:
        return replace(op, backward_flops=0.0, backward_traffic=0.0, kept=op.kept if adapted else 0.0)
    if op.kind not in _PRODUCTS:
        return op
    left = 1 - (1 - trained) * op.flops / op.backward_flops if op.backward_flops else 0.0
    needed = trained or adapted or any(weight.kind not in ("linear", "bank") for weight in weights)
    return replace(
        op,
        backward_flops=left * op.backward_flops,
        backward_traffic=left * op.backward_traffic,
        kept=op.kept - (0.0 if trained else op.kept_for_weights) if needed else 0.0,
        workspace=op.workspace if trained else 0.0,
    )
