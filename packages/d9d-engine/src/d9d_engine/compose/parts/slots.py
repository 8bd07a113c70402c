"""Op slots of stages of other ranks, which strategies changed as those here."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from d9d_core.kernel import OpSlot
from d9d_core.traits import HasOps
from torch import nn

#: Name of a module, and of the attribute with its slot.
Site = tuple[str, str]


def slot_facts(model: nn.Module) -> dict[Site, Mapping[str, Any]]:
    """Static facts of all slots of a model."""
    return {site: slot.static for site, slot in _slots(model).items()}


def holders_alike(
    model: nn.Module, before: Mapping[Site, Mapping[str, Any]], kinds: Mapping[str, type[nn.Module]], here: Set[str]
) -> list[tuple[str, object]]:
    """Holders of the slots of a model by name, for the choice of kernels, so that each rank plans the same.

    Strategies see the stages of this rank only. So slots elsewhere get the facts that slots in modules of the same
    class have here since then, slots that modules of the class have no more are left out, and where another slot took
    the place of one here, one with its facts takes it elsewhere.

    Args:
        model: all stages.
        before: :func:`slot_facts` before the strategies.
        kinds: class of each module before the strategies.
        here: names of the modules of this rank's stages.
    """
    slots = _slots(model)
    added: dict[tuple[type[nn.Module], str], dict[str, Any]] = {}
    without: dict[type[nn.Module], set[str]] = {}
    for (name, attribute), facts in before.items():
        if name not in here:
            continue
        slot = slots.get((name, attribute))
        if slot is None:
            without.setdefault(kinds[name], set()).add(attribute)
        else:
            new = {fact: value for fact, value in slot.static.items() if fact not in facts}
            added.setdefault((kinds[name], attribute), {}).update(new)
    for (name, attribute), slot in slots.items():
        if name not in here and name in kinds:
            slot.static = {**slot.static, **added.get((kinds[name], attribute), {})}
    instead: dict[type[nn.Module], dict[str, OpSlot]] = {}
    for (name, attribute), slot in slots.items():
        if name in here and (name, attribute) not in before and kinds.get(name) in without:
            instead.setdefault(kinds[name], {})[attribute] = slot
    found: list[tuple[str, object]] = []
    for name, module in model.named_modules():
        kind = kinds.get(name)
        if name in here or kind is None or kind not in without:
            found.append((name, module))
            continue
        gone = without[kind]
        left = {attribute: slot for (site, attribute), slot in slots.items() if site == name and attribute not in gone}
        own = {
            fact: value
            for (site, attribute), facts in before.items()
            if site == name and attribute in gone
            for fact, value in facts.items()
        }
        if slots_elsewhere := {**left, **_others(instead.get(kind, {}), own)}:
            found.append((name, _Elsewhere(slots_elsewhere)))
    return found


def ops_elsewhere(model: nn.Module, here: Set[str]) -> frozenset[str]:
    """Ops that strategies may have put in the place of others in stages of other ranks.

    Args:
        model: all stages.
        here: names of the modules of this rank's stages.
    """
    return frozenset(op for (name, _), slot in _slots(model).items() if name not in here for op in slot.instead)


def _others(alike: Mapping[str, OpSlot], facts: Mapping[str, Any]) -> dict[str, OpSlot]:
    """Slots like those that took the place of others in a module of the same class here, with the facts of these."""
    return {
        attribute: OpSlot(slot.op, slot.function, parts=slot.parts, **{**slot.static, **facts})
        for attribute, slot in alike.items()
    }


class _Elsewhere:
    """Slots of a module of another rank's stage, which are chosen for and never called.

    Args:
        slots: by attribute.
    """

    def __init__(self, slots: Mapping[str, OpSlot]) -> None:
        self._slots = slots

    def op_slots(self) -> Mapping[str, OpSlot]:
        return self._slots


def _slots(model: nn.Module) -> dict[Site, OpSlot]:
    return {
        (name, attribute): slot
        for name, module in model.named_modules()
        if isinstance(module, HasOps)
        for attribute, slot in module.op_slots().items()
    }
