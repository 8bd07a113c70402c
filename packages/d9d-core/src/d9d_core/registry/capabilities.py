"""Capabilities: tokens by which components state whether they fit together, checked without torch.

mesh:AXIS            the axis has more than one rank
model:TRAIT          the model declares the trait
strategy:NAME        the job contains the strategy
device:TYPE[>=X.Y]   training runs on this device type, with at least this compute capability
import:MODULE        the Python module is installed; for ``package.module``, the check does not import the package
other tokens         declared by a plugin through ``d9d_capabilities`` and provided by a selected record

An undeclared token is an error: it is misspelt, or a plugin is missing.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from d9d_core.plugin import ANCHORS, POSITIONS, Spec, StrategySpec
from d9d_core.registry.entries import Entry
from d9d_core.registry.registry import Registry

__all__ = ["MESH_AXES", "MODEL_TRAITS"]

#: Axes of a mesh, including ``ep``, which reuses ranks of other axes.
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
#: Traits that core defines; see :mod:`d9d_core.traits`.
MODEL_TRAITS = (
    "late_init",
    "blocks",
    "tensor_parallel",
    "context_parallel",
    "pipeline",
    "ops",
    "divisible",
    "adjacent_weights",
    "experts",
    "banks",
    "losses",
    "tallies",
    "adapts",
    "observes",
    "layout_dependent",
    "split_backward",
)
#: Beginning of the advice on how to install a library that no dependency of its plugin installs.
BY_HAND = "see the documentation"
_UNDECLARED = "no plugin declares the token '{}'; it may be misspelt, or a plugin is missing"
_DEVICE = re.compile(r"device:([a-z]+)(?:>=(\d+)\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Chosen:
    """Record that a field of the job selects.

    Attributes:
        where: field of the job.
        entry: the record and its origin.
        inner: selected records of nested configs, each with its config.
        of_part: whether the config names modules that the component acts on, instead of the whole model.
    """

    where: str
    entry: Entry
    inner: Sequence[tuple[Chosen, object]] = field(default=(), compare=False)
    of_part: bool = field(default=False, compare=False)

    @property
    def spec(self) -> Spec:
        """The selected record."""
        assert isinstance(self.entry.spec, Spec)
        return self.entry.spec

    def family(self) -> Iterator[Chosen]:
        """This record and the records of all nested components."""
        yield self
        for inner, _ in self.inner:
            yield from inner.family()


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Facts against which capability tokens of a job are checked: sizes of the mesh, and the device.

    Attributes:
        mesh: axis -> size.
        device: device type; ``None`` if unknown (``d9d check`` on another machine).
        compute_capability: compute capability of the device, if it has one.
    """

    mesh: Mapping[str, int] = field(default_factory=dict)
    device: str | None = None
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on a record's capability token: satisfied, unsatisfied, or undecided (``None``), with the reason."""

    chosen: Chosen
    token: str
    satisfied: bool | None
    reason: str


def missing_modules(spec: Spec) -> list[str]:
    """Modules that a record requires by ``import:`` tokens and that are not installed."""
    modules = [token.partition(":")[2] for token in sorted(spec.requires) if token.startswith("import:")]
    return [name for name in modules if not _installed(name)]


def _installed(module: str) -> bool:
    """Whether a module is installed. Parent packages are not imported: that could be slow or run untrusted code."""
    name, *inner = module.split(".")
    spec = importlib.util.find_spec(name)
    for part in inner:
        places = None if spec is None else spec.submodule_search_locations
        name = f"{name}.{part}"
        if name in sys.modules:
            spec = getattr(sys.modules[name], "__spec__", None)
        else:
            # The finder gets the last part of the name: for a dotted name, it would expect imported parent packages.
            spec = None if places is None else PathFinder.find_spec(part, list(places))
    return spec is not None


def how_to_get(distribution: str | None, module: str) -> str:
    """Advice on installing a module: by pip, if the distribution depends on it on this platform, or by hand."""
    package = canonicalize_name(module.partition(".")[0])
    for requirement in _requirements(distribution):
        name = canonicalize_name(requirement.name)
        if name == package or name.startswith(f"{package}-"):
            if requirement.marker is None or _holds(requirement.marker):
                return f"'pip install {distribution}' installs it"
            return f"{distribution} omits it here: {requirement.name} is supported only where {requirement.marker}"
    return f"{BY_HAND} of {distribution} for how to install it"


def missing_extras(distribution: str) -> dict[str, list[str]]:
    """Extras of a distribution that lack packages here: name of the extra -> packages that are not installed."""
    try:
        extras = metadata(distribution).get_all("Provides-Extra") or []
        needed = [Requirement(line) for line in requires(distribution) or []]
    except (PackageNotFoundError, ValueError, InvalidRequirement):
        return {}
    found = {}
    for extra in extras:
        own = [one for one in needed if one.marker and not _holds(one.marker) and one.marker.evaluate({"extra": extra})]
        if missing := [one.name for one in own if not _is_installed(one.name)]:
            found[extra] = missing
    return found


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _requirements(distribution: str | None) -> list[Requirement]:
    """Requirements in a distribution's metadata, without the requirements of its extras."""
    try:
        lines = requires(distribution or "") or []
        return [Requirement(line) for line in lines if "extra ==" not in line]
    except (PackageNotFoundError, ValueError, InvalidRequirement):
        return []


def _holds(marker: Marker) -> bool:
    return marker.evaluate({"extra": ""})


def judge(chosen: Sequence[Chosen], registry: Registry, circumstances: Circumstances) -> list[Verdict]:
    """Check every capability token that the selected records require, conflict with or provide."""
    judge_ = Judge(chosen, registry, circumstances)
    return [verdict for item in chosen for verdict in judge_.verdicts(item)]


def order(strategies: Iterable[Chosen]) -> list[Chosen]:
    """Sort strategies by order of application: anchor, then before/at/after, then order in the job."""

    def key(item: Chosen) -> tuple[int, int]:
        assert isinstance(item.spec, StrategySpec)
        return ANCHORS.index(item.spec.anchor), POSITIONS.index(item.spec.position)

    return sorted(strategies, key=key)


class Judge:
    """Check of the capability tokens of a record against the selected records of a job.

    Args:
        chosen: selected records of the job.
        registry: registry of the declared tokens.
        circumstances: mesh and device of the job.
    """

    def __init__(self, chosen: Sequence[Chosen], registry: Registry, circumstances: Circumstances) -> None:
        self._chosen = chosen
        self.circumstances = circumstances
        self._declared = {entry.spec.key: entry.spec.summary for entry in registry.entries("capability")}
        self._provided: dict[str, str] = {}
        for item in chosen:
            name = str(item.entry)
            for token in item.spec.provides:
                self._provided.setdefault(token, name)
            if item.entry.kind.name == "strategy":
                self._provided.setdefault(f"strategy:{item.spec.name}", item.where)

    def verdicts(self, item: Chosen) -> list[Verdict]:
        """Verdicts on tokens that a record requires or conflicts with, and on undeclared tokens that it provides."""
        return [
            *(self._required(item, token) for token in sorted(item.spec.requires)),
            *(self._refused(item, token) for token in sorted(item.spec.conflicts)),
            *(self._undeclared(item, token) for token in sorted(item.spec.provides) if not self._known(token)),
        ]

    def _required(self, item: Chosen, token: str) -> Verdict:
        satisfied, reason = self._holds(token)
        if satisfied is False:
            reason = self._complaint(item, token, self._advice(token) or reason)
        return Verdict(item, token, satisfied, reason)

    def _undeclared(self, item: Chosen, token: str) -> Verdict:
        return Verdict(item, token, False, f"{item.entry.kind.name} {item.entry}: {_UNDECLARED.format(token)}")

    def _refused(self, item: Chosen, token: str) -> Verdict:
        if not self._known(token):
            return self._undeclared(item, token)
        holds, reason = self._holds(token)
        if holds and item.of_part and all(other.of_part for other in self._chosen if _is_strategy(other, token)):
            return Verdict(item, f"not {token}", True, f"{reason} acts on other modules of the model, as 'match' says")
        name = f"{item.entry.kind.name} {item.entry}"
        text = f"{name} conflicts with '{token}', which holds here: {reason}" if holds else f"not there: {reason}"
        return Verdict(item, f"not {token}", None if holds is None else not holds, text)

    def _complaint(self, item: Chosen, token: str, reason: str) -> str:
        subject = f"{item.entry.kind.name} '{item.spec.name}'"
        namespace, _, word = token.partition(":")
        if namespace == "model":
            models = [c for c in self._chosen if c.entry.kind.name == "model"]
            traits = {c: sorted(t.partition(":")[2] for t in c.spec.provides if t.startswith("model:")) for c in models}
            has = "; ".join(
                f"{c.spec.name} ({c.entry.origin}) has: {', '.join(t) or 'none'}" for c, t in traits.items()
            )
            return f"{subject} needs model trait '{word}'; {has or 'the job has no model'}"
        how = f"; {how_to_get(item.entry.origin.distribution, word)}" if namespace == "import" else ""
        return f"{subject} needs {token}: {reason}{how}"

    def _holds(self, token: str) -> tuple[bool | None, str]:
        if token in self._provided:
            return True, self._provided[token]
        namespace, _, word = token.partition(":")
        if namespace == "mesh" and word in MESH_AXES:
            size = self.circumstances.mesh.get(word, 1)
            return size > 1, f"mesh.{word} is {size}"
        if namespace == "device" and (match := _DEVICE.fullmatch(token)):
            return self._device(match)
        if namespace == "import" and word:
            found = _installed(word)
            return found, f"module {word} is " + ("installed" if found else "not installed")
        if namespace == "strategy":
            return False, f"the job has no strategy {word}"
        if namespace == "model" and word in MODEL_TRAITS:
            return False, "the model does not declare it"
        if token in self._declared:
            return False, "no component of the job provides it"
        return False, _UNDECLARED.format(token)

    def _advice(self, token: str) -> str:
        """Advice on how to satisfy a missing token; empty if there is no advice."""
        namespace, _, word = token.partition(":")
        if namespace == "mesh" and word in MESH_AXES:
            return f"{self._holds(token)[1]}; set mesh.{word} to more than 1"
        if namespace == "strategy":
            return f"add {{name: {word}}} to parallel"
        return self._declared.get(token, "")

    def _known(self, token: str) -> bool:
        namespace, _, word = token.partition(":")
        core = {
            "mesh": word in MESH_AXES,
            "model": word in MODEL_TRAITS,
            "strategy": bool(word),
            "device": bool(_DEVICE.fullmatch(token)),
            "import": bool(word),
        }
        return core.get(namespace, False) or token in self._declared

    def _device(self, match: re.Match[str]) -> tuple[bool | None, str]:
        kind, major, minor = match.groups()
        device, has = self.circumstances.device, self.circumstances.compute_capability
        if device is None:
            return None, "the device is unknown here"
        if device != kind:
            return False, f"training runs on {device}"
        if major and (has is None or has < (int(major), int(minor))):
            return False, f"this device has compute capability {'.'.join(map(str, has)) if has else 'unknown'}"
        return True, f"training runs on {device}"


def _is_strategy(chosen: Chosen, token: str) -> bool:
    return chosen.entry.kind.name == "strategy" and token == f"strategy:{chosen.spec.name}"
