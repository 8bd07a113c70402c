"""Command group of ``d9d``: sub-commands of d9d's own packages and of plugins."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Collection
from functools import cached_property
from typing import Any

import typer
import typer.core

from d9d_core.cli.hints import hints_added
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
    """Command group with the commands of d9d's own packages and of plugins; no plugin replaces a command of d9d."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Command names in help order; a name that several plugins declare is listed once per ``distribution/name``."""
        names = [*self._foundation, *super().list_commands(ctx), *self._selectors]
        return list(dict.fromkeys(name.partition(" ")[0] for name in names))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find the command or group of this name in d9d's own packages and in plugins; ``None`` if there is none.

        Raises:
            PluginError: several plugins declare the command, or the package that provides it is not installed.
        """
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        if cmd_name in self._foundation:
            return _Lazy(cmd_name, self._foundation[cmd_name])
        names = {entry.spec.key for entry in self._registry.entries("command")}
        if any(name.startswith(f"{cmd_name} ") for name in {*names, *KnownPlugins.shipped().names("command")}):
            return _Words(cmd_name, self._registry)
        known = KnownPlugins.shipped()
        elsewhere = known.home("command", cmd_name) or known.third_party("command", cmd_name)
        if cmd_name.rpartition("/")[2] not in names and not elsewhere:
            return None
        return _Lazy(cmd_name, self._registry.find("command", cmd_name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Command that the arguments select. The error for an unknown command suggests similar or equivalent commands.

        Raises:
            click.UsageError: there is no such command.
        """
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            known = (key.partition(" ")[0] for key in KnownPlugins.shipped().names("command"))
            names = {*self.list_commands(ctx), *known}
            if near := difflib.get_close_matches(name, sorted(names)):
                ctx.fail(f"No such command {name!r}. Did you mean {', '.join(map(repr, near))}?")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options of ``d9d`` itself; the error about an unknown option gets a hint."""
        with hints_added():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command. If a plugin tries to exit the process, raise an error that names the plugin."""
        with exits_raised(), exits_are_errors(PluginError), hints_added():
            return super().invoke(ctx)

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run the command line. After Ctrl-C, print ``interrupted``; typer alone would end without a message.

        Raises:
            SystemExit: always, with the exit status.
        """
        try:
            return super().main(*args, **settings)
        except SystemExit as end:
            interrupt = getattr(end.__context__, "__cause__", None)  # typer has converted an interrupt to an Exit
            if isinstance(interrupt, KeyboardInterrupt):
                print(visible(": ".join(["interrupted", *map(str, interrupt.args)])), file=sys.stderr, flush=True)  # noqa: T201
            raise

    @cached_property
    def _registry(self) -> Registry:
        return discover(PluginPolicy.from_environment(os.environ))

    @cached_property
    def _foundation(self) -> dict[str, Entry]:
        """Commands of d9d's own packages other than d9d-core, such as d9d-engine, by name."""
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
    """Commands of d9d's own packages, which are always loaded; no plugin can replace these commands."""
    return [entry for entry in registry.entries("command") if entry.origin.distribution in FOUNDATION]


def shadowed_commands(registry: Registry, own: Collection[str], among: Collection[str] | None = None) -> list[str]:
    """Messages about plugins' commands that cannot run because d9d itself has a command of the same name.

    Args:
        registry: records of the installed plugins.
        own: names of d9d-core's commands.
        among: distributions to examine; all by default.
    """
    taken = {*own, *(entry.spec.key for entry in foundation_commands(registry))}
    return [
        f"command {entry} is hidden by d9d's own; only a new release of the plugin can rename it"
        for entry in registry.entries("command")
        if entry.spec.key in taken
        and entry.origin.distribution not in FOUNDATION
        and (among is None or entry.origin.distribution in among)
    ]


class OpenGroup(typer.core.TyperGroup):
    """Group of d9d-core's commands to which packages add commands, such as ``plugins conform`` of d9d-testing."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of d9d-core's commands, then of the added ones."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in self._added.list_commands(ctx) if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Command of this name; ``None`` if neither d9d-core nor another package has it.

        Raises:
            PluginError: several plugins declare the command, or the package that provides it is not installed.
        """
        return super().get_command(ctx, cmd_name) or self._added.get_command(ctx, cmd_name)

    @cached_property
    def _added(self) -> _Words:
        return _Words(str(self.name), discover(PluginPolicy.from_environment(os.environ)))


class _Words(typer.core.TyperGroup):
    """Group of all packages' commands with the same first word, such as ``new`` in ``d9d new job``."""

    def __init__(self, word: str, registry: Registry) -> None:
        found = (entry.spec.key for entry in registry.entries("command"))
        self._registry = registry
        self._second = sorted({key.partition(" ")[2] for key in found if key.startswith(f"{word} ")})
        summaries = (self._entry(word, second).spec.summary for second in self._second)
        super().__init__(name=word, help=" ".join(summaries), no_args_is_help=True)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's signature
        """Words after the group's name, one for each installed command of the group."""
        return self._second

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - likewise
        """Command of this second word; ``None`` if neither an installed package nor a package of d9d has it.

        Raises:
            PluginError: several plugins declare the command, or the package that provides it is not installed.
        """
        key = f"{self.name} {cmd_name}"
        if cmd_name not in self._second and KnownPlugins.shipped().home("command", key) is None:
            return None
        return _Lazy(cmd_name, self._entry(str(self.name), cmd_name))

    def _entry(self, word: str, second: str) -> Entry:
        return self._registry.find("command", f"{word} {second}")


class _Lazy(typer.core.TyperCommand):
    """Command that imports the plugin's application when it runs and passes on all arguments, also ``--help``."""

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
        # The context is a child of d9d's, so usage errors, exit codes and Ctrl-C are handled as for d9d's own commands.
        with command.make_context(self.name, list(ctx.args), parent=ctx.parent) as inner:
            if self._entry.origin.distribution in FOUNDATION:
                return command.invoke(inner)
            try:
                return command.invoke(inner)
            except SystemExit as end:  # a plugin's own command may exit
                if isinstance(end.code, str):
                    print(visible(end.code), file=sys.stderr)  # noqa: T201
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
                raise typer.Exit(code) from end
