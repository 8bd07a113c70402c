"""Op slots of stages of other ranks, which strategies changed as those here."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from d9d_core.ops import OpSlot
from d9d_core.traits import HasOps
from torch import nn

#: Name of a module, and of the attribute with its slot.
Site = tuple[str, str]


def slot_facts(model: nn.Module) -> dict[Site, Mapping[str, Any]]:
    """Static facts of all slots of a model."""
    return {site: slot.static for site, slot in _slots(model).items()}


def holders_alike(
    model: nn.Module, before: Mapping[Site, Mapping[str, Any]], kinds: Mapping[str, type[nn.Module]], here: Set[str]
) -> list[tuple[str, nn.Module]]:
    """Modules of a model by name, for the choice of kernels, so that each rank plans the same.

    Strategies see the stages of this rank only. So slots elsewhere get the facts that slots in modules of the same
    class have here since then, and modules of a class that has no slot any more are left out.

    Args:
        model: all stages.
        before: :func:`slot_facts` before the strategies.
        kinds: class of each module before the strategies.
        here: names of the modules of this rank's stages.
    """
    slots = _slots(model)
    added: dict[tuple[type[nn.Module], str], dict[str, Any]] = {}
    without: set[type[nn.Module]] = set()
    for (name, attribute), facts in before.items():
        if name not in here:
            continue
        slot = slots.get((name, attribute))
        if slot is None:
            without.add(kinds[name])
        else:
            new = {fact: value for fact, value in slot.static.items() if fact not in facts}
            added.setdefault((kinds[name], attribute), {}).update(new)
    for (name, attribute), slot in slots.items():
        if name not in here and name in kinds:
            slot.static = {**slot.static, **added.get((kinds[name], attribute), {})}
    return [(name, module) for name, module in model.named_modules() if name in here or kinds.get(name) not in without]


def _slots(model: nn.Module) -> dict[Site, OpSlot]:
    return {
        (name, attribute): slot
        for name, module in model.named_modules()
        if isinstance(module, HasOps)
        for attribute, slot in module.op_slots().items()
    }
