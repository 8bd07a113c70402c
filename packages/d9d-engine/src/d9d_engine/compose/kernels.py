"""Choice of a kernel backend for every op of a model, with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from d9d_core.components.contract import type_of
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import BuildError
from d9d_core.job_file.sections.kernels import KernelRule
from d9d_core.kernel import Decision, OpSignature, OpSlot
from d9d_core.plugin import KernelSpec
from d9d_core.registry.capabilities import Chosen, Verdict
from d9d_core.registry.entries import Entry, plugin_error
from d9d_core.registry.registry import REFERENCE, Registry
from d9d_core.strategy import is_inside
from d9d_core.traits import HasOps
from torch import nn

from d9d_engine.compose.answers import asked, best

Judgement = Callable[[Chosen], Iterable[Verdict]]
#: Site of an op slot: name of the module, name of its attribute.
Site = tuple[str, str]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Kernel backend chosen for an op of the model.

    Attributes:
        op: name of the op.
        sites: op slots, as module name and attribute, that use this backend.
        backend: name of the chosen backend.
        supplied_by: distribution of the backend; empty for the reference.
        requested: whether the job names a backend for the op in ``kernels``.
        considered: backend -> its answer; ``distribution/backend`` where several distributions use one name.
        compiled: whether the modules are compiled.
        rule: index of the rule in ``kernels`` that names the backend; ``None`` without rules.
    """

    op: str
    sites: tuple[str, ...]
    backend: str
    supplied_by: str
    requested: bool
    considered: Mapping[str, Decision]
    compiled: bool = False
    rule: int | None = None


def bind_kernels(
    holders: Iterable[tuple[str, object]],
    registry: Registry,
    requested: Mapping[str, str | Sequence[KernelRule]],
    device: str,
    dtype: str,
    judge: Judgement,
    deterministic: bool = False,
    compiled: Collection[str] = (),
    outside_graph: Collection[str] = (),
    documents: bool | None = None,
    checkpointed: Collection[str] = (),
    storing: Collection[str] = (),
) -> list[KernelChoice]:
    """Choose a kernel for every op slot, which is a call of an op with a replaceable kernel, and bind the kernel to it.

    Without a request, the accepting backend with the highest priority above 0 is chosen, else the reference. The
    reference is also chosen if the job requests a backend for an op that this op contains, because that request would
    have no effect otherwise. If a slot refuses the function of a backend, the next backend is tried.

    Args:
        holders: (name, object) pairs that may have op slots: modules of a model, or an optimizer.
        registry: registry with the backends.
        requested: op -> name of the backend, or rules for some modules; a requested backend must run.
        device: device type.
        dtype: dtype of the ops' inputs.
        judge: evaluates the capabilities that a backend requires or excludes.
        deterministic: refuse backends that are not declared deterministic.
        compiled: names of compiled modules; submodules are included.
        outside_graph: names of modules inside compiled modules whose ops run outside the graph; submodules are
            included.
        documents: whether samples hold several documents; ``None`` if unknown.
        checkpointed: names of modules under activation checkpointing; submodules are included.
        storing: names of the checkpointed modules that store outputs of torch operators; submodules are included.

    Raises:
        BuildError: a requested backend refuses the op, a slot refuses a requested backend, a rule matches no module, or
            a module that another rule matches, or a backend's ``build`` returns no function.
        PluginError: a requested backend does not exist, or the ``build`` of a chosen backend fails.
    """
    slots = [
        (
            name,
            f"{name}.{attribute}".lstrip("."),
            slot,
            (
                _is_inside(name, compiled) and not _is_inside(name, outside_graph),
                *(_is_inside(name, modules) for modules in (checkpointed, storing)),
            ),
        )
        for name, holder in holders  # several stages may have modules with the same name
        if isinstance(holder, HasOps)
        for attribute, slot in holder.op_slots().items()
    ]
    requests = _Requests(requested, [(name, slot) for name, _, slot, _ in slots])
    groups: dict[tuple[str, tuple[bool, ...], str, _Request], list[tuple[str, OpSlot]]] = {}
    for name, site, slot, inside in slots:
        key = slot.op, inside, repr(sorted(slot.static.items())), requests.of(name, slot)
        groups.setdefault(key, []).append((site, slot))
    offers = {op: _offers(registry, op, judge, deterministic) for op in dict.fromkeys(op for op, *_ in groups)}
    choices = []
    for (op, inside, _, request), same in groups.items():
        signature = OpSignature(op, device, dtype, same[0][1].static, inside[0], documents, *inside[1:])
        choices.append(_bind(registry, request, same, signature, offers[op]))
    return choices


def refuse_unused(requested: Iterable[str], choices: Iterable[KernelChoice], elsewhere: Collection[str] = ()) -> None:
    """Refuse requests for ops that the job does not call.

    Args:
        requested: ops for which the job names a backend.
        choices: kernel choices of the model, and of the optimizer if there is one.
        elsewhere: further ops that stages of other ranks may call; requests for these are accepted.

    Raises:
        BuildError: a request has no effect.
    """
    ops = sorted({choice.op for choice in choices})
    for op in requested:
        if op not in ops and op not in elsewhere:
            raise BuildError(
                f"kernels.{op}: the job calls no op '{op}'; remove it, or name an op of the job: {', '.join(ops)}"
            )


class _Request(NamedTuple):
    """Request of the job for an op in one module.

    Attributes:
        backend: name of the requested backend; ``None`` for the automatic choice.
        rule: index of the rule that names the backend; ``None`` without rules.
        part: an op that this op contains, and for which the job names a backend here; ``None`` without one.
    """

    backend: str | None = None
    rule: int | None = None
    part: str | None = None


class _Requests:
    """Requests of a job, by op and module.

    Args:
        requested: op -> name of the backend, or rules for some modules.
        slots: op slots with the names of their modules.

    Raises:
        BuildError: a pattern matches no module with a slot of its op, or two rules match one module.
    """

    def __init__(
        self, requested: Mapping[str, str | Sequence[KernelRule]], slots: Sequence[tuple[str, OpSlot]]
    ) -> None:
        self._requested = requested
        for op, request in requested.items():
            # A module may call this op instead of an op that has it among its parts, so a rule may name that module.
            names = list(dict.fromkeys(name for name, slot in slots if op == slot.op or op in slot.parts))
            if names and not isinstance(request, str):
                _check_rules(op, request, names)

    def of(self, name: str, slot: OpSlot) -> _Request:
        """Request for an op slot of a module."""
        backend, rule = self._named(name, slot.op)
        part = next((part for part in slot.parts if self._named(name, part)[0] is not None), None)
        return _Request(backend, rule, part)

    def _named(self, name: str, op: str) -> tuple[str | None, int | None]:
        """Requested backend of an op in a module, and the index of its rule."""
        request = self._requested.get(op)
        if request is None or isinstance(request, str):
            return request, None
        found = ((rule.backend, index) for index, rule in enumerate(request) if _matches(rule.match, name))
        return next(found, (None, None))


def _check_rules(op: str, rules: Sequence[KernelRule], names: Sequence[str]) -> None:
    """Check that each pattern of the rules matches a module, and that no module is matched twice.

    Raises:
        BuildError: a rule has no effect, or is ambiguous.
    """
    for index, rule in enumerate(rules):
        for pattern in rule.match:
            if not any(_matches([pattern], name) for name in names):
                raise BuildError(
                    f"kernels.{op}[{index}].match: the pattern {pattern!r} matches no module with this op; modules "
                    f"with similar names: {', '.join(get_close_matches(pattern, names, 3, 0.0))}"
                )
    for name in names:
        several = [index for index, rule in enumerate(rules) if _matches(rule.match, name)]
        if len(several) > 1:
            first, second = (f"kernels.{op}[{index}] ({rules[index].backend})" for index in several[:2])
            raise BuildError(f"{first} and {second} both match {name}; change the patterns so that one of them does")


def _matches(patterns: Sequence[str], name: str) -> bool:
    """Whether a module or a module around it has a name that matches a pattern; see ``d9d_core.strategy``."""
    parts = name.split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return is_inside(name, [one for one in around if one and any(fnmatchcase(one, each) for each in patterns)])


@dataclass(frozen=True, slots=True)
class _Offer:
    """Backend of an op; ``refusal`` says why the backend cannot run for any signature, empty if it may run."""

    name: str
    entry: Entry
    spec: KernelSpec
    refusal: str


def _offers(registry: Registry, op: str, judge: Judgement, deterministic: bool) -> list[_Offer]:
    """Backends of an op, each with the result of the checks that do not depend on a signature."""
    offers = []
    for entry in registry.kernels(op):
        spec = entry.spec
        assert isinstance(spec, KernelSpec)
        if deterministic and not spec.deterministic:
            refusal = "is not deterministic, and the job sets 'deterministic'"
        else:
            verdicts = judge(Chosen(f"kernels.{op}", entry))
            refusal = "; ".join(verdict.reason for verdict in verdicts if verdict.satisfied is False)
        offers.append(_Offer(spec.name, entry, spec, refusal))
    return offers


def _is_inside(name: str, modules: Collection[str]) -> bool:
    """Whether a module is one of these modules or a submodule; the empty name means the whole model."""
    parts = name.split(".")
    return "" in modules or any(".".join(parts[:count]) in modules for count in range(1, len(parts) + 1))


def _bind(
    registry: Registry,
    request: _Request,
    same: list[tuple[str, OpSlot]],
    signature: OpSignature,
    offers: Sequence[_Offer],
) -> KernelChoice:
    sites = tuple(dict.fromkeys(site for site, _ in same))
    requested, rule, part = request
    asked, where = requested is not None, _place(signature.op, request)
    answers = {offer.entry: _ask(offer, signature) for offer in offers}
    if part is not None and not asked:
        text = f"the job asks for kernels.{part}, an op that this one contains"
        answers = {entry: Decision(one.accept, text, 0) if one.accept else one for entry, one in answers.items()}
    if requested is not None:
        chosen = registry.find_kernel(signature.op, requested)
        if chosen is not None and not answers[chosen].accept:
            text = f"'{requested}' ({chosen.origin}) cannot run here: {answers[chosen].reason}"
            raise BuildError(f"{where}: {text}")
        function = None if chosen is None else _built(chosen, signature)
    else:
        function = None
        while (chosen := best(answers)) is not None:
            function = _built(chosen, signature)
            refusal = next((why for _, slot in same if (why := slot.refusal(function)) is not None), None)
            if refusal is None:
                break
            answers[chosen] = Decision(False, refusal)
    names = Counter(offer.name for offer in offers)
    considered = {REFERENCE: Decision(True, "runs everywhere")}
    considered |= {
        (one.name if names[one.name] == 1 else f"{one.entry.origin.distribution}/{one.name}"): answers[one.entry]
        for one in offers
    }
    if chosen is None or function is None:
        return KernelChoice(signature.op, sites, REFERENCE, "", asked, considered, signature.compiled, rule)
    assert isinstance(chosen.spec, KernelSpec)
    for _, slot in same:
        slot.bind(chosen.spec.name, function)
        slot.operators = chosen.spec.operators
    origin = str(chosen.origin)
    return KernelChoice(signature.op, sites, chosen.spec.name, origin, asked, considered, signature.compiled, rule)


def _place(op: str, request: _Request) -> str:
    """Place in the job file of the request for an op."""
    return f"kernels.{op}" if request.rule is None else f"kernels.{op}[{request.rule}]"


def _built(chosen: Entry, signature: OpSignature) -> Callable[..., Any]:
    """Build the function of a backend."""
    assert isinstance(chosen.spec, KernelSpec)
    try:
        function: object = chosen.spec.build.load()(signature)
    except FOREIGN_FAILURES as error:
        text = (
            f"kernels.{signature.op}: '{chosen.spec.name}' ({chosen.origin}) accepted, but {chosen.spec.build} failed"
        )
        raise plugin_error(f"{text}: {error!r}; choose another backend with 'kernels'", error) from error
    if not callable(function):
        text = f"kernels.{signature.op}: {chosen.spec.build} of {chosen} returned {type_of(function)}, not a function"
        raise BuildError(text)
    return function


def _ask(offer: _Offer, signature: OpSignature) -> Decision:
    return Decision(False, offer.refusal) if offer.refusal else asked(offer.spec, signature)


def slot_facts(model: nn.Module) -> dict[Site, Mapping[str, Any]]:
    """Static facts of all op slots of a model, by module name and attribute."""
    return {site: slot.static for site, slot in _slots(model).items()}


def holders_alike(
    model: nn.Module, before: Mapping[Site, Mapping[str, Any]], kinds: Mapping[str, type[nn.Module]], here: Set[str]
) -> list[tuple[str, object]]:
    """List the holders of the model's op slots after strategies, with equal slots on all ranks.

    Strategies change this rank's stages only. For the stages of other ranks, the same changes are assumed in modules
    of the same class: their slots get the added facts; removed slots are removed, and replaced slots are replaced.

    Args:
        model: all stages.
        before: :func:`slot_facts` from before the strategies.
        kinds: class of each module before the strategies.
        here: names of the modules of this rank's stages.
    """
    if here >= dict(model.named_modules()).keys():
        return list(model.named_modules())
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
    """Ops that strategies may have substituted in stages of other ranks.

    Args:
        model: all stages.
        here: names of the modules of this rank's stages.
    """
    if here >= dict(model.named_modules()).keys():
        return frozenset()
    return frozenset(op for (name, _), slot in _slots(model).items() if name not in here for op in slot.instead)


def _others(alike: Mapping[str, OpSlot], facts: Mapping[str, Any]) -> dict[str, OpSlot]:
    """Slots that another rank's module probably has: copies of slots that strategies added to modules of its class."""
    # copy() keeps the class of a slot, because a subclass may refuse functions.
    found = {attribute: copy(slot) for attribute, slot in alike.items()}
    for slot in found.values():
        slot.static = {**slot.static, **facts}
    return found


class _Elsewhere:
    """Op slots of a module on another rank: they take part in the choice of kernels and are never called.

    Args:
        slots: attribute -> slot.
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
