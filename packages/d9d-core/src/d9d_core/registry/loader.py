"""Discovery of installed plugins: one scan of entry points, filtered before import; plugins load independently.

The result does not depend on the order in which distributions are found: they are sorted, and a name that two plugins
declare is an error when it is used.
"""

from __future__ import annotations

import importlib

from d9d_core.errors import PluginError
from d9d_core.registry import installed
from d9d_core.registry.collect import Collector
from d9d_core.registry.entries import Problem, plugin_error
from d9d_core.registry.known import KnownPlugins
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_core.registry.single_file import file_plugin

__all__ = ["discover"]


def discover(policy: PluginPolicy | None = None, *, known: KnownPlugins | None = None) -> Registry:
    """Load d9d's own packages, the other installed plugins that ``policy`` allows, and the files that ``policy`` names.

    Raises:
        PluginError: the policy names a plugin that is not installed, or blocks one of d9d's own packages; a required
            plugin is missing or broken; a single-file plugin cannot be loaded; or ``policy.strict`` is true and any
            plugin has a problem.
    """
    policy = policy or PluginPolicy()
    collector = Collector(known or KnownPlugins.shipped())
    candidates = installed.scan()
    policy.check(candidate.origin.distribution for candidate in candidates)
    for candidate in candidates:
        origin, damage = candidate.origin, candidate.damage
        if reason := policy.refusal(origin.distribution):
            collector.blocked[origin.distribution] = reason
        elif damage is not None:
            collector.refuse(Problem(origin, f"has damaged metadata: {damage!r}; install it again", damage))
        else:
            collector.add(origin, lambda module=origin.module: importlib.import_module(module), light=True)  # type: ignore[misc]
    for path in policy.files:
        collector.add(*file_plugin(path), must=True)
    registry = Registry.collected(collector)
    _enforce(policy, registry)
    return registry


def _enforce(policy: PluginPolicy, registry: Registry) -> None:
    loaded = {origin.distribution for origin in registry.plugins}
    for distribution in sorted(policy.require - loaded):
        broken = next((p for p in registry.problems if p.origin.distribution == distribution), None)
        if broken:
            raise plugin_error(f"plugins.require: the required plugin {broken}", broken.error) from broken.error
        reason = registry.blocked.get(distribution)
        hint = (
            f"is not loaded: {reason}" if reason else f"is not installed; install it with: pip install {distribution}"
        )
        raise PluginError(f"plugins.require: {distribution} {hint}")
    if not policy.strict:
        return
    from d9d_core.registry.api_check import api_findings  # reads the sources of all plugins

    texts = [str(problem) for problem in registry.problems] + registry.conflicts()
    texts += [str(finding) for finding in api_findings(registry)]
    if texts:
        raise PluginError("--strict-plugins: " + "; ".join(texts))
