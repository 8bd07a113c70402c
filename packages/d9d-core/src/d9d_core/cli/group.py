"""Command group of ``d9d``: sub-commands of core, of the foundation and of plugins."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Collection
from functools import cached_property
from typing import Any

import typer
import typer.core

from d9d_core.cli.interrupts import interrupts_deferred
from d9d_core.containment import FOREIGN_FAILURES, exits_raised
from d9d_core.errors import PluginError
from d9d_core.failures import exits_are_errors
from d9d_core.plugin import CommandSpec
from d9d_core.registry.capabilities import missing_modules
from d9d_core.registry.entries import Entry, plugin_error, shown
from d9d_core.registry.known import KnownPlugins
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import FOUNDATION, PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_core.untrusted import visible


class PluginGroup(typer.core.TyperGroup):
    """Group of the commands of core, of the rest of the foundation, and of plugins; the foundation's always win."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order in which help shows them; a name of several plugins with its distributions."""
        return [*self._foundation, *super().list_commands(ctx), *self._selectors]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Command of this name, from core or from a plugin.

        Raises:
            PluginError: several plugins declare it, or the package that offers it is not installed.
        """
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        if cmd_name in self._foundation:
            return _Lazy(cmd_name, self._foundation[cmd_name])
        names = {entry.spec.key for entry in self._registry.entries("command")}
        if cmd_name.rpartition("/")[2] not in names and KnownPlugins.shipped().home("command", cmd_name) is None:
            return None
        return _Lazy(cmd_name, self._registry.find("command", cmd_name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Command that the arguments ask for; an unknown name gets near names, which typer knows of core's only.

        Raises:
            click.UsageError: there is no such command.
        """
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            names = {*self.list_commands(ctx), *KnownPlugins.shipped().names("command")}
            if near := difflib.get_close_matches(name, sorted(names)):
                ctx.fail(f"No such command {name!r}. Did you mean {', '.join(map(repr, near))}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command; a component that wants to end the process is an error that names it."""
        with exits_raised(), exits_are_errors(PluginError):
            return super().invoke(ctx)

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run the command line; Ctrl-C gets a word, wherever it comes, where typer ends without one.

        Raises:
            SystemExit: it has ended.
        """
        try:
            return super().main(*args, **settings)
        except SystemExit as end:
            interrupt = getattr(end.__context__, "__cause__", None)  # typer has made an Exit of it
            if isinstance(interrupt, KeyboardInterrupt):
                print(visible(": ".join(["interrupted", *map(str, interrupt.args)])), file=sys.stderr, flush=True)  # noqa: T201
            raise

    @cached_property
    def _registry(self) -> Registry:
        return discover(PluginPolicy.from_environment(os.environ))

    @cached_property
    def _foundation(self) -> dict[str, Entry]:
        """Commands of the packages that are always loaded."""
        return {entry.spec.key: entry for entry in foundation_commands(self._registry)}

    @cached_property
    def _selectors(self) -> list[str]:
        own = self.commands.keys() | self._foundation.keys()
        entries = [entry for entry in self._registry.entries("command") if entry.spec.key not in own]
        names = [entry.spec.key for entry in entries]
        return sorted(
            entry.spec.key if names.count(entry.spec.key) == 1 else f"{entry.origin.distribution}/{entry.spec.key}"
            for entry in entries
        )


def foundation_commands(registry: Registry) -> list[Entry]:
    """Commands of the packages that are always loaded; no plugin can replace them."""
    return [entry for entry in registry.entries("command") if entry.origin.distribution in FOUNDATION]


def shadowed_commands(registry: Registry, own: Collection[str], among: Collection[str] | None = None) -> list[str]:
    """One message per plugin's command that cannot run because d9d itself has one of that name.

    Args:
        registry: what is installed.
        own: core's commands.
        among: distributions whose commands are looked at; all by default.
    """
    taken = {*own, *(entry.spec.key for entry in foundation_commands(registry))}
    return [
        f"command {entry} is hidden by d9d's own; only a new release of the plugin can rename it"
        for entry in registry.entries("command")
        if entry.spec.key in taken
        and entry.origin.distribution not in FOUNDATION
        and (among is None or entry.origin.distribution in among)
    ]


class _Lazy(typer.core.TyperCommand):
    """A command that imports the plugin's application when it runs and hands all arguments on, ``--help`` included."""

    def __init__(self, name: str, entry: Entry) -> None:
        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
        super().__init__(name, context_settings=settings, help=entry.spec.summary, add_help_option=False)
        self._entry = entry

    def invoke(self, ctx: Any) -> Any:
        """Run the plugin's application."""
        assert isinstance(self._entry.spec, CommandSpec)
        if missing := missing_modules(self._entry.spec):
            names = " ".join(missing)
            raise PluginError(f"command {self._entry} needs {names}; install it with: pip install {names}")
        reference = self._entry.spec.app
        try:
            with interrupts_deferred():
                app = reference.load()
        except FOREIGN_FAILURES as error:
            text = f"command {self._entry}: its app {reference} failed to load: {shown(error)}"
            raise plugin_error(text, error) from error
        command = typer.main.get_command(app)
        # In a context below d9d's, so that usage errors, exit codes and Ctrl-C reach d9d as those of its own commands.
        with command.make_context(self.name, list(ctx.args), parent=ctx.parent) as inner:
            if self._entry.origin.distribution in FOUNDATION:
                return command.invoke(inner)
            try:
                return command.invoke(inner)
            except SystemExit as end:  # its own command may end as it likes
                if isinstance(end.code, str):
                    print(visible(end.code), file=sys.stderr)  # noqa: T201
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
                raise typer.Exit(code) from end
