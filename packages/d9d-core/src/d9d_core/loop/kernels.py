"""Choosing a backend for every op of a model, once, with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from d9d_core.errors import BuildError
from d9d_core.ops import Decision, OpSignature, OpSlot
from d9d_core.plugin.records import KernelSpec
from d9d_core.plugin.registry import Entry, Registry
from d9d_core.traits import HasOps, modules_with

REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What an op of the model runs with.

    Attributes:
        op: the op.
        sites: names of the modules that call it with this signature.
        backend: the chosen backend.
        supplied_by: its distribution, empty for the reference.
        considered: every backend's answer.
    """

    op: str
    sites: tuple[str, ...]
    backend: str
    supplied_by: str
    considered: Mapping[str, Decision]


def bind_kernels(
    stage: nn.Module, registry: Registry, requested: Mapping[str, str], device: str, dtype: str
) -> list[KernelChoice]:
    """Bind a backend to every op slot of the stage.

    Args:
        stage: the model.
        registry: offers backends.
        requested: op -> backend; one asked for by name must run.
        device: device type.
        dtype: dtype of the tensors the ops meet.

    Raises:
        BuildError: a requested backend refuses, or the model calls no such op.
        PluginError: a requested backend does not exist.
    """
    slots = [
        (f"{name}.{attribute}".lstrip("."), slot)
        for name, module in modules_with(stage, HasOps).items()
        for attribute, slot in module.op_slots().items()
    ]
    ops = sorted({slot.op for _, slot in slots})
    for op in requested:
        if op not in ops:
            raise BuildError(f"kernels.{op}: the model calls no op '{op}'; its ops are: {', '.join(ops) or 'none'}")
    groups: dict[tuple[str, str], list[tuple[str, OpSlot]]] = {}
    for site, slot in slots:
        groups.setdefault((slot.op, repr(sorted(slot.static.items()))), []).append((site, slot))
    return [
        _bind(registry, requested.get(op), same, OpSignature(op, device, dtype, same[0][1].static))
        for (op, _), same in groups.items()
    ]


def _bind(
    registry: Registry, requested: str | None, same: list[tuple[str, OpSlot]], signature: OpSignature
) -> KernelChoice:
    sites = tuple(site for site, _ in same)
    considered = {REFERENCE: Decision(True, "runs everywhere")}
    offers = {entry.spec.name: entry for entry in registry.entries("kernel") if entry.spec.op == signature.op}  # type: ignore[union-attr]
    for name, entry in offers.items():
        considered[name] = _ask(entry, signature)
    if requested is not None:
        chosen = _requested(registry, requested, signature, considered)
    else:
        accepted = {name: d.priority for name, d in considered.items() if d.accept}
        chosen = max(accepted, key=lambda name: (accepted[name], name))
    if chosen == REFERENCE:
        return KernelChoice(signature.op, sites, REFERENCE, "", considered)
    spec = offers[chosen].spec
    assert isinstance(spec, KernelSpec)
    function = spec.build.load()(signature)
    for _, slot in same:
        slot.bind(chosen, function)
    return KernelChoice(signature.op, sites, chosen, str(offers[chosen].origin), considered)


def _requested(registry: Registry, name: str, signature: OpSignature, considered: Mapping[str, Decision]) -> str:
    if name == REFERENCE:
        return name
    distribution, _, backend = name.rpartition("/")
    entry = registry.find("kernel", f"{distribution}/{signature.op}.{backend}".lstrip("/"))
    decision = considered[entry.spec.name] if isinstance(entry.spec, KernelSpec) else None
    if decision is None or not decision.accept:
        reason = decision.reason if decision else "it is no kernel"
        raise BuildError(f"kernels.{signature.op}: '{name}' ({entry.origin}) cannot run here: {reason}")
    return backend


def _ask(entry: Entry, signature: OpSignature) -> Decision:
    assert isinstance(entry.spec, KernelSpec)
    try:
        decision: Decision = entry.spec.supports.load()(signature)
    except ImportError as error:
        return Decision(False, f"it cannot be imported: {error}")
    return decision
